/* view_steps.h -- finds what stands between a value and its only reader: Reshapes, Transposes, Expands, and Casts. */
#ifndef ORT_PASSES_VIEW_STEPS_H
#define ORT_PASSES_VIEW_STEPS_H

#include "graph/graph.h"

enum { MOST_VIEW_STEPS = 8 };

/* Steps that a pass puts something before. */
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

/* --- the value behind steps whose results no other node reads: */

/* Reshapes. */
value *value_before_reshapes(value *v);
/* Reshapes, and Casts to wider floats. */
value *value_behind(value *v);
/* Is `v` of float32, and the Cast of a float of 16 bits? */
bool value_is_widened(const value *v);
/* Reshapes behind such a Cast, and the Cast: the value of 16 bits. NULL: there is none. */
value *value_before_widening(value *v);

#endif
