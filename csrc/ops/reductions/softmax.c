/* softmax.c -- owns Softmax, LogSoftmax, Hardmax and the gradients SoftmaxGrad, LogSoftmaxGrad. Along one axis:
 *     Softmax      y = exp(x - m) / s          dx = y * (dy - Σ dy y)
 *     LogSoftmax   y = x - m - log s           dx = dy - exp(y) Σ dy
 * with m = max x and s = Σ exp(x - m). Backward needs y only. A row of nothing but -∞ is NaN, as in PyTorch.
 *
 * Also SoftmaxDropout, along the last axis: dropout(y), and y for its gradient SoftmaxDropoutGrad, which is SoftmaxGrad of
 * dropout(dy). Rows are dropped while they are in cache; bits are those of the operators one by one. */
#include "ops/reductions/softmax.h"
#include "core/parallel.h"
#include "core/vmath.h"
#include "ops/op.h"
#include "ops/pointwise/dropout.h"

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Columns worked on together; elements of rows between which and dropout a thread alternates. */
enum { COLUMNS = 256, BLOCK = 2048 };

typedef struct job job;
typedef void rows_fn(const job *j, int64_t begin, int64_t end);
/* `width` columns from element `at` on. */
typedef void columns_fn(const job *j, int64_t at, int64_t width);

struct job {
    const void *a, *b;
    void *out;
    int64_t length, inner; /* of the axis; elements behind it */
    rows_fn *rows;
    columns_fn *columns;
    void *dropped;
    dropout_run drop;
};

#define TEMPLATE "ops/reductions/softmax_rows.h"
#include "ops/pointwise/each_float.h"

softmax_fn *softmax_kernel(dtype type) {
    static softmax_fn *const kernels[DTYPE_COUNT] = FLOAT_TABLE(softmax);
    return kernels[type];
}

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    j->rows(j, begin, end);
}

static void columns_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    int64_t pieces = (j->inner + COLUMNS - 1) / COLUMNS;

    for (int64_t task = begin; task < end; task++) {
        int64_t outer = task / pieces, from = task % pieces * COLUMNS;
        int64_t width = j->inner - from < COLUMNS ? j->inner - from : COLUMNS;
        j->columns(j, outer * j->length * j->inner + from, width);
    }
}

static status run(ctx *c, const call *k, rows_fn *const *rows, columns_fn *const *columns) {
    const shape *s = &k->in[0].shape;
    dtype type = k->in[0].type;
    int axis;
    job j = {.a = k->in[0].data, .b = k->n_in > 1 ? k->in[1].data : NULL, .out = k->out[0].data};
    int64_t outer;

    TRY(shape_axis(c, node_int(k->node, "axis"), s->rank, &axis));
    if (shape_count(s) == 0) return OK;
    outer = s->rank ? shape_span(s, 0, axis) : 1;
    j.length = s->rank ? s->dim[axis] : 1;
    j.inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    j.rows = rows[type];
    j.columns = columns[type];
    if (j.inner == 1) {
        parallel_for(outer, parallel_rows(8 * j.length), rows_range, &j);
    } else {
        int64_t width = j.inner < COLUMNS ? j.inner : COLUMNS;
        parallel_for(outer * ((j.inner + COLUMNS - 1) / COLUMNS), parallel_rows(8 * j.length * width), columns_range,
                     &j);
    }
    return OK;
}

