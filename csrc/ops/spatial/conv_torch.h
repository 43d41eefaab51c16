/* conv_torch.h -- what the planner asks of convolutions that run by torch's own operator. */
#ifndef ORT_OPS_SPATIAL_CONV_TORCH_H
#define ORT_OPS_SPATIAL_CONV_TORCH_H

#include "ops/op.h"

/* Bytes that torch takes for itself while the node runs on the CPU, the result that is copied among them; 0: it does not run
 * there. About: it depends on torch's kernels. */
int64_t conv_bytes_of_torch(const node *n);

#endif
