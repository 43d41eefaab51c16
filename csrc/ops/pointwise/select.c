/* select.c -- owns the choice and the conversion of elements: Where Clip Cast CastLike.
 *
 * Gradients, before un-broadcasting: Where dy on the side that was taken, 0 on the other; Clip dy inside the bounds and
 * on them, 0 outside and for NaN; Cast dy. */
#define FAMILY SELECT_FAMILY
#include "ops/pointwise/operator_loops.h"
#include "ops/pointwise/pointwise.h"

/* --- Where -------------------------------------------------------------------------------------------------------- */

#define WHERE(name, T)                                                                                                 \
    SIMD static void name(int64_t n, void *out, const void *const *in, const double *param) {                          \
        const uint8_t *condition = in[0];                                                                              \
        const T *a = in[1], *b = in[2];                                                                                \
        T *o = out;                                                                                                    \
        (void)param;                                                                                                   \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) {                                                         \
            const T x = a[i], y = b[i];                                                                                \
            o[i] = condition[i] ? x : y;                                                                               \
        }                                                                                                              \
    }

WHERE(where_f32, float)
WHERE(where_f64, double)
WHERE(where_i64, int64_t)
WHERE(where_i32, int32_t)
WHERE(where_bool, uint8_t)

static status infer_where(graph *g, node *n) {
    shape s;

    for (int i = 0; i < 3; i++) TRY(require(g, n, i));
    TRY(same_types(g, n, 1));
    TRY(shape_broadcast(g->c, &n->in[1]->shape, &n->in[2]->shape, &s));
    TRY(shape_broadcast(g->c, &s, &n->in[0]->shape, &s));
    return set_out(g, n, 0, n->in[1]->type, &s);
}

/* With a condition known beforehand, or nothing to choose. */
static status simplify_where(graph *g, const node *n, value **out) {
    const shape *s = &n->out[0]->shape;
    double condition;
    value *taken = n->in[1], *dims;

    if (n->in[1] != n->in[2]) {
        if (!value_is_filled(n->in[0], &condition)) return OK;
        taken = n->in[condition != 0 ? 1 : 2];
    }
    if (shape_equal(&taken->shape, s)) {
        out[0] = taken;
        return OK;
    }
    TRY(graph_ints(g, s->rank, s->dim, &dims));
    return emit(g, out, "Expand", taken, dims);
}

static status grad_where(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *zero;
    TRY(graph_scalar(g, dy[0]->type, 0, &zero));
    if (need(n, 1)) TRY(emit(g, &dx[1], "Where", n->in[0], dy[0], zero));
    if (need(n, 2)) TRY(emit(g, &dx[2], "Where", n->in[0], zero, dy[0]));
    return OK;
}

/* --- Clip ------------------------------------------------------------------------------------------------------------
 * Every form becomes our Clamp(x, low, high). */

INT_FN(clamp, 3, x > z || y > z ? z : x < y ? y : x)

/* What stands for an absent bound; `sign` -1 or 1. */
static status unbounded(graph *g, dtype type, int sign, value **out) {
    const shape scalar = SCALAR;
    int64_t limit = INT64_MAX >> (64 - 8 * dtype_size(type));

    if (dtype_is_float(type)) return graph_scalar(g, type, sign * (double)INFINITY, out);
    if (type == U8) limit = sign < 0 ? 0 : UINT8_MAX;
    else if (sign < 0) limit = -limit - 1;
    TRY(graph_add_constant(g, type, &scalar, NULL, out));
    dtype_set_int(type, (void *)(uintptr_t)(*out)->data, 0, limit);
    return OK;
}

/* A bound of rank 0, from the operand or from the attribute of old forms. */
static status bound_of(graph *g, const node *n, int i, const char *name, value **out) {
    const shape scalar = SCALAR;
    value *v = node_in(n, i);

    if (v && shape_count(&v->shape) != 1) {
        char text[SHAPE_TEXT];
        return fail(g->c, E_SHAPE, "the %simum of Clip has the shape %s; it must be a single number", name,
                    shape_text(&v->shape, text));
    }
    if (v) return emit_reshape(g, v, &scalar, out);
    if (node_has(n, name)) return graph_scalar(g, n->in[0]->type, node_float(n, name), out);
    return unbounded(g, n->in[0]->type, i == 1 ? -1 : 1, out);
}

static status lower_clip(graph *g, const node *n, value **out) {
    value *low, *high;

    TRY(require(g, n, 0));
    TRY(same_types(g, n, 0));
    TRY(bound_of(g, n, 1, "min", &low));
    TRY(bound_of(g, n, 2, "max", &high));
    return emit(g, out, "Clamp", n->in[0], low, high);
}

/* dy where x was replaced by a bound. */
static status grad_bound(graph *g, value *dy, value *replaced, value **dx) {
    value *zero;
    TRY(graph_scalar(g, dy->type, 0, &zero));
    return emit(g, dx, "Where", replaced, dy, zero);
}

static status grad_clamp(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *x = n->in[0], *low = n->in[1], *high = n->in[2], *outside, *order;

    if (need(n, 0)) TRY(emit(g, &dx[0], "ClampGrad", dy[0], x, low, high));
    if (need(n, 1)) {
        TRY(emit(g, &outside, "Less", x, low));
        TRY(emit(g, &order, "Less", low, high));
        TRY(emit(g, &outside, "And", outside, order));
        TRY(grad_bound(g, dy[0], outside, &dx[1]));
    }
    if (need(n, 2)) {
        TRY(emit(g, &outside, "Greater", x, high));
        TRY(emit(g, &order, "Greater", low, high));
        TRY(emit(g, &outside, "Or", outside, order));
        TRY(grad_bound(g, dy[0], outside, &dx[2]));
    }
    return OK;
}

