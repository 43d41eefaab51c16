/* pool.c -- runs MaxPool, AveragePool, their gradients, and the pools that other operators make up.
 *
 *     MaxPool        y = largest of the window    dx = dy where the first largest element was; a NaN is the largest,
 *                                                 and of several the last: PyTorch's order
 *     AveragePool    y = sum of the window / n    dx = sum over the windows of dy / n; n counts the window's elements,
 *                                                 with or without the padding
 *
 * Forward of MaxPool leaves a byte a result for its backward: which element of the window was the largest; of windows
 * that are whole planes, its place. Others of more elements than a byte counts are searched again, for which x stays
 * alive.
 * Backward of AveragePool keeps nothing. */
#include <string.h>

#include "core/names.h"
#include "core/parallel.h"
#include "ops/spatial/spatial.h"

/* --- inference and gradients -------------------------------------------------------------------------------------- */

static status pool_window(ctx *c, const node *n, const shape *x, window *out) {
    if (!node_has(n, "kernel_shape")) return fail(c, E_INVALID, "%s without a kernel_shape", n->op->name);
    return window_of(c, n, x, NULL, out);
}

static status infer_pool(graph *g, node *n) {
    shape y;
    window w;

    TRY(require(g, n, 0));
    TRY(pool_window(g->c, n, &n->in[0]->shape, &w));
    if (volume(w.in) > INT32_MAX) return fail(g->c, E_UNSUPPORTED, "%s over more than 2^31 pixels", n->op->name);
    y = spatial_shape(n->in[0]->shape.dim[0], n->in[0]->shape.dim[1], w.rank, w.out);
    TRY(set_out(g, n, 0, n->in[0]->type, &y));
    if (n->n_out > 1 && n->out[1] && node_int(n, "storage_order") != 0)
        return fail(g->c, E_UNSUPPORTED, "MaxPool with indices that count columns first");
    TRY(set_out(g, n, 1, I64, &y));
    return set_out(g, n, 2, U8, &y);
}

/* The gradient has the attributes of the pool, and the shape of its operand. */
static status emit_gradient(graph *g, const char *op, const node *n, int n_in, value *const *in, value **dx) {
    const shape *x = &n->in[0]->shape;
    const op_def *record = op_find(ORT_DOMAIN, op, 0);
    attr list[16] = {INTS("shape", x->rank, x->dim)};
    int used = 1;

    for (const attr *a = record->attrs; a->name; a++)
        if (node_has(n, a->name)) list[used++] = *node_attr(n, a->name);
    return graph_emit_op(g, record, list, n_in, in, 1, dx);
}

/* A plane has one window, all of it. */
static inline bool is_whole(const window *w) {
    for (int i = 0; i < SPATIAL; i++)
        if (w->kernel[i] != w->in[i] || w->out[i] != 1 || w->before[i] || (w->kernel[i] > 1 && w->dilation[i] > 1))
            return false;
    return volume(w->in) > 0;
}

/* Windows of so many elements have a byte for each result, in which NO_TAP says that there was none. */
enum { MOST_TAPS = 255, NO_TAP = 255 };

static status grad_max_pool(graph *g, const node *n, value *const dy[], value *dx[]) {
    window w;

    TRY(pool_window(g->c, n, &n->in[0]->shape, &w));
    value *where = volume(w.kernel) <= MOST_TAPS ? n->out[2] : is_whole(&w) && !g->cuda ? n->out[1] : n->in[0];
    return emit_gradient(g, "MaxPoolGrad", n, 2, (value *[]){dy[0], where}, &dx[0]);
}

static status grad_average_pool(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_gradient(g, "AveragePoolGrad", n, 1, &dy[0], &dx[0]);
}

static status infer_pool_grad(graph *g, node *n) {
    shape x;

    TRY(require(g, n, 0));
    TRY(shape_attr(g->c, n, "shape", &x));
    return set_out(g, n, 0, n->in[0]->type, &x);
}

/* --- lines -------------------------------------------------------------------------------------------------------- */

