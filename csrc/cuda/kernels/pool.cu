/* pool.cu -- mirrors ops/spatial/pool.c. A thread has a result: an output looks at its window, in backward an x
 * at the windows that see it, so nothing is added to one place by two threads.
 *
 * In backward of MaxPool each element collects from the windows that it is the largest of. Which element of a window
 * that is forward has left, or, of large windows, is found first. 16-bit floats have become float32 before (lower_to_f32).
 *
 * Averages are cuDNN's where it is there and takes them (dnn_pool.c). Maxima never: which of equal elements gets the
 * gradient, which NaN wins and which indices come out PyTorch defines and the library does not. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct pool_args {
    const void *x, *dy;
    void *y, *dx;
    int64_t *indices; /* of the largest elements, in x */
    int32_t *where;   /* or in their planes; -1: the window is empty */
    uint8_t *taps;    /* or in their windows; NO_TAP: it is empty */
    int64_t planes;   /* images * channels */
    int64_t in[3], out[3], kernel[3], stride[3], dilation[3], before[3], after[3]; /* ops/spatial/spatial.h */
    int32_t count_padding;
} pool_args;

enum { NO_TAP = 255 };

#ifdef ORT_HOST
#include "cuda/libraries/dnn.h"

kernel_fn max_pool_cuda, max_pool_grad_cuda, average_pool_cuda, average_pool_grad_cuda;
size_t max_pool_grad_cuda_workspace(const node *n);

static status args_and_window(ctx *c, const call *k, const shape *x, pool_args *out, window *of) {
    pool_args a = {.planes = x->dim[0] * x->dim[1], .count_padding = node_int(k->node, "count_include_pad") != 0};
    window w;

    TRY(window_of(c, k->node, x, NULL, &w));
    for (int i = 0; i < SPATIAL; i++) {
        a.in[i] = w.in[i];
        a.out[i] = w.out[i];
        a.kernel[i] = w.kernel[i];
        a.stride[i] = w.stride[i];
        a.dilation[i] = w.dilation[i];
        a.before[i] = w.before[i];
        a.after[i] = w.after[i];
    }
    *out = a;
    *of = w;
    return OK;
}

static status args_of(ctx *c, const call *k, const shape *x, pool_args *out) {
    window unused;
    return args_and_window(c, k, x, out, &unused);
}

static geometry over(int64_t planes, const int64_t size[SPATIAL]) {
    return geometry_over(planes * volume(size), 256, 256);
}

status max_pool_cuda(ctx *c, const call *k) {
    static kernel values[DTYPE_COUNT] = {[F32] = {"max_pool_f32"}, [F64] = {"max_pool_f64"}, [I64] = {"max_pool_i64"},
                                         [I32] = {"max_pool_i32"}, [I8] = {"max_pool_i8"},   [U8] = {"max_pool_u8"}};
    pool_args a;

    TRY(args_of(c, k, &k->in[0].shape, &a));
    a.x = k->in[0].data;
    if (tensor_present(&k->out[0])) a.y = k->out[0].data;
    if (k->n_out > 1 && tensor_present(&k->out[1])) a.indices = k->out[1].data;
    if (k->n_out > 2 && tensor_present(&k->out[2])) a.taps = k->out[2].data;
    return cuda_launch(c, k, &values[k->in[0].type], over(a.planes, a.out), &a);
}

/* Operands: dy, and the taps that forward left or x. */
status max_pool_grad_cuda(ctx *c, const call *k) {
    static kernel find[DTYPE_COUNT] = {[F32] = {"max_pool_f32"}, [F64] = {"max_pool_f64"}},
                  collect[DTYPE_COUNT] = {[F32] = {"max_pool_grad_f32"}, [F64] = {"max_pool_grad_f64"}};
    const dtype type = k->in[0].type;
    pool_args a;

    TRY(args_of(c, k, &k->out[0].shape, &a));
    a.dy = k->in[0].data;
    a.dx = k->out[0].data;
    if (k->in[1].type == U8) {
        a.taps = k->in[1].data;
    } else {
        a.x = k->in[1].data;
        a.where = k->work;
        TRY(cuda_launch(c, k, &find[type], over(a.planes, a.out), &a));
    }
    return cuda_launch(c, k, &collect[type], over(a.planes, a.in), &a);
}

size_t max_pool_grad_cuda_workspace(const node *n) {
    return n->in[1]->type == U8 ? 0 : (size_t)shape_count(&n->in[0]->shape) * sizeof(int32_t);
}

/* `x`: its shape. */
static status average_by_library(ctx *c, const call *k, const shape *x, const window *w, bool is_grad, bool *done) {
    const dnn_pool p = {.type = k->in[0].type,
                        .images = x->dim[0],
                        .channels = x->dim[1],
                        .w = w,
                        .count_padding = node_int(k->node, "count_include_pad") != 0,
                        .is_grad = is_grad,
                        .from = k->in[0].data,
                        .to = k->out[0].data};
    return dnn_average_pool(c, k, &p, done);
}

