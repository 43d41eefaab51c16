/* scatter.c -- writing and adding elements where indices say.
 *
 *     ScatterElements  y = x; y[i with i[axis] = index[i]] (op)= u[i]
 *     ScatterND        y = x; y[index[i..., :], b] (op)= u[i..., b]
 * with op one of replace, add, mul, max, min. Results do not depend on the number of threads: whatever lands on one
 * element is taken in the order of the updates, by one thread. 16-bit floats are combined in float32.
 * Backward needs the indices; mul, max and min also x, u and y. */
#include "core/parallel.h"
#include "core/prefetch.h"
#include "ops/move.h"

/* --- combining ---------------------------------------------------------------------------------------------------- */

enum { COLUMNS = 1024, LEAST_COLUMNS = 64, FEW_COLUMNS = 8, PARTS = 32 };
enum { NEAR_BYTES = 1 << 14 };
/* Updates are read in no order: so many of them are on their way already. */
enum { AHEAD = 8 };

typedef struct element_scatter {
    combining how;
    const tensor *index, *updates;
    tensor *out;
    int axis;
    int64_t lanes, parts;
    int64_t *work; /* `parts` lanes of totals, for types that are combined as a wider one */
} element_scatter;

/* An update, in the order in which rows take them. */
typedef struct place {
    int64_t row, k;
} place;

static inline bool next_update(const row_scatter *s, place *p) {
    if (p->k >= 0) p->k = s->next[p->k];
    while (p->k < 0 && p->row + 1 < s->rows) p->k = s->head[++p->row];
    return p->k >= 0;
}

/* T is an element in memory, A what it is combined as, U an A whose overflow is defined. take_T: acc (op)= x, n times.
 * rows_T: rows [from, to) of block `o` of a row_scatter, columns [at, at + n); `ahead` is AHEAD updates further on.
 * lane_T: lane r of an element_scatter. */
#define COMBINING(T, A, U, GET, PUT)                                                                                   \
    static inline void take_##T(combining how, A *restrict acc, const T *restrict x, int64_t n) {                      \
        switch (how) {                                                                                                 \
        case COMBINE_ADD:                                                                                              \
            for (int64_t i = 0; i < n; i++) acc[i] = (A)((U)acc[i] + (U)GET(x[i]));                                    \
            break;                                                                                                     \
        case COMBINE_MUL:                                                                                              \
            for (int64_t i = 0; i < n; i++) acc[i] = (A)((U)acc[i] * (U)GET(x[i]));                                    \
            break;                                                                                                     \
        case COMBINE_MAX:                                                                                              \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                A a = acc[i], b = GET(x[i]);                                                                           \
                acc[i] = a > b || a != a ? a : b;                                                                      \
            }                                                                                                          \
            break;                                                                                                     \
        case COMBINE_MIN:                                                                                              \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                A a = acc[i], b = GET(x[i]);                                                                           \
                acc[i] = a < b || a != a ? a : b;                                                                      \
            }                                                                                                          \
            break;                                                                                                     \
        case COMBINE_NONE: break;                                                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void rows_##T(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n,        \
                              place *ahead) {                                                                          \
        const T *updates = (const T *)s->updates + o * s->count * s->width + at;                                       \
        A acc[COLUMNS];                                                                                                \
        for (int64_t r = from; r < to; r++) {                                                                          \
            T *out = (T *)s->out + (o * s->rows + r) * s->width + at;                                                  \
            if (r + 1 < to && (s->base != s->out || s->head[r + 1] >= 0))                                              \
                prefetch(out + s->width, n * (int64_t)sizeof(T));                                                      \
            if (s->head[r] < 0) {                                                                                      \
                if (!s->base) memset(out, 0, (size_t)n * sizeof(T));                                                   \
                continue;                                                                                              \
            }                                                                                                          \
            for (int64_t i = 0; i < n; i++) acc[i] = s->base ? GET(out[i]) : 0;                                        \
            for (int64_t k = s->head[r]; k >= 0; k = s->next[k]) {                                                     \
                if (next_update(s, ahead)) prefetch_start(updates + ahead->k * s->width, n * (int64_t)sizeof(T));      \
                take_##T(s->how, acc, updates + k * s->width, n);                                                      \
            }                                                                                                          \
            for (int64_t i = 0; i < n; i++) out[i] = PUT(acc[i]);                                                      \
        }                                                                                                              \
    }                                                                                                                  \
    static void lane_##T(const element_scatter *s, int64_t r, void *work) {                                            \
        const shape *shape_ = &s->index->shape;                                                                        \
        const int64_t length = shape_->dim[s->axis], size = s->out->shape.dim[s->axis];                                \
        const int64_t out_step = s->out->stride[s->axis], index_step = s->index->stride[s->axis];                      \
        const int64_t x_step = s->updates->stride[s->axis];                                                            \
        const int64_t at = lane_offset(shape_, s->axis, s->index->stride, r);                                          \
        const T *x = (const T *)s->updates->data + lane_offset(shape_, s->axis, s->updates->stride, r);                \
        T *out = (T *)s->out->data + lane_offset(shape_, s->axis, s->out->stride, r);                                  \
        const bool wide = sizeof(T) == sizeof(A);                                                                      \
        A *acc = wide ? (A *)(void *)out : (A *)work;                                                                  \
        const int64_t acc_step = wide ? out_step : 1;                                                                  \
        for (int64_t j = 0; j < length && !wide; j++) {                                                                \
            int64_t i = wrap_index(index_at(s->index, at + j * index_step), size);                                     \
            acc[i] = GET(out[i * out_step]);                                                                           \
        }                                                                                                              \
        for (int64_t j = 0; j < length; j++) {                                                                         \
            int64_t i = wrap_index(index_at(s->index, at + j * index_step), size);                                     \
            take_##T(s->how, acc + i * acc_step, x + j * x_step, 1);                                                   \
        }                                                                                                              \
        for (int64_t j = 0; j < length && !wide; j++) {                                                                \
            int64_t i = wrap_index(index_at(s->index, at + j * index_step), size);                                     \
            out[i * out_step] = PUT(acc[i]);                                                                           \
        }                                                                                                              \
    }

