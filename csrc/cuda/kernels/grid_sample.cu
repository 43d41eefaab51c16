/* grid_sample.cu -- mirrors ops/spatial/grid_sample.c, where the formulas are: sampling images where a grid says.
 *
 * A thread has a point, and a few channels of it. The gradient of the images adds up what points take from one pixel:
 * the taps of all points are sorted by their pixel (order.cu), and a block adds up those of one, in order. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct sample_args {
    const void *x, *grid, *dy;
    void *out;
    int64_t images, channels, points, plane, size[3]; /* points of an image; the last axis first */
    int32_t axes, mode, padding, align_corners, taps; /* taps: of a point */
    int32_t *key;                                     /* of each tap its pixel, or images x plane for none */
    const int32_t *order;
    void *weight; /* of each tap */
} sample_args;

enum { NEAREST, LINEAR, CUBIC };
enum { ZEROS, BORDER, REFLECTION };
enum { CHANNELS_AT_ONCE = 8, AXIS_TAPS = 4 };

#ifdef ORT_HOST
#include "cuda/kernels/order.h"

#include <string.h>

kernel_fn grid_sample_cuda, grid_sample_grad_input_cuda, grid_sample_grad_grid_cuda;
size_t grid_sample_grad_input_cuda_workspace(const node *n);

/* Of attributes that ops/spatial/grid_sample.c has looked at. */
static sample_args args_of(const node *n, const shape *x, const shape *grid) {
    const char *mode = node_string(n, "mode"), padding = node_string(n, "padding_mode")[0];
    sample_args a = {.images = x->dim[0],
                     .channels = x->dim[1],
                     .points = shape_span(grid, 1, grid->rank - 1),
                     .plane = shape_span(x, 2, x->rank),
                     .axes = x->rank - 2,
                     .mode = strstr(mode, "cubic")    ? CUBIC
                             : strstr(mode, "linear") ? LINEAR
                                                      : NEAREST,
                     .padding = padding == 'z'   ? ZEROS
                                : padding == 'b' ? BORDER
                                                 : REFLECTION,
                     .align_corners = node_int(n, "align_corners") != 0,
                     .taps = 1};

    for (int i = 0; i < a.axes; i++) {
        a.size[i] = x->dim[x->rank - 1 - i];
        a.taps *= a.mode == CUBIC ? AXIS_TAPS : a.mode == LINEAR ? 2 : 1;
    }
    return a;
}

static int64_t taps_of(const sample_args *a) { return a->images * a->points * a->taps; }

status grid_sample_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = {[F32] = {"sample_f32"}, [F64] = {"sample_f64"}};
    sample_args a = args_of(k->node, &k->in[0].shape, &k->in[1].shape);
    const int64_t parts = (a.channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;

    a.x = k->in[0].data;
    a.grid = k->in[1].data;
    a.out = k->out[0].data;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_over(a.images * a.points * parts, 128, 128), &a);
}

status grid_sample_grad_grid_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = {[F32] = {"sample_grid_f32"}, [F64] = {"sample_grid_f64"}};
    sample_args a = args_of(k->node, &k->in[1].shape, &k->in[2].shape);

    a.dy = k->in[0].data;
    a.x = k->in[1].data;
    a.grid = k->in[2].data;
    a.out = k->out[0].data;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_over(a.images * a.points, 128, 128), &a);
}

size_t grid_sample_grad_input_cuda_workspace(const node *n) {
    const sample_args a = args_of(n, &n->out[0]->shape, &n->in[1]->shape);
    return cuda_order_bytes(taps_of(&a)) + (size_t)(taps_of(&a) + 1) * sizeof(double);
}

status grid_sample_grad_input_cuda(ctx *c, const call *k) {
    static kernel find[DTYPE_COUNT] = {[F32] = {"sample_taps_f32"}, [F64] = {"sample_taps_f64"}};
    static kernel add[DTYPE_COUNT] = {[F32] = {"sample_input_f32"}, [F64] = {"sample_input_f64"}};
    const tensor *dx = &k->out[0];
    sample_args a = args_of(k->node, &dx->shape, &k->in[1].shape);
    const int64_t count = taps_of(&a);
    cuda_order order;

    a.dy = k->in[0].data;
    a.grid = k->in[1].data;
    a.out = dx->data;
    a.weight = k->work;
    a.key = k->work ? (int32_t *)k->work + 2 * count : NULL; /* behind the weights, which are double at most */
    TRY(cuda_clear(c, k, dx->data, (size_t)tensor_count(dx) * dtype_size(dx->type)));
    TRY(cuda_launch(c, k, &find[dx->type], geometry_over(a.images * a.points, 128, 128), &a));
    TRY(cuda_order_by(c, k, a.key, count, a.images * a.plane + 1, &order));
    a.key = order.key;
    a.order = order.index;
    return cuda_launch(c, k, &add[dx->type], geometry_over(a.channels ? count : 0, 1, WARP), &a);
}
#endif

