/* made_by.h -- says which pass made a node: a pass's nodes have the ids that were given while it ran. */
#ifndef ORT_PASSES_MADE_BY_H
#define ORT_PASSES_MADE_BY_H

#include "passes/pipeline.h"

typedef struct made_by {
    int count;
    struct {
        int pass, first, last; /* ids [first, last) */
    } ran[3 * MAX_PASSES];     /* each stage once, ascending */
} made_by;

/* As passes_run; what passes make is added to `made`. */
MUST_USE status passes_run_noting(graph *g, pass_stage stage, uint64_t disabled, int *fired, made_by *made);
/* The number of the pass that made a node; -1: none did. */
int made_by_pass(const made_by *made, const node *n);

#endif
