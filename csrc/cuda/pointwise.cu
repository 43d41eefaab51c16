/* pointwise.cu -- every pointwise operator: twin of ops/pointwise.c and of the functions in its families.
 *
 * A thread takes four neighbouring elements at a time. An operand that lies as the output does is read in one piece, a
 * single number once, any other element by element through its strides; narrow types are widened on the way. The lists
 * below are the families': a row is an operator and its expression, and makes the kernels and the table both. */
#include "cuda/kernel.h"

enum { AT_ONCE = 4, OPERANDS = 4, PARAMETERS = 4 };

typedef enum reach { DENSE, SINGLE, STRIDES } reach;

typedef struct source {
    const void *data;
    int32_t type, how;
    int64_t stride[8];
} source;

typedef struct pointwise_args {
    void *out;
    int64_t count, dim[8];
    int32_t type, rank;
    source in[OPERANDS];
    double param[PARAMETERS];
} pointwise_args;

/* --- operators: (name, function, operands, expression, what else it uses) ----------------------------------------- */

/* x, y, z, w are the operands, `real` their type, p0 and p1 the parameters, as in ops/pointwise.h. */
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
    F("Maximum", max, 2, x > y || x != x ? x : y, )                                                                    \
    F("Minimum", min, 2, x < y || x != x ? x : y, )                                                                    \
    F("Pow", pow, 2, pow(x, y), )                                                                                      \
    F("Mod", mod, 2, p0 == 0 && r != 0 && (r < 0) != (y < 0) ? r + y : r, const real r = fmod(x, y))                   \
    F("Remainder", remainder, 2, r != 0 && (r < 0) != (y < 0) ? r + y : r, const real r = fmod(x, y))                  \
    F("Atan2", atan2, 2, atan2(x, y), )                                                                                \
    F("Hypot", hypot, 2, hypot(x, y), )                                                                                \
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
    F("BitwiseNot", bit_not, 1, ~x, )

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

/* --- the host ----------------------------------------------------------------------------------------------------- */

#ifdef ORT_HOST
#include "ops/pointwise.h"

#include <string.h>

typedef struct row {
    const char *name;
    kernel kernels[TILE_CLASSES]; /* by the class of the last operand */
    const op_def *_Atomic op;     /* once it was found */
} row;

