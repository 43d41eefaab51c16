/* offsets.h -- plans memory, purely: lifetimes in, offsets out. Knows nothing of nodes or kernels. */
#ifndef ORT_PLAN_OFFSETS_H
#define ORT_PLAN_OFFSETS_H

#include "core/ctx.h"

/* One block of memory that is needed from time `first` to time `last`, both included. */
typedef struct interval {
    int64_t bytes;
    int first, last;
    int64_t offset; /* out: a multiple of the alignment; 0 for a block of no bytes */
} interval;

/* Chooses offsets such that no two blocks that are needed at the same time overlap, and tries to keep *peak, the bytes
 * that hold them all, small. `redzone` bytes are left free behind every block (sanitized builds; otherwise 0). The same
 * blocks get the same offsets whenever and wherever it is asked. */
MUST_USE status offsets_plan(ctx *c, interval *items, int count, int64_t alignment, int64_t redzone, int64_t *peak);
/* The most bytes that are needed at one time, sizes rounded as offsets_plan rounds them: no plan can be smaller. */
MUST_USE status offsets_bound(ctx *c, const interval *items, int count, int64_t alignment, int64_t redzone,
                              int64_t *bound);

#endif
