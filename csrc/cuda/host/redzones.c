/* redzones.c -- fills what no block lives in, and looks at it after every instruction. */
#include "cuda/host/redzones.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

enum { UNUSED = 0xFF };

typedef struct walk {
    const plan *p;
    const run *r;
    const cuda_run *where;
    const interval **living; /* [n_living] by offset */
    int n_living;
    unsigned char *copy; /* plan->red_zone bytes */
} walk;

static status fill(ctx *c, const walk *w, int64_t offset, int64_t bytes) {
    const call k = {.cuda = w->where};
    return cuda_fill(c, &k, (char *)w->r->arena + offset, UNUSED, (size_t)bytes);
}

static int by_offset(const void *x, const void *y) {
    const interval *const *a = x, *const *b = y;
    return ((*a)->offset > (*b)->offset) - ((*a)->offset < (*b)->offset);
}

static void find_living(walk *w, int t) {
    w->n_living = 0;
    for (int i = 0; i < w->p->n_blocks; i++) {
        const interval *b = &w->p->blocks[i];
        if (b->bytes > 0 && b->first <= t && t <= b->last) w->living[w->n_living++] = b;
    }
    qsort(w->living, (size_t)w->n_living, sizeof *w->living, by_offset);
}

static const char *name_of(const node *n) { return n->name ? n->name : "-"; }

/* [offset, offset + bytes) is in no living block; `before`: the one that ends before it, or NULL. */
static status look(ctx *c, const walk *w, int t, const interval *before, int64_t offset, int64_t bytes) {
    const node *n = w->p->code[t].node;

    TRY(cuda_download(c, w->where, w->copy, (char *)w->r->arena + offset, (size_t)bytes));
    for (int64_t i = 0; i < bytes; i++) {
        if (w->copy[i] == UNUSED) continue;
        if (!before)
            return fail(c, E_RUNTIME, "%s (%s) wrote to byte %" PRId64 " of the arena, before all blocks", n->op->name,
                        name_of(n), offset + i);
        const node *owner = w->p->code[before->first].node;
        return fail(c, E_RUNTIME, "%s (%s) wrote %" PRId64 " bytes behind a block of %" PRId64 " bytes of %s (%s)",
                    n->op->name, name_of(n), offset + i - before->offset - before->bytes, before->bytes,
                    owner->op->name, name_of(owner));
    }
    return OK;
}

/* Both ends of what lies between two living blocks: a kernel that goes too far goes a little too far. */
static status look_between(ctx *c, const walk *w, int t, const interval *before, int64_t end) {
    const int64_t start = before ? before->offset + before->bytes : 0, bytes = end - start, most = w->p->red_zone;

    if (bytes <= 0) return OK;
    TRY(look(c, w, t, before, start, bytes < most ? bytes : most));
    return bytes <= most ? OK : look(c, w, t, before, end - most, most);
}

static status look_at_all(ctx *c, walk *w, int t) {
    find_living(w, t);
    for (int i = 0; i < w->n_living; i++) TRY(look_between(c, w, t, i ? w->living[i - 1] : NULL, w->living[i]->offset));
    return look_between(c, w, t, w->n_living ? w->living[w->n_living - 1] : NULL, w->p->arena_bytes);
}

static status step(ctx *c, walk *w, int t) {
    TRY(exec_run(c, w->p, t, t + 1, w->r));
    TRY_AT(c, look_at_all(c, w, t), "looking at the red zones");
    for (int i = 0; i < w->n_living; i++)
        if (w->living[i]->last == t) TRY(fill(c, w, w->living[i]->offset, w->living[i]->bytes));
    return OK;
}

status redzones_run(ctx *c, const plan *p, int from, int to, const run *r, const cuda_run *where) {
    walk w = {.p = p, .r = r, .where = where};
    status s = OK;

    if (p->arena_bytes == 0) return exec_run(c, p, from, to, r);
    w.living = calloc((size_t)p->n_blocks + 1, sizeof *w.living);
    w.copy = malloc((size_t)p->red_zone);
    if (!w.living || !w.copy) s = fail(c, E_NOMEM, "out of memory");
    if (s == OK && from == 0) s = fill(c, &w, 0, p->arena_bytes);
    for (int t = from; t < to && s == OK; t++) s = step(c, &w, t);
    free(w.living);
    free(w.copy);
    return s;
}
