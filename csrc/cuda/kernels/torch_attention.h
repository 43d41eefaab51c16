/* torch_attention.h -- runs FusedAttention by torch's kernels, where a pass has asked for that (torch_attention.cu).
 *
 * *done is false, without an error, where torch cannot: nothing has been started then, and our kernels follow. Both leave
 * the same behind, so forward and backward may go different ways. */
#ifndef ORT_CUDA_TORCH_ATTENTION_H
#define ORT_CUDA_TORCH_ATTENTION_H

#include "ops/queries.h"

/* Whether torch is asked for this node: it cannot be part of a CUDA graph. */
bool torch_attention_is(const node *n);
/* Bytes that forward needs, and backward; 0 where torch is not asked. */
size_t torch_attention_starts(const node *n);
size_t torch_attention_workspace(const node *n);
MUST_USE status torch_attention_forward(ctx *c, const call *k, bool *done);
MUST_USE status torch_attention_backward(ctx *c, const call *k, bool *done);

#endif
