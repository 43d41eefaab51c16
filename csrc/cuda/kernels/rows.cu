/* rows.cu -- mirrors ops/movement/rows.c: how many rows matter, which, and tensors that have only these; indices that
 * are checked.
 *
 * One block counts, in chunks. Rows are moved in pieces of up to 16 bytes. */
#include "cuda/kernels/chunks.h"
#include "cuda/kernels/kernel.h"
#include "cuda/kernels/pieces.h"

typedef struct rows_args {
    const uint8_t *live;
    int64_t *out;
    int64_t total, room, step; /* flags; places; what a count is rounded up to */
    int32_t any;               /* only whether there is one */
} rows_args;

typedef struct pack_args {
    const int64_t *rows;
    const void *from;
    void *to;
    int64_t places, total, width; /* of the list; rows among all; pieces of a row */
    uint64_t filler;
    int32_t repeat;
} pack_args;

typedef struct checked_args {
    const void *index;
    void *to;
    int64_t count, size;
    int32_t index_type, node, from_end;
    cuda_fault *fault;
} checked_args;

#ifdef ORT_HOST
#include "ops/movement/rows.h"

#include <string.h>

kernel_fn row_count_cuda, row_index_cuda, pack_rows_cuda, unpack_rows_cuda, checked_index_cuda;

static rows_args args_of(const call *k) {
    return (rows_args){.live = k->in[0].data,
                       .out = k->out[0].data,
                       .total = tensor_count(&k->in[0]),
                       .room = tensor_count(&k->out[0])};
}

status row_count_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "row_count"};
    rows_args a = args_of(k);

    a.step = row_step(a.total);
    a.any = node_int(k->node, "any") != 0;
    return cuda_launch(c, k, &f, (geometry){1, CHUNKS}, &a);
}

status row_index_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "row_index"};
    const rows_args a = args_of(k);
    return cuda_launch(c, k, &f, (geometry){1, CHUNKS}, &a);
}

/* Bytes of a piece: all of a row's are whole, and aligned. */
static size_t piece_of(const void *from, const void *to, size_t row, size_t element) {
    const uintptr_t all = (uintptr_t)from | (uintptr_t)to | row;
    for (size_t piece = 16; piece > element; piece /= 2)
        if (all % piece == 0) return piece;
    return element;
}

static status run(ctx *c, const call *k, kernel kernels[17], int64_t blocks) {
    const tensor *x = &k->in[0], *rows = &k->in[1];
    const size_t element = dtype_size(x->type);
    const int64_t bytes = shape_span(&x->shape, 1, x->shape.rank) * (int64_t)element;
    const size_t piece = piece_of(x->data, k->out[0].data, (size_t)bytes, element);
    pack_args a = {.rows = rows->data,
                   .from = x->data,
                   .to = k->out[0].data,
                   .places = tensor_count(rows),
                   .total = k->out[0].shape.dim[0],
                   .width = bytes / (int64_t)piece};
    unsigned char filler[8];

    a.repeat = node_has(k->node, "repeat") && node_int(k->node, "repeat") != 0;
    if (node_has(k->node, "filler")) dtype_set_value(x->type, filler, 0, node_float(k->node, "filler"));
    else memset(filler, 0, sizeof filler);
    for (size_t i = element; i < sizeof filler; i++) filler[i] = filler[i - element];
    memcpy(&a.filler, filler, sizeof filler);
    /* Which piece it is depends on addresses: at making a plan all are looked up. */
    for (size_t other = element; k->cuda->dry && other <= 16; other *= 2)
        TRY(cuda_launch(c, k, &kernels[other], (geometry){0, WARP}, &a));
    return cuda_launch(c, k, &kernels[piece], geometry_rows(a.width ? blocks : 0, a.width), &a);
}

status pack_rows_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {
        [1] = {"pack_1"}, [2] = {"pack_2"}, [4] = {"pack_4"}, [8] = {"pack_8"}, [16] = {"pack_16"}};
    return run(c, k, kernels, k->out[0].shape.dim[0]);
}

status unpack_rows_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {
        [1] = {"unpack_1"}, [2] = {"unpack_2"}, [4] = {"unpack_4"}, [8] = {"unpack_8"}, [16] = {"unpack_16"}};
    return run(c, k, kernels, k->out[0].shape.dim[0]);
}

status checked_index_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "checked_index"};
    const checked_args a = {.index = k->in[0].data,
                            .to = k->out[0].data,
                            .count = tensor_count(&k->in[0]),
                            .size = node_int(k->node, "size"),
                            .index_type = k->in[0].type,
                            .node = cuda_named(k->node),
                            .from_end = node_int(k->node, "from_end") != 0,
                            .fault = k->cuda->fault};
    return cuda_launch(c, k, &f, geometry_over(a.count, 256, 256), &a);
}
#endif

