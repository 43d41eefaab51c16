/* pipeline.h -- lists the passes, in the order they run. A pass is a file with rules, and a row in pipeline.c. */
#ifndef ORT_PASSES_PIPELINE_H
#define ORT_PASSES_PIPELINE_H

#include "passes/match.h"

/* AFTER_GRADIENT: only where there is one. LAST: always, after all others. WHILE_EMITTED: emit has done it, and running the
 * pass only tells how often. */
typedef enum pass_stage { BEFORE_GRADIENT = 1, AFTER_GRADIENT = 2, LAST = 4, WHILE_EMITTED = 8 } pass_stage;

typedef enum pass_device { EVERYWHERE, FOR_CPUS, FOR_GPUS } pass_device;

typedef struct pass_def {
    const char *name;
    const rule *rules; /* ended by {0}; NULL for a pass that looks at the whole graph: */
    status (*run)(graph *g, int *fired);
    pass_stage stage; /* or several: BEFORE_GRADIENT | AFTER_GRADIENT */
    pass_device device;
} pass_def;

enum { MAX_PASSES = 64 };

/* Ended by NULL. A pass is switched off by the bit of its place in this table. */
extern const pass_def *const passes[];

/* The bit of a pass; 0 when there is none of that name. */
uint64_t pass_bit(const char *name);

/* Runs the passes of a stage whose bit is not set in `disabled`. Adds to fired[i] how often passes[i] changed
 * something; `fired` may be NULL. */
MUST_USE status passes_run(graph *g, pass_stage stage, uint64_t disabled, int *fired);
/* --- what passes are written with (rewrite.c) --- */

/* What is emitted from now on stands before `before`, with the name of `n` and in its phase, forward or backward. */
void pass_emits(graph *g, node *before, const node *n);
/* What a pass that emits within the graph ends with: nodes are appended again, and what nothing needs is gone. `s`. */
MUST_USE status pass_end(graph *g, status s);
/* For a pass: `rewrite` each node that gives something, with what it emits in front of the node. */
typedef status node_rewrite(graph *g, node *n, int *fired);
MUST_USE status pass_rewrite_each(graph *g, node_rewrite *rewrite, int *fired);

#endif
