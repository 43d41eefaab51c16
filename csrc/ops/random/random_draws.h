/* random_draws.h -- serves random.c as a template: elements [at, at + n) of a draw, of one chunk of bits. */

SIMD static void NAME(drop)(const draw *d, int64_t at, int64_t n, const uint32_t *bits) {
    const T *x = (const T *)d->in + at;
    T *y = (T *)d->out + at;
    const A scale = (A)d->scale;
    const uint32_t threshold = d->threshold;
#if DIGITS == 11
    /* float16 is converted one by one: a choice in that loop would be a branch that no CPU predicts. */
    A factor[CHUNK];
    for (int64_t i = 0; i < n; i++) factor[i] = bits[i] >= threshold ? scale : 0;
    for (int64_t i = 0; i < n; i++) y[i] = PUT(GET(x[i]) * factor[i]);
#else
    for (int64_t i = 0; i < n; i++) y[i] = PUT(GET(x[i]) * (bits[i] >= threshold ? scale : 0));
#endif
}

/* As many random bits as T has digits: every number is exact, and none rounds up to `high`. */
SIMD static void NAME(uniform)(const draw *d, int64_t at, int64_t n, const uint32_t *bits) {
    T *y = (T *)d->out + at;
    const A low = (A)d->low, range = (A)d->high - low, high = (A)d->high, below = (A)d->below;
    for (int64_t i = 0; i < n; i++) {
#if DIGITS > 32
        A u = (A)(bits[i] >> (64 - DIGITS)) * (A)0x1p-21 * (A)0x1p-32 + (A)bits[i + CHUNK / 2] * (A)0x1p-32;
#else
        A u = (A)(bits[i] >> (32 - DIGITS)) / ((A)1 * (1 << DIGITS));
#endif
        A v = low + u * range;
        y[i] = PUT(v < high ? v : below);
    }
}

/* Box and Muller: two uniform numbers, the first never 0, make two independent normal ones. */
SIMD static void NAME(normal)(const draw *d, int64_t at, int64_t n, const uint32_t *bits) {
    enum { PAIRS = CHUNK / WORDS / 2 };
    T *y = (T *)d->out + at;
    A sines[PAIRS];
    const A mean = (A)d->mean, deviation = (A)d->scale, turn = (A)(2 * M_PI);
    const int64_t firsts = n < PAIRS ? n : PAIRS;

    for (int64_t i = 0; i < firsts; i++) {
#if DIGITS > 32
        A u = (A)bits[i] * 0x1p-32 + (A)bits[i + 2 * PAIRS] * 0x1p-64 + 0x1p-65;
        A v = (A)bits[i + PAIRS] * 0x1p-32 + (A)bits[i + 3 * PAIRS] * 0x1p-64;
#else
        A u = (A)bits[i] * 0x1p-32f + 0x1p-33f, v = (A)bits[i + PAIRS] * 0x1p-32f;
#endif
        A radius = deviation * (A)sqrt(-2 * v_log(u)), angle = turn * v;
        y[i] = PUT(mean + radius * v_cos(angle));
        sines[i] = radius * v_sin(angle);
    }
    for (int64_t i = PAIRS; i < n; i++) y[i] = PUT(mean + sines[i - PAIRS]);
}

/* Values 0 and 1 of any type; an element that is no probability is reported. */
static void NAME(bernoulli)(const draw *d, int64_t at, int64_t n, const uint32_t *bits) {
    const T *p = (const T *)d->in + at;
    for (int64_t i = 0; i < n; i++) {
        double probability = (double)GET(p[i]);
        if (!(probability >= 0 && probability <= 1)) __atomic_store_n(d->bad, at + i, __ATOMIC_RELAXED);
        dtype_set_int(d->type, d->out, at + i, (double)bits[i] * 0x1p-32 < probability);
    }
}
