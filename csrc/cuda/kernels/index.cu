/* index.cu -- twin of ops/movement/index.c: Gather and its gradient.
 *
 * The gradient of an embedding adds up rows of dy that went to one row. The indices are sorted first (order.cu), so that
 * those of a row stand together, in order. A block has a place among them: the first of a row adds up all of them, the
 * others have nothing to do. So each row is written once, and sums do not depend on which block comes first. Of many
 * blocks of narrow rows, a thread adds up one column in order. An index that is out of range is reported; its result is
 * NaN. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct gather_args {
    const void *from, *index; /* x; or dy */
    void *to;
    int64_t outer, rows, count, width; /* x is [outer, rows, width], y [outer, count, width]; gather counts in words */
    int64_t padding;                   /* gradient: rows of this index get nothing; -1: there is none */
    int32_t index_type, node;
    cuda_fault *fault;
    int32_t *key;         /* gradient: of each index its row; or `rows`, where there is none */
    const int32_t *order; /* the indices sorted by row; `key` is sorted then */
} gather_args;

#ifdef ORT_HOST
#include "cuda/kernels/order.h"

kernel_fn gather_cuda, gather_grad_cuda;
size_t gather_grad_cuda_workspace(const node *n);

static gather_args args_of(const call *k, const shape *data, int axis) {
    return (gather_args){.from = k->in[0].data,
                         .index = k->in[1].data,
                         .to = k->out[0].data,
                         .outer = shape_span(data, 0, axis),
                         .rows = data->dim[axis],
                         .count = tensor_count(&k->in[1]),
                         .width = shape_span(data, axis + 1, data->rank),
                         .padding = -1,
                         .index_type = k->in[1].type,
                         .node = cuda_named(k->node),
                         .fault = k->cuda->fault};
}

status gather_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {[1] = {"gather_1"}, [2] = {"gather_2"}, [4] = {"gather_4"}, [8] = {"gather_8"}};
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), k->in[0].shape.rank, &axis));
    gather_args a = args_of(k, &k->in[0].shape, axis);
    return cuda_launch(c, k, &kernels[dtype_size(k->in[0].type)],
                       geometry_over(a.outer * a.count * a.width, 256 * 4, 256), &a);
}

enum { FEW_COLUMNS = 8, LEAST_LANES = 64 };

size_t gather_grad_cuda_workspace(const node *n) { return cuda_order_bytes(shape_count(&n->in[1]->shape)); }

status gather_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(gather_grad), rows = {.name = "gather_rows"};
    static kernel lanes[DTYPE_COUNT] = {[F32] = {"gather_grad_lanes_f32"}, [F64] = {"gather_grad_lanes_f64"}};
    const tensor *dx = &k->out[0];
    cuda_order order;
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), dx->shape.rank, &axis));
    gather_args a = args_of(k, &dx->shape, axis);
    a.padding = node_int(k->node, "padding_idx");
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    if (a.width == 0) return OK;
    if (lanes[dx->type].name && a.width <= FEW_COLUMNS && a.outer * a.width >= LEAST_LANES)
        return cuda_launch(c, k, &lanes[dx->type], geometry_over(a.outer * a.width, 32, 32), &a);
    a.key = k->work;
    TRY(cuda_launch(c, k, &rows, geometry_over(a.count, 256, 256), &a));
    TRY(cuda_order_by(c, k, k->work, a.count, a.rows + 1, &order));
    a.key = order.key;
    a.order = order.index;
    return cuda_launch(c, k, &kernels[dx->type], geometry_over(a.outer * a.count, 1, 128), &a);
}
#endif

#ifdef ORT_DEVICE
DEVICE int64_t row_at(const gather_args *a, int64_t k) {
    const int64_t row = integer_at(a->index, a->index_type, k);
    return row < 0 ? row + a->rows : row;
}

#define GATHER(name, W)                                                                                                \
    KERNEL(name, gather_args) {                                                                                        \
        FOR_EACH(i, a.outer * a.count * a.width) {                                                                     \
            const int64_t place = quotient(i, a.width), column = i - place * a.width;                                  \
            const int64_t o = quotient(place, a.count), k = place - o * a.count, row = row_at(&a, k);                  \
            if (row >= 0 && row < a.rows) {                                                                            \
                ((W *)a.to)[i] = ((const W *)a.from)[(o * a.rows + row) * a.width + column];                           \
            } else {                                                                                                   \
                ((W *)a.to)[i] = (W) ~(W)0;                                                                            \
                report(a.fault, FAULT_INDEX, a.node, integer_at(a.index, a.index_type, k), a.rows);                    \
            }                                                                                                          \
        }                                                                                                              \
    }
GATHER(gather_1, uint8_t)
GATHER(gather_2, uint16_t)
GATHER(gather_4, uint32_t)
GATHER(gather_8, uint64_t)

KERNEL(gather_rows, gather_args) {
    FOR_EACH(k, a.count) {
        const int64_t row = row_at(&a, k);
        const int is_there = row >= 0 && row < a.rows;
        if (!is_there) report(a.fault, FAULT_INDEX, a.node, integer_at(a.index, a.index_type, k), a.rows);
        a.key[k] = (int32_t)(is_there ? row : a.rows);
    }
}

/* The gradient where T is its own total: dx is zeros. */
#define GRAD_LANES(name, T)                                                                                            \
    KERNEL(name, gather_args) {                                                                                        \
        FOR_EACH(i, a.outer * a.width) {                                                                               \
            const int64_t o = quotient(i, a.width), column = i - o * a.width;                                          \
            const T *dy = (const T *)a.from + o * a.count * a.width + column;                                          \
            T *dx = (T *)a.to + o * a.rows * a.width + column;                                                         \
            for (int64_t k = 0; k < a.count; k++) {                                                                    \
                const int64_t row = row_at(&a, k);                                                                     \
                if (row < 0 || row >= a.rows)                                                                          \
                    report(a.fault, FAULT_INDEX, a.node, integer_at(a.index, a.index_type, k), a.rows);                \
                else if (row != a.padding) dx[row * a.width] += dy[k * a.width];                                       \
            }                                                                                                          \
        }                                                                                                              \
    }
GRAD_LANES(gather_grad_lanes_f32, float)
GRAD_LANES(gather_grad_lanes_f64, double)

#define TEMPLATE "cuda/kernels/index.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(gather_grad), gather_args) {
    FOR_BLOCKS(task, a.outer * a.count) {
        const int64_t o = quotient(task, a.count), first = task - o * a.count, row = a.key[first];
        const T *dy = (const T *)a.from + o * a.count * a.width;

        if ((first > 0 && a.key[first - 1] == row) || row == a.rows || row == a.padding) continue;
        T *dx = (T *)a.to + (o * a.rows + row) * a.width;
        FOR_THREADS(i, a.width) {
            A total = 0;
            for (int64_t j = first; j < a.count && a.key[j] == row; j++) total += GET(dy[a.order[j] * a.width + i]);
            dx[i] = PUT(total);
        }
    }
}
#endif
