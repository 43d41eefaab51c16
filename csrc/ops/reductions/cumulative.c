/* cumulative.c -- owns CumSum: y_i = Σ_{k <= i} x_k along an axis (k < i where exclusive, from the end where reversed).
 *
 * Floats are summed in double, integers in 64 bits. As in PyTorch the sum of narrow integers and booleans is int64;
 * int32 stays int32, as ONNX says and the exporter relies on. The gradient is the same sum in the other direction;
 * nothing is kept. */
#include "core/names.h"
#include "core/parallel.h"
#include "ops/op.h"

enum { COLUMNS = 256 };

typedef struct job job;
typedef void scan_fn(const job *j, int64_t at, int64_t width);

struct job {
    const void *x;
    void *y;
    int64_t length, inner; /* of the axis; elements behind it */
    bool exclusive, reverse;
    scan_fn *fn;
};

#define NAME(f) JOIN_NAMES(f, T)

#define A double
#define RESULT T
#define GET(x) (x)
#define PUT(x) (x)
#define T float
#include "ops/reductions/cumulative_scan.h"
#undef T
#define T double
#include "ops/reductions/cumulative_scan.h"
#undef T
#undef GET
#undef PUT

#define GET(x) bf16_to_f32(x)
#define PUT(x) f32_to_bf16((float)(x))
#define T bf16
#include "ops/reductions/cumulative_scan.h"
#undef T
#undef GET
#undef PUT

#define GET(x) ((float)(x))
#define PUT(x) ((float)(x))
#define T f16
#include "ops/reductions/cumulative_scan.h"
#undef T
#undef GET
#undef PUT
#undef A

/* Integers wrap around: their sums are made of unsigned numbers, where that is defined. */
#define GET(x) (x)
#define PUT(x) (x)
#define A uint32_t
#define T int32_t
#include "ops/reductions/cumulative_scan.h"
#undef T
#undef A
#undef RESULT

#define A uint64_t
#define RESULT int64_t
#define T int64_t
#include "ops/reductions/cumulative_scan.h"
#undef T
#define T int16_t
#include "ops/reductions/cumulative_scan.h"
#undef T
#define T int8_t
#include "ops/reductions/cumulative_scan.h"
#undef T
#define T uint8_t
#include "ops/reductions/cumulative_scan.h"
#undef T
#undef A
#undef RESULT
#undef GET
#undef PUT
#undef NAME

static scan_fn *const scans[DTYPE_COUNT] = {
    [F32] = scan_float,   [F64] = scan_double,  [BF16] = scan_bf16, [F16] = scan_f16,    [I64] = scan_int64_t,
    [I32] = scan_int32_t, [I16] = scan_int16_t, [I8] = scan_int8_t, [U8] = scan_uint8_t, [BOOL] = scan_uint8_t,
};

static void scan_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    int64_t pieces = (j->inner + COLUMNS - 1) / COLUMNS;

    for (int64_t task = begin; task < end; task++) {
        int64_t from = task % pieces * COLUMNS;
        int64_t width = j->inner - from < COLUMNS ? j->inner - from : COLUMNS;
        j->fn(j, task / pieces * j->length * j->inner + from, width);
    }
}

static status cum_sum_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    const shape *s = &x->shape;
    int axis;
    job j = {.x = x->data, .y = k->out[0].data, .fn = scans[x->type]};
    int64_t outer;

    TRY(shape_axis(c, dtype_get_int(k->in[1].type, k->in[1].data, 0), s->rank, &axis));
    if (shape_count(s) == 0) return OK;
    outer = s->rank ? shape_span(s, 0, axis) : 1;
    j.length = s->rank ? s->dim[axis] : 1;
    j.inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    j.exclusive = node_int(k->node, "exclusive") != 0;
    j.reverse = node_int(k->node, "reverse") != 0;
    parallel_for(outer * ((j.inner + COLUMNS - 1) / COLUMNS),
                 parallel_rows(j.length * (j.inner < COLUMNS ? j.inner : COLUMNS)), scan_range, &j);
    return OK;
}

kernel_fn cum_sum_cuda; /* cuda/kernels/cumulative.cu */

static status infer_cum_sum(graph *g, node *n) {
    const int64_t *axis;
    int count, checked;
    dtype type;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(value_ints(g, n->in[1], "the axis of CumSum", &count, &axis));
    if (count != 1) return fail(g->c, E_SHAPE, "CumSum has one axis, not %d", count);
    TRY(shape_axis(g->c, axis[0], n->in[0]->shape.rank, &checked));
    type = n->in[0]->type;
    return set_out(g, n, 0, dtype_is_float(type) || type == I32 ? type : I64, &n->in[0]->shape);
}

static status grad_cum_sum(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "CumSum",
                     NODE_ATTRS(INT("exclusive", node_int(n, "exclusive")), INT("reverse", !node_int(n, "reverse"))),
                     dy[0], n->in[1]);
}

static const attr cum_sum_attrs[] = {INT("exclusive", 0), INT("reverse", 0), {.name = NULL}};

/* clang-format off */
const op_def cumulative_ops[] = {
    {.name = "CumSum", .domain = "", .since = 11, .min_in = 2, .max_in = 2, .max_out = 1, .dtypes = ANY_TYPE,
     .plain = ALL_OPERANDS, .flags = INPLACE_0, .attrs = cum_sum_attrs, .infer = infer_cum_sum, .grad = grad_cum_sum, .cpu = cum_sum_cpu,
     .cuda = cum_sum_cuda},
    {0},
};
/* clang-format on */
