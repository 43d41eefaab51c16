/* view_steps.h -- Reshapes, Transposes and Expands that stand between a value and its only reader, so that a pass can put
 * something before them. */
#ifndef ORT_PASSES_VIEW_STEPS_H
#define ORT_PASSES_VIEW_STEPS_H

#include "graph/graph.h"

enum { MOST_VIEW_STEPS = 8 };

typedef struct view_steps {
    const node *step[MOST_VIEW_STEPS]; /* the last first */
    int count;
    bool repeats; /* one of them is an Expand */
} view_steps;

/* The value that the first of the steps before `v` reads: `v` itself, if another operator makes it or others read it. */
value *view_steps_before(value *v, view_steps *steps);
/* The same steps from `x` on, which has the shape of what they read. */
MUST_USE status view_steps_again(graph *g, const view_steps *steps, value *x, value **out);
/* Do they leave elements in the order in which `first`, what the first of them reads, has them in memory? */
bool view_steps_keep_order(const view_steps *steps, const value *first);

#endif
