/* loss.h -- declares the kernels of losses (loss.cu), for others that have logits (linear_loss.cu). */
#ifndef ORT_CUDA_LOSS_H
#define ORT_CUDA_LOSS_H

#include "cuda/kernels/kernel.h"

typedef struct loss_args {
    const void *x, *labels, *weights, *dloss; /* weights may be absent */
    void *out, *narrow;             /* the loss, or dx, which may be x; dx in a 16-bit type, inner 1; or absent */
    double *lse, *losses, *divisor; /* [samples], [samples]; a number, may be absent */
    double smoothing;
    int64_t samples, classes, inner, line, ignored; /* line: from one batch of `inner` samples to the next */
    int32_t label_type, weight_type, dloss_type, narrow_type, ignores, each, mean, node;
    cuda_fault *fault;
} loss_args;

#ifdef ORT_HOST
/* Labels are operand `labels`, weights operand `weights`, `s` the shape of the logits. */
loss_args loss_args_of(const call *k, const shape *s, int labels, int weights);
/* x of `type` -> lse, losses. */
MUST_USE status loss_run(ctx *c, const call *k, dtype type, const loss_args *a);
/* x of `type`, lse, divisor, dloss -> out, narrow. */
MUST_USE status loss_grad_run(ctx *c, const call *k, dtype type, const loss_args *a);
/* losses -> out of `type`, divisor. */
MUST_USE status loss_join_run(ctx *c, const call *k, dtype type, const loss_args *a);
/* What the losses will be divided by -> divisor[0]; 1 -> divisor[1]. */
MUST_USE status loss_divisor_run(ctx *c, const call *k, const loss_args *a);
#endif

#endif
