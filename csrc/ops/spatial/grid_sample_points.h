/* grid_sample_points.h -- serves grid_sample.c as a template: taps and kernels in T. */

/* --- one axis of a segment of points ------------------------------------------------------------------------------ */

typedef struct NAME(axis_taps) {
    int count;
    T x[SEGMENT], dx[SEGMENT];      /* coordinates in elements, and their derivatives by the grid's */
    int32_t at[AXIS_TAPS][SEGMENT]; /* -1: outside, worth 0 */
    T weight[AXIS_TAPS][SEGMENT], slope[AXIS_TAPS][SEGMENT]; /* slope: d weight / d grid */
} NAME(axis_taps);

/* Mirrored into [low, high]. In double: far away the rest of a division has few digits left. */
SIMD_PART void NAME(reflect)(double low, double high, int64_t n, T *x, T *dx) {
    const double span = high - low;

    for (int64_t p = 0; p < n; p++) {
        double from = fabs((double)x[p] - low), flips = span > 0 ? floor(from / span) : 0, extra = from - flips * span;
        bool odd = flips != 2 * floor(flips / 2);
        dx[p] *= span > 0 ? (((double)x[p] < low) != odd ? -1 : 1) : 0;
        x[p] = span > 0 ? (T)(low + (odd ? span - extra : extra)) : 0;
    }
}

/* Brought into the image as the padding says; what is no number, and what cannot be mirrored, to its begin, or in a
 * volume to its end. */
SIMD_PART void NAME(bring_in)(const sampling *s, int64_t size, int64_t n, T *x, T *dx) {
    const manner *m = &s->manner;
    const T last = (T)(size - 1), unknown = s->axes > 2 ? last : 0;

    if (m->padding == ZEROS) return;
    if (m->padding == REFLECTION) {
        if (m->align_corners) NAME(reflect)(0, (T)last, n, x, dx);
        else NAME(reflect)(-0.5, (T)last + 0.5, n, x, dx);
    }
    for (int64_t p = 0; p < n; p++) {
        const T inside = x[p] < 0 ? 0 : x[p] > last ? last : x[p];
        dx[p] = (x[p] > 0) & (x[p] < last) ? dx[p] : 0;
        x[p] = x[p] == x[p] ? inside : unknown;
    }
}

SIMD_PART void NAME(set_places)(int64_t size, int64_t n, const T *x, int32_t *at) {
    for (int64_t p = 0; p < n; p++) at[p] = (x[p] >= 0) & (x[p] < (T)size) ? (int32_t)x[p] : -1;
}

SIMD_PART void NAME(nearest_taps)(int64_t size, bool slopes, int64_t n, NAME(axis_taps) * t) {
    t->count = 1;
    for (int64_t p = 0; p < n; p++) {
        t->x[p] = nearbyint(t->x[p]);
        t->weight[0][p] = 1;
    }
    for (int64_t p = 0; slopes && p < n; p++) t->slope[0][p] = 0;
    NAME(set_places)(size, n, t->x, t->at[0]);
}

SIMD_PART void NAME(linear_taps)(int64_t size, bool slopes, int64_t n, NAME(axis_taps) * t) {
    T base[SEGMENT];

    t->count = 2;
    for (int i = 0; i < 2; i++) {
        for (int64_t p = 0; p < n; p++) {
            base[p] = floor(t->x[p]) + i;
            t->weight[i][p] = 1 - fabs(t->x[p] - base[p]);
        }
        for (int64_t p = 0; slopes && p < n; p++) t->slope[i][p] = i ? t->dx[p] : -t->dx[p];
        NAME(set_places)(size, n, base, t->at[i]);
    }
}

/* Cubic convolution with a = -3/4, at distances up to 1, and from 1 to 2. */
SIMD_PART T NAME(near_weight)(T x) { return ((T)1.25 * x - (T)2.25) * x * x + 1; }
SIMD_PART T NAME(near_slope)(T x) { return ((T)3.75 * x - (T)4.5) * x; }
SIMD_PART T NAME(far_weight)(T x) { return (((T)-0.75 * x + (T)3.75) * x - 6) * x + 3; }
SIMD_PART T NAME(far_slope)(T x) { return ((T)-2.25 * x + (T)7.5) * x - 6; }

