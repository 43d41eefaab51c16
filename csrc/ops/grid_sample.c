/* grid_sample.c -- sampling images where a grid says:
 *
 *     x     [images, channels, (depth,) height, width]
 *     grid  [images, points..., 2 or 3]      coordinates in [-1, 1], the last axis of x first
 *     y     [images, channels, points...]
 *
 * A point's coordinate along an axis selects a few elements with weights w, whose derivatives are w'; the elements of
 * all axes combine into taps t, each a place in x:
 *
 *     y[c][p] = sum over t of w[t] x[c][t]        dx[c][t] += w[t] dy[c][p]
 *     dgrid[p][axis] = (sum over t of w'[t] sum over c of x[c][t] dy[c][p]) * d coordinate / d grid
 *
 * Taps are worked out for a segment of points at a time and used for all channels. Backward keeps x and the grid. */
#include "ops/grid_sample.h"

#include <math.h>
#include <string.h>

#include "core/parallel.h"
#include "ops/spatial.h"

enum { SEGMENT = 64, MOST_TAPS = 16, AXIS_TAPS = 4 };

/* --- one axis of a segment of points ------------------------------------------------------------------------------ */

typedef struct manner {
    enum { NEAREST, LINEAR, CUBIC } mode;
    enum { ZEROS, BORDER, REFLECTION } padding;
    bool align_corners;
} manner;

typedef struct axis_taps {
    int count;
    double x[SEGMENT], dx[SEGMENT]; /* coordinates in elements, and their derivatives by the grid's */
    int32_t at[AXIS_TAPS][SEGMENT]; /* -1: outside, worth 0 */
    double weight[AXIS_TAPS][SEGMENT], slope[AXIS_TAPS][SEGMENT]; /* slope: d weight / d grid */
} axis_taps;

/* Mirrored into [low, high]. */
static inline void reflect(double low, double high, int64_t n, double *x, double *dx) {
    const double span = high - low;

    for (int64_t p = 0; p < n; p++) {
        double from = fabs(x[p] - low), flips = span > 0 ? floor(from / span) : 0, extra = from - flips * span;
        bool odd = flips != 2 * floor(flips / 2);
        dx[p] *= span > 0 ? ((x[p] < low) != odd ? -1 : 1) : 0;
        x[p] = span > 0 ? low + (odd ? span - extra : extra) : 0;
    }
}

/* Brought into the image as the padding says. */
static inline void bring_in(const manner *m, int64_t size, int64_t n, double *x, double *dx) {
    const double last = (double)(size - 1);

    if (m->padding == ZEROS) return;
    if (m->padding == REFLECTION) {
        if (m->align_corners) reflect(0, last, n, x, dx);
        else reflect(-0.5, last + 0.5, n, x, dx);
    }
    for (int64_t p = 0; p < n; p++) {
        dx[p] = (x[p] <= 0) | (x[p] >= last) ? 0 : dx[p];
        x[p] = x[p] < 0 ? 0 : x[p] > last ? last : x[p];
    }
}

static inline void set_places(int64_t size, int64_t n, const double *x, int32_t *at) {
    for (int64_t p = 0; p < n; p++) at[p] = (x[p] >= 0) & (x[p] < (double)size) ? (int32_t)x[p] : -1;
}

static inline void nearest_taps(int64_t size, int64_t n, axis_taps *t) {
    t->count = 1;
    for (int64_t p = 0; p < n; p++) {
        t->x[p] = nearbyint(t->x[p]);
        t->weight[0][p] = 1;
        t->slope[0][p] = 0;
    }
    set_places(size, n, t->x, t->at[0]);
}

static inline void linear_taps(int64_t size, int64_t n, axis_taps *t) {
    double base[SEGMENT];

    t->count = 2;
    for (int i = 0; i < 2; i++) {
        for (int64_t p = 0; p < n; p++) {
            base[p] = floor(t->x[p]) + i;
            t->weight[i][p] = 1 - fabs(t->x[p] - base[p]);
            t->slope[i][p] = i ? t->dx[p] : -t->dx[p];
        }
        set_places(size, n, base, t->at[i]);
    }
}

