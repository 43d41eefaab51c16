/* index.c -- reads elements whose place is data: embeddings and gathers.
 *
 *     Gather          y[a, i..., b] = x[a, index[i...], b]
 *     GatherElements  y[i] = x[i with i[axis] = index[i]]
 *     GatherND        y[i..., b] = x[index[i..., :], b]
 * Negative indices count from the end where the attribute from_end says so (ONNX's rule, and that of PyTorch's x[i]; its
 * embedding, gather and scatter refuse them); every index is checked before it is used. Backward adds the rows of dy up
 * where they came from; the indices stay alive for it, the data does not. Indices that are constant and regular are
 * no data: they become slices and repetitions, which are views (a position embedding costs nothing). */
#include "core/parallel.h"
#include "ops/movement/move.h"

#include <inttypes.h>

/* --- indices ------------------------------------------------------------------------------------------------------ */

status require_index(graph *g, const node *n, int i) {
    TRY(require(g, n, i));
    if (n->in[i]->type == I64 || n->in[i]->type == I32) return OK;
    return fail(g->c, E_TYPE, "the indices of %s are %s, not int64 or int32", n->op->name, dtype_name(n->in[i]->type));
}

#define ALL_INSIDE(T, U)                                                                                               \
    SIMD static bool all_inside_##T(const T *x, int64_t n, int64_t least, int64_t size) {                              \
        const U shift = (U)0 - (U)least, limit = (U)(size - least);                                                    \
        int bad = 0;                                                                                                   \
        for (int64_t i = 0; i < n; i++) bad |= (U)x[i] + shift >= limit;                                               \
        return !bad;                                                                                                   \
    }
ALL_INSIDE(int32_t, uint32_t)
ALL_INSIDE(int64_t, uint64_t)

static status refuse_index(ctx *c, int64_t index, int64_t size) {
    return fail(c, E_RUNTIME, "index %" PRId64 " is out of range for an axis of size %" PRId64, index, size);
}

int64_t least_index(const node *n, int64_t size) { return node_int(n, "from_end") ? -size : 0; }

status check_indices(ctx *c, const tensor *t, int64_t least, int64_t size) {
    tensor once = *t; /* without repetitions */
    int last = t->shape.rank - 1;
    int64_t lanes, length, step;

    if (tensor_count(t) == 0) return OK;
    for (int i = 0; i <= last; i++)
        if (t->stride[i] == 0) once.shape.dim[i] = 1;
    if (tensor_contiguous(&once)) {
        int64_t n = tensor_count(&once);
        if (t->type == I64 && all_inside_int64_t(t->data, n, least, size)) return OK;
        if (t->type == I32 && size <= INT32_MAX / 2 && all_inside_int32_t(t->data, n, least, size)) return OK;
    }
    length = last < 0 ? 1 : once.shape.dim[last];
    step = last < 0 ? 0 : t->stride[last];
    lanes = tensor_count(&once) / length;
    for (int64_t r = 0; r < lanes; r++) {
        int64_t at = lane_offset(&once.shape, last, t->stride, r);
        for (int64_t i = 0; i < length; i++) {
            int64_t x = index_at(t, at + i * step);
            if (x < least || x >= size) return refuse_index(c, x, size);
        }
    }
    return OK;
}

tuples tuples_of(const tensor *indices, const shape *data, int batch) {
    const shape *s = &indices->shape;
    int64_t batches = shape_span(s, 0, batch), count = shape_span(s, 0, s->rank - 1);
    return (tuples){.indices = indices,
                    .data = *data,
                    .batch = batch,
                    .depth = (int)s->dim[s->rank - 1],
                    .count = count,
                    .per_batch = batches ? count / batches : 0};
}

int64_t tuple_row(const tuples *t, int64_t k) {
    int64_t row = k / t->per_batch;
    for (int j = 0; j < t->depth; j++) {
        int64_t size = t->data.dim[t->batch + j];
        row = row * size + wrap_index(index_at(t->indices, k * t->depth + j), size);
    }
    return row;
}

status check_tuples(ctx *c, const node *n, const tuples *t) {
    for (int64_t k = 0; k < t->count; k++)
        for (int j = 0; j < t->depth; j++) {
            int64_t x = index_at(t->indices, k * t->depth + j), size = t->data.dim[t->batch + j];
            if (x < least_index(n, size) || x >= size) return refuse_index(c, x, size);
        }
    return OK;
}

