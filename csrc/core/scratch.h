/* scratch.h -- gives a kernel's threads memory that is on no stack: how small a stack is the thread's maker decides. */
#ifndef ORT_CORE_SCRATCH_H
#define ORT_CORE_SCRATCH_H

#include "core/ctx.h"
#include "core/parallel.h"

/* What a kernel and all that it calls may have on the stack of its thread: no array there is as large as data says. */
enum { LEAST_STACK = 256 << 10 };

typedef void scratch_fn(void *arg, int64_t begin, int64_t end, void *scratch);

/* parallel_for, whose body has `bytes` of its own in every call, aligned to 64. E_NOMEM, with nothing called. */
MUST_USE status parallel_for_with(ctx *c, int64_t count, int64_t grain, size_t bytes, scratch_fn *body, void *arg);

#endif