/* Cubic convolution with a = -3/4, at distances up to 1, and from 1 to 2. */
static inline double near_weight(double x) { return (1.25 * x - 2.25) * x * x + 1; }
static inline double near_slope(double x) { return (3.75 * x - 4.5) * x; }
static inline double far_weight(double x) { return ((-0.75 * x + 3.75) * x - 6) * x + 3; }
static inline double far_slope(double x) { return (-2.25 * x + 7.5) * x - 6; }

/* Here it is the elements, not the points, that padding brings in. */
static inline void cubic_taps(const manner *m, int64_t size, int64_t n, axis_taps *t) {
    double base[SEGMENT], ignored[SEGMENT] = {0};

    t->count = AXIS_TAPS;
    for (int i = 0; i < AXIS_TAPS; i++) {
        for (int64_t p = 0; p < n; p++) {
            double f = t->x[p] - floor(t->x[p]), distance = fabs(f + 1 - i), side = i < 2 ? 1 : -1;
            bool far = (i == 0) | (i == 3);
            base[p] = floor(t->x[p]) + i - 1;
            t->weight[i][p] = far ? far_weight(distance) : near_weight(distance);
            t->slope[i][p] = t->dx[p] * side * (far ? far_slope(distance) : near_slope(distance));
        }
        bring_in(m, size, n, base, ignored);
        set_places(size, n, base, t->at[i]);
    }
}

/* From the grid's coordinates in t->x. */
static inline void fill_axis(const manner *m, int64_t size, bool narrow, int64_t n, axis_taps *t) {
    const double half = (double)(m->align_corners ? size - 1 : size) / 2, shift = m->align_corners ? 0 : 0.5;

    for (int64_t p = 0; p < n; p++) {
        double x = (t->x[p] + 1) * half - shift;
        if (narrow) x = (double)((float)(t->x[p] + 1) * (float)half - (float)shift);
        t->x[p] = x - x == 0 ? x : -100; /* neither infinite nor NaN */
        t->dx[p] = half;
    }
    if (m->mode != CUBIC) bring_in(m, size, n, t->x, t->dx);
    if (m->mode == NEAREST) nearest_taps(size, n, t);
    else if (m->mode == LINEAR) linear_taps(size, n, t);
    else cubic_taps(m, size, n, t);
}

/* --- taps of a segment of points ---------------------------------------------------------------------------------- */

typedef struct sampling {
    manner manner;
    bool narrow, slopes; /* float32; are slopes wanted? */
    int axes;
    int64_t images, channels, size[SPATIAL], points; /* size: right-aligned; points: of one image */
    const void *x, *grid, *dy;
    void *out;
} sampling;

typedef struct segment_taps {
    int64_t first, points; /* within the image */
    int count;
    bool inside;                                                           /* all taps are elements */
    int32_t at[MOST_TAPS][SEGMENT];                                        /* place in the plane, -1: none */
    double weight[MOST_TAPS][SEGMENT], slope[SPATIAL][MOST_TAPS][SEGMENT]; /* slope: by axis of the grid */
    axis_taps along[SPATIAL];                                              /* the same: the last of x first */
} segment_taps;

static inline void read_grid(const sampling *s, int64_t image, int axis, const segment_taps *t, double *x) {
    const int64_t from = (image * s->points + t->first) * s->axes + axis;

    if (s->narrow)
        for (int64_t p = 0; p < t->points; p++) x[p] = (double)((const float *)s->grid)[from + p * s->axes];
    else
        for (int64_t p = 0; p < t->points; p++) x[p] = ((const double *)s->grid)[from + p * s->axes];
}

/* Tap `k` of all points: element rest % count of each axis. */
static inline void combine(const sampling *s, int k, segment_taps *t) {
    int64_t stride = 1;

    for (int64_t p = 0; p < t->points; p++) {
        t->at[k][p] = 0;
        t->weight[k][p] = 1;
    }
    for (int i = 0, rest = k; i < s->axes; rest /= t->along[i].count, i++) {
        const int32_t *at = t->along[i].at[rest % t->along[i].count];
        const double *weight = t->along[i].weight[rest % t->along[i].count];
        for (int64_t p = 0; p < t->points; p++) {
            t->at[k][p] = (t->at[k][p] < 0) | (at[p] < 0) ? -1 : t->at[k][p] + at[p] * (int32_t)stride;
            t->weight[k][p] *= weight[p];
        }
        stride *= s->size[SPATIAL - 1 - i];
    }
    for (int d = 0; s->slopes && d < s->axes; d++) {
        for (int64_t p = 0; p < t->points; p++) t->slope[d][k][p] = 1;
        for (int i = 0, rest = k; i < s->axes; rest /= t->along[i].count, i++) {
            const int j = rest % t->along[i].count;
            const double *factor = i == d ? t->along[i].slope[j] : t->along[i].weight[j];
            for (int64_t p = 0; p < t->points; p++) t->slope[d][k][p] *= factor[p];
        }
    }
}

