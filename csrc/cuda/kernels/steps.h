/* steps.h -- what every pointwise operator computes of an element: rows of lists, from which come the kernels of
 * pointwise.cu, the interpreter of chains (fused.cu) and the text of compiled ones (generate.c). */
#ifndef ORT_CUDA_STEPS_H
#define ORT_CUDA_STEPS_H

/* --- operators: (name, function, operands, expression, what else it uses) ----------------------------------------- */

/* x, y, z, w are the operands, `real` their type, p0 and p1 the parameters, as in ops/pointwise/pointwise.h. */
#define SIGMOID(t) (1 / (1 + exp(-(t))))
#define PHI(t) ((real)0.5 * (1 + erf((t) * (real)0.70710678118654752)))
#define DENSITY(t) ((real)0.39894228040143268 * exp(-(t) * (t) / 2))
#define GELU_A ((real)1.5957691216057308)
#define GELU_B ((real)0.044715)
#define IS_ONE_SIXTH(slope) ((float)(slope) == 1.0f / 6)
#define CLIP_01(t) ((t) < 0 ? 0 : (t) > 1 ? 1 : (t))

/* Floats in, the same floats out. */
/* clang-format off */
#define FLOAT_OPERATORS(F)                                                                                             \
    F("Add", add, 2, x + y, )                                                                                          \
    F("Sub", sub, 2, x - y, )                                                                                          \
    F("Mul", mul, 2, (x * y), )                                                                                        \
    F("Div", div, 2, x / y, )                                                                                          \
    F("NormQuotient", norm_quotient, 2, x / y, )                                                                       \
    F("Maximum", max, 2, x > y || x != x ? x : y, )                                                                    \
    F("Minimum", min, 2, x < y || x != x ? x : y, )                                                                    \
    F("Pow", pow, 2, pow(x, y), )                                                                                      \
    F("Mod", mod, 2, p0 == 0 && r != 0 && (r < 0) != (y < 0) ? r + y : r, const real r = fmod(x, y))                   \
    F("FloorDiv", floor_div, 2,                                                                                        \
      y == 0 ? x / y : q == 0 ? copysign(0 * x, x / y) : q - whole > (real)0.5 ? whole + 1 : whole,                    \
      const real r = fmod(x, y); const real t = (x - r) / y;                                                           \
      const real q = r != 0 && (r < 0) != (y < 0) ? t - 1 : t; const real whole = floor(q))                            \
    F("Remainder", remainder, 2, r != 0 && (r < 0) != (y < 0) ? r + y : r, const real r = fmod(x, y))                  \
    F("Atan2", atan2, 2, atan2(x, y), )                                                                                \
    F("Hypot", hypot, 2, hypot(x, y), )                                                                                \
    F("Huber", huber, 2, (t < p0 ? (real)0.5 * t * t : p0 * (t - (real)0.5 * p0)) * (1 / p1),                          \
      const real t = fabs(x - y))                                                                                      \
    F("HuberGrad", huber_grad, 3, x * (t <= -p0 ? -p0 : t >= p0 ? p0 : t) * (1 / p1), const real t = y - z)            \
    F("AlongGrad", along, 3, x * (y / z), )                                                                            \
    F("MaximumGrad", max_grad, 3, y < z ? 0 : y == z ? x / 2 : x, )                                                    \
    F("DivisorGrad", divisor_grad, 3, -(z / y) * x, )                                                                  \
    F("PowGrad", pow_grad, 3, z == 0 ? 0 : x * (z * pow(y, z - 1)), )                                                  \
    F("PowExponentGrad", pow_exponent_grad, 4, y == 0 && z >= 0 ? 0 : x * (w * log(y)), )                              \
    F("Abs", abs, 1, fabs(x), )                                                                                        \
    F("Neg", neg, 1, -x, )                                                                                             \
    F("Sign", sign, 1, (x > 0) - (x < 0), )                                                                            \
    F("Floor", floor, 1, floor(x), )                                                                                   \
    F("Ceil", ceil, 1, ceil(x), )                                                                                      \
    F("Round", round, 1, rint(x), )                                                                                    \
    F("Trunc", trunc, 1, trunc(x), )                                                                                   \
    F("Exp", exp, 1, exp(x), )                                                                                         \
    F("Log", log, 1, log(x), )                                                                                         \
    F("Sqrt", sqrt, 1, sqrt(x), )                                                                                      \
    F("Reciprocal", reciprocal, 1, 1 / x, )                                                                            \
    F("Erf", erf, 1, erf(x), )                                                                                         \
    F("Erfc", erfc, 1, erfc(x), )                                                                                      \
    F("Lgamma", lgamma, 1, lgamma(x), )                                                                                \
    F("Digamma", digamma, 1, digamma(x), )                                                                             \
    F("Trigamma", trigamma, 1, trigamma(x), )                                                                          \
    F("Expm1", expm1, 1, expm1(x), )                                                                                   \
    F("Log1p", log1p, 1, log1p(x), )                                                                                   \
    F("Sin", sin, 1, sin(x), )                                                                                         \
    F("Cos", cos, 1, cos(x), )                                                                                         \
    F("Tan", tan, 1, tan(x), )                                                                                         \
    F("Asin", asin, 1, asin(x), )                                                                                      \
    F("Acos", acos, 1, acos(x), )                                                                                      \
    F("Atan", atan, 1, atan(x), )                                                                                      \
    F("Sinh", sinh, 1, sinh(x), )                                                                                      \
    F("Cosh", cosh, 1, cosh(x), )                                                                                      \
    F("Tanh", tanh, 1, tanh(x), )                                                                                      \
    F("Asinh", asinh, 1, asinh(x), )                                                                                   \
    F("Acosh", acosh, 1, acosh(x), )                                                                                   \
    F("Atanh", atanh, 1, atanh(x), )                                                                                   \
    F("SqrtGrad", sqrt_grad, 2, x / (2 * y), )                                                                         \
    F("ReciprocalGrad", reciprocal_grad, 2, -(x * y * y), )                                                            \
    F("ErfGrad", erf_grad, 2, (real)1.1283791670955126 * exp(-y * y) * x, )                                            \
    F("ErfcGrad", erfc_grad, 2, (real)-1.1283791670955126 * exp(-y * y) * x, )                                         \
    F("TanGrad", tan_grad, 2, x * (1 + y * y), )                                                                       \
    F("TanhGrad", tanh_grad, 2, x * (1 - y * y), )                                                                     \
    F("AsinGrad", asin_grad, 2, x / sqrt(1 - y * y), )                                                                 \
    F("AcosGrad", acos_grad, 2, -x / sqrt(1 - y * y), )                                                                \
    F("AtanGrad", atan_grad, 2, x / (1 + y * y), )                                                                     \
    F("AsinhGrad", asinh_grad, 2, x / sqrt(y * y + 1), )                                                               \
    F("AcoshGrad", acosh_grad, 2, x / sqrt(y * y - 1), )                                                               \
    F("AtanhGrad", atanh_grad, 2, x / (1 - y * y), )                                                                   \
    F("Expm1Grad", expm1_grad, 2, x * (y + 1), )                                                                       \
    F("Log1pGrad", log1p_grad, 2, x / (y + 1), )                                                                       \
    F("Relu", relu, 1, x < 0 ? 0 : x, )                                                                                \
    F("ReluGrad", relu_grad, 2, y <= 0 ? 0 : x, )                                                                      \
    F("ReluDropoutGrad", relu_dropout_grad, 2, y <= 0 ? 0 : x * p0, )                                                  \
    F("LeakyRelu", leaky_relu, 1, x > 0 ? x : p0 * x, )                                                                \
    F("LeakyReluGrad", leaky_relu_grad, 2, y > 0 ? x : p0 * x, )                                                       \
    F("PRelu", prelu, 2, x > 0 ? x : y * x, )                                                                          \
    F("PReluGrad", prelu_grad, 3, y > 0 ? x : z * x, )                                                                 \
    F("PReluSlopeGrad", prelu_slope_grad, 2, y > 0 ? 0 : x * y, )                                                      \
    F("ThresholdedRelu", thresholded_relu, 1, x <= p0 ? 0 : x, )                                                       \
    F("ThresholdedReluGrad", thresholded_relu_grad, 2, y <= p0 ? 0 : x, )                                              \
    F("HardTanh", hard_tanh, 1, p0 > x ? p0 : x > p1 ? p1 : x, )                                                       \
    F("HardTanhGrad", hard_tanh_grad, 2, (y > p0 && p1 > y) ? x : 0, )                                                 \
    F("HardSigmoid", hard_sigmoid, 1, CLIP_01(t),                                                                      \
      const real t = IS_ONE_SIXTH(p0) && p1 == (real)0.5 ? (x + 3) / 6 : p0 * x + p1)                                  \
    F("HardSigmoidGrad", hard_sigmoid_grad, 2,                                                                         \
      y > 0 && y < 1 ? x * (IS_ONE_SIXTH(p0) ? (real)(1.0f / 6) : p0) : 0, )                                           \
    F("HardSwish", hard_swish, 1, CLIP_01(t) * x, const real t = (x + 3) / 6)                                          \
    F("HardSwishGrad", hard_swish_grad, 2, y >= 3 ? x : y <= -3 ? 0 : x * (y / 3 + (real)0.5), )                       \
    F("Elu", elu, 1, x > 0 ? x : p0 * expm1(x), )                                                                      \
    F("EluGrad", elu_grad, 2, y > 0 ? x : x * p0 * exp(y), )                                                           \
    F("Selu", selu, 1, (x > 0 ? x : p0 * expm1(x)) * p1, )                                                             \
    F("SeluGrad", selu_grad, 2, x * p1 * (y > 0 ? 1 : p0 * exp(y)), )                                                  \
    F("Celu", celu, 1, x > 0 ? x : p0 * expm1(x / p0), )                                                               \
    F("CeluGrad", celu_grad, 2, y > 0 ? x : x * exp(y / p0), )                                                         \
    F("Sigmoid", sigmoid, 1, SIGMOID(x), )                                                                             \
    F("SigmoidGrad", sigmoid_grad, 2, x * y * (1 - y), )                                                               \
    F("Swish", swish, 1, SIGMOID(p0 * x) * x, )                                                                        \
    F("SwishGrad", swish_grad, 2, x * s * (1 + t * (1 - s)), const real t = p0 * y; const real s = SIGMOID(t))         \
    F("Softplus", softplus, 1, x > 20 ? x : log1p(exp(x)), )                                                           \
    F("SoftplusGrad", softplus_grad, 2, y > 20 ? x : x * SIGMOID(y), )                                                 \
    F("Mish", mish, 1, (m / (m + 2)) * x, const real e = exp(x > 20 ? 20 : x); const real m = e * (e + 2))             \
    F("MishGrad", mish_grad, 2, (m / (m + 2) + y * (rest * (2 - rest)) * (e / (1 + e))) * x,                           \
      const real e = exp(y > 20 ? 20 : y); const real m = e * (e + 2); const real rest = y > 20 ? 0 : 2 / (m + 2))     \
    F("Gelu", gelu, 1, PHI(x) * x, )                                                                                   \
    F("GeluGrad", gelu_grad, 2, (PHI(y) + y * DENSITY(y)) * x, )                                                       \
    F("GeluTanh", gelu_tanh, 1, SIGMOID(GELU_A * x * (1 + GELU_B * x * x)) * x, )                                      \
    F("GeluTanhGrad", gelu_tanh_grad, 2, (s + y * s * (1 - s) * (GELU_A * (1 + 3 * GELU_B * y * y))) * x,              \
      const real s = SIGMOID(GELU_A * y * (1 + GELU_B * y * y)))                                                       \
    F("Clamp", clamp, 3, t > z || z != z ? z : t, const real t = x < y || y != y ? y : x)                              \
    F("ClampGrad", clamp_grad, 4, y >= z && y <= w ? x : 0, )

