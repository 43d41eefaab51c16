/* fake_dnn_norms.c -- computes batch norm and average pools of our libcudnn.so.9 in double. It checks what it is told:
 * types, sizes, factors, and that no result lies in an operand's memory.
 *     fake_dnn_norms()      how many batch norms were computed, forward or backward
 *     fake_dnn_pools()      how many pools
 *     fake_dnn_asked()      how many of both were refused */
#include "fake_dnn.h"

#include <math.h>

enum { LARGEST_WINDOW = 255 };
enum { SPATIAL_MODE = 1, AVERAGE_OF_ALL = 1, AVERAGE_OF_INSIDE = 2 };

static int norms, pools, asked;
EXPORT int fake_dnn_norms(void);
EXPORT int fake_dnn_pools(void);
EXPORT int fake_dnn_asked(void);
int fake_dnn_norms(void) { return norms; }
int fake_dnn_pools(void) { return pools; }
int fake_dnn_asked(void) { return asked; }

/* --- batch norm --------------------------------------------------------------------------------------------------- */

typedef struct norm {
    tensor x;
    int type; /* of what there is for each channel */
    bool is_training;
    double factor, epsilon;
    const void *from, *dy, *scale, *bias, *mean, *variance, *inverse; /* these given */
    void *to, *moving_mean, *moving_variance, *dscale, *dbias;
} norm;

static const char *wrong_norm(void *h, int mode, const void *alpha, const void *beta, const tensor *x,
                              const tensor *channels, double epsilon) {
    if (!fake_in_context()) return "a norm without the device's context";
    if (!h || !x || !channels || !alpha || !beta || mode != SPATIAL_MODE) return "operands of a norm";
    if (factor_of(x->type, alpha) != 1 || factor_of(x->type, beta) != 0) return "factors of a norm";
    if (channels->type != (x->type == DOUBLE ? DOUBLE : FLOAT)) return "the type of a norm's parameters";
    if (channels->rank != x->rank || channels->size[1] != x->size[1]) return "channels of a norm";
    for (int i = 0; i < channels->rank; i++)
        if (i != 1 && channels->size[i] != 1) return "the shape of a norm's parameters";
    return epsilon < 0 ? "a norm's epsilon" : NULL;
}

/* Where element e of a channel is, and how many there are. */
static int64_t place_of(const tensor *x, int64_t channel, int64_t e) {
    const int64_t size = count_of(x) / x->size[0] / x->size[1];
    return (e / size * x->size[1] + channel) * size + e % size;
}

static int64_t elements_of(const tensor *x) { return count_of(x) / x->size[1]; }

static void forward_norm(const norm *j, int64_t channel, double mean, double inverse) {
    const int type = cuda_type(j->x.type);
    const double scale = get(j->type, j->scale, channel), bias = get(j->type, j->bias, channel);

    for (int64_t e = 0; e < elements_of(&j->x); e++) {
        const int64_t at = place_of(&j->x, channel, e);
        put(type, j->to, at, (get(type, j->from, at) - mean) * inverse * scale + bias);
    }
}

static int run_norm(const void *data) {
    const norm *j = data;
    const int type = cuda_type(j->x.type);
    const int64_t n = elements_of(&j->x);

    norms++;
    for (int64_t channel = 0; channel < j->x.size[1]; channel++) {
        double mean = 0, variance = 0;

        for (int64_t e = 0; e < n; e++) mean += get(type, j->from, place_of(&j->x, channel, e)) / (double)n;
        for (int64_t e = 0; e < n; e++) {
            const double off = get(type, j->from, place_of(&j->x, channel, e)) - mean;
            variance += off * off / (double)n;
        }
        if (!j->is_training) {
            mean = get(j->type, j->mean, channel);
            variance = get(j->type, j->variance, channel);
        } else {
            const double keep = 1 - j->factor, old_mean = get(j->type, j->moving_mean, channel);
            const double old_variance = get(j->type, j->moving_variance, channel);
            const double unbiased = variance * ((double)n / (double)(n - 1));
            put(j->type, j->moving_mean, channel, keep * old_mean + j->factor * mean);
            put(j->type, j->moving_variance, channel, keep * old_variance + j->factor * unbiased);
        }
        forward_norm(j, channel, mean, 1 / sqrt(variance + j->epsilon));
    }
    return SUCCESS;
}

