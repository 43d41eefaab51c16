/* library.h -- a library of CUDA's, found at run time: its entry points, declared once in a table, fill a structure. */
#ifndef ORT_CUDA_LIBRARY_H
#define ORT_CUDA_LIBRARY_H

#include "core/ctx.h"

#include <stddef.h>

typedef struct entry_point {
    const char *name;
    size_t member; /* where the structure holds the function */
} entry_point;

/* A row of a list F(name, parameters), as a member of the structure and as a row of its table. Every entry point
 * returns an int that is 0 on success; handles are pointers, device addresses of the driver 64-bit integers. */
#define ENTRY_MEMBER(name, parameters) int(*name) parameters;

/* Fills the structure at `functions` from the first of `sonames` (NULL ends them) that the process has loaded, or else
 * from the first that can be, by itself or beside a library of CUDA that torch has loaded: the copy that torch comes with
 * is the one to use. E_RUNTIME with a sentence that
 * names `what` and the missing library or symbol; the structure is then all zeros. The library stays loaded. */
MUST_USE status library_open(ctx *c, const char *what, const char *const *sonames, const entry_point *rows, size_t n,
                             void *functions, size_t size);

#endif
