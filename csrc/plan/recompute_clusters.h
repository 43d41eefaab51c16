/* recompute_clusters.h -- names what can be made again, in clusters: places where the same operators do it. */
#ifndef ORT_PLAN_RECOMPUTE_CLUSTERS_H
#define ORT_PLAN_RECOMPUTE_CLUSTERS_H

#include "ops/op.h"
#include "plan/recompute.h"
#include "plan/recompute_choice.h"

typedef struct recompute_clusters {
    const recompute_problem *problem;
    recompute_option *options; /* as recompute_options has them */
    int n_options;
    int *of;            /* [option] its cluster */
    const char **names; /* [cluster] */
    recompute_strategy *strategies;
    int n;
} recompute_clusters;

/* `order`: the nodes behind the problem's steps. */
MUST_USE status clusters_find(ctx *c, const recompute_problem *p, const node *const *order, recompute_clusters *out);
/* The options that wishes take. */
MUST_USE status clusters_wished(ctx *c, const recompute_clusters *x, const recompute_wish *wishes, int n_wishes,
                                const recompute_option ***out, int *n);
/* All clusters, the first in forward first, and what a choice makes of them; allocated from `c` alone. */
MUST_USE status clusters_list(ctx *c, const recompute_clusters *x, const recompute_choice *choice,
                              recompute_cluster **out, int *n);

#endif
