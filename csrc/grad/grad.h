/* grad.h -- differentiates a specialised graph in reverse mode. */
#ifndef ORT_GRAD_GRAD_H
#define ORT_GRAD_GRAD_H

#include "graph/graph.h"

/* Appends the backward nodes. `output_grads[i]`: whether output i receives a gradient; such an output (float, reached
 * from an input that needs a gradient) gets an input in g->output_grads. Fills g->input_grads for every graph input
 * that needs a gradient and is reached; NULL elsewhere. */
MUST_USE status grad_build(graph *g, const bool *output_grads);

#endif
