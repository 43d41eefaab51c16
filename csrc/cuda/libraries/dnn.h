/* dnn.h -- convolutions, batch norm and average pools by cuDNN, as torch has loaded it: found at run time like the driver.
 *
 * *done is false, and nothing was started, where the library does not take what is asked. */
#ifndef ORT_CUDA_DNN_H
#define ORT_CUDA_DNN_H

#include "cuda/host/driver.h"
#include "ops/spatial/conv_products.h"

/* Starts one product of a convolution; its operands are in the order of the record (ops/spatial/conv.c). `add`: to what the
 * result holds. Not taken: padding that is not the same on both sides, or nothing that gives the same bits every time.
 * E_RUNTIME without the library. The workspace is the call's, of dnn_workspace bytes. */
MUST_USE status dnn_convolution(ctx *c, const call *k, const conv *v, conv_product which, bool add, bool *done);

size_t dnn_workspace(const conv *v);

/* What the library was told of is forgotten, and which algorithms were measured. */
void dnn_forget(void);

/* --- what has kernels of ours, too -------------------------------------------------------------------------------- */

/* Nothing is taken without the library. */

typedef enum dnn_norm_way { NORM_TRAIN, NORM_INFER, NORM_GRAD } dnn_norm_way;

/* A batch norm of x [images, channels, size]. What has a number for each channel is of dnn_norm_type(type). `out` does not
 * lie in the memory of an operand. */
typedef struct dnn_norm {
    dtype type; /* of x, dy and out */
    int64_t images, channels, size;
    double epsilon;
    const void *x, *dy, *scale, *bias;
    void *out;             /* y or dx */
    void *mean, *variance; /* NORM_TRAIN: zeros, then results, the variance unbiased. NORM_INFER: operands */
    void *inverse;         /* NORM_GRAD: operand, 1 / sqrt(variance + epsilon), as the mean is */
    void *dscale, *dbias;  /* NORM_GRAD: results */
    status (*prepare)(ctx *c, const call *k,
                      const struct dnn_norm *n); /* if taken, before it is started; may be NULL */
} dnn_norm;

static inline dtype dnn_norm_type(dtype x) { return x == F64 ? F64 : F32; }
MUST_USE status dnn_batch_norm(ctx *c, const call *k, const dnn_norm *n, dnn_norm_way way, bool *done);

/* The average pool of x [images, channels, w->in...], of float32 or float64, or its gradient. Not taken: dilation, padding
 * that is not the same on both sides, windows that hang over it or lie in it. */
typedef struct dnn_pool {
    dtype type;
    int64_t images, channels;
    const window *w;
    bool count_padding, is_grad;
    const void *from; /* x or dy */
    void *to;         /* y or dx */
} dnn_pool;

MUST_USE status dnn_average_pool(ctx *c, const call *k, const dnn_pool *p, bool *done);

#endif