/* Here it is the elements, not the points, that padding brings in. */
SIMD_PART void NAME(cubic_taps)(const sampling *s, int64_t size, bool slopes, int64_t n, NAME(axis_taps) * t) {
    T base[SEGMENT], ignored[SEGMENT] = {0};

    t->count = AXIS_TAPS;
    for (int i = 0; i < AXIS_TAPS; i++) {
        for (int64_t p = 0; p < n; p++) {
            T f = t->x[p] - floor(t->x[p]), distance = fabs(f + 1 - i), side = i < 2 ? 1 : -1;
            bool far = (i == 0) | (i == 3);
            base[p] = floor(t->x[p]) + i - 1;
            t->weight[i][p] = far ? NAME(far_weight)(distance) : NAME(near_weight)(distance);
            if (slopes)
                t->slope[i][p] = t->dx[p] * side * (far ? NAME(far_slope)(distance) : NAME(near_slope)(distance));
        }
        NAME(bring_in)(s, size, n, base, ignored);
        NAME(set_places)(size, n, base, t->at[i]);
    }
}

/* From the grid's coordinates in t->x. One that is infinite or NaN has taps of weight NaN in an image of zeros around,
 * and none in such a volume, as in PyTorch. */
SIMD_PART void NAME(fill_axis)(const sampling *s, int64_t size, int64_t n, NAME(axis_taps) * t) {
    const manner *m = &s->manner;
    const T half = (T)(m->align_corners ? size - 1 : size) / 2, shift = (T)(m->align_corners ? 0 : 0.5);
    const bool outside = s->axes > 2 && m->padding == ZEROS;

    for (int64_t p = 0; p < n; p++) {
        T x = (t->x[p] + 1) * half - shift;
        if (s->narrow) x = (T)((float)(t->x[p] + 1) * (float)half - (float)shift);
        t->x[p] = x - x == 0 || !outside ? x : -100;
        t->dx[p] = half;
    }
    if (m->mode != CUBIC) NAME(bring_in)(s, size, n, t->x, t->dx);
    if (m->mode == NEAREST) NAME(nearest_taps)(size, s->slopes, n, t);
    else if (m->mode == LINEAR) NAME(linear_taps)(size, s->slopes, n, t);
    else NAME(cubic_taps)(s, size, s->slopes, n, t);
}

/* --- taps of a segment of points ---------------------------------------------------------------------------------- */

typedef struct NAME(segment_taps) {
    int64_t first, points; /* within the image */
    int count;
    bool inside;                                                      /* all taps are elements */
    int32_t at[MOST_TAPS][SEGMENT];                                   /* place in the plane, -1: none */
    T weight[MOST_TAPS][SEGMENT], slope[SPATIAL][MOST_TAPS][SEGMENT]; /* slope: by axis of the grid */
    NAME(axis_taps) along[SPATIAL];                                   /* the same: the last of x first */
} NAME(segment_taps);

SIMD_PART void NAME(read_grid)(const sampling *s, int64_t image, int axis, const NAME(segment_taps) * t, T *x) {
    const int64_t from = (image * s->points + t->first) * s->axes + axis;

    if (s->narrow)
        for (int64_t p = 0; p < t->points; p++) x[p] = (T)((const float *)s->grid)[from + p * s->axes];
    else
        for (int64_t p = 0; p < t->points; p++) x[p] = (T)((const double *)s->grid)[from + p * s->axes];
}

/* Tap `k` of all points: element rest % count of each axis. */
SIMD_PART void NAME(combine)(const sampling *s, int k, NAME(segment_taps) * t) {
    int64_t stride = 1;

    for (int i = 0, rest = k; i < s->axes; rest /= t->along[i].count, i++) {
        const int32_t *at = t->along[i].at[rest % t->along[i].count];
        const T *weight = t->along[i].weight[rest % t->along[i].count];
        for (int64_t p = 0; i == 0 && p < t->points; p++) {
            t->at[k][p] = at[p];
            t->weight[k][p] = weight[p];
        }
        for (int64_t p = 0; i > 0 && p < t->points; p++) {
            t->at[k][p] = (t->at[k][p] < 0) | (at[p] < 0) ? -1 : t->at[k][p] + at[p] * (int32_t)stride;
            t->weight[k][p] *= weight[p];
        }
        stride *= s->size[SPATIAL - 1 - i];
    }
    for (int d = 0; s->slopes && d < s->axes; d++) {
        for (int64_t p = 0; p < t->points; p++) t->slope[d][k][p] = 1;
        for (int i = 0, rest = k; i < s->axes; rest /= t->along[i].count, i++) {
            const int j = rest % t->along[i].count;
            const T *factor = i == d ? t->along[i].slope[j] : t->along[i].weight[j];
            for (int64_t p = 0; p < t->points; p++) t->slope[d][k][p] *= factor[p];
        }
    }
}

