/* unary.c -- owns the elementwise functions of one operand: Abs Neg Sign Floor Ceil Round Exp Log Sqrt Reciprocal Erf,
 * the trigonometric and hyperbolic functions, and their gradients; of our domain, since ONNX has no such operators,
 * Trunc Expm1 Log1p Erfc Lgamma Digamma.
 *
 * dx = dy f'(x), written with y = f(x) where that is cheaper, so that x need not stay alive:
 *     from y: Exp y, Expm1 y + 1, Sqrt 1 / 2y, Reciprocal -y^2, Tan 1 + y^2, Tanh 1 - y^2
 *     from x: all others
 * Steps (Sign, Floor, Ceil, Round, Trunc) have the gradient 0. */
#include "core/vwide.h"
#include "ops/pointwise/pointwise.h"

#include <tgmath.h> /* after vmath.h: from here sqrt and the like are of their argument's type */

/* --- kernels ------------------------------------------------------------------------------------------------------ */

FLOAT_FN(abs, 1, fabs(x))
FLOAT_FN(neg, 1, -x)
FLOAT_FN(sign, 1, (x > 0) - (x < 0)) /* of NaN: 0 */
FLOAT_FN(floor, 1, floor(x))
FLOAT_FN(ceil, 1, ceil(x))
FLOAT_FN(round, 1, rint(x)) /* halves to even */
FLOAT_FN(exp, 1, v_exp(x))
FLOAT_FN(log, 1, v_log(x))
FLOAT_FN(sqrt, 1, sqrt(x))
FLOAT_FN(reciprocal, 1, 1 / x)
FLOAT_FN(erf, 1, v_erf(x))
FLOAT_FN(tanh, 1, v_tanh(x))
FLOAT_FN(trunc, 1, trunc(x))
FLOAT_FN(expm1, 1, v_expm1(x))
FLOAT_FN(log1p, 1, v_log1p(x))
static double log_gamma(double x) {
    int sign;
    return lgamma_r(x, &sign);
}

/* The logarithmic derivative of the gamma function: reflected to the right, moved up to where the series holds. NaN at
 * negative integers, an infinity at zero. */
SIMD_PART double digamma(double x) {
    double result = 0, square;

    if (x == 0) return copysign(INFINITY, -x);
    if (x < 0) {
        if (x == floor(x)) return NAN;
        result = -M_PI / tan(M_PI * (x - rint(x)));
        x = 1 - x;
    }
    for (; x < 10; x++) result -= 1 / x;
    square = 1 / (x * x);
    return result + log(x) - 0.5 / x -
           square * (1. / 12 - square * (1. / 120 - square * (1. / 252 - square * (1. / 240 - square * (1. / 132)))));
}

/* Its derivative. */
SIMD_PART double trigamma(double x) {
    double result = 0, sign = 1, square;

    if (x < 0.5) {
        const double sine = sin(M_PI * (x - rint(x)));
        sign = -1;
        result = -(M_PI * M_PI) / (sine * sine);
        x = 1 - x;
    }
    for (; x < 10; x++) result += 1 / (x * x);
    square = 1 / (x * x);
    result += 1 / x + square / 2 +
              square / x * (1. / 6 - square * (1. / 30 - square * (1. / 42 - square * (1. / 30 - square * 5 / 66))));
    return sign * result;
}

