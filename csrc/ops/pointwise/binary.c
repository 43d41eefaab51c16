/* binary.c -- owns arithmetic on two operands and on any number: Add Sub Mul Div Pow Mod, Max Min Sum Mean.
 * Of our domain FloorDiv Remainder (PyTorch's for every type, ONNX has them for integers) Atan2 Hypot Huber. The formulas
 * of floats are rows of operators.h. Most records stand here, since they compute integers, too, or have several gradients.
 *
 * Gradients, before un-broadcasting:
 *     Div      dx = dy / y, and -dy out / y for y: the quotient stays alive, x need not
 *     Pow      dx = dy y x^(y-1), 0 where y = 0; dy out log(x) for y, 0 where x = 0 and y >= 0
 *     Mod      dx = dy, and -dy times the whole quotient for y, rounded as the operator rounds it
 *     Atan2    dx = dy y / (x^2 + y^2), and -dy x / (x^2 + y^2) for y; 0 where the squares are 0
 *     Hypot    dx = dy x / out, the same for y
 *     Max Min  all of dy to the operand that is picked, half to each where they are equal, all to both for NaN
 * Integers wrap around. Dividing them by zero is an error that says what PyTorch says. */
#define FAMILY BINARY_FAMILY
#include "ops/pointwise/operator_loops.h"
#include "ops/pointwise/pointwise.h"

/* --- kernels ------------------------------------------------------------------------------------------------------ */

WRAP_FN(add, 2, x + y)
WRAP_FN(sub, 2, x - y)
WRAP_FN(mul, 2, (x * y))
/* The smallest number has no negative: -1 must not divide it. 0 does not get here; it must not trap where it does. */
INT_FN(div, 2, y == 0 ? 0 : y == -1 ? (real)(0 - (uint64_t)x) : x / y)

INT_FN(max, 2, x > y ? x : y)
INT_FN(min, 2, x < y ? x : y)

/* Quotients may be too large for the vector fmod: a tile with one goes through libm. */
SIMD static bool any_beyond_fmod_limit(int64_t n, const float *x, const float *y) {
    int any = 0;
    for (int64_t i = 0; i < n; i++) any |= !(fabsf(x[i]) < FMOD_LIMIT * fabsf(y[i])) && y[i] != 0;
    return any;
}

