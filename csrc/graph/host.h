/* host.h -- runs the nodes that the engine knows by number only (ops/host_call.c): Python, or a test. */
#ifndef ORT_GRAPH_HOST_H
#define ORT_GRAPH_HOST_H

#include "graph/graph.h"

struct call;

/* What a node computes from operands of the types and shapes it has. */
typedef struct host_answer {
    bool known;      /* otherwise the node has to run once before its results' sizes are known */
    dtype *types;    /* [n_out - 1] of the results after the first */
    shape *shapes;   /* [n_out - 1] */
    bool *gradients; /* [n_in] the operand receives a gradient if it needs one */
} host_answer;

/* Both functions are called without locks, from the thread that compiles or runs; a failure of theirs is E_FOREIGN. */
struct host {
    /* `n` is not in the graph; the arrays of `out` are there, zeroed. */
    status (*ask)(const host *h, ctx *c, const node *n, host_answer *out);
    /* Computes k->out from k->in; operands and results are borrowed for the call. */
    status (*run)(const host *h, ctx *c, const struct call *k);
};

#endif