#ifdef ORT_DEVICE
/* One axis of a point: the elements that it takes (-1: outside, worth 0), and weights and their slopes by the grid. */
typedef struct axis_taps {
    int32_t at[AXIS_TAPS];
    double weight[AXIS_TAPS], slope[AXIS_TAPS];
} axis_taps;

DEVICE void reflect(double low, double high, double *x, double *dx) {
    const double span = high - low, from = fabs(*x - low), flips = span > 0 ? floor(from / span) : 0;
    const double extra = from - flips * span;
    const int odd = flips != 2 * floor(flips / 2);

    *dx *= span > 0 ? ((*x < low) != odd ? -1 : 1) : 0;
    *x = span > 0 ? low + (odd ? span - extra : extra) : 0;
}

/* Brought into the image as the padding says. */
DEVICE void bring_in(const sample_args *a, int64_t size, double *x, double *dx) {
    const double last = (double)(size - 1), beyond = a->align_corners ? 0 : 0.5;

    if (a->padding == ZEROS) return;
    if (a->padding == REFLECTION) reflect(-beyond, last + beyond, x, dx);
    *dx = *x <= 0 || *x >= last ? 0 : *dx;
    *x = *x < 0 ? 0 : *x > last ? last : *x;
}

DEVICE int32_t place(int64_t size, double x) { return x >= 0 && x < (double)size ? (int32_t)x : -1; }

/* Cubic convolution with a = -3/4, at distances up to 1, and from 1 to 2. */
DEVICE double cubic_weight(int far, double x) {
    return far ? ((-0.75 * x + 3.75) * x - 6) * x + 3 : (1.25 * x - 2.25) * x * x + 1;
}
DEVICE double cubic_slope(int far, double x) { return far ? (-2.25 * x + 7.5) * x - 6 : (3.75 * x - 4.5) * x; }

DEVICE void fill_axis(const sample_args *a, int64_t size, double given, int is_narrow, axis_taps *t) {
    const double middle = (double)(a->align_corners ? size - 1 : size) / 2, shift = a->align_corners ? 0 : 0.5;
    double x = is_narrow ? (double)((float)(given + 1) * (float)middle - (float)shift) : (given + 1) * middle - shift;
    double dx = middle;

    if (x - x != 0) x = -100; /* infinite or NaN */
    if (a->mode != CUBIC) bring_in(a, size, &x, &dx);
    if (a->mode == NEAREST) {
        t->at[0] = place(size, nearbyint(x));
        t->weight[0] = 1;
        t->slope[0] = 0;
    } else if (a->mode == LINEAR) {
        for (int i = 0; i < 2; i++) {
            const double base = floor(x) + i;
            t->at[i] = place(size, base);
            t->weight[i] = 1 - fabs(x - base);
            t->slope[i] = i ? dx : -dx;
        }
    } else {
        for (int i = 0; i < AXIS_TAPS; i++) { /* here it is the elements that padding brings in */
            const double distance = fabs(x - floor(x) + 1 - i);
            const int far = i == 0 || i == 3;
            double base = floor(x) + i - 1, ignored = 0;
            bring_in(a, size, &base, &ignored);
            t->at[i] = place(size, base);
            t->weight[i] = cubic_weight(far, distance);
            t->slope[i] = dx * (i < 2 ? 1 : -1) * cubic_slope(far, distance);
        }
    }
}

DEVICE int axis_count(const sample_args *a) { return a->mode == CUBIC ? AXIS_TAPS : a->mode == LINEAR ? 2 : 1; }

