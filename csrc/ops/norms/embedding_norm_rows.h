/* embedding_norm_rows.h -- serves embedding_norm.c as a template. */

#include "ops/norms/norm_moments.h"

/* Sums are rounded as by the additions one by one. */
SIMD_PART void NAME(add_rows)(const job *j, int64_t row, T *sum) {
    const int64_t n = j->width;
    const T *a = (const T *)j->table[0] + row_of(j, 0, row) * n, *b = (const T *)j->table[1] + row_of(j, 1, row) * n;

#pragma omp simd
    for (int64_t i = 0; i < n; i++) sum[i] = PUT(GET(a[i]) + GET(b[i]));
    for (int t = 2; t < j->tables; t++) {
        const T *next = (const T *)j->table[t] + row_of(j, t, row) * n;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) sum[i] = PUT(GET(sum[i]) + GET(next[i]));
    }
}

SIMD static void NAME(embedding_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->width;
    const bool finite = DIGITS < 24 && NAME(scales_are_finite)(j->scale, j->bias, n);
    for (int64_t row = begin; row < end; row++) {
        T *y = (T *)j->out + row * n, *sum = j->sum ? (T *)j->sum + row * n : y;
        A m, r;

        NAME(add_rows)(j, row, sum);
        NAME(moments)(sum, n, y, true, j->epsilon, &m, &r);
        if (j->means) ((A *)j->means)[row] = m;
        if (j->inverses) ((A *)j->inverses)[row] = r;
        NAME(scale_row)(DT_NONE, finite, sum, n, m, r, j->scale, j->bias, row * n, j->out);
    }
}