static int run_norm_grad(const void *data) {
    const norm *j = data;
    const int type = cuda_type(j->x.type);
    const int64_t n = elements_of(&j->x);

    norms++;
    for (int64_t channel = 0; channel < j->x.size[1]; channel++) {
        const double mean = get(j->type, j->mean, channel), inverse = get(j->type, j->inverse, channel);
        const double scale = get(j->type, j->scale, channel);
        double sum = 0, dot = 0;
        for (int64_t e = 0; e < n; e++) {
            const int64_t at = place_of(&j->x, channel, e);
            sum += get(type, j->dy, at);
            dot += get(type, j->dy, at) * (get(type, j->from, at) - mean) * inverse;
        }
        for (int64_t e = 0; e < n; e++) {
            const int64_t at = place_of(&j->x, channel, e);
            const double z = (get(type, j->from, at) - mean) * inverse;
            put(type, j->to, at, scale * inverse * (get(type, j->dy, at) - sum / (double)n - z * dot / (double)n));
        }
        put(j->type, j->dscale, channel, dot);
        put(j->type, j->dbias, channel, sum);
    }
    return SUCCESS;
}

static int give_norm(void *h, fake_work *run, const norm *j) {
    if (fake_dnn_refusing) return asked++, NOT_SUPPORTED;
    const int refusal = fake_dnn_fails();
    if (refusal != SUCCESS) return asked++, refusal;
    return fake_give(((handle *)h)->stream, run, j, sizeof *j);
}

EXPORT int cudnnBatchNormalizationForwardTraining(void *h, int mode, const void *alpha, const void *beta, void *x_is,
                                                  const void *x, void *y_is, void *y, void *channels, const void *scale,
                                                  const void *bias, double factor, void *moving_mean,
                                                  void *moving_variance, double epsilon, void *saved_mean,
                                                  void *saved_inverse);
int cudnnBatchNormalizationForwardTraining(void *h, int mode, const void *alpha, const void *beta, void *x_is,
                                           const void *x, void *y_is, void *y, void *channels, const void *scale,
                                           const void *bias, double factor, void *moving_mean, void *moving_variance,
                                           double epsilon, void *saved_mean, void *saved_inverse) {
    const tensor *t = x_is, *of = channels;
    const char *wrong;

    ENTER();
    if ((wrong = wrong_norm(h, mode, alpha, beta, t, of, epsilon))) return complain(wrong);
    if (!is_same(t, y_is) || !x || !y || x == y || !scale || !bias) return complain("operands of a norm");
    if (!moving_mean || !moving_variance || moving_mean == moving_variance || saved_mean || saved_inverse)
        return complain("moments of a norm");
    if (elements_of(t) < 2 || !(factor >= 0 && factor <= 1)) return complain("what a norm's moments are of");
    const norm j = {.x = *t,
                    .type = cuda_type(of->type),
                    .is_training = true,
                    .factor = factor,
                    .epsilon = epsilon,
                    .from = x,
                    .scale = scale,
                    .bias = bias,
                    .to = y,
                    .moving_mean = moving_mean,
                    .moving_variance = moving_variance};
    return give_norm(h, run_norm, &j);
}

EXPORT int cudnnBatchNormalizationForwardInference(void *h, int mode, const void *alpha, const void *beta, void *x_is,
                                                   const void *x, void *y_is, void *y, void *channels,
                                                   const void *scale, const void *bias, const void *mean,
                                                   const void *variance, double epsilon);
