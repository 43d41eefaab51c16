/* activation.c -- owns the activation functions: Relu LeakyRelu PRelu ThresholdedRelu Elu Selu Celu Gelu HardSigmoid
 * HardSwish Mish Sigmoid Softplus Softsign Swish, and their gradients; of our domain HardTanh, which is Clip but for the
 * gradient at the bounds: 0.
 *
 * Each is one pass over x, and one over dy and x (or y) backward:
 *     y stays alive for Relu, LeakyRelu with a positive slope, HardSigmoid and Sigmoid; x for all others.
 * At kinks and for NaN the gradient is the one PyTorch's function of that name has. In gradient kernels x is dy, and y
 * is the operand or the result. */
#include "core/vmath.h"
#include "ops/pointwise/pointwise.h"

#include <string.h>

/* --- piecewise linear --------------------------------------------------------------------------------------------- */

FLOAT_FN(relu, 1, x < 0 ? 0 : x)
INT_FN(relu, 1, x < 0 ? 0 : x)
FLOAT_FN(relu_grad, 2, y <= 0 ? 0 : x)

/* relu_dropout_grad(dy, what a dropout has left of the result) */
FLOAT_FN(relu_dropout_grad, 2, y <= 0 ? 0 : x * p0)

FLOAT_FN(leaky_relu, 1, x > 0 ? x : p0 * x)
FLOAT_FN(leaky_relu_grad, 2, y > 0 ? x : p0 * x)

FLOAT_FN(prelu, 2, x > 0 ? x : y * x)
FLOAT_FN(prelu_grad, 3, y > 0 ? x : z * x)
FLOAT_FN(prelu_slope_grad, 2, y > 0 ? 0 : x * y)

FLOAT_FN(thresholded_relu, 1, x <= p0 ? 0 : x)
FLOAT_FN(thresholded_relu_grad, 2, y <= p0 ? 0 : x)

FLOAT_FN(hard_tanh, 1, p0 > x ? p0 : x > p1 ? p1 : x)
FLOAT_FN(hard_tanh_grad, 2, (y > p0 && p1 > y) ? x : 0)

/* NaN stays. */
#define CLIP_01(t) ((t) < 0 ? 0 : (t) > 1 ? 1 : (t))

/* PyTorch's slope is 1 / 6, which the attribute cuts to float32; PyTorch itself does so in the gradient. */
#define IS_ONE_SIXTH(slope) ((float)(slope) == 1.0f / 6)
FLOAT_WHERE(hard_sigmoid, 1, CLIP_01(t), const real t = IS_ONE_SIXTH(p0) && p1 == (real)0.5 ? (x + 3) / 6 : p0 * x + p1)
FLOAT_FN(hard_sigmoid_grad, 2, y > 0 && y < 1 ? x * (IS_ONE_SIXTH(p0) ? (real)(1.0f / 6) : p0) : 0)

FLOAT_WHERE(hard_swish, 1, CLIP_01(t) * x, const real t = (x + 3) / 6)
FLOAT_FN(hard_swish_grad, 2, y >= 3 ? x : y <= -3 ? 0 : x * (y / 3 + (real)0.5))

/* --- exponential -------------------------------------------------------------------------------------------------- */

FLOAT_FN(elu, 1, x > 0 ? x : p0 * v_expm1(x))
FLOAT_FN(elu_grad, 2, y > 0 ? x : x * p0 * v_exp(y))

FLOAT_FN(selu, 1, (x > 0 ? x : p0 * v_expm1(x)) * p1)
FLOAT_FN(selu_grad, 2, x * p1 * (y > 0 ? 1 : p0 * v_exp(y)))

FLOAT_FN(celu, 1, x > 0 ? x : p0 * v_expm1(x / p0))
FLOAT_FN(celu_grad, 2, y > 0 ? x : x * v_exp(y / p0))

FLOAT_FN(sigmoid, 1, v_sigmoid(x))
FLOAT_FN(sigmoid_grad, 2, x * y * (1 - y))

FLOAT_FN(swish, 1, v_sigmoid((p0 * x)) * x)
FLOAT_WHERE(swish_grad, 2, (s * (1 + t * (1 - s))) * x, const real t = p0 * y, s = v_sigmoid(t))

