/* conv_depthwise.h -- serves conv_depthwise.c as a template: planes laid out as one line, and sums over it. */

typedef A NAME(wide) __attribute__((vector_size(WIDE), aligned(sizeof(A)), may_alias));
#define LANES (WIDE / (int)sizeof(A))

/* --- layouts ------------------------------------------------------------------------------------------------------ */

SIMD_PART void NAME(widen)(const T *from, int64_t count, int64_t step, A *to) {
    if (step == 1)
        for (int64_t i = 0; i < count; i++) to[i] = GET(from[i]);
    else
        for (int64_t i = 0; i < count; i++) to[i] = GET(from[i * step]);
}

/* The pixels of x that results in lines [line, line + lines) see, 0 where there are none. */
SIMD_PART void NAME(lay_x)(const depthwise *d, const T *x, int64_t line, int64_t lines, A *to) {
    const conv *v = d->v;
    const int64_t down = stride_of(v, 0), across = stride_of(v, 1), height = v->w.in[1], width = v->w.in[2];

    for (int64_t p = 0; p < down * across; p++) {
        A *plane = to + p * d->at->plane;
        int64_t from, end, first = p % across - v->w.before[2];
        pixels_there(first, across, width, d->at->width, &from, &end);
        for (int64_t l = 0; l < lines + d->at->behind[0]; l++, plane += d->at->width) {
            const int64_t y = (line + l) * down + p / across - v->w.before[1];
            memset(plane, 0, (size_t)d->at->width * sizeof(A));
            if (y < 0 || y >= height || from == end) continue;
            NAME(widen)(x + y * width + from * across + first, end - from, across, plane + from);
        }
        memset(plane, 0, (size_t)(d->at->behind[1] + LANES) * sizeof(A)); /* what the last vector sees */
    }
}

/* Lines [line, line + lines) of dy, where there are such, and 0 between them. */
SIMD_PART void NAME(lay_dy)(const depthwise *d, const T *dy, int64_t line, int64_t lines, A *to) {
    const int64_t height = d->v->w.out[1], width = d->v->w.out[2], gap = d->at->width - width;

    for (int64_t l = line; l < line + lines; l++, to += width + gap) {
        if (l < 0 || l >= height) memset(to, 0, (size_t)width * sizeof(A));
        else NAME(widen)(dy + l * width, width, 1, to);
        memset(to + width, 0, (size_t)gap * sizeof(A));
    }
}

/* --- sums --------------------------------------------------------------------------------------------------------- */

/* y[q] = sum over t of w[t] x[q + offset[t]], and what it was if `more`, for q in [0, count) and some behind it. */
SIMD_PART void NAME(correlate)(const A *x, const A *w, const int32_t *offset, int taps, int64_t count, bool more,
                               A *y) {
    for (int64_t q = 0; q < count;) {
        const A *from = x + q;
        NAME(wide) *out = (NAME(wide) *)(y + q);
        if (count - q > (BLOCK - 1) * LANES) {
            NAME(wide) a = {0}, b = {0}, c = {0}, d = {0};
            if (more) a = out[0], b = out[1], c = out[2], d = out[3];
            for (int t = 0; t < taps; t++) {
                const NAME(wide) *in = (const NAME(wide) *)(from + offset[t]);
                a += w[t] * in[0];
                b += w[t] * in[1];
                c += w[t] * in[2];
                d += w[t] * in[3];
            }
            out[0] = a, out[1] = b, out[2] = c, out[3] = d;
            q += BLOCK * LANES;
        } else {
            NAME(wide) a = {0};
            if (more) a = out[0];
            for (int t = 0; t < taps; t++) a += w[t] * *(const NAME(wide) *)(from + offset[t]);
            out[0] = a;
            q += LANES;
        }
    }
}

