/* resize.c -- resamples: Resize, Upsample, and the interpolation along one axis they are made of.
 *
 * Every mode of Resize is separable and linear: along one axis, output i is a weighted sum of a few inputs,
 *
 *     y[i] = sum over k of weight[k][i] * x[index[k][i]]
 *
 * so a Resize becomes one Interpolate for each axis whose size changes, with tables made once, when the graph is built,
 * out of all the modes and conventions. The gradient is an Interpolate too, by the transposed tables. Backward keeps
 * the tables, no tensor. */
#include <inttypes.h>
#include <math.h>
#include <string.h>

#include "core/ints.h"
#include "core/parallel.h"
#include "core/size.h"
#include "ops/spatial/grid_sample.h"
#include "ops/spatial/spatial.h"

/* --- tables ------------------------------------------------------------------------------------------------------- */

typedef struct axis_plan {
    int64_t in, out;
    double scale; /* out / in, or what the model says it is */
    const char *mode, *transform, *nearest;
    double cubic;
    bool exclude_outside, antialias;
    bool narrow; /* coordinates are float32, as PyTorch's are for all but float64 */
} axis_plan;

/* Rounds an intermediate result to the precision coordinates are kept in. */
static double in_precision(const axis_plan *a, double x) { return a->narrow ? (double)(float)x : x; }

static bool is(const char *a, const char *b) { return strcmp(a, b) == 0; }

/* Inputs an output step covers. */
static double step_of(const axis_plan *a) {
    if (is(a->transform, "align_corners"))
        return a->out > 1 ? in_precision(a, (double)(a->in - 1) / (double)(a->out - 1)) : 0;
    return in_precision(a, 1 / a->scale);
}

/* The input coordinate of output i. */
static double source_of(const axis_plan *a, int64_t i) {
    const double step = step_of(a), at = (double)i;

    if (is(a->transform, "align_corners") || is(a->transform, "asymmetric")) return in_precision(a, at * step);
    if (is(a->transform, "tf_half_pixel_for_nn")) return in_precision(a, (at + 0.5) * step);
    if (is(a->transform, "pytorch_half_pixel") && a->out == 1) return 0;
    double x = in_precision(a, in_precision(a, (at + 0.5) * step) - 0.5);
    if (!is(a->transform, "half_pixel_symmetric")) return x;
    /* The part of the outputs that scale asks for but a whole number cannot give is shared by both ends. */
    double adjustment = (double)a->out / ((double)a->in * a->scale), centre = (double)a->in / 2;
    return centre * (1 - adjustment) + x;
}

static int64_t nearest_index(const axis_plan *a, double x) {
    if (is(a->nearest, "floor")) return (int64_t)floor(x);
    if (is(a->nearest, "ceil")) return (int64_t)ceil(x);
    if (is(a->nearest, "round_prefer_ceil")) return (int64_t)floor(x + 0.5);
    return (int64_t)ceil(x - 0.5);
}

/* The interpolation kernels, centred on 0. */
static double triangle(double x) { return fabs(x) < 1 ? 1 - fabs(x) : 0; }
static double cubic_at(double x, double a) {
    x = fabs(x);
    if (x < 1) return ((a + 2) * x - (a + 3)) * x * x + 1;
    return x < 2 ? ((x - 5) * x + 8) * x * a - 4 * a : 0;
}

/* How far the kernel reaches; where many inputs make one output and antialiasing is asked for, it is widened. */
static double widening_of(const axis_plan *a) { return a->antialias && a->scale < 1 ? 1 / a->scale : 1; }

static int64_t taps_of(const axis_plan *a) {
    int reach = is(a->mode, "nearest") ? 0 : is(a->mode, "linear") ? 1 : 2;
    if (reach == 0) return 1;
    return 2 * (int64_t)fmin(ceil(reach * widening_of(a)), 0x1p40) + (a->antialias ? 1 : 0);
}

