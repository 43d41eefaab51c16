/* matmul.cu -- mirrors ops/products/matmul.c: cuBLASLt where it takes the product, else a kernel for every type,
 * stride and device: 64 x 64 results a block, 4 x 4 a thread, operands through shared memory. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct product_args {
    const void *a, *b, *c; /* c: added, broadcast to y; may be absent */
    void *y;
    int64_t m, n, k;
    int64_t a_row, a_col, b_row, b_col, c_row, c_col, y_row;
    int64_t pairs, batch[8], a_step[8], b_step[8], c_step[8]; /* y's pairs lie one after the other */
    int32_t n_batch, wide;                                    /* y is float32 */
    double alpha;
} product_args;

enum { SIDE = 64, DEPTH = 16, THREADS = 256 };

#ifdef ORT_HOST
#include "cuda/kernels/move.h"
#include "cuda/kernels/product.h"
#include "cuda/libraries/blas.h"
#include "ops/products/matmul.h"

kernel_fn matmul_cuda, matmul_add_cuda;
size_t matmul_cuda_workspace(const node *n);

/* What is added to y, seen with y's shape; absent: no type. */
static tensor added_of(const call *k) {
    if (k->n_in < 3 || !tensor_present(&k->in[2])) return (tensor){.type = DT_NONE};
    return tensor_expand(&k->in[2], &k->out[0].shape);
}

/* The same numbers for every row. */
static bool is_vector(const call *k, const tensor *t) {
    const int last = t->shape.rank - 1;
    if (k->in[1].shape.rank == 1) return false; /* y has no columns */
    for (int i = 0; i < last; i++)
        if (t->stride[i] != 0 && t->shape.dim[i] != 1) return false;
    return last >= 0 && (t->stride[last] == 1 || t->shape.dim[last] == 1);
}

/* What the library cannot add as it lies it finds in y. */
static status product_by_library(ctx *c, const call *k, const gemm *g, const tensor *added, bool *done) {
    addend plus = {.kind = ADD_NOTHING};

    if (added->type != DT_NONE) {
        plus = (addend){is_vector(k, added) ? ADD_VECTOR : ADD_MATRIX, added->data};
        if (plus.kind == ADD_VECTOR || tensor_contiguous(added)) {
            TRY(blas_product(c, k, g, &plus, done));
            if (*done) return OK;
        }
        TRY(cuda_copy(c, k, &k->out[0], added));
        plus = (addend){ADD_MATRIX, k->out[0].data};
    }
    return blas_product(c, k, g, &plus, done);
}

static product_args args_of(const gemm *g) {
    product_args p = {.a = g->a, .b = g->b, .y = g->c, .m = g->m, .n = g->n, .k = g->k, .alpha = g->alpha};

    p.wide = g->wide_c;
    p.pairs = gemm_pairs(g);
    p.n_batch = g->n_batch;
    p.a_row = g->a_row, p.a_col = g->a_col, p.b_row = g->b_row, p.b_col = g->b_col;
    p.y_row = g->m == 1 ? g->n : g->c_row;
    for (int i = 0; i < g->n_batch; i++) {
        p.batch[i] = g->batch[i];
        p.a_step[i] = g->a_step[i];
        p.b_step[i] = g->b_step[i];
    }
    return p;
}

static status run_kernel(ctx *c, const call *k, const gemm *g, const product_args *p) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(product);
    const int64_t tiles = p->pairs * ((p->m + SIDE - 1) / SIDE) * ((p->n + SIDE - 1) / SIDE);
    return cuda_launch(c, k, &kernels[g->type], geometry_over(tiles, 1, THREADS), p);
}

static status product_by_kernel(ctx *c, const call *k, const gemm *g, const tensor *added) {
    product_args p = args_of(g);

    if (added->type != DT_NONE) {
        int at = g->n_batch; /* y's dimensions after those: its rows and columns, where operands are not vectors */
        p.c = added->data;
        for (int i = 0; i < at; i++) p.c_step[i] = added->stride[i];
        if (k->in[0].shape.rank > 1) p.c_row = added->stride[at++];
        if (k->in[1].shape.rank > 1) p.c_col = added->stride[at];
    }
    return run_kernel(c, k, g, &p);
}

status cuda_product(ctx *c, const call *k, const gemm *g) {
    const addend plus = {g->beta == 0 ? ADD_NOTHING : ADD_MATRIX, g->c};
    product_args p = args_of(g);
    bool done;

    TRY(blas_product(c, k, g, &plus, &done));
    if (done) return OK;
    if (g->beta != 0) p.c = g->c, p.c_row = p.y_row, p.c_col = 1;
    return run_kernel(c, k, g, &p);
}

status matmul_cuda(ctx *c, const call *k) {
    const gemm g = matmul_gemm(k);
    const tensor added = added_of(k);
    bool done;

    if (!dtype_is_float(g.type))
        return fail(c, E_UNSUPPORTED, "%s of %s has no CUDA kernel", k->node->op->name, dtype_name(g.type));
    TRY(product_by_library(c, k, &g, &added, &done));
    return done ? OK : product_by_kernel(c, k, &g, &added);
}

/* MatMulAdd: the sum comes first, which may lie where the result does. */
status matmul_add_cuda(ctx *c, const call *k) {
    const tensor in[] = {k->in[1], k->in[2], k->in[0]};
    call product = *k;

    product.in = in;
    return matmul_cuda(c, &product);
}

size_t matmul_cuda_workspace(const node *n) { return blas_workspace(shape_count(&n->out[0]->shape)); }
#endif

#ifdef ORT_DEVICE
#define TEMPLATE "cuda/kernels/matmul.cu"
#include "cuda/kernels/each_float.h"
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
                const int64_t at_y = (pair * a.m + m) * a.y_row + n, from = at_c + m * a.c_row + n * a.c_col;
                if (a.c) v += a.wide ? (A)((const float *)a.c)[from] : GET(((const T *)a.c)[from]);
                if (a.wide) ((float *)a.y)[at_y] = (float)v;
                else ((T *)a.y)[at_y] = PUT(v);
            }
    }
}
#endif
