/* scatter.cu -- twin of ops/scatter.c, and of GatherElements and GatherND in ops/index.c: ScatterElements and ScatterND
 * that replace or add.
 *
 * ScatterElements: a thread has a lane along the axis, and takes its updates in order. ScatterND: of the updates that go
 * to one row, replacing keeps the last; a block that adds has an index: when an earlier one is the same it has nothing
 * to do, otherwise it adds up the rows of all that are, in order (as in index.cu). */
#ifndef T
#include "cuda/kernel.h"

typedef struct element_args {
    const void *x, *index;
    void *y;
    int64_t lanes, length, size; /* lanes of the indices, their length; of the axis of what is indexed */
    int64_t dim[8], index_step[8], x_step[8], y_step[8]; /* the lanes' dimensions */
    int64_t index_along, x_along, y_along;               /* strides along the axis */
    int32_t rank, index_type, node;
    cuda_fault *fault;
} element_args;

typedef struct row_args {
    const void *index, *updates; /* updates: of y's rows; or what is gathered from */
    void *y;
    int32_t *last;                                  /* of each row: the last update, or -1 */
    int64_t count, width, rows, size[8], stride[8]; /* indices; words or elements of a row; the indexed dimensions */
    int64_t part, part_rows;                        /* of one batch: indices, rows */
    int32_t depth, index_type, node;
    cuda_fault *fault;
} row_args;

#ifdef ORT_HOST
#include "cuda/move.h"

#include <string.h>

kernel_fn gather_elements_cuda, scatter_elements_cuda, scatter_nd_cuda, gather_nd_cuda, gather_nd_grad_cuda;
size_t scatter_nd_cuda_workspace(const node *n);

/* --- elements ----------------------------------------------------------------------------------------------------- */

static status element_args_of(ctx *c, const call *k, const tensor *x, const tensor *y, const tensor *indexed,
                              element_args *out) {
    const tensor *index = &k->in[1];
    element_args a = {.x = x->data, .index = index->data, .y = y->data, .lanes = 1, .length = 1, .size = 1};
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), index->shape.rank, &axis));
    a.index_type = index->type;
    a.node = k->node->id;
    a.fault = k->cuda->fault;
    for (int d = 0; d < index->shape.rank; d++) {
        if (d == axis) {
            a.length = index->shape.dim[d];
            a.size = indexed->shape.dim[d];
            a.index_along = index->stride[d];
            a.x_along = x->stride[d];
            a.y_along = y->stride[d];
            continue;
        }
        a.lanes *= a.dim[a.rank] = index->shape.dim[d];
        a.index_step[a.rank] = index->stride[d];
        a.x_step[a.rank] = x->stride[d];
        a.y_step[a.rank++] = y->stride[d];
    }
    *out = a;
    return OK;
}

status gather_elements_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {[1] = {"gather_elements_1"},
                               [2] = {"gather_elements_2"},
                               [4] = {"gather_elements_4"},
                               [8] = {"gather_elements_8"}};
    element_args a;

    TRY(element_args_of(c, k, &k->in[0], &k->out[0], &k->in[0], &a));
    return cuda_launch(c, k, &kernels[dtype_size(k->in[0].type)], geometry_over(a.lanes * a.length, 256, 256), &a);
}

static bool adds(const node *n) { return strcmp(node_string(n, "reduction"), "add") == 0; }

static status check_kind(ctx *c, const call *k) {
    const char *how = node_string(k->node, "reduction");
    if ((!adds(k->node) && strcmp(how, "none") != 0) || (adds(k->node) && !dtype_is_float(k->in[0].type)))
        return fail(c, E_UNSUPPORTED, "%s of %s with the reduction \"%s\" has no CUDA kernel", k->node->op->name,
                    dtype_name(k->in[0].type), how);
    return OK;
}

status scatter_elements_cuda(ctx *c, const call *k) {
    static kernel replace[] = {
        [1] = {"put_elements_1"}, [2] = {"put_elements_2"}, [4] = {"put_elements_4"}, [8] = {"put_elements_8"}};
    static kernel add[DTYPE_COUNT] = FLOAT_KERNELS(add_elements);
    const dtype type = k->in[0].type;
    element_args a;

    TRY(check_kind(c, k));
    TRY(element_args_of(c, k, &k->in[2], &k->out[0], &k->out[0], &a));
    TRY(cuda_copy(c, k, &k->out[0], &k->in[0]));
    return cuda_launch(c, k, adds(k->node) ? &add[type] : &replace[dtype_size(type)],
                       geometry_over(a.length ? a.lanes : 0, 128, 128), &a);
}

/* --- rows --------------------------------------------------------------------------------------------------------- */

