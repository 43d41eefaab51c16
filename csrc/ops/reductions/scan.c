/* scan.c -- owns what runs along an axis and is no sum; all of our domain, since ONNX has none of it:
 *
 *     CumProd       y_i = Π_{k <= i} x_k
 *     LogCumSumExp  y_i = log Σ_{k <= i} exp(x_k)
 *     ProdOthers    y_i = Π_{k != i} x_k, for the gradient of a product
 *     CumArgMax     i of the largest x_k, k <= i: the last of equal ones, the last NaN; CumArgMin the smallest
 *
 * Gradients, one pass from the end:
 *     CumProd       dx_k = Σ_{i >= k} dy_i y_i / x_k up to the first zero; for that one the product is made again
 *                   without it; 0 behind it. x and y stay alive
 *     LogCumSumExp  dx_k = exp(x_k - y_k) Σ_{i >= k} dy_i exp(y_k - y_i), no exponent of which is positive
 * Each lane is one thread's. Narrow types are computed as wider ones, floats in double. */
#include "core/names.h"
#include "core/parallel.h"
#include "core/vmath.h"
#include "ops/op.h"

#include <math.h>

enum { BESIDE = 128, RANGE = 32 };

typedef struct lanes lanes;
typedef void lane_fn(const lanes *j, int64_t at);
typedef void beside_fn(const lanes *j, int64_t at, int64_t width);

/* Elements of a lane are `step` apart. */
struct lanes {
    const void *a, *b, *c;
    void *out;
    int64_t length, step;
    lane_fn *fn;
    beside_fn *beside; /* for up to BESIDE neighbours, or NULL */
};

/* --- lanes -------------------------------------------------------------------------------------------------------- */

#define PRODUCT(T, A)                                                                                                  \
    static void product_##T(const lanes *j, int64_t at) {                                                              \
        const T *x = (const T *)j->a + at;                                                                             \
        T *y = (T *)j->out + at;                                                                                       \
        A total = 1;                                                                                                   \
        for (int64_t i = 0; i < j->length; i++) {                                                                      \
            total *= (A)x[i * j->step];                                                                                \
            y[i * j->step] = (T)total;                                                                                 \
        }                                                                                                              \
    }
PRODUCT(float, double)
PRODUCT(double, double)
PRODUCT(int64_t, uint64_t)

/* log(exp(a) + exp(b)) */
static inline double log_add(double a, double b) {
    const double high = a > b ? a : b, low = a > b ? b : a;
    if (a != a || b != b) return NAN;
    return isinf(high) ? high : high + log1p(exp(low - high));
}

#define TEMPLATE "ops/reductions/scan_lanes.h"
#include "ops/pointwise/float_and_double.h"

#define NAME(f) JOIN_NAMES(f, T)
#define T float
#include "ops/reductions/scan_extreme.h"
#undef T
#define T double
#include "ops/reductions/scan_extreme.h"
#undef T
#define T int64_t
#include "ops/reductions/scan_extreme.h"
#undef T
#undef NAME

/* --- the kernel --------------------------------------------------------------------------------------------------- */

static void run_lanes(void *arg, int64_t begin, int64_t end) {
    const lanes *j = arg;
    for (int64_t lane = begin; lane < end; lane++) j->fn(j, lane / j->step * j->length * j->step + lane % j->step);
}

/* Tasks are blocks of neighbours. */
static void run_beside(void *arg, int64_t begin, int64_t end) {
    const lanes *j = arg;
    const int64_t blocks = (j->step + BESIDE - 1) / BESIDE;
    for (int64_t task = begin; task < end; task++) {
        const int64_t from = task % blocks * BESIDE, left = j->step - from;
        j->beside(j, task / blocks * j->length * j->step + from, left < BESIDE ? left : BESIDE);
    }
}

static status run_along(const call *k, lane_fn *fn, beside_fn *beside) {
    const shape *s = &k->in[0].shape;
    int axis = (int)node_int(k->node, "axis");
    lanes j = {.a = k->in[0].data, .out = k->out[0].data, .fn = fn, .beside = beside};

    if (axis < 0) axis += s->rank;
    if (k->n_in == 3) j.b = k->in[1].data, j.c = k->in[2].data;
    j.length = s->rank ? s->dim[axis] : 1;
    j.step = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    if (shape_count(s) == 0) return OK;
    if (beside && j.step > 1)
        parallel_for(shape_count(s) / j.length / j.step * ((j.step + BESIDE - 1) / BESIDE),
                     parallel_rows(j.length * (j.step < BESIDE ? j.step : BESIDE)), run_beside, &j);
    else parallel_for(shape_count(s) / j.length, parallel_rows(j.length), run_lanes, &j);
    return OK;
}

#define OF_TYPE(k, f32, f64, i64) ((k)->in[0].type == F32 ? f32 : (k)->in[0].type == F64 ? f64 : i64)
#define KERNEL(name, f32, f64, i64)                                                                                    \
    static status name(ctx *c, const call *k) {                                                                        \
        (void)c;                                                                                                       \
        return run_along(k, OF_TYPE(k, f32, f64, i64), NULL);                                                          \
    }