/* In a dry run the library is asked and our kernel, too: the library may refuse later. */
status average_pool_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = {[F32] = {"average_pool_f32"}, [F64] = {"average_pool_f64"}};
    const shape *x = &k->in[0].shape;
    pool_args a;
    window w;
    bool done;

    TRY(args_and_window(c, k, x, &a, &w));
    TRY(average_by_library(c, k, x, &w, false, &done));
    if (done && !k->cuda->dry) return OK;
    a.x = k->in[0].data;
    a.y = k->out[0].data;
    return cuda_launch(c, k, &kernels[k->in[0].type], over(a.planes, a.out), &a);
}

status average_pool_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = {[F32] = {"average_pool_grad_f32"}, [F64] = {"average_pool_grad_f64"}};
    const shape *x = &k->out[0].shape;
    pool_args a;
    window w;
    bool done;

    TRY(args_and_window(c, k, x, &a, &w));
    TRY(average_by_library(c, k, x, &w, true, &done));
    if (done && !k->cuda->dry) return OK;
    a.dy = k->in[0].data;
    a.dx = k->out[0].data;
    return cuda_launch(c, k, &kernels[k->in[0].type], over(a.planes, a.in), &a);
}
#endif

#ifdef ORT_DEVICE
DEVICE int64_t volume(const int64_t size[3]) { return size[0] * size[1] * size[2]; }

/* The place of element i of a plane of this size. */
DEVICE void place(int64_t i, const int64_t size[3], int64_t at[3]) {
    at[2] = i % size[2];
    at[1] = i / size[2] % size[1];
    at[0] = i / size[2] / size[1];
}

/* For each element of the window of output `at`, in order: `i`, its number in the plane. */
#define EACH_SEEN(a, at, i)                                                                                            \
    for (int64_t e0 = 0; e0 < (a)->kernel[0]; e0++)                                                                    \
        for (int64_t e1 = 0; e1 < (a)->kernel[1]; e1++)                                                                \
            for (int64_t e2 = 0, i; e2 < (a)->kernel[2]; e2++)                                                         \
                if ((i = seen(a, at, e0, e1, e2)) >= 0)

DEVICE int64_t seen(const pool_args *a, const int64_t at[3], int64_t e0, int64_t e1, int64_t e2) {
    const int64_t x0 = at[0] * a->stride[0] - a->before[0] + e0 * a->dilation[0];
    const int64_t x1 = at[1] * a->stride[1] - a->before[1] + e1 * a->dilation[1];
    const int64_t x2 = at[2] * a->stride[2] - a->before[2] + e2 * a->dilation[2];
    if (x0 < 0 || x0 >= a->in[0] || x1 < 0 || x1 >= a->in[1] || x2 < 0 || x2 >= a->in[2]) return -1;
    return (x0 * a->in[1] + x1) * a->in[2] + x2;
}

/* Outputs first <= o < end of an axis may see element x of it; those do that `sees` says. */
DEVICE void watchers(const pool_args *a, int axis, int64_t x, int64_t *first, int64_t *end) {
    const int64_t reach = (a->kernel[axis] - 1) * a->dilation[axis], low = x + a->before[axis] - reach;
    *first = low > 0 ? (low + a->stride[axis] - 1) / a->stride[axis] : 0;
    *end = (x + a->before[axis]) / a->stride[axis] + 1;
    if (*end > a->out[axis]) *end = a->out[axis];
}

DEVICE int sees(const pool_args *a, int axis, int64_t o, int64_t x) {
    return (x + a->before[axis] - o * a->stride[axis]) % a->dilation[axis] == 0;
}

/* For each output that sees element `at`: `o`, its number in the plane of outputs, and o0, o1, o2. */
#define EACH_WATCHER(a, at, o)                                                                                         \
    int64_t first[3], end[3];                                                                                          \
    for (int axis = 0; axis < 3; axis++) watchers(a, axis, at[axis], &first[axis], &end[axis]);                        \
    for (int64_t o0 = first[0]; o0 < end[0]; o0++)                                                                     \
        for (int64_t o1 = first[1]; sees(a, 0, o0, at[0]) && o1 < end[1]; o1++)                                        \
            for (int64_t o2 = first[2], o; sees(a, 1, o1, at[1]) && o2 < end[2]; o2++)                                 \
                if (o = (o0 * (a)->out[1] + o1) * (a)->out[2] + o2, sees(a, 2, o2, at[2]))

/* Which element of the window of an output that sees it element `at` is. */
DEVICE int64_t tap_of(const pool_args *a, const int64_t at[3], int64_t o0, int64_t o1, int64_t o2) {
    const int64_t e0 = (at[0] + a->before[0] - o0 * a->stride[0]) / a->dilation[0];
    const int64_t e1 = (at[1] + a->before[1] - o1 * a->stride[1]) / a->dilation[1];
    const int64_t e2 = (at[2] + a->before[2] - o2 * a->stride[2]) / a->dilation[2];
    return (e0 * a->kernel[1] + e1) * a->kernel[2] + e2;
}

