/* attention.c -- owns MaskedSoftmax, and MaskedSoftmaxDropout, which is to it what SoftmaxDropout is to Softmax
 * (ops/reductions/softmax.c). Along the last axis, over the elements that the mask allows:
 *     y = exp(x - m) / s, and 0 elsewhere        dx = y * (dy - Σ dy y), which is SoftmaxGrad
 * with m = max x and s = Σ exp(x - m). A row in which nothing is allowed, or nothing but -∞ is, gives zeros, and zeros
 * as its gradient. Without a mask everything is allowed. The mask is broadcast and read where it lies: it is never made
 * as large as x. Backward needs y only.
 *
 * Also NarrowSoftmax (passes/softmax_cast.c), of float32 scores, whose y is rounded to 16 bits when it is stored, before
 * and after a dropout (NarrowSoftmaxRandom); a row of nothing gives zeros if it is `safe`, else NaN, as Softmax does. Its
 * gradient has dy in float32 and reads y in 16 bits, which is all that is kept; dx is of either type. Blocks of rows are
 * worked on as float32 in the nearest cache. */
#include "core/parallel.h"
#include "core/vmath.h"
#include "ops/pointwise/dropout.h"
#include "ops/queries.h"
#include "ops/reductions/softmax.h"

#include <string.h>

/* --- kernel ------------------------------------------------------------------------------------------------------- */

typedef void hide_fn(const void *x, const uint8_t *allowed, void *y, int64_t n);
typedef void narrow_fn(const float *x, float *room, void *y, int64_t n, int64_t rows, bool safe);
typedef void round_fn(const float *x, void *y, int64_t n);

typedef struct job {
    const char *x;
    char *y;
    tensor mask; /* seen with x's shape; absent */
    int64_t length, size;
    hide_fn *hide;
    softmax_fn *softmax;
    void *dropped; /* or NULL */
    dropout_run drop;
    bool safe;
    narrow_fn *narrow; /* y (which may be absent) and dropped have 16 bits */
    round_fn *round;
} job;

#define TEMPLATE "ops/attention/attention_rows.h"
#include "ops/pointwise/each_float.h"

/* Goes along the rows of a tensor that may be broadcast. */
typedef struct walk {
    const tensor *t;
    const uint8_t *at;
    int64_t index[MAX_RANK];
} walk;

static walk walk_from(const tensor *t, int64_t row) {
    walk w = {.t = t, .at = t->data};
    for (int i = t->shape.rank - 2; i >= 0; i--) {
        w.index[i] = row % t->shape.dim[i];
        w.at += w.index[i] * t->stride[i];
        row /= t->shape.dim[i];
    }
    return w;
}

static void walk_on(walk *w) {
    for (int i = w->t->shape.rank - 2; i >= 0; i--) {
        w->at += w->t->stride[i];
        if (++w->index[i] < w->t->shape.dim[i]) return;
        w->at -= w->t->stride[i] * w->t->shape.dim[i];
        w->index[i] = 0;
    }
}

/* Rows of x into y where the mask allows it, -∞ elsewhere. */
static void hide_rows(const job *j, int64_t begin, int64_t end, char *y) {
    const bool whole_rows = j->mask.stride[j->mask.shape.rank - 1] == 0;
    walk w = walk_from(&j->mask, begin);

    for (int64_t row = begin; row < end; row++, walk_on(&w), y += j->length * j->size) {
        const char *x = j->x + row * j->length * j->size;
        if (!whole_rows) j->hide(x, w.at, y, j->length);
        else if (*w.at) memmove(y, x, (size_t)(j->length * j->size));
        else j->hide(x, NULL, y, j->length);
    }
}

/* Rows are hidden a block at a time: right behind the stores their loads would have to wait. */
enum { BLOCK = 16 };

static int64_t block_of(const job *j, int64_t rows) {
    const int64_t most = j->narrow && BLOCK * j->length > NARROW_SOFTMAX_MOST ? NARROW_SOFTMAX_MOST / j->length : BLOCK;
    return rows < most ? rows : most;
}

/* Where rows from `row` on are of a result in 16 bits. */
static void *narrow_rows(const job *j, void *result, int64_t row) { return (uint16_t *)result + row * j->length; }

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const bool masked = tensor_present(&j->mask);
    const int64_t bytes = j->length * j->size;
    _Alignas(64) float buffer[NARROW_SOFTMAX_MOST];

    for (int64_t from = begin, rows; from < end; from += rows) {
        rows = block_of(j, end - from);
        const int64_t at = from * j->length, n = rows * j->length;
        char *y = j->narrow ? (char *)buffer : j->y + from * bytes;
        const char *x = masked ? y : j->x + from * bytes;
        if (masked) hide_rows(j, from, from + rows, y);
        if (j->narrow) {
            void *kept = narrow_rows(j, j->y ? j->y : j->dropped, from);
            j->narrow((const float *)(const void *)x, buffer, kept, j->length, rows, j->safe);
            if (!j->dropped) continue;
            dropout_part(&j->drop, buffer, buffer, at, n);
            j->round(buffer, narrow_rows(j, j->dropped, from), n);
            continue;
        }
        j->softmax(x, y, j->length, rows, j->safe);
        if (j->dropped) dropout_part(&j->drop, y, (char *)j->dropped + from * bytes, at, n);
    }
}

