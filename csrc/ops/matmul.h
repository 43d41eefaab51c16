/* matmul.h -- a matrix product's operands as exec/gemm.h takes them: what the kernels of CPU and GPU share. */
#ifndef ORT_OPS_MATMUL_H
#define ORT_OPS_MATMUL_H

#include "exec/gemm.h"
#include "ops/op.h"

/* The product of a MatMul or a MatMulBias, into its result; beta is 0. Batch dimensions are the result's. */
gemm matmul_gemm(const call *k);

#endif
