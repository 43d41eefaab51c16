/* attention_lengths.c -- attention over the rows that matter
 *
 *   PackRows(FusedAttention(UnpackRows(q, r), UnpackRows(k, r), UnpackRows(v, r), allowed), r)
 *     ->  FusedAttention(q, k, v, allowed, r, r)
 *
 * After padding_removal, which leaves out only keys that the mask hides from all: then nothing of a padded token
 * is computed in attention either. Queries, and keys with values, are taken so one without the other, too. Where r are
 * just the keys that a part of the mask shows, that part has nothing left to hide, and is dropped: then a kernel of
 * torch's may take it, if attention_fusion wants that (`lists`). */
#include "passes/attention_mask.h"
#include "passes/pipeline.h"

#include "ops/op.h"
#include "ops/queries.h"

enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, OPERANDS };

/* [T, H, D] behind Reshape(UnpackRows(.., rows)) to [B, S, H, D]; NULL: all rows are there. */
static value *some_rows(value *v, value **rows) {
    if (!value_is(v, "Reshape") || !value_is(v->def->in[0], "UnpackRows")) return NULL;
    const node *unpack = v->def->in[0]->def;
    value *x = unpack->in[0];
    if (v->shape.rank != 4 || x->shape.rank != 3 || v->shape.dim[0] * v->shape.dim[1] != node_int(unpack, "size"))
        return NULL;
    if (x->shape.dim[1] != v->shape.dim[2] || x->shape.dim[2] != v->shape.dim[3]) return NULL;
    *rows = unpack->in[1];
    return x;
}

/* A reader of `y` that takes the listed rows from it: PackRows(Reshape(y)). */
static value *taken_from(const value *y, const value *rows) {
    const int64_t all = y->shape.dim[0] * y->shape.dim[1];

    for (const use *u = y->uses; u; u = u->next) {
        const node *flat = u->user;
        if (!node_is(flat, "Reshape") || flat->out[0]->shape.dim[0] != all) continue;
        for (const use *p = flat->out[0]->uses; p; p = p->next)
            if (node_is(p->user, "PackRows") && p->user->in[1] == rows && value_is_read(p->user->out[0]))
                return p->user->out[0];
    }
    return NULL;
}

/* Results for some rows in the place of all of them. */
static status replace_rows(graph *g, value *y, value *some, value *rows) {
    value *taken, *all;

    while ((taken = taken_from(y, rows))) {
        TRY(emit_reshape(g, some, &taken->shape, &all));
        TRY(graph_replace(g, taken, all));
    }
    TRY(emit_with(g, &all, "UnpackRows", NODE_ATTRS(INT("size", y->shape.dim[0] * y->shape.dim[1])), some, rows));
    TRY(emit_reshape(g, all, &y->shape, &all));
    return graph_replace(g, y, all);
}

/* Drops the part of the mask that the list of keys stands for. Returns which keys torch's kernel is asked for. */
static torch_attention drop_mask(const node *n, value *in[OPERANDS]) {
    const torch_attention lists = (torch_attention)node_int(n, "lists");
    attention_mask m;

    if (!in[K_ROWS] || !attention_mask_split(in[ALLOWED], n->in[Q]->shape.dim[0], n->in[K]->shape.dim[1], &m) ||
        !attention_mask_lists(m.keys, in[K_ROWS]))
        return TORCH_NONE;
    in[ALLOWED] = m.rest;
    return lists == TORCH_CAUSAL && in[Q_ROWS] != in[K_ROWS] ? TORCH_NONE
                                                             : lists; /* our kernels, too, read what is left */
}

static status take_rows(graph *g, node *n, int *fired) {
    value *in[OPERANDS] = {NULL}, *k_rows = NULL, *v_rows = NULL, *y[3];

    if (!node_is(n, "FusedAttention") || node_in(n, Q_ROWS) || node_in(n, K_ROWS)) return OK;
    if (node_int(n, "torch") == TORCH_BIASED) return OK; /* its bias is of all rows */
    const value *q = n->in[Q], *k = n->in[K];
    for (int i = 0; i < OPERANDS; i++) in[i] = node_in(n, i);
    value *some_q = some_rows(n->in[Q], &in[Q_ROWS]);
    value *some_k = some_rows(n->in[K], &k_rows), *some_v = some_rows(n->in[V], &v_rows);
    if (!some_k || !some_v || k_rows != v_rows || !in[ALLOWED]) some_k = NULL;
    if ((!some_q && !some_k) || (in[BIAS] && in[BIAS]->needs_grad)) return OK;
    if (some_q) in[Q] = some_q;
    if (some_k) {
        in[K] = some_k;
        in[V] = some_v;
        in[K_ROWS] = k_rows;
    }
    const torch_attention torch = drop_mask(n, in);
    TRY(graph_emit(g, "FusedAttention",
                   NODE_ATTRS(FLOAT("scale", node_float(n, "scale")), FLOAT("ratio", node_float(n, "ratio")),
                              INT("key", node_int(n, "key")), INT("safe", node_int(n, "safe")),
                              INT("batch", q->shape.dim[0]), INT("queries", q->shape.dim[1]),
                              INT("keys", k->shape.dim[1]), INT("torch", torch)),
                   OPERANDS, in, torch && node_float(n, "ratio") > 0 ? 3 : 2, y));
    ++*fired;
    return some_q ? replace_rows(g, n->out[0], y[0], in[Q_ROWS]) : graph_replace(g, n->out[0], y[0]);
}

static status run(graph *g, int *fired) { return g->pending ? OK : pass_rewrite_each(g, take_rows, fired); }

const pass_def attention_lengths = {.name = "attention_lengths", .stage = BEFORE_GRADIENT, .run = run};
