/* softmax_rows.h -- serves softmax.c as a template: rows of `length` neighbouring elements, and columns. */

#include "ops/reductions/softmax_block.h"

SIMD static void NAME(softmax)(const void *x, void *y, int64_t n, int64_t rows, bool safe) {
    NAME(softmax_of)(x, y, n, rows, safe);
}

static void NAME(softmax_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->length;
    NAME(softmax)((const T *)j->a + begin * n, (T *)j->out + begin * n, n, end - begin, false);
}

SIMD static void NAME(log_softmax_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->length;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->a + row * n;
        T *y = (T *)j->out + row * n;
        A most, log_sum = v_log((A)NAME(row_sum_exp)(x, n, &most));
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = PUT(GET(x[i]) - most - log_sum);
    }
}

SIMD static void NAME(softmax_grad_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->length;
    for (int64_t row = begin; row < end; row++) {
        const T *dy = (const T *)j->a + row * n, *y = (const T *)j->b + row * n;
        T *dx = (T *)j->out + row * n;
        double total = 0;
        SUM(n, total, GET(dy[i]) * GET(y[i]));
        const A dot = (A)total;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[i] = PUT(GET(y[i]) * (GET(dy[i]) - dot));
    }
}

SIMD static void NAME(log_softmax_grad_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->length;
    for (int64_t row = begin; row < end; row++) {
        const T *dy = (const T *)j->a + row * n, *y = (const T *)j->b + row * n;
        T *dx = (T *)j->out + row * n;
        double total = 0;
        SUM(n, total, GET(dy[i]));
        const A all = (A)total;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) dx[i] = PUT(GET(dy[i]) - v_exp_below(GET(y[i])) * all);
    }
}

/* --- columns: element i of column k is at [i * stride + k] -------------------------------------------------------- */

static inline void NAME(column_max_sum)(const T *x, int64_t n, int64_t stride, int64_t width, A *most, A *sum) {
    for (int64_t k = 0; k < width; k++) {
        most[k] = -(A)INFINITY;
        sum[k] = 0;
    }
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) {
            A v = GET(x[i * stride + k]);
            most[k] = v > most[k] ? v : most[k];
        }
    for (int64_t i = 0; i < n; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) sum[k] += v_exp_below(GET(x[i * stride + k]) - most[k]);
}

SIMD static void NAME(softmax_columns)(const job *j, int64_t at, int64_t width) {
    const T *x = (const T *)j->a + at;
    T *y = (T *)j->out + at;
    A most[COLUMNS], sum[COLUMNS];

    NAME(column_max_sum)(x, j->length, j->inner, width, most, sum);
    for (int64_t k = 0; k < width; k++) sum[k] = v_raised(sum[k]);
    for (int64_t i = 0; i < j->length; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++)
            y[i * j->inner + k] = PUT(v_exp_raised(GET(x[i * j->inner + k]) - most[k]) / sum[k]);
}

SIMD static void NAME(log_softmax_columns)(const job *j, int64_t at, int64_t width) {
    const T *x = (const T *)j->a + at;
    T *y = (T *)j->out + at;
    A most[COLUMNS], sum[COLUMNS];

    NAME(column_max_sum)(x, j->length, j->inner, width, most, sum);
#pragma omp simd
    for (int64_t k = 0; k < width; k++) sum[k] = v_log(sum[k]);
    for (int64_t i = 0; i < j->length; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) y[i * j->inner + k] = PUT(GET(x[i * j->inner + k]) - most[k] - sum[k]);
}

SIMD static void NAME(softmax_grad_columns)(const job *j, int64_t at, int64_t width) {
    const T *dy = (const T *)j->a + at, *y = (const T *)j->b + at;
    T *dx = (T *)j->out + at;
    A dot[COLUMNS] = {0};

    for (int64_t i = 0; i < j->length; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) dot[k] += GET(dy[i * j->inner + k]) * GET(y[i * j->inner + k]);
    for (int64_t i = 0; i < j->length; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++)
            dx[i * j->inner + k] = PUT(GET(y[i * j->inner + k]) * (GET(dy[i * j->inner + k]) - dot[k]));
}

SIMD static void NAME(log_softmax_grad_columns)(const job *j, int64_t at, int64_t width) {
    const T *dy = (const T *)j->a + at, *y = (const T *)j->b + at;
    T *dx = (T *)j->out + at;
    A all[COLUMNS] = {0};

    for (int64_t i = 0; i < j->length; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) all[k] += GET(dy[i * j->inner + k]);
    for (int64_t i = 0; i < j->length; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++)
            dx[i * j->inner + k] = PUT(GET(dy[i * j->inner + k]) - v_exp_below(GET(y[i * j->inner + k])) * all[k]);
}
