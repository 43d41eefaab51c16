/* batchnorm.cu -- mirrors ops/norms/batchnorm.c. cuDNN's where it is there (dnn_batchnorm.c), x of 16 bits with
 * parameters of float32, any other with its own type. Here a block has a channel: its elements in one sample after the
 * other. Moments and sums are joined in double. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct batch_norm_args {
    const void *x, *dy, *scale, *bias, *given_mean, *given_variance; /* moments: of any float type */
    void *out, *dscale, *dbias;                                      /* y or dx; any may be absent */
    double *mean, *variance;                                         /* results of training */
    int64_t channels, count, size; /* count: elements of a channel; size: of them in a sample */
    double epsilon;
    int32_t scale_type, bias_type, mean_type, variance_type, training;
} batch_norm_args;

typedef struct moments_args {
    const double *batch;
    const void *running;
    void *out;
    int64_t channels;
    double keep, unbias;
    int32_t running_type, out_type;
} moments_args;

/* What is the library's for each channel, and what is the graph's. */
typedef struct vectors_args {
    const void *mean, *variance;
    void *to_mean, *to_variance; /* any may be absent */
    int64_t channels;
    double factor, epsilon; /* of variances */
    int32_t mean_type, variance_type, to_type;
} vectors_args;

#ifdef ORT_HOST
#include "cuda/libraries/dnn.h"

kernel_fn batch_norm_train_cuda, batch_norm_infer_cuda, batch_norm_grad_cuda, batch_norm_update_cuda;
size_t batch_norm_train_cuda_workspace(const node *n), batch_norm_grad_cuda_workspace(const node *n);

static batch_norm_args args_of(const call *k, const tensor *x, int scale) {
    const shape *s = &x->shape;
    batch_norm_args a = {.x = x->data, .channels = s->dim[1], .size = shape_span(s, 2, s->rank)};

    a.count = s->dim[0] * a.size;
    a.scale = k->in[scale].data;
    a.scale_type = k->in[scale].type;
    a.epsilon = node_float(k->node, "epsilon");
    if (tensor_present(&k->out[0])) a.out = k->out[0].data;
    return a;
}

static void give_moments(batch_norm_args *a, const tensor *mean, const tensor *variance) {
    a->given_mean = mean->data;
    a->mean_type = mean->type;
    a->given_variance = variance->data;
    a->variance_type = variance->type;
}

static void *result(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]) ? k->out[i].data : NULL; }

/* --- by the library ------------------------------------------------------------------------------------------------ */

enum { TRAIN_VECTORS = 2, GRAD_VECTORS = 4, ALIGNED = 64 };

static bool are_librarys(const call *k, dtype x, int first, int end) {
    for (int i = first; i < end; i++)
        if (k->in[i].type != dnn_norm_type(x)) return false;
    return true;
}

static size_t vector_bytes(dtype x, int64_t channels) {
    return ((size_t)channels * dtype_size(dnn_norm_type(x)) + ALIGNED - 1) / ALIGNED * ALIGNED;
}

size_t batch_norm_train_cuda_workspace(const node *n) {
    return TRAIN_VECTORS * vector_bytes(n->in[0]->type, n->in[0]->shape.dim[1]);
}

size_t batch_norm_grad_cuda_workspace(const node *n) {
    return node_int(n, "training") ? GRAD_VECTORS * vector_bytes(n->in[1]->type, n->in[1]->shape.dim[1]) : 0;
}

static dnn_norm norm_of(const tensor *x, const batch_norm_args *a) {
    return (dnn_norm){.type = x->type,
                      .images = x->shape.dim[0],
                      .channels = a->channels,
                      .size = a->size,
                      .epsilon = a->epsilon,
                      .x = a->x,
                      .dy = a->dy,
                      .scale = a->scale,
                      .bias = a->bias,
                      .out = a->out};
}

static void *scratch(const call *k, const dnn_norm *n, int i) {
    return (char *)k->work + (size_t)i * vector_bytes(n->type, n->channels);
}

/* The library multiplies what its moments were by 0 first, whatever they were. */
static status clear_moments(ctx *c, const call *k, const dnn_norm *n) {
    return cuda_clear(c, k, n->mean, TRAIN_VECTORS * vector_bytes(n->type, n->channels));
}

static status take_moments(ctx *c, const call *k, const batch_norm_args *a, const dnn_norm *n) {
    static kernel f = {.name = "batch_norm_take"};
    vectors_args v = {.mean = n->mean,
                      .variance = n->variance,
                      .to_mean = a->mean,
                      .to_variance = a->variance,
                      .channels = a->channels,
                      .factor = (double)(a->count - 1) / (double)a->count};

    v.mean_type = v.variance_type = dnn_norm_type(n->type);
    v.to_type = F64;
    return cuda_launch(c, k, &f, geometry_over(v.channels, 128, 128), &v);
}

