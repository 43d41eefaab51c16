/* exec.h -- runs a range of a plan's instructions. Holds no lock, keeps no state; allocates nothing, but
 * for instructions of more than 64 operands. */
#ifndef ORT_EXEC_EXEC_H
#define ORT_EXEC_EXEC_H

#include "plan/plan.h"

/* The memory of one run; all borrowed. Pointers an executed range does not need may be NULL. */
typedef struct run {
    void *arena; /* plan_arena_bytes, aligned as plan.h says; the same for a forward and its backward */
    bool joint;  /* it is a joint arena: the gradients that backward makes may lie in it, at their places */
    void *const *memory[PLACES]; /* [AT_INPUT][i], [AT_OUTPUT][i], ... each contiguous */
    uint64_t seed;
    const host *host;                /* for nodes that are not the engine's own, or NULL */
    const struct offload_room *room; /* plan->offload_bytes, the same for a forward and its backward, or NULL */
    const struct cuda_run *cuda;     /* plans for a GPU: where (cuda/host/driver.h), else NULL; all memory is there */
    const void *constants;           /* plan->constant_bytes on that GPU */
    double *seconds; /* [plan->n_code] time of each instruction is added here, or NULL; runs may share it */
    bool recorded;   /* torch's profiler is on: each instruction is a range of its trace (exec/record.h) */
} run;

/* Instructions [from, to). An error names the node. On a GPU they have been started, not finished. */
MUST_USE status exec_run(ctx *c, const plan *p, int from, int to, const run *r);

/* Whether every instruction of a plan for a GPU can run at `where`, whose `dry` is set: nothing is started. */
MUST_USE status exec_check(ctx *c, const plan *p, const struct cuda_run *where);

/* Every matrix product of a plan for the CPU that its operators tell of, none with data. */
MUST_USE status exec_products(ctx *c, const plan *p, product_fn *each, void *arg);

#endif
