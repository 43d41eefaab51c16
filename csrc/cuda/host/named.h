/* named.h -- numbers nodes for what kernels may report. The report is seen after the step, maybe of
 * another plan, when the node itself may be gone: so its name is kept. */
#ifndef ORT_CUDA_NAMED_H
#define ORT_CUDA_NAMED_H

#include "ops/op.h"

/* Of the node's operator and name: from 1, the same every time; 0 when there are too many. */
int32_t cuda_named(const node *n);
/* `s`, with the node of this number in its sentence. */
status cuda_blame(ctx *c, status s, int32_t number);

#endif
