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

/* --- one axis of one point ---------------------------------------------------------------------------------------- */

typedef struct manner {
    enum { NEAREST, LINEAR, CUBIC } mode;
    enum { ZEROS, BORDER, REFLECTION } padding;
    bool align_corners;
} manner;

typedef struct axis_taps {
    int count;
    int64_t at[AXIS_TAPS];     /* -1: outside, worth 0 */
    double weight[AXIS_TAPS], slope[AXIS_TAPS]; /* slope: d weight / d grid */
} axis_taps;

/* x mirrored into [low, high]; *slope is multiplied by the derivative. */
static double reflect(double x, double low, double high, double *slope) {
    double span = high - low, extra, flips;

    if (span == 0) {
        *slope = 0;
        return 0;
    }
    x -= low;
    if (x < 0) {
        x = -x;
        *slope = -*slope;
    }
    extra = fmod(x, span);
    flips = floor(x / span);
    if (fmod(flips, 2) == 0) return extra + low;
    *slope = -*slope;
    return span - extra + low;
}

/* x brought into the image as the padding says. */
static double bring_in(const manner *m, double x, int64_t size, double *slope) {
    const double last = (double)(size - 1);

    if (m->padding == ZEROS) return x;
    if (m->padding == REFLECTION)
        x = m->align_corners ? reflect(x, 0, last, slope) : reflect(x, -0.5, last + 0.5, slope);
    if (x <= 0 || x >= last) *slope = 0;
    return x < 0 ? 0 : x > last ? last : x;
}

static int64_t inside(double x, int64_t size) { return x >= 0 && x < (double)size ? (int64_t)x : -1; }

/* Cubic convolution with a = -3/4, at distance x <= 1 and 1 < x <= 2. */
static double near_weight(double x) { return (1.25 * x - 2.25) * x * x + 1; }
static double near_slope(double x) { return (3.75 * x - 4.5) * x; }
static double far_weight(double x) { return ((-0.75 * x + 3.75) * x - 6) * x + 3; }
static double far_slope(double x) { return (-2.25 * x + 7.5) * x - 6; }

static axis_taps taps_along(const manner *m, double coordinate, int64_t size, bool narrow) {
    const double half = (double)(m->align_corners ? size - 1 : size) / 2;
    double x = (coordinate + 1) * half - (m->align_corners ? 0 : 0.5), slope = half;
    axis_taps t = {.count = 0};

    if (narrow) x = (double)((float)(coordinate + 1) * (float)half - (m->align_corners ? 0 : 0.5f));
    if (!isfinite(x)) x = -100;
    if (m->mode != CUBIC) x = bring_in(m, x, size, &slope);
    if (m->mode == NEAREST) {
        t.count = 1;
        t.at[0] = inside(nearbyint(x), size);
        t.weight[0] = 1;
        return t;
    }
    const double base = floor(x), f = x - base;
    if (m->mode == LINEAR) {
        t.count = 2;
        for (int i = 0; i < 2; i++) {
            t.at[i] = inside(base + i, size);
            t.weight[i] = i ? f : 1 - f;
            t.slope[i] = i ? slope : -slope;
        }
        return t;
    }
    const double weight[AXIS_TAPS] = {far_weight(f + 1), near_weight(f), near_weight(1 - f), far_weight(2 - f)};
    const double derivative[AXIS_TAPS] = {far_slope(f + 1), near_slope(f), -near_slope(1 - f), -far_slope(2 - f)};
    t.count = AXIS_TAPS;
    for (int i = 0; i < AXIS_TAPS; i++) {
        double ignored = 1;
        t.at[i] = inside(bring_in(m, base + i - 1, size, &ignored), size);
        t.weight[i] = weight[i];
        t.slope[i] = slope * derivative[i];
    }
    return t;
}

/* --- taps of a segment of points ---------------------------------------------------------------------------------- */

typedef struct sampling {
    manner manner;
    bool narrow; /* float32 */
    int axes;
    int64_t images, channels, size[SPATIAL], points; /* size: right-aligned; points: of one image */
    const void *x, *grid, *dy;
    void *out;
} sampling;

typedef struct segment_taps {
    int64_t first, points; /* within the image */
    int count;
    int32_t at[MOST_TAPS][SEGMENT]; /* place in the plane, -1: none */
    double weight[MOST_TAPS][SEGMENT], slope[SPATIAL][MOST_TAPS][SEGMENT]; /* slope: by axis of the grid */
} segment_taps;

static double grid_at(const sampling *s, int64_t image, int64_t point, int i) {
    int64_t at = (image * s->points + point) * s->axes + i;
    return s->narrow ? (double)((const float *)s->grid)[at] : ((const double *)s->grid)[at];
}