/* Outputs are computed up to SEGMENT at a time, along the last axis. */
enum { SEGMENT = 256 };

typedef struct segment {
    int64_t plane, at[SPATIAL], count; /* at: the first output's place; count: along the last axis */
} segment;

/* One element of the window: how far it is from the first in each of the outer axes and in the plane, and the outputs of
 * a line, [first, last), for which it is inside the line. */
typedef struct tap {
    int64_t outer[SPATIAL - 1], distance, first, last;
} tap;

static tap tap_of(const window *w, int64_t i) {
    const int64_t x = i % w->kernel[2], rest = i / w->kernel[2];
    tap t = {.outer = {rest / w->kernel[1] * w->dilation[0], rest % w->kernel[1] * w->dilation[1]}};

    t.distance = (t.outer[0] * w->in[1] + t.outer[1]) * w->in[2] + x * w->dilation[2];
    window_reach(w, 2, x, &t.first, &t.last);
    return t;
}

typedef struct pool {
    window w;
    const void *x, *dy;
    void *y, *dx;
    int64_t *indices; /* or NULL */
    uint8_t *taps;    /* or NULL */
    bool count_padding;
    int64_t after[SPATIAL]; /* padding that counts */
    tap table[MOST_TAPS];   /* the first of the window */
} pool;

static inline tap tap_at(const pool *k, int64_t i) { return i < MOST_TAPS ? k->table[i] : tap_of(&k->w, i); }

/* Where the window of a segment's output 0 begins in the plane, or would. */
static inline int64_t origin(const window *w, const segment *s) {
    int64_t place = 0;
    for (int i = 0; i < SPATIAL; i++) place = place * w->in[i] + s->at[i] * w->stride[i] - w->before[i];
    return place;
}

/* Where a tap looks for a segment: an offset into the plane for output 0, others a stride apart, and which of the
 * outputs see something there; of none the offset is 0, since the plane may have no elements and no address. */
typedef struct sight {
    int64_t offset, first, last;
} sight;

static inline sight look(const pool *k, const segment *s, int64_t i) {
    const window *w = &k->w;
    const tap t = tap_at(k, i);
    sight r = {.offset = 0};

    for (int a = 0; a < SPATIAL - 1; a++) {
        int64_t x = s->at[a] * w->stride[a] - w->before[a] + t.outer[a];
        if (x < 0 || x >= w->in[a]) return r;
    }
    r.first = t.first > s->at[2] ? t.first - s->at[2] : 0;
    r.last = t.last - s->at[2] < s->count ? t.last - s->at[2] : s->count;
    if (r.first < r.last) r.offset = origin(w, s) + t.distance;
    return r;
}

/* Sets the segment's length; false past the end of its line. */
static inline bool fits(const window *w, segment *s) {
    s->count = w->out[2] - s->at[2] < SEGMENT ? w->out[2] - s->at[2] : SEGMENT;
    return s->count > 0;
}

/* For each segment of the outputs of planes [begin, end). */
#define EACH_SEGMENT(w, s)                                                                                             \
    for (segment s = {.plane = begin}; s.plane < end; s.plane++)                                                       \
        for (s.at[0] = 0; s.at[0] < (w)->out[0]; s.at[0]++)                                                            \
            for (s.at[1] = 0; s.at[1] < (w)->out[1]; s.at[1]++)                                                        \
                for (s.at[2] = 0; fits(w, &s); s.at[2] += SEGMENT)

static inline int64_t segment_start(const window *w, const segment *s) {
    return ((s->plane * w->out[0] + s->at[0]) * w->out[1] + s->at[1]) * w->out[2] + s->at[2];
}

/* --- maximum ------------------------------------------------------------------------------------------------------ */

/* Where in the plane an output's tap looks; 0 without one. */
static inline int64_t place_of(const pool *k, const segment *s, int32_t i, int64_t p) {
    return i < 0 ? 0 : origin(&k->w, s) + tap_at(k, i).distance + p * k->w.stride[2];
}

#define TAKES(v, best) (((v) > (best)) | ((v) != (v)))