#define SAME(x) (x)
#define TO_F16(x) ((f16)(x))
#define TO_I32(x) ((int32_t)(x))
#define TO_I16(x) ((int16_t)(x))
#define TO_I8(x) ((int8_t)(x))
#define TO_U8(x) ((uint8_t)(x))
COMBINING(float, float, float, SAME, SAME)
COMBINING(double, double, double, SAME, SAME)
COMBINING(bf16, float, float, bf16_to_f32, f32_to_bf16)
COMBINING(f16, float, float, SAME, TO_F16)
COMBINING(int64_t, int64_t, uint64_t, SAME, SAME)
COMBINING(int32_t, int64_t, uint64_t, SAME, TO_I32)
COMBINING(int16_t, int64_t, uint64_t, SAME, TO_I16)
COMBINING(int8_t, int64_t, uint64_t, SAME, TO_I8)
COMBINING(uint8_t, int64_t, uint64_t, SAME, TO_U8)

typedef struct functions {
    void (*rows)(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n, place *ahead);
    void (*lane)(const element_scatter *s, int64_t r, void *work);
} functions;

static const functions by_type[DTYPE_COUNT] = {
    [F32] = {rows_float, lane_float},     [F64] = {rows_double, lane_double},   [BF16] = {rows_bf16, lane_bf16},
    [F16] = {rows_f16, lane_f16},         [I64] = {rows_int64_t, lane_int64_t}, [I32] = {rows_int32_t, lane_int32_t},
    [I16] = {rows_int16_t, lane_int16_t}, [I8] = {rows_int8_t, lane_int8_t},    [U8] = {rows_uint8_t, lane_uint8_t},
};

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* Columns [at, at + n) of rows [from, to) before anything is added to them. */
static void begin_rows(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n) {
    size_t size = dtype_size(s->type), first = (size_t)((o * s->rows + from) * s->width + at) * size;
    size_t stride = (size_t)s->width * size, bytes = (size_t)n * size, rows = (size_t)(to - from);
    char *out = (char *)s->out + first;
    const char *base = s->base ? (const char *)s->base + first : NULL;

    if (base == out) return;
    if (n == s->width) {
        bytes *= rows;
        rows = 1;
    }
    for (size_t r = 0; r < rows; r++) {
        if (base) memcpy(out + r * stride, base + r * stride, bytes);
        else memset(out + r * stride, 0, bytes);
    }
}

