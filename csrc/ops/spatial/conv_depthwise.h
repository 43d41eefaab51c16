/* conv_depthwise.h -- serves conv_depthwise.c as a template: planes laid out as one line, and sums over it. */

typedef T NAME(wide) __attribute__((vector_size(WIDE), aligned(sizeof(T)), may_alias));
#define LANES (WIDE / (int)sizeof(T))

/* --- layouts ------------------------------------------------------------------------------------------------------ */

/* Pixels [from, to) of a line that are `stride` apart in `line`, where pixel `i` is `i * stride + first` of `count`. */
SIMD_PART void NAME(pixels_there)(int64_t first, int64_t stride, int64_t count, int64_t width, int64_t *from,
                                  int64_t *to) {
    *from = first < 0 ? (-first + stride - 1) / stride : 0;
    *to = count > first ? (count - first + stride - 1) / stride : 0;
    if (*to > width) *to = width;
    if (*from > *to) *from = *to;
}

/* The pixels of x that results in lines [line, line + lines) see, 0 where there are none. */
SIMD_PART void NAME(lay_x)(const depthwise *d, const T *x, int64_t line, int64_t lines, T *to) {
    const conv *v = d->v;
    const int64_t down = stride_of(v, 0), across = stride_of(v, 1), height = v->w.in[1], width = v->w.in[2];

    for (int64_t p = 0; p < down * across; p++) {
        T *plane = to + p * d->at->plane;
        int64_t from, end, first = p % across - v->w.before[2];
        NAME(pixels_there)(first, across, width, d->at->width, &from, &end);
        for (int64_t l = 0; l < lines + d->at->behind[0]; l++, plane += d->at->width) {
            const int64_t y = (line + l) * down + p / across - v->w.before[1];
            memset(plane, 0, (size_t)d->at->width * sizeof(T));
            if (y < 0 || y >= height) continue;
            const T *in = x + y * width + first;
            if (across == 1) memcpy(plane + from, in + from, (size_t)(end - from) * sizeof(T));
            else
                for (int64_t i = from; i < end; i++) plane[i] = in[i * across];
        }
    }
}

