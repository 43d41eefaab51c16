/* matmul.cu -- twin of ops/matmul.c, and the product that is there for every type, stride and device: 64 x 64 results a
 * block, 4 x 4 a thread, operands through shared memory. cuBLASLt takes the products it can take before it. */
#ifndef T
#include "cuda/kernel.h"

typedef struct product_args {
    const void *a, *b, *c; /* c: added, broadcast to y; may be absent */
    void *y;
    int64_t m, n, k;
    int64_t a_row, a_col, b_row, b_col, c_row, c_col;
    int64_t pairs, batch[8], a_step[8], b_step[8], c_step[8]; /* y lies densely */
    int32_t n_batch;
    double alpha;
} product_args;

enum { SIDE = 64, DEPTH = 16, THREADS = 256 };

#ifdef ORT_HOST
kernel_fn matmul_cuda;

/* The strides of `t`'s batch dimensions and of its matrix, seen from the result's. */
static void strides_of(const tensor *t, int n_batch, int64_t step[8]) {
    const int matrix = t->shape.rank > 1 ? 2 : t->shape.rank;
    for (int i = n_batch - 1, d = t->shape.rank - matrix - 1; i >= 0; i--, d--)
        step[i] = d < 0 || t->shape.dim[d] == 1 ? 0 : t->stride[d];
}

status matmul_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(product);
    const tensor *a = &k->in[0], *b = &k->in[1], *y = &k->out[0];
    const bool row = a->shape.rank == 1, column = b->shape.rank == 1;
    const int a_last = a->shape.rank - 1, b_last = b->shape.rank - 1;
    product_args p = {.a = a->data, .b = b->data, .y = y->data, .alpha = 1, .pairs = 1};

    if (!dtype_is_float(y->type))
        return fail(c, E_UNSUPPORTED, "%s of %s has no CUDA kernel", k->node->op->name, dtype_name(y->type));
    p.n_batch = y->shape.rank - !row - !column;
    if (node_attr(k->node, "alpha")) p.alpha = node_float(k->node, "alpha");
    p.m = row ? 1 : a->shape.dim[a_last - 1];
    p.n = column ? 1 : b->shape.dim[b_last];
    p.k = a->shape.dim[a_last];
    p.a_row = row ? 0 : a->stride[a_last - 1];
    p.a_col = a->stride[a_last];
    p.b_row = column ? b->stride[0] : b->stride[b_last - 1];
    p.b_col = column ? 0 : b->stride[b_last];
    strides_of(a, p.n_batch, p.a_step);
    strides_of(b, p.n_batch, p.b_step);
    for (int i = 0; i < p.n_batch; i++) p.pairs *= p.batch[i] = y->shape.dim[i];
    if (k->n_in > 2 && tensor_present(&k->in[2])) {
        tensor added = tensor_expand(&k->in[2], &y->shape);
        p.c = added.data;
        for (int i = 0; i < p.n_batch; i++) p.c_step[i] = added.stride[i];
        if (!row) p.c_row = added.stride[p.n_batch];
        if (!column) p.c_col = added.stride[y->shape.rank - 1];
    }
    int64_t tiles = p.pairs * ((p.m + SIDE - 1) / SIDE) * ((p.n + SIDE - 1) / SIDE);
    return cuda_launch(c, k, &kernels[y->type], geometry_over(tiles, 1, THREADS), &p);
}
#endif

#ifdef ORT_DEVICE
#define TEMPLATE "cuda/matmul.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(product), product_args) {
    SHARED(A, left, DEPTH * (SIDE + 1));
    SHARED(A, right, DEPTH * (SIDE + 1));
    const int64_t down = (a.m + SIDE - 1) / SIDE, across = (a.n + SIDE - 1) / SIDE;
    const int r = threadIdx.x / 16, s = threadIdx.x % 16;

    FOR_BLOCKS(tile, a.pairs * down * across) {
        const int64_t pair = tile / (down * across), m0 = tile / across % down * SIDE, n0 = tile % across * SIDE;
        int64_t rest = pair, at_a = 0, at_b = 0, at_c = 0;
        A sum[4][4];

        for (int d = a.n_batch - 1; d >= 0; d--) {
            const int64_t i = rest % a.batch[d];
            rest /= a.batch[d];
            at_a += i * a.a_step[d];
            at_b += i * a.b_step[d];
            at_c += i * a.c_step[d];
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) sum[i][j] = 0;
        for (int64_t k0 = 0; k0 < a.k; k0 += DEPTH) {
            for (int e = threadIdx.x; e < DEPTH * SIDE; e += THREADS) {
                /* Neighbouring threads read along whichever stride is 1. */
                const int ka = a.a_col == 1 ? e % DEPTH : e / SIDE, ma = a.a_col == 1 ? e / DEPTH : e % SIDE;
                const int kb = a.b_col == 1 ? e / SIDE : e % DEPTH, nb = a.b_col == 1 ? e % SIDE : e / DEPTH;
                left[ka * (SIDE + 1) + ma] =
                    m0 + ma < a.m && k0 + ka < a.k
                        ? GET(((const T *)a.a)[at_a + (m0 + ma) * a.a_row + (k0 + ka) * a.a_col])
                        : 0;
                right[kb * (SIDE + 1) + nb] =
                    n0 + nb < a.n && k0 + kb < a.k
                        ? GET(((const T *)a.b)[at_b + (k0 + kb) * a.b_row + (n0 + nb) * a.b_col])
                        : 0;
            }
            __syncthreads();
            for (int k = 0; k < DEPTH; k++)
                for (int i = 0; i < 4; i++)
                    for (int j = 0; j < 4; j++)
                        sum[i][j] += left[k * (SIDE + 1) + r + 16 * i] * right[k * (SIDE + 1) + s + 16 * j];
            __syncthreads();
        }
        for (int i = 0; i < 4; i++)
            for (int j = 0; j < 4; j++) {
                const int64_t m = m0 + r + 16 * i, n = n0 + s + 16 * j;
                if (m >= a.m || n >= a.n) continue;
                A v = (A)a.alpha * sum[i][j];
                if (a.c) v += GET(((const T *)a.c)[at_c + m * a.c_row + n * a.c_col]);
                ((T *)a.y)[(pair * a.m + m) * a.n + n] = PUT(v);
            }
    }
}
#endif
