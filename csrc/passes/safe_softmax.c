/* safe_softmax.c -- where(isnan(s), 0, s) with s = softmax(x)  ->  SafeSoftmax(x)
 *
 * So the exporter writes attention with a mask: a row whose every score is masked by -inf has no softmax, and gets
 * zeros. As written the gradient of such a row is 0 * NaN, and one left-padded sentence turns every weight into NaN;
 * PyTorch's own operator gives zeros. SafeSoftmax does too: zeros for a row of -inf, and a gradient of zeros. */
#include "passes/pipeline.h"

enum { X, S };

static status to_safe_softmax(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return emit_with(g, out, "SafeSoftmax", NODE_ATTRS(INT("axis", node_int(v[S]->def, "axis"))), v[X]);
}

const pass_def safe_softmax = {
    .name = "safe_softmax",
    .stage = BEFORE_GRADIENT,
    .level = 0,
    .rules = (const rule[]){
        {OP("Where", OP("IsNaN", VAR(S)), CONST(0), OP_AS(S, "Softmax", VAR(X))), to_safe_softmax},
        {0},
    },
};
