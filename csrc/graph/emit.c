/* emit.c -- emits the usual nodes, unless they would change nothing. */
#include "graph/emit.h"

#include <string.h>

status graph_full(graph *g, dtype type, const shape *s, double x, value **out) {
    int64_t dims[MAX_RANK] = {0}, count = shape_count(s);
    union {
        int64_t align;
        char bytes[8];
    } one = {0};
    tensor fill = {.data = one.bytes, .type = type, .shape = SHAPE(1), .stride = {1}};
    value *sizes;

    dtype_set_value(type, one.bytes, 0, x);
    if (count <= 1) return graph_add_constant(g, type, s, one.bytes, out);
    memcpy(dims, s->dim, sizeof dims);
    TRY(graph_ints(g, s->rank, dims, &sizes));
    return emit_with(g, out, "ConstantOfShape", NODE_ATTRS(TENSOR("value", &fill)), sizes);
}

status zeros_like(graph *g, const value *v, value **out) { return graph_full(g, v->type, &v->shape, 0, out); }

status emit_scaled(graph *g, value *x, double factor, value **out) {
    value *f;
    if (factor == 1) {
        *out = x;
        return OK;
    }
    TRY(graph_scalar(g, x->type, factor, &f));
    return emit(g, out, "Mul", x, f);
}

status emit_cast(graph *g, value *x, dtype type, value **out) {
    if (x->type == type) {
        *out = x;
        return OK;
    }
    return emit_with(g, out, "Cast", NODE_ATTRS(INT("to", dtype_table[type].onnx)), x);
}

status emit_reshape(graph *g, value *x, const shape *s, value **out) {
    value *dims;
    if (shape_equal(&x->shape, s)) {
        *out = x;
        return OK;
    }
    TRY(graph_ints(g, s->rank, s->dim, &dims));
    return emit_with(g, out, "Reshape", NODE_ATTRS(INT("allowzero", 1)), x, dims);
}

status emit_transpose(graph *g, value *x, const int *perm, value **out) {
    int64_t p[MAX_RANK] = {0};
    for (int i = 0; i < x->shape.rank; i++) p[i] = perm[i];
    return emit_with(g, out, "Transpose", NODE_ATTRS(INTS("perm", x->shape.rank, p)), x);
}

status emit_transpose_like(graph *g, const node *n, value *x, value **out) {
    return graph_emit_op(g, n->op, n->attrs, 1, &x, 1, out);
}

status emit_expand(graph *g, value *x, const shape *s, value **out) {
    value *dims;
    if (shape_equal(&x->shape, s)) {
        *out = x;
        return OK;
    }
    TRY(graph_ints(g, s->rank, s->dim, &dims));
    return emit(g, out, "Expand", x, dims);
}

status emit_reduce(graph *g, const char *op, value *x, int n_axes, const int64_t *axes, bool keep, value **out) {
    value *a;
    TRY(graph_ints(g, n_axes, axes, &a));
    return emit_with(g, out, op, NODE_ATTRS(INT("keepdims", keep)), x, a);
}

status sum_to(graph *g, value *dy, const shape *s, value **out) {
    int64_t axes[MAX_RANK];
    int n = 0, shift = dy->shape.rank - s->rank;

    for (int i = 0; i < dy->shape.rank; i++)
        if (i < shift || (s->dim[i - shift] == 1 && dy->shape.dim[i] != 1)) axes[n++] = i;
    if (n) TRY(emit_reduce(g, "ReduceSum", dy, n, axes, true, &dy));
    return emit_reshape(g, dy, s, out);
}

/* --- slices -------------------------------------------------------------------------------------------------------- */

static bool covers(const shape *part, const shape *whole, const int64_t *step) {
    if (!shape_equal(part, whole)) return false;
    for (int i = 0; i < part->rank; i++)
        if (step[i] < 0 && part->dim[i] > 1) return false;
    return true;
}

/* Starts and steps that mean nothing are 0 and 1, so that equal boxes are equal nodes. */
static void tidy(int64_t start[MAX_RANK], int64_t step[MAX_RANK], const shape *counts) {
    for (int i = 0; i < counts->rank; i++) {
        if (counts->dim[i] == 0) start[i] = 0;
        if (counts->dim[i] <= 1) step[i] = 1;
    }
}

status emit_slice(graph *g, value *x, const int64_t *start, const shape *counts, const int64_t *step, value **out) {
    int64_t from[MAX_RANK] = {0}, by[MAX_RANK] = {0};
    size_t bytes = (size_t)counts->rank * sizeof *start;

    if (covers(counts, &x->shape, step)) {
        *out = x;
        return OK;
    }
    memcpy(from, start, bytes);
    memcpy(by, step, bytes);
    tidy(from, by, counts);
    return emit_with(g, out, "StridedSlice",
                     NODE_ATTRS(INTS("starts", counts->rank, from), INTS("counts", counts->rank, counts->dim),
                                INTS("steps", counts->rank, by)),
                     x);
}

status emit_slice_axis(graph *g, value *x, int axis, int64_t start, int64_t count, value **out) {
    int64_t starts[MAX_RANK] = {0}, ones[MAX_RANK];
    shape counts = x->shape;

    for (int i = 0; i < x->shape.rank; i++) ones[i] = 1;
    starts[axis] = start;
    counts.dim[axis] = count;
    return emit_slice(g, x, starts, &counts, ones, out);
}

status emit_place(graph *g, value *x, value *filler, const int64_t *start, const shape *whole, const int64_t *step,
                  value **out) {
    int64_t from[MAX_RANK] = {0}, by[MAX_RANK] = {0};
    size_t bytes = (size_t)whole->rank * sizeof *start;

    if (covers(&x->shape, whole, step)) {
        *out = x;
        return OK;
    }
    memcpy(from, start, bytes);
    memcpy(by, step, bytes);
    tidy(from, by, &x->shape);
    return emit_with(g, out, "Place",
                     NODE_ATTRS(INTS("starts", whole->rank, from), INTS("shape", whole->rank, whole->dim),
                                INTS("steps", whole->rank, by)),
                     x, filler);
}