/* Of a widened kernel's taps those that can lie within the inputs: all others weigh nothing. */
static int64_t taps_inside(const axis_plan *a) {
    const int64_t taps = taps_of(a);
    return a->antialias && taps > a->in ? most(a->in, 1) : taps;
}

/* Column i of the tables: `taps` inputs and their weights. */
static void fill_column(const axis_plan *a, int64_t i, int64_t taps, int64_t *index, double *weight) {
    const double x = source_of(a, i), widening = widening_of(a);
    const bool linear = is(a->mode, "linear");
    double total = 0;

    if (taps_of(a) == 1) {
        index[0] = clamp(nearest_index(a, x), 0, a->in - 1);
        weight[0] = 1;
        return;
    }
    const int64_t first = taps == taps_of(a) ? (int64_t)floor(x) - (taps - 1) / 2 : 0;
    for (int64_t k = 0; k < taps; k++) {
        double distance = in_precision(a, (double)(first + k) - x) / widening;
        bool outside = first + k < 0 || first + k >= a->in;
        weight[k] = linear ? triangle(distance) : cubic_at(distance, a->cubic);
        /* A widened kernel is cut off at the border; else the border's elements stand for what is beyond it. */
        if (outside && (a->exclude_outside || a->antialias)) weight[k] = 0;
        index[k] = clamp(first + k, 0, a->in - 1);
        total += weight[k];
    }
    if (!a->exclude_outside && !a->antialias) return;
    for (int64_t k = 0; k < taps && total != 0; k++) weight[k] /= total;
}

/* Tables as constants of shape [taps, outputs]. An index of -1 is no input. */
typedef struct tables {
    int64_t taps, outputs;
    dtype type;
    value *index, *weight;
    int32_t *at;
} tables;

static status new_tables(graph *g, int64_t taps, int64_t outputs, dtype type, tables *out) {
    const shape s = SHAPE(taps, outputs);

    *out = (tables){.taps = taps, .outputs = outputs, .type = type};
    TRY(graph_check_table(g, size_mul(taps, outputs), sizeof *out->at + dtype_size(type)));
    TRY(graph_add_constant(g, I32, &s, NULL, &out->index));
    TRY(graph_add_constant(g, type, &s, NULL, &out->weight));
    out->at = (int32_t *)(uintptr_t)out->index->data;
    return OK;
}

static void set_tap(const tables *t, int64_t k, int64_t i, int64_t index, double weight) {
    t->at[k * t->outputs + i] = (int32_t)index;
    dtype_set_value(t->type, (void *)(uintptr_t)t->weight->data, k * t->outputs + i, weight);
}

static status make_tables(graph *g, const axis_plan *a, dtype type, tables *out) {
    const int64_t taps = taps_inside(a);
    int64_t *at;
    double *w;

    TRY(new_tables(g, taps, a->out, type, out));
    TRY(NEW(g->c, at, taps));
    TRY(NEW(g->c, w, taps));
    for (int64_t i = 0; i < a->out; i++) {
        fill_column(a, i, taps, at, w);
        for (int64_t k = 0; k < taps; k++) set_tap(out, k, i, at[k], w[k]);
    }
    return OK;
}

/* --- Interpolate -------------------------------------------------------------------------------------------------- */

static status infer_interpolate(graph *g, node *n) {
    shape y;

    TRY(require(g, n, 0));
    y = n->in[0]->shape;
    y.dim[node_int(n, "axis")] = n->in[1]->shape.dim[1];
    return set_out(g, n, 0, n->in[0]->type, &y);
}

