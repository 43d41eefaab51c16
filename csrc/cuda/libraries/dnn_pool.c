/* dnn_pool.c -- runs average pools by cuDNN, for pool.cu. */
#include "cuda/libraries/dnn.h"
#include "cuda/libraries/dnn_library.h"

#include <string.h>

#define POOL_FUNCTIONS(F)                                                                                              \
    F(cudnnCreatePoolingDescriptor, (void **out))                                                                      \
    F(cudnnSetPoolingNdDescriptor,                                                                                     \
      (void *d, int mode, int nans, int rank, const int *window, const int *pad, const int *stride))                   \
    F(cudnnDestroyPoolingDescriptor, (void *d))                                                                        \
    F(cudnnPoolingForward,                                                                                             \
      (void *handle, void *pool, const void *alpha, void *x_is, const void *x, const void *beta, void *y_is, void *y)) \
    F(cudnnPoolingBackward, (void *handle, void *pool, const void *alpha, void *y_is, const void *y, void *dy_is,      \
                             const void *dy, void *x_is, const void *x, const void *beta, void *dx_is, void *dx))

typedef struct pool_functions {
    POOL_FUNCTIONS(ENTRY_MEMBER)
} pool_functions;

enum { AVERAGE_OF_ALL = 1, AVERAGE_OF_INSIDE = 2, PROPAGATE_NAN = 1 };
enum { X, Y, WINDOW };

static pool_functions dnn;

static status load(ctx *c) { DNN_ONCE(c, dnn, POOL_FUNCTIONS); }

static status describe(ctx *c, void *handle, dnn_known *p) {
    const dnn_key *k = &p->key;
    const int64_t axes = k->rank - 2;
    int size[SPATIAL], pad[SPATIAL], stride[SPATIAL], result;

    (void)handle;
    (void)(dnn_narrow(k->w, axes, size) && dnn_narrow(k->pad, axes, pad) && dnn_narrow(k->stride, axes, stride));
    TRY(dnn_make_tensor(c, p, X, (dtype)k->type, k->x));
    TRY(dnn_make_tensor(c, p, Y, (dtype)k->type, k->y));
    DNN_MAKE(c, p, WINDOW, dnn, Pooling);
    result =
        dnn.cudnnSetPoolingNdDescriptor(p->part[WINDOW], (int)k->mode, PROPAGATE_NAN, (int)axes, size, pad, stride);
    if (result != 0 && !dnn_is_refusal(result)) return dnn_refuse(c, result, "cudnnSetPoolingNdDescriptor");
    p->taken = result == 0;
    return OK;
}

/* In backward of an average x and y are not read: gradients of their sizes stand for them. */
static status start(ctx *c, const call *k, void *handle, const dnn_known *p, const void *arg, dnn_said *said) {
    const dnn_pool *v = arg;
    const void *one = dnn_factor(v->type, true), *zero = dnn_factor(v->type, false);
    void *x = p->part[X], *y = p->part[Y], *pool = p->part[WINDOW];

    (void)c, (void)k;
    if (v->is_grad)
        *said =
            DNN_SAID(dnn, cudnnPoolingBackward, handle, pool, one, y, v->from, y, v->from, x, v->to, zero, x, v->to);
    else *said = DNN_SAID(dnn, cudnnPoolingForward, handle, pool, one, x, v->from, zero, y, v->to);
    return OK;
}

/* Whether the library's window is this one along an axis. */
static bool is_plain(const window *w, int i) {
    const int64_t room = w->in[i] + 2 * w->before[i] - w->kernel[i];
    return w->dilation[i] == 1 && w->before[i] == w->after[i] && w->before[i] < w->kernel[i] && room >= 0 &&
           room / w->stride[i] + 1 == w->out[i];
}

/* False where it has no such pool. */
static bool describes(const call *k, const dnn_pool *p, dnn_key *out) {
    const window *w = p->w;
    const int first = w->rank == 1 ? 1 : SPATIAL - w->rank;
    const double planes = (double)p->images * (double)p->channels;
    const double x = planes * (double)volume(w->in), y = planes * (double)volume(w->out);

    if (x == 0 || y == 0 || x > INT32_MAX || y > INT32_MAX) return false;
    memset(out, 0, sizeof *out);
    out->device = k->cuda->device;
    out->kind = DNN_POOL;
    out->which = p->is_grad;
    out->type = p->type;
    out->mode = p->count_padding ? AVERAGE_OF_ALL : AVERAGE_OF_INSIDE;
    out->rank = 2 + SPATIAL - first;
    out->x[0] = out->y[0] = p->images;
    out->x[1] = out->y[1] = p->channels;
    for (int i = first; i < SPATIAL; i++) {
        const int at = i - first;
        if (!is_plain(w, i)) return false;
        out->x[2 + at] = w->in[i];
        out->y[2 + at] = w->out[i];
        out->w[at] = w->kernel[i];
        out->pad[at] = w->before[i];
        out->stride[at] = w->stride[i];
    }
    return true;
}

status dnn_average_pool(ctx *c, const call *k, const dnn_pool *p, bool *done) {
    static dnn_user pools = {.load = load, .describe = describe, .start = start, .is_optional = true};
    dnn_key of;

    *done = false;
    return describes(k, p, &of) ? dnn_run(c, k, &pools, &of, p, done) : OK;
}
