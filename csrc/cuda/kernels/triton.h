/* triton.h -- starts kernels that Triton has compiled, and chooses how they are cut into blocks (triton.c). */
#ifndef ORT_CUDA_TRITON_H
#define ORT_CUDA_TRITON_H

#include "ops/chains/triton.h"
#include "ops/op.h"

/* FusedAttention and its gradient by Triton's flash attention; *done is false where the node does not ask for it, or its
 * operands are not such as it takes. */
MUST_USE status triton_attention_start(ctx *c, const call *k, bool *done);

/* "triton 0123456789abcdef 3S2S|yny|ws 512": a program by its hash, how its operands are read, room for a row. */
enum { TRITON_KEY = 32 + TRITON_HOW + 24 };

/* A kernel whose ways were measured; of the context. */
typedef struct triton_measured {
    char key[TRITON_KEY], ways[TRITON_WAYS][TRITON_WAY];
    double seconds[TRITON_WAYS]; /* 0: it does not run */
    int count, best;
    struct triton_measured *next;
} triton_measured;

/* Kernels of that key are cut so, unless they have run. False: no room, or no such text. */
bool triton_choose(const char *key, const char *way);
/* Nothing is chosen. What has been compiled stays. */
void triton_forget(void);

#endif
