/* norm_fusion.c -- normalisation spelled out  ->  one operator
 *
 *   scale * x / sqrt(mean(x^2) + epsilon)     ->  RMSNormalization(x, scale)
 *   RMSNormalization(x - mean(x), scale)      ->  LayerNormalization(x, scale)
 *   LayerNormalization(x, scale) + bias       ->  LayerNormalization(x, scale, bias)
 *
 * Means are over the last axis. The division is written as such, or as a product with a reciprocal square root. Models
 * in 16-bit floats compute the first formula in float32 between two casts and scale after the second one, as the
 * operator does; then the casts go too. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/op.h"

enum { X, SCALE, BIAS, EPSILON, NORM };

/* Of either form of the operator: nothing but the last axis has shrunk. */
static bool over_last_axis(const node *n) {
    shape kept = n->in[0]->shape;
    if (kept.rank == 0) return false;
    kept.dim[kept.rank - 1] = 1;
    return shape_equal(&kept, &n->out[0]->shape);
}

#define MEAN(x)                                                                                                        \
    EITHER(OP_WHERE(over_last_axis, "ReduceMean", x, ANYCONST(-1)), OP_WHERE(over_last_axis, "ReduceMean", x))
#define DEVIATION OP("Sqrt", OP("Add", MEAN(OP("Mul", VAR(X), VAR(X))), ANYCONST(EPSILON)))
#define NORMED                                                                                                         \
    EITHER(OP("Mul", VAR(X), EITHER(OP("Div", CONST(1), DEVIATION), OP("Reciprocal", DEVIATION))),                     \
           OP("Div", VAR(X), DEVIATION))

/* One number for each element of the last axis. */
static bool fits_last_axis(const value *v, const value *x) {
    return v->shape.rank == 1 && v->shape.dim[0] == x->shape.dim[x->shape.rank - 1];
}

static status to_rms_norm(graph *g, value *const v[], const node *root, value **out) {
    value *x = value_is_widened(v[X]) && v[X]->def->in[0]->type == root->out[0]->type ? v[X]->def->in[0] : v[X];
    double epsilon;

    if (shape_count(&v[EPSILON]->shape) != 1 || !value_is_filled(v[EPSILON], &epsilon)) return OK;
    if (!fits_last_axis(v[SCALE], x)) return OK;
    if (v[SCALE]->type == F64 && x->type != F64) return OK; /* the operator would be more exact than the model is */
    return emit_with(g, out, "RMSNormalization", NODE_ATTRS(INT("axis", -1), FLOAT("epsilon", epsilon)), x, v[SCALE]);
}

static status to_layer_norm(graph *g, value *const v[], const node *root, value **out) {
    double epsilon = node_float(root, "epsilon");

    if (!node_is_along_last_axis(root) || !fits_last_axis(v[SCALE], v[X]) || v[SCALE]->type != v[X]->type) return OK;
    return emit_with(g, out, "LayerNormalization", NODE_ATTRS(INT("axis", -1), FLOAT("epsilon", epsilon)), v[X],
                     v[SCALE]);
}

static status add_bias(graph *g, value *const v[], const node *root, value **out) {
    double epsilon = node_float(v[NORM]->def, "epsilon");

    (void)root;
    if (!node_is_along_last_axis(v[NORM]->def) || !fits_last_axis(v[BIAS], v[X])) return OK;
    return emit_with(g, out, "LayerNormalization", NODE_ATTRS(INT("axis", -1), FLOAT("epsilon", epsilon)), v[X],
                     v[SCALE], v[BIAS]);
}

static const rule rules[] = {
    {OP("Mul", NORMED, VAR(SCALE)), to_rms_norm},
    {OP("Mul", OP("Cast", NORMED), VAR(SCALE)), to_rms_norm},
    {OP_AS(NORM, "RMSNormalization", OP("Sub", VAR(X), MEAN(VAR(X))), VAR(SCALE)), to_layer_norm},
    {OP("Add", OP_AS(NORM, "LayerNormalization", VAR(X), VAR(SCALE)), VAR(BIAS)), add_bias},
    {0},
};

const pass_def norm_fusion = {.name = "norm_fusion", .stage = BEFORE_GRADIENT, .rules = rules};
