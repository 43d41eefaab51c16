/* scan_extreme.h -- serves scan.c as a template: where the largest of T until now is, or the smallest.
 *
 * A NaN is better than all others, and than the one before. Of one lane at a time, or of neighbours together. In most
 * ranges of a lane nothing is better than what was before: that is found out for a whole range. */

#define BETTER(x, than) (smallest ? (x) <= (than) : (x) >= (than))

SIMD_PART void NAME(extreme)(const lanes *j, int64_t at, bool smallest) {
    const T *x = (const T *)j->a + at;
    int64_t *best = (int64_t *)j->out + at, found = 0;
    T b = x[0];
    for (int64_t i = 0, n; i < j->length; i += n, x += n, best += n) {
        int any = 0;
        n = j->length - i < RANGE ? j->length - i : RANGE;
        for (int64_t k = 0; k < n; k++) any |= BETTER(x[k], b) | (x[k] != x[k]);
        for (int64_t k = 0; any && k < n; k++) {
            if (BETTER(x[k], b) || x[k] != x[k]) {
                b = x[k];
                found = i + k;
            }
            best[k] = found;
        }
        for (int64_t k = 0; !any && k < n; k++) best[k] = found;
    }
}

SIMD_PART void NAME(extreme_beside)(const lanes *j, int64_t at, int64_t width, bool smallest) {
    const T *x = (const T *)j->a + at;
    int64_t *best = (int64_t *)j->out + at, found[BESIDE] = {0};
    T b[BESIDE];
    for (int64_t k = 0; k < width; k++) b[k] = x[k];
    for (int64_t i = 0; i < j->length; i++, x += j->step, best += j->step)
        for (int64_t k = 0; k < width; k++) {
            const bool taken = BETTER(x[k], b[k]) | (x[k] != x[k]);
            b[k] = taken ? x[k] : b[k];
            best[k] = found[k] = taken ? i : found[k];
        }
}

SIMD static void NAME(largest)(const lanes *j, int64_t at) { NAME(extreme)(j, at, false); }
SIMD static void NAME(largest_beside)(const lanes *j, int64_t at, int64_t width) {
    NAME(extreme_beside)(j, at, width, false);
}

SIMD static void NAME(smallest)(const lanes *j, int64_t at) { NAME(extreme)(j, at, true); }
SIMD static void NAME(smallest_beside)(const lanes *j, int64_t at, int64_t width) {
    NAME(extreme_beside)(j, at, width, true);
}

#undef BETTER
