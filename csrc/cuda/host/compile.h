/* compile.h -- chains as kernels of their own, compiled when a plan is made and kept for the life of the process.
 * With a folder for them they are kept on disk, too. */
#ifndef ORT_CUDA_COMPILE_H
#define ORT_CUDA_COMPILE_H

#include "cuda/host/driver.h"
#include "cuda/kernels/chain.h"

/* Chains that a dry run has met, and that there is no kernel for; in the memory of its context. All zero: none yet. */
typedef struct chain_list {
    struct wanted_chain *first, *last;
    int count;
} chain_list;

/* The kernel for a program on the call's device; *out is NULL where there is none: it was not compiled when its plan was
 * made, since NVRTC is missing or refused it (compile_counts says why). A dry run with a list (cuda_run.chains) adds the
 * program to it then. An error is the driver's, or memory's. */
MUST_USE status chain_compiled(ctx *c, const call *k, const chain_program *p, kernel **out);

/* Makes the kernels of a list, on as many threads as the process has cores for, and waits for them; the device's context
 * is current. What the compiler refuses is a refusal (refusals.h); an error is the driver's. */
MUST_USE status chains_compile(ctx *c, chain_list *list);

/* Where compiled kernels are kept; "" is nowhere. Processes may share a folder. False: the path is too long. */
bool compile_folder(const char *path);

typedef struct compile_counts {
    int compiled, read; /* by NVRTC, from the folder */
    char reason[256];   /* why a chain was not compiled, lastly; "" */
} compile_counts;
compile_counts compile_count(void);

#endif