/* For each of `inputs` inputs, the outputs it goes into. */
static status transpose_tables(graph *g, const value *index, const value *weight, int64_t inputs, tables *out) {
    const int64_t taps = index->shape.dim[0], outputs = index->shape.dim[1];
    const int32_t *from = index->data;
    int64_t most = 1, *used;

    TRY(NEW(g->c, used, inputs));
    for (int64_t e = 0; e < taps * outputs; e++)
        if (from[e] >= 0 && ++used[from[e]] > most) most = used[from[e]];
    TRY(new_tables(g, most, inputs, weight->type, out));
    for (int64_t e = 0; e < most * inputs; e++) out->at[e] = -1;
    memset(used, 0, sizeof *used * (size_t)inputs);
    for (int64_t i = 0; i < outputs; i++)
        for (int64_t k = 0; k < taps; k++) {
            int64_t e = k * outputs + i, to = from[e];
            if (to >= 0) set_tap(out, used[to]++, to, i, dtype_get(weight->type, weight->data, e));
        }
    return OK;
}

static status grad_interpolate(graph *g, const node *n, value *const dy[], value *dx[]) {
    const int64_t axis = node_int(n, "axis");
    tables t;

    TRY(transpose_tables(g, n->in[1], n->in[2], n->in[0]->shape.dim[axis], &t));
    return emit_with(g, &dx[0], "Interpolate", NODE_ATTRS(INT("axis", axis)), dy[0], t.index, t.weight);
}

/* x is [outer, inputs, inner], y [outer, outputs, inner]. */
typedef struct interpolation {
    const void *x, *weight;
    void *y;
    const int32_t *index;
    int64_t outer, inputs, outputs, inner, taps;
} interpolation;

#define TEMPLATE "ops/spatial/resize_interpolate.h"
#include "ops/pointwise/float_and_double.h"

static status interpolate_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *y = &k->out[0];
    const int axis = (int)node_int(k->node, "axis");
    interpolation p = {.x = x->data, .y = y->data, .index = k->in[1].data, .weight = k->in[2].data};

    (void)c;
    p.outer = shape_span(&x->shape, 0, axis);
    p.inputs = x->shape.dim[axis];
    p.outputs = y->shape.dim[axis];
    p.inner = shape_span(&x->shape, axis + 1, x->shape.rank);
    p.taps = k->in[1].shape.dim[0];
    if (tensor_count(y) > 0)
        parallel_for(p.outer, parallel_rows(p.outputs * p.taps * p.inner),
                     y->type == F64 ? interpolate_double : interpolate_float, &p);
    return OK;
}

/* --- Resize ------------------------------------------------------------------------------------------------------- */

/* What one Resize asks for, by axis of x. */
typedef struct request {
    int64_t size[MAX_RANK];
    double scale[MAX_RANK];
} request;

/* The axes that scales and sizes are about. */
static status resized_axes(graph *g, const node *n, int *count, int axes[MAX_RANK]) {
    const int64_t *given;
    int rank = n->in[0]->shape.rank;

    *count = node_ints(n, "axes", &given);
    if (*count > rank) return fail(g->c, E_INVALID, "%s has more axes than its operand", n->op->name);
    for (int i = 0; i < *count; i++) TRY(shape_axis(g->c, given[i], rank, &axes[i]));
    if (*count >= 0) return OK;
    *count = rank;
    for (int i = 0; i < rank; i++) axes[i] = i;
    return OK;
}

/* Exporters write factors as float32, though the user wrote 0.7: the simplest fraction that reads back the same. */
static double simplest(double x) {
    double p0 = 0, q0 = 1, p = 1, q = 0, rest = x; /* convergents of x's continued fraction */

    for (int i = 0; i < 32; i++) {
        double whole = floor(rest), p1 = whole * p + p0, q1 = whole * q + q0;
        p0 = p;
        q0 = q;
        p = p1;
        q = q1;
        if ((float)(p / q) == (float)x || rest == whole) return p / q;
        rest = 1 / (rest - whole);
    }
    return x;
}

/* PyTorch forgets factors where the sizes say something simpler: an axis that keeps its size is kept (by cubics only if
 * all do), and by the nearest each element of one that doubles is there twice. */
