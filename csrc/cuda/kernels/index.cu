/* index.cu -- mirrors ops/movement/index.c: Gather and its gradient.
 *
 * The gradient of an embedding adds up rows of dy that went to one row. The indices are sorted first (order.cu), so that
 * those of a row stand together, in order. A thread adds up eight columns of a part of the sorted indices, whose length
 * depends on their number alone. A row whose indices are all in one part is written then. Of another each part leaves a
 * total, and the block of the part where the row begins adds these up. So each row is written once, and sums do not
 * depend on which block comes first. Of many blocks of narrow rows, a thread adds up one column in order. An index that
 * is out of range is reported; its result is NaN. */
#ifndef T
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct gather_args {
    const void *from, *index; /* x; or dy */
    void *to;
    int64_t outer, rows, count, width;  /* x is [outer, rows, width], y [outer, count, width]; gather counts in words */
    int64_t padding;                    /* gradient: rows of this index get nothing; -1: there is none */
    int32_t index_type, node, from_end; /* from_end: negative indices count from there */
    cuda_fault *fault;
    int32_t *key;         /* gradient: of each index its row; or `rows`, where there is none */
    const int32_t *order; /* the indices sorted by row; `key` is sorted then */
    int64_t part, parts;  /* sorted indices of a part; parts */
    void *totals;         /* [outer, parts, 2, width], float or double: of a part's first row where indices of it are
                             before the part, and of its last where some are behind it */
} gather_args;

enum { JOIN_LANES = 8 };

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
                         .from_end = node_int(k->node, "from_end") != 0,
                         .fault = k->cuda->fault};
}

status gather_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {
        [1] = {"gather_1"}, [2] = {"gather_2"}, [4] = {"gather_4"}, [8] = {"gather_8"}, [16] = {"gather_16"}};
    int64_t word = (int64_t)dtype_size(k->in[0].type);
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), k->in[0].shape.rank, &axis));
    gather_args a = args_of(k, &k->in[0].shape, axis);
    if (a.width * word % 16 == 0 && ((uintptr_t)a.from | (uintptr_t)a.to) % 16 == 0) {
        a.width = a.width * word / 16;
        word = 16;
    }
    return cuda_launch(c, k, &kernels[word],
                       geometry_over(a.outer * a.count * a.width, word == 16 ? 256 : 256 * 4, 256), &a);
}

enum { FEW_COLUMNS = 8, LEAST_LANES = 64 };

/* Few where they keep a GPU busy only so; the most where the rest is enough. */
static int64_t part_of(int64_t count) { return count < 1 << 15 ? 16 : count < 1 << 16 ? 32 : 64; }

/* Elements of what parts leave, of rows of `width` numbers for each of `outer` blocks. */
static size_t totals_of(int64_t count, int64_t outer, int64_t width) {
    const int64_t part = part_of(count);
    return (size_t)((count + part - 1) / part * 2 * outer * width);
}

/* The order comes first; what follows is aligned as it is. */
static size_t order_bytes(int64_t count) { return (cuda_order_bytes(count) + 63) / 64 * 64; }

size_t gather_grad_cuda_workspace(const node *n) {
    const int64_t count = shape_count(&n->in[1]->shape), elements = shape_count(&n->in[0]->shape);
    const size_t totals = count ? totals_of(count, 1, elements / count) : 0;
    return order_bytes(count) + totals * (n->in[0]->type == F64 ? sizeof(double) : sizeof(float));
}

