/* move.h -- copies of any strides on a GPU: what the view, movement and slice families share. */
#ifndef ORT_CUDA_MOVE_H
#define ORT_CUDA_MOVE_H

#include "cuda/host/driver.h"

/* to[i] = from[i]: one shape and element size, any strides; no two elements of `to` share memory. */
MUST_USE status cuda_copy(ctx *c, const call *k, const tensor *to, const tensor *from);

#endif
