/* ctx.c -- errors and the arena: the two things a context holds. */
#include "core/ctx.h"

#include "core/limit.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- errors ------------------------------------------------------------------------------------------------------ */

status fail(ctx *c, status code, const char *format, ...) {
    va_list args;
    va_start(args, format);
    c->err.code = code;
    vsnprintf(c->err.text, sizeof c->err.text, format, args);
    va_end(args);
    return code;
}

status blame(ctx *c, status code, const char *format, ...) {
    size_t used = strlen(c->err.text);
    va_list args;

    used += (size_t)snprintf(c->err.text + used, sizeof c->err.text - used, "\n  while ");
    if (used >= sizeof c->err.text) return code;
    va_start(args, format);
    vsnprintf(c->err.text + used, sizeof c->err.text - used, format, args);
    va_end(args);
    return code;
}

/* --- arena ------------------------------------------------------------------------------------------------------- */

/* What is shorter than a cache line is a node, a list, a name: most of a graph, and closer together without room between. */
enum { ALIGNMENT = 64, SMALL_ALIGNMENT = 16, BLOCK_BYTES = 64 * 1024 };
enum { LOOKED_AT = 1 << 20 }; /* a larger allocation may be one that the kernel would end the process for */

#ifdef ORT_SANITIZE
#include <sanitizer/asan_interface.h>

/* Bytes behind every allocation that belong to none: an overrun is reported. */
enum { GAP = 64 };
static void forbid(void *at, size_t bytes) { ASAN_POISON_MEMORY_REGION(at, bytes); }
static void permit(void *at, size_t bytes) { ASAN_UNPOISON_MEMORY_REGION(at, bytes); }
#else
enum { GAP = 0 };
static inline void forbid(void *at, size_t bytes) { (void)at, (void)bytes; }
static inline void permit(void *at, size_t bytes) { (void)at, (void)bytes; }
#endif

struct arena_block {
    arena_block *next;
    size_t used, size; /* of the bytes that follow the header */
};

static size_t round_to(size_t alignment, size_t n) { return (n + alignment - 1) & ~(alignment - 1); }
static size_t round_up(size_t n) { return round_to(ALIGNMENT, n); }

static char *block_bytes(arena_block *b) { return (char *)b + round_up(sizeof *b); }

/* Where in a block the next `bytes` begin; false: they do not fit. */
static bool find_room(const arena_block *b, size_t bytes, size_t alignment, size_t *at) {
    *at = b ? round_to(alignment, b->used) : 0;
    return b && *at <= b->size && b->size - *at >= bytes;
}

static arena_block *add_block(arena *a, size_t need) {
    size_t size = need > BLOCK_BYTES ? need : BLOCK_BYTES;
    arena_block *b = aligned_alloc(ALIGNMENT, round_up(sizeof *b) + size);

    if (!b) return NULL;
    b->used = 0;
    b->size = size;
    forbid(block_bytes(b), size);
    /* A large allocation gets its own block behind the current one, which keeps filling up. */
    if (a->blocks && need > BLOCK_BYTES / 4) {
        b->next = a->blocks->next;
        a->blocks->next = b;
    } else {
        b->next = a->blocks;
        a->blocks = b;
    }
    a->total += size;
    return b;
}

void *arena_array(ctx *c, size_t count, size_t size) {
    arena *a = &c->mem;
    arena_block *b = a->blocks;
    size_t bytes, asked, alignment, at;
    void *p;

    if (__builtin_mul_overflow(count, size, &asked) || asked > (SIZE_MAX >> 2)) goto no_memory;
    alignment = asked < ALIGNMENT ? SMALL_ALIGNMENT : ALIGNMENT;
    bytes = round_to(alignment, asked ? asked : 1) + GAP;
    if (a->fail_after == 0) goto no_memory;
    if (a->fail_after > 0) a->fail_after--;
    if (bytes > LOOKED_AT && !memory_fits(bytes)) {
        if (fail(c, E_NOMEM, "out of memory: %zu bytes are more than this process may use", bytes)) return NULL;
    }
    if (!find_room(b, bytes, alignment, &at)) {
        if (!(b = add_block(a, bytes))) goto no_memory;
        at = 0;
    }
    p = block_bytes(b) + at;
    b->used = at + bytes;
    permit(p, asked);
    return memset(p, 0, asked);

no_memory:
    if (fail(c, E_NOMEM, "out of memory: %zu items of %zu bytes", count, size)) return NULL;
    return NULL;
}

void *arena_more(ctx *c, void *list, int count, size_t size, int *room) {
    enum { FIRST = 4 };
    void *bigger;

    if (count < *room) return list;
    bigger = arena_array(c, (size_t)(*room ? 2 * *room : FIRST), size);
    if (!bigger) return NULL;
    *room = *room ? 2 * *room : FIRST;
    if (count) memcpy(bigger, list, (size_t)count * size);
    return bigger;
}

char *arena_text(ctx *c, const char *text, size_t length) {
    char *copy = arena_array(c, length + 1, 1);
    if (copy && length) memcpy(copy, text, length);
    return copy;
}

void arena_free(arena *a) {
    while (a->blocks) {
        arena_block *next = a->blocks->next;
        free(a->blocks);
        a->blocks = next;
    }
    a->total = 0;
}

/* --- context ----------------------------------------------------------------------------------------------------- */

void ctx_init(ctx *c) {
    memset(c, 0, sizeof *c);
    c->mem.fail_after = -1;
}

void ctx_release(ctx *c) { arena_free(&c->mem); }

void ctx_scratch_begin(const ctx *parent, ctx *scratch) {
    ctx_init(scratch);
    scratch->mem.fail_after = parent->mem.fail_after;
}

status ctx_scratch_end(ctx *parent, ctx *scratch, status s) {
    parent->mem.fail_after = scratch->mem.fail_after;
    if (s != OK) parent->err = scratch->err;
    ctx_release(scratch);
    return s;
}
