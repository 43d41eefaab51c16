/* measure.h -- times the ways in which a library can do one piece of work, on memory that the caller gave. */
#ifndef ORT_CUDA_MEASURE_H
#define ORT_CUDA_MEASURE_H

#include "cuda/host/driver.h"

struct blas_measured;   /* cuda/libraries/blas.h */
struct triton_measured; /* cuda/kernels/triton.h */

/* What a dry run measures: work that has not run, been measured or been chosen for. What does not fit into the memory is
 * left out. */
typedef struct measuring {
    cuda_run at;  /* where to run: not dry */
    char *memory; /* of that device, full of numbers, aligned to MEASURE_ALIGNED; NULL: only `needed` is found out */
    size_t bytes, needed;
    double limit;                    /* about the most seconds a piece of work; 0: as long as it takes */
    bool products, convolutions;     /* which kinds are measured */
    struct blas_measured *found;     /* of products, in the context of the dry run */
    struct triton_measured *kernels; /* of Triton's kernels, which count as products; there, too */
    int n_convolutions;              /* that were measured */
} measuring;

/* Bytes that divide the address of a workspace: with less cuBLASLt may find out when it is started, or not. */
enum { MEASURE_ALIGNED = 256 };

/* The next place of the memory from *at on, whose address is divided by `aligned` and by no larger power of two, unless
 * `aligned` is at least MEASURE_ALIGNED; NULL while it is counted. */
char *measure_take(const measuring *m, size_t *at, size_t bytes, size_t aligned);
/* Notes that so many bytes are needed. Whether they are there. */
bool measure_fits(measuring *m, size_t needed);
/* Fills the memory with numbers that products have no trouble with. */
MUST_USE status measure_fill(ctx *c, const measuring *m);

/* Starts way `way` once; *refused where the library does not do it. */
typedef status measure_start(ctx *c, void *arg, int way, bool *refused);
/* The least seconds of each of `count` ways; 0 where one does not run. */
MUST_USE status measure_ways(ctx *c, const measuring *m, int count, measure_start *start, void *arg, double *seconds);
/* The way to take: the first, the library's best guess, unless another is clearly faster. -1: none runs. */
int measure_best(const double *seconds, int count);

#endif
