/* specialise.h -- a model becomes a graph of one plan: every type and shape a number. */
#ifndef ORT_SHAPE_SPECIALISE_H
#define ORT_SHAPE_SPECIALISE_H

#include "graph/graph.h"

typedef struct input_spec {
    dtype type;
    shape shape;
    bool needs_grad;
} input_spec;

/* `specs` has one entry for each input of `model`. The result lives in `c`; it shares the model's constants and
 * names, so the model must outlive it. `model` is only read. */
MUST_USE status specialise(ctx *c, const graph *model, const input_spec *specs, graph **out);

#endif
