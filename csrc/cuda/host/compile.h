/* compile.h -- chains as kernels of their own, compiled when a plan is made and kept for the life of the process.
 * With a folder for them they are kept on disk, too. */
#ifndef ORT_CUDA_COMPILE_H
#define ORT_CUDA_COMPILE_H

#include "cuda/host/driver.h"
#include "cuda/kernels/chain.h"

/* The kernel for a program on the call's device; *out is NULL where there is none: it was not compiled when its plan was
 * made (a dry call), since NVRTC is missing or refused it (compile_counts says why). An error is the driver's. */
MUST_USE status chain_compiled(ctx *c, const call *k, const chain_program *p, kernel **out);

/* Where compiled kernels are kept; "" is nowhere. Processes may share a folder. False: the path is too long. */
bool compile_folder(const char *path);

typedef struct compile_counts {
    int compiled, read; /* by NVRTC, from the folder */
    char reason[256];   /* why a chain was not compiled, lastly; "" */
} compile_counts;
compile_counts compile_count(void);

#endif
