/* cast.h -- the casts that have a kernel of their own (cast.cu). */
#ifndef ORT_CUDA_CAST_H
#define ORT_CUDA_CAST_H

#ifdef ORT_HOST
#include "cuda/host/driver.h"

/* Both are float32 or 16-bit floats, and lie together. */
bool cast_is_dense(const tensor *x, const tensor *y);
MUST_USE status cast_dense(ctx *c, const call *k);
#endif

#endif