/* Blocks [begin, end) of a row_scatter, straight; T is its own total, U a T whose overflow is defined. */
#define STRAIGHT(T, U)                                                                                                 \
    static void straight_##T(void *arg, int64_t begin, int64_t end) {                                                  \
        const row_scatter *s = arg;                                                                                    \
        const int64_t width = s->width;                                                                                \
        const int32_t *row = s->next;                                                                                  \
        begin_rows(s, begin, 0, (end - begin) * s->rows, 0, width);                                                    \
        for (int64_t o = begin; o < end; o++) {                                                                        \
            const T *restrict x = (const T *)s->updates + o * s->count * width;                                        \
            T *restrict out = (T *)s->out + o * s->rows * width;                                                       \
            for (int64_t k = 0; k < s->count && width == 1; k++)                                                       \
                if (row[k] >= 0) out[row[k]] = (T)((U)out[row[k]] + (U)x[k]);                                          \
            for (int64_t k = 0; k < s->count && width > 1; k++)                                                        \
                for (int64_t i = 0; i < width && row[k] >= 0; i++)                                                     \
                    out[row[k] * width + i] = (T)((U)out[row[k] * width + i] + (U)x[k * width + i]);                   \
        }                                                                                                              \
    }
STRAIGHT(float, float)
STRAIGHT(double, double)
STRAIGHT(int64_t, uint64_t)

static range_fn *const straight_by_type[DTYPE_COUNT] = {
    [F32] = straight_float, [F64] = straight_double, [I64] = straight_int64_t};

size_t row_scatter_bytes(int64_t rows, int64_t count) { return (size_t)(rows + count) * sizeof(int32_t); }

status row_scatter_begin(ctx *c, row_scatter *s, void *work) {
    if (s->count > INT32_MAX) return fail(c, E_UNSUPPORTED, "more than 2^31 indices");
    s->head = work;
    s->next = s->head + s->rows;
    s->straight = s->how == COMBINE_ADD && straight_by_type[s->type] && s->width <= FEW_COLUMNS &&
                  s->rows <= INT32_MAX && s->outer >= parallel_threads();
    if (s->straight && s->count) memset(s->next, -1, (size_t)s->count * sizeof *s->next);
    else if (s->rows) memset(s->head, -1, (size_t)s->rows * sizeof *s->head);
    return OK;
}

static void rows_last(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n) {
    size_t size = dtype_size(s->type), bytes = (size_t)n * size;

    for (int64_t r = from; r < to; r++) {
        int64_t k = s->head[r];
        if (k < 0) continue;
        while (s->next[k] >= 0) k = s->next[k];
        copy_item((char *)s->out + (size_t)((o * s->rows + r) * s->width + at) * size,
                  (const char *)s->updates + (size_t)((o * s->count + k) * s->width + at) * size, bytes);
    }
}

/* A few rows at a time, so that they are still in the first cache when something is added to what is there. */
static void add_rows(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n) {
    const int64_t fit = NEAR_BYTES / (n * (int64_t)dtype_size(s->type)), near = fit > 0 ? fit : 1;
    place ahead = {from - 1, -1};

    for (int i = 0; i < AHEAD; i++) (void)next_update(s, &ahead);
    for (int64_t end; from < to; from = end) {
        end = to - from > near ? from + near : to;
        if (s->base) begin_rows(s, o, from, end, at, n);
        by_type[s->type].rows(s, o, from, end, at, n, &ahead);
    }
}

/* Columns worked on together where threads share those of a wide table. */
static int64_t columns_of(const row_scatter *s) {
    const int64_t size = LEAST_COLUMNS * parallel_threads();
    int64_t n = (s->width + size - 1) / size * LEAST_COLUMNS;
    n = n > COLUMNS ? COLUMNS : n;
    return n < s->width ? n : s->width;
}

/* Work is cut into (outer, block of columns, row), rows running fastest. */
static void scatter_range(void *arg, int64_t begin, int64_t end) {
    const row_scatter *s = arg;
    int64_t blocks = (s->width + s->columns - 1) / s->columns;

    while (begin < end) {
        int64_t o = begin / s->rows / blocks, at = begin / s->rows % blocks * s->columns;
        int64_t from = begin % s->rows, to = from + end - begin, n = s->width - at;
        if (to > s->rows) to = s->rows;
        if (n > s->columns) n = s->columns;
        if (s->how == COMBINE_NONE) {
            begin_rows(s, o, from, to, at, n);
            rows_last(s, o, from, to, at, n);
        } else {
            add_rows(s, o, from, to, at, n);
        }
        begin += to - from;
    }
}

