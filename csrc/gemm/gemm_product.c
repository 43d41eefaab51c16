/* gemm_product.c -- reads a product's strides: where its pairs lie, which batches are one, what BLAS can take. */
#include "gemm/gemm_product.h"

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

void gemm_drop_batch(gemm *g, int i) {
    for (g->n_batch--; i < g->n_batch; i++) {
        g->batch[i] = g->batch[i + 1];
        g->a_step[i] = g->a_step[i + 1];
        g->b_step[i] = g->b_step[i + 1];
        g->c_step[i] = g->c_step[i + 1];
    }
}

void gemm_simplify(gemm *g) {
    for (int i = g->n_batch - 1; i >= 0; i--) {
        if (g->batch[i] == 1) {
            gemm_drop_batch(g, i);
        } else if (i + 1 < g->n_batch && g->a_step[i] == g->batch[i + 1] * g->a_step[i + 1] &&
                   g->b_step[i] == g->batch[i + 1] * g->b_step[i + 1] &&
                   g->c_step[i] == g->batch[i + 1] * g->c_step[i + 1]) {
            g->batch[i + 1] *= g->batch[i];
            gemm_drop_batch(g, i);
        }
    }
    for (int i = g->n_batch - 1; i >= 0; i--) {
        if (g->m == 1) { /* one row has no stride of its own */
            g->a_row = g->a_step[i];
            g->c_row = g->c_step[i];
        }
        if (g->b_step[i] != 0 || g->a_step[i] != g->m * g->a_row || g->c_step[i] != g->m * g->c_row) break;
        g->m *= g->batch[i];
        gemm_drop_batch(g, i);
    }
}
