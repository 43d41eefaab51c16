/* index.cu -- twin of ops/index.c: Gather and its gradient.
 *
 * The gradient of an embedding adds up rows of dy that went to one row. A block has an index: when an earlier one is
 * the same it has nothing to do; otherwise it goes through those after it and adds up their rows, in order. So each row
 * is written once, and sums do not depend on which block comes first. Of many blocks of narrow rows, a thread adds up
 * one column in order. An index that is out of range is reported; its
 * result is NaN. */
#ifndef T
#include "cuda/kernel.h"

typedef struct gather_args {
    const void *from, *index; /* x; or dy */
    void *to;
    int64_t outer, rows, count, width; /* x is [outer, rows, width], y [outer, count, width]; gather counts in words */
    int64_t padding;                   /* gradient: rows of this index get nothing; -1: there is none */
    int32_t index_type, node;
    cuda_fault *fault;
} gather_args;

#ifdef ORT_HOST
kernel_fn gather_cuda, gather_grad_cuda;

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
                         .node = k->node->id,
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

status gather_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(gather_grad);
    static kernel lanes[DTYPE_COUNT] = {[F32] = {"gather_grad_lanes_f32"}, [F64] = {"gather_grad_lanes_f64"}};
    const tensor *dx = &k->out[0];
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), dx->shape.rank, &axis));
    gather_args a = args_of(k, &dx->shape, axis);
    a.padding = node_int(k->node, "padding_idx");
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    if (a.width == 0) return OK;
    if (lanes[dx->type].name && a.width <= FEW_COLUMNS && a.outer * a.width >= LEAST_LANES)
        return cuda_launch(c, k, &lanes[dx->type], geometry_over(a.outer * a.width, 32, 32), &a);
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
            const int64_t k = i / a.width % a.count, o = i / a.width / a.count, row = row_at(&a, k);                   \
            if (row >= 0 && row < a.rows) {                                                                            \
                ((W *)a.to)[i] = ((const W *)a.from)[(o * a.rows + row) * a.width + i % a.width];                      \
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

/* The gradient where T is its own total: dx is zeros. */
#define GRAD_LANES(name, T)                                                                                            \
    KERNEL(name, gather_args) {                                                                                        \
        FOR_EACH(i, a.outer * a.width) {                                                                               \
            const int64_t o = i / a.width, column = i % a.width;                                                       \
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

#define TEMPLATE "cuda/index.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(gather_grad), gather_args) {
    FOR_BLOCKS(task, a.outer * a.count) {
        const int64_t o = task / a.count, k = task % a.count, row = row_at(&a, k);
        const T *dy = (const T *)a.from + o * a.count * a.width;
        T *dx = (T *)a.to + (o * a.rows + row) * a.width;
        float earlier = 0;

        FOR_THREADS(j, k) if (row_at(&a, j) == row) earlier = 1;
        earlier = block_max_f32(earlier);
        if (row < 0 || row >= a.rows) {
            if (threadIdx.x == 0) report(a.fault, FAULT_INDEX, a.node, integer_at(a.index, a.index_type, k), a.rows);
            continue;
        }
        if (earlier > 0 || row == a.padding) continue;
        FOR_THREADS(i, a.width) {
            A total = 0;
            for (int64_t j = k; j < a.count; j++)
                if (row_at(&a, j) == row) total += GET(dy[j * a.width + i]);
            dx[i] = PUT(total);
        }
    }
}
#endif