enum { MOST_SHARES = 64 };

typedef struct shares {
    const row_scatter *s;
    int64_t first[MOST_SHARES + 1]; /* row of each */
} shares;

static void scatter_shares(void *arg, int64_t begin, int64_t end) {
    const shares *t = arg;
    for (int64_t at = 0; at < t->s->width; at += COLUMNS) {
        const int64_t n = t->s->width - at < COLUMNS ? t->s->width - at : COLUMNS;
        add_rows(t->s, 0, t->first[begin], t->first[end], at, n);
    }
}

/* Cuts rows into `parts` of about the same work: an update's, and a row's unless it stays as it is. False where one row is
 * too much of it. */
static bool cut_rows(shares *t, int64_t parts) {
    const row_scatter *s = t->s;
    const int64_t own = s->base == s->out ? 0 : 1, all = own * s->rows + s->count;
    int64_t work = 0, part = 0;

    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t before = work;
        while (part < parts && work >= all * part / parts) t->first[part++] = r;
        work += own;
        for (int64_t k = s->head[r]; k >= 0; k = s->next[k]) work++;
        if ((work - before) * 4 * parts > all) return false;
    }
    while (part <= parts) t->first[part++] = s->rows;
    return true;
}

/* Threads share rows, which are read and written whole; those of a wide table its columns, where a few rows are hit by
 * most updates. */
void row_scatter_run(row_scatter *s) {
    const int64_t threads = parallel_threads(), parts = threads < MOST_SHARES ? threads : MOST_SHARES;
    shares t = {.s = s};

    if (s->rows == 0 || s->width == 0) return;
    if (s->straight) {
        parallel_for(s->outer, parallel_rows((s->rows + s->count) * s->width), straight_by_type[s->type], s);
        return;
    }
    if (s->outer == 1 && s->how != COMBINE_NONE && s->width >= LEAST_COLUMNS && parts > 1 && cut_rows(&t, parts)) {
        parallel_for(parts, parallel_rows((s->rows + s->count) * s->width / parts), scatter_shares, &t);
        return;
    }
    s->columns = columns_of(s);
    parallel_for(s->outer * ((s->width + s->columns - 1) / s->columns) * s->rows, parallel_rows(s->columns),
                 scatter_range, s);
}

/* --- both operators ----------------------------------------------------------------------------------------------- */

combining scatter_combining(const node *n) {
    static const char *const names[] = {"none", "add", "mul", "max", "min"};
    const char *how = node_string(n, "reduction");
    int i = COMBINE_MIN;
    while (i > COMBINE_NONE && strcmp(names[i], how) != 0) i--;
    return (combining)i;
}

static status infer_scatter(graph *g, node *n) {
    const char *how = node_string(n, "reduction");

    TRY(require(g, n, 2));
    if (n->in[0]->type != n->in[2]->type)
        return fail(g->c, E_TYPE, "%s of %s into %s", n->op->name, dtype_name(n->in[2]->type),
                    dtype_name(n->in[0]->type));
    if (scatter_combining(n) == COMBINE_NONE && how[0] && strcmp(how, "none") != 0)
        return fail(g->c, E_UNSUPPORTED, "%s with the reduction \"%s\"", n->op->name, how);
    if (scatter_combining(n) != COMBINE_NONE && n->in[0]->type == BOOL)
        return fail(g->c, E_TYPE, "%s does not combine booleans", n->op->name);
    return infer_same(g, n);
}

/* What gathers from y where `n` scatters to, and the scatter itself with other operands. */
static status pick(graph *g, const node *n, value *y, value **out) {
    if (node_attr(n, "axis"))
        return emit_with(g, out, "GatherElements", NODE_ATTRS(INT("axis", node_int(n, "axis"))), y, n->in[1]);
    return emit(g, out, "GatherND", y, n->in[1]);
}

