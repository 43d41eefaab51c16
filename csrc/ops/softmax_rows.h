/* softmax_rows.h -- template of softmax.c: rows of `length` neighbouring elements, and columns side by side. */

#include "ops/exp_rows.h"

/* Rows that lie in a buffer together are worked on together, one step of all after the other: a CPU that waits for the
 * largest of one goes on with the next. The exponentials wait for their sum: in y where that has digits enough, else in
 * the buffer, which takes the widened rows before; a row that does not fit makes them twice. */
SIMD static void NAME(softmax_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->length, fit = n > BUFFER ? 1 : n > BUFFER / ROWS ? BUFFER / n : ROWS;
    A most[ROWS], scale[ROWS];
#if DIGITS < 24
    _Alignas(64) A buffer[BUFFER];
#endif
    for (int64_t row = begin, rows; row < end; row += rows) {
        const T *x = (const T *)j->a + row * n;
        T *y = (T *)j->out + row * n;
        rows = end - row < fit ? end - row : fit;
#if DIGITS < 24
        if (n > BUFFER) {
            scale[0] = (A)(1 / NAME(row_sum_exp)(x, n, most)) / v_raised((A)1);
            NAME(row_exp)(x, n, most[0], 0, scale[0], true, y);
            continue;
        }
        const A *wide = NAME(widened)(x, rows * n, buffer);
        A *e = buffer;
#else
        const A *wide = x;
        A *e = y;
#endif
        for (int64_t r = 0; r < rows; r++) {
            most[r] = -(A)INFINITY;
            LARGEST(n, most[r], wide[r * n + i]);
        }
        for (int64_t r = 0; r < rows; r++) {
            double total = 0;
            SUM_WITH((READ_AHEAD(x + r * n), WRITE_AHEAD(y + r * n)), n, total,
                     e[r * n + i] = v_exp_raised(wide[r * n + i] - most[r]));
            scale[r] = (A)(1 / total);
        }
        for (int64_t r = 0; r < rows; r++) {
            const A *from = e + r * n, factor = scale[r];
            T *to = y + r * n;
            if (isnan(factor)) {
                for (int64_t i = 0; i < n; i++) to[i] = PUT(factor);
                continue;
            }
#pragma omp simd
            for (int64_t i = 0; i < n; i++) to[i] = PUT_FINITE(from[i] * factor);
        }
    }
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
