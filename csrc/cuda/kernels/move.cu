/* move.cu -- twin of ops/movement/move.c: strided copies and fills; and of the kernels made of nothing else: views, Contiguous,
 * Concat, Place; and of ReverseSequence in ops/movement/movement.c. */
#include "cuda/kernels/kernel.h"

typedef struct move_args {
    void *to;
    const void *from;
    int64_t count, dim[8], to_step[8], from_step[8];
    int32_t rank;
} move_args;

typedef struct reverse_args {
    void *to;
    const void *from;
    const int64_t *length; /* of a sequence */
    int64_t count, inner, steps, second;
    int32_t time_first, node;
    cuda_fault *fault;
} reverse_args;

#ifdef ORT_HOST
#include "cuda/kernels/move.h"
#include "ops/movement/move.h"

kernel_fn view_cuda, contiguous_cuda, concat_cuda, place_cuda, reverse_cuda;

/* The dimensions longer than one, merged where both sides run on. */
static void merge_dimensions(move_args *a, const tensor *to, const tensor *from) {
    for (int d = 0; d < to->shape.rank; d++) {
        const int64_t size = to->shape.dim[d];
        const int last = a->rank - 1;
        if (size == 1) continue;
        if (last >= 0 && a->to_step[last] == to->stride[d] * size && a->from_step[last] == from->stride[d] * size) {
            a->dim[last] *= size;
        } else {
            a->dim[a->rank++] = size;
        }
        a->to_step[a->rank - 1] = to->stride[d];
        a->from_step[a->rank - 1] = from->stride[d];
    }
}

status cuda_copy(ctx *c, const call *k, const tensor *to, const tensor *from) {
    static kernel kernels[] = {[1] = {"move_1"}, [2] = {"move_2"}, [4] = {"move_4"}, [8] = {"move_8"}};
    move_args a = {.to = to->data, .from = from->data, .count = tensor_count(to)};

    merge_dimensions(&a, to, from);
    return cuda_launch(c, k, &kernels[dtype_size(to->type)], geometry_over(a.count, 256 * 4, 256), &a);
}

static void *moved(void *data, int64_t elements, dtype type) {
    return data ? (char *)data + elements * (int64_t)dtype_size(type) : NULL; /* NULL: nothing is started */
}

status contiguous_cuda(ctx *c, const call *k) { return cuda_copy(c, k, &k->out[0], &k->in[0]); }

status view_cuda(ctx *c, const call *k) {
    tensor from = k->in[0], to = k->out[0], seen = {.type = to.type, .shape = to.shape};
    int64_t offset = 0;
    bool possible = false;

    TRY(k->node->op->view(c, k->node, &k->in[0], &seen, &offset, &possible));
    if (possible) {
        seen.data = moved(from.data, offset, from.type);
        return cuda_copy(c, k, &to, &seen);
    }
    to.shape = from.shape;
    stride_contiguous(&to.shape, to.stride);
    return cuda_copy(c, k, &to, &from);
}

status concat_cuda(ctx *c, const call *k) {
    int64_t at = 0;
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), k->out[0].shape.rank, &axis));
    for (int i = 0; i < k->n_in; i++) {
        const tensor *x = &k->in[i];
        tensor part = k->out[0];
        if (tensor_count(x) == 0) continue;
        part.data = moved(part.data, at * part.stride[axis], part.type);
        part.shape.dim[axis] = x->shape.dim[axis];
        TRY(cuda_copy(c, k, &part, x));
        at += x->shape.dim[axis];
    }
    return OK;
}

status place_cuda(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *y = &k->out[0];
    const int64_t *starts, *steps;
    tensor part = *y;
    int64_t offset = 0;

    (void)node_ints(k->node, "starts", &starts);
    (void)node_ints(k->node, "steps", &steps);
    if (k->n_in > 1 && tensor_present(&k->in[1])) {
        tensor filler = {.data = k->in[1].data, .type = y->type, .shape = y->shape}; /* strides of 0 */
        TRY(cuda_copy(c, k, y, &filler));
    } else {
        TRY(cuda_clear(c, k, y->data, (size_t)tensor_count(y) * dtype_size(y->type)));
    }
    if (tensor_count(x) == 0) return OK;
    for (int d = 0; d < y->shape.rank; d++) {
        offset += starts[d] * y->stride[d];
        part.shape.dim[d] = x->shape.dim[d];
        part.stride[d] = y->stride[d] * steps[d];
    }
    part.data = moved(y->data, offset, y->type);
    return cuda_copy(c, k, &part, x);
}

status reverse_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {[1] = {"reverse_1"}, [2] = {"reverse_2"}, [4] = {"reverse_4"}, [8] = {"reverse_8"}};
    const tensor *x = &k->in[0];
    reverse_args a = {.to = k->out[0].data,
                      .from = x->data,
                      .length = k->in[1].data,
                      .count = tensor_count(x),
                      .inner = shape_span(&x->shape, 2, x->shape.rank),
                      .second = x->shape.dim[1],
                      .time_first = node_int(k->node, "time_axis") == 0,
                      .node = cuda_named(k->node),
                      .fault = k->cuda->fault};

    a.steps = x->shape.dim[a.time_first ? 0 : 1];
    return cuda_launch(c, k, &kernels[dtype_size(x->type)], geometry_over(a.count, 256 * 4, 256), &a);
}
#endif

#ifdef ORT_DEVICE
/* Where the element at i of a sequence comes from: the first ones, as many as it is long, in the other order. A length
 * that cannot be is reported, and reverses nothing. */
DEVICE int64_t reversed(const reverse_args *a, int64_t i) {
    const int64_t row = quotient(i, a->inner), turn = quotient(row, a->second);
    const int64_t rest = row - turn * a->second, time = a->time_first ? turn : rest;
    const int64_t length = a->length[a->time_first ? rest : turn];
    if (length < 0 || length > a->steps) report(a->fault, FAULT_LENGTH, a->node, length, a->steps);
    if (length > a->steps || time >= length) return i;
    return i + (length - 1 - 2 * time) * a->inner * (a->time_first ? a->second : 1);
}

#define REVERSE(name, T)                                                                                               \
    KERNEL(name, reverse_args) { FOR_EACH(i, a.count)((T *)a.to)[i] = ((const T *)a.from)[reversed(&a, i)]; }
REVERSE(reverse_1, uint8_t)
REVERSE(reverse_2, uint16_t)
REVERSE(reverse_4, uint32_t)
REVERSE(reverse_8, uint64_t)

#define MOVE(name, T)                                                                                                  \
    KERNEL(name, move_args) {                                                                                          \
        FOR_EACH(i, a.count) {                                                                                         \
            int64_t to = 0, from = 0;                                                                                  \
            int64_t rest = i;                                                                                          \
            for (int d = a.rank - 1; d >= 0; d--) {                                                                    \
                const int64_t next = quotient(rest, a.dim[d]), at = rest - next * a.dim[d];                            \
                to += at * a.to_step[d];                                                                               \
                from += at * a.from_step[d];                                                                           \
                rest = next;                                                                                           \
            }                                                                                                          \
            ((T *)a.to)[to] = ((const T *)a.from)[from];                                                               \
        }                                                                                                              \
    }
MOVE(move_1, uint8_t)
MOVE(move_2, uint16_t)
MOVE(move_4, uint32_t)
MOVE(move_8, uint64_t)
#endif