/* --- Gather ------------------------------------------------------------------------------------------------------- */

static status infer_gather(graph *g, node *n) {
    const shape *x, *index;
    shape s = {0};
    int axis;

    TRY(require(g, n, 0));
    TRY(require_index(g, n, 1));
    x = &n->in[0]->shape;
    index = &n->in[1]->shape;
    TRY(shape_axis(g->c, node_int(n, "axis"), x->rank, &axis));
    if (x->rank == 0) return fail(g->c, E_SHAPE, "%s from a tensor of rank 0", n->op->name);
    if (x->rank - 1 + index->rank > MAX_RANK)
        return fail(g->c, E_UNSUPPORTED, "%s to rank %d; at most %d", n->op->name, x->rank - 1 + index->rank, MAX_RANK);
    for (int i = 0; i < axis; i++) s.dim[s.rank++] = x->dim[i];
    for (int i = 0; i < index->rank; i++) s.dim[s.rank++] = index->dim[i];
    for (int i = axis + 1; i < x->rank; i++) s.dim[s.rank++] = x->dim[i];
    return set_out(g, n, 0, n->in[0]->type, &s);
}

/* Constant indices that advance by a fixed step in the order of some axes and repeat along the others. */
typedef struct progression {
    int64_t start, step, count;
    bool repeats[MAX_RANK]; /* along this axis of the indices */
} progression;

static bool find_progression(const value *index, int64_t least, int64_t size, progression *p) {
    const shape *s = &index->shape;
    int64_t n, stride[MAX_RANK], step[MAX_RANK] = {0}, run = 1;

    if (!value_is_constant(index) || (n = shape_count(s)) == 0) return false;
    /* What is out of range is the kernel's to report; differences of the others do not overflow. */
    for (int64_t k = 0; k < n; k++) {
        int64_t x = dtype_get_int(index->type, index->data, k);
        if (x < least || x >= size) return false;
    }
    *p = (progression){.start = wrap_index(dtype_get_int(index->type, index->data, 0), size), .step = 1, .count = 1};
    stride_contiguous(s, stride);
    for (int i = s->rank - 1; i >= 0; i--) {
        if (s->dim[i] == 1) continue;
        step[i] = wrap_index(dtype_get_int(index->type, index->data, stride[i]), size) - p->start;
        p->repeats[i] = step[i] == 0;
        if (step[i] == 0) continue;
        if (p->count == 1) p->step = run = step[i];
        if (step[i] != run) return false;
        p->count *= s->dim[i];
        run *= s->dim[i];
    }
    for (int64_t k = 0; k < n; k++) {
        int64_t x = wrap_index(dtype_get_int(index->type, index->data, k), size), expected = p->start;
        for (int i = 0; i < s->rank; i++) expected += k / stride[i] % s->dim[i] * step[i];
        if (x != expected) return false;
    }
    return true;
}

static status lower_gather(graph *g, const node *n, value **out) {
    int64_t start[MAX_RANK] = {0}, step[MAX_RANK] = {1, 1, 1, 1, 1, 1, 1, 1};
    value *x = node_in(n, 0), *index = node_in(n, 1);
    progression p;
    shape counts, s = {0}, to = {0};
    int axis;

    if (!x || !index || value_is_constant(x) || !value_is_constant(index)) return OK;
    TRY(require_index(g, n, 1));
    TRY(shape_axis(g->c, node_int(n, "axis"), x->shape.rank, &axis));
    if (x->shape.rank == 0 || x->shape.rank - 1 + index->shape.rank > MAX_RANK) return OK;
    const int64_t size = x->shape.dim[axis];
    if (!find_progression(index, least_index(n, size), size, &p)) return OK;
    counts = x->shape;
    start[axis] = p.start;
    step[axis] = p.step;
    counts.dim[axis] = p.count;
    for (int i = 0; i < axis; i++) s.dim[s.rank++] = x->shape.dim[i];
    to = s;
    for (int i = 0; i < index->shape.rank; i++) {
        s.dim[s.rank++] = p.repeats[i] ? 1 : index->shape.dim[i];
        to.dim[to.rank++] = index->shape.dim[i];
    }
    for (int i = axis + 1; i < x->shape.rank; i++) to.dim[to.rank++] = s.dim[s.rank++] = x->shape.dim[i];
    TRY(emit_slice(g, x, start, &counts, step, &x));
    TRY(emit_reshape(g, x, &s, &x));
    return emit_expand(g, x, &to, out);
}