/* Tap k of a point: its place in the plane or -1, and its weight; or, for an axis d, the weight's slope. */
DEVICE int64_t tap_of(const sample_args *a, const axis_taps *along, int k, int d, double *weight) {
    const int each = axis_count(a);
    int64_t at = 0, stride = 1;

    *weight = 1;
    for (int i = 0; i < a->axes; i++, k /= each) {
        const int j = k % each;
        at = at < 0 || along[i].at[j] < 0 ? -1 : at + along[i].at[j] * stride;
        *weight *= i == d ? along[i].slope[j] : along[i].weight[j];
        stride *= a->size[i];
    }
    return at;
}

#define TEMPLATE "cuda/kernels/grid_sample.cu"
#include "cuda/kernels/each_f32_f64.h"
#endif

#else /* the template */

DEVICE void NAME(fill_point)(const sample_args *a, int64_t point, axis_taps *along) {
    for (int i = 0; i < a->axes; i++)
        fill_axis(a, a->size[i], (double)((const T *)a->grid)[point * a->axes + i], sizeof(T) == sizeof(float),
                  &along[i]);
}

KERNEL(NAME(sample), sample_args) {
    const int64_t parts = (a.channels + CHANNELS_AT_ONCE - 1) / CHANNELS_AT_ONCE;
    FOR_EACH(i, a.images * a.points * parts) {
        const int64_t p = i % a.points, image = i / a.points / parts;
        const int64_t first = i / a.points % parts * CHANNELS_AT_ONCE;
        axis_taps along[3];
        NAME(fill_point)(&a, image * a.points + p, along);
        for (int64_t ch = first; ch < first + CHANNELS_AT_ONCE && ch < a.channels; ch++) {
            const T *x = (const T *)a.x + (image * a.channels + ch) * a.plane;
            T sum = 0;
            for (int k = 0; k < a.taps; k++) {
                double weight;
                const int64_t at = tap_of(&a, along, k, -1, &weight);
                if (at >= 0) sum += (T)weight * x[at];
            }
            ((T *)a.out)[(image * a.channels + ch) * a.points + p] = sum;
        }
    }
}

KERNEL(NAME(sample_grid), sample_args) {
    FOR_EACH(point, a.images * a.points) {
        const int64_t image = point / a.points, p = point % a.points;
        double sum[3] = {0, 0, 0};
        axis_taps along[3];
        NAME(fill_point)(&a, point, along);
        for (int k = 0; k < a.taps; k++) {
            double dot = 0, slope;
            const int64_t at = tap_of(&a, along, k, -1, &slope);
            for (int64_t ch = image * a.channels; at >= 0 && ch < (image + 1) * a.channels; ch++)
                dot += (double)((const T *)a.x)[ch * a.plane + at] * (double)((const T *)a.dy)[ch * a.points + p];
            for (int d = 0; d < a.axes; d++) {
                (void)tap_of(&a, along, k, d, &slope);
                sum[d] += slope * dot;
            }
        }
        for (int d = 0; d < a.axes; d++) ((T *)a.out)[point * a.axes + d] = (T)sum[d];
    }
}

KERNEL(NAME(sample_taps), sample_args) {
    FOR_EACH(point, a.images * a.points) {
        const int64_t image = point / a.points;
        axis_taps along[3];
        NAME(fill_point)(&a, point, along);
        for (int k = 0; k < a.taps; k++) {
            double weight;
            const int64_t at = tap_of(&a, along, k, -1, &weight);
            a.key[point * a.taps + k] = (int32_t)(at < 0 ? a.images * a.plane : image * a.plane + at);
            ((T *)a.weight)[point * a.taps + k] = (T)weight;
        }
    }
}

KERNEL(NAME(sample_input), sample_args) {
    const int64_t count = a.images * a.points * a.taps;
    FOR_BLOCKS(first, count) {
        const int32_t pixel = a.key[first];
        const int64_t image = pixel / a.plane;
        if ((first > 0 && a.key[first - 1] == pixel) || image >= a.images) continue;
        FOR_THREADS(ch, a.channels) {
            const T *dy = (const T *)a.dy + (image * a.channels + ch) * a.points;
            T sum = 0;
            for (int64_t j = first; j < count && a.key[j] == pixel; j++)
                sum += ((const T *)a.weight)[a.order[j]] * dy[a.order[j] / a.taps % a.points];
            ((T *)a.out)[(image * a.channels + ch) * a.plane + pixel % a.plane] = sum;
        }
    }
}
#endif
