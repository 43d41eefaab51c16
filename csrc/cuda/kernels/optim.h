/* optim.h -- optimizers on a GPU: a launch takes many tensors, and the host reads nothing of what it computes. */
#ifndef ORT_CUDA_OPTIM_H
#define ORT_CUDA_OPTIM_H

#include "cuda/host/driver.h"
#include "optim/update.h"

/* Scalars in memory of the GPU that a step reads there; a NULL is what it stands for on the host. */
typedef struct cuda_scalars {
    const void *lr; /* instead of the setting */
    dtype lr_type;
    const float *scale;    /* the gradients are divided by it */
    const float *overflow; /* not 0: the step is left out, but for clearing gradients */
    const double *clip;    /* the gradients are multiplied by it */
    double *room;          /* for a rule that measures: 2 CUDA_SUM_PARTS for each tensor; or NULL */
} cuda_scalars;

/* As update_tensors. The tensors' counters are on the GPU, and counted there. E_INVALID where a rule that needs them, or
 * room, has none. */
MUST_USE status cuda_update(ctx *c, const cuda_run *where, const update_rule *rule, const update_tensor *tensors,
                            int count, const double *settings, double grad, bool clear_gradients, cuda_scalars at);

/* As sums_of_squares: `sums`, of `count` doubles on the GPU, through `room`, of CUDA_SUM_PARTS for each tensor. */
enum { CUDA_SUM_PARTS = 128 };
MUST_USE status cuda_sums_of_squares(ctx *c, const cuda_run *where, const dense *tensors, int count, double *sums,
                                     double *room);

#endif
