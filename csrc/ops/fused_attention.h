/* fused_attention.h -- the operands of FusedAttention and its gradient, and both by torch's kernel for CPUs. */
#ifndef ORT_OPS_FUSED_ATTENTION_H
#define ORT_OPS_FUSED_ATTENTION_H

#include "ops/op.h"

enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, OPERANDS, Y = OPERANDS, STATS, DY };

/* Bytes that the gradient by torch needs; 0 where the node does not ask torch. */
size_t fused_attention_shim_workspace(const node *n);
/* False: the node does not ask torch, or torch cannot, and all is to be computed still. Both ways leave the same behind, so
 * forward and backward may go different ones. */
bool fused_attention_shim(const call *k);
bool fused_attention_grad_shim(const call *k);

#endif
