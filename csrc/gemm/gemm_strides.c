/* gemm_strides.c -- what the strides of a product say: where its pairs lie, and whether BLAS can take a matrix. */
#include "gemm/gemm.h"

#include <limits.h>

gemm_offsets gemm_batch_at(const gemm *g, int64_t index) {
    gemm_offsets at = {0, 0, 0};
    for (int i = g->n_batch - 1; i >= 0; i--) {
        int64_t x = index % g->batch[i];
        index /= g->batch[i];
        at.a += x * g->a_step[i];
        at.b += x * g->b_step[i];
        at.c += x * g->c_step[i];
    }
    return at;
}

int64_t gemm_pairs(const gemm *g) {
    int64_t n = 1;
    for (int i = 0; i < g->n_batch; i++) n *= g->batch[i];
    return n;
}

bool gemm_as_stored(int64_t rows, int64_t cols, int64_t row, int64_t col, gemm_stored *out) {
    bool wide = cols == 1 || col == 1, tall = rows == 1 || row == 1;

    if (wide && (rows == 1 || row >= cols)) *out = (gemm_stored){'N', rows == 1 ? cols : row};
    else if (tall && (cols == 1 || col >= rows)) *out = (gemm_stored){'T', cols == 1 ? rows : col};
    else return false;
    return out->ld <= INT_MAX && rows <= INT_MAX && cols <= INT_MAX;
}
