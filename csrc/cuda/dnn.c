/* dnn.c -- the one place that calls cuDNN, and the CUDA side of ops/conv.c.
 *
 * A convolution is described once: tensors, window and the algorithm that the library's heuristic names are kept for all
 * of the same sizes. When plans are made each is asked for, so a step finds them all. Only algorithms that give the same
 * bits every time are used, and float32 is rounded to TF32 only where torch allows it. */
#include "cuda/dnn.h"

#include "cuda/library.h"
#include "cuda/move.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* --- entry points ------------------------------------------------------------------------------------------------- */

/* What the heuristic answers, one an algorithm. */
typedef struct answer {
    int algorithm, status;
    float time;
    size_t workspace;
    int deterministic, math, reserved[3];
} answer;

#define DNN_FUNCTIONS(F)                                                                                               \
    F(cudnnCreate, (void **out))                                                                                       \
    F(cudnnDestroy, (void *handle))                                                                                    \
    F(cudnnSetStream, (void *handle, void *stream))                                                                    \
    F(cudnnCreateTensorDescriptor, (void **out))                                                                       \
    F(cudnnSetTensorNdDescriptor, (void *d, int type, int rank, const int *size, const int *stride))                   \
    F(cudnnDestroyTensorDescriptor, (void *d))                                                                         \
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

typedef struct dnn_functions {
    DNN_FUNCTIONS(ENTRY_MEMBER)
} dnn_functions;

enum { NO_HOST_MEMORY = 4003, NO_DEVICE_MEMORY = 4004 };
enum { CROSS_CORRELATION = 1, CHANNELS_FIRST = 0, DETERMINISTIC = 1 };
enum { MATH_DEFAULT = 0, MATH_TENSOR_CORES = 1, MATH_NO_ROUNDING = 3 };

static const int library_type[DTYPE_COUNT] = {[F32] = 0, [F64] = 1, [F16] = 2, [BF16] = 9};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below */
static dnn_functions dnn;
static void *handles[MOST_DEVICES]; /* for the life of the process */

static status refuse(ctx *c, int result, const char *what) {
    const bool no_memory = result == NO_HOST_MEMORY || result == NO_DEVICE_MEMORY;
    static const char *const texts[] = {"success",       "not initialized", "bad parameter",
                                        "not supported", "internal error",  "execution failed"};
    const char *text =
        result >= 0 && result / 1000 < (int)(sizeof texts / sizeof texts[0]) ? texts[result / 1000] : "?";
    return fail(c, no_memory ? E_NOMEM : E_RUNTIME, "cuDNN error %d in %s: %s", result, what,
                no_memory ? "out of memory" : text);
}

/* The library says so of what it cannot do: the sizes are right, we have checked them. */
static bool is_refusal(int result) { return result >= 2000 && result < 4000; }

