/* tune.h -- measures which way products go fastest, and puts it into the table that gemm.c asks (gemm/gemm_table.h). */
#ifndef ORT_EXEC_TUNE_H
#define ORT_EXEC_TUNE_H

#include "gemm/gemm.h"
#include "gemm/gemm_table.h"
#include "plan/plan.h"

typedef struct tuned {
    gemm_class of;
    gemm_way best;
    double seconds[GEMM_WAYS]; /* a product, the least of some tries; 0: it does not go that way, or was not tried */
} tuned;

/* Measures every class of product in a plan for the CPU that the table does not have, on memory of its own that it gives
 * back, with the threads that a run from this thread has. At most about `limit` seconds a class; 0: as long as it takes.
 * What there is no memory for is left out. out[count], from `c`: what was measured, now in the table. */
MUST_USE status tune_plan(ctx *c, const plan *p, double limit, tuned **out, int *count);

/* One product, whose operands' pointers are not looked at. False where there is nothing to choose, or no memory. */
bool tune_product(const gemm *g, double limit, tuned *out);

#endif