static status put(graph *g, const node *n, value *x, value *updates, const char *how, value **out) {
    value *in[] = {x, n->in[1], updates};
    const attr with_axis[] = {STRING("reduction", how), INT("axis", node_int(n, "axis")), {.name = NULL}};
    const attr without[] = {STRING("reduction", how), {.name = NULL}};
    return graph_emit_op(g, n->op, node_attr(n, "axis") ? with_axis : without, 3, in, 1, out);
}

static status equal_to(graph *g, value *x, double number, value **out) {
    value *v;
    TRY(graph_scalar(g, x->type, number, &v));
    return emit(g, out, "Equal", x, v);
}

static status ones_at(graph *g, value *mask, value *x, value **out) { /* x, but 1 where mask */
    value *one;
    TRY(graph_scalar(g, x->type, 1, &one));
    return emit(g, out, "Where", mask, one, x);
}

/* dx = dy * (product without x) and the same for each u. A zero hides the product of the others: it is taken as 1 when
 * it is the only zero that lands on an element, and with several of them every derivative is 0. */
static status grad_product(graph *g, const node *n, value *dy, value *dx[]) {
    value *x = n->in[0], *u = n->in[2], *zero, *single, *count, *others, *whole;

    if (need(n, 0)) {
        value *divisor;
        TRY(equal_to(g, x, 0, &zero));
        TRY(ones_at(g, zero, x, &divisor));
        TRY(put(g, n, divisor, u, "mul", &others));
        TRY(emit(g, &others, "Div", others, divisor));
        TRY(emit(g, &dx[0], "Mul", dy, others));
    }
    if (!need(n, 2)) return OK;
    TRY(equal_to(g, u, 0, &zero));
    TRY(emit_cast(g, zero, u->type, &single));
    TRY(zeros_like(g, x, &count));
    TRY(put(g, n, count, single, "add", &count));
    TRY(pick(g, n, count, &count));
    TRY(equal_to(g, count, 1, &single));
    TRY(emit(g, &single, "And", single, zero));
    TRY(ones_at(g, single, u, &others));
    TRY(put(g, n, x, others, "mul", &others));
    TRY(emit(g, &others, "Mul", dy, others));
    TRY(pick(g, n, others, &others));
    TRY(emit(g, &whole, "Mul", dy, n->out[0]));
    TRY(pick(g, n, whole, &whole));
    TRY(ones_at(g, zero, u, &u));
    TRY(emit(g, &whole, "Div", whole, u));
    return emit(g, &dx[2], "Where", single, others, whole);
}

/* dy goes in equal parts to everything that equals the extreme. */
static status grad_extreme(graph *g, const node *n, value *dy, value *dx[]) {
    value *y = n->out[0], *chosen, *x_is, *u_is, *count;

    TRY(emit(g, &x_is, "Equal", n->in[0], y));
    TRY(emit_cast(g, x_is, y->type, &x_is));
    TRY(pick(g, n, y, &chosen));
    TRY(emit(g, &u_is, "Equal", n->in[2], chosen));
    TRY(emit_cast(g, u_is, y->type, &u_is));
    TRY(put(g, n, x_is, u_is, "add", &count));
    TRY(emit(g, &dy, "Div", dy, count));
    if (need(n, 0)) TRY(emit(g, &dx[0], "Mul", dy, x_is));
    if (!need(n, 2)) return OK;
    TRY(pick(g, n, dy, &dy));
    return emit(g, &dx[2], "Mul", dy, u_is);
}

/* The same elements of every lane along the first axis: rows are added. */
static status simplify_scatter_elements(graph *g, const node *n, value **out) {
    const shape *x = &n->in[0]->shape, *index = &n->in[1]->shape;
    value *list;
    int axis;

    if (x->rank < 2 || strcmp(node_string(n, "reduction"), "add") != 0) return OK;
    TRY(shape_axis(g->c, node_int(n, "axis"), x->rank, &axis));
    for (int i = 1; i < x->rank; i++)
        if (x->dim[i] != index->dim[i]) return OK;
    if (axis != 0 || !shape_equal(index, &n->in[2]->shape)) return OK;
    TRY(index_of_lanes(g, n->in[1], axis, &list));
    if (!list) return OK;
    TRY(emit_reshape(g, list, &SHAPE(index->dim[0], 1), &list));
    return emit_with(g, out, "ScatterND", NODE_ATTRS(STRING("reduction", "add")), n->in[0], list, n->in[2]);
}