/* Integers in, the same integers out; `word` wraps around. */
#define INT_OPERATORS(F)                                                                                               \
    F("Add", add, 2, (word)x + (word)y, )                                                                              \
    F("Sub", sub, 2, (word)x - (word)y, )                                                                              \
    F("Mul", mul, 2, (word)x * (word)y, )                                                                              \
    F("Maximum", max, 2, x > y ? x : y, )                                                                              \
    F("Minimum", min, 2, x < y ? x : y, )                                                                              \
    F("Abs", abs, 1, x < 0 ? 0 - (word)x : (word)x, )                                                                  \
    F("Neg", neg, 1, 0 - (word)x, )                                                                                    \
    F("Sign", sign, 1, (x > 0) - (x < 0), )                                                                            \
    F("Relu", relu, 1, x < 0 ? 0 : x, )                                                                                \
    F("Clamp", clamp, 3, x > z || y > z ? z : x < y ? y : x, )                                                         \
    F("BitwiseAnd", bit_and, 2, (x & y), )                                                                             \
    F("BitwiseOr", bit_or, 2, x | y, )                                                                                 \
    F("BitwiseXor", bit_xor, 2, x ^ y, )                                                                               \
    F("BitwiseNot", bit_not, 1, ~x, )                                                                                  \
    F("ShiftLeft", shift_left, 2, (word)y < 8 * sizeof(word) ? (word)x << ((word)y & (8 * sizeof(word) - 1)) : 0, )    \
    F("ShiftRight", shift_right, 2, x >> ((word)y < 8 * sizeof(word) ? y : (real)(8 * sizeof(word) - 1)), )            \
    F("Pow", int_pow, 2, int_power(x, y), )

