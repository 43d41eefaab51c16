/* pool_maximum.h -- serves pool.c as a template: the largest element of each window, in T, and where it is.
 *
 * A line of outputs against what one tap sees; `step` is a constant where it is small. */

/* The place of the largest of n elements. */
SIMD_PART int64_t NAME(largest)(const T *x, int64_t n) {
    T most = x[0];
    int nans = 0;
    int64_t at = 0;

#pragma omp simd reduction(max : most) reduction(| : nans)
    for (int64_t i = 0; i < n; i++) {
        nans |= x[i] != x[i];
        most = x[i] > most ? x[i] : most;
    }
    if (nans)
        for (int64_t i = 0; i < n; i++) at = x[i] != x[i] ? i : at;
    else
        while (x[at] != most) at++;
    return at;
}

SIMD_PART void NAME(raise)(const T *x, sight e, const int64_t step, T *y) {
    for (int64_t p = e.first; p < e.last; p++) y[p] = TAKES(x[p * step], y[p]) ? x[p * step] : y[p];
}

SIMD_PART void NAME(choose)(const T *x, sight e, const int64_t step, int32_t i, T *best, int32_t *which) {
    for (int64_t p = e.first; p < e.last; p++) {
        const T v = x[p * step];
        const int take = TAKES(v, best[p]) | (which[p] < 0);
        best[p] = take ? v : best[p];
        which[p] = take ? i : which[p];
    }
}

SIMD static void NAME(max)(void *arg, int64_t begin, int64_t end) {
    const pool *k = arg;
    const window *w = &k->w;
    const int64_t plane = volume(w->in), taps = volume(w->kernel), step = w->stride[2];
    if (is_whole(w)) {
        for (int64_t c = begin; c < end; c++) {
            const T *x = (const T *)k->x + c * plane;
            ((T *)k->y)[c] = x[NAME(largest)(x, plane)];
        }
        return;
    }
    EACH_SEGMENT(w, s) {
        T *y = (T *)k->y + segment_start(w, &s);
        for (int64_t p = 0; p < s.count; p++) y[p] = LOWEST;
        for (int64_t i = 0; i < taps; i++) {
            const sight e = look(k, &s, i);
            const T *x = (const T *)k->x + s.plane * plane + e.offset;
            if (step == 1) NAME(raise)(x, e, 1, y);
            else if (step == 2) NAME(raise)(x, e, 2, y);
            else NAME(raise)(x, e, step, y);
        }
    }
}

/* Each output's maximum, and which tap sees it; -1: the window is empty. */
SIMD_PART void NAME(find)(const pool *k, const segment *s, T *best, int32_t *which) {
    const int64_t plane = volume(k->w.in), taps = volume(k->w.kernel), step = k->w.stride[2];
    if (is_whole(&k->w)) {
        const T *x = (const T *)k->x + s->plane * plane;
        which[0] = (int32_t)NAME(largest)(x, plane);
        best[0] = x[which[0]];
        return;
    }
    for (int64_t p = 0; p < s->count; p++) {
        best[p] = LOWEST;
        which[p] = -1;
    }
    for (int64_t i = 0; i < taps; i++) {
        const sight e = look(k, s, i);
        const T *x = (const T *)k->x + s->plane * plane + e.offset;
        if (step == 1) NAME(choose)(x, e, 1, (int32_t)i, best, which);
        else if (step == 2) NAME(choose)(x, e, 2, (int32_t)i, best, which);
        else NAME(choose)(x, e, step, (int32_t)i, best, which);
    }
}

/* What is asked for of maxima, indices and taps. */
SIMD static void NAME(find_all)(void *arg, int64_t begin, int64_t end) {
    const pool *k = arg;
    const window *w = &k->w;
    T best[SEGMENT];
    int32_t which[SEGMENT];
    EACH_SEGMENT(w, s) {
        const int64_t start = segment_start(w, &s);
        NAME(find)(k, &s, best, which);
        if (k->y) memcpy((T *)k->y + start, best, (size_t)s.count * sizeof(T));
        if (k->taps)
            for (int64_t p = 0; p < s.count; p++) k->taps[start + p] = (uint8_t)(which[p] < 0 ? NO_TAP : which[p]);
        if (k->indices)
            for (int64_t p = 0; p < s.count; p++)
                k->indices[start + p] = s.plane * volume(w->in) + place_of(k, &s, which[p], p);
    }
}
