/* unary.c -- owns the elementwise functions of one operand: Abs Neg Sign Floor Ceil Round Exp Log Sqrt Reciprocal Erf,
 * the trigonometric and hyperbolic functions, and their gradients; of our domain, since ONNX has no such operators,
 * Trunc Expm1 Log1p Erfc Lgamma Digamma. They are rows of operators.h; here is what a row does not say.
 *
 * dx = dy f'(x), written with y = f(x) where that is cheaper, so that x need not stay alive. Steps (Sign, Floor, Ceil,
 * Round, Trunc) have the gradient 0. Abs, Neg and Sign have records of their own, since they compute integers, too. */
#define FAMILY UNARY_FAMILY
#include "core/vwide.h"
#include "ops/pointwise/pointwise.h"

#include <tgmath.h> /* after vmath.h: from here sqrt and the like are of their argument's type */

/* --- kernels ------------------------------------------------------------------------------------------------------ */

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

#undef lgamma
#define lgamma(x) log_gamma(x) /* libm's writes the sign where all threads see it */
#include "ops/pointwise/operator_loops.h"

WRAP_FN(abs, 1, x >> (8 * sizeof x - 1) ? 0 - x : x)
WRAP_FN(neg, 1, 0 - x)
INT_FN(sign, 1, (x > 0) - (x < 0))

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

#define INTEGERS_TOO(name_, since_, fn_)                                                                               \
    TILED(name_, "", since_, 1, NUMBERS, INPLACE_0, infer_same, .fn = {FLOAT_TILES(fn_), INT_TILES(fn_)})

/* clang-format off */
const op_def unary_ops[] = {
    {INTEGERS_TOO("Abs", 6, abs), .grad = grad_abs},
    {INTEGERS_TOO("Neg", 6, neg), .grad = grad_neg, .simplify = simplify_involution},
    {INTEGERS_TOO("Sign", 9, sign), .grad = grad_zero},
#include "ops/pointwise/operator_records.h"
    {0},
};
/* clang-format on */
