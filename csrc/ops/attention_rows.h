/* attention_rows.h -- template of attention.c: one row of MaskedSoftmax. */

/* `masked` is a constant where this is inlined. Without a largest element nothing is subtracted, so that the
 * exponentials are 0 and not NaN, and their sum divides nothing. */
static inline void NAME(softmax_row)(const T *x, const uint8_t *allowed, T *y, int64_t n, const bool masked) {
#define ALLOWED(i) (!masked || allowed[i])
    A most = -(A)INFINITY, scale;
    double total = 0;

#pragma omp simd reduction(max : most)
    for (int64_t i = 0; i < n; i++) {
        A v = ALLOWED(i) ? GET(x[i]) : -(A)INFINITY;
        most = v > most ? v : most;
    }
    if (most == -(A)INFINITY) most = 0;
#if DIGITS < 24
    SUM(n, total, ALLOWED(i) ? v_exp(GET(x[i]) - most) : 0);
    scale = (A)(1 / (total == 0 ? 1 : total));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = ALLOWED(i) ? PUT(v_exp(GET(x[i]) - most) * scale) : PUT((A)0);
#else
    SUM(n, total, y[i] = ALLOWED(i) ? v_exp(x[i] - most) : 0);
    scale = (A)(1 / (total == 0 ? 1 : total));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = ALLOWED(i) ? y[i] * scale : 0;
#endif
#undef ALLOWED
}

SIMD static void NAME(open_row)(const void *x, const uint8_t *allowed, void *y, int64_t n) {
    NAME(softmax_row)(x, allowed, y, n, false);
}

SIMD static void NAME(masked_row)(const void *x, const uint8_t *allowed, void *y, int64_t n) {
    NAME(softmax_row)(x, allowed, y, n, true);
}
