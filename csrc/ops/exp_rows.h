/* exp_rows.h -- template of softmax_rows.h and loss_rows.h: what both do with the exponentials of a row.
 *
 * Rows of 16-bit floats are widened by blocks, and rounded by blocks: a loop that does more than one of that and an
 * exponential keeps nothing in registers. */

/* For each block of a row of n: `from`, its length `m`, and x[from, from + m) as A in `e`. */
#define EACH_BLOCK(n, x)                                                                                               \
    A room_[SUM_BLOCK];                                                                                                \
    const A *e;                                                                                                        \
    for (int64_t from = 0, m; from < (n) && (m = (n) - from < SUM_BLOCK ? (n) - from : SUM_BLOCK,                      \
                                            e = NAME(widened)((x) + from, m, room_), true);                            \
         from += m)

SIMD_PART const A *NAME(widened)(const T *x, int64_t n, A *room) {
#if DIGITS < 24
#pragma omp simd
    for (int64_t i = 0; i < n; i++) room[i] = GET(x[i]);
    return room;
#else
    return (void)n, (void)room, x;
#endif
}

SIMD_PART A NAME(row_max)(const T *x, int64_t n) {
    A most = -(A)INFINITY;
    EACH_BLOCK(n, x) {
#pragma omp simd reduction(max : most)
        for (int64_t i = 0; i < m; i++) most = e[i] > most ? e[i] : most;
    }
    return most;
}

SIMD_PART double NAME(row_sum_exp)(const T *x, int64_t n, A most) {
    double total = 0;
    EACH_BLOCK(n, x) SUM(m, total, v_exp(e[i] - most));
    return total;
}

/* y = exp(x - high - low) scale; y may be x */
SIMD_PART void NAME(row_exp)(const T *x, int64_t n, A high, A low, A scale, T *y) {
#if DIGITS < 24
    A made[SUM_BLOCK];
    EACH_BLOCK(n, x) {
#pragma omp simd
        for (int64_t i = 0; i < m; i++) made[i] = v_exp(e[i] - high - low) * scale;
#pragma omp simd
        for (int64_t i = 0; i < m; i++) y[from + i] = PUT(made[i]);
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = v_exp(x[i] - high - low) * scale;
#endif
}

#undef EACH_BLOCK
