/* specialise.h -- a model becomes a graph of one plan: every type and shape a number. */
#ifndef ORT_SHAPE_SPECIALISE_H
#define ORT_SHAPE_SPECIALISE_H

#include "graph/graph.h"

typedef struct input_spec {
    dtype type;
    shape shape;
    bool needs_grad;
} input_spec;

/* `specs` has one entry for each input of `model`, `sizes` the sizes that data decides as far as they are known. The
 * result lives in `c`; it shares the model's constants and names, so the model must outlive it. `model` is only read.
 *
 * Where a further size is needed the result is a *prologue*: its pending value is set, and is its only output. Running
 * it tells the size, and specialise goes on from there when it is called with one size more. `h` is asked about nodes
 * that it runs; after a prologue for one of them it knows more itself. NULL: there must be none. `cuda`: the plan is for a
 * GPU. */
MUST_USE status specialise(ctx *c, const graph *model, const input_spec *specs, int n_sizes, const int64_t *sizes,
                           const host *h, bool cuda, graph **out);
/* Cuts a graph off at its pending size, which a pass may have asked for too: nothing else is computed or written. */
MUST_USE status make_prologue(graph *g);

#endif