status gather_grad_cuda(ctx *c, const call *k) {
    static kernel parts[DTYPE_COUNT] = FLOAT_KERNELS(gather_grad_parts), rows = {.name = "gather_rows"};
    static kernel join[DTYPE_COUNT] = FLOAT_KERNELS(gather_grad_join);
    static kernel lanes[DTYPE_COUNT] = {[F32] = {"gather_grad_lanes_f32"}, [F64] = {"gather_grad_lanes_f64"}};
    const tensor *dx = &k->out[0];
    cuda_order order;
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), dx->shape.rank, &axis));
    gather_args a = args_of(k, &dx->shape, axis);
    a.padding = node_int(k->node, "padding_idx");
    a.from_end = 1; /* forward has refused the others */
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    if (a.width == 0) return OK;
    if (lanes[dx->type].name && a.width <= FEW_COLUMNS && a.outer * a.width >= LEAST_LANES)
        return cuda_launch(c, k, &lanes[dx->type], geometry_over(a.outer * a.width, 32, 32), &a);
    a.key = k->work;
    TRY(cuda_launch(c, k, &rows, geometry_over(a.count, 256, 256), &a));
    TRY(cuda_order_by(c, k, k->work, a.count, a.rows + 1, &order));
    a.key = order.key;
    a.order = order.index;
    a.part = part_of(a.count);
    a.parts = (a.count + a.part - 1) / a.part;
    a.totals = k->work ? (char *)k->work + order_bytes(a.count) : NULL;
    int64_t pieces = (a.width + ROW_PIECE - 1) / ROW_PIECE, groups = (pieces + WARP - 1) / WARP;
    TRY(cuda_launch(c, k, &parts[dx->type], geometry_over(a.outer * a.parts * pieces, 128, 128), &a));
    return cuda_launch(c, k, &join[dx->type], geometry_over(a.outer * a.parts * groups, 1, WARP * JOIN_LANES), &a);
}
#endif

#ifdef ORT_DEVICE
DEVICE int64_t row_at(const gather_args *a, int64_t k) {
    const int64_t row = integer_at(a->index, a->index_type, k);
    return row < 0 && a->from_end ? row + a->rows : row;
}

/* Where a word of y comes from; -1: its index, which is reported, is out of range. */
DEVICE int64_t origin_of(const gather_args *a, int64_t i) {
    const int64_t place = quotient(i, a->width), column = i - place * a->width;
    const int64_t o = quotient(place, a->count), k = place - o * a->count, row = row_at(a, k);
    if (row >= 0 && row < a->rows) return (o * a->rows + row) * a->width + column;
    report(a->fault, FAULT_INDEX, a->node, integer_at(a->index, a->index_type, k), a->rows);
    return -1;
}

#define GATHER(name, W)                                                                                                \
    KERNEL(name, gather_args) {                                                                                        \
        FOR_EACH(i, a.outer * a.count * a.width) {                                                                     \
            const int64_t origin = origin_of(&a, i);                                                                   \
            ((W *)a.to)[i] = origin < 0 ? (W) ~(W)0 : ((const W *)a.from)[origin];                                     \
        }                                                                                                              \
    }
GATHER(gather_1, uint8_t)
GATHER(gather_2, uint16_t)
GATHER(gather_4, uint32_t)
GATHER(gather_8, uint64_t)

KERNEL(gather_16, gather_args) {
    FOR_EACH(i, a.outer * a.count * a.width) {
        const int64_t origin = origin_of(&a, i);
        uint32_t word[4] = {~0u, ~0u, ~0u, ~0u};
        if (origin >= 0) read_16((const char *)a.from + origin * 16, word);
        write_16((char *)a.to + i * 16, word);
    }
}

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

/* Columns from `first` on of a row's total, of sorted indices [begin, end), which are all or some of a part's: where the
 * row is in no other part it is written, else the total is left. */
DEVICE void NAME(put_total)(const gather_args *a, int64_t o, int64_t row, int64_t begin, int64_t end, int64_t first,
                            const A total[AT_ONCE]) {
    const int64_t part = quotient(begin, a->part);
    const int before = begin > 0 && a->key[begin - 1] == row, behind = end < a->count && a->key[end] == row;
    const int64_t at =
        before || behind ? ((o * a->parts + part) * 2 + !before) * a->width : (o * a->rows + row) * a->width;

    if (row == a->rows || row == a->padding) return;
    if (before || behind) GIVE(a->totals, sizeof(A) == sizeof(float) ? F32 : F64, at + first, at, at + a->width, total);
    else GIVE(a->to, TYPE, at + first, at, at + a->width, total);
}

