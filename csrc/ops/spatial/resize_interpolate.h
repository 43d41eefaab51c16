/* resize_interpolate.h -- serves resize.c as a template: the kernel of Interpolate. */

/* A line of y, of elements next to one another. */
static inline void NAME(line)(const interpolation *p, const T *x, T *y) {
    for (int64_t k = 0; k < p->taps; k++) {
        const int32_t *index = p->index + k * p->outputs;
        const T *w = (const T *)p->weight + k * p->outputs;
        for (int64_t i = 0; i < p->outputs; i++) {
            const T term = w[i] * x[index[i] < 0 ? 0 : index[i]];
            y[i] = (k ? y[i] : 0) + (index[i] < 0 ? 0 : term);
        }
    }
}

/* Row i of y, made of rows of x. */
static inline void NAME(row)(const interpolation *p, int64_t i, const T *x, T *y) {
    bool begun = false;
    for (int64_t k = 0; k < p->taps; k++) {
        const int64_t at = p->index[k * p->outputs + i];
        const T w = ((const T *)p->weight)[k * p->outputs + i], *in = x + at * p->inner;
        if (at < 0) continue;
        if (begun)
            for (int64_t j = 0; j < p->inner; j++) y[j] += w * in[j];
        else
            for (int64_t j = 0; j < p->inner; j++) y[j] = w * in[j];
        begun = true;
    }
    if (!begun) memset(y, 0, (size_t)p->inner * sizeof(T));
}

SIMD static void NAME(interpolate)(void *arg, int64_t begin, int64_t end) {
    const interpolation *p = arg;
    for (int64_t o = begin; o < end; o++) {
        const T *x = (const T *)p->x + o * p->inputs * p->inner;
        T *y = (T *)p->y + o * p->outputs * p->inner;
        if (p->inner == 1) NAME(line)(p, x, y);
        else
            for (int64_t i = 0; i < p->outputs; i++) NAME(row)(p, i, x, y + i * p->inner);
    }
}