static status grad_scatter(graph *g, const node *n, value *const dy[], value *dx[]) {
    combining how = scatter_combining(n);
    value *zeros;

    if (how == COMBINE_MUL) return grad_product(g, n, dy[0], dx);
    if (how != COMBINE_NONE && how != COMBINE_ADD) return grad_extreme(g, n, dy[0], dx);
    if (need(n, 2)) TRY(pick(g, n, dy[0], &dx[2]));
    if (!need(n, 0)) return OK;
    dx[0] = dy[0];
    if (how == COMBINE_ADD) return OK;
    TRY(zeros_like(g, n->in[2], &zeros));
    return put(g, n, dy[0], zeros, "none", &dx[0]);
}

/* --- ScatterElements ---------------------------------------------------------------------------------------------- */

static status infer_scatter_elements(graph *g, node *n) {
    const shape *x, *index;
    char tx[SHAPE_TEXT], ti[SHAPE_TEXT], tu[SHAPE_TEXT];
    bool fits;
    int axis;

    TRY(require(g, n, 0));
    TRY(require_index(g, n, 1));
    TRY(require(g, n, 2));
    x = &n->in[0]->shape;
    index = &n->in[1]->shape;
    TRY(shape_axis(g->c, node_int(n, "axis"), x->rank, &axis));
    fits = index->rank == x->rank && shape_equal(index, &n->in[2]->shape);
    for (int i = 0; fits && i < x->rank; i++) fits = i == axis || index->dim[i] <= x->dim[i];
    if (!fits)
        return fail(g->c, E_SHAPE, "ScatterElements along axis %d of %s with indices %s and updates %s", axis,
                    shape_text(x, tx), shape_text(index, ti), shape_text(&n->in[2]->shape, tu));
    return infer_scatter(g, n);
}

static int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

static size_t scatter_elements_bytes(const node *n) {
    const shape *s = &n->in[0]->shape, *index = &n->in[1]->shape;
    int64_t axis = node_int(n, "axis"), length, size;
    dtype type = n->in[0]->type;

    if (scatter_combining(n) == COMBINE_NONE || type == F32 || type == F64 || type == I64 || s->rank == 0)
        return sizeof(int64_t);
    if (axis < 0) axis += s->rank;
    length = index->dim[axis];
    size = s->dim[axis];
    return (size_t)(least(length ? shape_count(index) / length : 0, PARTS) * size + 1) * sizeof(int64_t);
}

static void lane_last(const element_scatter *s, int64_t r) {
    const shape *shape_ = &s->index->shape;
    const int64_t size = (int64_t)dtype_size(s->out->type);
    int64_t at = lane_offset(shape_, s->axis, s->index->stride, r);
    const char *x = (const char *)s->updates->data + lane_offset(shape_, s->axis, s->updates->stride, r) * size;
    char *out = (char *)s->out->data + lane_offset(shape_, s->axis, s->out->stride, r) * size;

    for (int64_t j = 0; j < shape_->dim[s->axis]; j++) {
        int64_t i = wrap_index(index_at(s->index, at + j * s->index->stride[s->axis]), s->out->shape.dim[s->axis]);
        copy_item(out + i * s->out->stride[s->axis] * size, x + j * s->updates->stride[s->axis] * size, (size_t)size);
    }
}

/* A part is a run of lanes that share one stretch of the workspace. */
static void scatter_parts(void *arg, int64_t begin, int64_t end) {
    const element_scatter *s = arg;

    for (int64_t p = begin; p < end; p++)
        for (int64_t r = s->lanes * p / s->parts; r < s->lanes * (p + 1) / s->parts; r++) {
            if (s->how == COMBINE_NONE) lane_last(s, r);
            else by_type[s->out->type].lane(s, r, s->work + p * s->out->shape.dim[s->axis]);
        }
}

/* A scalar is a vector of one. */
static tensor at_least_1d(const tensor *t) {
    tensor r = *t;
    if (r.shape.rank == 0) {
        r.shape = SHAPE(1);
        r.stride[0] = 1;
    }
    return r;
}

