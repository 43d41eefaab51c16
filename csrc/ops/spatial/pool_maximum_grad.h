/* pool_maximum_grad.h -- serves pool.c as a template: dy goes to each window's largest. After pool_maximum.h. */

SIMD static void NAME(max_grad)(void *arg, int64_t begin, int64_t end) {
    const pool *k = arg;
    const window *w = &k->w;
    const int64_t plane = volume(w->in), step = w->stride[2];
    T best[SEGMENT];
    int32_t which[SEGMENT];
    memset((T *)k->dx + begin * plane, 0, (size_t)((end - begin) * plane) * sizeof(T));
    for (int64_t c = begin; k->indices && c < end; c++) ((T *)k->dx)[k->indices[c]] = ((const T *)k->dy)[c];
    if (k->indices) return;
    EACH_SEGMENT(w, s) {
        const T *dy = (const T *)k->dy + segment_start(w, &s);
        const uint8_t *taps = k->taps ? k->taps + segment_start(w, &s) : NULL;
        T *dx = (T *)k->dx + s.plane * plane;
        if (taps) {
            T *to = dx + origin(w, &s);
            for (int64_t p = 0; p < s.count; p++)
                if (taps[p] != NO_TAP) to[k->table[taps[p]].distance + p * step] += dy[p];
            continue;
        }
        NAME(find)(k, &s, best, which);
        for (int64_t p = 0; p < s.count; p++)
            if (which[p] >= 0) dx[place_of(k, &s, which[p], p)] += dy[p];
    }
}
