/* conv_shim.c -- runs convolutions by torch's own operator, which is oneDNN's.
 *
 * The operator allocates its result, which is then copied, and goes through torch's dispatcher: so it is taken only
 * where blocked convolution earns that back. dx is a transposed convolution of dy. */
#include <math.h>
#include <string.h>

#include "core/torch_lib.h"
#include "ops/spatial/conv_products.h"

/* --- the choice --------------------------------------------------------------------------------------------------- */

enum {
    WORTH_A_CALL = 1 << 18, /* multiplications; with fewer, the call costs more than it saves */
    BLOCK = 8,              /* channels that blocked convolution handles together, at least */
};

static bool overlapping(const window *w) {
    bool wide = false;
    for (int i = 0; i < SPATIAL; i++) wide |= window_span(w, i) > w->stride[i];
    return wide;
}

/* torch pads alike on both sides. */
static bool symmetric(const window *w) {
    for (int i = 0; i < SPATIAL; i++) {
        int64_t room = size_add(w->in[i] + 2 * w->before[i], -window_span(w, i));
        if (room < 0 || room / w->stride[i] + 1 != w->out[i]) return false;
    }
    return true;
}

static bool available(void) {
    const torch_lib *t = torch_lib_get();
    torch_quiet q;

    if (!t->aoti_torch_cpu_convolution || !t->aoti_torch_cpu_convolution_backward) return false;
    if (!t->aoti_torch_get_data_ptr || !t->aoti_torch_get_numel || !t->aoti_torch_get_stride) return false;
    if (!torch_enter(t, &q)) return false; /* it would see the user's autocast and modes */
    torch_leave(&q);
    return true;
}

bool conv_by_torch(const conv *v, conv_product product) {
    if (v->type == F64) return false; /* torch makes columns for it, as we do */
    if (v->type != F32 && !torch_has_narrow(v->type)) return false;
    if (conv_by_product(v) || conv_is_depthwise(v)) return false;
    if (v->type == F32 && !overlapping(&v->w)) return false; /* patches and 1x1: columns copy little or nothing */
    if (!symmetric(&v->w)) return false;
    if (conv_work(v) < WORTH_A_CALL) return false;
    /* The gradient of an image of few channels, which is seldom wanted, has nothing to block. */
    if (product == CONV_GRAD_INPUT && v->groups == 1 && v->in < BLOCK) return false;
    /* Weights much larger than the images are written once by a product, and copied after torch has written them. */
    if (product == CONV_GRAD_WEIGHT && 2 * v->images * volume(v->w.out) <= v->groups * v->out) return false;
    return available();
}

/* Of images of so many channels as blocks have them. */
static double blocked(double channels, double places) { return ceil(channels / BLOCK) * BLOCK * places; }

/* As measured (oneDNN, float32): operands and result are there in blocks at once, then the result in blocks and as it is
 * given back. Images of few channels are read as they are. A transposed convolution with strides holds a third image. */
int64_t conv_torch_bytes(const conv *v, conv_product product) {
    const double of_x = (double)v->images * (double)volume(v->w.in),
                 of_y = (double)v->images * (double)volume(v->w.out);
    const double in = (double)(v->groups * v->in), out = (double)(v->groups * v->out);
    const double x = v->in < BLOCK && v->groups == 1 ? 0 : blocked(in, of_x), y = blocked(out, of_y);
    const double w = out * (double)v->in * (double)volume(v->w.kernel), both = x + w + y;
    bool strided = false;
    double most = 0;

    for (int i = 0; i < SPATIAL; i++) strided |= v->w.stride[i] > 1;
    if (product == CONV_FORWARD) most = fmax(both, y + out * of_y);
    else if (product == CONV_GRAD_INPUT) most = fmax(both, strided ? 3 * x : x + in * of_x);
    else most = fmax(both, 2 * w);
    most *= (double)dtype_size(v->type);
    return most < (double)(INT64_MAX / 2) ? (int64_t)most : INT64_MAX / 2;
}

/* --- the calls ---------------------------------------------------------------------------------------------------- */

