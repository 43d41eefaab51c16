/* cumulative.c -- owns CumSum: y_i = Σ_{k <= i} x_k along an axis (k < i where exclusive, from the end where reversed).
 *
 * Floats are summed in double, integers in 64 bits. As in PyTorch the sum of narrow integers and booleans is int64;
 * int32 stays int32, as ONNX says and the exporter relies on. The gradient is the same sum in the other direction;
 * nothing is kept. */
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

/* `width` neighbours whose first element is at `at`, each along the axis. */
#define SCAN(name, From, To, A, GET, PUT)                                                                              \
    SIMD static void name(const job *j, int64_t at, int64_t width) {                                                   \
        A total[COLUMNS] = {0};                                                                                        \
        if (width == 1) {                                                                                              \
            const From *x = (const From *)j->x + at;                                                                   \
            To *y = (To *)j->y + at;                                                                                   \
            A sum = 0;                                                                                                 \
            for (int64_t step = 0; step < j->length; step++) {                                                         \
                int64_t i = (j->reverse ? j->length - 1 - step : step) * j->inner;                                     \
                A before = sum;                                                                                        \
                sum += (A)GET(x[i]);                                                                                   \
                y[i] = (To)PUT(j->exclusive ? before : sum);                                                           \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t step = 0; step < j->length; step++) {                                                             \
            int64_t i = j->reverse ? j->length - 1 - step : step;                                                      \
            const From *x = (const From *)j->x + at + i * j->inner;                                                    \
            To *y = (To *)j->y + at + i * j->inner;                                                                    \
            for (int64_t k = 0; k < width; k++) {                                                                      \
                A before = total[k], after = before + (A)GET(x[k]);                                                    \
                total[k] = after;                                                                                      \
                y[k] = (To)PUT(j->exclusive ? before : after);                                                         \
            }                                                                                                          \
        }                                                                                                              \
    }
#define AS_IT_IS(x) (x)
#define TO_BF16(x) f32_to_bf16((float)(x))
#define TO_F16(x) ((float)(x))
SCAN(scan_f32, float, float, double, AS_IT_IS, AS_IT_IS)
SCAN(scan_f64, double, double, double, AS_IT_IS, AS_IT_IS)
SCAN(scan_bf16, bf16, bf16, double, bf16_to_f32, TO_BF16)
SCAN(scan_f16, f16, f16, double, TO_F16, TO_F16)
SCAN(scan_i64, int64_t, int64_t, uint64_t, AS_IT_IS, AS_IT_IS)
SCAN(scan_i32, int32_t, int32_t, uint32_t, AS_IT_IS, AS_IT_IS)
SCAN(scan_i16, int16_t, int64_t, uint64_t, AS_IT_IS, AS_IT_IS)
SCAN(scan_i8, int8_t, int64_t, uint64_t, AS_IT_IS, AS_IT_IS)
SCAN(scan_u8, uint8_t, int64_t, uint64_t, AS_IT_IS, AS_IT_IS)

static scan_fn *const scans[DTYPE_COUNT] = {
    [F32] = scan_f32, [F64] = scan_f64, [BF16] = scan_bf16, [F16] = scan_f16, [I64] = scan_i64,
    [I32] = scan_i32, [I16] = scan_i16, [I8] = scan_i8,     [U8] = scan_u8,   [BOOL] = scan_u8,
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
