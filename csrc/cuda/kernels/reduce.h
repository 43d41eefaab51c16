/* reduce.h -- totals of the lines of a matrix on a GPU (reduce.cu), wherever it lies. */
#ifndef ORT_CUDA_REDUCE_H
#define ORT_CUDA_REDUCE_H

#include "cuda/host/driver.h"

/* Element `i` of line `l` is data[l * line + i * step]. */
typedef struct matrix {
    dtype type; /* a float */
    const void *data;
    int64_t lines, length, line, step;
} matrix;

/* out[lines], contiguous, of x->type or float32. The call's workspace begins with cuda_totals_workspace bytes. */
MUST_USE status cuda_totals(ctx *c, const call *k, const matrix *x, dtype out_type, void *out);
size_t cuda_totals_workspace(int64_t lines, int64_t length);

#endif
