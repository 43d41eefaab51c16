/* attention_rows.h -- template of attention.c: the two steps of MaskedSoftmax, for a row. y may be x. */
#if DIGITS == 53
#define BITS uint64_t
#elif DIGITS == 24
#define BITS uint32_t
#else
#define BITS uint16_t
#endif

/* y = x where it is allowed, -∞ elsewhere; nothing is without a mask. Written with bits, because a choice would become
 * branches, and those depend on data. */
SIMD static void NAME(hide_row)(const void *x, const uint8_t *allowed, void *y, int64_t n) {
    typedef BITS bits __attribute__((may_alias));
    const T infinity = PUT(-(A)INFINITY);
    const bits *from = x, hidden = *(const bits *)&infinity;
    bits *to = y;

    if (!allowed) {
        for (int64_t i = 0; i < n; i++) to[i] = hidden;
        return;
    }
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        bits shown = (bits)(0 - (bits)(allowed[i] != 0));
        to[i] = (bits)((from[i] & shown) | (hidden & (bits)~shown));
    }
}

/* The exponentials of -∞ are the zeros that are wanted, unless there is nothing else: then nothing is subtracted, so
 * that they are 0 and not NaN, and their sum divides nothing. */
SIMD static void NAME(softmax_row)(const void *scores, void *weights, int64_t n) {
    const T *x = scores;
    T *y = weights;
    A most = -(A)INFINITY, scale;
    double total = 0;

    LARGEST(n, most, GET(x[i]));
    if (most == -(A)INFINITY) most = 0;
#if DIGITS < 24
    SUM(n, total, v_exp_raised(GET(x[i]) - most));
    scale = (A)(1 / (total == 0 ? 1 : total));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = PUT(v_exp_raised(GET(x[i]) - most) * scale);
#else
    SUM(n, total, y[i] = v_exp_raised(x[i] - most));
    scale = (A)(1 / (total == 0 ? 1 : total));
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] *= scale;
#endif
}

#undef BITS
