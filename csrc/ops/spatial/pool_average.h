/* pool_average.h -- serves pool.c as a template: the average of each window, and its gradient. */

/* The reciprocals' denominators of a segment; 1 for windows in which nothing counts, whose sum is 0. */
static inline void NAME(counts)(const pool *k, const segment *s, T *count) {
    const int64_t lines = axis_count(k, 0, s->at[0]) * axis_count(k, 1, s->at[1]);
    for (int64_t p = 0; p < s->count; p++) {
        int64_t n = lines * axis_count(k, 2, s->at[2] + p);
        count[p] = n > 0 ? (T)n : 1;
    }
}

SIMD static void NAME(average)(void *arg, int64_t begin, int64_t end) {
    const pool *k = arg;
    const window *w = &k->w;
    const int64_t plane = volume(w->in), taps = volume(w->kernel), step = w->stride[2];
    T count[SEGMENT];
    EACH_SEGMENT(w, s) {
        T *y = (T *)k->y + segment_start(w, &s);
        memset(y, 0, (size_t)s.count * sizeof(T));
        for (int64_t i = 0; i < taps; i++) {
            const sight e = look(k, &s, i);
            const T *x = (const T *)k->x + s.plane * plane + e.offset;
            if (step == 1)
                for (int64_t p = e.first; p < e.last; p++) y[p] += x[p];
            else
                for (int64_t p = e.first; p < e.last; p++) y[p] += x[p * step];
        }
        NAME(counts)(k, &s, count);
        for (int64_t p = 0; p < s.count; p++) y[p] /= count[p];
    }
}

SIMD static void NAME(average_grad)(void *arg, int64_t begin, int64_t end) {
    const pool *k = arg;
    const window *w = &k->w;
    const int64_t plane = volume(w->in), taps = volume(w->kernel), step = w->stride[2];
    T share[SEGMENT];
    memset((T *)k->dx + begin * plane, 0, (size_t)((end - begin) * plane) * sizeof(T));
    EACH_SEGMENT(w, s) {
        const T *dy = (const T *)k->dy + segment_start(w, &s);
        NAME(counts)(k, &s, share);
        for (int64_t p = 0; p < s.count; p++) share[p] = dy[p] / share[p];
        for (int64_t i = 0; i < taps; i++) {
            const sight e = look(k, &s, i);
            T *dx = (T *)k->dx + s.plane * plane + e.offset;
            if (step == 1)
                for (int64_t p = e.first; p < e.last; p++) dx[p] += share[p];
            else
                for (int64_t p = e.first; p < e.last; p++) dx[p * step] += share[p];
        }
    }
}
