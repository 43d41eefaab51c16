/* reduce.c -- owns ReduceSum, ReduceMean, ReduceMax, ReduceMin, ReduceProd, ReduceL1, ReduceL2, ReduceSumSquare,
 * ReduceLogSum, ReduceLogSumExp, ArgMax, ArgMin and what their gradients need. Kernels: reduce_kernel.c, argreduce.c.
 *
 * Gradients, with y and dy seen along the reduced axes again (n elements went into one):
 *     Sum        dy                          L1   dy * sign x
 *     Mean       dy / n                      L2   x * dy / y, 0 where y is 0
 *     SumSquare  2 x dy                      LogSum     dy / exp y
 *     Max, Min   dy / ties where x = y       LogSumExp  dy * exp(x - y)
 *     Prod       dy * the product of the others
 * so the sums keep nothing for backward, Max, Prod, L2 and LogSumExp keep x and y. */
#include "ops/reductions/reduce_kernel.h"

/* --- inference ---------------------------------------------------------------------------------------------------- */

static status infer_reduce(graph *g, node *n) {
    shape s, out = SCALAR;
    bool keep = node_int(n, "keepdims") != 0;
    unsigned axes;
    int64_t axis;

    TRY(require(g, n, 0));
    s = n->in[0]->shape;
    if (node_in(n, 1) && !node_has(n, "axes")) {
        const int64_t *list;
        int count;
        TRY(value_ints(g, n->in[1], "the list of axes to reduce", &count, &list));
    }
    for (int64_t i = 0; written_axis(n, i, &axis); i++) {
        int checked;
        TRY(shape_axis(g->c, axis, s.rank, &checked));
    }
    axes = reduced_axes(n);
    for (int i = 0; i < s.rank; i++)
        if (!(axes >> i & 1)) out.dim[out.rank++] = s.dim[i];
        else if (keep) out.dim[out.rank++] = 1;
    return set_out(g, n, 0, n->in[0]->type, &out);
}

static status refuse_empty(graph *g, const node *n, unsigned axes) {
    const shape *s = &n->in[0]->shape;
    char text[SHAPE_TEXT];

    for (int i = 0; i < s->rank; i++)
        if (axes >> i & 1 && s->dim[i] == 0)
            return fail(g->c, E_SHAPE, "%s of no elements: axis %d of %s is empty", n->op->name, i,
                        shape_text(s, text));
    return OK;
}

/* Maximum and minimum have no value for nothing. */
static status infer_extreme(graph *g, node *n) {
    TRY(infer_reduce(g, n));
    return refuse_empty(g, n, reduced_axes(n));
}

static status infer_arg(graph *g, node *n) {
    shape s, out = SCALAR;
    int axis;

    TRY(require(g, n, 0));
    s = n->in[0]->shape;
    TRY(shape_axis(g->c, node_int(n, "axis"), s.rank, &axis));
    TRY(refuse_empty(g, n, 1u << axis));
    for (int i = 0; i < s.rank; i++)
        if (i != axis) out.dim[out.rank++] = s.dim[i];
        else if (node_int(n, "keepdims")) out.dim[out.rank++] = 1;
    return set_out(g, n, 0, I64, &out);
}