static status grad_gather(graph *g, const node *n, value *const dy[], value *dx[]) {
    const shape *s = &n->in[0]->shape;
    const attr *padding = node_attr(n, "padding_idx");
    return emit_with(g, &dx[0], "GatherGrad",
                     NODE_ATTRS(INT("axis", node_int(n, "axis")), INTS("shape", s->rank, s->dim),
                                INT("padding_idx", padding ? padding->i : -1)),
                     dy[0], n->in[1]);
}

/* --- GatherGrad --------------------------------------------------------------------------------------------------- */

static status infer_from_shape(graph *g, node *n) {
    const int64_t *dims;
    shape s = {.rank = node_ints(n, "shape", &dims)};

    TRY(require(g, n, 0));
    TRY(require_index(g, n, 1));
    if (s.rank < 0 || s.rank > MAX_RANK) return fail(g->c, E_INVALID, "%s without a shape", n->op->name);
    for (int i = 0; i < s.rank; i++) s.dim[i] = dims[i];
    return set_out(g, n, 0, n->in[0]->type, &s);
}

static size_t gather_grad_bytes(const node *n) {
    const shape *s = &n->out[0]->shape;
    int64_t axis = node_int(n, "axis");
    return row_scatter_bytes(s->dim[axis < 0 ? axis + s->rank : axis], shape_count(&n->in[1]->shape));
}

/* The sums of rows of k->in[0], by the index in k->in[1], added to `base`; NULL: to zeros. */
static status add_rows(ctx *c, const call *k, const void *base) {
    const tensor *index = &k->in[1], *dx = &k->out[0];
    int64_t padding = node_int(k->node, "padding_idx");
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), dx->shape.rank, &axis));
    TRY(check_indices(c, index, -dx->shape.dim[axis], dx->shape.dim[axis])); /* forward has refused the others */
    row_scatter s = {.how = COMBINE_ADD,
                     .type = dx->type,
                     .out = dx->data,
                     .base = base,
                     .updates = k->in[0].data,
                     .outer = shape_span(&dx->shape, 0, axis),
                     .rows = dx->shape.dim[axis],
                     .count = tensor_count(index),
                     .width = shape_span(&dx->shape, axis + 1, dx->shape.rank)};
    TRY(row_scatter_begin(c, &s, k->work));
    for (int64_t i = s.count - 1; i >= 0; i--) {
        int64_t row = wrap_index(index_at(index, i), s.rows);
        if (row != padding) row_scatter_select(&s, i, row);
    }
    row_scatter_run(&s);
    return OK;
}

static status gather_grad_cpu(ctx *c, const call *k) { return add_rows(c, k, NULL); }

/* --- GatherGradAdd ------------------------------------------------------------------------------------------------ */

/* c + GatherGrad(dy, index): the gradient of a table whose other readers' is c. */
static status infer_gather_grad_add(graph *g, node *n) {
    TRY(require(g, n, 1));
    TRY(require_index(g, n, 2));
    return infer_same(g, n);
}

static size_t gather_grad_add_bytes(const node *n) {
    const shape *s = &n->out[0]->shape;
    int64_t axis = node_int(n, "axis");
    return row_scatter_bytes(s->dim[axis < 0 ? axis + s->rank : axis], shape_count(&n->in[2]->shape));
}

static status gather_grad_add_cpu(ctx *c, const call *k) {
    call gradient = *k;

    gradient.in++;
    gradient.n_in--;
    return add_rows(c, &gradient, k->in[0].data);
}

/* --- Embedding ---------------------------------------------------------------------------------------------------- */

/* torch's embedding: a Gather whose row `padding_idx` gets no gradient, which ONNX cannot say. */
static status lower_embedding(graph *g, const node *n, value **out) {
    if (node_int(n, "padding_idx") >= 0) return OK;
    return emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", 0), INT("from_end", 0)), node_in(n, 0), node_in(n, 1));
}

/* --- GatherElements ----------------------------------------------------------------------------------------------- */

