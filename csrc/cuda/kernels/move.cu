/* move.cu -- mirrors ops/movement/move.c: strided copies, fills; and kernels made of nothing else: views, Contiguous,
 * Concat, Place; and of ReverseSequence in ops/movement/movement.c.
 *
 * Where neighbours stay together they are moved as one word, of up to 16 bytes. Where the neighbours of one side are not
 * those of the other a block moves a square through shared memory, so that both are read and written together. */
#ifndef W
#include "cuda/kernels/kernel.h"
#include "cuda/kernels/pieces.h"

typedef struct move_args {
    void *to;
    const void *from;
    int64_t count, dim[8], to_step[8], from_step[8];
    int32_t rank, across; /* the dimension along which `from` has neighbours, as `to` has them along the last one */
} move_args;

/* The side of a square, whose elements TURNERS threads move: so that each has enough of them on their way. */
#define SIDE_OF(size) ((size) < 4 ? 64 : 32)
enum { TURNERS = 256, LEAST_SIDE = 16 };

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

/* How many bytes of neighbours can be one word, wherever they are. */
static int64_t word_of(const move_args *a, int64_t size) {
    const int last = a->rank - 1;
    int64_t word = 16;
    uint64_t all = (uintptr_t)a->to | (uintptr_t)a->from;

    if (a->rank == 0 || a->to_step[last] != 1 || a->from_step[last] != 1) return size;
    all |= (uint64_t)(a->dim[last] * size);
    for (int d = 0; d < last; d++) all |= (uint64_t)(a->to_step[d] * size) | (uint64_t)(a->from_step[d] * size);
    while (all % (uint64_t)word) word /= 2;
    return word > size ? word : size;
}

static void widen(move_args *a, int64_t times) {
    const int last = a->rank - 1;
    if (times == 1) return;
    for (int d = 0; d < last; d++) a->to_step[d] /= times, a->from_step[d] /= times;
    a->dim[last] /= times;
    a->count /= times;
}

/* Finds `across`: whether squares are worth while. */
static bool turns(move_args *a) {
    const int last = a->rank - 1;
    if (last < 1 || a->to_step[last] != 1 || a->from_step[last] == 1 || a->dim[last] < LEAST_SIDE) return false;
    for (a->across = 0; a->across < last; a->across++)
        if (a->from_step[a->across] == 1) return a->dim[a->across] >= LEAST_SIDE;
    return false;
}

static int64_t squares_of(const move_args *a, int64_t side) {
    const int64_t high = a->dim[a->across], wide = a->dim[a->rank - 1];
    return a->count / high / wide * ((high + side - 1) / side) * ((wide + side - 1) / side);
}

status cuda_copy(ctx *c, const call *k, const tensor *to, const tensor *from) {
    static kernel kernels[] = {
        [1] = {"move_1"}, [2] = {"move_2"}, [4] = {"move_4"}, [8] = {"move_8"}, [16] = {"move_16"}};
    static kernel turned[] = {[1] = {"turn_1"}, [2] = {"turn_2"}, [4] = {"turn_4"}, [8] = {"turn_8"}};
    const int64_t size = (int64_t)dtype_size(to->type);
    move_args a = {.to = to->data, .from = from->data, .count = tensor_count(to)};

    if (a.count == 0) return OK;
    merge_dimensions(&a, to, from);
    if (turns(&a))
        return cuda_launch(c, k, &turned[size], geometry_over(squares_of(&a, SIDE_OF(size)), 1, TURNERS), &a);
    const int64_t word = word_of(&a, size);
    widen(&a, word / size);
    return cuda_launch(c, k, &kernels[word], geometry_over(a.count, word == 16 ? 256 : 256 * 4, 256), &a);
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

/* Where element i of the dimensions up to `last` is, without dimension `without`, which may be none. */
DEVICE void find(const move_args *a, int64_t i, int last, int without, int64_t *to, int64_t *from) {
    for (int d = last; d >= 0; d--) {
        if (d == without) continue;
        const int64_t next = quotient(i, a->dim[d]), at = i - next * a->dim[d];
        *to += at * a->to_step[d];
        *from += at * a->from_step[d];
        i = next;
    }
}

KERNEL(move_16, move_args) {
    FOR_EACH(i, a.count) {
        int64_t to = 0, from = 0;
        uint32_t word[4];
        find(&a, i, a.rank - 1, -1, &to, &from);
        read_16((const char *)a.from + from * 16, word);
        write_16((char *)a.to + to * 16, word);
    }
}

#define TEMPLATE "cuda/kernels/move.cu"
#include "cuda/kernels/each_word.h"
#endif

#else /* the template */

KERNEL(NAME(reverse), reverse_args) { FOR_EACH(i, a.count)((W *)a.to)[i] = ((const W *)a.from)[reversed(&a, i)]; }

KERNEL(NAME(move), move_args) {
    FOR_EACH(i, a.count) {
        int64_t to = 0, from = 0;
        find(&a, i, a.rank - 1, -1, &to, &from);
        ((W *)a.to)[to] = ((const W *)a.from)[from];
    }
}

/* Neighbours of `from` go down a column of the square, those of a row go to neighbours of `to`. */
KERNEL(NAME(turn), move_args) {
    enum { SIDE = SIDE_OF(sizeof(W)), ROWS = TURNERS / SIDE, LINE = SIDE + (sizeof(W) < 4 ? 4 / sizeof(W) : 1) };
    SHARED(W, square, SIDE * LINE);
    const int last = a.rank - 1, own = threadIdx.x % SIDE, row = threadIdx.x / SIDE;
    const int64_t high = a.dim[a.across], wide = a.dim[last];
    const int64_t down = (high + SIDE - 1) / SIDE, along = (wide + SIDE - 1) / SIDE;
    const int64_t others = quotient(a.count, high * wide);
    FOR_BLOCKS(task, others * down * along) {
        const int64_t line = quotient(task, along), x = (task - line * along) * SIDE;
        const int64_t o = quotient(line, down), y = (line - o * down) * SIDE;
        int64_t to = 0, from = 0;
        find(&a, o, last - 1, a.across, &to, &from);
        W mine[SIDE / ROWS];
        UNROLL for (int i = 0; i < SIDE / ROWS; i++) { /* all on their way at the same time */
            const int64_t at = x + row + i * ROWS;
            mine[i] = at < wide && y + own < high ? ((const W *)a.from)[from + at * a.from_step[last] + y + own] : 0;
        }
        UNROLL for (int i = 0; i < SIDE / ROWS; i++) square[(row + i * ROWS) * LINE + own] = mine[i];
        __syncthreads();
        UNROLL for (int i = 0; i < SIDE; i += ROWS) {
            if (y + row + i < high && x + own < wide)
                ((W *)a.to)[to + (y + row + i) * a.to_step[a.across] + x + own] = square[own * LINE + row + i];
        }
        __syncthreads();
    }
}
#endif
