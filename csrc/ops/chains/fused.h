/* fused.h -- reads the program of a fused chain (ops/chains/fused.c), as a kernel for it sees it. */
#ifndef ORT_OPS_FUSED_H
#define ORT_OPS_FUSED_H

#include "ops/pointwise/pointwise.h"
#include "ops/queries.h"

enum { NOWHERE = -1, FUSED_NAME = 64 }; /* bytes of an operator's name */

/* Where `v` is in a list, or NOWHERE. */
static inline int fused_place(value *const *list, int count, const value *v) {
    for (int i = 0; i < count; i++)
        if (list[i] == v) return i;
    return NOWHERE;
}

typedef struct fused_step {
    const op_def *op;
    tile_fn *fn;
    double param[TILE_PARAMS];
    dtype type;
    int n_in, in[TILE_OPERANDS]; /* below n_in of the program an operand of the node, else a step */
    int last;                    /* the step that reads it last; n_steps: it is written at the end; NOWHERE: none */
    int result, buffer;          /* which of the node's results, which buffer; or NOWHERE */
    const float *table;          /* instead of fn: looked up (ops/pointwise/lookup.h), or NULL */
    bool draws, wanted, late;    /* late: written when all steps have run */
    bool streams;                /* Fused: its result is written past the caches */
    bool folded;                 /* FusedReduce: read when all steps have run */
} fused_step;

typedef struct fused_program {
    int n_in, n_steps, n_buffers;
    bool read[FUSED_OPERANDS]; /* by a step that is wanted */
    fused_step steps[FUSED_STEPS];
} fused_program;

/* From the node's attributes, and the results that are wanted. Buffers are not assigned. */
MUST_USE status fused_read(ctx *c, const call *k, fused_program *p);

/* The next operator of a list of names with spaces between them; NULL: there is none. */
const op_def *fused_operator(const char **names);

/* A program on the CPU, with what it reads and writes. */
typedef struct fused_run {
    fused_program program;
    tile_source in[FUSED_OPERANDS];
    char *out[FUSED_RESULTS];
    int64_t count; /* elements of its shape */
    uint64_t seed;
} fused_run;

/* `s`: the shape of its elements; `work`: fused_table_bytes. */
MUST_USE status fused_prepare(ctx *c, const call *k, const shape *s, void *work, fused_run *r);
size_t fused_table_bytes(const node *n, const shape *s);
/* Bytes of memory, 64-byte aligned, that a thread runs tiles in; what is to be done once before the first of them. */
size_t fused_scratch_bytes(const fused_run *r);
void fused_begin(const fused_run *r, void *scratch);
/* Elements [start, start + n), at most TILE. */
void fused_tile(const fused_run *r, int64_t start, int64_t n, void *scratch);
/* What the last tile made of a step, in the class of its type; from the last on, steps below 0 are the operands. */
const void *fused_made(const fused_run *r, const void *scratch, int step);

kernel_fn fused_cpu, fused_cuda; /* fused.c, cuda/kernels/fused.cu */

/* fused_reduce.c: those of a program's totals that are wanted. */
typedef struct fused_ends {
    int n, step[FUSED_FOLDS], index[FUSED_FOLDS]; /* of each, what it folds, and which total of the program it is */
    const struct reduction *r[FUSED_FOLDS];
    const tensor *out[FUSED_FOLDS];
} fused_ends;
/* `out` points to the call's. */
MUST_USE status fused_ends_of(ctx *c, const call *k, int n_results, fused_ends *e);
/* Folds elements [first, first + count of s) of a program along axes of `s`, in this thread; work: fold_source_workspace;
 * scratch: fused_scratch_bytes. */
void fused_fold(const fused_run *r, const fused_ends *e, const shape *s, unsigned axes, int64_t first, void *work,
                void *scratch);
/* The shape of a FusedReduce's elements; the axes that it folds. */
const shape *fused_reduce_shape(const node *n);
unsigned fused_reduce_axes(const node *n);
/* How a GPU sees elements that are folded: [outer, length, inner], of which `length` goes. False: the axes are not neighbours. */
typedef struct fold_space {
    int64_t outer, length, inner;
} fold_space;
bool fused_fold_space(const shape *s, unsigned axes, fold_space *to);
size_t fused_reduce_workspace(const node *n);
kernel_fn fused_reduce_cpu;
size_t fused_reduce_cuda_workspace(const node *n); /* its kernel is fused_cuda */
MUST_USE status infer_fused_reduce(graph *g, node *n);

#endif
