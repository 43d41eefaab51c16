/* rotary.cu -- mirrors ops/attention/rotary.c: pairs of elements, one from each half of a row, turned. A thread has
 * ROW_PIECE neighbouring pairs where these can be read and written in pieces, else one. */
#ifndef T
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct rotary_args {
    const void *in[3]; /* x, cos, sin */
    void *y;
    int64_t rows, half, dim[8], stride[3][8], step[3]; /* the rows' dimensions, and strides along them; along a row */
    int32_t rank, inverse, angles, type, pieces;       /* angles, type: of cos and sin, and of y */
} rotary_args;

#ifdef ORT_HOST
kernel_fn rotary_cuda;

enum { ALIGNED = 16 };

static bool is_aligned(const void *p, int64_t stride, dtype type) {
    return (uintptr_t)p % ALIGNED == 0 && stride * (int64_t)dtype_size(type) % ALIGNED == 0;
}

static bool in_pieces(const rotary_args *a, const call *k) {
    const int64_t half = a->half;

    if (half % ROW_PIECE || !is_aligned(a->y, half, k->out[0].type)) return false;
    for (int i = 0; i < 3; i++) {
        const dtype type = k->in[i].type;
        if (a->step[i] != 1 || !is_aligned(a->in[i], half, type)) return false;
        for (int d = 0; d < a->rank; d++)
            if (a->dim[d] > 1 && !is_aligned(a->in[i], a->stride[i][d], type)) return false;
    }
    return true;
}

status rotary_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(rotary);
    const shape *s = &k->out[0].shape;
    const int last = s->rank - 1;
    rotary_args a = {.y = k->out[0].data, .rank = last, .half = s->dim[last] / 2, .rows = shape_span(s, 0, last)};

    a.inverse = node_int(k->node, "inverse") != 0;
    a.angles = k->in[1].type;
    a.type = k->out[0].type;
    for (int d = 0; d < last; d++) a.dim[d] = s->dim[d];
    for (int i = 0; i < 3; i++) {
        const tensor t = tensor_expand(&k->in[i], s);
        a.in[i] = t.data;
        a.step[i] = t.stride[last];
        for (int d = 0; d < last; d++) a.stride[i][d] = t.stride[d];
    }
    a.pieces = in_pieces(&a, k);
    const int64_t pairs = a.rows * a.half;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_over(a.pieces ? pairs / ROW_PIECE : pairs, 256, 256),
                       &a);
}
#endif

#ifdef ORT_DEVICE
/* Where a row begins in each operand. */
DEVICE void find_row(const rotary_args *a, int64_t row, int64_t at[3]) {
    at[0] = at[1] = at[2] = 0;
    for (int d = a->rank - 1; d >= 0; d--) {
        const int64_t next = quotient(row, a->dim[d]), index = row - next * a->dim[d];
        row = next;
        UNROLL for (int o = 0; o < 3; o++) at[o] += index * a->stride[o][d];
    }
}

#define TEMPLATE "cuda/kernels/rotary.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

/* A pair of x, of cosines and of sines. */
DEVICE void NAME(turn)(const A low[3], const A high[3], int inverse, A *first, A *second) {
    *first = inverse ? low[0] * low[1] + high[0] * high[2] : low[0] * low[1] - high[0] * low[2];
    *second = inverse ? high[0] * high[1] - low[0] * low[2] : high[0] * high[1] + low[0] * high[2];
}

/* AT_ONCE pairs from i on. */
DEVICE void NAME(turn_pieces)(const rotary_args *a, const int64_t at[3], int64_t y, int64_t i) {
    A low[3][AT_ONCE], high[3][AT_ONCE], first[AT_ONCE], second[AT_ONCE];

    UNROLL for (int o = 0; o < 3; o++) {
        const int type = o ? a->angles : TYPE;
        READ_PIECE(a->in[o], type, at[o] + i, low[o]);
        READ_PIECE(a->in[o], type, at[o] + i + a->half, high[o]);
    }
    UNROLL for (int j = 0; j < AT_ONCE; j++) {
        const A l[3] = {low[0][j], low[1][j], low[2][j]}, h[3] = {high[0][j], high[1][j], high[2][j]};
        NAME(turn)(l, h, a->inverse, first + j, second + j);
    }
    WRITE_PIECE(a->y, a->type, y + i, first);
    WRITE_PIECE(a->y, a->type, y + i + a->half, second);
}

DEVICE void NAME(turn_pair)(const rotary_args *a, const int64_t at[3], int64_t y, int64_t i) {
    A low[3], high[3], first, second;

    UNROLL for (int o = 0; o < 3; o++) {
        const int type = o ? a->angles : TYPE;
        low[o] = NUMBER_AT(a->in[o], type, at[o] + i * a->step[o]);
        high[o] = NUMBER_AT(a->in[o], type, at[o] + (i + a->half) * a->step[o]);
    }
    NAME(turn)(low, high, a->inverse, &first, &second);
    set_number(a->y, a->type, y + i, first);
    set_number(a->y, a->type, y + i + a->half, second);
}

KERNEL(NAME(rotary), rotary_args) {
    const int64_t each = a.pieces ? AT_ONCE : 1, of_row = a.pieces ? quotient(a.half, AT_ONCE) : a.half;

    FOR_EACH(n, a.rows * of_row) {
        const int64_t row = quotient(n, of_row), i = (n - row * of_row) * each;
        int64_t at[3];

        find_row(&a, row, at);
        if (a.pieces) NAME(turn_pieces)(&a, at, row * 2 * a.half, i);
        else NAME(turn_pair)(&a, at, row * 2 * a.half, i);
    }
}
#endif
