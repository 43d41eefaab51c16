/* product.h -- multiplies matrices on a GPU (matmul.cu): by cuBLASLt, or the kernel that is there for all others. */
#ifndef ORT_CUDA_PRODUCT_H
#define ORT_CUDA_PRODUCT_H

#include "cuda/host/driver.h"
#include "gemm/gemm.h"

/* Starts C = alpha A B, and + C where beta is 1, of one pair; operands are of g->type. The call's workspace begins with
 * blas_workspace(m * n) bytes. */
MUST_USE status cuda_product(ctx *c, const call *k, const gemm *g);

#endif
