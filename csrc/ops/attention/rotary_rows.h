/* rotary_rows.h -- template of rotary.c. */

static inline void NAME(rotate)(T *y, const T *x, const T *c, const T *s, int64_t half, int64_t x_step, int64_t c_step,
                                int64_t s_step, bool inverse) {
    for (int64_t i = 0; i < half; i++) {
        const A x1 = GET(x[i * x_step]), x2 = GET(x[(half + i) * x_step]);
        const A c1 = GET(c[i * c_step]), c2 = GET(c[(half + i) * c_step]);
        const A s1 = GET(s[i * s_step]), s2 = GET(s[(half + i) * s_step]);
        y[i] = PUT(inverse ? x1 * c1 + x2 * s2 : x1 * c1 - x2 * s1);
        y[half + i] = PUT(inverse ? x2 * c2 - x1 * s1 : x2 * c2 + x1 * s2);
    }
}

SIMD static void NAME(rotate_rows)(const job *j, int64_t begin, int64_t end) {
    walk w = walk_from(j, begin);

    for (int64_t row = begin; row < end; row++, walk_on(j, &w)) {
        T *restrict y = (T *)j->y + row * 2 * j->half;
        const T *x = (const T *)j->in[0] + w.at[0], *c = (const T *)j->in[1] + w.at[1],
                *s = (const T *)j->in[2] + w.at[2];
        if (!j->dense) NAME(rotate)(y, x, c, s, j->half, j->step[0], j->step[1], j->step[2], j->inverse);
        else if (j->inverse) NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, true);
        else NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, false);
    }
}
