/* softmax_dropout.c -- DropoutTrain(Softmax(x))              ->  SoftmaxDropout(x), along the last axis
 *                      DropoutTrain(MaskedSoftmax(x, mask))  ->  MaskedSoftmaxDropout(x, mask)
 *
 * Attention's weights where it stays products and a softmax: one sweep over them instead of two, and backward one instead
 * of two. The key goes along, so the same elements are dropped. Where a chain of pointwise operators reads the result,
 * dropout is a step of that. 16-bit floats stay two operators on the CPU, which converting them keeps busy for longer than
 * reading them again: the pass took 0.9 to 1.0 of the time there (docs/passes.md). */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { X, ALLOWED };

static status emit_dropped(graph *g, const char *op, int n_in, value *const in[], const node *root, value **out) {
    value *y[2];

    if ((!g->cuda && dtype_size(root->out[0]->type) == 2) || node_is_read_by_a_chain(root)) return OK;
    TRY(graph_emit(g, op, NODE_ATTRS(FLOAT("ratio", node_float(root, "ratio")), INT("key", node_int(root, "key"))),
                   n_in, in, 2, y));
    *out = y[0];
    return OK;
}

static status to_softmax_dropout(graph *g, value *const v[], const node *root, value **out) {
    return emit_dropped(g, "SoftmaxDropout", 1, v, root, out);
}

static status to_masked(graph *g, value *const v[], const node *root, value **out) {
    return emit_dropped(g, "MaskedSoftmaxDropout", v[ALLOWED] ? 2 : 1, v, root, out);
}

static const rule rules[] = {
    {OP("DropoutTrain", OP_WHERE(node_is_along_last_axis, "Softmax", VAR(X))), to_softmax_dropout},
    {OP("DropoutTrain", OP("MaskedSoftmax", VAR(X))), to_masked},
    {OP("DropoutTrain", OP("MaskedSoftmax", VAR(X), VAR(ALLOWED))), to_masked},
    {0},
};

const pass_def softmax_dropout = {.name = "softmax_dropout", .stage = BEFORE_GRADIENT, .rules = rules};