SIMD static void fill_segment(const sampling *s, int64_t image, int64_t first, segment_taps *t) {
    t->first = first;
    t->points = s->points - first < SEGMENT ? s->points - first : SEGMENT;
    t->count = 1;
    for (int i = 0; i < s->axes; i++) {
        read_grid(s, image, i, t, t->along[i].x);
        fill_axis(&s->manner, s->size[SPATIAL - 1 - i], s->narrow, t->points, &t->along[i]);
        t->count *= t->along[i].count;
    }
    for (int k = 0; k < t->count; k++) combine(s, k, t);
    int32_t least = 0;
    for (int k = 0; k < t->count; k++)
        for (int64_t p = 0; p < t->points; p++) least = t->at[k][p] < least ? t->at[k][p] : least;
    t->inside = least == 0;
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Ranges are over images and channels. The part of a range that lies in one image shares its taps: it ends at */
static inline int64_t image_end(const sampling *s, int64_t c, int64_t end) {
    int64_t next = (c / s->channels + 1) * s->channels;
    return next < end ? next : end;
}

#define SAMPLE(T)                                                                                                      \
    static inline void narrow_##T(const segment_taps *t, T w[MOST_TAPS][SEGMENT]) {                                    \
        for (int k = 0; k < t->count; k++)                                                                             \
            for (int64_t p = 0; p < t->points; p++) w[k][p] = (T)t->weight[k][p];                                      \
    }                                                                                                                  \
    /* One channel; `count`, a constant, is the number of taps. */                                                     \
    static inline __attribute__((always_inline)) void pull_##T(const T *x, const segment_taps *t,                      \
                                                               T w[MOST_TAPS][SEGMENT], const int count, T *y) {       \
        if (t->inside) {                                                                                               \
            for (int64_t p = 0; p < t->points; p++) {                                                                  \
                T sum = 0;                                                                                             \
                for (int k = 0; k < count; k++) sum += w[k][p] * x[t->at[k][p]];                                       \
                y[p] = sum;                                                                                            \
            }                                                                                                          \
            return;                                                                                                    \
        }                                                                                                              \
        for (int64_t p = 0; p < t->points; p++) {                                                                      \
            T sum = 0;                                                                                                 \
            for (int k = 0; k < count; k++) {                                                                          \
                const int32_t at = t->at[k][p];                                                                        \
                const T term = w[k][p] * x[at < 0 ? 0 : at];                                                           \
                sum += at < 0 ? 0 : term;                                                                              \
            }                                                                                                          \
            y[p] = sum;                                                                                                \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void sample_##T(void *arg, int64_t begin, int64_t end) {                                               \
        const sampling *s = arg;                                                                                       \
        segment_taps t;                                                                                                \
        T w[MOST_TAPS][SEGMENT];                                                                                       \
        for (int64_t from = begin, to; from < end; from = to) {                                                        \
            to = image_end(s, from, end);                                                                              \
            for (int64_t first = 0; first < s->points; first += SEGMENT) {                                             \
                fill_segment(s, from / s->channels, first, &t);                                                        \
                narrow_##T(&t, w);                                                                                     \
                for (int64_t c = from; c < to; c++) {                                                                  \
                    const T *x = (const T *)s->x + c * volume(s->size);                                                \
                    T *y = (T *)s->out + c * s->points + first;                                                        \
                    if (t.count == 1) pull_##T(x, &t, w, 1, y);                                                        \
                    else if (t.count == 4) pull_##T(x, &t, w, 4, y);                                                   \
                    else if (t.count == 8) pull_##T(x, &t, w, 8, y);                                                   \
                    else pull_##T(x, &t, w, 16, y);                                                                    \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void sample_input_##T(void *arg, int64_t begin, int64_t end) {                                         \
        const sampling *s = arg;                                                                                       \
        const int64_t plane = volume(s->size);                                                                         \
        segment_taps t;                                                                                                \
        T w[MOST_TAPS][SEGMENT];                                                                                       \
        memset((T *)s->out + begin * plane, 0, (size_t)((end - begin) * plane) * sizeof(T));                           \
        for (int64_t from = begin, to; from < end; from = to) {                                                        \
            to = image_end(s, from, end);                                                                              \
            for (int64_t first = 0; first < s->points; first += SEGMENT) {                                             \
                fill_segment(s, from / s->channels, first, &t);                                                        \
                narrow_##T(&t, w);                                                                                     \
                for (int64_t c = from; c < to; c++) {                                                                  \
                    const T *dy = (const T *)s->dy + c * s->points + first;                                            \
                    T *dx = (T *)s->out + c * plane;                                                                   \
                    for (int k = 0; k < t.count; k++)                                                                  \
                        for (int64_t p = 0; p < t.points; p++)                                                         \
                            if (t.at[k][p] >= 0) dx[t.at[k][p]] += w[k][p] * dy[p];                                    \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Points [begin, end), over all images. */                                                                        \
    SIMD static void sample_grid_##T(void *arg, int64_t begin, int64_t end) {                                          \
        const sampling *s = arg;                                                                                       \
        const int64_t plane = volume(s->size);                                                                         \
        segment_taps t;                                                                                                \
        for (int64_t from = begin; from < end; from += t.points) {                                                     \
            const int64_t image = from / s->points;                                                                    \
            double sum[SPATIAL][SEGMENT] = {{0}};                                                                      \
            fill_segment(s, image, from % s->points, &t);                                                              \
            if (t.points > end - from) t.points = end - from;                                                          \
            for (int k = 0; k < t.count; k++) {                                                                        \
                double dot[SEGMENT] = {0};                                                                             \
                for (int64_t c = image * s->channels; c < (image + 1) * s->channels; c++) {                            \
                    const T *x = (const T *)s->x + c * plane, *dy = (const T *)s->dy + c * s->points + t.first;        \
                    for (int64_t p = 0; p < t.points; p++) {                                                           \
                        const int32_t at = t.at[k][p];                                                                 \
                        const double term = (double)x[at < 0 ? 0 : at] * (double)dy[p];                                \
                        dot[p] += at < 0 ? 0 : term;                                                                   \
                    }                                                                                                  \
                }                                                                                                      \
                for (int d = 0; d < s->axes; d++)                                                                      \
                    for (int64_t p = 0; p < t.points; p++) sum[d][p] += t.slope[d][k][p] * dot[p];                     \
            }                                                                                                          \
            for (int64_t p = 0; p < t.points; p++)                                                                     \
                for (int d = 0; d < s->axes; d++) ((T *)s->out)[(from + p) * s->axes + d] = (T)sum[d][p];              \
        }                                                                                                              \
    }

SAMPLE(float)
SAMPLE(double)

/* --- operators ---------------------------------------------------------------------------------------------------- */

static bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }

static status manner_of(ctx *c, const node *n, manner *out) {
    const char *how = node_string(n, "mode"), *padding = node_string(n, "padding_mode");
    const bool cubic = is(how, "cubic") || is(how, "bicubic"), linear = is(how, "linear") || is(how, "bilinear");

    if ((!cubic && !linear && !is(how, "nearest")) ||
        (!is(padding, "zeros") && !is(padding, "border") && !is(padding, "reflection")))
        return fail(c, E_INVALID, "%s in the way of \"%s\" with the padding \"%s\"", n->op->name, how, padding);
    out->mode = cubic ? CUBIC : linear ? LINEAR : NEAREST;
    out->padding = is(padding, "zeros") ? ZEROS : is(padding, "border") ? BORDER : REFLECTION;
    out->align_corners = node_int(n, "align_corners") != 0;
    return OK;
}

static status sampling_of(ctx *c, const node *n, dtype type, const shape *x, const shape *grid, sampling *out) {
    char tx[SHAPE_TEXT], tg[SHAPE_TEXT];
    sampling s = {.narrow = type != F64, .axes = x->rank - 2};

    TRY(manner_of(c, n, &s.manner));
    if (s.axes < 2 || s.axes > SPATIAL || grid->rank != x->rank || grid->dim[0] != x->dim[0] ||
        grid->dim[grid->rank - 1] != s.axes)
        return fail(c, E_SHAPE, "%s of images %s on a grid %s", n->op->name, shape_text(x, tx), shape_text(grid, tg));
    if (s.manner.mode == CUBIC && s.axes > 2) return fail(c, E_UNSUPPORTED, "cubic %s of volumes", n->op->name);
    s.images = x->dim[0];
    s.channels = x->dim[1];
    s.points = shape_span(grid, 1, grid->rank - 1);
    spatial_axes(x, s.size);
    if (volume(s.size) > INT32_MAX) return fail(c, E_UNSUPPORTED, "%s of more than 2^31 pixels", n->op->name);
    if (volume(s.size) == 0 && s.images * s.channels * s.points > 0)
        return fail(c, E_SHAPE, "%s of images without pixels", n->op->name);
    *out = s;
    return OK;
}

status infer_grid_sample(graph *g, node *n) {
    sampling s;
    shape y;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(same_types(g, n, 0));
    TRY(sampling_of(g->c, n, n->in[0]->type, &n->in[0]->shape, &n->in[1]->shape, &s));
    y = n->in[0]->shape;
    for (int i = 0; i < s.axes; i++) y.dim[2 + i] = n->in[1]->shape.dim[1 + i];
    return set_out(g, n, 0, n->in[0]->type, &y);
}

status infer_grid_sample_grad_input(graph *g, node *n) {
    shape x;
    TRY(shape_attr(g->c, n, "shape", &x));
    return set_out(g, n, 0, n->in[0]->type, &x);
}

status infer_grid_sample_grad_grid(graph *g, node *n) { return set_out(g, n, 0, n->in[0]->type, &n->in[2]->shape); }

status grad_grid_sample(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *x = n->in[0], *grid = n->in[1];
    const attr *const as =
        NODE_ATTRS(STRING("mode", node_string(n, "mode")), STRING("padding_mode", node_string(n, "padding_mode")),
                   INT("align_corners", node_int(n, "align_corners")), INTS("shape", x->shape.rank, x->shape.dim));

    if (need(n, 0)) TRY(emit_with(g, &dx[0], "GridSampleGradInput", as, dy[0], grid));
    if (need(n, 1)) TRY(emit_with(g, &dx[1], "GridSampleGradGrid", as, dy[0], x, grid));
    return OK;
}

/* Work of one point in one channel. */
static int64_t work(const sampling *s) { return s->manner.mode == CUBIC ? 32 : 8; }

static void each_plane(const sampling *s, range_fn *narrow, range_fn *wide) {
    parallel_for(s->images * s->channels, parallel_rows(s->points * work(s)), s->narrow ? narrow : wide,
                 (void *)(uintptr_t)s);
}

status grid_sample_cpu(ctx *c, const call *k) {
    sampling s;

    TRY(sampling_of(c, k->node, k->in[0].type, &k->in[0].shape, &k->in[1].shape, &s));
    s.x = k->in[0].data;
    s.grid = k->in[1].data;
    s.out = k->out[0].data;
    each_plane(&s, sample_float, sample_double);
    return OK;
}

status grid_sample_grad_input_cpu(ctx *c, const call *k) {
    sampling s;

    TRY(sampling_of(c, k->node, k->in[0].type, &k->out[0].shape, &k->in[1].shape, &s));
    s.dy = k->in[0].data;
    s.grid = k->in[1].data;
    s.out = k->out[0].data;
    each_plane(&s, sample_input_float, sample_input_double);
    return OK;
}

status grid_sample_grad_grid_cpu(ctx *c, const call *k) {
    sampling s;

    TRY(sampling_of(c, k->node, k->in[0].type, &k->in[1].shape, &k->in[2].shape, &s));
    s.dy = k->in[0].data;
    s.x = k->in[1].data;
    s.grid = k->in[2].data;
    s.out = k->out[0].data;
    s.slopes = true;
    parallel_for(s.images * s.points, parallel_rows(s.channels * work(&s)),
                 s.narrow ? sample_grid_float : sample_grid_double, &s);
    return OK;
}
