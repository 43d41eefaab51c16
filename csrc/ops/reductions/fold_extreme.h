/* fold_extreme.h -- serves reduce_fold.c as a template: FOLD, max or min, in one class, in all of its forms.
 *
 * BEATS is > or <. A NaN wins, and stays. NaNs of a tile are counted in an N. */

#define IS_NAN(x) ((x) != (x)) /* never of an integer, about which compilers warn elsewhere */

SIMD static void NAME(rows)(void *acc, const void *from, int64_t n, const void *shift) {
    const C *p = from;
    A *total = acc;
    C t = p[0];
    N nans = 0;
    (void)shift;
#pragma omp simd reduction(FOLD : t) reduction(+ : nans)
    for (int64_t i = 0; i < n; i++) {
        nans += p[i] != p[i];
        t = p[i] BEATS t ? p[i] : t;
    }
    const A tile = nans ? (A)NAN : (A)t, old = *total;
    *total = tile BEATS old || IS_NAN(tile) ? tile : old;
}

SIMD static void NAME(columns)(void *acc, const void *from, int64_t n, const void *shift) {
    const C *p = from;
    A *total = acc;
    (void)shift;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        A x = (A)p[i], t = total[i];
        total[i] = x BEATS t || IS_NAN(x) ? x : t;
    }
}

SIMD static void NAME(lines)(void *acc, const void *from, int64_t n, int64_t stride, const void *shift) {
    const C *p = from;
    A *total = acc;
    (void)shift;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        const C x = p[i], y = p[i + stride], z = p[i + 2 * stride], w = p[i + 3 * stride];
        const C first = x BEATS y ? x : y, second = z BEATS w ? z : w;
        const int nans = IS_NAN(x) | IS_NAN(y) | IS_NAN(z) | IS_NAN(w);
        const A four = nans ? (A)NAN : (A)(first BEATS second ? first : second), t = total[i];
        total[i] = (four BEATS t) | IS_NAN(four) ? four : t;
    }
}

SIMD static void NAME(short)(void *acc, const void *from, int64_t n, int64_t length, const void *shift) {
    const C *p = from;
    A *total = acc;
    (void)shift;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        A t = total[i];
        for (int64_t k = 0; k < length; k++) {
            const A x = (A)p[i * length + k];
            t = x BEATS t || IS_NAN(x) ? x : t;
        }
        total[i] = t;
    }
}

#undef IS_NAN
