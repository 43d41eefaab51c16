/* fused_attention.h -- reads the operands of FusedAttention and its gradient, for our kernels and torch's. */
#ifndef ORT_OPS_FUSED_ATTENTION_H
#define ORT_OPS_FUSED_ATTENTION_H

#include "ops/queries.h"

enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, OPERANDS, Y = OPERANDS, STATS, DY, DRAWN };

/* The type of scores and sums. */
static inline dtype fused_attention_sums(dtype t) { return t == F64 ? F64 : F32; }

/* Whether the weights that are dropped are those that a kernel of torch's drops. */
static inline bool fused_attention_torch_draws(const node *n) {
    return node_int(n, "torch") != TORCH_NONE && node_float(n, "ratio") > 0;
}

/* fused_attention_kernel.c; they ask the others first. */
kernel_fn fused_attention_cpu, fused_attention_grad_cpu;
size_t fused_attention_grad_workspace(const node *n);

/* fused_attention_shim.c. Bytes that the gradient by torch needs; 0 where the node does not ask torch. */
size_t fused_attention_shim_workspace(const node *n);
/* False: the node does not ask torch, or torch cannot, and all is to be computed still. Both ways leave the same behind, so
 * forward and backward may go different ones. */
bool fused_attention_shim(const call *k);
bool fused_attention_grad_shim(const call *k);

#endif
