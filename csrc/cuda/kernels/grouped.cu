/* grouped.cu -- mirrors the products of groups of rows in ops/products/matmul.c: GroupedMatMul and GroupedMatMulOuter.
 *
 * Where groups end is known on the GPU only, and the host does not wait for it: there are as many tiles of results as
 * there can be, and a block finds out which group its tile is of. Tiles are as in matmul.cu, 64 x 64 a block. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct grouped_args {
    const void *a, *b, *ends;
    void *y;
    int64_t rows, groups, m, n, k; /* m: of an outer product; k: of the others */
    int64_t a_row, a_col, b_group, b_row, b_col, ends_step;
    int32_t ends_type;
} grouped_args;

enum { GROUP_SIDE = 64, GROUP_DEPTH = 16, GROUP_THREADS = 256 };

#ifdef ORT_HOST
kernel_fn grouped_cuda, grouped_outer_cuda;

static grouped_args args_of(const call *k) {
    const tensor *a = &k->in[0], *ends = &k->in[2];
    return (grouped_args){.a = a->data,
                          .b = k->in[1].data,
                          .ends = ends->data,
                          .y = k->out[0].data,
                          .rows = a->shape.dim[0],
                          .groups = ends->shape.dim[0],
                          .a_row = a->stride[0],
                          .a_col = a->stride[1],
                          .ends_step = ends->stride[0],
                          .ends_type = ends->type};
}

static int64_t sides(int64_t size) { return (size + GROUP_SIDE - 1) / GROUP_SIDE; }

status grouped_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(grouped);
    const tensor *b = &k->in[1];
    grouped_args a = args_of(k);

    a.k = k->in[0].shape.dim[1];
    a.n = k->out[0].shape.dim[1];
    a.b_group = b->stride[0], a.b_row = b->stride[1], a.b_col = b->stride[2];
    /* The rows behind the last group are one more, of sums of nothing. */
    return cuda_launch(c, k, &kernels[k->out[0].type],
                       geometry_over(a.rows ? (a.rows / GROUP_SIDE + a.groups + 1) * sides(a.n) : 0, 1, GROUP_THREADS),
                       &a);
}

status grouped_outer_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(grouped_outer);
    const tensor *b = &k->in[1];
    grouped_args a = args_of(k);

    a.m = k->in[0].shape.dim[1];
    a.n = b->shape.dim[1];
    a.b_row = b->stride[0], a.b_col = b->stride[1];
    return cuda_launch(c, k, &kernels[k->out[0].type],
                       geometry_over(a.groups * sides(a.m) * sides(a.n), 1, GROUP_THREADS), &a);
}
#endif

#ifdef ORT_DEVICE
/* Where group e ends: not before `begin`, not after the last row. */
DEVICE int64_t group_end(const grouped_args *a, int64_t e, int64_t begin) {
    const int64_t end = integer_at(a->ends, a->ends_type, e * a->ends_step);
    return end < begin ? begin : end > a->rows ? a->rows : end;
}

/* One tile: results [m0, m) x [n0, n) of a product of k terms; element (i, t) of A is a[i * a_i + t * a_t]. */
typedef struct group_tile {
    int64_t m0, m, n0, n, k, a_i, a_t, b_t, b_j;
} group_tile;

#include "cuda/kernels/tensor.h"

#define TEMPLATE "cuda/kernels/grouped.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

