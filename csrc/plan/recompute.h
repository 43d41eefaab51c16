/* recompute.h -- lets backward compute again what forward would else keep for it. */
#ifndef ORT_PLAN_RECOMPUTE_H
#define ORT_PLAN_RECOMPUTE_H

#include "graph/graph.h"

typedef enum recompute_goal {
    RECOMPUTE_NOTHING,
    RECOMPUTE_LAYERS, /* all but what one layer gives to the next */
    RECOMPUTE_TO,     /* until `target` bytes are enough, or no fewer can be reached */
} recompute_goal;

typedef struct recompute_result {
    int64_t before, after; /* the most bytes needed at one time, estimated: passes that come later need fewer */
    double cost, total;    /* of what runs twice, and of all (plan/cost.h) */
    int count;             /* values that are made again */
} recompute_result;

/* Before the passes of the last stage: what is made again is a node of backward like any other, with the operator,
 * attributes (the key of random numbers included) and name of the first. So the bits are the same. */
MUST_USE status recompute(graph *g, recompute_goal goal, int64_t target, recompute_result *out);

#endif