static void forget_factors(const node *n, const shape *x, const int *axes, int count, request *r) {
    const bool cubic = is(node_string(n, "mode"), "cubic"), nearest = is(node_string(n, "mode"), "nearest");
    bool all = true;

    for (int i = 0; i < count; i++) all &= r->size[axes[i]] == x->dim[axes[i]];
    for (int i = 0; i < count; i++) {
        if (r->size[axes[i]] == x->dim[axes[i]] && (all || !cubic)) r->scale[axes[i]] = 1;
        if (r->size[axes[i]] == 2 * x->dim[axes[i]] && nearest) r->scale[axes[i]] = 2;
    }
}

static status scales_request(graph *g, const node *n, value *scales, request *r) {
    const shape *x = &n->in[0]->shape;
    int count, axes[MAX_RANK];

    TRY(resized_axes(g, n, &count, axes));
    if (!value_is_constant(scales))
        return fail(g->c, E_UNSUPPORTED, "%s by factors that are computed from data", n->op->name);
    if (shape_count(&scales->shape) != count)
        return fail(g->c, E_SHAPE, "%s of %d axes by %" PRId64 " factors", n->op->name, count,
                    shape_count(&scales->shape));
    for (int i = 0; i < count; i++) {
        double s = dtype_get(scales->type, scales->data, i), size;
        if (!(s > 0 && s < (double)INT32_MAX)) return fail(g->c, E_INVALID, "%s by the factor %g", n->op->name, s);
        s = simplest(s);
        size = floor((double)x->dim[axes[i]] * s);
        if (!(size < (double)INT32_MAX)) return fail(g->c, E_INVALID, "%s to %g elements", n->op->name, size);
        r->scale[axes[i]] = s;
        r->size[axes[i]] = (int64_t)size;
    }
    forget_factors(n, x, axes, count, r);
    return OK;
}

/* keep_aspect_ratio_policy: one factor for all axes, such that no size is larger, or smaller, than asked for. */
static void keep_aspect_ratio(const node *n, const shape *x, const int *axes, int count, request *r) {
    const char *policy = node_string(n, "keep_aspect_ratio_policy");
    double factor = 0;

    if (!is(policy, "not_larger") && !is(policy, "not_smaller")) return;
    for (int i = 0; i < count; i++) {
        double s = (double)r->size[axes[i]] / (double)x->dim[axes[i]];
        if (i == 0 || (is(policy, "not_larger") ? s < factor : s > factor)) factor = s;
    }
    for (int i = 0; i < count; i++) {
        r->scale[axes[i]] = factor;
        r->size[axes[i]] = (int64_t)floor((double)x->dim[axes[i]] * factor + 0.5);
    }
}

static status sizes_request(graph *g, const node *n, value *sizes, request *r) {
    const shape *x = &n->in[0]->shape;
    const int64_t *given;
    int count, axes[MAX_RANK], n_sizes;

    TRY(resized_axes(g, n, &count, axes));
    TRY(value_ints(g, sizes, "the sizes of Resize", &n_sizes, &given));
    if (n_sizes != count) return fail(g->c, E_SHAPE, "%s of %d axes to %d sizes", n->op->name, count, n_sizes);
    for (int i = 0; i < count; i++) {
        if (given[i] < 0 || given[i] > INT32_MAX || (x->dim[axes[i]] == 0 && given[i] != 0))
            return fail(g->c, E_SHAPE, "%s of axis %d from %" PRId64 " to %" PRId64, n->op->name, axes[i],
                        x->dim[axes[i]], given[i]);
        r->size[axes[i]] = given[i];
        r->scale[axes[i]] = (double)given[i] / (double)x->dim[axes[i]];
    }
    keep_aspect_ratio(n, x, axes, count, r);
    return OK;
}