#define BY_FMOD(name, expr, ...)                                                                                       \
    TILE_FN(name##_near, 2, float, float, expr, const real r = vfmodf(x, y); __VA_ARGS__)                              \
    TILE_FN(name##_far, 2, float, float, expr, const real r = fmodf(x, y); __VA_ARGS__)                                \
    static void name##_f32(int64_t n, void *out, const void *const *in, const double *param) {                         \
        (any_beyond_fmod_limit(n, in[0], in[1]) ? name##_far : name##_near)(n, out, in, param);                        \
    }                                                                                                                  \
    TILE_FN(name##_f64, 2, double, double, expr, const real r = fmod(x, y); __VA_ARGS__)

BY_FMOD(mod, MOD_OF_REST, )
#define INT_MOD(name, T) TILE_FN(name, 2, T, T, MOD_OF_REST, const T r = y == 0 || y == -1 ? 0 : x % y)
INT_MOD(mod_i64, int64_t)
INT_MOD(mod_i32, int32_t)
#define REMAINDER(type)                                                                                                \
    static void remainder_##type(int64_t n, void *out, const void *const *in, const double *param) {                   \
        static const double as_in_python[TILE_PARAMS] = {0};                                                           \
        (void)param;                                                                                                   \
        mod_##type(n, out, in, as_in_python);                                                                          \
    }
REMAINDER(f32)
REMAINDER(f64)
REMAINDER(i64)
REMAINDER(i32)

BY_FMOD(floor_div, FLOOR_OF_REST, QUOTIENT_OF_REST)
/* Wraps around as a quotient does. */
INT_FN(floor_div, 2, y == 0 ? 0 : y == -1 ? (real)(0 - (uint64_t)x) : x / y - (x % y != 0 && (x < 0) != (y < 0)))

/* Where every exponent of a tile is -2, as with a constant, 1 / (x x) is the power, if the square is a normal number. */
#define POWER(name, T, is_normal)                                                                                      \
    TILE_2(any_##name, T, T, v_pow(x, y))                                                                              \
    TILE_1(inverse_square_##name, T, 1 / (x * x))                                                                      \
    SIMD static bool all_inverse_squares_##name(int64_t n, const T *x, const T *y) {                                   \
        int other = 0;                                                                                                 \
        for (int64_t i = 0; i < n; i++) other |= !(y[i] == -2) | !(is_normal);                                         \
        return !other;                                                                                                 \
    }                                                                                                                  \
    static void name(int64_t n, void *out, const void *const *in, const double *param) {                               \
        const T *y = in[1];                                                                                            \
        const bool fast = n > 0 && y[0] == -2 && all_inverse_squares_##name(n, in[0], y);                              \
        (fast ? inverse_square_##name : any_##name)(n, out, in, param);                                                \
    }
POWER(pow_f32, float, (fabsf(x[i]) > 0x1p-63f) & (fabsf(x[i]) < 0x1p63f))
POWER(pow_f64, double, (fabs(x[i]) > 0x1p-511) & (fabs(x[i]) < 0x1p511))

/* x^y by squaring; 1 / x^-y for negative y, which is 0 unless x is 1 or -1. */
static inline uint64_t int_power(int64_t x, int64_t y) {
    uint64_t base = (uint64_t)x, result = 1;
    if (y < 0) return x == 1 ? 1 : x == -1 ? (y & 1 ? (uint64_t)-1 : 1) : 0;
    for (; y; y >>= 1, base *= base)
        if (y & 1) result *= base;
    return result;
}
INT_FN(pow, 2, int_power(x, y))

static bool has_zero(const tensor *t) {
    tile_source s = tile_source_of(t, &t->shape);
    int64_t count = tensor_count(t);
    tile_buffer buffer;

    tile_begin(&s, count < TILE ? count : TILE, &buffer);
    for (int64_t start = 0; start < count; start += TILE) {
        int64_t n = count - start < TILE ? count - start : TILE;
        const void *tile = tile_read(&s, start, n, &buffer);
        const int64_t *wide = tile;
        const int32_t *narrow = tile;
        bool zero = false;
        for (int64_t i = 0; i < n; i++) zero |= t->type == I64 ? wide[i] == 0 : narrow[i] == 0;
        if (zero) return true;
    }
    return false;
}

/* Every element of the divisor is used, unless there is nothing to divide. */
static status divide_cpu(ctx *c, const call *k) {
    const tensor *divisor = &k->in[1];
    if (!dtype_is_float(divisor->type) && tensor_count(&k->out[0]) && has_zero(divisor))
        return fail(c, E_RUNTIME, "ZeroDivisionError: a divisor of type %s is 0", dtype_name(divisor->type));
    return pointwise_cpu(c, k);
}

/* --- simplification ----------------------------------------------------------------------------------------------- */

/* The other operand, when operand `i` is filled with `neutral` and does not change the shape. */
static void drop_neutral(const node *n, int i, double neutral, value **out) {
    value *x = n->in[1 - i];
    double filler;
    if (!shape_equal(&x->shape, &n->out[0]->shape)) return;
    if (value_is_filled(n->in[i], &filler) && filler == neutral) out[0] = x;
}

static status simplify_sum(graph *g, const node *n, value **out) {
    (void)g;
    drop_neutral(n, 0, 0, out);
    drop_neutral(n, 1, 0, out);
    return OK;
}

static status simplify_difference(graph *g, const node *n, value **out) {
    (void)g;
    drop_neutral(n, 1, 0, out);
    return OK;
}

/* A product with 0 stays: it is NaN where the other operand is. */
static status simplify_product(graph *g, const node *n, value **out) {
    (void)g;
    drop_neutral(n, 0, 1, out);
    drop_neutral(n, 1, 1, out);
    return OK;
}

static status simplify_quotient(graph *g, const node *n, value **out) {
    (void)g;
    drop_neutral(n, 1, 1, out);
    return OK;
}

/* --- compositions ------------------------------------------------------------------------------------------------- */

/* The exponents that PyTorch does not compute as powers either: infinities and zeros are others. */
static status lower_known_power(graph *g, value *x, double y, value **out) {
    value *square, *root;

    if (y == 0) return graph_full(g, x->type, &x->shape, 1, out);
    if (y == 1) {
        out[0] = x;
        return OK;
    }
    if (y == 2) return emit(g, out, "Mul", x, x);
    if (y == 3) {
        TRY(emit(g, &square, "Mul", x, x));
        return emit(g, out, "Mul", square, x);
    }
    if (!dtype_is_float(x->type)) return OK;
    if (y == 0.5) return emit(g, out, "Sqrt", x);
    if (y == -1) return emit(g, out, "Reciprocal", x);
    if (y == -0.5) {
        TRY(emit(g, &root, "Sqrt", x));
        return emit(g, out, "Reciprocal", root);
    }
    return OK;
}

/* The exponent in the base's type; an integer to a fractional power is computed in float64. */
static status lower_power(graph *g, const node *n, value **out) {
    value *x = n->in[0], *y = n->in[1];
    double exponent;
    shape s;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    if (x->type == y->type) {
        TRY(shape_broadcast(g->c, &x->shape, &y->shape, &s));
        const bool known = value_is_filled(y, &exponent) && shape_equal(&x->shape, &s);
        return known ? lower_known_power(g, x, exponent, out) : OK;
    }
    if (dtype_is_float(x->type) || !dtype_is_float(y->type)) {
        TRY(emit_cast(g, y, x->type, &y));
        return emit(g, out, "Pow", x, y);
    }
    TRY(emit_cast(g, x, F64, &x));
    TRY(emit_cast(g, y, F64, &y));
    TRY(emit(g, &x, "Pow", x, y));
    return emit_cast(g, x, n->in[0]->type, out);
}

/* op(op(a, b), c)... */
static status emit_chain(graph *g, const node *n, const char *op, value **out) {
    value *total = n->in[0];
    for (int i = 0; i < n->n_in; i++) {
        TRY(require(g, n, i));
        if (i > 0) TRY(emit(g, &total, op, total, n->in[i]));
    }
    out[0] = total;
    return OK;
}

static status lower_sum(graph *g, const node *n, value **out) { return emit_chain(g, n, "Add", out); }

static status lower_mean(graph *g, const node *n, value **out) {
    value *count;
    TRY(emit_chain(g, n, "Add", out));
    TRY(graph_scalar(g, out[0]->type, n->n_in, &count));
    return emit(g, out, "Div", out[0], count);
}

/* Arithmetic on booleans is logic, as in PyTorch. */
static bool is_logic(const node *n) { return n->in[0] && n->in[0]->type == BOOL; }

static status lower_max(graph *g, const node *n, value **out) {
    return emit_chain(g, n, is_logic(n) ? "Or" : "Maximum", out);
}

static status lower_min(graph *g, const node *n, value **out) {
    return emit_chain(g, n, is_logic(n) ? "And" : "Minimum", out);
}

static status lower_add(graph *g, const node *n, value **out) {
    return is_logic(n) ? emit(g, out, "Or", n->in[0], n->in[1]) : OK;
}

static status lower_mul(graph *g, const node *n, value **out) {
    return is_logic(n) ? emit(g, out, "And", n->in[0], n->in[1]) : OK;
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static status grad_add(graph *g, const node *n, value *const dy[], value *dx[]) {
    (void)g, (void)n;
    dx[0] = dx[1] = dy[0];
    return OK;
}

static status grad_sub(graph *g, const node *n, value *const dy[], value *dx[]) {
    dx[0] = dy[0];
    return need(n, 1) ? emit(g, &dx[1], "Neg", dy[0]) : OK;
}

static status grad_mul(graph *g, const node *n, value *const dy[], value *dx[]) {
    if (need(n, 0)) TRY(emit(g, &dx[0], "Mul", dy[0], n->in[1]));
    if (need(n, 1)) TRY(emit(g, &dx[1], "Mul", dy[0], n->in[0]));
    return OK;
}

static status grad_div(graph *g, const node *n, value *const dy[], value *dx[]) {
    if (need(n, 0)) TRY(emit(g, &dx[0], "Div", dy[0], n->in[1]));
    if (need(n, 1)) TRY(emit(g, &dx[1], "DivisorGrad", dy[0], n->in[1], n->out[0]));
    return OK;
}

/* A constant exponent whose power PyTorch does not compute as one: the slope is y x^(y-1). */
static bool has_simple_slope(const node *n) {
    static const double simple[] = {0.5, 2, 3, -0.5, -1, -2};
    const value *x = n->in[0];
    double y;

    if (!dtype_is_float(x->type) || !shape_equal(&x->shape, &n->out[0]->shape) || !value_is_filled(n->in[1], &y))
        return false;
    for (size_t i = 0; i < sizeof simple / sizeof *simple; i++)
        if (y - 1 == simple[i]) return true;
    return false;
}

static status grad_power(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *x = n->in[0], *y = n->in[1], *one, *slope;
    if (need(n, 0) && has_simple_slope(n)) {
        TRY(graph_scalar(g, y->type, 1, &one));
        TRY(emit(g, &slope, "Sub", y, one));
        TRY(emit(g, &slope, "Pow", x, slope));
        TRY(emit(g, &slope, "Mul", slope, y));
        TRY(emit(g, &dx[0], "Mul", dy[0], slope));
    } else if (need(n, 0)) {
        TRY(emit(g, &dx[0], "PowGrad", dy[0], x, y));
    }
    if (need(n, 1)) TRY(emit(g, &dx[1], "PowExponentGrad", dy[0], x, y, n->out[0]));
    return OK;
}

static status grad_mod_by(graph *g, const node *n, bool floors, value *const dy[], value *dx[]) {
    value *quotient;

    dx[0] = dy[0];
    if (!need(n, 1)) return OK;
    if (floors) {
        TRY(emit(g, &quotient, "FloorDiv", n->in[0], n->in[1]));
    } else {
        TRY(emit(g, &quotient, "Div", n->in[0], n->in[1]));
        TRY(emit(g, &quotient, "Trunc", quotient));
    }
    TRY(emit(g, &dx[1], "Mul", dy[0], quotient));
    return emit(g, &dx[1], "Neg", dx[1]);
}

static status grad_mod(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_mod_by(g, n, !node_int(n, "fmod"), dy, dx);
}

static status grad_remainder(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_mod_by(g, n, true, dy, dx);
}

static status grad_steps(graph *g, const node *n, value *const dy[], value *dx[]) {
    (void)dy;
    for (int i = 0; i < 2; i++)
        if (need(n, i)) TRY(zeros_like(g, n->in[i], &dx[i]));
    return OK;
}

static status grad_atan2(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *x = n->in[0], *y = n->in[1], *squares, *other, *none;

    TRY(emit(g, &squares, "Mul", x, x));
    TRY(emit(g, &other, "Mul", y, y));
    TRY(emit(g, &squares, "Add", squares, other));
    TRY(graph_scalar(g, squares->type, 0, &none));
    TRY(emit(g, &none, "Equal", squares, none));
    TRY(graph_scalar(g, squares->type, INFINITY, &other));
    TRY(emit(g, &squares, "Where", none, other, squares));
    if (need(n, 0)) TRY(emit(g, &dx[0], "AlongGrad", dy[0], y, squares));
    if (!need(n, 1)) return OK;
    TRY(emit(g, &dx[1], "AlongGrad", dy[0], x, squares));
    return emit(g, &dx[1], "Neg", dx[1]);
}

static status grad_hypot(graph *g, const node *n, value *const dy[], value *dx[]) {
    for (int i = 0; i < 2; i++)
        if (need(n, i)) TRY(emit(g, &dx[i], "AlongGrad", dy[0], n->in[i], n->out[0]));
    return OK;
}

static status grad_max(graph *g, const node *n, value *const dy[], value *dx[]) {
    if (need(n, 0)) TRY(emit(g, &dx[0], "MaximumGrad", dy[0], n->in[0], n->in[1]));
    if (need(n, 1)) TRY(emit(g, &dx[1], "MaximumGrad", dy[0], n->in[1], n->in[0]));
    return OK;
}

static status grad_min(graph *g, const node *n, value *const dy[], value *dx[]) {
    if (need(n, 0)) TRY(emit(g, &dx[0], "MaximumGrad", dy[0], n->in[1], n->in[0]));
    if (need(n, 1)) TRY(emit(g, &dx[1], "MaximumGrad", dy[0], n->in[0], n->in[1]));
    return OK;
}

/* --- distances ----------------------------------------------------------------------------------------------------- */

static status grad_huber(graph *g, const node *n, value *const dy[], value *dx[]) {
    const attr *const as = NODE_ATTRS(FLOAT("delta", node_float(n, "delta")), FLOAT("over", node_float(n, "over")));
    value *d;

    TRY(emit_with(g, &d, "HuberGrad", as, dy[0], n->in[0], n->in[1]));
    if (need(n, 0)) dx[0] = d;
    return need(n, 1) ? emit(g, &dx[1], "Neg", d) : OK;
}

/* --- what is divided by its norm ------------------------------------------------------------------------------------ */

/* NormQuotient is x / norm, where norm is that of x over `axis`: x has the whole gradient, and the norm none. With the
 * norm's own it would be the difference of terms that are rounded in other ways, where one element is nearly the norm. */
static status grad_norm_quotient(graph *g, const node *n, value *const dy[], value *dx[]) {
    const int64_t axis = node_int(n, "axis");
    value *d, *sum, *slope = n->out[0];

    if (!need(n, 0)) return OK;
    TRY(emit(g, &d, "Div", dy[0], n->in[1]));
    TRY(emit(g, &sum, "Mul", d, n->out[0]));
    TRY(emit_reduce(g, "ReduceSum", sum, 1, &axis, true, &sum));
    if (node_int(n, "p") == 1) TRY(emit(g, &slope, "Sign", n->in[0]));
    TRY(emit(g, &slope, "Mul", slope, sum));
    return emit(g, &dx[0], "Sub", d, slope);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr mod_attrs[] = {INT("fmod", 0), {0}};
static const attr quotient_attrs[] = {NO_DEFAULT("axis", INT), NO_DEFAULT("p", INT), {0}};
static const attr huber_attrs[] = {FLOAT("delta", 1), FLOAT("over", 1), {0}};

#define TILES(name) .fn = {FLOAT_TILES(name), INT_TILES(name)}
#define BINARY(name_, since_, types_, flags_, ...)                                                                     \
    TILED(name_, "", since_, 2, types_, INPLACE_0 | INPLACE_1 | (flags_), infer_pointwise, __VA_ARGS__)
#define DIVISION(name_, since_, ...)                                                                                   \
    TILED_BY(divide_cpu, name_, "", since_, 2, NUMBERS, INPLACE_0 | INPLACE_1, infer_pointwise, __VA_ARGS__)
#define OURS_IN_MODELS INPLACE_0 | INPLACE_1 | IN_MODELS
#define EXTREMUM(name_, fn_)                                                                                           \
    TILED(name_, ORT_DOMAIN, 1, 2, NUMBERS, INPLACE_0 | INPLACE_1 | COMMUTATIVE, infer_pointwise, TILES(fn_))

/* clang-format off */
const op_def binary_ops[] = {
    {BINARY("Add", 7, ANY_TYPE, COMMUTATIVE, TILES(add)), .lower = lower_add, .simplify = simplify_sum,
     .grad = grad_add},
    {BINARY("Sub", 7, NUMBERS, 0, TILES(sub)), .simplify = simplify_difference, .grad = grad_sub},
    {BINARY("Mul", 7, ANY_TYPE, COMMUTATIVE, TILES(mul)), .lower = lower_mul, .simplify = simplify_product,
     .grad = grad_mul},
    {DIVISION("Div", 7, TILES(div)), .simplify = simplify_quotient, .grad = grad_div},
    {BINARY("Pow", 7, NUMBERS, 0, TILES(pow)), .lower = lower_power, .grad = grad_power},
    {DIVISION("Mod", 10, .params = {"fmod"}, TILES(mod)), .attrs = mod_attrs, .grad = grad_mod},
    {LOWERED("Max", "", 8, 1, VARIADIC, ANY_TYPE, lower_max)},
    {LOWERED("Min", "", 8, 1, VARIADIC, ANY_TYPE, lower_min)},
    {LOWERED("Sum", "", 8, 1, VARIADIC, FLOATS, lower_sum)},
    {LOWERED("Mean", "", 8, 1, VARIADIC, FLOATS, lower_mean)},

    {EXTREMUM("Maximum", max), .grad = grad_max},
    {EXTREMUM("Minimum", min), .grad = grad_min},
    {TILED_BY(divide_cpu, "FloorDiv", ORT_DOMAIN, 1, 2, NUMBERS, OURS_IN_MODELS, infer_pointwise,
              TILES(floor_div)),
     .grad = grad_steps},
    {TILED_BY(divide_cpu, "Remainder", ORT_DOMAIN, 1, 2, NUMBERS, OURS_IN_MODELS, infer_pointwise,
              TILES(remainder)),
     .grad = grad_remainder},
    {TILED("Huber", ORT_DOMAIN, 1, 2, FLOATS, OURS_IN_MODELS, infer_pointwise, .params = {"delta", "over"},
           .fn = {FLOAT_TILES(huber)}),
     .attrs = huber_attrs, .grad = grad_huber},
    {TILED("NormQuotient", ORT_DOMAIN, 1, 2, FLOATS, INPLACE_0, infer_pointwise, .fn = {FLOAT_TILES(div)}),
     .attrs = quotient_attrs, .grad = grad_norm_quotient},
    {TILED_GRADIENT("HuberGrad", 3, .params = {"delta", "over"}, .fn = {FLOAT_TILES(huber_grad)}),
     .attrs = huber_attrs},
#include "ops/pointwise/operator_records.h"
    {TILED_GRADIENT("AlongGrad", 3, .fn = {FLOAT_TILES(along)})},
    {TILED_GRADIENT("MaximumGrad", 3, .fn = {FLOAT_TILES(max_grad)})},
    {TILED_GRADIENT("DivisorGrad", 3, .fn = {FLOAT_TILES(divisor_grad)})},
    {TILED_GRADIENT("PowGrad", 3, .fn = {FLOAT_TILES(pow_grad)})},
    {TILED_GRADIENT("PowExponentGrad", 4, .fn = {FLOAT_TILES(pow_exponent_grad)})},
    {0},
};
/* clang-format on */