/* --- Cast --------------------------------------------------------------------------------------------------------- */

/* A float outside the integer's range, or NaN, becomes the smallest integer, as on x86; a narrow integer is what the
 * lowest bits of that are. */
#define TRUNCATED(T, least) (x >= (real)(least) && x < -(real)(least) ? (T)x : (least))

#define CASTS(from, F, as_i64, as_i32)                                                                                 \
    TILE_FN(from##_to_f32, 1, F, float, x, )                                                                           \
    TILE_FN(from##_to_f64, 1, F, double, x, )                                                                          \
    TILE_FN(from##_to_i64, 1, F, int64_t, as_i64, )                                                                    \
    TILE_FN(from##_to_i32, 1, F, int32_t, as_i32, )                                                                    \
    TILE_FN(from##_to_bool, 1, F, uint8_t, x != 0, )
#define CAST_ROW(from)                                                                                                 \
    {                                                                                                                  \
        [TILE_F32] = from##_to_f32, [TILE_F64] = from##_to_f64,   [TILE_I64] = from##_to_i64,                          \
        [TILE_I32] = from##_to_i32, [TILE_BOOL] = from##_to_bool,                                                      \
    }

CASTS(f32, float, TRUNCATED(int64_t, INT64_MIN), TRUNCATED(int32_t, INT32_MIN))
CASTS(f64, double, TRUNCATED(int64_t, INT64_MIN), TRUNCATED(int32_t, INT32_MIN))
CASTS(i64, int64_t, x, x)
CASTS(i32, int32_t, x, x)
CASTS(bool, uint8_t, x, x)

static tile_fn *choose_cast(tile_class from, tile_class to) {
    static tile_fn *const table[TILE_CLASSES][TILE_CLASSES] = {
        [TILE_F32] = CAST_ROW(f32), [TILE_F64] = CAST_ROW(f64),   [TILE_I64] = CAST_ROW(i64),
        [TILE_I32] = CAST_ROW(i32), [TILE_BOOL] = CAST_ROW(bool),
    };
    return table[from][to];
}

static status infer_cast(graph *g, node *n) {
    int64_t to = node_int(n, "to");
    dtype type = to > 0 && to < 100 ? dtype_from_onnx((int)to) : DT_NONE;

    TRY(require(g, n, 0));
    if (type == DT_NONE) return fail(g->c, E_UNSUPPORTED, "Cast to ONNX's type %lld", (long long)to);
    return set_out(g, n, 0, type, &n->in[0]->shape);
}

/* Whether every number of type `a` is one of type `b`. */
static bool holds(dtype b, dtype a) {
    static const int digits[DTYPE_COUNT] = {
        [BOOL] = 1, [U8] = 8,   [I8] = 7,   [I16] = 15, [I32] = 31,
        [I64] = 63, [BF16] = 8, [F16] = 11, [F32] = 24, [F64] = 53,
    };
    if (a == b) return true;
    if (dtype_is_float(a)) return dtype_is_float(b) && dtype_size(b) > dtype_size(a);
    return b != BOOL && digits[b] >= digits[a] && (b != U8 || a == BOOL);
}

/* To the same type, or after a cast that loses nothing. */
static status simplify_cast(graph *g, const node *n, value **out) {
    value *x = n->in[0];
    const node *inner = x->def;

    if (x->type == n->out[0]->type) {
        out[0] = x;
        return OK;
    }
    if (inner && inner->op == n->op && holds(x->type, inner->in[0]->type))
        return emit_cast(g, inner->in[0], n->out[0]->type, out);
    return OK;
}

static status grad_cast(graph *g, const node *n, value *const dy[], value *dx[]) {
    (void)g, (void)n;
    dx[0] = dy[0];
    return OK;
}

static status lower_cast_like(graph *g, const node *n, value **out) {
    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    return emit_cast(g, n->in[0], n->in[1]->type, out);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr clip_attrs[] = {NO_DEFAULT("min", FLOAT), NO_DEFAULT("max", FLOAT), {0}};
static const attr cast_attrs[] = {
    NO_DEFAULT("to", INT), INT("saturate", 1), {0}}; /* saturate: for types that are not here */

/* clang-format off */
const op_def select_ops[] = {
    {TILED("Where", "", 9, 3, SET(BOOL), INPLACE_1, infer_where,
           .fn = {FLOAT_TILES(where), INT_TILES(where), [TILE_BOOL] = where_bool}),
     .simplify = simplify_where, .grad = grad_where},
    {LOWERED("Clip", "", 11, 1, 3, NUMBERS, lower_clip)},
    {LOWERED("Clip", "", 6, 1, 1, FLOATS, lower_clip), .attrs = clip_attrs},
    {TILED("Cast", "", 6, 1, ANY_TYPE, 0, infer_cast, .choose = choose_cast), .attrs = cast_attrs,
     .simplify = simplify_cast, .grad = grad_cast},
    {LOWERED("CastLike", "", 15, 2, 2, ANY_TYPE, lower_cast_like), .attrs = cast_attrs + 1},

    {TILED("Clamp", ORT_DOMAIN, 1, 3, NUMBERS, INPLACE_0, infer_same, .fn = {FLOAT_TILES(clamp), INT_TILES(clamp)}),
     .grad = grad_clamp},
    {TILED_GRADIENT("ClampGrad", 4, .fn = {FLOAT_TILES(clamp_grad)})},
    {0},
};
/* clang-format on */