/* Integers by integers, which may be 0: not for chains. */
#define INT_DIVISIONS(F)                                                                                               \
    F("Div", div, 2, y == 0 ? BY_ZERO : y == -1 ? (real)(0 - (word)x) : x / y, )                                       \
    F("FloorDiv", floor_div, 2,                                                                                        \
      y == 0 ? BY_ZERO : y == -1 ? (real)(0 - (word)x) : x / y - (x % y != 0 && (x < 0) != (y < 0)), )                 \
    F("Mod", mod, 2, p0 == 0 && r != 0 && (r < 0) != (y < 0) ? r + y : r,                                              \
      const real r = y == 0 ? BY_ZERO : y == -1 ? 0 : x % y)                                                           \
    F("Remainder", remainder, 2, r != 0 && (r < 0) != (y < 0) ? r + y : r,                                             \
      const real r = y == 0 ? BY_ZERO : y == -1 ? 0 : x % y)

/* Numbers in, booleans out. */
#define COMPARISONS(F)                                                                                                 \
    F("Equal", equal, 2, x == y, )                                                                                     \
    F("Less", less, 2, x < y, )                                                                                        \
    F("LessOrEqual", less_or_equal, 2, x <= y, )                                                                       \
    F("Greater", greater, 2, x > y, )                                                                                  \
    F("GreaterOrEqual", greater_or_equal, 2, x >= y, )

