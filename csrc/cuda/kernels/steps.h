/* steps.h -- adds to the pointwise operators of floats (ops/pointwise/operators.h) those of other types: rows of lists, from
 * which come the kernels of pointwise.cu, the interpreter of chains (fused.cu) and the text of compiled ones (generate.c).
 */
#ifndef ORT_CUDA_STEPS_H
#define ORT_CUDA_STEPS_H

/* --- functions of formulas (ops/pointwise/operators.h) ------------------------------------------------------------- */

#define sigmoid(t) (1 / (1 + exp(-(t))))
#define phi(t, e) ((void)(e), (real)0.5 * (1 + erf((t) * (real)0.70710678118654752)))

/* --- operators of other types: (name, function, operands, expression, what else it uses) ------------------------------
 * x, y, z, w are the operands, `real` their type, p0 and p1 the parameters, as in ops/pointwise/pointwise.h. */

/* clang-format off */
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
