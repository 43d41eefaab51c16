/* write.h -- writes a graph into ONNX bytes. */
#ifndef ORT_ONNX_WRITE_H
#define ORT_ONNX_WRITE_H

#include "graph/graph.h"

/* A model with the graph's nodes, constants (as initializers), inputs and outputs, and types and shapes where they are
 * known. What an ONNX graph has no place for, written state and gradients, follows its outputs; the model's metadata
 * says which is which ("gradient of w" -> the value's name). Names that are missing or not unique are made up.
 * `*bytes` lies in the arena of `c`. */
MUST_USE status onnx_write(ctx *c, const graph *g, const void **bytes, size_t *n);

#endif
