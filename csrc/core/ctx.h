/* ctx.h -- says where error texts go and memory comes from: what every fallible function gets first. */
#ifndef ORT_CORE_CTX_H
#define ORT_CORE_CTX_H

#include "core/arena.h"
#include "core/err.h"

typedef struct ctx {
    err err;
    arena mem;
} ctx;

void ctx_init(ctx *c);
/* Frees everything allocated through `c`; safe on a zeroed context and twice. */
void ctx_release(ctx *c);

/* Memory that dies before `parent` does: a context of its own, which fails the same allocations. */
void ctx_scratch_begin(const ctx *parent, ctx *scratch);
/* Frees it; what it says of an error goes to `parent`. Returns `s`. */
MUST_USE status ctx_scratch_end(ctx *parent, ctx *scratch, status s);

#endif