#define EXTREME_KERNEL(name, of)                                                                                       \
    static status name(ctx *c, const call *k) {                                                                        \
        (void)c;                                                                                                       \
        return run_along(k, OF_TYPE(k, of##_float, of##_double, of##_int64_t),                                         \
                         OF_TYPE(k, of##_beside_float, of##_beside_double, of##_beside_int64_t));                      \
    }
KERNEL(cum_prod_cpu, product_float, product_double, product_int64_t)
KERNEL(cum_prod_grad_cpu, product_grad_float, product_grad_double, NULL)
KERNEL(log_cum_sum_exp_cpu, log_sum_float, log_sum_double, NULL)
KERNEL(log_cum_sum_exp_grad_cpu, log_sum_grad_float, log_sum_grad_double, NULL)
/* Floats only. */
static status prod_others_cpu(ctx *c, const call *k) {
    const bool narrow = k->in[0].type == F32;
    (void)c;
    return run_along(k, narrow ? others_float : others_double, narrow ? others_beside_float : others_beside_double);
}
EXTREME_KERNEL(cum_arg_max_cpu, largest)
EXTREME_KERNEL(cum_arg_min_cpu, smallest)

kernel_fn cum_prod_cuda, cum_prod_grad_cuda, log_cum_sum_exp_cuda, log_cum_sum_exp_grad_cuda, cum_arg_max_cuda,
    cum_arg_min_cuda, prod_others_cuda; /* cuda/kernels/scan.cu */

/* --- rules -------------------------------------------------------------------------------------------------------- */

/* Narrow types: as float32 or int64. */
static status widened(graph *g, const node *n, bool back, value **out) {
    value *x;
    dtype type;

    TRY(require(g, n, 0));
    type = n->in[0]->type;
    if (type == F32 || type == F64 || type == I64) return OK;
    TRY(emit_cast(g, n->in[0], dtype_is_float(type) ? F32 : I64, &x));
    TRY(emit_with(g, out, n->op->name, NODE_ATTRS(INT("axis", node_int(n, "axis"))), x));
    return back && dtype_is_float(type) ? emit_cast(g, out[0], type, out) : OK;
}

static status lower_values(graph *g, const node *n, value **out) { return widened(g, n, true, out); }
static status lower_indices(graph *g, const node *n, value **out) { return widened(g, n, false, out); }

static status infer_along(graph *g, node *n, dtype type) {
    int axis;
    TRY(require(g, n, 0));
    TRY(shape_axis(g->c, node_int(n, "axis"), n->in[0]->shape.rank, &axis));
    return set_out(g, n, 0, type, &n->in[0]->shape);
}

static status infer_values(graph *g, node *n) {
    TRY(require(g, n, 0));
    return infer_along(g, n, n->in[0]->type);
}
static status infer_indices(graph *g, node *n) { return infer_along(g, n, I64); }

static status grad_by(graph *g, const node *n, const char *op, value *dy, value **dx) {
    return emit_with(g, dx, op, NODE_ATTRS(INT("axis", node_int(n, "axis"))), dy, n->in[0], n->out[0]);
}

static status grad_cum_prod(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, "CumProdGrad", dy[0], &dx[0]);
}

static status grad_log_cum_sum_exp(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_by(g, n, "LogCumSumExpGrad", dy[0], &dx[0]);
}

static const attr axis_attrs[] = {INT("axis", -1), {.name = NULL}};

#define ALONG(name_, operands_, types_, flags_, infer_)                                                                \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = operands_, .max_in = operands_, .max_out = 1,           \
    .dtypes = types_, .plain = ALL_OPERANDS, .flags = flags_, .attrs = axis_attrs, .infer = infer_

/* clang-format off */
const op_def scan_ops[] = {
    {ALONG("CumProd", 1, ANY_TYPE, IN_MODELS, infer_values), .lower = lower_values, .grad = grad_cum_prod,
     .cpu = cum_prod_cpu, .cuda = cum_prod_cuda},
    {ALONG("LogCumSumExp", 1, FLOATS, IN_MODELS, infer_values), .lower = lower_values, .grad = grad_log_cum_sum_exp,
     .cpu = log_cum_sum_exp_cpu, .cuda = log_cum_sum_exp_cuda},
    {ALONG("CumArgMax", 1, ANY_TYPE, NO_GRAD | IN_MODELS, infer_indices), .lower = lower_indices,
     .cpu = cum_arg_max_cpu, .cuda = cum_arg_max_cuda},
    {ALONG("CumArgMin", 1, ANY_TYPE, NO_GRAD | IN_MODELS, infer_indices), .lower = lower_indices,
     .cpu = cum_arg_min_cpu, .cuda = cum_arg_min_cuda},

    {ALONG("ProdOthers", 1, FLOATS, NO_GRAD, infer_values), .lower = lower_values, .cpu = prod_others_cpu,
     .cuda = prod_others_cuda},
    {ALONG("CumProdGrad", 3, SET(F32) | SET(F64), 0, infer_values), .cpu = cum_prod_grad_cpu,
     .cuda = cum_prod_grad_cuda},
    {ALONG("LogCumSumExpGrad", 3, SET(F32) | SET(F64), 0, infer_values), .cpu = log_cum_sum_exp_grad_cpu,
     .cuda = log_cum_sum_exp_grad_cuda},
    {0},
};
/* clang-format on */