#define CALL(c, name, ...)                                                                                             \
    do {                                                                                                               \
        int result_ = dnn.name(__VA_ARGS__);                                                                           \
        if (result_ != 0) return refuse((c), result_, #name);                                                          \
    } while (0)

static status load_dnn(ctx *c) { LIBRARY_ONCE(c, "cuDNN", dnn, DNN_FUNCTIONS, "libcudnn.so.9"); }

/* With the device's context current. */
static status handle_of(ctx *c, int device, void **out) {
    TRY(load_dnn(c));
    if (!handles[device]) {
        void *made = NULL;
        CALL(c, cudnnCreate, &made);
        handles[device] = made;
    }
    *out = handles[device];
    return OK;
}

/* --- convolutions that are described ------------------------------------------------------------------------------ */

enum { MOST_KNOWN = 1024, MOST_ANSWERS = 10, LARGEST_RANK = 2 + SPATIAL };

/* What the library's choice depends on. Sizes as the library has them, with two spatial axes at least. */
typedef struct key {
    int64_t device, which, type, tf32, groups, workspace;
    int64_t rank, x[LARGEST_RANK], w[LARGEST_RANK], y[LARGEST_RANK], pad[SPATIAL], stride[SPATIAL], dilation[SPATIAL];
} key;

typedef struct known {
    key key;
    void *x, *w, *y, *window;
    int algorithm;
    bool taken;
} known;

static known *all[MOST_KNOWN];
static int n_known;

static void dispose(known *p) {
    if (p->x) (void)dnn.cudnnDestroyTensorDescriptor(p->x);
    if (p->y) (void)dnn.cudnnDestroyTensorDescriptor(p->y);
    if (p->w) (void)dnn.cudnnDestroyFilterDescriptor(p->w);
    if (p->window) (void)dnn.cudnnDestroyConvolutionDescriptor(p->window);
    free(p);
}

static bool narrow(const int64_t *from, int64_t n, int *to) {
    for (int64_t i = 0; i < n; i++) {
        if (from[i] > INT32_MAX) return false;
        to[i] = (int)from[i];
    }
    return true;
}

/* Dense, the channels first. *fits is false where sizes or steps have more than 31 bits. */
static status describe_tensor(ctx *c, const key *k, const int64_t *size, void **out, bool *fits) {
    int64_t step[LARGEST_RANK] = {0};
    int sizes[LARGEST_RANK], steps[LARGEST_RANK];

    step[k->rank - 1] = 1;
    for (int64_t d = k->rank - 1; d > 0; d--) step[d - 1] = step[d] * size[d];
    if (!(*fits = narrow(size, k->rank, sizes) && narrow(step, k->rank, steps))) return OK;
    CALL(c, cudnnCreateTensorDescriptor, out);
    CALL(c, cudnnSetTensorNdDescriptor, *out, library_type[k->type], (int)k->rank, sizes, steps);
    return OK;
}

static status describe_weights(ctx *c, const key *k, void **out, bool *fits) {
    int sizes[LARGEST_RANK];

    if (!(*fits = narrow(k->w, k->rank, sizes))) return OK;
    CALL(c, cudnnCreateFilterDescriptor, out);
    CALL(c, cudnnSetFilterNdDescriptor, *out, library_type[k->type], CHANNELS_FIRST, (int)k->rank, sizes);
    return OK;
}

static status describe_window(ctx *c, const key *k, void **out) {
    int pad[SPATIAL], stride[SPATIAL], dilation[SPATIAL];
    const int64_t axes = k->rank - 2;
    const int math = k->type == BF16 || k->type == F16 ? MATH_TENSOR_CORES
                     : k->type == F32 && !k->tf32      ? MATH_NO_ROUNDING
                                                       : MATH_DEFAULT;

    (void)(narrow(k->pad, axes, pad) && narrow(k->stride, axes, stride) && narrow(k->dilation, axes, dilation));
    CALL(c, cudnnCreateConvolutionDescriptor, out);
    CALL(c, cudnnSetConvolutionNdDescriptor, *out, (int)axes, pad, stride, dilation, CROSS_CORRELATION,
         library_type[k->type == F64 ? F64 : F32]);
    CALL(c, cudnnSetConvolutionGroupCount, *out, (int)k->groups);
    CALL(c, cudnnSetConvolutionMathType, *out, math);
    return OK;
}

static status describe(ctx *c, known *p, bool *fits) {
    TRY(describe_tensor(c, &p->key, p->key.x, &p->x, fits));
    if (*fits) TRY(describe_tensor(c, &p->key, p->key.y, &p->y, fits));
    if (*fits) TRY(describe_weights(c, &p->key, &p->w, fits));
    return *fits ? describe_window(c, &p->key, &p->window) : OK;
}

/* The fastest algorithm, as the library guesses, among those that can be used. */
static status ask(ctx *c, void *handle, known *p) {
    answer found[MOST_ANSWERS];
    int count = 0, result = 0;

    if (p->key.which == CONV_FORWARD)
        result = dnn.cudnnGetConvolutionForwardAlgorithm_v7(handle, p->x, p->w, p->window, p->y, MOST_ANSWERS, &count,
                                                            found);
    else if (p->key.which == CONV_GRAD_INPUT)
        result = dnn.cudnnGetConvolutionBackwardDataAlgorithm_v7(handle, p->w, p->y, p->window, p->x, MOST_ANSWERS,
                                                                 &count, found);
    else
        result = dnn.cudnnGetConvolutionBackwardFilterAlgorithm_v7(handle, p->x, p->y, p->window, p->w, MOST_ANSWERS,
                                                                   &count, found);
    if (result != 0 && !is_refusal(result)) return refuse(c, result, "the choice of an algorithm");
    for (int i = 0; result == 0 && i < count && !p->taken; i++)
        if (found[i].status == 0 && found[i].deterministic == DETERMINISTIC &&
            found[i].workspace <= (size_t)p->key.workspace) {
            p->taken = true;
            p->algorithm = found[i].algorithm;
        }
    return OK;
}

/* Its description, made when there was none. All are forgotten when there are too many. */
static status find(ctx *c, void *handle, const key *k, known **out) {
    bool fits = true;
    known *p;
    status s;

    for (int i = 0; i < n_known; i++)
        if (memcmp(&all[i]->key, k, sizeof *k) == 0) {
            *out = all[i];
            return OK;
        }
    if (n_known == MOST_KNOWN)
        while (n_known > 0) dispose(all[--n_known]);
    p = calloc(1, sizeof *p);
    if (!p) return fail(c, E_NOMEM, "no memory for the description of a convolution");
    p->key = *k;
    s = describe(c, p, &fits);
    if (s == OK && fits) s = ask(c, handle, p);
    if (s != OK) {
        dispose(p);
        return s;
    }
    *out = all[n_known++] = p;
    return OK;
}

/* --- starting ----------------------------------------------------------------------------------------------------- */

/* False where the library has no such window: it pads both sides alike. */
static bool describes(const call *k, const conv *v, conv_product which, key *out) {
    const int first = v->w.rank == 1 ? 1 : SPATIAL - v->w.rank;

    memset(out, 0, sizeof *out);
    out->device = k->cuda->device;
    out->which = which;
    out->type = v->type;
    out->tf32 = v->type == F32 && (k->cuda->tf32 & TF32_CONVOLUTIONS);
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

/* With the lock. */
static status run(ctx *c, const call *k, const key *of, bool add, bool *done) {
    const double one = 1, rest = add;
    const float one_f32 = 1, rest_f32 = add;
    const void *alpha = of->type == F64 ? (const void *)&one : &one_f32;
    const void *beta = of->type == F64 ? (const void *)&rest : &rest_f32;
    const void *a = k->in[0].data, *b = k->in[1].data;
    const size_t room = (size_t)of->workspace;
    void *handle = NULL, *result = k->out[0].data;
    known *p = NULL;

    TRY(handle_of(c, k->cuda->device, &handle));
    TRY(find(c, handle, of, &p));
    *done = p->taken;
    if (!p->taken || k->cuda->dry) return OK;
    CALL(c, cudnnSetStream, handle, k->cuda->stream);
    if (of->which == CONV_FORWARD)
        CALL(c, cudnnConvolutionForward, handle, alpha, p->x, a, p->w, b, p->window, p->algorithm, k->work, room, beta,
             p->y, result);
    else if (of->which == CONV_GRAD_INPUT)
        CALL(c, cudnnConvolutionBackwardData, handle, alpha, p->w, b, p->y, a, p->window, p->algorithm, k->work, room,
             beta, p->x, result);
    else
        CALL(c, cudnnConvolutionBackwardFilter, handle, alpha, p->x, a, p->y, b, p->window, p->algorithm, k->work, room,
             beta, p->w, result);
    return OK;
}

status dnn_convolution(ctx *c, const call *k, const conv *v, conv_product which, bool add, bool *done) {
    key of;
    status s;

    *done = false;
    if (!describes(k, v, which, &of)) return OK;
    (void)pthread_mutex_lock(&lock);
    s = run(c, k, &of, add, done);
    (void)pthread_mutex_unlock(&lock);
    return s;
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