/* What the maximum of no elements is. */
#define LOWEST                                                                                                         \
    _Generic((T)0,                                                                                                     \
        float: -__builtin_inff(),                                                                                      \
        double: -__builtin_inf(),                                                                                      \
        int64_t: INT64_MIN,                                                                                            \
        int32_t: INT32_MIN,                                                                                            \
        int8_t: INT8_MIN,                                                                                              \
        uint8_t: 0)
#define NAME(f) JOIN_NAMES(f, T)

#define T float
#include "ops/spatial/pool_maximum.h"
#undef T
#define T double
#include "ops/spatial/pool_maximum.h"
#undef T
#define T int64_t
#include "ops/spatial/pool_maximum.h"
#undef T
#define T int32_t
#include "ops/spatial/pool_maximum.h"
#undef T
#define T int8_t
#include "ops/spatial/pool_maximum.h"
#undef T
#define T uint8_t
#include "ops/spatial/pool_maximum.h"
#undef T
#undef NAME

#define TEMPLATE "ops/spatial/pool_maximum_grad.h"
#include "ops/pointwise/float_and_double.h"

/* --- average ------------------------------------------------------------------------------------------------------ */

/* How many elements of the window at output `o` of an axis count. */
static int64_t axis_count(const pool *k, int axis, int64_t o) {
    const window *w = &k->w;
    int64_t start = o * w->stride[axis] - w->before[axis], d = w->dilation[axis];
    int64_t low = k->count_padding ? -w->before[axis] : 0;
    int64_t high = w->in[axis] + (k->count_padding ? k->after[axis] : 0);
    int64_t from = start < low ? (low - start + d - 1) / d : 0, to = start < high ? (high - start + d - 1) / d : 0;

    if (to > w->kernel[axis]) to = w->kernel[axis];
    return to > from ? to - from : 0;
}

#define TEMPLATE "ops/spatial/pool_average.h"
#include "ops/pointwise/float_and_double.h"

/* --- kernels ------------------------------------------------------------------------------------------------------ */

static status pool_of(ctx *c, const call *k, const shape *x, pool *out) {
    *out = (pool){.count_padding = node_int(k->node, "count_include_pad") != 0};
    TRY(pool_window(c, k->node, x, &out->w));
    memcpy(out->after, out->w.after, sizeof out->after);
    for (int64_t i = 0; i < MOST_TAPS && i < volume(out->w.kernel); i++) out->table[i] = tap_of(&out->w, i);
    return OK;
}

/* `written`: the sizes of what is written of a plane. */
static void each_plane(const shape *x, const pool *k, const int64_t written[SPATIAL], range_fn *body) {
    int64_t work = volume(k->w.out) * volume(k->w.kernel);
    if (volume(written) > 0) parallel_for(x->dim[0] * x->dim[1], parallel_rows(work), body, (void *)(uintptr_t)k);
}

static status max_pool_cpu(ctx *c, const call *k) {
    static range_fn *const values[DTYPE_COUNT] = {[F32] = max_float,   [F64] = max_double, [I64] = max_int64_t,
                                                  [I32] = max_int32_t, [I8] = max_int8_t,  [U8] = max_uint8_t};
    static range_fn *const all[DTYPE_COUNT] = {[F32] = find_all_float,   [F64] = find_all_double,
                                               [I64] = find_all_int64_t, [I32] = find_all_int32_t,
                                               [I8] = find_all_int8_t,   [U8] = find_all_uint8_t};
    const tensor *x = &k->in[0], *y = &k->out[0];
    pool p;

    TRY(pool_of(c, k, &x->shape, &p));
    p.x = x->data;
    if (tensor_present(y)) p.y = y->data;
    if (k->n_out > 1 && tensor_present(&k->out[1])) p.indices = k->out[1].data;
    if (k->n_out > 2 && tensor_present(&k->out[2])) p.taps = k->out[2].data;
    each_plane(&x->shape, &p, p.w.out, p.indices || p.taps ? all[x->type] : values[x->type]);
    return OK;
}

