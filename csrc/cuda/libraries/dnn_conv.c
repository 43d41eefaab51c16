/* dnn_conv.c -- convolutions by cuDNN: the CUDA side of ops/spatial/conv.c.
 *
 * Of the algorithms that the library's heuristic names the first is used that gives the same bits every time, with the
 * math that it was named with, or, with ORTMODULE_CONV_ALGO_SEARCH=EXHAUSTIVE, the one of these that is measured to be the
 * fastest (measure.c); the next, where that one is refused when it is started. float32 is rounded to TF32 only where
 * torch allows it. */
#include "cuda/libraries/dnn.h"

#include "cuda/kernels/move.h"
#include "cuda/libraries/dnn_library.h"
#include "cuda/libraries/measure.h"

#include <string.h>

/* --- entry points ------------------------------------------------------------------------------------------------- */

/* What the heuristic answers, one an algorithm. */
typedef struct answer {
    int algorithm, status;
    float time;
    size_t workspace;
    int deterministic, math, reserved[3];
} answer;

#define CONV_FUNCTIONS(F)                                                                                              \
    F(cudnnCreateFilterDescriptor, (void **out))                                                                       \
    F(cudnnSetFilterNdDescriptor, (void *d, int type, int format, int rank, const int *size))                          \
    F(cudnnDestroyFilterDescriptor, (void *d))                                                                         \
    F(cudnnCreateConvolutionDescriptor, (void **out))                                                                  \
    F(cudnnSetConvolutionNdDescriptor,                                                                                 \
      (void *d, int rank, const int *pad, const int *stride, const int *dilation, int mode, int type))                 \
    F(cudnnSetConvolutionGroupCount, (void *d, int groups))                                                            \
    F(cudnnSetConvolutionMathType, (void *d, int math))                                                                \
    F(cudnnDestroyConvolutionDescriptor, (void *d))                                                                    \
    F(cudnnGetConvolutionForwardAlgorithm_v7,                                                                          \
      (void *handle, void *x, void *w, void *window, void *y, int most, int *count, answer *answers))                  \
    F(cudnnGetConvolutionBackwardDataAlgorithm_v7,                                                                     \
      (void *handle, void *w, void *dy, void *window, void *dx, int most, int *count, answer *answers))                \
    F(cudnnGetConvolutionBackwardFilterAlgorithm_v7,                                                                   \
      (void *handle, void *x, void *dy, void *window, void *dw, int most, int *count, answer *answers))                \
    F(cudnnConvolutionForward,                                                                                         \
      (void *handle, const void *alpha, void *x_is, const void *x, void *w_is, const void *w, void *window, int how,   \
       void *work, size_t work_bytes, const void *beta, void *y_is, void *y))                                          \
    F(cudnnConvolutionBackwardData,                                                                                    \
      (void *handle, const void *alpha, void *w_is, const void *w, void *dy_is, const void *dy, void *window, int how, \
       void *work, size_t work_bytes, const void *beta, void *dx_is, void *dx))                                        \
    F(cudnnConvolutionBackwardFilter,                                                                                  \
      (void *handle, const void *alpha, void *x_is, const void *x, void *dy_is, const void *dy, void *window, int how, \
       void *work, size_t work_bytes, const void *beta, void *dw_is, void *dw))

typedef struct conv_functions {
    CONV_FUNCTIONS(ENTRY_MEMBER)
} conv_functions;

enum { CROSS_CORRELATION = 1, CHANNELS_FIRST = 0, DETERMINISTIC = 1 };
enum { MATH_DEFAULT = 0, MATH_TENSOR_CORES = 1, MATH_CONVERTED = 2, MATH_NO_ROUNDING = 3 };
enum { X, W, Y, WINDOW };

static conv_functions dnn;

static status load(ctx *c) { DNN_ONCE(c, dnn, CONV_FUNCTIONS); }

#define CALL(c, name, ...) DNN_CALL(c, dnn, name, __VA_ARGS__)

/* --- describing --------------------------------------------------------------------------------------------------- */

static status describe_weights(ctx *c, dnn_known *p) {
    const dnn_key *k = &p->key;
    int sizes[DNN_RANK];

    (void)dnn_narrow(k->w, k->rank, sizes);
    DNN_MAKE(c, p, W, dnn, Filter);
    CALL(c, cudnnSetFilterNdDescriptor, p->part[W], dnn_type((dtype)k->type), CHANNELS_FIRST, (int)k->rank, sizes);
    return OK;
}