/* Beyond 20 PyTorch's Softplus is x itself, with the gradient 1. */
FLOAT_FN(softplus, 1, x > 20 ? x : v_log1p(v_exp(x)))
FLOAT_FN(softplus_grad, 2, y > 20 ? x : x * v_sigmoid(y))

/* tanh(log(1 + e)) = m / (m + 2) with m = e (e + 2) and e = exp(x). From x = 20 on it is 1, and the rest to 1 is 0. */
FLOAT_WHERE(mish, 1, (m / (m + 2)) * x, const real e = v_exp(x > 20 ? 20 : x), m = e * (e + 2))
FLOAT_WHERE(mish_grad, 2, (m / (m + 2) + y * (rest * (2 - rest)) * (e / (1 + e))) * x,
            const real e = v_exp(y > 20 ? 20 : y), m = e * (e + 2), rest = y > 20 ? 0 : 2 / (m + 2))

/* --- Gelu ------------------------------------------------------------------------------------------------------------
 * x Phi(x), and its slope Phi(x) + x phi(x). The approximation 0.5 (1 + tanh(u)) of Phi(x) is sigmoid(2u), which keeps
 * its accuracy for negative x; 2u = A x (1 + B x^2). */

#define DENSITY ((real)0.39894228040143268 * e)
#define A ((real)1.5957691216057308)
#define B ((real)0.044715)

FLOAT_WHERE(gelu, 1, v_phi(x, e) * x, const real e = v_exp(-x * x / 2))
FLOAT_WHERE(gelu_grad, 2, (v_phi(y, e) + y * DENSITY) * x, const real e = v_exp(-y * y / 2))
FLOAT_FN(gelu_tanh, 1, v_sigmoid(A * x * (1 + B * x * x)) * x)
FLOAT_WHERE(gelu_tanh_grad, 2, (s + y * s * (1 - s) * (A * (1 + 3 * B * y * y))) * x,
            const real s = v_sigmoid(A * y * (1 + B * y * y)))

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
static const attr leaky_attrs[] = {FLOAT("alpha", 0.01), {0}};
static const attr alpha_attrs[] = {FLOAT("alpha", 1), {0}};
static const attr selu_attrs[] = {FLOAT("alpha", 1.6732632423543772), FLOAT("gamma", 1.0507009873554805), {0}};
static const attr hard_attrs[] = {FLOAT("alpha", 0.2), FLOAT("beta", 0.5), {0}};
static const attr bound_attrs[] = {FLOAT("min", -1), FLOAT("max", 1), {0}};
static const attr gelu_attrs[] = {STRING("approximate", "none"), {0}};

#define ACTIVATION(name_, since_, ...) TILED(name_, "", since_, 1, FLOATS, INPLACE_0, infer_same, __VA_ARGS__)
#define CURVE(name_, since_, ...) TILED(name_, "", since_, 1, FLOATS, INPLACE_0 | COSTLY, infer_same, __VA_ARGS__)
#define ONE(a) .params = {a}
#define TWO(a, b) .params = {a, b}
#define FN(name) .fn = {FLOAT_TILES(name)}

