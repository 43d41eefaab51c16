/* softmax_cast.c -- a softmax of float32 scores that is read in 16 bits  ->  NarrowSoftmax, which stores it so:
 *
 *   Cast(Softmax(x)),  Cast(MaskedSoftmax(x, mask))     along the last axis
 *   Cast(DropoutTrain(...)) of these
 *   Cast(NarrowSoftmaxGrad(dy, y))                      in backward: stored as its readers want it
 *
 * So attention is written for 16-bit floats, by PyTorch's own function as by models that widen their scores. Nothing of
 * the size of the weights is in float32 but the scores themselves, for the moment between their product and this: backward
 * takes the weights as they were multiplied, whose rounding is as large as that of the scores' gradient. */
#include "passes/pipeline.h"

#include "ops/queries.h"

enum { X, ALLOWED, SOFTMAX, DROPPED, DY, WEIGHTS, SLOPE };

static bool fits(const value *x) {
    return x->type == F32 && x->shape.rank > 0 && x->shape.dim[x->shape.rank - 1] <= NARROW_SOFTMAX_MOST;
}

static status store(graph *g, value *const v[], const node *root, value **out) {
    const bool safe = value_is(v[SOFTMAX], "MaskedSoftmax");
    value *in[] = {v[X], v[ALLOWED]}, *y[2];
    double ratio = 0;
    int64_t key = 0;

    if (!dtype_is_narrow(root->out[0]->type) || !fits(v[X]) || (!safe && !node_is_along_last_axis(v[SOFTMAX]->def)))
        return OK;
    if (v[DROPPED]) {
        ratio = node_float(v[DROPPED]->def, "ratio");
        key = node_int(v[DROPPED]->def, "key");
    }
    TRY(graph_emit(
        g, ratio > 0 ? "NarrowSoftmaxRandom" : "NarrowSoftmax",
        NODE_ATTRS(INT("to", node_int(root, "to")), INT("safe", safe), FLOAT("ratio", ratio), INT("key", key)),
        v[ALLOWED] ? 2 : 1, in, ratio > 0 ? 2 : 1, y));
    *out = y[0];
    return OK;
}

static status store_slope(graph *g, value *const v[], const node *root, value **out) {
    const node *n = v[SLOPE]->def;

    if (root->out[0]->type != v[WEIGHTS]->type) return OK;
    return emit_with(g, out, n->op->name,
                     NODE_ATTRS(INT("to", node_int(root, "to")), FLOAT("ratio", node_float(n, "ratio")),
                                INT("key", node_int(n, "key"))),
                     v[DY], v[WEIGHTS]);
}

#define ANY_SOFTMAX                                                                                                    \
    EITHER(OP_AS(SOFTMAX, "Softmax", VAR(X)), OP_AS(SOFTMAX, "MaskedSoftmax", VAR(X)),                                 \
           OP_AS(SOFTMAX, "MaskedSoftmax", VAR(X), VAR(ALLOWED)))

static const rule rules[] = {
    {OP("Cast", ANY_SOFTMAX), store},
    {OP("Cast", OP_AS(DROPPED, "DropoutTrain", ANY_SOFTMAX)), store},
    {OP("Cast", EITHER(OP_AS(SLOPE, "NarrowSoftmaxGrad", VAR(DY), VAR(WEIGHTS)),
                       OP_AS(SLOPE, "NarrowSoftmaxGradRandom", VAR(DY), VAR(WEIGHTS)))),
     store_slope},
    {0},
};

const pass_def softmax_cast = {
    .name = "softmax_cast", .rules = rules, .stage = BEFORE_GRADIENT | AFTER_GRADIENT, .device = FOR_CPUS};