static status describe_window(ctx *c, dnn_known *p) {
    const dnn_key *k = &p->key;
    int pad[SPATIAL], stride[SPATIAL], dilation[SPATIAL];
    const int64_t axes = k->rank - 2;
    const int math = k->type == BF16 || k->type == F16 ? MATH_TENSOR_CORES
                     : k->type == F32 && !k->tf32      ? MATH_NO_ROUNDING
                                                       : MATH_DEFAULT;

    (void)(dnn_narrow(k->pad, axes, pad) && dnn_narrow(k->stride, axes, stride) &&
           dnn_narrow(k->dilation, axes, dilation));
    DNN_MAKE(c, p, WINDOW, dnn, Convolution);
    CALL(c, cudnnSetConvolutionNdDescriptor, p->part[WINDOW], (int)axes, pad, stride, dilation, CROSS_CORRELATION,
         dnn_type(k->type == F64 ? F64 : F32));
    CALL(c, cudnnSetConvolutionGroupCount, p->part[WINDOW], (int)k->groups);
    CALL(c, cudnnSetConvolutionMathType, p->part[WINDOW], math);
    return OK;
}

/* False where math would round more than torch allows. What an algorithm was named with it is used with, or it may not
 * give the same bits every time. */
static bool math_of(const dnn_key *k, const answer *a, int *math) {
    const bool may_round = k->type != F32 || k->tf32;

    *math = may_round ? a->math : MATH_NO_ROUNDING;
    if (k->type == F32 && a->math == MATH_CONVERTED) return false; /* to 16 bits */
    return may_round || a->math != MATH_TENSOR_CORES;
}

/* The algorithms that can be used, the fastest first, as the library guesses. */
static status ask(ctx *c, void *handle, dnn_known *p) {
    void *x = p->part[X], *w = p->part[W], *y = p->part[Y], *v = p->part[WINDOW];
    answer found[DNN_WAYS];
    int n = 0, result = 0;

    if (p->key.which == CONV_FORWARD)
        result = dnn.cudnnGetConvolutionForwardAlgorithm_v7(handle, x, w, v, y, DNN_WAYS, &n, found);
    else if (p->key.which == CONV_GRAD_INPUT)
        result = dnn.cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, w, y, v, x, DNN_WAYS, &n, found);
    else result = dnn.cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle, x, y, v, w, DNN_WAYS, &n, found);
    if (result != 0 && !dnn_is_refusal(result)) return dnn_refuse(c, result, "the choice of an algorithm");
    for (int i = 0; result == 0 && i < n; i++) {
        dnn_way *way = &p->ways[p->n_ways];
        if (found[i].status != 0 || found[i].deterministic != DETERMINISTIC ||
            found[i].workspace > (size_t)p->key.workspace || !math_of(&p->key, &found[i], &way->math))
            continue;
        way->algorithm = found[i].algorithm;
        p->n_ways++;
    }
    p->taken = p->n_ways > 0;
    return OK;
}

static status describe(ctx *c, void *handle, dnn_known *p) {
    TRY(dnn_make_tensor(c, p, X, (dtype)p->key.type, p->key.x));
    TRY(dnn_make_tensor(c, p, Y, (dtype)p->key.type, p->key.y));
    TRY(describe_weights(c, p));
    TRY(describe_window(c, p));
    return ask(c, handle, p);
}

/* --- starting ----------------------------------------------------------------------------------------------------- */

/* False where the library has no such window: it pads both sides alike. */
static bool describes(const call *k, const conv *v, conv_product which, dnn_key *out) {
    const int first = v->w.rank == 1 ? 1 : SPATIAL - v->w.rank;

    memset(out, 0, sizeof *out);
    out->device = k->cuda->device;
    out->kind = DNN_CONVOLUTION;
    out->which = which;
    out->type = v->type;
    out->tf32 = v->type == F32 && (k->cuda->math & TF32_CONVOLUTIONS);
    out->groups = v->groups;
    out->workspace = (int64_t)dnn_workspace(v);
    out->rank = 2 + SPATIAL - first;
    out->x[0] = out->y[0] = v->images;
    out->x[1] = v->groups * v->in;
    out->w[0] = out->y[1] = v->groups * v->out;
    out->w[1] = v->in;
    for (int i = first; i < SPATIAL; i++) {
        const window *w = &v->w;
        const int at = i - first;
        const int64_t room = w->in[i] + 2 * w->before[i] - w->dilation[i] * (w->kernel[i] - 1) - 1;
        if (room < 0 || room / w->stride[i] + 1 != w->out[i]) return false;
        out->x[2 + at] = w->in[i];
        out->w[2 + at] = w->kernel[i];
        out->y[2 + at] = w->out[i];
        out->pad[at] = w->before[i];
        out->stride[at] = w->stride[i];
        out->dilation[at] = w->dilation[i];
    }
    return out->groups <= INT32_MAX;
}