static status run(const call *k, job *j) {
    static hide_fn *const hide[DTYPE_COUNT] = FLOAT_TABLE(hide_row);
    const tensor *x = &k->in[0];
    const shape *s = &x->shape;

    if (tensor_count(x) == 0) return OK;
    j->x = x->data;
    j->hide = hide[x->type];
    j->softmax = softmax_kernel(x->type);
    j->length = s->dim[s->rank - 1];
    j->size = (int64_t)dtype_size(x->type);
    if (k->n_in > 1 && tensor_present(&k->in[1])) j->mask = tensor_expand(&k->in[1], s);
    if (j->dropped) j->drop = dropout_of(k);
    parallel_for(shape_span(s, 0, s->rank - 1), parallel_rows(8 * j->length), rows_range, j);
    return OK;
}

static void *second_result(const call *k) { return k->n_out > 1 && tensor_present(&k->out[1]) ? k->out[1].data : NULL; }

static status masked_softmax_cpu(ctx *c, const call *k) {
    (void)c;
    return run(k, &(job){.y = k->out[0].data, .safe = true});
}

static status masked_softmax_dropout_cpu(ctx *c, const call *k) {
    void *kept = second_result(k);
    (void)c;
    return run(k, &(job){.y = kept ? kept : k->out[0].data, .dropped = k->out[0].data, .safe = true});
}

/* --- stored in 16 bits ---------------------------------------------------------------------------------------------- */

static narrow_fn *const narrow_softmax[DTYPE_COUNT] = {[BF16] = narrow_softmax_bf16, [F16] = narrow_softmax_f16};
static round_fn *const rounds[DTYPE_COUNT] = {[BF16] = round_bf16, [F16] = round_f16};

static bool drops(const node *n) { return node_float(n, "ratio") > 0; }

static status narrow_softmax_cpu(ctx *c, const call *k) {
    const bool dropped = drops(k->node);
    (void)c;
    return run(k, &(job){.y = dropped ? second_result(k) : k->out[0].data,
                         .dropped = dropped ? k->out[0].data : NULL,
                         .safe = node_int(k->node, "safe") != 0,
                         .narrow = narrow_softmax[k->out[0].type],
                         .round = rounds[k->out[0].type]});
}

/* Rows of dx from those of dy and y. */
typedef void slope_fn(const float *dy, const void *y, void *dx, int64_t n, int64_t rows);

typedef struct slope_job {
    const float *dy;
    const char *y;
    char *dx;
    int64_t length, y_size, dx_size;
    bool drops;
    dropout_run drop;
    slope_fn *fn;
} slope_job;

static void slope_range(void *arg, int64_t begin, int64_t end) {
    const slope_job *j = arg;
    const int64_t most = NARROW_SOFTMAX_MOST / j->length;
    _Alignas(64) float buffer[NARROW_SOFTMAX_MOST];

    for (int64_t from = begin, rows; from < end; from += rows) {
        const int64_t at = from * j->length;
        rows = end - from < most ? end - from : most;
        if (j->drops) dropout_part(&j->drop, j->dy + at, buffer, at, rows * j->length);
        j->fn(j->drops ? buffer : j->dy + at, j->y + at * j->y_size, j->dx + at * j->dx_size, j->length, rows);
    }
}

