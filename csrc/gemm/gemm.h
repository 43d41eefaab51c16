/* gemm.h -- multiplies matrices, in one way: C = alpha * A * B + beta * C, for one pair or a batch of pairs.
 *
 * An operand is described by its strides, so a transposed or sliced view is multiplied where it lies. Implementations
 * are tried in order, the fastest library first and a kernel of our own last, so there is always an answer. */
#ifndef ORT_GEMM_GEMM_H
#define ORT_GEMM_GEMM_H

#include "gemm/gemm_ways.h"

const char *gemm_way_name(gemm_way way);
gemm_way gemm_way_named(const char *name); /* GEMM_WAYS: there is none */

/* Uses torch's threads; called within a parallel loop it stays on its thread. Allocates nothing of ours. */
void gemm_run(const gemm *g);
/* The same by one way: false, with nothing done, where it cannot. */
bool gemm_run_by(gemm_way way, const gemm *g);
/* The same by gemm.c's own order, whatever the table of measured ways says; returns the way it went. */
gemm_way gemm_run_default(const gemm *g);

#endif
