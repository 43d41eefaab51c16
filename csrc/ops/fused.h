/* fused.h -- the program of a fused chain (ops/fused.c), as a kernel for it sees it. */
#ifndef ORT_OPS_FUSED_H
#define ORT_OPS_FUSED_H

#include "ops/pointwise.h"

enum { NOWHERE = -1 };

typedef struct fused_step {
    const op_def *op;
    tile_fn *fn;
    double param[TILE_PARAMS];
    dtype type;
    int n_in, in[TILE_OPERANDS]; /* below n_in of the program an operand of the node, else a step */
    int last;                    /* the step that reads it last; n_steps: it is written at the end; NOWHERE: nobody */
    int result, buffer;          /* which of the node's results, which buffer; or NOWHERE */
    const float *table;          /* instead of fn: looked up (ops/lookup.h), or NULL */
    bool draws, wanted, late;    /* late: written when all steps have run */
} fused_step;

typedef struct fused_program {
    int n_in, n_steps, n_buffers;
    bool read[FUSED_OPERANDS]; /* by a step that is wanted */
    fused_step steps[FUSED_STEPS];
} fused_program;

/* From the node's attributes, and the results that somebody wants. Buffers are not assigned. */
MUST_USE status fused_read(ctx *c, const call *k, fused_program *p);

kernel_fn fused_cuda; /* cuda/fused.cu */

#endif
