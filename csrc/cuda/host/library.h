/* library.h -- opens a library of CUDA's at run time: its entry points, declared once in a table, fill a structure. */
#ifndef ORT_CUDA_LIBRARY_H
#define ORT_CUDA_LIBRARY_H

#include "core/ctx.h"

#include <stdbool.h>
#include <stddef.h>

typedef struct entry_point {
    const char *name;
    size_t member; /* where the structure holds the function */
} entry_point;

/* A row of a list F(name, parameters), as a member of the structure and as a row of its table. Every entry point
 * returns an int that is 0 on success; handles are pointers, device addresses of the driver 64-bit integers. */
#define ENTRY_MEMBER(name, parameters) int(*name) parameters;

/* Body of a function that fills `functions`, a static structure made of the list `LIST`, once: with the caller's lock. */
#define LIBRARY_ONCE(c, what, functions, LIST, ...)                                                                    \
    do {                                                                                                               \
        typedef __typeof__(functions) structure_;                                                                      \
        static const char *const sonames_[] = {__VA_ARGS__, NULL};                                                     \
        static const entry_point rows_[] = {LIST(ENTRY_ROW)};                                                          \
        static bool is_loaded_;                                                                                        \
        if (is_loaded_) return OK;                                                                                     \
        TRY(library_open((c), what, sonames_, rows_, sizeof rows_ / sizeof rows_[0], &(functions),                     \
                         sizeof(functions)));                                                                          \
        is_loaded_ = true;                                                                                             \
        return OK;                                                                                                     \
    } while (0)
#define ENTRY_ROW(name, parameters) {#name, offsetof(structure_, name)},

/* Fills the structure at `functions` from the first of `sonames` (NULL ends them) that the process has loaded, or else
 * from the first that can be, by itself or beside a library of CUDA that torch has loaded: the copy that torch comes with
 * is the one to use. E_RUNTIME with a sentence that
 * names `what` and the missing library or symbol; the structure is then all zeros. The library stays loaded. */
MUST_USE status library_open(ctx *c, const char *what, const char *const *sonames, const entry_point *rows, size_t n,
                             void *functions, size_t size);

#endif