#define KERNEL(name)                                                                                                   \
    static status name##_cpu(ctx *c, const call *k) {                                                                  \
        static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(name##_rows);                                            \
        static columns_fn *const columns[DTYPE_COUNT] = FLOAT_TABLE(name##_columns);                                   \
        return run(c, k, rows, columns);                                                                               \
    }
KERNEL(softmax)
KERNEL(log_softmax)
KERNEL(softmax_grad)
KERNEL(log_softmax_grad)

/* --- with dropout --------------------------------------------------------------------------------------------------- */

static int64_t block_end(const job *j, int64_t from, int64_t end) {
    const int64_t rows = j->length < BLOCK ? BLOCK / j->length : 1;
    return end - from < rows ? end : from + rows;
}

/* Rows [from, to) of y from those of x. */
static void drop_rows(const job *j, const void *x, void *y, int64_t from, int64_t to) {
    const int64_t at = from * j->length, bytes = at * (int64_t)dtype_size(j->drop.type);
    dropout_part(&j->drop, (const char *)x + bytes, (char *)y + bytes, at, (to - from) * j->length);
}

static void dropout_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    for (int64_t from = begin, to; from < end; from = to) {
        to = block_end(j, from, end);
        j->rows(j, from, to);
        drop_rows(j, j->out, j->dropped, from, to);
    }
}

/* The gradient before dropout has its place where the result comes. */
static void dropout_grad_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    job there = *j;

    there.a = j->out;
    for (int64_t from = begin, to; from < end; from = to) {
        to = block_end(j, from, end);
        drop_rows(j, j->a, j->out, from, to);
        j->rows(&there, from, to);
    }
}

static void run_dropout(const call *k, job *j, range_fn *range) {
    const shape *s = &k->in[0].shape;

    if (shape_count(s) == 0) return;
    j->length = s->dim[s->rank - 1];
    j->drop = dropout_of(k);
    parallel_for(shape_span(s, 0, s->rank - 1), parallel_rows(10 * j->length), range, j);
}

static status softmax_dropout_cpu(ctx *c, const call *k) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(softmax_rows);
    const bool keeps = k->n_out > 1 && tensor_present(&k->out[1]);
    job j = {.a = k->in[0].data,
             .out = keeps ? k->out[1].data : k->out[0].data,
             .dropped = k->out[0].data,
             .rows = rows[k->in[0].type]};

    (void)c;
    run_dropout(k, &j, dropout_range);
    return OK;
}

static status softmax_dropout_grad_cpu(ctx *c, const call *k) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(softmax_grad_rows);
    job j = {.a = k->in[0].data, .b = k->in[1].data, .out = k->out[0].data, .rows = rows[k->in[0].type]};

    (void)c;
    run_dropout(k, &j, dropout_grad_range);
    return OK;
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

status infer_softmax_dropout(graph *g, node *n) {
    TRY(infer_same(g, n));
    return n->n_out > 1 ? set_out(g, n, 1, n->in[0]->type, &n->in[0]->shape) : OK;
}

/* No other node reads what is before dropout. */
status grad_softmax_dropout(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "SoftmaxDropoutGrad",
                     NODE_ATTRS(FLOAT("ratio", node_float(n, "ratio")), INT("key", node_int(n, "key"))), dy[0],
                     n->out[1]);
}

static status infer_axis(graph *g, node *n) {
    int axis;
    TRY(infer_same(g, n));
    return shape_axis(g->c, node_int(n, "axis"), n->in[0]->shape.rank, &axis);
}

static status grad_softmax(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "SoftmaxGrad", NODE_ATTRS(INT("axis", node_int(n, "axis"))), dy[0], n->out[0]);
}

static status grad_log_softmax(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "LogSoftmaxGrad", NODE_ATTRS(INT("axis", node_int(n, "axis"))), dy[0], n->out[0]);
}

/* Before opset 13: over all axes from `axis` on, as one. */
static status lower_flat(graph *g, const node *n, value **out) {
    const shape *s = &n->in[0]->shape;
    int64_t axis = node_int(n, "axis");
    value *x;

    if (axis < -s->rank || axis > s->rank)
        return fail(g->c, E_SHAPE, "axis %lld is out of range for a tensor of rank %d", (long long)axis, s->rank);
    if (axis < 0) axis += s->rank;
    TRY(emit_reshape(g, n->in[0], &SHAPE(shape_span(s, 0, (int)axis), shape_span(s, (int)axis, s->rank)), &x));
    TRY(emit_with(g, &x, n->op->name, NODE_ATTRS(INT("axis", 1)), x));
    return emit_reshape(g, x, s, out);
}