/* What one product reads and writes; its operands are in the order of the record. */
typedef struct operands {
    const void *a, *b;
    void *to, *work;
    bool add; /* to what the result holds */
} operands;

static status start_way(ctx *c, void *handle, const dnn_known *p, int way, const operands *o, dnn_said *said) {
    const dtype type = (dtype)p->key.type;
    const void *alpha = dnn_factor(type, true), *beta = dnn_factor(type, o->add);
    const size_t room = (size_t)p->key.workspace;
    void *x = p->part[X], *w = p->part[W], *y = p->part[Y], *v = p->part[WINDOW];
    const int how = p->ways[way].algorithm;

    CALL(c, cudnnSetConvolutionMathType, v, p->ways[way].math);
    if (p->key.which == CONV_FORWARD)
        *said = DNN_SAID(dnn, cudnnConvolutionForward, handle, alpha, x, o->a, w, o->b, v, how, o->work, room, beta, y,
                         o->to);
    else if (p->key.which == CONV_GRAD_INPUT)
        *said = DNN_SAID(dnn, cudnnConvolutionBackwardData, handle, alpha, w, o->b, y, o->a, v, how, o->work, room,
                         beta, x, o->to);
    else
        *said = DNN_SAID(dnn, cudnnConvolutionBackwardFilter, handle, alpha, x, o->a, y, o->b, v, how, o->work, room,
                         beta, w, o->to);
    return OK;
}

/* `arg`: whether to add to what the result holds. */
static status start(ctx *c, const call *k, void *handle, const dnn_known *p, const void *arg, dnn_said *said) {
    const operands o = {k->in[0].data, k->in[1].data, k->out[0].data, k->work, *(const bool *)arg};
    return start_way(c, handle, p, p->way, &o, said);
}

/* --- measuring ---------------------------------------------------------------------------------------------------- */

typedef struct trial {
    void *handle;
    const dnn_known *p;
    operands o;
} trial;

static status try_way(ctx *c, void *arg, int way, bool *refused) {
    const trial *t = arg;
    dnn_said said = {0, NULL};

    TRY(start_way(c, t->handle, t->p, way, &t->o, &said));
    *refused = dnn_is_refusal(said.result);
    return said.result == 0 || *refused ? OK : dnn_refuse(c, said.result, said.by);
}

static char *take(const measuring *m, size_t *at, const dnn_key *k, const int64_t *size) {
    size_t bytes = dtype_size((dtype)k->type);

    for (int64_t i = 0; i < k->rank; i++) bytes *= (size_t)size[i];
    return measure_take(m, at, bytes, MEASURE_ALIGNED);
}

static status measure(ctx *c, measuring *m, void *handle, dnn_known *p) {
    const dnn_key *k = &p->key;
    double seconds[DNN_WAYS];
    size_t at = 0;
    char *x = take(m, &at, k, k->x), *w = take(m, &at, k, k->w), *y = take(m, &at, k, k->y);
    char *work = measure_take(m, &at, (size_t)k->workspace, MEASURE_ALIGNED);
    trial t = {handle, p, {x, w, y, work, false}};

    if (k->which == CONV_GRAD_INPUT) t.o = (operands){y, w, x, work, false};
    if (k->which == CONV_GRAD_WEIGHT) t.o = (operands){x, y, w, work, false};
    if (!measure_fits(m, at)) return OK;
    TRY(measure_ways(c, m, p->n_ways, try_way, &t, seconds));
    p->settled = true;
    const int best = measure_best(seconds, p->n_ways);
    if (best < 0) return OK; /* the call will find out, and say so */
    const dnn_way first = p->ways[best];
    memmove(&p->ways[1], &p->ways[0], (size_t)best * sizeof *p->ways);
    p->ways[0] = first;
    m->n_convolutions++;
    return OK;
}

status dnn_convolution(ctx *c, const call *k, const conv *v, conv_product which, bool add, bool *done) {
    static dnn_user convolutions = {.load = load, .describe = describe, .start = start, .measure = measure};
    dnn_key of;

    *done = false;
    return describes(k, v, which, &of) ? dnn_run(c, k, &convolutions, &of, &add, done) : OK;
}

/* Room for what the usual algorithms copy: operands and result, a few times. */
size_t dnn_workspace(const conv *v) {
    const size_t least = (size_t)1 << 20, most = (size_t)64 << 20;
    const double x = (double)v->images * (double)(v->groups * v->in) * (double)volume(v->w.in);
    const double y = (double)v->images * (double)(v->groups * v->out) * (double)volume(v->w.out);
    const double bytes =
        4 * (double)dtype_size(v->type) * (x + y + (double)(v->groups * v->out) * (double)conv_depth(v));
    return bytes<(double)least ? least : bytes>(double) most ? most : (size_t)bytes;
}
