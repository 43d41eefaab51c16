/* size.h -- sums and products of sizes that a model says, or that follow from what it says.
 *
 * What does not fit in 63 bits is the number of that sign that is furthest from 0. That is more than a shape (shape_check),
 * the memory of a plan or a workspace (plan.c) may have, so the check that each of them goes through refuses it, with the
 * name of the node; nothing wraps around to a size that looks right. */
#ifndef ORT_CORE_SIZE_H
#define ORT_CORE_SIZE_H

#include <stdint.h>

static inline int64_t size_add(int64_t a, int64_t b) {
    int64_t sum;
    return __builtin_add_overflow(a, b, &sum) ? (a < 0 ? INT64_MIN : INT64_MAX) : sum;
}

static inline int64_t size_mul(int64_t a, int64_t b) {
    int64_t product;
    return __builtin_mul_overflow(a, b, &product) ? ((a < 0) != (b < 0) ? INT64_MIN : INT64_MAX) : product;
}

#endif
