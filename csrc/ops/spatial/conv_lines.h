/* conv_lines.h -- serves conv_kernel.c as a template: a kernel element over lines of outputs.
 *
 * The lines are [line, line + lines): `y` points to the first of them, x to a plane. */

/* y = x where it exists, 0 elsewhere */
static inline void NAME(look)(const window *w, const tap *t, int64_t line, int64_t lines, const T *x, T *y) {
    const int64_t width = w->out[2], step = w->stride[2];
    for (int64_t l = line; l < line + lines; l++, y += width) {
        int64_t from = line_offset(w, t, l), first = from < 0 ? width : t->first[2];
        int64_t last = from < 0 ? width : t->last[2];
        const T *in = x + from + t->shift[2];
        for (int64_t p = 0; p < first; p++) y[p] = 0;
        if (step == 1)
            for (int64_t p = first; p < last; p++) y[p] = in[p];
        else
            for (int64_t p = first; p < last; p++) y[p] = in[p * step];
        for (int64_t p = last; p < width; p++) y[p] = 0;
    }
}

/* y += factor * x */
static inline void NAME(gather)(const window *w, const tap *t, int64_t line, int64_t lines, T factor, const T *x,
                                T *y) {
    const int64_t step = w->stride[2], first = t->first[2], last = t->last[2];
    for (int64_t l = line; l < line + lines; l++, y += w->out[2]) {
        int64_t from = line_offset(w, t, l);
        const T *in = x + from + t->shift[2];
        if (from < 0) continue;
        if (step == 1)
            for (int64_t p = first; p < last; p++) y[p] += factor * in[p];
        else
            for (int64_t p = first; p < last; p++) y[p] += factor * in[p * step];
    }
}

/* x += factor * y */
static inline void NAME(scatter)(const window *w, const tap *t, int64_t line, int64_t lines, T factor, const T *y,
                                 T *x) {
    const int64_t step = w->stride[2], first = t->first[2], last = t->last[2];
    for (int64_t l = line; l < line + lines; l++, y += w->out[2]) {
        int64_t to = line_offset(w, t, l);
        T *out = x + to + t->shift[2];
        if (to < 0) continue;
        if (step == 1)
            for (int64_t p = first; p < last; p++) out[p] += factor * y[p];
        else
            for (int64_t p = first; p < last; p++) out[p * step] += factor * y[p];
    }
}

/* sum of x * y */
static inline double NAME(dot)(const window *w, const tap *t, int64_t line, int64_t lines, const T *x, const T *y) {
    const int64_t step = w->stride[2];
    double total = 0;
    for (int64_t l = line; l < line + lines; l++, y += w->out[2]) {
        int64_t from = line_offset(w, t, l);
        const T *in = x + from + t->shift[2];
        T sum = 0;
        if (from < 0) continue;
#pragma omp simd reduction(+ : sum)
        for (int64_t p = t->first[2]; p < t->last[2]; p++) sum += y[p] * in[p * step];
        total += (double)sum;
    }
    return total;
}
