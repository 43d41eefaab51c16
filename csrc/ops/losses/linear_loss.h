/* linear_loss.h -- operands and results of the operators of linear_loss.c: what the kernels of CPU and GPU share. */
#ifndef ORT_OPS_LINEAR_LOSS_H
#define ORT_OPS_LINEAR_LOSS_H

#include "ops/op.h"

/* Operands and results of LinearCrossEntropy. */
enum { HIDDEN, WEIGHT, LABELS, BIAS, CLASS_WEIGHTS, UPSTREAM, LINEAR_OPERANDS };
enum { LOSS, DHIDDEN, DWEIGHT, DBIAS, LSE, LINEAR_RESULTS };
/* Operands of LinearCrossEntropyGrad; its results are the three gradients. */
enum { DLOSS, G_HIDDEN, G_WEIGHT, G_LABELS, G_LSE, G_BIAS, G_CLASS_WEIGHTS, GRAD_OPERANDS };

#endif
