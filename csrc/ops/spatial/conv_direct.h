/* conv_direct.h -- serves conv_kernel.c as a template: convolutions with few channels, by scaled additions. */

/* Planes [begin, end) of y. */
SIMD static void NAME(direct_forward)(void *arg, int64_t begin, int64_t end) {
    const direct *d = arg;
    const conv *v = d->v;
    const int64_t taps = conv_taps(v), in_plane = volume(v->w.in), plane = volume(v->w.out);
    for (int64_t o = begin; o < end; o++) {
        const int64_t image = o / (v->groups * v->out), channel = o % (v->groups * v->out);
        const T *x = (const T *)d->x + (image * v->groups + channel / v->out) * v->in * in_plane;
        const T *w = (const T *)d->w + channel * v->in * taps;
        T *y = (T *)d->out + o * plane;
        if (!d->add) memset(y, 0, (size_t)plane * sizeof(T));
        for (int64_t i = 0; i < v->in * taps; i++) {
            const tap t = tap_at(&v->w, i % taps);
            NAME(gather)(&v->w, &t, 0, lines_of(v), w[i], x + i / taps * in_plane, y);
        }
    }
}

/* Planes [begin, end) of dx. */
SIMD static void NAME(direct_input)(void *arg, int64_t begin, int64_t end) {
    const direct *d = arg;
    const conv *v = d->v;
    const int64_t taps = conv_taps(v), in_plane = volume(v->w.in), plane = volume(v->w.out);
    for (int64_t c = begin; c < end; c++) {
        const int64_t image = c / (v->groups * v->in), group = c / v->in % v->groups;
        const T *dy = (const T *)d->dy + (image * v->groups + group) * v->out * plane;
        const T *w = (const T *)d->w + (group * v->out * v->in + c % v->in) * taps;
        T *x = (T *)d->out + c * in_plane;
        memset(x, 0, (size_t)in_plane * sizeof(T));
        for (int64_t i = 0; i < v->out * taps; i++) {
            const tap t = tap_at(&v->w, i % taps);
            NAME(scatter)(&v->w, &t, 0, lines_of(v), w[i / taps * v->in * taps + i % taps], dy + i / taps * plane, x);
        }
    }
}

/* Elements [begin, end) of dw. */
SIMD static void NAME(direct_weight)(void *arg, int64_t begin, int64_t end) {
    const direct *d = arg;
    const conv *v = d->v;
    const int64_t taps = conv_taps(v), in_plane = volume(v->w.in), plane = volume(v->w.out);
    for (int64_t e = begin; e < end; e++) {
        const int64_t o = e / (v->in * taps), c = o / v->out * v->in + e / taps % v->in;
        const tap t = tap_at(&v->w, e % taps);
        double total = 0;
        for (int64_t image = 0; image < v->images; image++)
            total += NAME(dot)(&v->w, &t, 0, lines_of(v), (const T *)d->x + (image * v->groups * v->in + c) * in_plane,
                               (const T *)d->dy + (image * v->groups * v->out + o) * plane);
        ((T *)d->out)[e] = (T)total;
    }
}
