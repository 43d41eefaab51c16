/* grid_sample.h -- declares GridSample and its gradients (grid_sample.c); their records are in resize.c. */
#ifndef ORT_OPS_GRID_SAMPLE_H
#define ORT_OPS_GRID_SAMPLE_H

#include "ops/op.h"

status infer_grid_sample(graph *g, node *n);
status infer_grid_sample_grad_input(graph *g, node *n);
status infer_grid_sample_grad_grid(graph *g, node *n);
status grad_grid_sample(graph *g, const node *n, value *const dy[], value *dx[]);
kernel_fn grid_sample_cpu, grid_sample_grad_input_cpu, grid_sample_grad_grid_cpu;
/* cuda/kernels/grid_sample.cu */
kernel_fn grid_sample_cuda, grid_sample_grad_input_cuda, grid_sample_grad_grid_cuda;
size_t grid_sample_grad_input_cuda_workspace(const node *n);

#endif