static status train_by_library(ctx *c, const call *k, const batch_norm_args *a, bool *done) {
    dnn_norm n = norm_of(&k->in[0], a);

    *done = false;
    if (!tensor_present(&k->out[0]) || !are_librarys(k, n.type, 1, 3)) return OK;
    n.mean = scratch(k, &n, 0);
    n.variance = scratch(k, &n, 1);
    n.prepare = clear_moments;
    TRY(dnn_batch_norm(c, k, &n, NORM_TRAIN, done));
    return *done ? take_moments(c, k, a, &n) : OK;
}

static status infer_by_library(ctx *c, const call *k, const batch_norm_args *a, bool *done) {
    dnn_norm n = norm_of(&k->in[0], a);

    *done = false;
    if (!are_librarys(k, n.type, 1, 5)) return OK;
    n.mean = k->in[3].data;
    n.variance = k->in[4].data;
    return dnn_batch_norm(c, k, &n, NORM_INFER, done);
}

static status hand_moments(ctx *c, const call *k, const dnn_norm *n) {
    static kernel f = {.name = "batch_norm_hand"};
    const tensor *mean = &k->in[3], *variance = &k->in[4];
    vectors_args v = {.mean = mean->data,
                      .variance = variance->data,
                      .to_mean = n->mean,
                      .to_variance = n->inverse,
                      .channels = n->channels,
                      .epsilon = n->epsilon};

    v.mean_type = mean->type;
    v.variance_type = variance->type;
    v.to_type = dnn_norm_type(n->type);
    return cuda_launch(c, k, &f, geometry_over(v.channels, 128, 128), &v);
}

/* Of moments that were given it knows no gradient. */
static status grad_by_library(ctx *c, const call *k, const batch_norm_args *a, bool *done) {
    dnn_norm n = norm_of(&k->in[1], a);

    *done = false;
    if (!a->training || !tensor_present(&k->out[0]) || !are_librarys(k, n.type, 2, 3)) return OK;
    n.mean = scratch(k, &n, 0);
    n.inverse = scratch(k, &n, 1);
    n.dscale = a->dscale ? a->dscale : scratch(k, &n, 2);
    n.dbias = a->dbias ? a->dbias : scratch(k, &n, 3);
    n.prepare = hand_moments;
    if (k->cuda->dry) TRY(hand_moments(c, k, &n));
    return dnn_batch_norm(c, k, &n, NORM_GRAD, done);
}

/* --- kernels ------------------------------------------------------------------------------------------------------- */

/* In a dry run both are asked: the library may refuse later. */
static bool is_over(const call *k, bool done) { return done && !k->cuda->dry; }

status batch_norm_train_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(batch_norm_train);
    batch_norm_args a = args_of(k, &k->in[0], 1);
    bool done;

    a.bias = k->in[2].data;
    a.bias_type = k->in[2].type;
    a.mean = result(k, 1);
    a.variance = result(k, 2);
    TRY(train_by_library(c, k, &a, &done));
    if (is_over(k, done)) return OK;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_rows(a.channels, a.count), &a);
}

status batch_norm_infer_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(batch_norm_infer);
    batch_norm_args a = args_of(k, &k->in[0], 1);
    bool done;

    a.bias = k->in[2].data;
    a.bias_type = k->in[2].type;
    give_moments(&a, &k->in[3], &k->in[4]);
    TRY(infer_by_library(c, k, &a, &done));
    if (is_over(k, done)) return OK;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_rows(a.channels, a.count), &a);
}

/* Operands: dy, x, scale, mean, variance. */
status batch_norm_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(batch_norm_grad);
    batch_norm_args a = args_of(k, &k->in[1], 2);
    bool done;

    a.dy = k->in[0].data;
    give_moments(&a, &k->in[3], &k->in[4]);
    a.dscale = result(k, 1);
    a.dbias = result(k, 2);
    a.training = node_int(k->node, "training") != 0;
    TRY(grad_by_library(c, k, &a, &done));
    if (is_over(k, done)) return OK;
    return cuda_launch(c, k, &kernels[k->in[1].type], geometry_rows(a.channels, a.count), &a);
}

status batch_norm_update_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "batch_norm_update"};
    const double count = (double)node_int(k->node, "count");

    for (int which = 0; which < 2; which++) {
        if (!result(k, which)) continue;
        const tensor *running = &k->in[2 + which];
        moments_args a = {.batch = k->in[which].data, .running = running->data, .out = k->out[which].data};
        a.channels = tensor_count(running);
        a.keep = count == 0 ? 1 : node_float(k->node, "momentum");
        a.unbias = which ? count / (count - 1) : 1;
        a.running_type = running->type;
        a.out_type = k->out[which].type;
        TRY(cuda_launch(c, k, &f, geometry_over(a.channels, 128, 128), &a));
    }
    return OK;
}
#endif

