/* softmax_block.h -- serves softmax_rows.h and attention_rows.h as a template: softmax of neighbouring rows. A row of
 * nothing but -∞ is NaN, or zeros if that is `safe`: then nothing is subtracted, and the sum divides nothing. */
#include "ops/reductions/exp_rows.h"

#ifndef ORT_OPS_SOFTMAX_BLOCK_H
#define ORT_OPS_SOFTMAX_BLOCK_H
/* Rows worked on together; elements of rows that a thread keeps. */
enum { SOFTMAX_ROWS = 8, SOFTMAX_BUFFER = 4096 };
#endif

/* Up to SOFTMAX_ROWS rows, one step of all after the other, and what is in lanes is folded for all of them: a CPU that waits
 * for one goes on with the next. The exponentials wait for their sum in e, which may be x, and y if that has digits enough;
 * at last it holds what y is rounded from. `widened`: x is what NAME(widen) made of y's type, with these `tops`; else those
 * are found here. What x comes from, elements of `size` bytes, is asked for ahead. */
SIMD_PART void NAME(softmax_block)(const A *x, A *e, T *y, int64_t n, int64_t rows, bool safe, bool widened,
                                   A (*tops)[LANES], const void *source, int64_t size) {
    const int64_t last = n ? (n - 1) / SUM_BLOCK * SUM_BLOCK : 0; /* block of a row's sum */
    A sums[SOFTMAX_ROWS][LANES], scale[SOFTMAX_ROWS], most[SOFTMAX_ROWS];
    double totals[SOFTMAX_ROWS];

    for (int64_t r = 0; r < rows && !widened; r++) {
        A top[LANES];
        SET_LANES(top, -(A)INFINITY);
        IN_LANES(0, n, top[lane] = LARGER(x[r * n + i], top[lane]));
        SET_LANES(tops[r], top[lane_]);
    }
    for (int64_t r = 0; r < rows; r++) {
        most[r] = largest_lane(tops[r]);
        if (safe && most[r] == -(A)INFINITY) most[r] = 0;
    }
    for (int64_t r = 0; r < rows; r++) {
        const char *next = (const char *)source + r * n * size;
        const A *from = x + r * n, top = most[r];
        A *to = e + r * n, sum[LANES];
#define EXP (to[i] = widened ? EXP_RAISED(from[i] - top) : v_exp_raised(from[i] - top))
#define AHEAD (prefetch_ahead(next + step * size, LANES * size), WRITE_AHEAD(y + r * n))
        totals[r] = 0;
        SUM_WITH(AHEAD, last, totals[r], EXP);
        SET_LANES(sum, 0);
        IN_STEPS(last, n, AHEAD, sum[lane] += EXP);
        SET_LANES(sums[r], sum[lane_]);
#undef EXP
#undef AHEAD
    }
    for (int64_t r = 0; r < rows; r++) {
        const double total = totals[r] + (double)sum_of_lanes(sums[r]);
        scale[r] = (A)(1 / (safe && total == 0 ? 1 : total));
    }
    for (int64_t r = 0; r < rows; r++) {
        const A factor = scale[r];
        A *from = e + r * n;
        T *to = y + r * n;
        if (isnan(factor)) {
            for (int64_t i = 0; i < n; i++) to[i] = PUT(from[i] = factor);
            continue;
        }
#if DIGITS < 24
        if (widened) {
            NAME(narrow)(from, n, factor, to);
            continue;
        }
#endif
#pragma omp simd
        for (int64_t i = 0; i < n; i++) to[i] = PUT_FINITE(from[i] *= factor);
    }
}

#if DIGITS < 24
/* A row that fits into no buffer: exponentials are made twice. */
SIMD_PART void NAME(softmax_long)(const T *x, T *y, int64_t n, bool safe) {
    A most;
    const double total = NAME(row_sum_exp)(x, n, &most);

    if (safe && most == -(A)INFINITY) {
        bool nan = false;
        for (int64_t i = 0; i < n; i++) nan |= isnan(GET(x[i])) != 0;
        for (int64_t i = 0; i < n; i++) y[i] = PUT(nan ? (A)NAN : 0);
        return;
    }
    NAME(row_exp)(x, n, most, 0, (A)(1 / total) / v_raised((A)1), true, y);
}
#endif

/* y may be x. */
SIMD_PART void NAME(softmax_of)(const T *x, T *y, int64_t n, int64_t rows, bool safe) {
    const int64_t fit = n > SOFTMAX_BUFFER ? 1 : n > SOFTMAX_BUFFER / SOFTMAX_ROWS ? SOFTMAX_BUFFER / n : SOFTMAX_ROWS;
    A tops[SOFTMAX_ROWS][LANES];
#if DIGITS < 24
    _Alignas(64) A buffer[SOFTMAX_BUFFER];
#endif
    for (int64_t row = 0, m; row < rows; row += m) {
        const T *from = x + row * n;
        T *to = y + row * n;
        m = rows - row < fit ? rows - row : fit;
#if DIGITS < 24
        if (n > SOFTMAX_BUFFER) {
            NAME(softmax_long)(from, to, n, safe);
            continue;
        }
        for (int64_t r = 0; r < m; r++) NAME(widen)(from + r * n, n, buffer + r * n, tops[r]);
        NAME(softmax_block)(buffer, buffer, to, n, m, safe, true, tops, from, sizeof *from);
#else
        NAME(softmax_block)(from, to, to, n, m, safe, false, tops, from, sizeof *from);
#endif
    }
}