static status infer_gather_elements(graph *g, node *n) {
    const shape *x, *index;
    char tx[SHAPE_TEXT], ti[SHAPE_TEXT];
    int axis;

    TRY(require(g, n, 0));
    TRY(require_index(g, n, 1));
    x = &n->in[0]->shape;
    index = &n->in[1]->shape;
    TRY(shape_axis(g->c, node_int(n, "axis"), x->rank, &axis));
    for (int i = 0; i < x->rank; i++)
        if (index->rank != x->rank || (i != axis && index->dim[i] > x->dim[i]))
            return fail(g->c, E_SHAPE, "GatherElements along axis %d of %s with indices %s", axis, shape_text(x, tx),
                        shape_text(index, ti));
    return set_out(g, n, 0, n->in[0]->type, index);
}

/* An index that is the same in every lane, as a list along `axis`: expanded from one, or a constant. NULL: it is not. */
status index_of_lanes(graph *g, value *index, int axis, value **out) {
    const shape *s = &index->shape;
    value *from = index->def && strcmp(index->def->op->name, "Expand") == 0 ? index->def->in[0] : NULL;
    const int64_t n = s->dim[axis], inner = shape_span(s, axis + 1, s->rank);
    int64_t *list;

    *out = NULL;
    if (n == 0 || shape_count(s) == n || shape_count(s) == 0) return OK;
    if (from && from->shape.rank == s->rank && from->shape.dim[axis] == n && shape_count(&from->shape) == n)
        return emit_reshape(g, from, &SHAPE(n), out);
    if (!value_is_constant(index)) return OK;
    TRY(NEW(g->c, list, (size_t)n));
    for (int64_t i = 0; i < n; i++) list[i] = dtype_get_int(index->type, index->data, i * inner);
    for (int64_t i = 0; i < shape_count(s); i++)
        if (dtype_get_int(index->type, index->data, i) != list[i / inner % n]) return OK;
    return graph_ints(g, (int)n, list, out);
}

/* The same elements of every lane: slices. */
static status simplify_gather_elements(graph *g, const node *n, value **out) {
    const shape *x = &n->in[0]->shape, *index = &n->in[1]->shape;
    value *list;
    int axis;

    if (x->rank < 2) return OK;
    TRY(shape_axis(g->c, node_int(n, "axis"), x->rank, &axis));
    for (int i = 0; i < x->rank; i++)
        if (i != axis && x->dim[i] != index->dim[i]) return OK;
    TRY(index_of_lanes(g, n->in[1], axis, &list));
    if (!list) return OK;
    return emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", axis), INT("from_end", node_int(n, "from_end"))),
                     n->in[0], list);
}

static status grad_gather_elements(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *base;
    TRY(zeros_like(g, n->in[0], &base));
    return emit_with(g, &dx[0], "ScatterElements",
                     NODE_ATTRS(INT("axis", node_int(n, "axis")), STRING("reduction", "add"),
                                INT("from_end", node_int(n, "from_end"))),
                     base, n->in[1], dy[0]);
}

/* A row of elements of one size, by indices of one type. */
#define TAKE(T, I)                                                                                                     \
    SIMD static void take_##T##_##I(const T *restrict x, int64_t x_step, int64_t axis_stride, const I *index,          \
                                    int64_t index_step, int64_t axis_size, T *restrict y, int64_t n) {                 \
        for (int64_t j = 0; j < n; j++) {                                                                              \
            const int64_t i = (int64_t)index[j * index_step];                                                          \
            y[j] = x[j * x_step + wrap_index(i, axis_size) * axis_stride];                                             \
        }                                                                                                              \
    }
TAKE(uint32_t, int64_t)
TAKE(uint32_t, int32_t)
TAKE(uint64_t, int64_t)
TAKE(uint64_t, int32_t)
TAKE(uint16_t, int64_t)
TAKE(uint16_t, int32_t)
TAKE(uint8_t, int64_t)
TAKE(uint8_t, int32_t)

#define TAKE_OF(T, at_)                                                                                                \
    if (index->type == I64)                                                                                            \
        take_##T##_int64_t((const T *)x, x_step, axis_stride, (const int64_t *)index->data + (at_), index_step,        \
                           axis_size, (T *)y, n);                                                                      \
    else                                                                                                               \
        take_##T##_int32_t((const T *)x, x_step, axis_stride, (const int32_t *)index->data + (at_), index_step,        \
                           axis_size, (T *)y, n)