#ifdef ORT_DEVICE
/* Where element e of a channel is. */
DEVICE int64_t element_at(const batch_norm_args *a, int64_t channel, int64_t e) {
    return (e / a->size * a->channels + channel) * a->size + e % a->size;
}

KERNEL(batch_norm_update, moments_args) {
    FOR_EACH(i, a.channels) {
        const double old = number_f64(a.running, a.running_type, i);
        set_number(a.out, a.out_type, i, a.keep == 1 ? old : a.keep * old + (1 - a.keep) * a.batch[i] * a.unbias);
    }
}

KERNEL(batch_norm_take, vectors_args) {
    FOR_EACH(i, a.channels) {
        if (a.to_mean) set_number(a.to_mean, a.to_type, i, number_f64(a.mean, a.mean_type, i));
        if (a.to_variance)
            set_number(a.to_variance, a.to_type, i, a.factor * number_f64(a.variance, a.variance_type, i));
    }
}

KERNEL(batch_norm_hand, vectors_args) {
    FOR_EACH(i, a.channels) {
        set_number(a.to_mean, a.to_type, i, number_f64(a.mean, a.mean_type, i));
        set_number(a.to_variance, a.to_type, i, 1 / sqrt(number_f64(a.variance, a.variance_type, i) + a.epsilon));
    }
}

#define TEMPLATE "cuda/kernels/batchnorm.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(batch_norm_train), batch_norm_args) {
    const T *x = (const T *)a.x;
    FOR_BLOCKS(channel, a.channels) {
        const double count = a.count ? (double)a.count : 1;
        A sum = 0, squares = 0;

        FOR_THREADS(e, a.count) sum += GET(x[element_at(&a, channel, e)]);
        const double mean = block_sum_f64((double)sum) / count;
        FOR_THREADS(e, a.count) {
            const A off = GET(x[element_at(&a, channel, e)]) - (A)mean;
            squares += off * off;
        }
        const double variance = block_sum_f64((double)squares) / count, inverse = 1 / sqrt(variance + a.epsilon);
        const A r = (A)(inverse * number_f64(a.scale, a.scale_type, channel));
        const A b = (A)number_f64(a.bias, a.bias_type, channel);
        if (threadIdx.x == 0) {
            if (a.mean) a.mean[channel] = mean;
            if (a.variance) a.variance[channel] = variance;
        }
        if (!a.out) continue;
        FOR_THREADS(e, a.count) {
            const int64_t at = element_at(&a, channel, e);
            ((T *)a.out)[at] = PUT((GET(x[at]) - (A)mean) * r + b);
        }
    }
}

KERNEL(NAME(batch_norm_infer), batch_norm_args) {
    FOR_BLOCKS(channel, a.channels) {
        const double inverse = 1 / sqrt(number_f64(a.given_variance, a.variance_type, channel) + a.epsilon);
        const A mean = (A)number_f64(a.given_mean, a.mean_type, channel);
        const A r = (A)(inverse * number_f64(a.scale, a.scale_type, channel));
        const A b = (A)number_f64(a.bias, a.bias_type, channel);

        FOR_THREADS(e, a.count) {
            const int64_t at = element_at(&a, channel, e);
            ((T *)a.out)[at] = PUT((GET(((const T *)a.x)[at]) - mean) * r + b);
        }
    }
}

KERNEL(NAME(batch_norm_grad), batch_norm_args) {
    const T *x = (const T *)a.x, *dy = (const T *)a.dy;
    FOR_BLOCKS(channel, a.channels) {
        const double inverse = 1 / sqrt(number_f64(a.given_variance, a.variance_type, channel) + a.epsilon);
        const double scale = number_f64(a.scale, a.scale_type, channel), count = a.count ? (double)a.count : 1;
        const A mean = (A)number_f64(a.given_mean, a.mean_type, channel), r = (A)inverse;
        A sum = 0, dot = 0;

        FOR_THREADS(e, a.count) {
            const int64_t at = element_at(&a, channel, e);
            const A g = GET(dy[at]);
            sum += g;
            dot += g * ((GET(x[at]) - mean) * r);
        }
        const double dbias = block_sum_f64((double)sum), dscale = block_sum_f64((double)dot);
        if (threadIdx.x == 0) {
            if (a.dscale) set_number(a.dscale, a.scale_type, channel, dscale);
            if (a.dbias) set_number(a.dbias, a.scale_type, channel, dbias);
        }
        if (!a.out) continue;
        const A shift = a.training ? (A)(dbias / count) : 0, slope = a.training ? (A)(dscale / count) : 0;
        FOR_THREADS(e, a.count) {
            const int64_t at = element_at(&a, channel, e);
            const A z = (GET(x[at]) - mean) * r;
            ((T *)a.out)[at] = PUT((A)(inverse * scale) * (GET(dy[at]) - shift - z * slope));
        }
    }
}
#endif