/* clang-format off */
const op_def activation_ops[] = {
    {TILED("Relu", "", 6, 1, NUMBERS, INPLACE_0, infer_same, .fn = {FLOAT_TILES(relu), INT_TILES(relu)}),
     .grad = pointwise_grad_y},
    {ACTIVATION("LeakyRelu", 6, ONE("alpha"), FN(leaky_relu)), .attrs = leaky_attrs, .grad = grad_leaky_relu},
    {TILED("PRelu", "", 7, 2, FLOATS, INPLACE_0, infer_prelu, FN(prelu)), .grad = grad_prelu},
    {ACTIVATION("ThresholdedRelu", 10, ONE("alpha"), FN(thresholded_relu)), .attrs = alpha_attrs,
     .grad = pointwise_grad_x},
    {ACTIVATION("HardSigmoid", 6, TWO("alpha", "beta"), FN(hard_sigmoid)), .attrs = hard_attrs,
     .grad = pointwise_grad_y},
    {ACTIVATION("HardSwish", 14, FN(hard_swish)), .grad = pointwise_grad_x},
    {CURVE("Elu", 6, ONE("alpha"), FN(elu)), .attrs = alpha_attrs, .grad = pointwise_grad_x},
    {CURVE("Selu", 6, TWO("alpha", "gamma"), FN(selu)), .attrs = selu_attrs, .grad = pointwise_grad_x},
    {CURVE("Celu", 12, ONE("alpha"), FN(celu)), .attrs = alpha_attrs, .grad = pointwise_grad_x},
    {CURVE("Sigmoid", 6, FN(sigmoid)), .grad = pointwise_grad_y},
    {CURVE("Swish", 24, ONE("alpha"), FN(swish)), .attrs = alpha_attrs, .grad = pointwise_grad_x},
    {CURVE("Softplus", 1, FN(softplus)), .grad = pointwise_grad_x},
    {CURVE("Mish", 18, FN(mish)), .grad = pointwise_grad_x},
    {CURVE("Gelu", 20, FN(gelu)), .attrs = gelu_attrs, .lower = lower_gelu, .grad = pointwise_grad_x},
    {LOWERED("Softsign", "", 1, 1, 1, FLOATS, lower_softsign)},

    {TILED("GeluTanh", ORT_DOMAIN, 1, 1, FLOATS, INPLACE_0 | COSTLY, infer_same, FN(gelu_tanh)), .grad = pointwise_grad_x},

    {TILED("HardTanh", ORT_DOMAIN, 1, 1, FLOATS, INPLACE_0 | IN_MODELS, infer_same, TWO("min", "max"), FN(hard_tanh)),
     .attrs = bound_attrs, .grad = pointwise_grad_x},

    {TILED_GRADIENT("HardTanhGrad", 2, TWO("min", "max"), FN(hard_tanh_grad)), .attrs = bound_attrs},
    {TILED_GRADIENT("ReluGrad", 2, FN(relu_grad))},
    {TILED_GRADIENT("ReluDropoutGrad", 2, ONE("scale"), FN(relu_dropout_grad)), .attrs = relu_dropout_attrs},
    {TILED_GRADIENT("LeakyReluGrad", 2, ONE("alpha"), FN(leaky_relu_grad)), .attrs = leaky_attrs},
    {TILED_GRADIENT("PReluGrad", 3, FN(prelu_grad))},
    {TILED_GRADIENT("PReluSlopeGrad", 2, FN(prelu_slope_grad))},
    {TILED_GRADIENT("ThresholdedReluGrad", 2, ONE("alpha"), FN(thresholded_relu_grad)), .attrs = alpha_attrs},
    {TILED_GRADIENT("HardSigmoidGrad", 2, TWO("alpha", "beta"), FN(hard_sigmoid_grad)), .attrs = hard_attrs},
    {TILED_GRADIENT("HardSwishGrad", 2, FN(hard_swish_grad))},
    {TILED_GRADIENT("EluGrad", 2, ONE("alpha"), FN(elu_grad)), .attrs = alpha_attrs},
    {TILED_GRADIENT("SeluGrad", 2, TWO("alpha", "gamma"), FN(selu_grad)), .attrs = selu_attrs},
    {TILED_GRADIENT("CeluGrad", 2, ONE("alpha"), FN(celu_grad)), .attrs = alpha_attrs},
    {TILED_GRADIENT("SigmoidGrad", 2, FN(sigmoid_grad))},
    {TILED_GRADIENT("SwishGrad", 2, ONE("alpha"), FN(swish_grad), .slope = true), .attrs = alpha_attrs},
    {TILED_GRADIENT("SoftplusGrad", 2, FN(softplus_grad), .slope = true)},
    {TILED_GRADIENT("MishGrad", 2, FN(mish_grad), .slope = true)},
    {TILED_GRADIENT("GeluGrad", 2, FN(gelu_grad), .slope = true), .attrs = gelu_attrs},
    {TILED_GRADIENT("GeluTanhGrad", 2, FN(gelu_tanh_grad), .slope = true)},
    {0},
};
/* clang-format on */