/* Lines [line, line + lines) of dy, where there are such, and 0 between them. */
SIMD_PART void NAME(lay_dy)(const depthwise *d, const T *dy, int64_t line, int64_t lines, T *to) {
    const int64_t height = d->v->w.out[1], width = d->v->w.out[2], gap = d->at->width - width;

    for (int64_t l = line; l < line + lines; l++, to += width + gap) {
        if (l < 0 || l >= height) memset(to, 0, (size_t)width * sizeof(T));
        else memcpy(to, dy + l * width, (size_t)width * sizeof(T));
        memset(to + width, 0, (size_t)gap * sizeof(T));
    }
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* y[q] = sum over t of w[t] x[q + offset[t]], for q in [0, count) and some behind it. */
SIMD_PART void NAME(correlate)(const T *x, const T *w, const int32_t *offset, int taps, int64_t count, T *y) {
    for (int64_t q = 0; q < count;) {
        const T *from = x + q;
        if (count - q > (BLOCK - 1) * LANES) {
            NAME(wide) a = {0}, b = {0}, c = {0}, d = {0};
            for (int t = 0; t < taps; t++) {
                const NAME(wide) *in = (const NAME(wide) *)(from + offset[t]);
                a += w[t] * in[0];
                b += w[t] * in[1];
                c += w[t] * in[2];
                d += w[t] * in[3];
            }
            NAME(wide) *out = (NAME(wide) *)(y + q);
            out[0] = a, out[1] = b, out[2] = c, out[3] = d;
            q += BLOCK * LANES;
        } else {
            NAME(wide) a = {0};
            for (int t = 0; t < taps; t++) a += w[t] * *(const NAME(wide) *)(from + offset[t]);
            *(NAME(wide) *)(y + q) = a;
            q += LANES;
        }
    }
}

/* totals[t] += sum over q of dy[q] x[q + offset[t]], lane by lane; dy is 0 behind `count`. */
SIMD_PART void NAME(dots)(const T *x, const T *dy, const int32_t *offset, int taps, int64_t count,
                          NAME(wide) * totals) {
    for (int t = 0; t < taps; t += TOGETHER) {
        const T *in[TOGETHER];
        for (int i = 0; i < TOGETHER; i++) in[i] = x + offset[t + i < taps ? t + i : taps - 1];
        NAME(wide) a = {0}, b = {0}, c = {0}, d = {0}, e = {0};
        for (int64_t q = 0; q < count; q += LANES) {
            const NAME(wide) g = *(const NAME(wide) *)(dy + q);
            a += g * *(const NAME(wide) *)(in[0] + q);
            b += g * *(const NAME(wide) *)(in[1] + q);
            c += g * *(const NAME(wide) *)(in[2] + q);
            d += g * *(const NAME(wide) *)(in[3] + q);
            e += g * *(const NAME(wide) *)(in[4] + q);
        }
        const NAME(wide) sums[TOGETHER] = {a, b, c, d, e};
        for (int i = 0; i < TOGETHER && t + i < taps; i++) totals[t + i] += sums[i];
    }
}

/* --- the three ---------------------------------------------------------------------------------------------------- */

SIMD_PART void NAME(offsets_in_x)(const layout *at, int taps, int32_t *to) {
    for (int t = 0; t < taps; t++)
        to[t] = at->of[t] * (int32_t)at->plane + at->line[t] * (int32_t)at->width + at->pixel[t];
}

/* Lines of results, which have gaps in `from`. */
SIMD_PART void NAME(store)(const T *from, int64_t from_width, int64_t lines, int64_t width, bool add, T *to) {
    for (int64_t l = 0; l < lines; l++, from += from_width, to += width) {
        if (!add) memcpy(to, from, (size_t)width * sizeof(T));
        else
            for (int64_t i = 0; i < width; i++) to[i] += from[i];
    }
}

/* Planes [begin, end) of y. */
SIMD static void NAME(forward)(void *arg, int64_t begin, int64_t end) {
    const depthwise *d = arg;
    const conv *v = d->v;
    const layout *at = d->at;
    const int64_t height = v->w.out[1], width = v->w.out[2];
    const int taps = (int)conv_taps(v);
    int32_t offset[MOST_TAPS];
    T in[BUFFER], out[BUFFER];

    NAME(offsets_in_x)(at, taps, offset);
    for (int64_t o = begin; o < end; o++) {
        const T *x = (const T *)d->x + o / v->out * volume(v->w.in);
        const T *w = (const T *)d->w + o % (v->groups * v->out) * taps;
        T *y = (T *)d->out + o * height * width;
        for (int64_t line = 0; line < height; line += at->lines) {
            const int64_t lines = least(at->lines, height - line);
            NAME(lay_x)(d, x, line, lines, in);
            NAME(correlate)(in, w, offset, taps, lines * at->width, out);
            NAME(store)(out, at->width, lines, width, d->add, y + line * width);
        }
    }
}

/* Pixels of dx that lie in plane `p` of those that are a stride apart, in its lines [line, line + lines): adds `from`. */
SIMD_PART void NAME(spread)(const depthwise *d, int64_t p, int64_t line, int64_t lines, const T *from, T *dx) {
    const conv *v = d->v;
    const int64_t down = stride_of(v, 0), across = stride_of(v, 1), first = p % across - v->w.before[2];
    int64_t begin, end;

    NAME(pixels_there)(first, across, v->w.in[2], d->at->width, &begin, &end);
    for (int64_t l = 0; l < lines; l++, from += d->at->width) {
        const int64_t y = (line + l) * down + p / across - v->w.before[1];
        if (y < 0 || y >= v->w.in[1]) continue;
        T *to = dx + y * v->w.in[2];
        if (across == 1)
            for (int64_t i = begin; i < end; i++) to[i + first] += from[i];
        else
            for (int64_t i = begin; i < end; i++) to[i * across + first] += from[i];
    }
}

/* The taps that see plane `p`: their weights, and where they are in dy. */
SIMD_PART int NAME(taps_of)(const layout *at, int64_t p, int taps, const T *w, T *weight, int32_t *offset) {
    int n = 0;
    for (int t = 0; t < taps; t++) {
        if (at->of[t] != p) continue;
        weight[n] = w[t];
        offset[n++] = (int32_t)((at->behind[0] - at->line[t]) * at->width + at->behind[1] - at->pixel[t]);
    }
    return n;
}

/* Planes [begin, end) of dx. */
SIMD static void NAME(grad_input)(void *arg, int64_t begin, int64_t end) {
    const depthwise *d = arg;
    const conv *v = d->v;
    const layout *at = d->at;
    const int64_t plane = volume(v->w.in), all = v->w.out[1] + at->behind[0];
    const int taps = (int)conv_taps(v);
    int32_t offset[MOST_TAPS];
    T weight[MOST_TAPS], in[BUFFER], out[BUFFER];

    memset(in, 0, (size_t)at->behind[1] * sizeof(T)); /* before the first line, as between lines */
    for (int64_t c = begin; c < end; c++) {
        T *dx = (T *)d->out + c * plane;
        memset(dx, 0, (size_t)plane * sizeof(T));
        for (int64_t o = 0; o < v->out; o++) {
            const T *dy = (const T *)d->dy + (c * v->out + o) * volume(v->w.out);
            const T *w = (const T *)d->w + (c % v->groups * v->out + o) * taps;
            for (int64_t line = 0; line < all; line += at->lines) {
                const int64_t lines = least(at->lines, all - line);
                NAME(lay_dy)(d, dy, line - at->behind[0], lines + at->behind[0], in + at->behind[1]);
                for (int64_t p = 0; p < at->planes; p++) {
                    const int n = NAME(taps_of)(at, p, taps, w, weight, offset);
                    if (n == 0) continue;
                    NAME(correlate)(in, weight, offset, n, lines * at->width, out);
                    NAME(spread)(d, p, line, lines, out, dx);
                }
            }
        }
    }
}

/* Adds up the lanes, and empties them. */
SIMD_PART void NAME(take_totals)(NAME(wide) * totals, int taps, double *sums) {
    for (int t = 0; t < taps; t++) {
        for (int i = 0; i < LANES; i++) sums[t] += (double)totals[t][i];
        totals[t] = (NAME(wide)){0};
    }
}

/* Weights of channels [begin, end) of y. */
SIMD static void NAME(grad_weight)(void *arg, int64_t begin, int64_t end) {
    const depthwise *d = arg;
    const conv *v = d->v;
    const layout *at = d->at;
    const int64_t height = v->w.out[1], channels = v->groups * v->out;
    const int taps = (int)conv_taps(v);
    int32_t offset[MOST_TAPS];
    double sums[MOST_TAPS];
    NAME(wide) totals[MOST_TAPS];
    T in[BUFFER], g[BUFFER];

    NAME(offsets_in_x)(at, taps, offset);
    memset(totals, 0, (size_t)taps * sizeof *totals);
    for (int64_t o = begin; o < end; o++) {
        int64_t terms = 0; /* of a lane */
        memset(sums, 0, (size_t)taps * sizeof *sums);
        for (int64_t image = 0; image < v->images; image++) {
            const T *x = (const T *)d->x + (image * v->groups + o / v->out) * volume(v->w.in);
            const T *dy = (const T *)d->dy + (image * channels + o) * volume(v->w.out);
            for (int64_t line = 0; line < height; line += at->lines) {
                const int64_t lines = least(at->lines, height - line), count = lines * at->width;
                NAME(lay_x)(d, x, line, lines, in);
                memset(in + at->planes * at->plane, 0, SLACK * sizeof(T));
                NAME(lay_dy)(d, dy, line, lines, g);
                memset(g + count, 0, SLACK * sizeof(T));
                NAME(dots)(in, g, offset, taps, count, totals);
                if ((terms += count / LANES) < MOST_TERMS) continue;
                NAME(take_totals)(totals, taps, sums);
                terms = 0;
            }
        }
        NAME(take_totals)(totals, taps, sums);
        for (int t = 0; t < taps; t++) ((T *)d->out)[o * taps + t] = (T)sums[t];
    }
}

/* Of [0, count): is any infinite or not a number? */
SIMD static bool NAME(all_finite)(const T *of, int64_t count) {
    bool finite = true;
    for (int64_t i = 0; i < count; i++) finite &= of[i] - of[i] == 0;
    return finite;
}

#undef LANES
