/* repeated_heads.c -- keys and values that are repeated for groups of heads and then turned to tokens first  ->  turned, then
 * repeated
 *
 * Of torch's attention kernels on a GPU, which want as many heads of keys as of queries, tokens first: the copy that repeats
 * is the only one, and what comes back of a group of heads lies together, where it is added up. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { HEADS };

static bool turns_tokens_first(const node *n) {
    const int64_t *perm;
    return node_ints(n, "perm", &perm) == 4 && perm[0] == 0 && perm[1] == 2 && perm[2] == 1 && perm[3] == 3;
}

/* [B, G, 1, S, D] before it was repeated to [B, G, n, S, D] and became `heads` [B, G n, S, D]; NULL: it was not. */
static value *before_repeat(const value *heads, int64_t *times) {
    const value *all;

    if (!value_is(heads, "Reshape") || !value_is_private(heads)) return NULL;
    all = heads->def->in[0];
    if (!value_is(all, "Expand") || !value_is_private(all)) return NULL;
    value *few = all->def->in[0];
    const shape *s = &few->shape, *e = &all->shape, *h = &heads->shape;
    if (s->rank != 5 || e->rank != 5 || h->rank != 4 || s->dim[2] != 1) return NULL;
    for (int i = 0; i < 5; i++)
        if (i != 2 && s->dim[i] != e->dim[i]) return NULL;
    *times = e->dim[2];
    return h->dim[1] == e->dim[1] * e->dim[2] && h->dim[2] == e->dim[3] ? few : NULL;
}

static status turn_first(graph *g, value *const v[], const node *root, value **out) {
    int64_t times;
    value *x, *sizes;

    if (!turns_tokens_first(root) || !(x = before_repeat(v[HEADS], &times))) return OK;
    const int64_t *d = x->shape.dim, b = d[0], groups = d[1], s = d[3], width = d[4];
    TRY(emit_reshape(g, x, &SHAPE(b, groups, s, width), &x));
    TRY(emit_transpose(g, x, (const int[]){0, 2, 1, 3}, &x));
    TRY(emit_reshape(g, x, &SHAPE(b, s, groups, 1, width), &x));
    TRY(graph_ints(g, 5, (const int64_t[]){b, s, groups, times, width}, &sizes));
    TRY(emit(g, &x, "Expand", x, sizes));
    return emit_reshape(g, x, &SHAPE(b, s, groups * times, width), out);
}

static const rule rules[] = {{OP("Transpose", VAR(HEADS)), turn_first}, {0}};

const pass_def repeated_heads = {
    .name = "repeated_heads", .stage = BEFORE_GRADIENT, .level = 1, .device = FOR_GPUS, .rules = rules};
