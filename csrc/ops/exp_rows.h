/* exp_rows.h -- template of softmax_rows.h and loss_rows.h: what both do with the exponentials of a row.
 *
 * Rows of 16-bit floats are widened by blocks, and rounded by blocks: a loop that does more than one of that and an
 * exponential keeps nothing in registers. */

/* For each block of a row of n: `from`, its length `m`, and x[from, from + m) as A in `e`. */
#define EACH_BLOCK(n, x)                                                                                               \
    _Alignas(64) A room_[SUM_BLOCK];                                                                                   \
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

/* For `first`: the next block comes into the first cache, and what lies one and a half blocks behind it into the second. */
#define ASK_FOR_BLOCKS(x)                                                                                              \
    (prefetch((x) + step + SUM_BLOCK, LANES * (int64_t)sizeof *(x)),                                                   \
     prefetch_later((x) + step + 5 * SUM_BLOCK / 2, LANES * (int64_t)sizeof *(x)))

/* The m <= SUM_BLOCK elements as A, in any order, and *most becomes the largest of it and them. Two neighbours in bfloat16
 * are the halves of a word, each of which is a float by one instruction. */
SIMD_PART const A *NAME(widened_with_largest)(const T *x, int64_t m, A *room, A *most) {
#if DIGITS == 8
    typedef uint32_t __attribute__((may_alias, aligned(2))) pair;
    enum { PAIRS = LANES / 2 };
    A top[LANES];
    int64_t i = 0;
    SET_LANES(top, *most);
    for (; i + LANES <= m; i += LANES) {
        const pair *two = (const pair *)(x + i);
#pragma omp simd
        for (int lane = 0; lane < PAIRS; lane++) {
            const A a = f32_of_bits(two[lane] << 16), b = f32_of_bits(two[lane] & 0xffff0000u);
            room[i + lane] = a;
            room[i + PAIRS + lane] = b;
            top[lane] = LARGER(a, top[lane]);
            top[PAIRS + lane] = LARGER(b, top[PAIRS + lane]);
        }
    }
    for (; i < m; i++) {
        room[i] = GET(x[i]);
        top[0] = LARGER(room[i], top[0]);
    }
    *most = largest_lane(top);
    return room;
#else
    const A *e = NAME(widened)(x, m, room);
    A top = *most;
    LARGEST(m, top, e[i]);
    *most = top;
    return e;
#endif
}

/* Σ exp(x - *most), where *most becomes the largest: in one pass, a larger one scales what was summed before it. NaN if
 * there is nothing but -∞. */
SIMD_PART double NAME(row_sum_exp)(const T *x, int64_t n, A *most) {
    _Alignas(64) A room[SUM_BLOCK];
    double total = 0;
    *most = -(A)INFINITY;
    for (int64_t from = 0, m; from < n; from += m) {
        A top = *most;
        m = n - from < SUM_BLOCK ? n - from : SUM_BLOCK;
        const A *e = NAME(widened_with_largest)(x + from, m, room, &top), base = top == -(A)INFINITY ? 0 : top;
        if (top > *most) total *= (double)v_exp_below(*most - base);
#if DIGITS < 24
        SUM_WITH(ASK_FOR_BLOCKS(x + from), m, total, vexpf_brief(e[i] - base));
#else
        SUM_WITH(READ_AHEAD(x + from), m, total, v_exp_below(e[i] - base));
#endif
        *most = top;
    }
    return *most == -(A)INFINITY ? NAN : total;
}

/* y = exp(x - high - low) scale, which is finite but in rows of NaN; y may be x. Where the exponential is `raised`, scale
 * takes that back. */
SIMD_PART void NAME(row_exp)(const T *x, int64_t n, A high, A low, A scale, bool raised, T *y) {
#define EXP(x) (raised ? v_exp_raised(x) : v_exp_below(x))
#if DIGITS < 24
    _Alignas(64) A made[SUM_BLOCK];
    const bool finite = isfinite(high) && isfinite(scale);
    EACH_BLOCK(n, x) {
        IN_STEPS(0, m, (READ_AHEAD(x + from), WRITE_AHEAD(y + from)), made[i] = EXP(e[i] - high - low) * scale);
        if (finite) {
#pragma omp simd
            for (int64_t i = 0; i < m; i++) y[from + i] = PUT_FINITE(made[i]);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < m; i++) y[from + i] = PUT(made[i]);
        }
    }
#else
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = EXP(x[i] - high - low) * scale;
#endif
#undef EXP
}

#undef EACH_BLOCK
#undef ASK_FOR_BLOCKS