int cudnnBatchNormalizationForwardInference(void *h, int mode, const void *alpha, const void *beta, void *x_is,
                                            const void *x, void *y_is, void *y, void *channels, const void *scale,
                                            const void *bias, const void *mean, const void *variance, double epsilon) {
    const tensor *t = x_is, *of = channels;
    const char *wrong;

    ENTER();
    if ((wrong = wrong_norm(h, mode, alpha, beta, t, of, epsilon))) return complain(wrong);
    if (!is_same(t, y_is) || !x || !y || x == y || !scale || !bias || !mean || !variance)
        return complain("operands of a norm");
    const norm j = {.x = *t,
                    .type = cuda_type(of->type),
                    .epsilon = epsilon,
                    .from = x,
                    .scale = scale,
                    .bias = bias,
                    .mean = mean,
                    .variance = variance,
                    .to = y};
    return give_norm(h, run_norm, &j);
}

EXPORT int cudnnBatchNormalizationBackward(void *h, int mode, const void *alpha, const void *beta,
                                           const void *alpha_channels, const void *beta_channels, void *x_is,
                                           const void *x, void *dy_is, const void *dy, void *dx_is, void *dx,
                                           void *channels, const void *scale, void *dscale, void *dbias, double epsilon,
                                           const void *mean, const void *inverse);
int cudnnBatchNormalizationBackward(void *h, int mode, const void *alpha, const void *beta, const void *alpha_channels,
                                    const void *beta_channels, void *x_is, const void *x, void *dy_is, const void *dy,
                                    void *dx_is, void *dx, void *channels, const void *scale, void *dscale, void *dbias,
                                    double epsilon, const void *mean, const void *inverse) {
    const tensor *t = x_is, *of = channels;
    const char *wrong;

    ENTER();
    if ((wrong = wrong_norm(h, mode, alpha, beta, t, of, epsilon))) return complain(wrong);
    if ((wrong = wrong_norm(h, mode, alpha_channels, beta_channels, t, of, epsilon))) return complain(wrong);
    if (!is_same(t, dy_is) || !is_same(t, dx_is) || !x || !dy || !dx || dx == x || dx == dy)
        return complain("operands of a norm's gradient");
    if (!scale || !mean || !inverse || !dscale || !dbias || dscale == dbias) return complain("a norm's gradients");
    const norm j = {.x = *t,
                    .type = cuda_type(of->type),
                    .from = x,
                    .dy = dy,
                    .scale = scale,
                    .mean = mean,
                    .inverse = inverse,
                    .to = dx,
                    .dscale = dscale,
                    .dbias = dbias};
    return give_norm(h, run_norm_grad, &j);
}

/* --- pools -------------------------------------------------------------------------------------------------------- */

typedef struct pooling {
    int mode, rank, size[AXES], pad[AXES], stride[AXES];
} pooling;

MAKES(cudnnCreatePoolingDescriptor, pooling, cudnnDestroyPoolingDescriptor)

EXPORT int cudnnSetPoolingNdDescriptor(void *d, int mode, int nans, int rank, const int *size, const int *pad,
                                       const int *stride);
int cudnnSetPoolingNdDescriptor(void *d, int mode, int nans, int rank, const int *size, const int *pad,
                                const int *stride) {
    pooling *p = d;

    ENTER();
    if (!p || rank < 2 || rank > AXES || nans != 1) return complain("a pool");
    if (mode != AVERAGE_OF_ALL && mode != AVERAGE_OF_INSIDE) return complain("a pool that is no average");
    *p = (pooling){.mode = mode, .rank = rank};
    for (int i = 0; i < rank; i++) {
        if (size[i] < 1 || pad[i] < 0 || pad[i] >= size[i] || stride[i] < 1) return complain("a pool's numbers");
        if (size[i] > LARGEST_WINDOW) return asked++, NOT_SUPPORTED;
        p->size[i] = size[i];
        p->pad[i] = pad[i];
        p->stride[i] = stride[i];
    }
    return SUCCESS;
}

typedef struct averages {
    tensor x, y;
    pooling p;
    bool is_grad;
    const void *from;
    void *to;
} averages;