/* totals[t] += sum over q of dy[q] x[q + offset[t]], lane by lane; dy is 0 behind `count`. */
SIMD_PART void NAME(dots)(const A *x, const A *dy, const int32_t *offset, int taps, int64_t count,
                          NAME(wide) * totals) {
    for (int t = 0; t < taps; t += TOGETHER) {
        const A *in[TOGETHER];
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

/* Lines of results, which have gaps in `from`. */
SIMD_PART void NAME(store)(const A *from, int64_t from_width, int64_t lines, int64_t width, bool add, T *to) {
    for (int64_t l = 0; l < lines; l++, from += from_width, to += width) {
        if (add)
            for (int64_t i = 0; i < width; i++) to[i] = PUT(GET(to[i]) + from[i]);
        else
            for (int64_t i = 0; i < width; i++) to[i] = PUT(from[i]);
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
    A weight[MOST_TAPS], in[BUFFER], out[BUFFER];

    offsets_in_x(at, taps, offset);
    for (int64_t o = begin; o < end; o++) {
        const T *x = (const T *)d->x + o / v->out * volume(v->w.in);
        T *y = (T *)d->out + o * height * width;
        NAME(widen)((const T *)d->w + o % (v->groups * v->out) * taps, taps, 1, weight);
        for (int64_t line = 0; line < height; line += at->lines) {
            const int64_t lines = least(at->lines, height - line);
            NAME(lay_x)(d, x, line, lines, in);
            NAME(correlate)(in, weight, offset, taps, lines * at->width, false, out);
            NAME(store)(out, at->width, lines, width, d->add, y + line * width);
        }
    }
}

/* Pixels of dx that lie in plane `p` of those that are a stride apart, in its lines [line, line + lines). */
SIMD_PART void NAME(spread)(const depthwise *d, int64_t p, int64_t line, int64_t lines, const A *from, T *dx) {
    const conv *v = d->v;
    const int64_t down = stride_of(v, 0), across = stride_of(v, 1), first = p % across - v->w.before[2];
    int64_t begin, end;

    pixels_there(first, across, v->w.in[2], d->at->width, &begin, &end);
    for (int64_t l = 0; l < lines; l++, from += d->at->width) {
        const int64_t y = (line + l) * down + p / across - v->w.before[1];
        if (y < 0 || y >= v->w.in[1] || begin == end) continue;
        T *to = dx + y * v->w.in[2] + begin * across + first;
        if (across == 1)
            for (int64_t i = 0; i < end - begin; i++) to[i] = PUT(from[begin + i]);
        else
            for (int64_t i = 0; i < end - begin; i++) to[i * across] = PUT(from[begin + i]);
    }
}

/* The taps that see plane `p`: their weights, and where they are in dy. */
SIMD_PART int NAME(taps_of)(const layout *at, int64_t p, int taps, const T *w, A *weight, int32_t *offset) {
    int n = 0;
    for (int t = 0; t < taps; t++) {
        if (at->of[t] != p) continue;
        weight[n] = GET(w[t]);
        offset[n++] = (int32_t)((at->behind[0] - at->line[t]) * at->width + at->behind[1] - at->pixel[t]);
    }
    return n;
}

/* Planes [begin, end) of dx. */
SIMD static void NAME(grad_input)(void *arg, int64_t begin, int64_t end) {
    const depthwise *d = arg;
    const conv *v = d->v;
    const layout *at = d->at;
    const int64_t all = v->w.out[1] + at->behind[0], plane = volume(v->w.out);
    const int taps = (int)conv_taps(v);
    int32_t offset[MOST_TAPS];
    A weight[MOST_TAPS], in[BUFFER], out[BUFFER];

    memset(in, 0, (size_t)at->behind[1] * sizeof(A)); /* before the first line, as between lines */
    for (int64_t c = begin; c < end; c++) {
        const T *dy = (const T *)d->dy + c * v->out * plane, *w = (const T *)d->w + c % v->groups * v->out * taps;
        T *dx = (T *)d->out + c * volume(v->w.in);
        memset(dx, 0, (size_t)volume(v->w.in) * sizeof(T));
        for (int64_t part = 0; part < (all + at->lines - 1) / at->lines * at->planes; part++) {
            const int64_t p = part % at->planes, line = part / at->planes * at->lines;
            const int64_t lines = least(at->lines, all - line);
            int n = 0;
            for (int64_t o = 0; o < v->out; o++) {
                if (p == 0 || v->out > 1)
                    NAME(lay_dy)(d, dy + o * plane, line - at->behind[0], lines + at->behind[0], in + at->behind[1]);
                n = NAME(taps_of)(at, p, taps, w + o * taps, weight, offset);
                NAME(correlate)(in, weight, offset, n, n ? lines * at->width : 0, o > 0, out);
            }
            if (n) NAME(spread)(d, p, line, lines, out, dx);
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

/* The sum of one tap over the pixels that there are, and no others: where it is infinite, or no number. */
SIMD_PART double NAME(exactly)(const depthwise *d, int64_t o, int64_t t) {
    const conv *v = d->v;
    const window *w = &v->w;
    const int64_t down = t / w->kernel[2] * w->dilation[1] - w->before[1];
    const int64_t right = t % w->kernel[2] * w->dilation[2] - w->before[2];
    double sum = 0;

    for (int64_t image = 0; image < v->images; image++) {
        const T *x = (const T *)d->x + (image * v->groups + o / v->out) * volume(w->in);
        const T *dy = (const T *)d->dy + (image * v->groups * v->out + o) * volume(w->out);
        for (int64_t i = 0; i < volume(w->out); i++) {
            const int64_t y = i / w->out[2] * w->stride[1] + down, z = i % w->out[2] * w->stride[2] + right;
            if (y >= 0 && y < w->in[1] && z >= 0 && z < w->in[2])
                sum += (double)GET(x[y * w->in[2] + z]) * (double)GET(dy[i]);
        }
    }
    return sum;
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
    A in[BUFFER], g[BUFFER];

    offsets_in_x(at, taps, offset);
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
                NAME(lay_dy)(d, dy, line, lines, g);
                memset(g + count, 0, SLACK * sizeof(A));
                NAME(dots)(in, g, offset, taps, count, totals);
                if ((terms += count / LANES) < MOST_TERMS) continue;
                NAME(take_totals)(totals, taps, sums);
                terms = 0;
            }
        }
        NAME(take_totals)(totals, taps, sums);
        for (int t = 0; t < taps; t++)
            if (sums[t] - sums[t] != 0) sums[t] = NAME(exactly)(d, o, t);
        for (int t = 0; t < taps; t++) ((T *)d->out)[o * taps + t] = PUT((A)sums[t]);
    }
}

/* Of [0, count): is any infinite or not a number? */
SIMD static bool NAME(all_finite)(const void *list, int64_t count) {
    const T *of = list;
    bool finite = true;
    for (int64_t i = 0; i < count; i++) finite &= GET(of[i]) - GET(of[i]) == 0;
    return finite;
}

#undef LANES
