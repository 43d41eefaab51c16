/* linear_loss.h -- operands and results of the operators of linear_loss.c: what the kernels of CPU and GPU share. */
#ifndef ORT_OPS_LINEAR_LOSS_H
#define ORT_OPS_LINEAR_LOSS_H

#include "ops/op.h"

/* Operands and results of LinearCrossEntropy. */
enum { HIDDEN, WEIGHT, LABELS, BIAS, CLASS_WEIGHTS, UPSTREAM, LINEAR_OPERANDS };
enum { LOSS, DHIDDEN, DWEIGHT, DBIAS, LSE, LINEAR_RESULTS };
/* Operands of LinearCrossEntropyGrad; its results are the three gradients. */
enum { DLOSS, G_HIDDEN, G_WEIGHT, G_LABELS, G_LSE, G_BIAS, G_CLASS_WEIGHTS, GRAD_OPERANDS };

/* Of the GPU's: lines of logits are a multiple of so many elements. */
enum { LINEAR_LOSS_LINE = 8 };
int64_t linear_loss_line(int64_t classes);
/* How many rows of logits it has at a time: as many as some parts of equal lengths have, at most 4096, or fewer so that
 * they and their gradient are no more than 1.5 GiB; a multiple of 128, if it is not all of them. */
int64_t linear_loss_chunk(dtype type, int64_t samples, int64_t classes);

#endif
