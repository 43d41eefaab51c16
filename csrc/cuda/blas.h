/* blas.h -- products by cuBLASLt, as torch has loaded it: found at run time like the driver. */
#ifndef ORT_CUDA_BLAS_H
#define ORT_CUDA_BLAS_H

#include "cuda/driver.h"
#include "exec/gemm.h"

/* What is added to a product. */
typedef enum addend_kind {
    ADD_NOTHING,
    ADD_VECTOR, /* n numbers, the same for every row */
    ADD_MATRIX, /* elements that lie as the result does; the result itself may be it */
} addend_kind;

typedef struct addend {
    addend_kind kind;
    const void *data; /* of the result's type */
} addend;

/* Starts C = alpha A B + addend; beta is not read. *done is false, and nothing was started, where the library does not
 * take such a product: other types, strides or alignments than it knows. E_RUNTIME without the library. The
 * workspace is the call's, of blas_workspace bytes. */
MUST_USE status blas_product(ctx *c, const call *k, const gemm *g, const addend *plus, bool *done);

/* For a result of so many elements. */
size_t blas_workspace(int64_t elements);

#endif
