/* fused_attention_rows.h -- serves fused_attention_kernel.c as a template: rows of a tile between its products. Scores
 * and sums are of type A; what is multiplied is of type T, and may lie where the scores lay if that is A. */
#if DIGITS == 53
#define BITS uint64_t
#else
#define BITS uint32_t
#endif

SIMD static void NAME(add_bias)(void *scores, const void *bias, int64_t step, int64_t n) {
    A *x = scores;
    const T *b = bias;
    if (step == 1) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) x[i] += GET(b[i]);
    } else {
        for (int64_t i = 0; i < n; i++) x[i] += GET(b[i * step]);
    }
}

/* -∞ where it is not allowed. With bits, because a choice would become branches. */
SIMD static void NAME(hide)(void *scores, const uint8_t *allowed, int64_t n) {
    typedef BITS bits __attribute__((may_alias));
    const A infinity = -(A)INFINITY;
    const bits hidden = *(const bits *)&infinity;
    bits *x = scores;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) {
        bits shown = (bits)(0 - (bits)(allowed[i] != 0));
        x[i] = (x[i] & shown) | (hidden & ~shown);
    }
}

/* Exponentials of a row's next scores, less the largest so far; they are added up before dropout. Returns what sums made
 * with the largest before have to be multiplied by. */
SIMD static double NAME(weigh)(void *scores, void *weights, int64_t n, double *most, double *total,
                               const uint32_t *bits, const dropout *d) {
    A *x = scores, top = (A)*most, factor;
    T *w = weights;
    double sum = 0;

    LARGEST(n, top, x[i]);
    const A base = top == -(A)INFINITY ? 0 : top;
    factor = v_exp_below((A)*most - base);
    SUM(n, sum, x[i] = v_exp_below(x[i] - base));
    *total = *total * (double)factor + sum;
    *most = (double)top;
    if (bits) {
        const A kept = (A)d->factor;
        const uint32_t threshold = d->threshold;
#pragma omp simd
        for (int64_t i = 0; i < n; i++) w[i] = PUT(x[i] * (bits[i] >= threshold ? kept : 0));
    } else if (weights != scores) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) w[i] = PUT(x[i]);
    }
    return (double)factor;
}

SIMD static void NAME(scale)(void *sums, int64_t n, double factor) {
    A *x = sums;
    const A f = (A)factor;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) x[i] *= f;
}

SIMD static void NAME(narrow)(void *to, const void *sums, int64_t n, double factor) {
    const A *x = sums, f = (A)factor;
    T *y = to;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) y[i] = PUT(x[i] * f);
}

SIMD static double NAME(dot)(const void *a, int64_t a_step, const void *b, int64_t n) {
    const T *x = a, *y = b;
    double total = 0;
    if (a_step == 1) {
        SUM(n, total, GET(x[i]) * GET(y[i]));
    } else {
        SUM(n, total, GET(x[i * a_step]) * GET(y[i]));
    }
    return total;
}

/* The weights again, and the gradient of the scores from that of the dropped weights:
 *     w = exp(x - most) / total,  weights = w m,  dx = w (dweights m - delta)
 * with m what dropout multiplies by. */
SIMD static void NAME(slope)(void *scores, void *dweights, void *weights, void *dscores, int64_t n, double most,
                             double share, double delta, const uint32_t *bits, const dropout *d, void *dbias) {
    A *x = scores, *dx = dweights, *db = dbias;
    T *w = weights, *ds = dscores;
    const A base = (A)most, part = (A)share, less = (A)delta, kept = (A)d->factor;
    const uint32_t threshold = d->threshold;

    if (bits) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            A e = v_exp_below(x[i] - base) * part, m = bits[i] >= threshold ? kept : 0;
            w[i] = PUT(e * m);
            dx[i] = e * (dx[i] * m - less);
        }
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) {
            A e = v_exp_below(x[i] - base) * part;
            w[i] = PUT(e);
            dx[i] = e * (dx[i] - less);
        }
    }
    for (int64_t i = 0; db && i < n; i++) db[i] += dx[i];
    if (dscores == dweights) return;
#pragma omp simd
    for (int64_t i = 0; i < n; i++) ds[i] = PUT(dx[i]);
}

#undef BITS