#define FLOAT_TESTS(F)                                                                                                 \
    F("IsNaN", is_nan, 1, x != x, )                                                                                    \
    F("SignBit", sign_bit, 1, signbit(x) != 0, )                                                                       \
    F("IsInf", is_inf, 1, (p0 != 0 && x == INFINITY) || (p1 != 0 && x == -INFINITY), )

#define BOOL_OPERATORS(F)                                                                                              \
    F("Equal", equal, 2, x == y, )                                                                                     \
    F("And", and, 2, (x & y), )                                                                                        \
    F("Or", or, 2, x | y, )                                                                                            \
    F("Xor", xor, 2, x ^ y, )                                                                                          \
    F("Not", not, 1, !x, )
/* clang-format on */

/* Conversions, as in ops/pointwise/select.c. */
#define TRUNCATED(T, least) (x >= (real)(least) && x < -(real)(least) ? (T)x : (least))
/* clang-format off */
#define CASTS(F)                                                                                                       \
    F(f32, float, TRUNCATED(int64_t, INT64_MIN), TRUNCATED(int32_t, INT32_MIN))                                        \
    F(f64, double, TRUNCATED(int64_t, INT64_MIN), TRUNCATED(int32_t, INT32_MIN))                                       \
    F(i64, int64_t, x, x)                                                                                              \
    F(i32, int32_t, x, x)                                                                                              \
    F(bool, uint8_t, x, x)

/* What they compute with: (name, type). */
#define CLASSES(F) F(f32, float) F(f64, double) F(i64, int64_t) F(i32, int32_t) F(bool, uint8_t)
/* clang-format on */

#ifdef ORT_DEVICE
/* x^y by squaring; 1 / x^-y for negative y. */
DEVICE uint64_t int_power(int64_t x, int64_t y) {
    uint64_t base = (uint64_t)x, result = 1;
    if (y < 0) return x == 1 ? 1 : x == -1 ? (y & 1 ? (uint64_t)-1 : 1) : 0;
    for (; y; y >>= 1, base *= base)
        if (y & 1) result *= base;
    return result;
}

#define PI 3.14159265358979324

/* As in ops/pointwise/unary.c. */
FAR double digamma(double x) {
    double result = 0;

    if (x == 0) return copysign((double)INFINITY, -x);
    if (x < 0) {
        if (x == floor(x)) return (double)NAN;
        result = -PI / tan(PI * (x - rint(x)));
        x = 1 - x;
    }
    for (; x < 10; x++) result -= 1 / x;
    const double square = 1 / (x * x);
    return result + log(x) - 0.5 / x -
           square * (1. / 12 - square * (1. / 120 - square * (1. / 252 - square * (1. / 240 - square * (1. / 132)))));
}

FAR double trigamma(double x) {
    double result = 0, sign = 1;

    if (x < 0.5) {
        const double sine = sin(PI * (x - rint(x)));
        sign = -1;
        result = -(PI * PI) / (sine * sine);
        x = 1 - x;
    }
    for (; x < 10; x++) result += 1 / (x * x);
    const double square = 1 / (x * x);
    result += 1 / x + square / 2 +
              square / x * (1. / 6 - square * (1. / 30 - square * (1. / 42 - square * (1. / 30 - square * 5 / 66))));
    return sign * result;
}
#endif

#endif