static status scatter_elements_cpu(ctx *c, const call *k) {
    tensor x = at_least_1d(&k->in[0]), index = at_least_1d(&k->in[1]), updates = at_least_1d(&k->in[2]);
    tensor out = at_least_1d(&k->out[0]);
    element_scatter s = {
        .how = scatter_combining(k->node), .index = &index, .updates = &updates, .out = &out, .work = k->work};

    TRY(shape_axis(c, node_int(k->node, "axis"), out.shape.rank, &s.axis));
    TRY(check_indices(c, &index, x.shape.dim[s.axis]));
    copy_elements(&out, &x);
    if (tensor_count(&index) == 0) return OK;
    s.lanes = tensor_count(&index) / index.shape.dim[s.axis];
    s.parts = least(s.lanes, PARTS);
    parallel_for(s.parts, s.parts * GRAIN / tensor_count(&index) + 1, scatter_parts, &s);
    return OK;
}

/* --- ScatterND ---------------------------------------------------------------------------------------------------- */

static status infer_scatter_nd(graph *g, node *n) {
    const shape *x, *index, *u;
    char tx[SHAPE_TEXT], ti[SHAPE_TEXT], tu[SHAPE_TEXT];
    shape s;
    int64_t depth;

    TRY(require(g, n, 0));
    TRY(require_index(g, n, 1));
    TRY(require(g, n, 2));
    x = &n->in[0]->shape;
    index = &n->in[1]->shape;
    u = &n->in[2]->shape;
    depth = index->rank ? index->dim[index->rank - 1] : -1;
    if (depth >= 0 && depth <= x->rank && index->rank - 1 + x->rank - depth <= MAX_RANK) {
        s = *index;
        s.rank--;
        for (int i = (int)depth; i < x->rank; i++) s.dim[s.rank++] = x->dim[i];
        if (shape_equal(&s, u)) return infer_scatter(g, n);
    }
    return fail(g->c, E_SHAPE, "ScatterND into %s with indices %s and updates %s", shape_text(x, tx),
                shape_text(index, ti), shape_text(u, tu));
}

static size_t scatter_nd_bytes(const node *n) {
    const shape *index = &n->in[1]->shape;
    int64_t depth = index->dim[index->rank - 1];
    return row_scatter_bytes(shape_span(&n->in[0]->shape, 0, (int)depth), shape_span(index, 0, index->rank - 1));
}

static status scatter_nd_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    tuples t = tuples_of(&k->in[1], &x->shape, 0);
    row_scatter s = {.how = scatter_combining(k->node),
                     .type = x->type,
                     .out = k->out[0].data,
                     .base = x->data,
                     .updates = k->in[2].data,
                     .outer = 1,
                     .rows = shape_span(&x->shape, 0, t.depth),
                     .count = t.count,
                     .width = shape_span(&x->shape, t.depth, x->shape.rank)};

    TRY(check_tuples(c, &t));
    TRY(row_scatter_begin(c, &s, k->work));
    for (int64_t i = s.count - 1; i >= 0; i--) row_scatter_select(&s, i, tuple_row(&t, i));
    row_scatter_run(&s);
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

kernel_fn scatter_elements_cuda, scatter_nd_cuda; /* cuda/scatter.cu */
size_t scatter_elements_cuda_workspace(const node *n), scatter_nd_cuda_workspace(const node *n);

/* clang-format off */
const op_def scatter_ops[] = {
    {ONNX("ScatterElements", 11, 3, 3, 1, ANY_TYPE), .flags = STRIDED,
     .attrs = NODE_ATTRS(INT("axis", 0), STRING("reduction", "none")), .infer = infer_scatter_elements,
     .simplify = simplify_scatter_elements, .grad = grad_scatter, .workspace = scatter_elements_bytes, .cpu = scatter_elements_cpu,
     .cuda = scatter_elements_cuda, .cuda_workspace = scatter_elements_cuda_workspace},
    {ONNX("ScatterND", 11, 3, 3, 1, ANY_TYPE), .attrs = NODE_ATTRS(STRING("reduction", "none")),
     .infer = infer_scatter_nd, .grad = grad_scatter, .workspace = scatter_nd_bytes, .cpu = scatter_nd_cpu,
     .cuda = scatter_nd_cuda, .cuda_workspace = scatter_nd_cuda_workspace},
    {0},
};
/* clang-format on */
