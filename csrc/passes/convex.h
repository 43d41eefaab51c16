/* convex.h -- says whether nodes can run at once: nothing outside a group stands between two of its members. */
#ifndef ORT_PASSES_CONVEX_H
#define ORT_PASSES_CONVEX_H

#include "graph/graph.h"

typedef struct convex {
    int *seen; /* [node id] what the walk of this number found */
    int n_seen, walk;
    value *(*source)(value *v); /* members read this, whatever comes between; NULL: the value itself */
} convex;

/* A node's mark when a group has taken it; otherwise it is that of graph_mark_phases. */
enum { TAKEN = -1 };
/* Is it needed, and of no group yet? */
static inline bool node_is_live(const node *n) { return n->mark > PHASE_NONE; }
/* Do others see when it runs? Processes communicate in the order of these. */
bool node_is_seen(const node *n);

bool convex_has(node *const *members, int count, const node *n);
/* Into program order; `first` is the first of them. */
void convex_sort(node **members, int count, node *first);
/* For the nodes that the graph has now, and as many again. */
MUST_USE status convex_begin(graph *g, value *(*source)(value *v), convex *out);
/* Finds what depends on the members from `first`, the first of them, to `last`; false when a member does through others. */
bool convex_holds(convex *w, node *const *members, int count, const node *first, const node *last);
/* After that: moves what depends on the members and stands before `last` behind it. */
void convex_clear(convex *w, graph *g, node *const *members, int count, node *first, node *last);

#endif
