/* matmul.h -- reads a product's operands as gemm/gemm.h takes them: what kernels of CPU and GPU share. */
#ifndef ORT_OPS_MATMUL_H
#define ORT_OPS_MATMUL_H

#include "gemm/gemm.h"
#include "ops/op.h"

/* Of every operator whose first two operands are multiplied into out[0]. */
status infer_matmul(graph *g, node *n);
status infer_matmul_bias(graph *g, node *n); /* and whose third is added */

/* The product of any of them, into out[0]; beta is 0. Batch dimensions are the result's. */
gemm matmul_gemm(const call *k);

#endif
