/* rotary_rows.h -- serves rotary.c as a template. */

/* What memory of Ts holds, or of what is computed with. */
#define ANGLE(p, i) (wide_angles ? ((const A *)(p))[i] : (A)GET(((const T *)(p))[i]))
#define STORE(i, x)                                                                                                    \
    do {                                                                                                               \
        if (wide_y) ((A *)y)[i] = (x);                                                                                 \
        else ((T *)y)[i] = PUT(x);                                                                                     \
    } while (0)

static inline void NAME(rotate)(void *restrict y, const T *x, const void *c, const void *s, int64_t half,
                                int64_t x_step, int64_t c_step, int64_t s_step, bool inverse, bool wide_angles,
                                bool wide_y) {
    for (int64_t i = 0; i < half; i++) {
        const A x1 = GET(x[i * x_step]), x2 = GET(x[(half + i) * x_step]);
        const A c1 = ANGLE(c, i * c_step), c2 = ANGLE(c, (half + i) * c_step);
        const A s1 = ANGLE(s, i * s_step), s2 = ANGLE(s, (half + i) * s_step);
        STORE(i, inverse ? x1 * c1 + x2 * s2 : x1 * c1 - x2 * s1);
        STORE(half + i, inverse ? x2 * c2 - x1 * s1 : x2 * c2 + x1 * s2);
    }
}

#undef ANGLE
#undef STORE

SIMD static void NAME(rotate_rows)(const job *j, int64_t begin, int64_t end) {
    const size_t angle = j->wide_angles ? sizeof(A) : sizeof(T), result = j->wide_y ? sizeof(A) : sizeof(T);
    walk w = walk_from(j, begin);

    for (int64_t row = begin; row < end; row++, walk_on(j, &w)) {
        void *y = (char *)j->y + row * 2 * j->half * (int64_t)result;
        const T *x = (const T *)j->in[0] + w.at[0];
        const char *c = (const char *)j->in[1] + w.at[1] * (int64_t)angle;
        const char *s = (const char *)j->in[2] + w.at[2] * (int64_t)angle;
        if (!j->dense || (j->wide_y && j->inverse))
            NAME(rotate)(y, x, c, s, j->half, j->step[0], j->step[1], j->step[2], j->inverse, j->wide_angles,
                         j->wide_y);
        else if (j->wide_y) NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, false, true, true);
        else if (j->inverse && j->wide_angles) NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, true, true, false);
        else if (j->inverse) NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, true, false, false);
        else if (j->wide_angles) NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, false, true, false);
        else NAME(rotate)(y, x, c, s, j->half, 1, 1, 1, false, false, false);
    }
}
