/* recompute.h -- lets backward compute again, or get from elsewhere, what forward would else keep for it. */
#ifndef ORT_PLAN_RECOMPUTE_H
#define ORT_PLAN_RECOMPUTE_H

#include "graph/graph.h"
#include "plan/cost.h"
#include "plan/recompute_choice.h"

/* In the name of a node that lies in a checkpoint: a step of its path, with the checkpoint's number
 * (ortmodule/capture/calls/checkpoints.py). */
#define CHECKPOINT_STEP "checkpoint#"

/* The first three are the levels, by their numbers. */
typedef enum recompute_goal {
    RECOMPUTE_CHEAP,  /* what lowers the peak and costs next to nothing; with wishes these alone */
    RECOMPUTE_LAYERS, /* all but what one layer gives to the next */
    RECOMPUTE_TO,     /* until `target` bytes are enough, or no fewer can be reached */
    RECOMPUTE_NOTHING,
    OFFLOAD_ALL,           /* nothing is computed again; what lowers the peak is offloaded */
    RECOMPUTE_CHECKPOINTS, /* all that lies inside of checkpoints */
} recompute_goal;

/* How a cluster is made again, as users name it. */
typedef enum recompute_strategy { KEEP_ALL, MAKE_AGAIN, MAKE_AGAIN_FROM_STASH } recompute_strategy;

/* What a user wants of a cluster: the first `count` of it, or all (-1). Of two wishes for one place the later holds. */
typedef struct recompute_wish {
    const char *cluster;
    recompute_strategy strategy;
    int count;
} recompute_wish;

/* Places of forward where the same operators, one behind the other, make something that backward reads. */
typedef struct recompute_cluster {
    const char *name;            /* these operators: "LayerNormalization+Gelu+" */
    recompute_strategy strategy; /* with which they run again; one cluster for each that is possible */
    int count, again;            /* places, in the order of execution; of these, those that are made again so */
    const int64_t *bytes;        /* [count] that need not be kept then */
} recompute_cluster;

/* Choices from much memory to little, for one graph that is compiled with several of them. */
typedef struct recompute_series {
    ctx *c; /* that outlives these graphs */
    recompute_choice at[RECOMPUTE_TARGETS];
    int n;        /* 0: they have not been looked for */
    int n_values; /* of the graph */
} recompute_series;

typedef struct recompute_request {
    recompute_goal goal;
    int64_t target; /* of RECOMPUTE_TO: bytes */
    recompute_series
        *series; /* RECOMPUTE_TO takes the first of these that reaches `target`, or the last; NULL: it looks */
    int from;    /* of the series, from here on */
    const recompute_wish *wishes; /* hold first, unless the goal is RECOMPUTE_LAYERS; unknown clusters are left out */
    int n_wishes;
    int layers;       /* of RECOMPUTE_LAYERS: the first so many of each row; 0: all */
    bool list;        /* the result has the clusters */
    bool offload;     /* RECOMPUTE_TO may offload values, too */
    cost_rates rates; /* of RECOMPUTE_TO: as measured; zeros, and of other goals: the usual ones */
} recompute_request;

typedef struct recompute_result {
    int64_t before, after; /* the most bytes needed at one time, estimated: passes that come later need fewer */
    double cost, total;    /* of what runs twice or is moved, and of all (plan/cost.h) */
    int count;             /* values that are made again */
    int n_offloaded;
    int place; /* in the series */
    recompute_cluster *clusters;
    int n_clusters;
} recompute_result;

/* Before the passes of the last stage: what is made again is a node of backward like any other, with the operator,
 * attributes (the key of random numbers included) and name of the first. So the bits are the same. What is offloaded is
 * read by an Offload behind its node, and made once more by a Reload in backward (ops/movement/offload.c). */
MUST_USE status recompute(graph *g, const recompute_request *r, recompute_result *out);

/* Are there nodes of a model that lie in a checkpoint? */
bool recompute_has_checkpoints(const graph *model);

#endif
