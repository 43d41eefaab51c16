/* digest.h -- numbers that tell whether memory of a GPU has changed; the host reads none of them. */
#ifndef ORT_CUDA_DIGEST_H
#define ORT_CUDA_DIGEST_H

#include "cuda/host/driver.h"

/* Numbers for each tensor. */
enum { CUDA_DIGEST_PARTS = 256 };

typedef struct digest_bytes {
    const void *from;
    int64_t bytes;
} digest_bytes;

/* As digest (core/digest.h): `found`, of CUDA_DIGEST_PARTS numbers on the GPU for each of `count` tensors, equal for equal
 * bytes at addresses of any alignment. */
MUST_USE status cuda_digests(ctx *c, const cuda_run *where, const digest_bytes *tensors, int count, uint64_t *found);

#endif