static void take_row(size_t size, const void *x, int64_t x_step, int64_t axis_stride, const tensor *index, int64_t at,
                     int64_t index_step, int64_t axis_size, void *y, int64_t n) {
    if (size == 4) {
        TAKE_OF(uint32_t, at);
    } else if (size == 8) {
        TAKE_OF(uint64_t, at);
    } else if (size == 2) {
        TAKE_OF(uint16_t, at);
    } else {
        TAKE_OF(uint8_t, at);
    }
}

typedef struct element_gather {
    const tensor *x, *index, *y;
    int axis;
    int64_t length; /* of the last axis: rows are walked, whatever axis is gathered */
} element_gather;

static void gather_elements_range(void *arg, int64_t begin, int64_t end) {
    const element_gather *p = arg;
    const shape *s = &p->y->shape;
    const int last = s->rank - 1;
    const size_t size = dtype_size(p->x->type);
    const int64_t axis_size = last < 0 ? 1 : p->x->shape.dim[p->axis],
                  axis_stride = last < 0 ? 0 : p->x->stride[p->axis];
    const int64_t index_step = last < 0 ? 0 : p->index->stride[last];
    int64_t x_stride[MAX_RANK], x_step;

    memcpy(x_stride, p->x->stride, sizeof x_stride);
    if (last >= 0) x_stride[p->axis] = 0; /* the index says where */
    x_step = last < 0 ? 0 : x_stride[last];
    for (int64_t r = begin; r < end; r++) {
        const char *from = (const char *)p->x->data + lane_offset(s, last, x_stride, r) * (int64_t)size;
        int64_t at = lane_offset(s, last, p->index->stride, r);
        char *to = (char *)p->y->data + (size_t)(r * p->length) * size;
        take_row(size, from, x_step, axis_stride, p->index, at, index_step, axis_size, to, p->length);
    }
}

static status gather_elements_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *y = &k->out[0];
    int rank = y->shape.rank;
    element_gather p = {.x = x, .index = &k->in[1], .y = y, .length = rank ? y->shape.dim[rank - 1] : 1};

    TRY(shape_axis(c, node_int(k->node, "axis"), rank, &p.axis));
    const int64_t indexed = rank ? x->shape.dim[p.axis] : 1;
    TRY(check_indices(c, &k->in[1], least_index(k->node, indexed), indexed));
    if (tensor_count(y)) parallel_for(tensor_count(y) / p.length, parallel_rows(p.length), gather_elements_range, &p);
    return OK;
}

/* --- GatherND ----------------------------------------------------------------------------------------------------- */

static status infer_gather_nd(graph *g, node *n) {
    const shape *x, *index;
    int64_t batch = node_int(n, "batch_dims"), depth;
    char tx[SHAPE_TEXT], ti[SHAPE_TEXT];
    shape s;
    bool fits;

    TRY(require(g, n, 0));
    TRY(require_index(g, n, 1));
    x = &n->in[0]->shape;
    index = &n->in[1]->shape;
    depth = index->rank ? index->dim[index->rank - 1] : -1;
    fits = batch >= 0 && depth >= 0 && batch < index->rank && batch + depth <= x->rank;
    for (int i = 0; fits && i < batch; i++) fits = x->dim[i] == index->dim[i];
    if (!fits)
        return fail(g->c, E_SHAPE, "GatherND from %s with indices %s and %" PRId64 " batch axes", shape_text(x, tx),
                    shape_text(index, ti), batch);
    s = *index;
    s.rank--;
    if (s.rank + x->rank - batch - depth > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "GatherND to a rank over 8");
    for (int i = (int)(batch + depth); i < x->rank; i++) s.dim[s.rank++] = x->dim[i];
    return set_out(g, n, 0, n->in[0]->type, &s);
}

static status grad_gather_nd(graph *g, const node *n, value *const dy[], value *dx[]) {
    const shape *s = &n->in[0]->shape;
    return emit_with(g, &dx[0], "GatherNDGrad",
                     NODE_ATTRS(INT("batch_dims", node_int(n, "batch_dims")), INTS("shape", s->rank, s->dim),
                                INT("from_end", node_int(n, "from_end"))),
                     dy[0], n->in[1]);
}

typedef struct tuple_gather {
    tuples t;
    char *to;
    const char *from;
    size_t bytes;
} tuple_gather;

