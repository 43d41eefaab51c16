/* compare.c -- owns comparisons, tests of floats, logic and bits: Equal Less LessOrEqual Greater GreaterOrEqual, IsNaN
 * IsInf, And Or Xor Not, BitwiseAnd BitwiseOr BitwiseXor BitwiseNot BitShift; of our domain SignBit ShiftLeft ShiftRight. Nothing here has a gradient. */
#include "ops/pointwise/pointwise.h"

#include <math.h>
#include <string.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

#define COMPARISON(name, op)                                                                                           \
    TILE_2(name##_f32, float, uint8_t, x op y)                                                                         \
    TILE_2(name##_f64, double, uint8_t, x op y)                                                                        \
    TILE_2(name##_i64, int64_t, uint8_t, x op y)                                                                       \
    TILE_2(name##_i32, int32_t, uint8_t, x op y)

COMPARISON(equal, ==)
COMPARISON(less, <)
COMPARISON(less_or_equal, <=)
COMPARISON(greater, >)
COMPARISON(greater_or_equal, >=)
TILE_2(equal_bool, uint8_t, uint8_t, x == y)

TILE_FN(is_nan_f32, 1, float, uint8_t, x != x, )
TILE_FN(is_nan_f64, 1, double, uint8_t, x != x, )
TILE_FN(is_inf_f32, 1, float, uint8_t, (p0 != 0 && x == INFINITY) || (p1 != 0 && x == -INFINITY), )
TILE_FN(is_inf_f64, 1, double, uint8_t, (p0 != 0 && x == INFINITY) || (p1 != 0 && x == -INFINITY), )

/* Of NaN, too. */
TILE_FN(sign_bit_f32, 1, float, uint8_t, signbit(x) != 0, )
TILE_FN(sign_bit_f64, 1, double, uint8_t, signbit(x) != 0, )

TILE_2(and_bool, uint8_t, uint8_t, (x & y))
TILE_2(or_bool, uint8_t, uint8_t, x | y)
TILE_2(xor_bool, uint8_t, uint8_t, x ^ y)
TILE_1(not_bool, uint8_t, !x)

WRAP_FN(bit_and, 2, (x & y))
WRAP_FN(bit_or, 2, x | y)
WRAP_FN(bit_xor, 2, x ^ y)
WRAP_FN(bit_not, 1, ~x)
/* Shifting by the whole width or more leaves the sign: zeros, or ones for a negative number shifted right. Shifts by
 * negative numbers count as such. Narrow types have lost their bits when they are stored. */
#define WIDTH (8 * sizeof(real))
WRAP_FN(shift_left, 2, y < WIDTH ? x << (y & (WIDTH - 1)) : 0)
INT_FN(shift_right, 2, x >> ((uint64_t)y < WIDTH ? (uint64_t)y : WIDTH - 1))

/* --- rules -------------------------------------------------------------------------------------------------------- */

static status infer_comparison(graph *g, node *n) {
    TRY(infer_pointwise(g, n));
    n->out[0]->type = BOOL;
    return OK;
}

static status infer_test(graph *g, node *n) {
    TRY(infer_same(g, n));
    n->out[0]->type = BOOL;
    return OK;
}

/* Integers are neither NaN nor infinite; a widened float is what it was before. */
static status simplify_test(graph *g, const node *n, value **out) {
    const value *x = n->in[0];
    const node *cast = x->def;

    if (!dtype_is_float(x->type)) return graph_full(g, BOOL, &x->shape, 0, out);
    if (cast && strcmp(cast->op->name, "Cast") == 0 && dtype_is_float(cast->in[0]->type) &&
        dtype_size(cast->in[0]->type) < dtype_size(x->type))
        return emit_with(g, out, n->op->name, n->attrs, cast->in[0]);
    return OK;
}

/* With one operand filled: And(x, true) and Or(x, false) are x, And(x, false) and Or(x, true) are the filler. */
static status simplify_logic(graph *g, const node *n, bool neutral, value **out) {
    for (int i = 0; i < 2 && !out[0]; i++) {
        value *x = n->in[1 - i];
        double filler;
        if (!value_is_filled(n->in[i], &filler)) continue;
        if ((filler != 0) != neutral) return graph_full(g, BOOL, &n->out[0]->shape, filler, out);
        if (shape_equal(&x->shape, &n->out[0]->shape)) out[0] = x;
    }
    return OK;
}

static status simplify_and(graph *g, const node *n, value **out) { return simplify_logic(g, n, true, out); }
static status simplify_or(graph *g, const node *n, value **out) { return simplify_logic(g, n, false, out); }

static status simplify_not(graph *g, const node *n, value **out) {
    const node *inner = n->in[0]->def;
    (void)g;
    if (inner && inner->op == n->op) out[0] = inner->in[0];
    return OK;
}

static status lower_shift(graph *g, const node *n, value **out) {
    const char *direction = node_string(n, "direction");
    bool left = strcmp(direction, "LEFT") == 0;

    if (!left && strcmp(direction, "RIGHT") != 0)
        return fail(g->c, E_INVALID, "BitShift has no direction \"%s\"", direction);
    return emit(g, out, left ? "ShiftLeft" : "ShiftRight", n->in[0], n->in[1]);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr inf_attrs[] = {INT("detect_positive", 1), INT("detect_negative", 1), {0}};
static const attr shift_attrs[] = {NO_DEFAULT("direction", STRING), {0}};

#define TILES(name) .fn = {FLOAT_TILES(name), INT_TILES(name)}
#define BOOL_TILE(name) .fn = {[TILE_BOOL] = name}
#define COMPARISON_OP(name_, since_, types_, flags_, ...)                                                              \
    TILED(name_, "", since_, 2, types_, NO_GRAD | (flags_), infer_comparison, __VA_ARGS__)
#define LOGIC(name_, fn_)                                                                                              \
    TILED(name_, "", 7, 2, SET(BOOL), NO_GRAD | INPLACE_0 | INPLACE_1 | COMMUTATIVE, infer_pointwise, BOOL_TILE(fn_))
#define BITS(name_, domain_, since_, flags_, fn_)                                                                      \
    TILED(name_, domain_, since_, 2, INTEGERS, NO_GRAD | INPLACE_0 | INPLACE_1 | (flags_), infer_pointwise,            \
          .fn = {INT_TILES(fn_)})

/* clang-format off */
const op_def compare_ops[] = {
    {COMPARISON_OP("Equal", 7, ANY_TYPE, COMMUTATIVE,
                   .fn = {FLOAT_TILES(equal), INT_TILES(equal), [TILE_BOOL] = equal_bool})},
    {COMPARISON_OP("Less", 7, NUMBERS, 0, TILES(less))},
    {COMPARISON_OP("LessOrEqual", 12, NUMBERS, 0, TILES(less_or_equal))},
    {COMPARISON_OP("Greater", 7, NUMBERS, 0, TILES(greater))},
    {COMPARISON_OP("GreaterOrEqual", 12, NUMBERS, 0, TILES(greater_or_equal))},
    {TILED("IsNaN", "", 9, 1, NUMBERS, NO_GRAD, infer_test, .fn = {FLOAT_TILES(is_nan)}), .simplify = simplify_test},
    {TILED("IsInf", "", 10, 1, NUMBERS, NO_GRAD, infer_test, .params = {"detect_positive", "detect_negative"},
           .fn = {FLOAT_TILES(is_inf)}),
     .attrs = inf_attrs, .simplify = simplify_test},
    {LOGIC("And", and_bool), .simplify = simplify_and},
    {LOGIC("Or", or_bool), .simplify = simplify_or},
    {LOGIC("Xor", xor_bool)},
    {TILED("Not", "", 1, 1, SET(BOOL), NO_GRAD | INPLACE_0, infer_same, BOOL_TILE(not_bool)), .simplify = simplify_not},
    {BITS("BitwiseAnd", "", 18, COMMUTATIVE, bit_and)},
    {BITS("BitwiseOr", "", 18, COMMUTATIVE, bit_or)},
    {BITS("BitwiseXor", "", 18, COMMUTATIVE, bit_xor)},
    {TILED("BitwiseNot", "", 18, 1, INTEGERS, NO_GRAD | INPLACE_0, infer_same, .fn = {INT_TILES(bit_not)})},
    {LOWERED("BitShift", "", 11, 2, 2, INTEGERS, lower_shift), .attrs = shift_attrs},

    {TILED("SignBit", ORT_DOMAIN, 1, 1, FLOATS, NO_GRAD | IN_MODELS, infer_test, .fn = {FLOAT_TILES(sign_bit)})},
    {BITS("ShiftLeft", ORT_DOMAIN, 1, IN_MODELS, shift_left)},
    {BITS("ShiftRight", ORT_DOMAIN, 1, IN_MODELS, shift_right)},
    {0},
};
/* clang-format on */
