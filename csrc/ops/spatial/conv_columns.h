/* conv_columns.h -- serves conv_kernel.c as a template: makes columns, and adds them up again. After conv_lines.h. */

/* Parts [begin, end) of rows of the chunk's cols: channel, kernel element, image. */
SIMD static void NAME(make_columns)(void *arg, int64_t begin, int64_t end) {
    const chunk *k = arg;
    const conv *v = k->v;
    const int64_t taps = conv_taps(v), channels = v->groups * v->in;
    for (int64_t part = begin; part < end; part++) {
        const int64_t row = part / k->images, image = k->image + part % k->images;
        const tap t = tap_at(&v->w, row % taps);
        NAME(look)(&v->w, &t, k->line, k->lines, (const T *)k->from + (image * channels + row / taps) * volume(v->w.in),
                   (T *)k->cols + part * pixels_of(k));
    }
}

/* The same for patches, over lines of kernel elements: neighbours in x go to rows filled side by side. */
SIMD static void NAME(make_patches)(void *arg, int64_t begin, int64_t end) {
    const chunk *k = arg;
    const conv *v = k->v;
    const window *w = &v->w;
    const int64_t across = w->kernel[2], down = conv_taps(v) / across, channels = v->groups * v->in;
    for (int64_t part = begin; part < end; part++) {
        const int64_t row = part / k->images, image = part % k->images, width = width_of(k);
        const tap t = tap_at(w, row % down * across);
        const T *x = (const T *)k->from + ((k->image + image) * channels + row / down) * volume(w->in);
        T *y = (T *)k->cols + row * across * width + image * pixels_of(k);
        for (int64_t l = 0; l < k->lines; l++, y += w->out[2]) {
            const T *in = x + line_offset(w, &t, k->line + l);
            for (int64_t p = 0; p < w->out[2]; p++)
                for (int64_t i = 0; i < across; i++) y[i * width + p] = in[p * across + i];
        }
    }
}

/* Planes [begin, end) of dx within the chunk's images. */
SIMD static void NAME(add_columns)(void *arg, int64_t begin, int64_t end) {
    const chunk *k = arg;
    const conv *v = k->v;
    const int64_t taps = conv_taps(v), plane = volume(v->w.in), channels = v->groups * v->in;
    for (int64_t part = begin; part < end; part++) {
        const int64_t image = part / channels, channel = part % channels;
        const T *cols = (const T *)k->cols + channel * taps * width_of(k) + image * pixels_of(k);
        T *x = (T *)k->to + ((k->image + image) * channels + channel) * plane;
        if (k->line == 0) memset(x, 0, (size_t)plane * sizeof(T));
        for (int64_t i = 0; i < taps; i++, cols += width_of(k)) {
            const tap t = tap_at(&v->w, i);
            NAME(scatter)(&v->w, &t, k->line, k->lines, 1, cols, x);
        }
    }
}