static void point_taps(const sampling *s, int64_t image, int64_t p, segment_taps *t) {
    axis_taps along[SPATIAL]; /* by axis of the grid: the last of x first */
    int taps = 1;

    for (int i = 0; i < s->axes; i++) {
        along[i] = taps_along(&s->manner, grid_at(s, image, t->first + p, i), s->size[SPATIAL - 1 - i], s->narrow);
        taps *= along[i].count;
    }
    t->count = taps;
    for (int k = 0; k < taps; k++) {
        int64_t at = 0, stride = 1;
        double weight = 1, slope[SPATIAL] = {1, 1, 1};
        bool outside = false;
        for (int i = 0, rest = k; i < s->axes; rest /= along[i].count, i++) {
            int j = rest % along[i].count;
            outside |= along[i].at[j] < 0;
            at += along[i].at[j] * stride;
            stride *= s->size[SPATIAL - 1 - i];
            weight *= along[i].weight[j];
            for (int d = 0; d < s->axes; d++) slope[d] *= d == i ? along[i].slope[j] : along[i].weight[j];
        }
        t->at[k][p] = outside ? -1 : (int32_t)at;
        t->weight[k][p] = weight;
        for (int d = 0; d < s->axes; d++) t->slope[d][k][p] = slope[d];
    }
}

static void fill_segment(const sampling *s, int64_t image, int64_t first, segment_taps *t) {
    t->first = first;
    t->points = s->points - first < SEGMENT ? s->points - first : SEGMENT;
    for (int64_t p = 0; p < t->points; p++) point_taps(s, image, p, t);
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Ranges are over images and channels. The part of a range that lies in one image shares its taps: it ends at */
static inline int64_t image_end(const sampling *s, int64_t c, int64_t end) {
    int64_t next = (c / s->channels + 1) * s->channels;
    return next < end ? next : end;
}

#define SAMPLE(T)                                                                                                      \
    SIMD static void sample_##T(void *arg, int64_t begin, int64_t end) {                                               \
        const sampling *s = arg;                                                                                       \
        const int64_t plane = volume(s->size);                                                                         \
        segment_taps t;                                                                                                \
        for (int64_t from = begin, to; from < end; from = to) {                                                        \
            to = image_end(s, from, end);                                                                              \
            for (int64_t first = 0; first < s->points; first += SEGMENT) {                                             \
                fill_segment(s, from / s->channels, first, &t);                                                        \
                for (int64_t c = from; c < to; c++) {                                                                  \
                    const T *x = (const T *)s->x + c * plane;                                                          \
                    T *y = (T *)s->out + c * s->points + first;                                                        \
                    memset(y, 0, (size_t)t.points * sizeof(T));                                                        \
                    for (int k = 0; k < t.count; k++)                                                                  \
                        for (int64_t p = 0; p < t.points; p++)                                                         \
                            y[p] += t.at[k][p] >= 0 ? (T)t.weight[k][p] * x[t.at[k][p]] : 0;                           \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void sample_input_##T(void *arg, int64_t begin, int64_t end) {                                         \
        const sampling *s = arg;                                                                                       \
        const int64_t plane = volume(s->size);                                                                         \
        segment_taps t;                                                                                                \
        memset((T *)s->out + begin * plane, 0, (size_t)((end - begin) * plane) * sizeof(T));                           \
        for (int64_t from = begin, to; from < end; from = to) {                                                        \
            to = image_end(s, from, end);                                                                              \
            for (int64_t first = 0; first < s->points; first += SEGMENT) {                                             \
                fill_segment(s, from / s->channels, first, &t);                                                        \
                for (int64_t c = from; c < to; c++) {                                                                  \
                    const T *dy = (const T *)s->dy + c * s->points + first;                                            \
                    T *dx = (T *)s->out + c * plane;                                                                   \
                    for (int k = 0; k < t.count; k++)                                                                  \
                        for (int64_t p = 0; p < t.points; p++)                                                         \
                            if (t.at[k][p] >= 0) dx[t.at[k][p]] += (T)t.weight[k][p] * dy[p];                          \
                }                                                                                                      \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Points [begin, end), over all images. */                                                                        \
    SIMD static void sample_grid_##T(void *arg, int64_t begin, int64_t end) {                                          \
        const sampling *s = arg;                                                                                       \
        const int64_t plane = volume(s->size);                                                                         \
        segment_taps t;                                                                                                \
        double sum[SPATIAL][SEGMENT];                                                                                  \
        for (int64_t at = begin; at < end; at += t.points) {                                                           \
            const int64_t image = at / s->points;                                                                      \
            fill_segment(s, image, at % s->points, &t);                                                                \
            if (t.points > end - at) t.points = end - at;                                                              \
            memset(sum, 0, sizeof sum);                                                                                \
            for (int k = 0; k < t.count; k++)                                                                          \
                for (int64_t p = 0; p < t.points; p++) {                                                               \
                    const T *x = (const T *)s->x + image * s->channels * plane + t.at[k][p];                           \
                    const T *dy = (const T *)s->dy + image * s->channels * s->points + t.first + p;                    \
                    double dot = 0;                                                                                    \
                    if (t.at[k][p] < 0) continue;                                                                      \
                    for (int64_t c = 0; c < s->channels; c++) dot += (double)x[c * plane] * (double)dy[c * s->points]; \
                    for (int d = 0; d < s->axes; d++) sum[d][p] += t.slope[d][k][p] * dot;                             \
                }                                                                                                      \
            for (int64_t p = 0; p < t.points; p++)                                                                     \
                for (int d = 0; d < s->axes; d++) ((T *)s->out)[(at + p) * s->axes + d] = (T)sum[d][p];                \
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
    parallel_for(s.images * s.points, parallel_rows(s.channels * work(&s)),
                 s.narrow ? sample_grid_float : sample_grid_double, &s);
    return OK;
}
