/* free_list.h -- keeps what is free of an address space while blocks come and go, the lowest place first. */
#ifndef ORT_PLAN_FREE_LIST_H
#define ORT_PLAN_FREE_LIST_H

#include "core/ctx.h"

/* Free ranges as a tree by addresses, in which each node knows the longest range at or below it. */
typedef struct free_range {
    int64_t low, high; /* [low, high) */
    int64_t longest;
    uint64_t priority; /* the tree is a heap of these: of logarithmic height */
    int left, right;   /* 0: none */
} free_range;

typedef struct free_list {
    free_range *at; /* [0] is none */
    int root, count;
    int unused; /* nodes without a range, linked by `left` */
} free_list;

/* All addresses are free. `most`: blocks at one time. */
MUST_USE status free_list_new(ctx *c, int most, free_list *out);
/* The lowest place that has room for `bytes` > 0. */
int64_t free_list_take(free_list *f, int64_t bytes);
/* [offset, offset + bytes) was taken and is free again. */
void free_list_give(free_list *f, int64_t offset, int64_t bytes);

#endif