/* One axis. Floats are interpolated; other types have no weights, only a nearest element. */
static status resize_axis(graph *g, const axis_plan *a, int axis, value *x, value **out) {
    tables t;

    if (!dtype_is_float(x->type) && taps_of(a) > 1)
        return fail(g->c, E_UNSUPPORTED, "interpolation between %s numbers", dtype_name(x->type));
    TRY(make_tables(g, a, x->type == F64 ? F64 : F32, &t));
    if (dtype_is_float(x->type))
        return emit_with(g, out, "Interpolate", NODE_ATTRS(INT("axis", axis)), x, t.index, t.weight);
    TRY(emit_reshape(g, t.index, &SHAPE(a->out), &t.index));
    return emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", axis)), x, t.index);
}

/* Is `word` one of the words of `list`, between single spaces? */
static bool listed(const char *word, const char *list) {
    size_t length = strlen(word);
    for (const char *at = list; (at = strstr(at, word)) != NULL && length > 0; at++)
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0)) return true;
    return false;
}

static status check_words(graph *g, const axis_plan *a) {
    const char *odd = NULL;

    if (!listed(a->mode, "nearest linear cubic")) odd = a->mode;
    if (!listed(a->nearest, "round_prefer_floor round_prefer_ceil floor ceil")) odd = a->nearest;
    if (!listed(a->transform, "half_pixel half_pixel_symmetric pytorch_half_pixel align_corners asymmetric "
                              "tf_half_pixel_for_nn"))
        odd = a->transform;
    return odd ? fail(g->c, E_UNSUPPORTED, "Resize in the way of \"%s\"", odd) : OK;
}

/* PyTorch has no picture without elements, but for a batch of none: it says so itself. */
static status check_sizes(graph *g, const value *x, const request *r) {
    for (int i = 1; i < x->shape.rank; i++)
        if (x->shape.dim[i] == 0 || r->size[i] == 0)
            return fail(g->c, E_UNSUPPORTED, "Resize of axis %d from %" PRId64 " to %" PRId64, i, x->shape.dim[i],
                        r->size[i]);
    return OK;
}

/* Resizes the axes of x one by one, those that grow least first: what is in between stays small. */
static status resize(graph *g, const node *n, const request *r, const axis_plan *manner, value **out) {
    value *x = n->in[0];
    bool done[MAX_RANK] = {false};

    TRY(check_words(g, manner));
    TRY(check_sizes(g, x, r));
    for (;;) {
        int next = -1;
        for (int i = 0; i < x->shape.rank; i++) {
            if (done[i] || (r->size[i] == x->shape.dim[i] && r->scale[i] == 1)) continue;
            if (next < 0 || r->scale[i] < r->scale[next]) next = i;
        }
        if (next < 0) break;
        axis_plan a = *manner;
        a.in = x->shape.dim[next];
        a.out = r->size[next];
        a.scale = r->scale[next];
        a.narrow = x->type != F64;
        TRY(resize_axis(g, &a, next, x, &x));
        done[next] = true;
    }
    *out = x;
    return OK;
}

static bool has_elements(const value *v) { return v && shape_count(&v->shape) > 0; }

static status lower_resize(graph *g, const node *n, value **out) {
    value *scales = node_in(n, 2), *sizes = node_in(n, 3);
    axis_plan a = {.mode = node_string(n, "mode"),
                   .transform = node_string(n, "coordinate_transformation_mode"),
                   .nearest = node_string(n, "nearest_mode"),
                   .cubic = node_float(n, "cubic_coeff_a"),
                   .exclude_outside = node_int(n, "exclude_outside") != 0,
                   .antialias = node_int(n, "antialias") != 0};
    request r;

    TRY(require(g, n, 0));
    TRY(lower_to_f32(g, n, out)); /* once, not for every axis */
    if (out[0]) return OK;
    for (int i = 0; i < MAX_RANK; i++) {
        r.size[i] = i < n->in[0]->shape.rank ? n->in[0]->shape.dim[i] : 0;
        r.scale[i] = 1;
    }
    if (has_elements(sizes)) TRY(sizes_request(g, n, sizes, &r));
    else if (has_elements(scales)) TRY(scales_request(g, n, scales, &r));
    else if (n->in[0]->shape.rank > 0) return fail(g->c, E_INVALID, "Resize without sizes or factors");
    return resize(g, n, &r, &a, &out[0]);
}