/* `x` is indexed behind its first `batch` dimensions, which the indices have, too. */
static row_args row_args_of(const node *n, const shape *x, int batch) {
    const shape *index = &n->in[1]->shape;
    row_args a = {.part_rows = 1, .depth = (int32_t)index->dim[index->rank - 1]};

    a.count = shape_span(index, 0, index->rank - 1);
    a.part = shape_span(index, batch, index->rank - 1);
    a.width = shape_span(x, batch + a.depth, x->rank);
    for (int d = a.depth - 1; d >= 0; d--) {
        a.size[d] = x->dim[batch + d];
        a.stride[d] = a.part_rows;
        a.part_rows *= x->dim[batch + d];
    }
    a.rows = a.part_rows * shape_span(x, 0, batch);
    a.node = n->id;
    return a;
}

static void set_memory(row_args *a, const call *k, const void *updates) {
    a->index = k->in[1].data;
    a->index_type = k->in[1].type;
    a->updates = updates;
    a->y = k->out[0].data;
    a->last = k->work;
    a->fault = k->cuda->fault;
}

status gather_nd_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {
        [1] = {"gather_rows_1"}, [2] = {"gather_rows_2"}, [4] = {"gather_rows_4"}, [8] = {"gather_rows_8"}};
    row_args a = row_args_of(k->node, &k->in[0].shape, (int)node_int(k->node, "batch_dims"));

    set_memory(&a, k, k->in[0].data);
    return cuda_launch(c, k, &kernels[dtype_size(k->in[0].type)], geometry_over(a.count * a.width, 256 * 4, 256), &a);
}

status gather_nd_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(add_rows);
    const tensor *dx = &k->out[0];
    row_args a = row_args_of(k->node, &dx->shape, (int)node_int(k->node, "batch_dims"));

    set_memory(&a, k, k->in[0].data);
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    return cuda_launch(c, k, &kernels[dx->type], geometry_over(a.width ? a.count : 0, 1, 128), &a);
}

size_t scatter_nd_cuda_workspace(const node *n) {
    return (size_t)row_args_of(n, &n->in[0]->shape, 0).rows * sizeof(int32_t);
}

status scatter_nd_cuda(ctx *c, const call *k) {
    static kernel mark = {.name = "mark_rows"};
    static kernel replace[] = {[1] = {"put_rows_1"}, [2] = {"put_rows_2"}, [4] = {"put_rows_4"}, [8] = {"put_rows_8"}};
    static kernel add[DTYPE_COUNT] = FLOAT_KERNELS(add_rows);
    const dtype type = k->in[0].type;
    row_args a = row_args_of(k->node, &k->in[0].shape, 0);

    TRY(check_kind(c, k));
    if (a.count > INT32_MAX) return fail(c, E_UNSUPPORTED, "more than 2^31 indices");
    set_memory(&a, k, k->in[2].data);
    TRY(cuda_copy(c, k, &k->out[0], &k->in[0]));
    if (a.count == 0 || a.width == 0) return OK;
    if (adds(k->node)) return cuda_launch(c, k, &add[type], geometry_over(a.count, 1, 128), &a);
    TRY(cuda_fill(c, k, a.last, 0xff, (size_t)a.rows * sizeof *a.last));
    TRY(cuda_launch(c, k, &mark, geometry_over(a.count, 256, 256), &a));
    return cuda_launch(c, k, &replace[dtype_size(type)], geometry_over(a.rows * a.width, 256 * 4, 256), &a);
}
#endif

#ifdef ORT_DEVICE
typedef struct lane_at {
    int64_t index, x, y;
} lane_at;

DEVICE lane_at lane_of(const element_args *a, int64_t lane) {
    lane_at at = {0, 0, 0};
    for (int d = a->rank - 1; d >= 0; d--) {
        const int64_t i = lane % a->dim[d];
        lane /= a->dim[d];
        at.index += i * a->index_step[d];
        at.x += i * a->x_step[d];
        at.y += i * a->y_step[d];
    }
    return at;
}

/* The place along the axis; -1, reported, where there is none. */
DEVICE int64_t place_of(const element_args *a, int64_t at) {
    const int64_t given = integer_at(a->index, a->index_type, at), i = given < 0 ? given + a->size : given;
    if (i >= 0 && i < a->size) return i;
    report(a->fault, FAULT_INDEX, a->node, given, a->size);
    return -1;
}

