/* record.h -- shows an instruction as a range in the trace of torch's profiler. */
#ifndef ORT_EXEC_RECORD_H
#define ORT_EXEC_RECORD_H

#include "core/torch_lib.h"
#include "graph/graph.h"

/* "/layers/layers.0/norm/Add" -> "layers.0.norm": the path of the submodule that a node of this name is of, cut to
 * `size` bytes with the 0 behind it; "": of the module itself. */
void record_module_path(const char *name, char *out, size_t size);

/* Begins "ortmodule::Gemm layers.0.fc1", with the node's operands, whose types and shapes the profiler may keep. The
 * caller ends it; where torch has no such functions nothing begins. */
void record_begin(const node *n, const tensor *operands, bool cuda, torch_range *range);

#endif
