/* safe_softmax.c -- where(isnan(s), 0, s) with s = softmax(x)  ->  MaskedSoftmax(x)
 *
 * So torch's exporter writes attention with a mask: a row whose every score is masked by -inf has no softmax, and gets
 * zeros. As written the gradient of such a row is 0 * NaN, and one left-padded sentence turns every weight into NaN;
 * PyTorch's own operator gives zeros, and so does MaskedSoftmax. */
#include "passes/pipeline.h"

enum { X, S };

static status to_masked_softmax(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return node_is_along_last_axis(v[S]->def) ? emit(g, out, "MaskedSoftmax", v[X]) : OK;
}

static const rule rules[] = {
    {OP("Where", OP("IsNaN", VAR(S)), CONST(0), OP_AS(S, "Softmax", VAR(X))), to_masked_softmax},
    {0},
};

const pass_def safe_softmax = {.name = "safe_softmax", .stage = BEFORE_GRADIENT, .level = 0, .rules = rules};