/* Says which element of a window is the largest: its number in the plane that begins there (-1: there is none), and in
 * the window. */
DEVICE void put_largest(const pool_args *a, int64_t r, int64_t plane_begin, int64_t found, int64_t tap) {
    if (a->indices) a->indices[r] = plane_begin + (found < 0 ? 0 : found);
    if (a->where) a->where[r] = (int32_t)found;
    if (a->taps) a->taps[r] = (uint8_t)tap;
}

#define MAX_POOL(name, T, LOWEST)                                                                                      \
    KERNEL(name, pool_args) {                                                                                          \
        const int64_t plane = volume(a.in), outputs = volume(a.out), results = a.planes * outputs;                     \
        FOR_EACH(r, results) {                                                                                         \
            const T *x = (const T *)a.x + r / outputs * plane;                                                         \
            int64_t at[3], found = -1, tap = NO_TAP;                                                                   \
            T best = LOWEST;                                                                                           \
            place(r % outputs, a.out, at);                                                                             \
            EACH_SEEN(&a, at, i) {                                                                                     \
                if (x[i] > best || x[i] != x[i] || found < 0) {                                                        \
                    best = x[i];                                                                                       \
                    found = i;                                                                                         \
                    tap = (e0 * a.kernel[1] + e1) * a.kernel[2] + e2;                                                  \
                }                                                                                                      \
            }                                                                                                          \
            if (a.y) ((T *)a.y)[r] = best;                                                                             \
            put_largest(&a, r, r / outputs * plane, found, tap);                                                       \
        }                                                                                                              \
    }
MAX_POOL(max_pool_f32, float, -INFINITY)
MAX_POOL(max_pool_f64, double, -INFINITY)
MAX_POOL(max_pool_i64, int64_t, INT64_MIN)
MAX_POOL(max_pool_i32, int32_t, INT32_MIN)
MAX_POOL(max_pool_i8, int8_t, INT8_MIN)
MAX_POOL(max_pool_u8, uint8_t, 0)

/* How many elements of the window at output `o` of an axis count. */
DEVICE int64_t axis_count(const pool_args *a, int axis, int64_t o) {
    const int64_t start = o * a->stride[axis] - a->before[axis], d = a->dilation[axis];
    const int64_t low = a->count_padding ? -a->before[axis] : 0;
    const int64_t high = a->in[axis] + (a->count_padding ? a->after[axis] : 0);
    const int64_t from = start < low ? (low - start + d - 1) / d : 0;
    int64_t to = start < high ? (high - start + d - 1) / d : 0;

    if (to > a->kernel[axis]) to = a->kernel[axis];
    return to > from ? to - from : 0;
}

/* 1 for a window in which nothing counts, whose sum is 0. */
DEVICE int64_t window_count(const pool_args *a, int64_t o0, int64_t o1, int64_t o2) {
    const int64_t n = axis_count(a, 0, o0) * axis_count(a, 1, o1) * axis_count(a, 2, o2);
    return n > 0 ? n : 1;
}

#define TEMPLATE "cuda/kernels/pool.cu"
#include "cuda/kernels/each_f32_f64.h"
#endif

#else /* the template */

KERNEL(NAME(max_pool_grad), pool_args) {
    const int64_t plane = volume(a.in), outputs = volume(a.out), elements = a.planes * plane;
    FOR_EACH(r, elements) {
        const int64_t before = r / plane * outputs;
        int64_t at[3];
        T total = 0;
        place(r % plane, a.in, at);
        EACH_WATCHER(&a, at, o) {
            const int is_largest =
                a.taps ? a.taps[before + o] == tap_of(&a, at, o0, o1, o2) : a.where[before + o] == r % plane;
            if (is_largest) total += ((const T *)a.dy)[before + o];
        }
        ((T *)a.dx)[r] = total;
    }
}

KERNEL(NAME(average_pool), pool_args) {
    const int64_t plane = volume(a.in), outputs = volume(a.out), results = a.planes * outputs;
    FOR_EACH(r, results) {
        const T *x = (const T *)a.x + r / outputs * plane;
        int64_t at[3];
        T total = 0;
        place(r % outputs, a.out, at);
        EACH_SEEN(&a, at, i) total += x[i];
        ((T *)a.y)[r] = total / (T)window_count(&a, at[0], at[1], at[2]);
    }
}

KERNEL(NAME(average_pool_grad), pool_args) {
    const int64_t plane = volume(a.in), outputs = volume(a.out), elements = a.planes * plane;
    FOR_EACH(r, elements) {
        const T *dy = (const T *)a.dy + r / plane * outputs;
        int64_t at[3];
        T total = 0;
        place(r % plane, a.in, at);
        EACH_WATCHER(&a, at, o) total += dy[o] / (T)window_count(&a, o0, o1, o2);
        ((T *)a.dx)[r] = total;
    }
}
#endif