static void gather_nd_range(void *arg, int64_t begin, int64_t end) {
    const tuple_gather *p = arg;
    for (int64_t k = begin; k < end; k++)
        copy_item(p->to + (size_t)k * p->bytes, p->from + (size_t)tuple_row(&p->t, k) * p->bytes, p->bytes);
}

static status gather_nd_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    tuple_gather p = {.t = tuples_of(&k->in[1], &x->shape, (int)node_int(k->node, "batch_dims")),
                      .to = k->out[0].data,
                      .from = x->data};
    int64_t inner = shape_span(&x->shape, p.t.batch + p.t.depth, x->shape.rank);

    TRY(check_tuples(c, k->node, &p.t));
    p.bytes = (size_t)inner * dtype_size(x->type);
    if (tensor_count(&k->out[0])) parallel_for(p.t.count, parallel_rows(inner), gather_nd_range, &p);
    return OK;
}

static int64_t rows_selected_by(const node *n) { /* of the data that GatherNDGrad makes */
    const shape *index = &n->in[1]->shape;
    int64_t upto = node_int(n, "batch_dims") + index->dim[index->rank - 1];
    return shape_span(&n->out[0]->shape, 0, (int)upto);
}

static size_t gather_nd_grad_bytes(const node *n) {
    const shape *index = &n->in[1]->shape;
    return row_scatter_bytes(rows_selected_by(n), shape_span(index, 0, index->rank - 1));
}

static status gather_nd_grad_cpu(ctx *c, const call *k) {
    const tensor *dx = &k->out[0];
    tuples t = tuples_of(&k->in[1], &dx->shape, (int)node_int(k->node, "batch_dims"));
    row_scatter s = {.how = COMBINE_ADD,
                     .type = dx->type,
                     .out = dx->data,
                     .updates = k->in[0].data,
                     .outer = 1,
                     .rows = rows_selected_by(k->node),
                     .count = t.count,
                     .width = shape_span(&dx->shape, t.batch + t.depth, dx->shape.rank)};

    TRY(check_tuples(c, k->node, &t));
    TRY(row_scatter_begin(c, &s, k->work));
    for (int64_t i = s.count - 1; i >= 0; i--) row_scatter_select(&s, i, tuple_row(&t, i));
    row_scatter_run(&s);
    return OK;
}

/* --- OneHot ------------------------------------------------------------------------------------------------------- */

/* Where(index == 0 .. depth - 1, on, off); an index that is out of range is nowhere hot. (PyTorch's refuses it before:
 * ortmodule/lowering/decompositions/layers.py.) */
static status lower_one_hot(graph *g, const node *n, value **out) {
    value *index = node_in(n, 0), *depth = node_in(n, 1), *values = node_in(n, 2), *zero, *size, *hot, *on, *off;
    shape s, column;
    int64_t count, *classes;
    int axis;

    for (int i = 0; i < 3; i++) TRY(require(g, n, i));
    if (!value_is_constant(depth) || shape_count(&depth->shape) != 1)
        return fail(g->c, E_UNSUPPORTED, "the depth of OneHot is computed from data");
    if (values->shape.rank != 1 || values->shape.dim[0] != 2)
        return fail(g->c, E_SHAPE, "the values of OneHot are not two numbers");
    if (index->shape.rank >= MAX_RANK) return fail(g->c, E_UNSUPPORTED, "OneHot to a rank over %d", MAX_RANK);
    count = dtype_get_int(depth->type, depth->data, 0);
    if (count < 0 || count > 1 << 24) return fail(g->c, E_INVALID, "OneHot with depth %" PRId64, count);
    s = (shape){.rank = index->shape.rank + 1};
    TRY(shape_axis(g->c, node_int(n, "axis"), s.rank, &axis));
    column = s;
    for (int i = 0, from = 0; i < s.rank; i++) {
        s.dim[i] = i == axis ? 1 : index->shape.dim[from++];
        column.dim[i] = i == axis ? count : 1;
    }
    TRY(NEW(g->c, classes, count));
    for (int64_t i = 0; i < count; i++) classes[i] = i;

    TRY(emit_cast(g, index, I64, &index));
    TRY(graph_scalar(g, I64, 0, &zero));
    TRY(graph_scalar(g, I64, (double)count, &size));
    TRY(emit(g, &size, "Add", index, size));
    TRY(emit(g, &hot, "Less", index, zero));
    TRY(emit(g, &index, "Where", hot, size, index));
    TRY(emit_reshape(g, index, &s, &index));
    TRY(graph_add_constant(g, I64, &column, classes, &hot));
    TRY(emit(g, &hot, "Equal", index, hot));
    TRY(emit_slice_axis(g, values, 0, 0, 1, &off));
    TRY(emit_slice_axis(g, values, 0, 1, 1, &on));
    TRY(emit_reshape(g, off, &SCALAR, &off));
    TRY(emit_reshape(g, on, &SCALAR, &on));
    return emit(g, out, "Where", hot, on, off);
}