/* Over axes of size 1 only, the result is the operand. */
static status simplify_reshape(graph *g, const node *n, value **out) {
    const value *y = n->out[0];
    if (shape_count(&n->in[0]->shape) != shape_count(&y->shape)) return OK;
    return emit_reshape(g, n->in[0], &y->shape, out);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* The reduced axes are back, with size 1: `v` broadcasts against x. */
static status restore(graph *g, const node *n, value *v, value **out) {
    unsigned axes = reduced_axes(n);
    shape s = n->in[0]->shape;

    for (int i = 0; i < s.rank; i++)
        if (axes >> i & 1) s.dim[i] = 1;
    return emit_reshape(g, v, &s, out);
}

static status spread(graph *g, const node *n, value *v, value **out) {
    const shape *s = &n->in[0]->shape;
    value *sizes;

    TRY(restore(g, n, v, &v));
    TRY(graph_ints(g, s->rank, s->dim, &sizes));
    return emit(g, out, "Expand", v, sizes);
}

/* One of our reductions over the axes of `n`, kept with size 1. */
static status emit_like(graph *g, const node *n, const char *op, value *operand, value **out) {
    unsigned axes = reduced_axes(n);
    int64_t list[MAX_RANK];
    int count = 0;

    for (int i = 0; i < MAX_RANK; i++)
        if (axes >> i & 1) list[count++] = i;
    return emit_with(g, out, op, NODE_ATTRS(INTS("axes", count, list)), n->in[0], operand);
}

static status grad_sum(graph *g, const node *n, value *const dy[], value *dx[]) { return spread(g, n, dy[0], &dx[0]); }

static status grad_mean(graph *g, const node *n, value *const dy[], value *dx[]) {
    double count = (double)shape_count(&n->in[0]->shape) / (double)shape_count(&n->out[0]->shape);
    dtype type = dy[0]->type;
    value *share = dy[0];

    if (dtype_size(type) < 4) TRY(emit_cast(g, share, F32, &share)); /* 1 / count has more digits than 16 bits */
    TRY(emit_scaled(g, share, 1 / count, &share));
    TRY(emit_cast(g, share, type, &share));
    return spread(g, n, share, &dx[0]);
}

static status grad_l1(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *sign, *d;
    TRY(restore(g, n, dy[0], &d));
    TRY(emit(g, &sign, "Sign", n->in[0]));
    return emit(g, &dx[0], "Mul", sign, d);
}

/* `ratio`, or 0 where `y` is 0. */
static status zero_where_zero(graph *g, value *y, value *ratio, value **out) {
    value *zero, *is_zero;
    TRY(graph_scalar(g, y->type, 0, &zero));
    TRY(emit(g, &is_zero, "Equal", y, zero));
    return emit(g, out, "Where", is_zero, zero, ratio);
}

static status grad_l2(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *ratio;
    TRY(emit(g, &ratio, "Div", dy[0], n->out[0]));
    TRY(zero_where_zero(g, n->out[0], ratio, &ratio));
    TRY(restore(g, n, ratio, &ratio));
    return emit(g, &dx[0], "Mul", n->in[0], ratio);
}

static status grad_sum_square(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *d;
    TRY(emit_scaled(g, dy[0], 2, &d));
    TRY(restore(g, n, d, &d));
    return emit(g, &dx[0], "Mul", n->in[0], d);
}

static status grad_log_sum(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *sum;
    TRY(emit(g, &sum, "Exp", n->out[0]));
    TRY(emit(g, &sum, "Div", dy[0], sum));
    return spread(g, n, sum, &dx[0]);
}

static status grad_log_sum_exp(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *y, *d, *e;
    TRY(restore(g, n, n->out[0], &y));
    TRY(restore(g, n, dy[0], &d));
    TRY(emit(g, &e, "Sub", n->in[0], y));
    TRY(emit(g, &e, "Exp", e));
    return emit(g, &dx[0], "Mul", e, d);
}

/* Equal elements share the gradient, as with torch.amax and the max() of a whole tensor. The others' 0 is made from
 * the share, so that a NaN result, which no element equals, reaches all of them. */
static status grad_extreme(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *y, *share, *ties, *zero, *mask;

    TRY(restore(g, n, n->out[0], &y));
    TRY(restore(g, n, dy[0], &share));
    TRY(emit_like(g, n, "ReduceCountEqual", y, &ties));
    TRY(emit(g, &share, "Div", share, ties));
    TRY(graph_scalar(g, share->type, 0, &zero));
    TRY(emit(g, &zero, "Mul", share, zero));
    TRY(emit(g, &mask, "Equal", n->in[0], y));
    return emit(g, &dx[0], "Where", mask, share, zero);
}

/* Along one axis, as PyTorch has it: y / x if there is no zero anywhere, the product of the others if there is. */
static status grad_prod_along(graph *g, const node *n, int axis, value *y, value *d, value *zeros, value **dx) {
    value *some, *others, *plain;
    const shape *s = &zeros->shape;
    int64_t all[MAX_RANK];

    for (int i = 0; i < s->rank; i++) all[i] = i;
    TRY(emit_reduce(g, "ReduceSum", zeros, s->rank, all, false, &some));
    TRY(emit_cast(g, some, BOOL, &some));
    TRY(emit_with(g, &others, "ProdOthers", NODE_ATTRS(INT("axis", axis)), n->in[0]));
    TRY(emit(g, &others, "Mul", d, others));
    TRY(emit(g, &plain, "Div", y, n->in[0]));
    TRY(emit(g, &plain, "Mul", d, plain));
    return emit(g, dx, "Where", some, others, plain);
}

/* Over several: without zeros the product of the others is y / x; a single zero gets the product of the others, which
 * get 0; of several zeros none gets anything. */
static status grad_prod(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *y, *d, *zero, *one, *zeros, *none, *single, *others, *mask;
    const unsigned axes = reduced_axes(n);

    TRY(restore(g, n, n->out[0], &y));
    TRY(restore(g, n, dy[0], &d));
    TRY(graph_scalar(g, d->type, 0, &zero));
    TRY(graph_scalar(g, d->type, 1, &one));
    TRY(graph_full(g, y->type, &y->shape, 0, &none));
    TRY(emit_like(g, n, "ReduceCountEqual", none, &zeros));
    for (int i = 0; i < n->in[0]->shape.rank; i++)
        if (axes == 1u << i) return grad_prod_along(g, n, i, y, d, zeros, &dx[0]);

    TRY(emit_like(g, n, "ReduceProdNonzero", NULL, &others));
    TRY(emit(g, &others, "Mul", d, others));
    TRY(emit(g, &single, "Equal", zeros, one));
    TRY(emit(g, &single, "Where", single, others, zero));

    TRY(emit(g, &others, "Mul", d, y));
    TRY(emit(g, &none, "Equal", zeros, zero));
    TRY(emit(g, &others, "Where", none, others, zero));

    TRY(emit(g, &others, "Div", others, n->in[0]));
    TRY(emit(g, &mask, "Equal", n->in[0], zero));
    return emit(g, &dx[0], "Where", mask, single, others);
}

kernel_fn reduce_sum_cuda, reduce_mean_cuda; /* cuda/kernels/reduce.cu */
size_t reduce_cuda_workspace(const node *n);
kernel_fn reduce_max_cuda, reduce_min_cuda, reduce_prod_cuda, reduce_l1_cuda, reduce_l2_cuda, reduce_sum_square_cuda,
    reduce_log_sum_cuda, reduce_log_sum_exp_cuda, reduce_count_equal_cuda, reduce_prod_nonzero_cuda, arg_max_cuda,
    arg_min_cuda; /* cuda/kernels/fold.cu */

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr axes_as_attribute[] = {NO_DEFAULT("axes", INTS), INT("keepdims", 1), {.name = NULL}};
static const attr axes_as_operand[] = {INT("keepdims", 1), INT("noop_with_empty_axes", 0), {.name = NULL}};
static const attr arg_attrs[] = {INT("axis", 0), INT("keepdims", 1), INT("select_last_index", 0), {.name = NULL}};

/* The two forms of an operator: the axes are an attribute, since an opset they are an operand. */
#define FORM(name_, since_, operands, attrs_, types, ...)                                                              \
    {.name = name_,                                                                                                    \
     .domain = "",                                                                                                     \
     .since = since_,                                                                                                  \
     .min_in = 1,                                                                                                      \
     .max_in = operands,                                                                                               \
     .max_out = 1,                                                                                                     \
     .dtypes = types,                                                                                                  \
     .plain = ALL_OPERANDS,                                                                                            \
     .attrs = attrs_,                                                                                                  \
     __VA_ARGS__}
#define REDUCE(name_, operand_since, types, ...)                                                                       \
    FORM(name_, 1, 1, axes_as_attribute, types, __VA_ARGS__),                                                          \
        FORM(name_, operand_since, 2, axes_as_operand, types, __VA_ARGS__)
#define KERNEL(kernel_) .workspace = reduce_workspace, .cpu = kernel_

#define ARG(name_, kernel_, cuda_)                                                                                     \
    {.name = name_,                                                                                                    \
     .domain = "",                                                                                                     \
     .since = 1,                                                                                                       \
     .min_in = 1,                                                                                                      \
     .max_in = 1,                                                                                                      \
     .max_out = 1,                                                                                                     \
     .dtypes = NUMBERS,                                                                                                \
     .plain = ALL_OPERANDS,                                                                                            \
     .flags = NO_GRAD,                                                                                                 \
     .attrs = arg_attrs,                                                                                               \
     .infer = infer_arg,                                                                                               \
     .cpu = kernel_,                                                                                                   \
     .cuda = cuda_}

#define OURS(name_, operands, workspace_, kernel_, cuda_)                                                              \
    {.name = name_,                                                                                                    \
     .domain = ORT_DOMAIN,                                                                                             \
     .since = 1,                                                                                                       \
     .min_in = 1,                                                                                                      \
     .max_in = operands,                                                                                               \
     .max_out = 1,                                                                                                     \
     .dtypes = FLOATS,                                                                                                 \
     .attrs = axes_as_attribute,                                                                                       \
     .infer = infer_reduce,                                                                                            \
     .workspace = workspace_,                                                                                          \
     .cpu = kernel_,                                                                                                   \
     .cuda = cuda_}

/* clang-format off */
const op_def reduce_ops[] = {
    REDUCE("ReduceSum", 13, NUMBERS, .infer = infer_reduce, .simplify = simplify_reshape, .grad = grad_sum,
           KERNEL(reduce_sum_cpu), .cuda_workspace = reduce_cuda_workspace, .cuda = reduce_sum_cuda),
    REDUCE("ReduceMean", 18, FLOATS, .infer = infer_reduce, .simplify = simplify_reshape, .grad = grad_mean,
           KERNEL(reduce_mean_cpu), .cuda_workspace = reduce_cuda_workspace, .cuda = reduce_mean_cuda),
    REDUCE("ReduceMax", 18, ANY_TYPE, .infer = infer_extreme, .simplify = simplify_reshape, .grad = grad_extreme,
           KERNEL(reduce_max_cpu),
           .cuda = reduce_max_cuda),
    REDUCE("ReduceMin", 18, ANY_TYPE, .infer = infer_extreme, .simplify = simplify_reshape, .grad = grad_extreme,
           KERNEL(reduce_min_cpu),
           .cuda = reduce_min_cuda),
    REDUCE("ReduceProd", 18, NUMBERS, .infer = infer_reduce, .simplify = simplify_reshape, .grad = grad_prod,
           KERNEL(reduce_prod_cpu),
           .cuda = reduce_prod_cuda),
    REDUCE("ReduceL1", 18, NUMBERS, .infer = infer_reduce, .grad = grad_l1, KERNEL(reduce_l1_cpu),
           .cuda = reduce_l1_cuda),
    REDUCE("ReduceL2", 18, FLOATS, .infer = infer_reduce, .grad = grad_l2, KERNEL(reduce_l2_cpu),
           .cuda = reduce_l2_cuda),
    REDUCE("ReduceSumSquare", 18, NUMBERS, .infer = infer_reduce, .grad = grad_sum_square,
           KERNEL(reduce_sum_square_cpu),
           .cuda = reduce_sum_square_cuda),
    REDUCE("ReduceLogSum", 18, FLOATS, .infer = infer_reduce, .grad = grad_log_sum, KERNEL(reduce_log_sum_cpu),
           .cuda = reduce_log_sum_cuda),
    REDUCE("ReduceLogSumExp", 18, FLOATS, .infer = infer_reduce, .grad = grad_log_sum_exp,
           .workspace = reduce_shift_workspace, .cpu = reduce_log_sum_exp_cpu, .cuda = reduce_log_sum_exp_cuda),
    ARG("ArgMax", arg_max_cpu, arg_max_cuda),
    ARG("ArgMin", arg_min_cpu, arg_min_cuda),
    OURS("ReduceCountEqual", 2, reduce_shift_workspace, reduce_count_equal_cpu, reduce_count_equal_cuda),
    OURS("ReduceProdNonzero", 1, reduce_workspace, reduce_prod_nonzero_cpu, reduce_prod_nonzero_cuda),
    {0},
};
/* clang-format on */
