/* triton.h -- starts kernels that Triton has compiled (triton.c). */
#ifndef ORT_CUDA_TRITON_H
#define ORT_CUDA_TRITON_H

#include "ops/op.h"

/* FusedAttention and its gradient by Triton's flash attention; *done is false where the node does not ask for it, or its
 * operands are not such as it takes. */
MUST_USE status triton_attention_start(ctx *c, const call *k, bool *done);

#endif