#define FLOAT_ROW(name_, f, ...) {.name = name_, .kernels = {[TILE_F32] = {#f "_f32"}, [TILE_F64] = {#f "_f64"}}},
#define INT_ROW(name_, f, ...) {.name = name_, .kernels = {[TILE_I64] = {#f "_i64"}, [TILE_I32] = {#f "_i32"}}},
#define NUMBER_ROW(name_, f, ...)                                                                                      \
    {.name = name_,                                                                                                    \
     .kernels = {                                                                                                      \
         [TILE_F32] = {#f "_f32"}, [TILE_F64] = {#f "_f64"}, [TILE_I64] = {#f "_i64"}, [TILE_I32] = {#f "_i32"}}},
#define BOOL_ROW(name_, f, ...) {.name = name_, .kernels = {[TILE_BOOL] = {#f "_bool"}}},

/* An operator may have several rows, for different classes. */
static row floats[] = {FLOAT_OPERATORS(FLOAT_ROW) FLOAT_TESTS(FLOAT_ROW)
                           COMPARISONS(NUMBER_ROW){.name = "Where",
                                                   .kernels = {[TILE_F32] = {"where_f32"},
                                                               [TILE_F64] = {"where_f64"},
                                                               [TILE_I64] = {"where_i64"},
                                                               [TILE_I32] = {"where_i32"},
                                                               [TILE_BOOL] = {"where_bool"}}}};
static row ints[] = {INT_OPERATORS(INT_ROW)};
static row bools[] = {BOOL_OPERATORS(BOOL_ROW)};

#define CASTS_FROM(f)                                                                                                  \
    {[TILE_F32] = {#f "_to_f32"},                                                                                      \
     [TILE_F64] = {#f "_to_f64"},                                                                                      \
     [TILE_I64] = {#f "_to_i64"},                                                                                      \
     [TILE_I32] = {#f "_to_i32"},                                                                                      \
     [TILE_BOOL] = {#f "_to_bool"}}
static kernel casts[TILE_CLASSES][TILE_CLASSES] = {
    [TILE_F32] = CASTS_FROM(f32), [TILE_F64] = CASTS_FROM(f64),   [TILE_I64] = CASTS_FROM(i64),
    [TILE_I32] = CASTS_FROM(i32), [TILE_BOOL] = CASTS_FROM(bool),
};

static kernel *find_in(row *rows, size_t n, const op_def *op, tile_class class) {
    for (size_t i = 0; i < n; i++) {
        const op_def *known = rows[i].op;
        if (known ? known != op : strcmp(rows[i].name, op->name) != 0) continue;
        rows[i].op = op;
        if (rows[i].kernels[class].name) return &rows[i].kernels[class];
    }
    return NULL;
}

static kernel *find(const op_def *op, tile_class from, tile_class to) {
    if (strcmp(op->name, "Cast") == 0) return &casts[from][to];
    kernel *k = find_in(floats, sizeof floats / sizeof *floats, op, from);
    if (!k) k = find_in(ints, sizeof ints / sizeof *ints, op, from);
    return k ? k : find_in(bools, sizeof bools / sizeof *bools, op, from);
}

/* The output's dimensions, as few as describe every operand. */
static void merge_dimensions(pointwise_args *a, int n) {
    int last = -1;

    for (int d = 0; d < a->rank; d++) {
        const int64_t size = a->dim[d];
        bool runs_on = last >= 0;
        if (size == 1) continue;
        for (int i = 0; i < n && runs_on; i++) runs_on = a->in[i].stride[last] == a->in[i].stride[d] * size;
        if (runs_on) a->dim[last] *= size;
        else a->dim[++last] = size;
        for (int i = 0; i < n; i++) a->in[i].stride[last] = a->in[i].stride[d];
    }
    a->rank = last + 1;
}

static reach reach_of(const pointwise_args *a, const source *s) {
    bool single = true;
    for (int d = 0; d < a->rank; d++) single = single && s->stride[d] == 0;
    if (single) return SINGLE;
    return a->rank == 1 && s->stride[0] == 1 ? DENSE : STRIDES;
}

status pointwise_cuda(ctx *c, const call *k) {
    const tensor *out = &k->out[0];
    tile_class from = tile_class_of(k->in[k->n_in - 1].type), to = tile_class_of(out->type);
    kernel *f = find(k->node->op, from, to);
    pointwise_args a = {.out = out->data, .count = tensor_count(out), .type = out->type, .rank = out->shape.rank};

    if (!f)
        return fail(c, E_UNSUPPORTED, "%s of %s has no CUDA kernel", k->node->op->name,
                    dtype_name(k->in[k->n_in - 1].type));
    for (int d = 0; d < a.rank; d++) a.dim[d] = out->shape.dim[d];
    for (int i = 0; i < k->n_in; i++) {
        tensor t = tensor_expand(&k->in[i], &out->shape);
        a.in[i].data = t.data;
        a.in[i].type = t.type;
        for (int d = 0; d < a.rank; d++) a.in[i].stride[d] = t.stride[d];
    }
    merge_dimensions(&a, k->n_in);
    for (int i = 0; i < k->n_in; i++) a.in[i].how = reach_of(&a, &a.in[i]);
    tile_parameters(k->node, a.param);
    return cuda_launch(c, k, f, geometry_over(a.count, AT_ONCE * 256, 256), &a);
}
#endif

/* --- kernels ------------------------------------------------------------------------------------------------------ */

#ifdef ORT_DEVICE
#ifndef __CUDACC__
#include <tgmath.h> /* as in CUDA, exp and the like are of their argument's type */
#endif

typedef struct alignas_8 {
    uint16_t x[4];
} __attribute__((aligned(8))) four_16;
typedef struct alignas_16 {
    uint32_t x[4];
} __attribute__((aligned(16))) four_32;

FAR int64_t offset_of(const pointwise_args *a, const source *s, int64_t i) {
    int64_t offset = 0;
    if (a->count <= INT32_MAX) {
        uint32_t rest = (uint32_t)i;
        for (int d = a->rank - 1; d >= 0; d--) {
            uint32_t next = rest / (uint32_t)a->dim[d];
            offset += (int64_t)(rest - next * (uint32_t)a->dim[d]) * s->stride[d];
            rest = next;
        }
    } else {
        for (int d = a->rank - 1; d >= 0; d--) {
            offset += i % a->dim[d] * s->stride[d];
            i /= a->dim[d];
        }
    }
    return offset;
}

DEVICE float get_float(const void *p, int type, int64_t i) {
    return type == F32    ? ((const float *)p)[i]
           : type == BF16 ? bf16_to_f32(((const bf16 *)p)[i])
                          : f16_to_f32(((const f16 *)p)[i]);
}
DEVICE double get_double(const void *p, int type, int64_t i) { return (void)type, ((const double *)p)[i]; }
DEVICE int64_t get_int64_t(const void *p, int type, int64_t i) { return (void)type, ((const int64_t *)p)[i]; }
DEVICE int32_t get_int32_t(const void *p, int type, int64_t i) {
    return type == I32   ? ((const int32_t *)p)[i]
           : type == I16 ? ((const int16_t *)p)[i]
           : type == I8  ? ((const int8_t *)p)[i]
                         : ((const uint8_t *)p)[i];
}
DEVICE uint8_t get_uint8_t(const void *p, int type, int64_t i) { return (void)type, ((const uint8_t *)p)[i]; }

/* Four at a time, where they are aligned; false: nothing was read. */
DEVICE int get_four_float(const void *p, int type, int64_t i, float x[AT_ONCE]) {
    if (type == F32) {
        if ((uintptr_t)p & 15) return 0;
        four_32 v = *(const four_32 *)((const float *)p + i);
        for (int j = 0; j < AT_ONCE; j++) x[j] = bits_to_f32(v.x[j]);
    } else {
        if ((uintptr_t)p & 7) return 0;
        four_16 v = *(const four_16 *)((const uint16_t *)p + i);
        for (int j = 0; j < AT_ONCE; j++) x[j] = type == BF16 ? bf16_to_f32(v.x[j]) : f16_to_f32(v.x[j]);
    }
    return 1;
}
#define NO_FOUR(T)                                                                                                     \
    DEVICE int get_four_##T(const void *p, int type, int64_t i, T x[AT_ONCE]) {                                        \
        return (void)p, (void)type, (void)i, (void)x, 0;                                                               \
    }
NO_FOUR(double)
NO_FOUR(int64_t)
NO_FOUR(int32_t)
NO_FOUR(uint8_t)

/* Elements [i, i + n). */
#define LOAD(T)                                                                                                        \
    FAR void load_##T(const pointwise_args *a, const source *s, int64_t i, int n, T x[AT_ONCE]) {                      \
        if (s->how == DENSE) {                                                                                         \
            if (n == AT_ONCE && get_four_##T(s->data, s->type, i, x)) return;                                          \
            for (int j = 0; j < AT_ONCE; j++) x[j] = j < n ? get_##T(s->data, s->type, i + j) : 0;                     \
        } else if (s->how == SINGLE) {                                                                                 \
            const T v = get_##T(s->data, s->type, 0);                                                                  \
            for (int j = 0; j < AT_ONCE; j++) x[j] = v;                                                                \
        } else {                                                                                                       \
            for (int j = 0; j < AT_ONCE; j++) x[j] = j < n ? get_##T(s->data, s->type, offset_of(a, s, i + j)) : 0;    \
        }                                                                                                              \
    }
LOAD(float)
LOAD(double)
LOAD(int64_t)
LOAD(int32_t)
LOAD(uint8_t)

FAR void store_float(const pointwise_args *a, int64_t i, int n, const float x[AT_ONCE]) {
    if (a->type == F32) {
        if (n == AT_ONCE && ((uintptr_t)a->out & 15) == 0) {
            four_32 v;
            for (int j = 0; j < AT_ONCE; j++) v.x[j] = f32_to_bits(x[j]);
            *(four_32 *)((float *)a->out + i) = v;
        } else {
            for (int j = 0; j < AT_ONCE; j++)
                if (j < n) ((float *)a->out)[i + j] = x[j];
        }
    } else {
        uint16_t v[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++) v[j] = a->type == BF16 ? f32_to_bf16(x[j]) : f32_to_f16(x[j]);
        if (n == AT_ONCE && ((uintptr_t)a->out & 7) == 0) {
            four_16 w;
            for (int j = 0; j < AT_ONCE; j++) w.x[j] = v[j];
            *(four_16 *)((uint16_t *)a->out + i) = w;
        } else {
            for (int j = 0; j < AT_ONCE; j++)
                if (j < n) ((uint16_t *)a->out)[i + j] = v[j];
        }
    }
}
#define STORE(T)                                                                                                       \
    FAR void store_##T(const pointwise_args *a, int64_t i, int n, const T x[AT_ONCE]) {                                \
        for (int j = 0; j < AT_ONCE; j++)                                                                              \
            if (j < n) ((T *)a->out)[i + j] = x[j];                                                                    \
    }
STORE(double)
STORE(int64_t)
STORE(uint8_t)
FAR void store_int32_t(const pointwise_args *a, int64_t i, int n, const int32_t x[AT_ONCE]) {
    for (int j = 0; j < AT_ONCE; j++) {
        if (j >= n) continue;
        if (a->type == I32) ((int32_t *)a->out)[i + j] = x[j];
        else if (a->type == I16) ((int16_t *)a->out)[i + j] = (int16_t)x[j];
        else ((int8_t *)a->out)[i + j] = (int8_t)x[j];
    }
}

#define LOADS_1(T) load_##T(&a, &a.in[0], i, n, four_x);
#define LOADS_2(T) LOADS_1(T) load_##T(&a, &a.in[1], i, n, four_y);
#define LOADS_3(T) LOADS_2(T) load_##T(&a, &a.in[2], i, n, four_z);
#define LOADS_4(T) LOADS_3(T) load_##T(&a, &a.in[3], i, n, four_w);
#define ELEMENTS_1 const real x = four_x[j];
#define ELEMENTS_2 ELEMENTS_1 const real y = four_y[j];
#define ELEMENTS_3 ELEMENTS_2 const real z = four_z[j];
#define ELEMENTS_4 ELEMENTS_3 const real w = four_w[j];
#define BUFFERS_1(T) T four_x[AT_ONCE];
#define BUFFERS_2(T) BUFFERS_1(T) T four_y[AT_ONCE];
#define BUFFERS_3(T) BUFFERS_2(T) T four_z[AT_ONCE];
#define BUFFERS_4(T) BUFFERS_3(T) T four_w[AT_ONCE];

/* A kernel from k operands of T to R. */
#define POINTWISE(name, k, T, U, R, expr, ...)                                                                         \
    KERNEL(name, pointwise_args) {                                                                                     \
        typedef T real;                                                                                                \
        typedef U word;                                                                                                \
        const real p0 = (real)a.param[0], p1 = (real)a.param[1];                                                       \
        (void)p0, (void)p1, (void)sizeof(word);                                                                        \
        FOR_EACH(group, (a.count + AT_ONCE - 1) / AT_ONCE) {                                                           \
            const int64_t i = group * AT_ONCE;                                                                         \
            const int n = a.count - i < AT_ONCE ? (int)(a.count - i) : AT_ONCE;                                        \
            BUFFERS_##k(T) R out[AT_ONCE];                                                                             \
            LOADS_##k(T) for (int j = 0; j < AT_ONCE; j++) {                                                           \
                ELEMENTS_##k __VA_ARGS__;                                                                              \
                out[j] = (R)(expr);                                                                                    \
            }                                                                                                          \
            store_##R(&a, i, n, out);                                                                                  \
        }                                                                                                              \
    }

#define FLOAT_KERNEL(op, name, k, expr, ...)                                                                           \
    POINTWISE(name##_f32, k, float, float, float, expr, __VA_ARGS__)                                                   \
    POINTWISE(name##_f64, k, double, double, double, expr, __VA_ARGS__)
#define INT_KERNEL(op, name, k, expr, ...)                                                                             \
    POINTWISE(name##_i64, k, int64_t, uint64_t, int64_t, expr, __VA_ARGS__)                                            \
    POINTWISE(name##_i32, k, int32_t, uint32_t, int32_t, expr, __VA_ARGS__)
#define FLOAT_TEST_KERNEL(op, name, k, expr, ...)                                                                      \
    POINTWISE(name##_f32, k, float, float, uint8_t, expr, __VA_ARGS__)                                                 \
    POINTWISE(name##_f64, k, double, double, uint8_t, expr, __VA_ARGS__)
#define COMPARISON_KERNEL(op, name, k, expr, ...)                                                                      \
    FLOAT_TEST_KERNEL(op, name, k, expr, __VA_ARGS__)                                                                  \
    POINTWISE(name##_i64, k, int64_t, uint64_t, uint8_t, expr, __VA_ARGS__)                                            \
    POINTWISE(name##_i32, k, int32_t, uint32_t, uint8_t, expr, __VA_ARGS__)
#define BOOL_KERNEL(op, name, k, expr, ...) POINTWISE(name##_bool, k, uint8_t, uint8_t, uint8_t, expr, __VA_ARGS__)

FLOAT_OPERATORS(FLOAT_KERNEL)
INT_OPERATORS(INT_KERNEL)
COMPARISONS(COMPARISON_KERNEL)
FLOAT_TESTS(FLOAT_TEST_KERNEL)
BOOL_OPERATORS(BOOL_KERNEL)

/* Conversions: as in ops/select.c. */
#define TRUNCATED(T, least) (x >= (real)(least) && x < -(real)(least) ? (T)x : (least))
#define CAST_KERNELS(from, F, as_i64, as_i32)                                                                          \
    POINTWISE(from##_to_f32, 1, F, F, float, x, )                                                                      \
    POINTWISE(from##_to_f64, 1, F, F, double, x, )                                                                     \
    POINTWISE(from##_to_i64, 1, F, F, int64_t, as_i64, )                                                               \
    POINTWISE(from##_to_i32, 1, F, F, int32_t, as_i32, )                                                               \
    POINTWISE(from##_to_bool, 1, F, F, uint8_t, x != 0, )
CAST_KERNELS(f32, float, TRUNCATED(int64_t, INT64_MIN), TRUNCATED(int32_t, INT32_MIN))
CAST_KERNELS(f64, double, TRUNCATED(int64_t, INT64_MIN), TRUNCATED(int32_t, INT32_MIN))
CAST_KERNELS(i64, int64_t, x, x)
CAST_KERNELS(i32, int32_t, x, x)
CAST_KERNELS(bool, uint8_t, x, x)

#define WHERE(name, T)                                                                                                 \
    KERNEL(name, pointwise_args) {                                                                                     \
        FOR_EACH(group, (a.count + AT_ONCE - 1) / AT_ONCE) {                                                           \
            const int64_t i = group * AT_ONCE;                                                                         \
            const int n = a.count - i < AT_ONCE ? (int)(a.count - i) : AT_ONCE;                                        \
            uint8_t condition[AT_ONCE];                                                                                \
            T x[AT_ONCE], y[AT_ONCE];                                                                                  \
            load_uint8_t(&a, &a.in[0], i, n, condition);                                                               \
            load_##T(&a, &a.in[1], i, n, x);                                                                           \
            load_##T(&a, &a.in[2], i, n, y);                                                                           \
            for (int j = 0; j < AT_ONCE; j++) x[j] = condition[j] ? x[j] : y[j];                                       \
            store_##T(&a, i, n, x);                                                                                    \
        }                                                                                                              \
    }
WHERE(where_f32, float)
WHERE(where_f64, double)
WHERE(where_i64, int64_t)
WHERE(where_i32, int32_t)
WHERE(where_bool, uint8_t)
#endif