/* Operands: dy, and the taps that forward left, or the places (of windows that are whole planes), or x. */
static status max_pool_grad_cpu(ctx *c, const call *k) {
    const tensor *dy = &k->in[0], *dx = &k->out[0];
    pool p;

    TRY(pool_of(c, k, &dx->shape, &p));
    p.dy = dy->data;
    if (k->in[1].type == U8) p.taps = k->in[1].data;
    else if (k->in[1].type == I64) p.indices = k->in[1].data;
    else p.x = k->in[1].data;
    p.dx = dx->data;
    each_plane(&dx->shape, &p, p.w.in, dx->type == F64 ? max_grad_double : max_grad_float);
    return OK;
}

static status average_pool_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    pool p;

    TRY(pool_of(c, k, &x->shape, &p));
    p.x = x->data;
    p.y = k->out[0].data;
    each_plane(&x->shape, &p, p.w.out, x->type == F64 ? average_double : average_float);
    return OK;
}

static status average_pool_grad_cpu(ctx *c, const call *k) {
    const tensor *dy = &k->in[0], *dx = &k->out[0];
    pool p;

    TRY(pool_of(c, k, &dx->shape, &p));
    p.dy = dy->data;
    p.dx = dx->data;
    each_plane(&dx->shape, &p, p.w.in, dx->type == F64 ? average_grad_double : average_grad_float);
    return OK;
}

/* --- pools made of other operators -------------------------------------------------------------------------------- */

static status spatial_range(graph *g, const node *n, int *count, int64_t axes[MAX_RANK]) {
    TRY(require(g, n, 0));
    *count = n->in[0]->shape.rank - 2;
    if (*count < 1) return fail(g->c, E_SHAPE, "%s of a tensor of rank %d", n->op->name, n->in[0]->shape.rank);
    for (int i = 0; i < *count; i++) axes[i] = 2 + i;
    return OK;
}

static status lower_global_average_pool(graph *g, const node *n, value **out) {
    int64_t axes[MAX_RANK];
    int count;

    TRY(spatial_range(g, n, &count, axes));
    return emit_reduce(g, "ReduceMean", n->in[0], count, axes, true, &out[0]);
}

/* Not ReduceMax: of equal elements that would give each a share of the gradient, a pool gives it to the first. */
static status lower_global_max_pool(graph *g, const node *n, value **out) {
    int64_t axes[MAX_RANK];
    int count;

    TRY(spatial_range(g, n, &count, axes));
    return emit_with(g, &out[0], "MaxPool", NODE_ATTRS(INTS("kernel_shape", count, n->in[0]->shape.dim + 2)), n->in[0]);
}

/* Norms have degrees from 1 on: of 0 the root does not exist, and powers below it leave the range of 16-bit floats. */
static status read_degree(graph *g, const node *n, double *p) {
    *p = (double)node_int(n, "p");
    return *p >= 1 ? OK : fail(g->c, E_INVALID, "%s with p = %g: it is 1 or more", n->op->name, *p);
}

/* |x|^p, and back after summing. */
static status power(graph *g, value *x, double p, value **out) {
    value *exponent;
    TRY(graph_scalar(g, x->type, p, &exponent));
    return emit(g, out, "Pow", x, exponent);
}

static status lower_global_lp_pool(graph *g, const node *n, value **out) {
    int64_t axes[MAX_RANK];
    double p;
    int count;
    value *v;

    TRY(read_degree(g, n, &p));
    TRY(spatial_range(g, n, &count, axes));
    TRY(emit(g, &v, "Abs", n->in[0]));
    TRY(power(g, v, p, &v));
    TRY(emit_reduce(g, "ReduceSum", v, count, axes, true, &v));
    return power(g, v, 1 / p, &out[0]);
}