SIMD static void NAME(fill_segment)(const sampling *s, int64_t image, int64_t first, NAME(segment_taps) * t) {
    t->first = first;
    t->points = s->points - first < SEGMENT ? s->points - first : SEGMENT;
    t->count = 1;
    for (int i = 0; i < s->axes; i++) {
        NAME(read_grid)(s, image, i, t, t->along[i].x);
        NAME(fill_axis)(s, s->size[SPATIAL - 1 - i], t->points, &t->along[i]);
        t->count *= t->along[i].count;
    }
    for (int k = 0; k < t->count; k++) NAME(combine)(s, k, t);
    int32_t least = 0;
    for (int k = 0; k < t->count; k++)
        for (int64_t p = 0; p < t->points; p++) least = t->at[k][p] < least ? t->at[k][p] : least;
    t->inside = least == 0;
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* One channel; `count`, a constant, is the number of taps. */
SIMD_PART void NAME(pull)(const T *x, const NAME(segment_taps) * t, const int count, T *y) {
    if (t->inside) {
        for (int64_t p = 0; p < t->points; p++) {
            T sum = 0;
            for (int k = 0; k < count; k++) sum += t->weight[k][p] * x[t->at[k][p]];
            y[p] = sum;
        }
        return;
    }
    for (int64_t p = 0; p < t->points; p++) {
        T sum = 0;
        for (int k = 0; k < count; k++) {
            const int32_t at = t->at[k][p];
            const T element = x[at < 0 ? 0 : at];
            sum += t->weight[k][p] * (at < 0 ? 0 : element);
        }
        y[p] = sum;
    }
}

SIMD static void NAME(sample)(void *arg, int64_t begin, int64_t end) {
    const sampling *s = arg;
    NAME(segment_taps) t;
    for (int64_t from = begin, to; from < end; from = to) {
        to = image_end(s, from, end);
        for (int64_t first = 0; first < s->points; first += SEGMENT) {
            NAME(fill_segment)(s, from / s->channels, first, &t);
            for (int64_t c = from; c < to; c++) {
                const T *x = (const T *)s->x + c * volume(s->size);
                T *y = (T *)s->out + c * s->points + first;
                if (t.count == 1) NAME(pull)(x, &t, 1, y);
                else if (t.count == 4) NAME(pull)(x, &t, 4, y);
                else if (t.count == 8) NAME(pull)(x, &t, 8, y);
                else NAME(pull)(x, &t, 16, y);
            }
        }
    }
}

SIMD static void NAME(sample_input)(void *arg, int64_t begin, int64_t end) {
    const sampling *s = arg;
    const int64_t plane = volume(s->size);
    NAME(segment_taps) t;
    memset((T *)s->out + begin * plane, 0, (size_t)((end - begin) * plane) * sizeof(T));
    for (int64_t from = begin, to; from < end; from = to) {
        to = image_end(s, from, end);
        for (int64_t first = 0; first < s->points; first += SEGMENT) {
            NAME(fill_segment)(s, from / s->channels, first, &t);
            for (int64_t c = from; c < to; c++) {
                const T *dy = (const T *)s->dy + c * s->points + first;
                T *dx = (T *)s->out + c * plane;
                for (int k = 0; k < t.count; k++)
                    for (int64_t p = 0; p < t.points; p++)
                        if (t.at[k][p] >= 0) dx[t.at[k][p]] += t.weight[k][p] * dy[p];
            }
        }
    }
}

/* Points [begin, end), over all images. The slopes of taps nearly cancel: in double. */
SIMD static void NAME(sample_grid)(void *arg, int64_t begin, int64_t end) {
    const sampling *s = arg;
    const int64_t plane = volume(s->size);
    segment_taps_double t;
    for (int64_t from = begin; from < end; from += t.points) {
        const int64_t image = from / s->points;
        double sum[SPATIAL][SEGMENT] = {{0}};
        fill_segment_double(s, image, from % s->points, &t);
        if (t.points > end - from) t.points = end - from;
        for (int k = 0; k < t.count; k++) {
            double dot[SEGMENT] = {0};
            for (int64_t c = image * s->channels; c < (image + 1) * s->channels; c++) {
                const T *x = (const T *)s->x + c * plane, *dy = (const T *)s->dy + c * s->points + t.first;
                for (int64_t p = 0; p < t.points; p++) {
                    const int32_t at = t.at[k][p];
                    const double term = (double)x[at < 0 ? 0 : at] * (double)dy[p];
                    dot[p] += at < 0 ? 0 : term;
                }
            }
            for (int d = 0; d < s->axes; d++)
                for (int64_t p = 0; p < t.points; p++) sum[d][p] += t.slope[d][k][p] * dot[p];
        }
        for (int64_t p = 0; p < t.points; p++)
            for (int d = 0; d < s->axes; d++) ((T *)s->out)[(from + p) * s->axes + d] = (T)sum[d][p];
    }
}