/* The form before opset 11, and Upsample: factors only, one convention. */
static status lower_upsample(graph *g, const node *n, value **out) {
    axis_plan a = {.mode = node_string(n, "mode"), .transform = "asymmetric", .nearest = "floor"};
    request r;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(lower_to_f32(g, n, out));
    if (out[0]) return OK;
    TRY(scales_request(g, n, n->in[1], &r));
    return resize(g, n, &r, &a, &out[0]);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

#define OP(name_, domain_, since_, least_, most_)                                                                      \
    .name = name_, .domain = domain_, .since = since_, .min_in = least_, .max_in = most_, .max_out = 1
#define RESIZE(...)                                                                                                    \
    .attrs = NODE_ATTRS(STRING("coordinate_transformation_mode", "half_pixel"), FLOAT("cubic_coeff_a", -0.75),         \
                        INT("exclude_outside", 0), FLOAT("extrapolation_value", 0), STRING("mode", "nearest"),         \
                        STRING("nearest_mode", "round_prefer_floor"), __VA_ARGS__),                                    \
    .lower = lower_resize
#define UPSAMPLE .attrs = NODE_ATTRS(STRING("mode", "nearest")), .lower = lower_upsample
#define GRID_SAMPLE(mode, ...)                                                                                         \
    .dtypes = FLOATS, .lower = lower_to_f32,                                                                           \
    .attrs = NODE_ATTRS(STRING("padding_mode", "zeros"), INT("align_corners", 0), STRING("mode", mode), __VA_ARGS__)
#define GRID_SAMPLE_FORWARD                                                                                            \
    .infer = infer_grid_sample, .grad = grad_grid_sample, .cpu = grid_sample_cpu, .cuda = grid_sample_cuda

kernel_fn interpolate_cuda; /* cuda/kernels/resize.cu */

/* clang-format off */
const op_def resize_ops[] = {
    {OP("Upsample", "", 9, 2, 2), UPSAMPLE},
    {OP("Resize", "", 10, 2, 2), UPSAMPLE},
    {OP("Resize", "", 11, 1, 4), RESIZE({.name = NULL})},
    {OP("Resize", "", 18, 1, 4),
     RESIZE(INT("antialias", 0), NO_DEFAULT("axes", INTS), STRING("keep_aspect_ratio_policy", "stretch"))},
    {OP("Interpolate", ORT_DOMAIN, 1, 3, 3), .owned = OPERAND(1), .dtypes = SET(F32) | SET(F64), .attrs = NODE_ATTRS(INT("axis", 0)),
     .infer = infer_interpolate, .grad = grad_interpolate, .cpu = interpolate_cpu, .cuda = interpolate_cuda},
    {OP("GridSample", "", 16, 2, 2), GRID_SAMPLE("bilinear", {.name = NULL}), GRID_SAMPLE_FORWARD},
    {OP("GridSample", "", 20, 2, 2), GRID_SAMPLE("linear", {.name = NULL}), GRID_SAMPLE_FORWARD},
    {OP("GridSampleGradInput", ORT_DOMAIN, 1, 2, 2), GRID_SAMPLE("linear", NO_DEFAULT("shape", INTS)),
     .infer = infer_grid_sample_grad_input, .cpu = grid_sample_grad_input_cpu,
     .cuda = grid_sample_grad_input_cuda, .cuda_workspace = grid_sample_grad_input_cuda_workspace},
    {OP("GridSampleGradGrid", ORT_DOMAIN, 1, 3, 3), GRID_SAMPLE("linear", NO_DEFAULT("shape", INTS)),
     .infer = infer_grid_sample_grad_grid, .cpu = grid_sample_grad_grid_cpu,
     .cuda = grid_sample_grad_grid_cuda},
    {0},
};
/* clang-format on */