#ifdef NARROW
/* A warp has 32 x 16 results: two by two steps. The next terms are on their way while these are multiplied. */
DEVICE void NAME(group_product)(const group_tile *t, const T *a, const T *b, T *y) {
    SHARED(tensor_pair, left, TENSOR_SIDE * TENSOR_LINE);
    SHARED(tensor_pair, right, TENSOR_SIDE * TENSOR_LINE);
    const tensor_operand rows = {a, t->a_i, t->a_t, t->m, t->k}, columns = {b, t->b_j, t->b_t, t->n, t->k};
    const int warp = threadIdx.x / WARP, row = warp / 4 * 32, column = warp % 4 * 16;
    tensor_eight next_a = tensor_fetch(&rows, t->m0, 0), next_b = tensor_fetch(&columns, t->n0, 0);
    float sum[2][2][4];

    for (int e = 0; e < 16; e++) sum[e / 8][e / 4 % 2][e % 4] = 0;
    for (int64_t k = 0; k < t->k; k += TENSOR_DEPTH) {
        __syncthreads(); /* what was there before has been read */
        tensor_stage(left, &rows, next_a);
        tensor_stage(right, &columns, next_b);
        __syncthreads();
        next_a = tensor_fetch(&rows, t->m0, k + TENSOR_DEPTH);
        next_b = tensor_fetch(&columns, t->n0, k + TENSOR_DEPTH);
        UNROLL for (int at = 0; at < TENSOR_DEPTH / 2; at += 8) {
            uint32_t of_rows[2][4], of_columns[2][2];
            UNROLL for (int i = 0; i < 2; i++) tensor_rows(left, row + 16 * i, at, of_rows[i]);
            UNROLL for (int j = 0; j < 2; j++) tensor_columns(right, column + 8 * j, at, of_columns[j]);
            UNROLL for (int e = 0; e < 4; e++) NAME(tensor_add)(sum[e / 2][e % 2], of_rows[e / 2], of_columns[e % 2]);
        }
    }
    UNROLL for (int e = 0; e < 16; e++) {
        const int64_t m = t->m0 + row + 16 * (e / 8) + 8 * (e / 2 % 2) + threadIdx.x % WARP / 4;
        const int64_t n = t->n0 + column + 8 * (e / 4 % 2) + 2 * (threadIdx.x % 4) + e % 2;
        if (m < t->m && n < t->n) y[m * t->n + n] = PUT(sum[e / 8][e / 4 % 2][e % 4]);
    }
}
#else
DEVICE void NAME(group_product)(const group_tile *t, const T *a, const T *b, T *y) {
    SHARED(A, left, GROUP_DEPTH * (GROUP_SIDE + 1));
    SHARED(A, right, GROUP_DEPTH * (GROUP_SIDE + 1));
    const int r = threadIdx.x / 16, s = threadIdx.x % 16;
    A sum[4][4];

    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) sum[i][j] = 0;
    for (int64_t k0 = 0; k0 < t->k; k0 += GROUP_DEPTH) {
        __syncthreads(); /* what was there before has been read */
        for (int e = threadIdx.x; e < GROUP_DEPTH * GROUP_SIDE; e += GROUP_THREADS) {
            /* Neighbouring threads read along whichever stride is 1. */
            const int ka = t->a_t == 1 ? e % GROUP_DEPTH : e / GROUP_SIDE;
            const int ma = t->a_t == 1 ? e / GROUP_DEPTH : e % GROUP_SIDE;
            const int kb = t->b_j == 1 ? e / GROUP_SIDE : e % GROUP_DEPTH;
            const int nb = t->b_j == 1 ? e % GROUP_SIDE : e / GROUP_DEPTH;
            left[ka * (GROUP_SIDE + 1) + ma] =
                t->m0 + ma < t->m && k0 + ka < t->k ? GET(a[(t->m0 + ma) * t->a_i + (k0 + ka) * t->a_t]) : 0;
            right[kb * (GROUP_SIDE + 1) + nb] =
                t->n0 + nb < t->n && k0 + kb < t->k ? GET(b[(k0 + kb) * t->b_t + (t->n0 + nb) * t->b_j]) : 0;
        }
        __syncthreads();
        for (int k = 0; k < GROUP_DEPTH; k++)
            for (int i = 0; i < 4; i++)
                for (int j = 0; j < 4; j++)
                    sum[i][j] += left[k * (GROUP_SIDE + 1) + r + 16 * i] * right[k * (GROUP_SIDE + 1) + s + 16 * j];
    }
    for (int i = 0; i < 4; i++)
        for (int j = 0; j < 4; j++) {
            const int64_t m = t->m0 + r + 16 * i, n = t->n0 + s + 16 * j;
            if (m < t->m && n < t->n) y[m * t->n + n] = PUT(sum[i][j]);
        }
}
#endif

KERNEL(NAME(grouped), grouped_args) {
    const int64_t across = (a.n + GROUP_SIDE - 1) / GROUP_SIDE;

    FOR_BLOCKS(tile, (a.rows / GROUP_SIDE + a.groups + 1) * across) {
        group_tile t = {0, 0, tile % across * GROUP_SIDE, a.n, a.k, a.a_row, a.a_col, a.b_row, a.b_col};
        int64_t begin = 0, before = 0, e = 0;
        for (;; e++) {
            const int64_t end = e < a.groups ? group_end(&a, e, begin) : a.rows;
            const int64_t down = (end - begin + GROUP_SIDE - 1) / GROUP_SIDE;
            t.m0 = begin + (tile / across - before) * GROUP_SIDE;
            t.m = end;
            if (tile / across < before + down || e == a.groups) break;
            before += down;
            begin = end;
        }
        if (t.m0 >= t.m) continue; /* there are fewer tiles than there could be */
        if (e == a.groups) t.k = 0;
        NAME(group_product)(&t, (const T *)a.a, (const T *)a.b + (t.k ? e * a.b_group : 0), (T *)a.y);
    }
}

KERNEL(NAME(grouped_outer), grouped_args) {
    const int64_t down = (a.m + GROUP_SIDE - 1) / GROUP_SIDE, across = (a.n + GROUP_SIDE - 1) / GROUP_SIDE;

    FOR_BLOCKS(tile, a.groups * down * across) {
        const int64_t e = tile / (down * across);
        int64_t begin = 0, end = 0;
        for (int64_t g = 0; g <= e; g++) {
            begin = end;
            end = group_end(&a, g, begin);
        }
        const group_tile t = {tile / across % down * GROUP_SIDE,
                              a.m,
                              tile % across * GROUP_SIDE,
                              a.n,
                              end - begin,
                              a.a_col,
                              a.a_row,
                              a.b_row,
                              a.b_col};
        NAME(group_product)(&t, (const T *)a.a + begin * a.a_row, (const T *)a.b + begin * a.b_row,
                            (T *)a.y + e * a.m * a.n);
    }
}
#endif
