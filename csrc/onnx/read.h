/* read.h -- reads ONNX bytes into a model graph. */
#ifndef ORT_ONNX_READ_H
#define ORT_ONNX_READ_H

#include "graph/graph.h"

/* A model graph: operators, names, constants and what the file declares of its inputs' and outputs' types (rank -1 or
 * dimension -1 where it says nothing); nothing is inferred. Inputs keep their order; an initializer with data is a
 * constant, and then no input. Nodes come out in topological order, whatever order the file has.
 * E_INVALID: the file is malformed. E_UNSUPPORTED: it is not, but something in it is not computed here. The bytes are
 * not needed afterwards. */
MUST_USE status onnx_read(ctx *c, const void *bytes, size_t n, graph **out);

#endif