/* The float form has no branches, the double form is libm's. */
#define WIDE(name, exact)                                                                                              \
    TILE_1(name##_f32, float, v##name##f(x))                                                                           \
    TILE_1(name##_f64, double, exact(x))
WIDE(asin, asin)
WIDE(acos, acos)
WIDE(atan, atan)
WIDE(sinh, sinh)
WIDE(cosh, cosh)
WIDE(asinh, asinh)
WIDE(acosh, acosh)
WIDE(atanh, atanh)
WIDE(erfc, erfc)
WIDE(lgamma, log_gamma)
WIDE(trigamma, trigamma)
FLOAT_FN(digamma, 1, digamma(x))

WRAP_FN(abs, 1, x >> (8 * sizeof x - 1) ? 0 - x : x)
WRAP_FN(neg, 1, 0 - x)
INT_FN(sign, 1, (x > 0) - (x < 0))

/* The vector sine and cosine have a limited range: a tile with a larger argument goes through libm. */
SIMD static bool any_beyond_trig_limit(int64_t n, const float *x) {
    int any = 0;
    for (int64_t i = 0; i < n; i++) any |= !(fabsf(x[i]) <= TRIG_LIMIT);
    return any;
}

#define TRIG(name)                                                                                                     \
    TILE_1(name##_near, float, v##name##f(x))                                                                          \
    TILE_1(name##_far, float, name(x))                                                                                 \
    static void name##_f32(int64_t n, void *out, const void *const *in, const double *param) {                         \
        (any_beyond_trig_limit(n, in[0]) ? name##_far : name##_near)(n, out, in, param);                               \
    }                                                                                                                  \
    TILE_1(name##_f64, double, name(x))

TRIG(sin)
TRIG(cos)
TRIG(tan)

/* Gradients: x is dy, y the operand or the result. */
FLOAT_FN(sqrt_grad, 2, x / (2 * y))
FLOAT_FN(reciprocal_grad, 2, -(x * y * y))
FLOAT_FN(erf_grad, 2, (real)1.1283791670955126 * v_exp(-y * y) * x)
FLOAT_FN(tan_grad, 2, x * (1 + y * y))
FLOAT_FN(tanh_grad, 2, x * (1 - y * y))
FLOAT_FN(asin_grad, 2, x / sqrt(1 - y * y))
FLOAT_FN(acos_grad, 2, -x / sqrt(1 - y * y))
FLOAT_FN(atan_grad, 2, x / (1 + y * y))
FLOAT_FN(asinh_grad, 2, x / sqrt(y * y + 1))
FLOAT_FN(acosh_grad, 2, x / sqrt(y * y - 1))
FLOAT_FN(atanh_grad, 2, x / (1 - y * y))
FLOAT_FN(expm1_grad, 2, x *(y + 1))
FLOAT_FN(log1p_grad, 2, x / (y + 1))
FLOAT_FN(erfc_grad, 2, (real)-1.1283791670955126 * v_exp(-y * y) * x)

/* --- rules -------------------------------------------------------------------------------------------------------- */

/* dy times another function of x. */
static status grad_by(graph *g, const node *n, value *dy, const char *derivative, value **dx) {
    value *d;
    TRY(emit(g, &d, derivative, n->in[0]));
    return emit(g, dx, "Mul", dy, d);
}

static status grad_abs(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, dy[0], "Sign", &dx[0]);
}

static status grad_sin(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, dy[0], "Cos", &dx[0]);
}

static status grad_cos(graph *g, const node *n, value *const dy[], value *dx[]) {
    TRY(grad_by(g, n, dy[0], "Sin", &dx[0]));
    return emit(g, &dx[0], "Neg", dx[0]);
}

static status grad_sinh(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, dy[0], "Cosh", &dx[0]);
}

static status grad_cosh(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, dy[0], "Sinh", &dx[0]);
}

static status grad_neg(graph *g, const node *n, value *const dy[], value *dx[]) {
    (void)n;
    return emit(g, &dx[0], "Neg", dy[0]);
}

static status grad_exp(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit(g, &dx[0], "Mul", dy[0], n->out[0]);
}

static status grad_log(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit(g, &dx[0], "Div", dy[0], n->in[0]);
}

static status grad_lgamma(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, dy[0], "Digamma", &dx[0]);
}

static status grad_digamma(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, dy[0], "Trigamma", &dx[0]);
}

static status grad_zero(graph *g, const node *n, value *const dy[], value *dx[]) {
    (void)dy;
    return zeros_like(g, n->in[0], &dx[0]);
}