static status narrow_softmax_grad_cpu(ctx *c, const call *k) {
    static slope_fn *const wide[DTYPE_COUNT] = {[BF16] = wide_slope_bf16, [F16] = wide_slope_f16},
                           *const narrow[DTYPE_COUNT] = {[BF16] = narrow_slope_bf16, [F16] = narrow_slope_f16};
    const tensor *dy = &k->in[0], *y = &k->in[1], *dx = &k->out[0];
    const shape *s = &dy->shape;
    slope_job j = {.dy = dy->data,
                   .y = y->data,
                   .dx = dx->data,
                   .y_size = (int64_t)dtype_size(y->type),
                   .dx_size = (int64_t)dtype_size(dx->type),
                   .drops = drops(k->node),
                   .fn = (dx->type == F32 ? wide : narrow)[y->type]};

    (void)c;
    if (tensor_count(dy) == 0) return OK;
    j.length = s->dim[s->rank - 1];
    if (j.drops) j.drop = dropout_of(k);
    parallel_for(shape_span(s, 0, s->rank - 1), parallel_rows(10 * j.length), slope_range, &j);
    return OK;
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

/* Without a mask that hides nothing. */
static status simplify_masked_softmax(graph *g, const node *n, value **out) {
    double all;
    if (!node_in(n, 1) || !value_is_filled(n->in[1], &all) || all == 0) return OK;
    return emit(g, out, "MaskedSoftmax", n->in[0]);
}

static status infer_masked_softmax(graph *g, node *n) {
    char tx[SHAPE_TEXT], tm[SHAPE_TEXT];
    const value *mask = node_in(n, 1);
    shape both;

    TRY(infer_same(g, n));
    if (n->in[0]->shape.rank == 0) return fail(g->c, E_SHAPE, "%s of one number: it has no axis", n->op->name);
    if (!mask) return OK;
    if (mask->type != BOOL) return fail(g->c, E_TYPE, "%s with a mask of %s", n->op->name, dtype_name(mask->type));
    TRY(shape_broadcast(g->c, &n->in[0]->shape, &mask->shape, &both));
    if (shape_equal(&both, &n->in[0]->shape)) return OK;
    return fail(g->c, E_SHAPE, "%s of %s with a mask of shape %s", n->op->name, shape_text(&n->in[0]->shape, tx),
                shape_text(&mask->shape, tm));
}

static dtype type_of_result(const node *n) { return dtype_from_onnx((int)node_int(n, "to")); }

static status infer_narrow_softmax(graph *g, node *n) {
    TRY(infer_masked_softmax(g, n));
    TRY(set_out(g, n, 0, type_of_result(n), &n->in[0]->shape));
    return set_out(g, n, 1, type_of_result(n), &n->in[0]->shape);
}

static status infer_narrow_softmax_grad(graph *g, node *n) {
    return set_out(g, n, 0, type_of_result(n), &n->in[0]->shape);
}

static status grad_narrow_softmax(graph *g, const node *n, value *const dy[], value *dx[]) {
    const double ratio = node_float(n, "ratio");
    value *wide;

    TRY(emit_cast(g, dy[0], F32, &wide));
    return emit_with(
        g, &dx[0], ratio > 0 ? "NarrowSoftmaxGradRandom" : "NarrowSoftmaxGrad",
        NODE_ATTRS(INT("to", dtype_table[F32].onnx), FLOAT("ratio", ratio), INT("key", node_int(n, "key"))), wide,
        n->out[ratio > 0]);
}

static status grad_masked_softmax(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "SoftmaxGrad", NODE_ATTRS(INT("axis", -1)), dy[0], n->out[0]);
}

kernel_fn masked_softmax_cuda, masked_softmax_dropout_cuda; /* cuda/kernels/softmax.cu */

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr dropout_attrs[] = {NO_DEFAULT("ratio", FLOAT), NO_DEFAULT("key", INT), {.name = NULL}};

static const attr narrow_attrs[] = {
    NO_DEFAULT("to", INT), INT("safe", 0), FLOAT("ratio", 0), INT("key", 0), {.name = NULL}};
static const attr narrow_grad_attrs[] = {NO_DEFAULT("to", INT), FLOAT("ratio", 0), INT("key", 0), {.name = NULL}};

#define NARROW(name_, flags_)                                                                                          \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 2, .max_out = 2, .dtypes = SET(F32),       \
    .flags = flags_, .attrs = narrow_attrs, .infer = infer_narrow_softmax, .grad = grad_narrow_softmax,                \
    .cpu = narrow_softmax_cpu
#define NARROW_GRAD(name_, flags_)                                                                                     \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 2, .max_in = 2, .max_out = 1, .dtypes = SET(F32),       \
    .flags = INPLACE_0 | (flags_), .attrs = narrow_grad_attrs, .infer = infer_narrow_softmax_grad,                     \
    .cpu = narrow_softmax_grad_cpu
#define OURS(name_, results)                                                                                           \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 2, .max_out = results, .dtypes = FLOATS

/* clang-format off */
const op_def attention_ops[] = {
    {OURS("MaskedSoftmax", 1), .flags = INPLACE_0 | IN_MODELS, .infer = infer_masked_softmax,
     .simplify = simplify_masked_softmax, .grad = grad_masked_softmax,
     .cpu = masked_softmax_cpu, .cuda = masked_softmax_cuda},
    {OURS("MaskedSoftmaxDropout", 2), .flags = RANDOM | INPLACE_0, .attrs = dropout_attrs,
     .infer = infer_softmax_dropout, .grad = grad_softmax_dropout,
     .cpu = masked_softmax_dropout_cpu, .cuda = masked_softmax_dropout_cuda},
    {NARROW("NarrowSoftmax", 0)},
    {NARROW("NarrowSoftmaxRandom", RANDOM)},
    {NARROW_GRAD("NarrowSoftmaxGrad", 0)},
    {NARROW_GRAD("NarrowSoftmaxGradRandom", RANDOM)},
    {0},
};
/* clang-format on */
