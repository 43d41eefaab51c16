/* triton_attention.h -- runs FusedAttention by Triton's flash attention, where a pass has asked for that. */
#ifndef ORT_OPS_TRITON_ATTENTION_H
#define ORT_OPS_TRITON_ATTENTION_H

#include "ops/chains/triton.h"
#include "ops/queries.h"

enum { TRITON_ATTENTION_KERNELS = 2 };

/* `seed`: as for triton_launch_of. The kernels that a FusedAttention or its gradient starts, at most TRITON_ATTENTION_KERNELS, their number in *count. 0: the
 * node does not ask for them, or they do not take these strides; our own follow, which leave the same behind. */
MUST_USE status triton_attention_of(ctx *c, const call *k, const uint64_t *seed, triton_launch *launches, int *count);
/* On the CPU, by the interpreter. *done is false where there are none. */
MUST_USE status triton_attention_cpu(ctx *c, const call *k, bool *done);

#endif
