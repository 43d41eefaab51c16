/* softmax.h -- finds the kernel that takes the softmax of rows, for families that hide elements of them before. */
#ifndef ORT_OPS_REDUCTIONS_SOFTMAX_H
#define ORT_OPS_REDUCTIONS_SOFTMAX_H

#include "core/dtype.h"

#include <stdbool.h>
#include <stdint.h>

/* Of `rows` rows of n neighbouring elements; y may be x. A row of nothing but -∞ is NaN, or zeros if that is `safe`. */
typedef void softmax_fn(const void *x, void *y, int64_t n, int64_t rows, bool safe);

/* For rows of a float type. */
softmax_fn *softmax_kernel(dtype type);

#endif
