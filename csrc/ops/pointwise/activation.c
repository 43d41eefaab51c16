/* activation.c -- owns the activation functions: Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu HardSigmoid
 * HardSwish Mish Sigmoid Softplus Softsign Swish, and their gradients; of our domain HardTanh, which is Clip but for the
 * gradient at the bounds: 0. They are rows of operators.h; here is what a row does not say.
 *
 * Each is one pass over x, and one over dy and x (or y) backward:
 *     y stays alive for Relu, LeakyRelu with a positive slope, HardSigmoid and Sigmoid; x for all others.
 * At kinks and for NaN the gradient is the one PyTorch's function of that name has. Records of their own have Relu, which
 * computes integers, too, PRelu with two gradients, and Gelu, whose approximation is another operator. */
#define FAMILY ACTIVATION_FAMILY
#include "ops/pointwise/operator_loops.h"
#include "ops/pointwise/pointwise.h"

#include <string.h>

INT_FN(relu, 1, x < 0 ? 0 : x)

/* --- rules -------------------------------------------------------------------------------------------------------- */

static status grad_leaky_relu(graph *g, const node *n, value *const dy[], value *dx[]) {
    /* x and y have one sign, and y is what the next layer keeps anyway. */
    return (node_float(n, "alpha") > 0 ? pointwise_grad_y : pointwise_grad_x)(g, n, dy, dx);
}

static status infer_prelu(graph *g, node *n) {
    TRY(infer_pointwise(g, n));
    if (!shape_equal(&n->out[0]->shape, &n->in[0]->shape)) {
        char slope[SHAPE_TEXT], x[SHAPE_TEXT];
        return fail(g->c, E_SHAPE, "the slope of PRelu, %s, does not broadcast to %s",
                    shape_text(&n->in[1]->shape, slope), shape_text(&n->in[0]->shape, x));
    }
    return OK;
}

static status grad_prelu(graph *g, const node *n, value *const dy[], value *dx[]) {
    if (need(n, 0)) TRY(emit(g, &dx[0], "PReluGrad", dy[0], n->in[0], n->in[1]));
    if (need(n, 1)) TRY(emit(g, &dx[1], "PReluSlopeGrad", dy[0], n->in[0]));
    return OK;
}

static status lower_gelu(graph *g, const node *n, value **out) {
    const char *how = node_string(n, "approximate");
    if (strcmp(how, "tanh") == 0) return emit(g, out, "GeluTanh", n->in[0]);
    if (strcmp(how, "none") != 0) return fail(g->c, E_INVALID, "Gelu has no approximation \"%s\"", how);
    return OK;
}

/* x / (1 + |x|) */
static status lower_softsign(graph *g, const node *n, value **out) {
    value *one, *size;
    TRY(require(g, n, 0));
    TRY(graph_scalar(g, n->in[0]->type, 1, &one));
    TRY(emit(g, &size, "Abs", n->in[0]));
    TRY(emit(g, &size, "Add", size, one));
    return emit(g, out, "Div", n->in[0], size);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr relu_dropout_attrs[] = {NO_DEFAULT("scale", FLOAT), {0}};
static const attr hundredth_attrs[] = {FLOAT("alpha", 0.01), {0}};
static const attr alpha_attrs[] = {FLOAT("alpha", 1), {0}};
static const attr selu_attrs[] = {FLOAT("alpha", 1.6732632423543772), FLOAT("gamma", 1.0507009873554805), {0}};
static const attr line_attrs[] = {FLOAT("alpha", 0.2), FLOAT("beta", 0.5), {0}};
static const attr bounds_attrs[] = {FLOAT("min", -1), FLOAT("max", 1), {0}};
static const attr gelu_attrs[] = {STRING("approximate", "none"), {0}};

/* The sets that rows name. */
#define ATTRS_hundredth hundredth_attrs
#define ATTRS_alpha alpha_attrs
#define ATTRS_selu selu_attrs
#define ATTRS_line line_attrs
#define ATTRS_bounds bounds_attrs
#define PARAMS_hundredth .params = {"alpha"},
#define PARAMS_alpha .params = {"alpha"},
#define PARAMS_selu .params = {"alpha", "gamma"},
#define PARAMS_line .params = {"alpha", "beta"},
#define PARAMS_bounds .params = {"min", "max"},
#define FN(name) .fn = {FLOAT_TILES(name)}

/* clang-format off */
const op_def activation_ops[] = {
    {TILED("Relu", "", 6, 1, NUMBERS, INPLACE_0, infer_same, .fn = {FLOAT_TILES(relu), INT_TILES(relu)}),
     .grad = pointwise_grad_y},
    {TILED_GRADIENT("ReluGrad", 2, FN(relu_grad))},
    {TILED_GRADIENT("ReluDropoutGrad", 2, .params = {"scale"}, FN(relu_dropout_grad)), .attrs = relu_dropout_attrs},
    {TILED_GRADIENT("LeakyReluGrad", 2, PARAMS_hundredth FN(leaky_relu_grad)), .attrs = hundredth_attrs},
    {TILED("PRelu", "", 7, 2, FLOATS, INPLACE_0, infer_prelu, FN(prelu)), .grad = grad_prelu},
    {TILED_GRADIENT("PReluGrad", 3, FN(prelu_grad))},
    {TILED_GRADIENT("PReluSlopeGrad", 2, FN(prelu_slope_grad))},
    {TILED("Gelu", "", 20, 1, FLOATS, INPLACE_0 | COSTLY, infer_same, FN(gelu)), .attrs = gelu_attrs,
     .lower = lower_gelu, .grad = pointwise_grad_x},
    {TILED_GRADIENT("GeluGrad", 2, FN(gelu_grad), .slope = true), .attrs = gelu_attrs},
    {LOWERED("Softsign", "", 1, 1, 1, FLOATS, lower_softsign)},
#include "ops/pointwise/operator_records.h"
    {0},
};
/* clang-format on */
