/* dnn_batchnorm.c -- runs batch norm by cuDNN, for batchnorm.cu.
 *
 * In the library's plain mode: the one that keeps data in place between its passes may give other bits from run to run.
 * The moments that it would save for backward are the mean and 1 / sqrt(variance + epsilon), which has lost a small
 * variance. Its running ones, moved all the way to the batch's, have not; they are of a scratch of ours. */
#include "cuda/libraries/dnn.h"
#include "cuda/libraries/dnn_library.h"

#include <string.h>

#define NORM_FUNCTIONS(F)                                                                                              \
    F(cudnnBatchNormalizationForwardTraining,                                                                          \
      (void *handle, int mode, const void *alpha, const void *beta, void *x_is, const void *x, void *y_is, void *y,    \
       void *channels_are, const void *scale, const void *bias, double factor, void *running_mean,                     \
       void *running_variance, double epsilon, void *saved_mean, void *saved_inverse))                                 \
    F(cudnnBatchNormalizationForwardInference,                                                                         \
      (void *handle, int mode, const void *alpha, const void *beta, void *x_is, const void *x, void *y_is, void *y,    \
       void *channels_are, const void *scale, const void *bias, const void *mean, const void *variance,                \
       double epsilon))                                                                                                \
    F(cudnnBatchNormalizationBackward,                                                                                 \
      (void *handle, int mode, const void *alpha, const void *beta, const void *alpha_channels,                        \
       const void *beta_channels, void *x_is, const void *x, void *dy_is, const void *dy, void *dx_is, void *dx,       \
       void *channels_are, const void *scale, void *dscale, void *dbias, double epsilon, const void *saved_mean,       \
       const void *saved_inverse))

typedef struct norm_functions {
    NORM_FUNCTIONS(ENTRY_MEMBER)
} norm_functions;

enum { PLAIN = 1, RANK = 4 };
enum { X, CHANNELS };
/* More of them the library's kernels have refused, or failed at, depending on its version. */
enum { MOST_IMAGES = 65535 };

static norm_functions dnn;

static status load(ctx *c) { DNN_ONCE(c, dnn, NORM_FUNCTIONS); }

static status describe(ctx *c, void *handle, dnn_known *p) {
    const dtype type = (dtype)p->key.type;

    (void)handle;
    TRY(dnn_make_tensor(c, p, X, type, p->key.x));
    TRY(dnn_make_tensor(c, p, CHANNELS, dnn_norm_type(type), p->key.w));
    p->taken = true;
    return OK;
}

static status start(ctx *c, const call *k, void *handle, const dnn_known *p, const void *arg, dnn_said *said) {
    const dnn_norm *n = arg;
    const void *one = dnn_factor(n->type, true), *zero = dnn_factor(n->type, false);
    void *x = p->part[X], *channels = p->part[CHANNELS];

    if (n->prepare) TRY(n->prepare(c, k, n));
    if (p->key.which == NORM_TRAIN)
        *said = DNN_SAID(dnn, cudnnBatchNormalizationForwardTraining, handle, PLAIN, one, zero, x, n->x, x, n->out,
                         channels, n->scale, n->bias, 1, n->mean, n->variance, n->epsilon, NULL, NULL);
    else if (p->key.which == NORM_INFER)
        *said = DNN_SAID(dnn, cudnnBatchNormalizationForwardInference, handle, PLAIN, one, zero, x, n->x, x, n->out,
                         channels, n->scale, n->bias, n->mean, n->variance, n->epsilon);
    else
        *said = DNN_SAID(dnn, cudnnBatchNormalizationBackward, handle, PLAIN, one, zero, one, zero, x, n->x, x, n->dy,
                         x, n->out, channels, n->scale, n->dscale, n->dbias, n->epsilon, n->mean, n->inverse);
    return OK;
}

/* False where there is nothing to norm, or too much. */
static bool describes(const call *k, const dnn_norm *n, dnn_norm_way way, dnn_key *out) {
    const double elements = (double)n->images * (double)n->channels * (double)n->size;

    if (elements == 0 || elements > INT32_MAX || n->images > MOST_IMAGES || n->epsilon < 0) return false;
    memset(out, 0, sizeof *out);
    out->device = k->cuda->device;
    out->kind = DNN_NORM;
    out->which = way;
    out->type = n->type;
    out->rank = RANK;
    for (int i = 0; i < RANK; i++) out->w[i] = 1;
    out->x[0] = n->images;
    out->x[1] = out->w[1] = n->channels;
    out->x[2] = n->size;
    out->x[3] = 1;
    return true;
}

status dnn_batch_norm(ctx *c, const call *k, const dnn_norm *n, dnn_norm_way way, bool *done) {
    static dnn_user norms = {.load = load, .describe = describe, .start = start, .is_optional = true};
    dnn_key of;

    *done = false;
    return describes(k, n, way, &of) ? dnn_run(c, k, &norms, &of, n, done) : OK;
}