/* A sum is an average over windows that all count the same number of elements. */
static status lower_lp_pool(graph *g, const node *n, value **out) {
    static const char *const kept[] = {"auto_pad", "dilations", "kernel_shape", "pads", "strides"};
    attr list[sizeof kept / sizeof *kept + 2] = {INT("count_include_pad", 1)};
    const op_def *average = op_find("", "AveragePool", 0);
    const int64_t *kernel;
    int used = 1, rank = node_ints(n, "kernel_shape", &kernel);
    double elements = 1, p;
    value *v;

    TRY(require(g, n, 0));
    TRY(read_degree(g, n, &p));
    if (node_int(n, "ceil_mode")) return fail(g->c, E_UNSUPPORTED, "LpPool with ceil_mode");
    for (int i = 0; i < rank; i++) elements *= (double)kernel[i];
    for (size_t i = 0; i < sizeof kept / sizeof *kept; i++)
        if (node_has(n, kept[i])) list[used++] = *node_attr(n, kept[i]);
    TRY(emit(g, &v, "Abs", n->in[0]));
    TRY(power(g, v, p, &v));
    TRY(graph_emit_op(g, average, list, 1, &v, 1, &v));
    TRY(emit_scaled(g, v, elements, &v));
    return power(g, v, 1 / p, &out[0]);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

kernel_fn max_pool_cuda, max_pool_grad_cuda, average_pool_cuda, average_pool_grad_cuda; /* cuda/kernels/pool.cu */
size_t max_pool_grad_cuda_workspace(const node *n);

#define POOL(name_, domain_, since_, operands_, results_)                                                              \
    .name = name_, .domain = domain_, .since = since_, .min_in = operands_, .max_in = operands_, .max_out = results_
#define WINDOW(...)                                                                                                    \
    .attrs = NODE_ATTRS(STRING("auto_pad", "NOTSET"), INT("ceil_mode", 0), NO_DEFAULT("dilations", INTS),              \
                        NO_DEFAULT("kernel_shape", INTS), NO_DEFAULT("pads", INTS), NO_DEFAULT("strides", INTS),       \
                        __VA_ARGS__)

/* clang-format off */
const op_def pool_ops[] = {
    {POOL("MaxPool", "", 1, 1, 3), .dtypes = FLOATS | SET(I64) | SET(I32) | SET(I8) | SET(U8),
     WINDOW(INT("storage_order", 0)), .plain = OPERAND(0), .infer = infer_pool, .lower = lower_to_f32, .grad = grad_max_pool,
     .cpu = max_pool_cpu, .cuda = max_pool_cuda},
    {POOL("MaxPoolGrad", ORT_DOMAIN, 1, 2, 1), .dtypes = FLOATS, .owned = OPERAND(1), WINDOW(NO_DEFAULT("shape", INTS)),
     .infer = infer_pool_grad,
     .lower = lower_to_f32, .cpu = max_pool_grad_cpu, .cuda_workspace = max_pool_grad_cuda_workspace,
     .cuda = max_pool_grad_cuda},
    {POOL("AveragePool", "", 1, 1, 1), .dtypes = FLOATS, WINDOW(INT("count_include_pad", 0)), .infer = infer_pool,
     .lower = lower_to_f32, .grad = grad_average_pool, .cpu = average_pool_cpu, .cuda = average_pool_cuda},
    {POOL("AveragePoolGrad", ORT_DOMAIN, 1, 1, 1), .dtypes = FLOATS,
     WINDOW(INT("count_include_pad", 0), NO_DEFAULT("shape", INTS)), .infer = infer_pool_grad, .lower = lower_to_f32,
     .cpu = average_pool_grad_cpu, .cuda = average_pool_grad_cuda},
    {POOL("GlobalAveragePool", "", 1, 1, 1), .dtypes = FLOATS, .lower = lower_global_average_pool},
    {POOL("GlobalMaxPool", "", 1, 1, 1), .dtypes = FLOATS, .lower = lower_global_max_pool},
    {POOL("GlobalLpPool", "", 2, 1, 1), .dtypes = FLOATS, .attrs = NODE_ATTRS(INT("p", 2)),
     .lower = lower_global_lp_pool},
    {POOL("LpPool", "", 2, 1, 1), .dtypes = FLOATS, WINDOW(INT("p", 2)), .lower = lower_lp_pool},
    {0},
};
/* clang-format on */
