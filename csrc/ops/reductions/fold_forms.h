/* fold_forms.h -- serves reduce_fold.c as a template: a fold in one class, in all of its forms.
 *
 * STEP makes the new total from the old one `t`, the element `x` and the shift `s`, if it is SHIFTED; OP puts two totals
 * together, of which UNIT is the neutral one. */

#define SHIFT(i) (SHIFTED ? ((const U *)shift)[i] : 0)

SIMD static void NAME(rows)(void *acc, const void *from, int64_t n, const void *shift) {
    const C *p = from;
    U *total = acc;
    L t = UNIT;
    const U s = SHIFT(0);
    (void)shift, (void)s;
#pragma omp simd reduction(OP : t)
    for (int64_t i = 0; i < n; i++) {
        L x = (L)p[i];
        t = STEP;
    }
    U tile = (U)t;
    *total = *total OP tile;
}

SIMD static void NAME(columns)(void *acc, const void *from, int64_t n, const void *shift) {
    const C *p = from;
    U *total = acc;
    (void)shift;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        U x = (U)p[i], t = total[i];
        const U s = SHIFT(i);
        (void)s;
        total[i] = STEP;
    }
}

SIMD static void NAME(lines)(void *acc, const void *from, int64_t n, int64_t stride, const void *shift) {
    const C *p = from;
    U *total = acc;
    (void)shift;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        U x = (U)p[i], t = total[i];
        const U s = SHIFT(i);
        (void)s;
        t = STEP, x = (U)p[i + stride];
        t = STEP, x = (U)p[i + 2 * stride];
        t = STEP, x = (U)p[i + 3 * stride];
        total[i] = STEP;
    }
}

SIMD static void NAME(short)(void *acc, const void *from, int64_t n, int64_t length, const void *shift) {
    const C *p = from;
    U *total = acc;
    (void)shift;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        U t = total[i];
        const U s = SHIFT(i);
        (void)s;
        for (int64_t k = 0; k < length; k++) {
            const U x = (U)p[i * length + k];
            t = STEP;
        }
        total[i] = t;
    }
}

#undef SHIFT
