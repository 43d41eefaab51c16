/* redzones.h -- runs instructions one by one and looks at what lies between the blocks of the arena.
 *
 * An arena is one allocation, so compute-sanitizer and a GPU's page tables see no access that leaves a block for another
 * one. A plan with red zones (plan->red_zone, ORTMODULE_RED_ZONES=1 when it is made) has a gap behind every block, and
 * here each byte that belongs to no living block is 0xFF: NaN in all float types, -1 in integers. So what reads beside a
 * block, reads a block before it is written, or one that is no longer needed, computes NaN or meets an index out of
 * range; what writes there is an error that names it. Waits for every instruction: for looking for mistakes alone. */
#ifndef ORT_CUDA_REDZONES_H
#define ORT_CUDA_REDZONES_H

#include "cuda/host/driver.h"
#include "exec/exec.h"

/* exec_run(c, p, from, to, r), where r->cuda is `where`. The forward begins with filling the arena. E_RUNTIME names the
 * node that wrote beside its blocks, and the block before that place. */
MUST_USE status redzones_run(ctx *c, const plan *p, int from, int to, const run *r, const cuda_run *where);

#endif
