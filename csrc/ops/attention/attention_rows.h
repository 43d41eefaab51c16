/* attention_rows.h -- serves attention.c as a template: hides elements of rows, and stores softmaxes in 16 bits. */
#include "ops/reductions/softmax_block.h"

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

#if DIGITS < 24
SIMD static void NAME(round)(const float *x, void *to, int64_t n) {
    T *y = to;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = PUT(x[i]);
}

/* Of float32, with the exponentials in `room`. */
SIMD static void NAME(narrow_softmax)(const float *x, float *room, void *y, int64_t n, int64_t rows, bool safe) {
    for (int64_t row = 0; row < rows; row += SOFTMAX_ROWS) {
        const int64_t m = rows - row < SOFTMAX_ROWS ? rows - row : SOFTMAX_ROWS;
        const float *from = x + row * n;
        float tops[SOFTMAX_ROWS][LANES];
        NAME(softmax_block)(from, room + row * n, (T *)y + row * n, n, m, safe, false, tops, from, sizeof *from);
    }
}

/* The gradient of rows, in float32 or rounded. */
#define SLOPE(name, R, put)                                                                                            \
    SIMD static void NAME(name)(const float *dy, const void *weights, void *to, int64_t n, int64_t rows) {             \
        for (int64_t row = 0; row < rows; row++, dy += n) {                                                            \
            const T *y = (const T *)weights + row * n;                                                                 \
            R *dx = (R *)to + row * n;                                                                                 \
            double total = 0;                                                                                          \
            SUM(n, total, dy[i] * GET(y[i]));                                                                          \
            const float dot = (float)total;                                                                            \
            _Pragma("omp simd") for (int64_t i = 0; i < n; i++) dx[i] = put(GET(y[i]) * (dy[i] - dot));                \
        }                                                                                                              \
    }
SLOPE(wide_slope, float, )
SLOPE(narrow_slope, T, PUT)
#undef SLOPE
#endif

#undef BITS