kernel_fn gather_cpu; /* ops/movement/gather.c */
size_t gather_workspace(const node *n);
kernel_fn gather_cuda, gather_grad_cuda; /* cuda/kernels/index.cu */
size_t gather_grad_cuda_workspace(const node *n);
kernel_fn gather_elements_cuda, gather_nd_cuda, gather_nd_grad_cuda; /* cuda/kernels/scatter.cu */
size_t gather_nd_grad_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

/* clang-format off */
const op_def index_ops[] = {
    {ONNX("Gather", 1, 2, 2, 1, ANY_TYPE), .checked = OPERAND(1), .plain = OPERAND(0),
     .attrs = NODE_ATTRS(INT("axis", 0), INT("from_end", 1)), .infer = infer_gather,
     .lower = lower_gather, .grad = grad_gather, .workspace = gather_workspace, .cpu = gather_cpu,
     .cuda = gather_cuda},
    {OURS("Embedding", 2, 2, 1, FLOATS), .checked = OPERAND(1), .flags = IN_MODELS, .attrs = NODE_ATTRS(INT("padding_idx", -1)),
     .infer = infer_gather,
     .lower = lower_embedding, .grad = grad_gather, .workspace = gather_workspace, .cpu = gather_cpu,
     .cuda = gather_cuda},
    {OURS("GatherGrad", 2, 2, 1, FLOATS), .checked = OPERAND(1),
     .attrs = NODE_ATTRS(INT("axis", 0), NO_DEFAULT("shape", INTS), INT("padding_idx", -1)), .infer = infer_from_shape,
     .workspace = gather_grad_bytes, .cpu = gather_grad_cpu, .cuda = gather_grad_cuda,
     .cuda_workspace = gather_grad_cuda_workspace},
    {OURS("GatherGradAdd", 3, 3, 1, FLOATS), .checked = OPERAND(2), .flags = INPLACE_0 | DISJOINT,
     .attrs = NODE_ATTRS(INT("axis", 0), INT("padding_idx", -1)), .infer = infer_gather_grad_add,
     .workspace = gather_grad_add_bytes, .cpu = gather_grad_add_cpu},
    {ONNX("GatherElements", 11, 2, 2, 1, ANY_TYPE), .checked = OPERAND(1), .plain = OPERAND(0), .flags = STRIDED,
     .attrs = NODE_ATTRS(INT("axis", 0), INT("from_end", 1)),
     .infer = infer_gather_elements, .simplify = simplify_gather_elements, .grad = grad_gather_elements,
     .cpu = gather_elements_cpu,
     .cuda = gather_elements_cuda},
    {ONNX("GatherND", 11, 2, 2, 1, ANY_TYPE), .checked = OPERAND(1), .plain = OPERAND(0),
     .attrs = NODE_ATTRS(INT("batch_dims", 0), INT("from_end", 1)), .infer = infer_gather_nd,
     .grad = grad_gather_nd, .cpu = gather_nd_cpu, .cuda = gather_nd_cuda},
    {OURS("GatherNDGrad", 2, 2, 1, FLOATS), .checked = OPERAND(1),
     .attrs = NODE_ATTRS(INT("batch_dims", 0), NO_DEFAULT("shape", INTS), INT("from_end", 1)),
     .infer = infer_from_shape, .workspace = gather_nd_grad_bytes, .cpu = gather_nd_grad_cpu,
     .cuda = gather_nd_grad_cuda, .cuda_workspace = gather_nd_grad_cuda_workspace},
    {ONNX("OneHot", 9, 3, 3, 1, NUMBERS), .attrs = NODE_ATTRS(INT("axis", -1)), .lower = lower_one_hot},
    {0},
};
/* clang-format on */