KERNEL(NAME(gather_grad_parts), gather_args) {
    enum { EACH = PIECES_OF(TYPE) };
    const int64_t pieces = (a.width + AT_ONCE - 1) / AT_ONCE;
    const int whole = a.width % AT_ONCE == 0 && IS_ALIGNED(a.from, TYPE);

    FOR_EACH(task, a.outer * a.parts * pieces) {
        const int64_t line = quotient(task, pieces), first = (task - line * pieces) * AT_ONCE;
        const int64_t o = quotient(line, a.parts), begin = (line - o * a.parts) * a.part;
        const int64_t end = begin + a.part < a.count ? begin + a.part : a.count;
        const T *dy = (const T *)a.from + o * a.count * a.width;
        int64_t start = begin, row = a.key[begin];
        A total[AT_ONCE] = {0};

        NOT_UNROLLED for (int64_t i = begin; i < end; i += EACH) {
            const int n = end - i < EACH ? (int)(end - i) : EACH;
            int64_t at[EACH], rows[EACH];
            A x[EACH][AT_ONCE];

            UNROLL for (int k = 0; k < EACH; k++) {
                at[k] = k < n ? a.order[i + k] * a.width : 0;
                rows[k] = k < n ? a.key[i + k] : row;
            }
            if (whole) {
                UNROLL for (int k = 0; k < EACH; k++) at[k] += first;
                READ_PIECES(dy, TYPE, at, (1u << n) - 1, x);
            } else {
                UNROLL for (int k = 0; k < EACH; k++) TAKE(dy + at[k], TYPE, first, 0, k < n ? a.width : 0, x[k]);
            }
            UNROLL for (int k = 0; k < EACH; k++) {
                if (k < n && rows[k] != row) {
                    NAME(put_total)(&a, o, row, start, i + k, first, total);
                    UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] = 0;
                    start = i + k, row = rows[k];
                }
                UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] = k < n ? total[j] + x[k][j] : total[j];
            }
        }
        NAME(put_total)(&a, o, row, start, end, first, total);
    }
}

/* A block has the row that goes on from its part into the next, where it is the row's first: a lane of the block adds up
 * every JOIN_LANES-th of the parts' totals of 256 columns. */
KERNEL(NAME(gather_grad_join), gather_args) {
    SHARED(A, totals, JOIN_LANES * WARP * AT_ONCE);
    enum { EACH = PIECES_OF(TYPE) };
    const int wide = sizeof(A) == sizeof(float) ? F32 : F64;
    const int64_t groups = (a.width + WARP * AT_ONCE - 1) / (WARP * AT_ONCE);
    const int lane = threadIdx.x / WARP, own = threadIdx.x % WARP * AT_ONCE;

    FOR_BLOCKS(task, a.outer * a.parts * groups) {
        const int64_t line = quotient(task, groups), first = (task - line * groups) * WARP * AT_ONCE + own;
        const int64_t o = quotient(line, a.parts), part = line - o * a.parts, begin = part * a.part;
        const int64_t end = begin + a.part;

        if (end >= a.count) continue;
        const int64_t row = a.key[end];
        if (a.key[end - 1] != row || (begin > 0 && a.key[begin - 1] == row)) continue;
        if (row == a.rows || row == a.padding) continue;

        int64_t last = part; /* of the row */
        for (;;) {
            const int64_t next = last + 1 + threadIdx.x;
            const int found = (int)block_sum_f32(next < a.parts && a.key[next * a.part] == row);
            last += found;
            if (found < (int)blockDim.x) break;
        }

        const A *from = (const A *)a.totals + o * a.parts * 2 * a.width;
        const int whole = a.width % AT_ONCE == 0 && IS_ALIGNED(from, wide);
        A total[AT_ONCE] = {0};
        for (int64_t i = part + lane; i <= last; i += EACH * JOIN_LANES) {
            A x[EACH][AT_ONCE];
            int64_t at[EACH];
            uint32_t there = 0;
            UNROLL for (int k = 0; k < EACH; k++) {
                const int64_t of = i + k * JOIN_LANES;
                at[k] = (of * 2 + (of == part)) * a.width + first;
                there |= (uint32_t)(of <= last && first < a.width) << k;
            }
            if (whole) {
                READ_PIECES(from, wide, at, there, x);
            } else {
                UNROLL for (int k = 0; k < EACH; k++)
                    TAKE(from + at[k] - first, wide, first, 0, there >> k & 1 ? a.width : 0, x[k]);
            }
            UNROLL for (int k = 0; k < EACH; k++) { UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] += x[k][j]; }
        }
        UNROLL for (int j = 0; j < AT_ONCE; j++) totals[lane * WARP * AT_ONCE + own + j] = total[j];
        __syncthreads();
        if (lane == 0) {
            for (int other = 1; other < JOIN_LANES; other++) {
                UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] += totals[other * WARP * AT_ONCE + own + j];
            }
            const int64_t at = (o * a.rows + row) * a.width;
            GIVE(a.to, TYPE, at + first, at, at + a.width, total);
        }
        __syncthreads();
    }
}
#endif