#ifdef ORT_DEVICE
DEVICE int64_t count_live(const rows_args *a, int64_t begin, int64_t end) {
    int64_t n = 0;
    for (int64_t i = begin; i < end; i++) n += a->live[i] != 0;
    return n;
}

KERNEL(row_count, rows_args) {
    int64_t all;

    (void)sum_before(count_live(&a, own_begin(a.total), own_end(a.total)), &all);
    if (threadIdx.x != 0) return;
    if (a.any) {
        *a.out = all > 0;
        return;
    }
    all = a.step ? (all + a.step - 1) / a.step * a.step : 0;
    if (all == 0) all = a.step;
    *a.out = all < a.total ? all : a.total;
}

/* What is left of the places repeats the last row, as -1 - r. Rows that there is no room for are left out: the plan was
 * made for a guess, and the caller compares it with what RowCount found (ortmodule/engine/row_count_predictor.py). */
KERNEL(row_index, rows_args) {
    const int64_t begin = own_begin(a.total), end = own_end(a.total);
    int64_t found, all, last = 0;

    found = sum_before(count_live(&a, begin, end), &all);
    for (int64_t i = begin; i < end; i++)
        if (a.live[i]) last = i;
    last = largest_of(last);
    for (int64_t i = begin; i < end; i++) {
        if (!a.live[i]) continue;
        if (found < a.room) a.out[found] = i;
        found++;
    }
    for (int64_t i = all + threadIdx.x; i < a.room; i += CHUNKS) a.out[i] = -1 - last;
}

/* 16 bytes, of which a filler is 8 twice. */
typedef struct sixteen {
    uint32_t word[4];
} sixteen;
#define PIECE_OF_SIZE(size, T)                                                                                         \
    DEVICE T read_piece_##size(const void *p, int64_t i) { return ((const T *)p)[i]; }                                 \
    DEVICE void write_piece_##size(void *p, int64_t i, T x) { ((T *)p)[i] = x; }                                       \
    DEVICE T fill_##size(uint64_t x) { return (T)x; }
PIECE_OF_SIZE(1, uint8_t)
PIECE_OF_SIZE(2, uint16_t)
PIECE_OF_SIZE(4, uint32_t)
PIECE_OF_SIZE(8, uint64_t)
DEVICE sixteen read_piece_16(const void *p, int64_t i) {
    sixteen x;
    read_16((const sixteen *)p + i, x.word);
    return x;
}
DEVICE void write_piece_16(void *p, int64_t i, sixteen x) { write_16((sixteen *)p + i, x.word); }
DEVICE sixteen fill_16(uint64_t x) {
    const uint32_t low = (uint32_t)x, high = (uint32_t)(x >> 32);
    const sixteen twice = {{low, high, low, high}};
    return twice;
}

#define PACK(size)                                                                                                     \
    KERNEL(pack_##size, pack_args) {                                                                                   \
        FOR_BLOCKS(i, a.places) {                                                                                      \
            const int64_t listed = a.rows[i], row = listed < 0 ? -1 - listed : listed;                                 \
            const int64_t from = row * a.width, to = i * a.width;                                                      \
            const int fills = listed < 0 && !a.repeat;                                                                 \
            FOR_THREADS(j, a.width)                                                                                    \
            write_piece_##size(a.to, to + j, fills ? fill_##size(a.filler) : read_piece_##size(a.from, from + j));     \
        }                                                                                                              \
    }
PACK(1)
PACK(2)
PACK(4)
PACK(8)
PACK(16)

/* The first place at or behind `row`; rows stand in order, the repetitions behind them. */
DEVICE int64_t place_of(const pack_args *a, int64_t row) {
    int64_t low = 0, high = a->places;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (a->rows[middle] >= 0 && a->rows[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

#define UNPACK(size)                                                                                                   \
    KERNEL(unpack_##size, pack_args) {                                                                                 \
        FOR_BLOCKS(row, a.total) {                                                                                     \
            const int64_t at = place_of(&a, row), to = row * a.width;                                                  \
            const int is_there = at < a.places && a.rows[at] == row;                                                   \
            const int64_t from = (is_there ? at : 0) * a.width;                                                        \
            FOR_THREADS(j, a.width)                                                                                    \
            write_piece_##size(a.to, to + j, is_there ? read_piece_##size(a.from, from + j) : fill_##size(0));         \
        }                                                                                                              \
    }
UNPACK(1)
UNPACK(2)
UNPACK(4)
UNPACK(8)
UNPACK(16)

KERNEL(checked_index, checked_args) {
    FOR_EACH(i, a.count) {
        const int64_t index = integer_at(a.index, a.index_type, i);
        if (index >= a.size || index < (a.from_end ? -a.size : 0)) report(a.fault, FAULT_INDEX, a.node, index, a.size);
        if (a.index_type == I64) ((int64_t *)a.to)[i] = index;
        else ((int32_t *)a.to)[i] = (int32_t)index;
    }
}
#endif
