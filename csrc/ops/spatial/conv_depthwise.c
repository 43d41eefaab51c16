/* conv_depthwise.c -- computes convolutions of one input channel a group, as MobileNets and ConvNeXts have them.
 *
 * A product would have one row. So each plane is laid out with its padding in a buffer, some lines at a time, and all
 * lines of it are one long line: what kernel element t of output q sees lies offset[t] behind q, whatever line q is in.
 *
 *     y[q] = sum over t of w[t] x[q + offset[t]]          dw[t] = sum over q of dy[q] x[q + offset[t]]
 *
 * Between two lines lie outputs that there are not. They are left out when y is copied to its place, and are 0 in dy.
 * With a stride s the buffer has s * s planes, of the pixels that lie s apart. dx is computed as y is, a plane of those
 * at a time, from dy with zeros around it. Every sum has a fixed order, whatever the number of threads. */
#include <string.h>

#include "core/ints.h"
#include "core/parallel.h"
#include "core/size.h"
#include "ops/spatial/conv_products.h"

enum {
    MOST_TAPS = 1024,
    FEW_OUTPUTS = 8,   /* of a channel, less than; with more a product has rows enough */
    ROOM = 8192,       /* elements of planes in a buffer */
    WIDEST = ROOM / 4, /* line of one */
    WIDE = 64,         /* bytes that are computed at once */
    BLOCK = 4,         /* times that */
    SLACK = 2 * WIDE,  /* elements behind what is in a buffer, which are read for nothing */
    TOGETHER = 5,      /* taps of a look at dy */
    BUFFER = ROOM + WIDEST + SLACK,
    MOST_TERMS = 512 /* that are added up in a lane; then in double */
};

/* How planes are laid out. Lines are of axis 1 and pixels of axis 2. */
typedef struct layout {
    int64_t behind[2]; /* how far the last kernel element looks, in lines and pixels of a plane */
    int64_t width;     /* pixels of a line in the buffer, and of one of results */
    int64_t lines;     /* of results, in a strip */
    int64_t plane;     /* elements of one of the buffer's */
    int32_t planes;    /* s * s */
    int32_t line[MOST_TAPS], pixel[MOST_TAPS], of[MOST_TAPS]; /* [tap] where it looks, and in which of the planes */
} layout;

typedef struct depthwise {
    const conv *v;
    const layout *at;
    const void *x, *w, *dy;
    void *out;
    bool add;
} depthwise;

static int64_t stride_of(const conv *v, int axis) { return v->w.stride[1 + axis]; }

/* False: not even one line fits into the buffer. */
static bool lay_out(const conv *v, layout *to) {
    const window *w = &v->w;
    int64_t planes = 1;

    for (int i = 0; i < 2; i++) {
        to->behind[i] = size_mul(w->kernel[1 + i] - 1, w->dilation[1 + i]) / stride_of(v, i);
        planes = size_mul(planes, stride_of(v, i));
    }
    to->width = size_add(w->out[2], to->behind[1]);
    if (planes > ROOM || to->width > WIDEST || to->behind[0] > ROOM) return false;
    to->planes = (int32_t)planes;
    to->lines = least(ROOM / (planes * to->width) - to->behind[0], w->out[1] + to->behind[0]);
    to->plane = (to->lines + to->behind[0]) * to->width;
    return to->lines > 0;
}

static void place_taps(const conv *v, layout *to) {
    const window *w = &v->w;
    lay_out(v, to);
    for (int t = 0; t < (int)conv_taps(v); t++) {
        const int64_t line = t / w->kernel[2] * w->dilation[1], pixel = t % w->kernel[2] * w->dilation[2];
        to->line[t] = (int32_t)(line / stride_of(v, 0));
        to->pixel[t] = (int32_t)(pixel / stride_of(v, 1));
        to->of[t] = (int32_t)(line % stride_of(v, 0) * stride_of(v, 1) + pixel % stride_of(v, 1));
    }
}

bool conv_is_depthwise(const conv *v) {
    layout at;
    if (v->groups < 2 || v->in != 1 || v->out < 1 || v->out >= FEW_OUTPUTS) return false;
    if (v->w.in[0] != 1 || v->w.out[0] != 1 || v->w.kernel[0] != 1 || v->w.before[0] != 0) return false;
    if (conv_taps(v) > MOST_TAPS || v->images == 0 || volume(v->w.in) == 0 || volume(v->w.out) == 0) return false;
    return lay_out(v, &at);
}

/* Of a line in the buffer, pixels [from, to) are there: its pixel i is pixel i * stride + first of `count`. */
SIMD_PART void pixels_there(int64_t first, int64_t stride, int64_t count, int64_t width, int64_t *from, int64_t *to) {
    *from = first < 0 ? (-first + stride - 1) / stride : 0;
    *to = count > first ? (count - first + stride - 1) / stride : 0;
    if (*to > width) *to = width;
    if (*from > *to) *from = *to;
}

SIMD_PART void offsets_in_x(const layout *at, int taps, int32_t *to) {
    for (int t = 0; t < taps; t++)
        to[t] = at->of[t] * (int32_t)at->plane + at->line[t] * (int32_t)at->width + at->pixel[t];
}

#define TEMPLATE "ops/spatial/conv_depthwise.h"
#include "ops/pointwise/each_float.h"

static range_fn *const forward[] = FLOAT_TABLE(forward), *const grad_input[] = FLOAT_TABLE(grad_input),
                       *const grad_weight[] = FLOAT_TABLE(grad_weight);
typedef bool finite_fn(const void *of, int64_t count);
static finite_fn *const all_finite[] = FLOAT_TABLE(all_finite);

/* --- the three ---------------------------------------------------------------------------------------------------- */

static void run(const depthwise *d, int64_t count, int64_t work, range_fn *const of[]) {
    parallel_for(count, parallel_rows(work), of[d->v->type], (void *)(uintptr_t)d);
}

/* Where a window looks beyond the image there is 0, and infinity times 0 is no number: others leave such places out. */
static bool is_finite(const conv *v, const void *w) {
    return dtype_is_narrow(v->type) || all_finite[v->type](w, v->groups * v->out * conv_taps(v));
}

bool conv_forward_depthwise(const conv *v, const void *x, const void *w, void *y, bool add) {
    layout at;
    const depthwise d = {.v = v, .at = &at, .x = x, .w = w, .out = y, .add = add};

    if (!conv_is_depthwise(v) || !is_finite(v, w)) return false;
    place_taps(v, &at);
    run(&d, v->images * v->groups * v->out, volume(v->w.out) * conv_taps(v), forward);
    return true;
}

bool conv_grad_input_depthwise(const conv *v, const void *dy, const void *w, void *dx) {
    layout at;
    const depthwise d = {.v = v, .at = &at, .w = w, .dy = dy, .out = dx};

    if (!conv_is_depthwise(v) || !is_finite(v, w)) return false;
    place_taps(v, &at);
    run(&d, v->images * v->groups, volume(v->w.out) * v->out * conv_taps(v), grad_input);
    return true;
}

bool conv_grad_weight_depthwise(const conv *v, const void *x, const void *dy, void *dw) {
    layout at;
    const depthwise d = {.v = v, .at = &at, .x = x, .dy = dy, .out = dw};

    if (!conv_is_depthwise(v)) return false;
    place_taps(v, &at);
    run(&d, v->groups * v->out, v->images * volume(v->w.out) * conv_taps(v), grad_weight);
    return true;
}
