/* exp_rows.h -- serves softmax_rows.h and loss_rows.h as a template: what both do with the exponentials of a row.
 *
 * Exponentials of 16-bit floats are rounded by blocks: a loop that does both keeps nothing in registers. Until then they
 * lie as EACH_OF counts them (ops/reductions/lanes.h). */

#undef EXP_BELOW
#undef EXP_RAISED
#if DIGITS < 24
#define EXP_BELOW(x) vexpf_brief(x)
#define EXP_RAISED(x) vexpf_brief_raised(x)
#else
#define EXP_BELOW(x) v_exp_below(x)
#define EXP_RAISED(x) v_exp_raised(x)
#endif

#if DIGITS < 24
/* The elements as A, and the largest of each lane. */
SIMD_PART void NAME(widen)(const T *x, int64_t n, A *room, A *tops) {
    A top[LANES];
    SET_LANES(top, -(A)INFINITY);
    EACH_OF(0, n, (void)0, x, v, (room[i] = v, top[lane] = LARGER(v, top[lane])));
    SET_LANES(tops, top[lane_]);
}

/* y = room * factor, where nothing is NaN. */
SIMD_PART void NAME(narrow)(const A *room, int64_t n, A factor, T *y) {
    int64_t at = 0;
#if DIGITS == 8
    typedef uint32_t __attribute__((may_alias, aligned(2))) two;
    for (; at + LANES <= n; at += LANES) {
        two *pairs = (two *)(void *)(y + at);
#pragma omp simd
        for (int k = 0; k < LANES / 2; k++)
            pairs[k] = (uint32_t)PUT_FINITE(room[at + k] * factor) |
                       (uint32_t)PUT_FINITE(room[at + LANES / 2 + k] * factor) << 16;
    }
#endif
#pragma omp simd
    for (int64_t i = at; i < n; i++) y[i] = PUT_FINITE(room[i] * factor);
}
#endif

/* Σ exp(x - *most), where *most becomes the largest: in one pass, a larger one scales what was summed before it. NaN if
 * there is nothing but -∞. */
SIMD_PART double NAME(row_sum_exp)(const T *x, int64_t n, A *most) {
    double total = 0;
    *most = -(A)INFINITY;
    for (int64_t from = 0, m; from < n; from += m) {
        const T *block = x + from;
        A top = *most;
        double sum = 0;
        m = n - from < SUM_BLOCK ? n - from : SUM_BLOCK;
#if DIGITS < 24
        if (*most > -(A)INFINITY) { /* most blocks have nothing larger */
            const A base = *most;
            A above[LANES];
            SET_LANES(above, 0);
            SUM_OF(READ_AHEAD(block), m, block, v, sum,
                   (above[lane] = LARGER(v - base, above[lane]), EXP_BELOW(v - base)));
            if (!(largest_lane(above) > 0)) {
                total += sum;
                continue;
            }
            sum = 0;
        }
#endif
        LARGEST_OF(m, block, v, top);
        const A base = top == -(A)INFINITY ? 0 : top;
        if (top > *most) total *= (double)v_exp_below(*most - base);
        SUM_OF(READ_AHEAD(block), m, block, v, sum, EXP_BELOW(v - base));
        total += sum;
        *most = top;
    }
    return *most == -(A)INFINITY ? NAN : total;
}

/* y = exp(x - high - low) scale, which is finite but in rows of NaN; y may be x. Where the exponential is `raised`, scale
 * takes that back. */
SIMD_PART void NAME(row_exp)(const T *x, int64_t n, A high, A low, A scale, bool raised, T *y) {
#define EXP(x) (raised ? EXP_RAISED(x) : EXP_BELOW(x))
#if DIGITS < 24
    _Alignas(64) A made[SUM_BLOCK];
    if (!isfinite(high) || !isfinite(scale)) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) y[i] = PUT(EXP(GET(x[i]) - high - low) * scale);
        return;
    }
    for (int64_t from = 0, m; from < n; from += m) {
        const T *block = x + from;
        m = n - from < SUM_BLOCK ? n - from : SUM_BLOCK;
        EACH_OF(0, m, (READ_AHEAD(block), WRITE_AHEAD(y + from)), block, v, made[i] = EXP(v - high - low));
        NAME(narrow)(made, m, scale, y + from);
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = EXP(x[i] - high - low) * scale;
#endif
#undef EXP
}