#define ELEMENTS(size, W)                                                                                              \
    KERNEL(gather_elements_##size, element_args) {                                                                     \
        FOR_EACH(e, a.lanes * a.length) {                                                                              \
            const lane_at at = lane_of(&a, e / a.length);                                                              \
            const int64_t j = e % a.length, i = place_of(&a, at.index + j * a.index_along);                            \
            ((W *)a.y)[at.y + j * a.y_along] = i < 0 ? (W) ~(W)0 : ((const W *)a.x)[at.x + i * a.x_along];             \
        }                                                                                                              \
    }                                                                                                                  \
    KERNEL(put_elements_##size, element_args) {                                                                        \
        FOR_EACH(lane, a.lanes) {                                                                                      \
            const lane_at at = lane_of(&a, lane);                                                                      \
            for (int64_t j = 0; j < a.length; j++) {                                                                   \
                const int64_t i = place_of(&a, at.index + j * a.index_along);                                          \
                if (i >= 0) ((W *)a.y)[at.y + i * a.y_along] = ((const W *)a.x)[at.x + j * a.x_along];                 \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    KERNEL(put_rows_##size, row_args) {                                                                                \
        FOR_EACH(e, a.rows * a.width) {                                                                                \
            const int32_t k = a.last[e / a.width];                                                                     \
            if (k >= 0) ((W *)a.y)[e] = ((const W *)a.updates)[k * a.width + e % a.width];                             \
        }                                                                                                              \
    }
ELEMENTS(1, uint8_t)
ELEMENTS(2, uint16_t)
ELEMENTS(4, uint32_t)
ELEMENTS(8, uint64_t)

/* The row that an index says; -1 where it says none. */
DEVICE int64_t row_of(const row_args *a, int64_t k) {
    int64_t row = k / a->part * a->part_rows;
    for (int d = 0; d < a->depth; d++) {
        const int64_t given = integer_at(a->index, a->index_type, k * a->depth + d);
        const int64_t i = given < 0 ? given + a->size[d] : given;
        if (i < 0 || i >= a->size[d]) return -1;
        row += i * a->stride[d];
    }
    return row;
}

DEVICE void report_row(const row_args *a, int64_t k) {
    for (int d = 0; d < a->depth; d++) {
        const int64_t given = integer_at(a->index, a->index_type, k * a->depth + d);
        if (given < -a->size[d] || given >= a->size[d]) report(a->fault, FAULT_INDEX, a->node, given, a->size[d]);
    }
}

#define GATHER_ROWS(size, W)                                                                                           \
    KERNEL(gather_rows_##size, row_args) {                                                                             \
        FOR_EACH(e, a.count * a.width) {                                                                               \
            const int64_t row = row_of(&a, e / a.width);                                                               \
            if (row < 0) report_row(&a, e / a.width);                                                                  \
            ((W *)a.y)[e] = row < 0 ? (W) ~(W)0 : ((const W *)a.updates)[row * a.width + e % a.width];                 \
        }                                                                                                              \
    }
GATHER_ROWS(1, uint8_t)
GATHER_ROWS(2, uint16_t)
GATHER_ROWS(4, uint32_t)
GATHER_ROWS(8, uint64_t)

/* The largest number does not depend on which comes first. */
KERNEL(mark_rows, row_args) {
    FOR_EACH(k, a.count) {
        const int64_t row = row_of(&a, k);
        if (row < 0) report_row(&a, k);
        else atomicMax(&a.last[row], (int32_t)k);
    }
}

#define TEMPLATE "cuda/scatter.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(add_elements), element_args) {
    FOR_EACH(lane, a.lanes) {
        const lane_at at = lane_of(&a, lane);
        for (int64_t j = 0; j < a.length; j++) {
            const int64_t i = place_of(&a, at.index + j * a.index_along);
            int repeated = 0;
            if (i < 0) continue;
            for (int64_t e = 0; e < j && !repeated; e++) repeated = place_of(&a, at.index + e * a.index_along) == i;
            if (repeated) continue;
            T *y = (T *)a.y + at.y + i * a.y_along;
            A total = GET(*y);
            for (int64_t e = j; e < a.length; e++)
                if (place_of(&a, at.index + e * a.index_along) == i)
                    total += GET(((const T *)a.x)[at.x + e * a.x_along]);
            *y = PUT(total);
        }
    }
}

KERNEL(NAME(add_rows), row_args) {
    FOR_BLOCKS(k, a.count) {
        const int64_t row = row_of(&a, k);
        float earlier = 0;

        FOR_THREADS(j, k) if (row_of(&a, j) == row) earlier = 1;
        earlier = block_max_f32(earlier);
        if (row < 0 && threadIdx.x == 0) report_row(&a, k);
        if (row < 0 || earlier > 0) continue;
        FOR_THREADS(i, a.width) {
            T *y = (T *)a.y + row * a.width + i;
            A total = GET(*y);
            for (int64_t j = k; j < a.count; j++)
                if (row_of(&a, j) == row) total += GET(((const T *)a.updates)[j * a.width + i]);
            *y = PUT(total);
        }
    }
}
#endif
