/* scatter.c -- writes and adds elements where indices say.
 *
 *     ScatterElements  y = x; y[i with i[axis] = index[i]] (op)= u[i]
 *     ScatterND        y = x; y[index[i..., :], b] (op)= u[i..., b]
 * with op one of replace, add, mul, max, min. Results do not depend on the number of threads: whatever lands on one
 * element is taken in the order of the updates, by one thread. 16-bit floats are combined in float32.
 * Backward needs the indices; mul, max and min also x, u and y. */
#include "core/ints.h"
#include "core/parallel.h"
#include "ops/pointwise/combining.h"

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
    const attr from_end = INT("from_end", node_int(n, "from_end"));
    if (node_attr(n, "axis"))
        return emit_with(g, out, "GatherElements", NODE_ATTRS(INT("axis", node_int(n, "axis")), from_end), y, n->in[1]);
    return emit_with(g, out, "GatherND", NODE_ATTRS(from_end), y, n->in[1]);
}

static status put(graph *g, const node *n, value *x, value *updates, const char *how, value **out) {
    value *in[] = {x, n->in[1], updates};
    const attr from_end = INT("from_end", node_int(n, "from_end"));
    const attr with_axis[] = {STRING("reduction", how), INT("axis", node_int(n, "axis")), from_end, {.name = NULL}};
    const attr without[] = {STRING("reduction", how), from_end, {.name = NULL}};
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
    return emit_with(g, out, "ScatterND",
                     NODE_ATTRS(STRING("reduction", "add"), INT("from_end", node_int(n, "from_end"))), n->in[0], list,
                     n->in[2]);
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

enum { PARTS = 32 };

typedef struct element_scatter {
    combining how;
    const tensor *index, *updates;
    tensor *out;
    int axis;
    int64_t lanes, parts;
    int64_t *work; /* `parts` lanes of totals, for types that are combined as a wider one */
} element_scatter;

#define TEMPLATE "ops/movement/scatter_lane.h"
#include "ops/pointwise/each_combined.h"

typedef void lane_fn(const element_scatter *s, int64_t r, void *work);
static lane_fn *const lane_by_type[DTYPE_COUNT] = COMBINED_TABLE(lane);

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

/* A part is a run of lanes that share one range of the workspace. */
static void scatter_parts(void *arg, int64_t begin, int64_t end) {
    const element_scatter *s = arg;

    for (int64_t p = begin; p < end; p++)
        for (int64_t r = s->lanes * p / s->parts; r < s->lanes * (p + 1) / s->parts; r++) {
            if (s->how == COMBINE_NONE) lane_last(s, r);
            else lane_by_type[s->out->type](s, r, s->work + p * s->out->shape.dim[s->axis]);
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
    TRY(check_indices(c, &index, least_index(k->node, x.shape.dim[s.axis]), x.shape.dim[s.axis]));
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

    TRY(check_tuples(c, k->node, &t));
    TRY(row_scatter_begin(c, &s, k->work));
    for (int64_t i = s.count - 1; i >= 0; i--) row_scatter_select(&s, i, tuple_row(&t, i));
    row_scatter_run(&s);
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

kernel_fn scatter_elements_cuda, scatter_nd_cuda; /* cuda/kernels/scatter.cu */
size_t scatter_elements_cuda_workspace(const node *n), scatter_nd_cuda_workspace(const node *n);

/* clang-format off */
const op_def scatter_ops[] = {
    {ONNX("ScatterElements", 11, 3, 3, 1, ANY_TYPE), .checked = OPERAND(1), .plain = OPERAND(0) | OPERAND(2),
     .flags = STRIDED,
     .attrs = NODE_ATTRS(INT("axis", 0), STRING("reduction", "none"), INT("from_end", 1)), .infer = infer_scatter_elements,
     .simplify = simplify_scatter_elements, .grad = grad_scatter, .workspace = scatter_elements_bytes, .cpu = scatter_elements_cpu,
     .cuda = scatter_elements_cuda, .cuda_workspace = scatter_elements_cuda_workspace},
    {ONNX("ScatterND", 11, 3, 3, 1, ANY_TYPE), .checked = OPERAND(1), .plain = OPERAND(0) | OPERAND(2),
     .attrs = NODE_ATTRS(STRING("reduction", "none"), INT("from_end", 1)),
     .infer = infer_scatter_nd, .grad = grad_scatter, .workspace = scatter_nd_bytes, .cpu = scatter_nd_cpu,
     .cuda = scatter_nd_cuda, .cuda_workspace = scatter_nd_cuda_workspace},
    {0},
};
/* clang-format on */
