/* adam.h -- Adam's update of many tensors in one pass over their memory.
 *
 * Adam: Kingma and Ba, 2015; AdamW: Loshchilov and Hutter, 2019; AMSGrad: Reddi, Kale and Kumar, 2018. */
#ifndef ORT_OPTIM_ADAM_H
#define ORT_OPTIM_ADAM_H

#include "core/dtype.h"

/* One parameter with its gradient and state; all of `count` elements that lie in the same order. */
typedef struct adam_tensor {
    int64_t count;
    dtype type, grad_type, state_type;
    void *param, *grad;
    void *m, *v;  /* running means of the gradient and of its square */
    void *v_most; /* AMSGrad: the largest v so far; or NULL */
    float *exact; /* float32 weights of which `param` is the rounded copy; or NULL */
    double step;  /* this one's number, from 1 */
} adam_tensor;

/* Where the weights decay. */
typedef enum adam_mode {
    ADAM_L2,            /* in the gradient */
    ADAMW_TRANSFORMERS, /* in the weight, after the update; epsilon is added before the bias is corrected */
    ADAMW_TORCH         /* in the weight, before the update */
} adam_mode;

typedef struct adam_settings {
    adam_mode mode;
    double lr, beta_1, beta_2, eps, weight_decay;
    double grad_factor; /* of every gradient: unscales, clips; it is not written back */
    bool correct_bias, maximize;
    bool clear_gradients; /* leave zeros */
} adam_settings;

/* Parameters, gradients and states may be any floats; sums are float, double for a double parameter. */
void adam_update(const adam_tensor *tensors, int count, const adam_settings *s);

/* The sum of squares of each of some tensors, in double: infinite or NaN exactly when an element is (or for float64
 * elements beyond 1e154). */
typedef struct dense {
    dtype type;
    int64_t count;
    const void *data;
} dense;

void sums_of_squares(const dense *tensors, int count, double *sums);

#endif