/* f(f(x)) = x */
static status simplify_involution(graph *g, const node *n, value **out) {
    const node *inner = n->in[0]->def;
    (void)g;
    if (inner && inner->op == n->op) out[0] = inner->in[0];
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

#define UNARY(name_, since_, types_, grad_, ...)                                                                       \
    TILED(name_, "", since_, 1, types_, INPLACE_0, infer_same, .fn = {__VA_ARGS__}), .grad = grad_
#define CURVE(name_, since_, grad_, fn_)                                                                               \
    TILED(name_, "", since_, 1, FLOATS, INPLACE_0 | COSTLY, infer_same, .fn = {FLOAT_TILES(fn_)}), .grad = grad_
#define OURS(name_, grad_, fn_)                                                                                        \
    TILED(name_, ORT_DOMAIN, 1, 1, FLOATS, INPLACE_0 | IN_MODELS, infer_same, .fn = {FLOAT_TILES(fn_)}), .grad = grad_
#define GRADIENT(name_, fn_) TILED_GRADIENT(name_, 2, .fn = {FLOAT_TILES(fn_)})

/* clang-format off */
const op_def unary_ops[] = {
    {UNARY("Abs", 6, NUMBERS, grad_abs, FLOAT_TILES(abs), INT_TILES(abs))},
    {UNARY("Neg", 6, NUMBERS, grad_neg, FLOAT_TILES(neg), INT_TILES(neg)), .simplify = simplify_involution},
    {UNARY("Sign", 9, NUMBERS, grad_zero, FLOAT_TILES(sign), INT_TILES(sign))},
    {UNARY("Floor", 6, FLOATS, grad_zero, FLOAT_TILES(floor))},
    {UNARY("Ceil", 6, FLOATS, grad_zero, FLOAT_TILES(ceil))},
    {UNARY("Round", 11, FLOATS, grad_zero, FLOAT_TILES(round))},
    {CURVE("Exp", 6, grad_exp, exp)},
    {CURVE("Log", 6, grad_log, log)},
    {UNARY("Sqrt", 6, FLOATS, pointwise_grad_y, FLOAT_TILES(sqrt))},
    {UNARY("Reciprocal", 6, FLOATS, pointwise_grad_y, FLOAT_TILES(reciprocal))},
    {CURVE("Erf", 9, pointwise_grad_x, erf)},
    {CURVE("Sin", 7, grad_sin, sin)},
    {CURVE("Cos", 7, grad_cos, cos)},
    {CURVE("Tan", 7, pointwise_grad_y, tan)},
    {CURVE("Asin", 7, pointwise_grad_x, asin)},
    {CURVE("Acos", 7, pointwise_grad_x, acos)},
    {CURVE("Atan", 7, pointwise_grad_x, atan)},
    {CURVE("Sinh", 9, grad_sinh, sinh)},
    {CURVE("Cosh", 9, grad_cosh, cosh)},
    {CURVE("Tanh", 6, pointwise_grad_y, tanh)},
    {CURVE("Asinh", 9, pointwise_grad_x, asinh)},
    {CURVE("Acosh", 9, pointwise_grad_x, acosh)},
    {CURVE("Atanh", 9, pointwise_grad_x, atanh)},

    {OURS("Trunc", grad_zero, trunc)},
    {OURS("Expm1", pointwise_grad_y, expm1)},
    {OURS("Log1p", pointwise_grad_x, log1p)},
    {OURS("Erfc", pointwise_grad_x, erfc)},
    {OURS("Lgamma", grad_lgamma, lgamma)},
    {OURS("Digamma", grad_digamma, digamma)},
    {OURS("Trigamma", NULL, trigamma)},

    {GRADIENT("SqrtGrad", sqrt_grad)},
    {GRADIENT("ReciprocalGrad", reciprocal_grad)},
    {GRADIENT("ErfGrad", erf_grad)},
    {GRADIENT("TanGrad", tan_grad)},
    {GRADIENT("TanhGrad", tanh_grad)},
    {GRADIENT("AsinGrad", asin_grad)},
    {GRADIENT("AcosGrad", acos_grad)},
    {GRADIENT("AtanGrad", atan_grad)},
    {GRADIENT("AsinhGrad", asinh_grad)},
    {GRADIENT("AcoshGrad", acosh_grad)},
    {GRADIENT("AtanhGrad", atanh_grad)},
    {GRADIENT("Expm1Grad", expm1_grad)},
    {GRADIENT("Log1pGrad", log1p_grad)},
    {GRADIENT("ErfcGrad", erfc_grad)},
    {0},
};
/* clang-format on */