static bool take(const torch_call *c, int i, const shape *s, dtype type, void *to) {
    int64_t stride[MAX_RANK];
    stride_contiguous(s, stride);
    return torch_take(c, i, type, s, stride, to);
}

static shape x_shape(const conv *v) { return spatial_shape(v->images, v->groups * v->in, v->w.rank, v->w.in); }
static shape y_shape(const conv *v) { return spatial_shape(v->images, v->groups * v->out, v->w.rank, v->w.out); }
static shape w_shape(const conv *v) { return spatial_shape(v->groups * v->out, v->in, v->w.rank, v->w.kernel); }

static aten tensor_of(const torch_call *s, const conv *v, const void *data, shape dims) {
    return torch_contiguous(s->t, v->type, data, &dims);
}

/* The window's sizes for the axes there are. */
#define AXES(v, member) ((v)->w.member + SPATIAL - (v)->w.rank), (v)->w.rank

bool conv_forward_shim(const conv *v, const void *x, const void *w, const void *bias, void *y) {
    const int64_t none[SPATIAL] = {0};
    shape dims = y_shape(v), channels = SHAPE(v->groups * v->out);
    torch_call s;
    bool done;

    if (!torch_begin(&s, torch_lib_get())) return false;
    s.in[0] = tensor_of(&s, v, x, x_shape(v));
    s.in[1] = tensor_of(&s, v, w, w_shape(v));
    if (bias) s.in[2] = tensor_of(&s, v, bias, channels);
    done = s.in[0] && s.in[1] && (!bias || s.in[2]) &&
           !s.t->aoti_torch_cpu_convolution(s.in[0], s.in[1], bias ? &s.in[2] : NULL, AXES(v, stride), AXES(v, before),
                                            AXES(v, dilation), 0, none, v->w.rank, v->groups, &s.out[0]) &&
           take(&s, 0, &dims, v->type, y);
    torch_end(&s);
    return done;
}

bool conv_grad_input_shim(const conv *v, const void *dy, const void *w, void *dx) {
    int64_t out_pad[SPATIAL]; /* inputs that no window reached are missing at the end */
    shape dims = x_shape(v);
    torch_call s;
    bool done;

    for (int i = 0; i < SPATIAL; i++)
        out_pad[i] = v->w.in[i] - ((v->w.out[i] - 1) * v->w.stride[i] - 2 * v->w.before[i] + window_span(&v->w, i));
    if (!torch_begin(&s, torch_lib_get())) return false;
    s.in[0] = tensor_of(&s, v, dy, y_shape(v));
    s.in[1] = tensor_of(&s, v, w, w_shape(v));
    done = s.in[0] && s.in[1] &&
           !s.t->aoti_torch_cpu_convolution(s.in[0], s.in[1], NULL, AXES(v, stride), AXES(v, before), AXES(v, dilation),
                                            1, out_pad + SPATIAL - v->w.rank, v->w.rank, v->groups, &s.out[0]) &&
           take(&s, 0, &dims, v->type, dx);
    torch_end(&s);
    return done;
}

bool conv_grad_weight_shim(const conv *v, const void *x, const void *dy, void *dw) {
    const int64_t none[SPATIAL] = {0};
    const int32_t weight_only[3] = {0, 1, 0};
    shape dims = w_shape(v);
    torch_call s;
    bool done;

    if (!torch_begin(&s, torch_lib_get())) return false;
    s.in[0] = tensor_of(&s, v, dy, y_shape(v));
    s.in[1] = tensor_of(&s, v, x, x_shape(v));
    s.in[2] = tensor_of(&s, v, dw, dims); /* the weight: only its shape is looked at */
    done = s.in[0] && s.in[1] && s.in[2] &&
           !s.t->aoti_torch_cpu_convolution_backward(s.in[0], s.in[1], s.in[2], NULL, 0, AXES(v, stride),
                                                     AXES(v, before), AXES(v, dilation), 0, none, v->w.rank, v->groups,
                                                     weight_only, 3, &s.out[0], &s.out[1], &s.out[2]) &&
           take(&s, 1, &dims, v->type, dw);
    torch_end(&s);
    return done;
}