/* 1 at the first of the largest elements, 0 elsewhere. */
static status lower_hardmax(graph *g, const node *n, value **out) {
    const value *x = n->in[0];
    shape s = {.rank = x->shape.rank};
    value *where, *start, *end, *step, *index;
    int axis;

    TRY(shape_axis(g->c, node_int(n, "axis"), x->shape.rank, &axis));
    for (int i = 0; i < s.rank; i++) s.dim[i] = i == axis ? x->shape.dim[i] : 1;
    TRY(emit_with(g, &where, "ArgMax", NODE_ATTRS(INT("axis", axis), INT("keepdims", 1)), n->in[0]));
    TRY(graph_scalar(g, I64, 0, &start));
    TRY(graph_scalar(g, I64, (double)shape_count(&s), &end));
    TRY(graph_scalar(g, I64, 1, &step));
    TRY(emit(g, &index, "Range", start, end, step));
    TRY(emit_reshape(g, index, &s, &index));
    TRY(emit(g, &where, "Equal", index, where));
    return emit_cast(g, where, x->type, out);
}

/* cuda/kernels/softmax.cu */
kernel_fn softmax_cuda, log_softmax_cuda, softmax_grad_cuda, log_softmax_grad_cuda, softmax_dropout_cuda,
    softmax_dropout_grad_cuda;

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr axis_1[] = {INT("axis", 1), {.name = NULL}};
static const attr axis_last[] = {INT("axis", -1), {.name = NULL}};
static const attr dropout_attrs[] = {NO_DEFAULT("ratio", FLOAT), NO_DEFAULT("key", INT), {.name = NULL}};

#define ONNX(name_, since_, attrs_)                                                                                    \
    .name = name_, .domain = "", .since = since_, .min_in = 1, .max_in = 1, .max_out = 1, .dtypes = FLOATS,            \
    .attrs = attrs_
#define GRAD(name_)                                                                                                    \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 2, .max_in = 2, .max_out = 1, .dtypes = FLOATS,         \
    .flags = INPLACE_0, .attrs = axis_last, .infer = infer_axis
#define DROPS(name_, operands, results, more)                                                                          \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = operands, .max_in = operands, .max_out = results,       \
    .dtypes = FLOATS, .flags = RANDOM | INPLACE_0 | (more), .attrs = dropout_attrs

/* clang-format off */
const op_def softmax_ops[] = {
    {ONNX("Softmax", 1, axis_1), .lower = lower_flat},
    {ONNX("Softmax", 13, axis_last), .flags = INPLACE_0, .infer = infer_axis, .grad = grad_softmax, .cpu = softmax_cpu,
     .cuda = softmax_cuda},
    {ONNX("LogSoftmax", 1, axis_1), .lower = lower_flat},
    {ONNX("LogSoftmax", 13, axis_last), .flags = INPLACE_0, .infer = infer_axis, .grad = grad_log_softmax,
     .cpu = log_softmax_cpu, .cuda = log_softmax_cuda},
    {ONNX("Hardmax", 1, axis_1), .lower = lower_flat},
    {ONNX("Hardmax", 13, axis_last), .lower = lower_hardmax},
    {GRAD("SoftmaxGrad"), .cpu = softmax_grad_cpu, .cuda = softmax_grad_cuda},
    {DROPS("SoftmaxDropout", 1, 2, 0), .infer = infer_softmax_dropout, .grad = grad_softmax_dropout,
     .cpu = softmax_dropout_cpu, .cuda = softmax_dropout_cuda},
    {DROPS("SoftmaxDropoutGrad", 2, 1, DISJOINT), .infer = infer_same, .cpu = softmax_dropout_grad_cpu,
     .cuda = softmax_dropout_grad_cuda},
    {GRAD("LogSoftmaxGrad"), .cpu = log_softmax_grad_cpu, .cuda = log_softmax_grad_cuda},
    {0},
};
/* clang-format on */
