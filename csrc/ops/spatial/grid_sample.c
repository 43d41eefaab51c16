/* grid_sample.c -- samples images where a grid says:
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
#include "ops/spatial/grid_sample.h"

#include <string.h>
#include <tgmath.h>

#include "core/parallel.h"
#include "ops/spatial/spatial.h"

enum { SEGMENT = 64, MOST_TAPS = 16, AXIS_TAPS = 4 };

typedef struct manner {
    enum { NEAREST, LINEAR, CUBIC } mode;
    enum { ZEROS, BORDER, REFLECTION } padding;
    bool align_corners;
} manner;

typedef struct sampling {
    manner manner;
    bool narrow, slopes; /* float32; are slopes wanted? */
    int axes;
    int64_t images, channels, size[SPATIAL], points; /* size: right-aligned; points: of one image */
    const void *x, *grid, *dy;
    void *out;
} sampling;

/* Ranges are over images and channels. The part of a range that lies in one image shares its taps: it ends at */
static inline int64_t image_end(const sampling *s, int64_t c, int64_t end) {
    int64_t next = (c / s->channels + 1) * s->channels;
    return next < end ? next : end;
}

#define TEMPLATE "ops/spatial/grid_sample_points.h"
#include "ops/pointwise/float_and_double.h"

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
    sampling s = {.axes = 0};
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
    manner m;
    const attr *const as =
        NODE_ATTRS(STRING("mode", node_string(n, "mode")), STRING("padding_mode", node_string(n, "padding_mode")),
                   INT("align_corners", node_int(n, "align_corners")), INTS("shape", x->shape.rank, x->shape.dim));

    if (need(n, 0)) TRY(emit_with(g, &dx[0], "GridSampleGradInput", as, dy[0], grid));
    if (!need(n, 1)) return OK;
    TRY(manner_of(g->c, n, &m));
    if (m.mode == NEAREST) return zeros_like(g, grid, &dx[1]);
    return emit_with(g, &dx[1], "GridSampleGradGrid", as, dy[0], x, grid);
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
