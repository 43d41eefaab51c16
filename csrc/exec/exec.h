/* exec.h -- runs a stretch of a plan's instructions. Allocates nothing, holds no lock, keeps no state. */
#ifndef ORT_EXEC_EXEC_H
#define ORT_EXEC_EXEC_H

#include "plan/plan.h"

/* The memory of one run; all borrowed. Pointers an executed stretch does not need may be NULL. */
typedef struct run {
    void *arena;                 /* plan->arena_bytes, 64-byte aligned; the same for a forward and its backward */
    void *const *memory[PLACES]; /* [AT_INPUT][i], [AT_OUTPUT][i], ... each contiguous */
    uint64_t seed;
    const host *host; /* for nodes that are not the engine's own, or NULL */
    double *seconds;  /* [plan->n_code] time of each instruction is added here, or NULL */
} run;

/* Instructions [from, to). An error names the node. */
MUST_USE status exec_run(ctx *c, const plan *p, int from, int to, const run *r);

#endif
