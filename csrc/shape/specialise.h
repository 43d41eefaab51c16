/* specialise.h -- turns a model into the graph of one plan: every type and shape a number. */
#ifndef ORT_SHAPE_SPECIALISE_H
#define ORT_SHAPE_SPECIALISE_H

#include "graph/graph.h"

typedef struct input_spec {
    dtype type;
    shape shape;
    bool needs_grad;
} input_spec;

/* Emits `model` into `g`, which is new and knows what it is for: the sizes that data decides as far as they are known, who
 * runs nodes of its own, the device. `specs` has one entry for each input of `model`, which is only read; `g` shares its
 * constants and names, so it must outlive `g`.
 *
 * Where a further size is needed the result is a *prologue*: its pending value is set, and is its only output. Running
 * it tells the size, or several in a vector (`pending_sizes` says which), and specialise goes on from there when it is
 * called with these, too. What nodes behind ask for is among them, as far as it can be computed without the first.
 * `g->host` is asked about nodes that it runs; after a prologue for one of them it knows more itself. NULL: there must be
 * none. */
MUST_USE status specialise(graph *g, const graph *model, const input_spec *specs);
/* Cuts a graph off at its pending sizes, which a pass may have asked for too: nothing else is computed or written. */
MUST_USE status make_prologue(graph *g);

#endif