static int run_pool(const void *data) {
    const averages *j = data;
    const pooling *p = &j->p;
    const int type = cuda_type(j->x.type), last = AXES - p->rank;
    const tensor *result = j->is_grad ? &j->x : &j->y;
    int xs[AXES], ys[AXES], size[AXES] = {1, 1, 1}, pad[AXES] = {0}, stride[AXES] = {1, 1, 1}, from[AXES];
    double *sums = calloc((size_t)count_of(result), sizeof(double));

    if (!sums) return NO_MEMORY;
    axes_of(&j->x, xs), axes_of(&j->y, ys);
    for (int i = last; i < AXES; i++) size[i] = p->size[i - last], pad[i] = p->pad[i - last];
    for (int i = last; i < AXES; i++) stride[i] = p->stride[i - last];
    pools++;
    for (int64_t y = 0; y < count_of(&j->y); y++) {
        int64_t plane = y, seen = 0;
        for (int i = AXES - 1; i >= 0; plane /= ys[i--]) from[i] = (int)(plane % ys[i]) * stride[i] - pad[i];
        for (int pass = 0; pass < 2; pass++) /* counts, then adds */
            for (int64_t tap = 0; tap < (int64_t)size[0] * size[1] * size[2]; tap++) {
                const int at[AXES] = {from[0] + (int)(tap / size[2] / size[1]),
                                      from[1] + (int)(tap / size[2] % size[1]), from[2] + (int)(tap % size[2])};
                const int64_t x = ((plane * xs[0] + at[0]) * xs[1] + at[1]) * xs[2] + at[2];
                bool inside = true;
                for (int i = 0; i < AXES; i++) inside = inside && at[i] >= 0 && at[i] < xs[i];
                if (pass == 0) seen += inside || p->mode == AVERAGE_OF_ALL;
                else if (inside && j->is_grad) sums[x] += get(type, j->from, y) / (double)seen;
                else if (inside) sums[y] += get(type, j->from, x) / (double)seen;
            }
    }
    for (int64_t i = 0; i < count_of(result); i++) put(type, j->to, i, sums[i]);
    free(sums);
    return SUCCESS;
}

static int start_pool(void *h, const pooling *p, const void *alpha, const tensor *x, const void *beta, const tensor *y,
                      const void *from, void *to, bool is_grad) {
    if (!fake_in_context()) return complain("a pool without the device's context");
    if (!h || !p || !x || !y || !alpha || !beta || !from || !to || from == to) return complain("operands of a pool");
    if (factor_of(x->type, alpha) != 1 || factor_of(x->type, beta) != 0) return complain("factors of a pool");
    if (x->type != y->type || x->rank != y->rank || x->rank != p->rank + 2 || x->size[0] != y->size[0] ||
        x->size[1] != y->size[1])
        return complain("a pool's tensors");
    for (int i = 0; i < p->rank; i++)
        if (1 + (x->size[2 + i] + 2 * p->pad[i] - p->size[i]) / p->stride[i] != y->size[2 + i])
            return complain("sizes of a pool");
    if (fake_dnn_refusing) return asked++, NOT_SUPPORTED;
    const int refusal = fake_dnn_fails();
    if (refusal != SUCCESS) return asked++, refusal;
    const averages j = {*x, *y, *p, is_grad, from, to};
    return fake_give(((handle *)h)->stream, run_pool, &j, sizeof j);
}

EXPORT int cudnnPoolingForward(void *h, void *pool, const void *alpha, void *x_is, const void *x, const void *beta,
                               void *y_is, void *y);
int cudnnPoolingForward(void *h, void *pool, const void *alpha, void *x_is, const void *x, const void *beta, void *y_is,
                        void *y) {
    ENTER();
    return start_pool(h, pool, alpha, x_is, beta, y_is, x, y, false);
}

EXPORT int cudnnPoolingBackward(void *h, void *pool, const void *alpha, void *y_is, const void *y, void *dy_is,
                                const void *dy, void *x_is, const void *x, const void *beta, void *dx_is, void *dx);
int cudnnPoolingBackward(void *h, void *pool, const void *alpha, void *y_is, const void *y, void *dy_is, const void *dy,
                         void *x_is, const void *x, const void *beta, void *dx_is, void *dx) {
    ENTER();
    if (!is_same(y_is, dy_is) || !is_same(x_is, dx_is) || !x || !y) return complain("operands of a pool's gradient");
    return start_pool(h, pool, alpha, x_is, beta, y_is, dy, dx, true);
}
