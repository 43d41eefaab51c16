/* replay.h -- runs a plan's instructions as CUDA graphs: a section, many in a row, costs the host what one kernel does.
 *
 * A graph knows addresses. Memory of a step comes back at few different ones, so a section is recorded when the same
 * addresses are seen for the second time, and started as a whole whenever they are seen again; a recording that has not
 * been of use for longest becomes the next one. What comes from elsewhere in every step, the seed and small inputs that
 * move, is copied to fixed places in the arena. Nodes that the host runs end a section. A section that cannot be
 * recorded, or whose addresses hardly ever come back, is run instruction by instruction from then on. */
#ifndef ORT_CUDA_REPLAY_H
#define ORT_CUDA_REPLAY_H

#include "cuda/host/driver.h"
#include "exec/exec.h"

typedef struct replay replay;

/* How often, of all sections: a graph was recorded; a recording took an older one's place; a graph was started. */
typedef struct replay_counts {
    int64_t recorded, updated, started;
} replay_counts;

/* Of a plan for a GPU; NULL where there is no memory for it, or nothing to record. The plan must outlive it. */
replay *replay_new(const plan *p);
/* Gives the graphs back. NULL is nothing. */
void replay_free(replay *of);

/* exec_run(c, p, from, to, r), where r->cuda is `where`; [from, to) is the forward, the backward or a part of it. Several
 * threads may be here. */
MUST_USE status replay_run(ctx *c, replay *of, const plan *p, int from, int to, run *r, cuda_run *where);

replay_counts replay_count(replay *of);

/* All graphs that plans of this process keep, and about how many kernels these are; at most so many. */
enum { MOST_GRAPHS = 512, MOST_GRAPH_KERNELS = 1 << 17 };
typedef struct replay_kept {
    int64_t graphs, kernels;
} replay_kept;
replay_kept replay_all_kept(void);

#endif
