/* padding_removal.c -- what lies between the embedding of tokens and the results is computed for the tokens that matter
 *
 * For a batch of sequences [B, S] with a mask in attention, rows_follow (row_reach.c) proves which rows cannot reach
 * anything that is seen, and says what all others are: those that the mask shows, that a loss looks at, that are
 * selected. Nodes that work row by row then compute these alone; what mixes rows finds them in their places, and zeros
 * in the others. How many there are is decided by data (ops/movement/rows.c). */
#include "passes/attention_mask.h"
#include "passes/pipeline.h"
#include "passes/row_reach.h"
#include "passes/rowwise.h"

#include "ops/op.h"
#include "ops/queries.h"

#include <string.h>

/* --- rows that matter ----------------------------------------------------------------------------------------------- */

/* Whether rows are listed in `index`: true, written into a vector of false. */
static status emit_listed(graph *g, value *index, int64_t all, value **out) {
    value *none, *some, *flat;

    TRY(emit_reshape(g, index, &SHAPE(shape_count(&index->shape)), &flat));
    TRY(graph_full(g, BOOL, &SHAPE(all), 0, &none));
    TRY(graph_full(g, BOOL, &flat->shape, 1, &some));
    return emit_with(g, out, "ScatterElements", NODE_ATTRS(INT("axis", 0)), none, flat, some);
}

/* A mask [B or 1, h, Q, S] lets a query look. */
static status emit_looked_at(graph *g, const row_reach *r, value *allowed, value **out) {
    const int64_t heads_and_queries[] = {1, 2};

    TRY(emit_cast(g, allowed, I32, out));
    TRY(emit_reduce(g, "ReduceMax", *out, 2, heads_and_queries, false, out));
    return emit_expand(g, *out, &SHAPE(r->batch, r->length), out);
}

static status emit_need(graph *g, const row_reach *r, const row_need *need, value **out) {
    const int64_t all = r->batch * r->length;

    switch (need->kind) {
    case NEED_NONZERO: *out = need->value; break;
    case NEED_ALLOWED: TRY(emit_looked_at(g, r, need->value, out)); break;
    case NEED_INDEX: TRY(emit_listed(g, need->value, all, out)); break;
    case NEED_LABELS: TRY(rows_labelled(g, need->value, need->ignored, out)); break;
    }
    TRY(emit_cast(g, *out, BOOL, out));
    return emit_reshape(g, *out, &SHAPE(all), out);
}

/* Everything that `v` is computed from moves before `first`. False: it is computed from rows itself. */
static bool hoist(graph *g, const row_reach *r, value *v, node *first) {
    node *next;

    for (node *n = first; n; n = n->next) n->mark = 0;
    if (!v->def) return true;
    for (node *n = first->prev; n; n = n->prev)
        if (n == v->def) return true;
    v->def->mark = 1;
    for (node *n = v->def; n != first->prev; n = n->prev)
        for (int i = 0; n->mark && i < n->n_in; i++)
            if (n->in[i] && n->in[i]->def) n->in[i]->def->mark = 1;
    for (node *n = first; n; n = n->next)
        for (int i = 0; n->mark && i < n->n_out; i++)
            if (n->out[i] && (n->out[i]->id >= r->n_values || r->states[n->out[i]->id].count)) return false;
    if (first->mark) return false;
    for (node *n = first; n; n = next) {
        next = n->next;
        if (n->mark) graph_move(g, n, first);
        n->mark = 0;
    }
    return true;
}

/* Keys that attention looks at: a part of its mask that is one of the needs, whose number is the result; -1: none is.
 * *by_torch: a kernel of torch's on a GPU takes such attention over lists of rows that match the mask. */
static int need_of_keys(const graph *g, const row_reach *r, bool *by_torch) {
    for (const node *n = g->first; n; n = n->next) {
        const shape *s = n->n_out && n->out[0] ? &n->out[0]->shape : NULL;
        attention_mask m;
        if (!node_is(n, "MaskedSoftmax") || !node_in(n, 1) || s->rank != 4) continue;
        if (s->dim[0] != r->batch || s->dim[3] != r->length) continue;
        if (!attention_mask_split(n->in[1], r->batch, r->length, &m)) continue;
        *by_torch = g->cuda && fused_attention_by_torch(g, F32, TORCH_ALL, s, 8, 8, false, !g->attention_everywhere);
        for (int i = 0; i < r->n_needs; i++)
            if (r->needs[i].kind == NEED_NONZERO && r->needs[i].value == m.keys) return i;
    }
    return -1;
}

/* *only: what a mask shows is all that is live. */
static status is_only_shown(graph *g, value *live, value *shown, bool *only) {
    value *more;
    bool any;

    *only = true;
    if (live == shown) return OK;
    TRY(emit(g, &more, "Not", shown));
    TRY(emit(g, &more, "And", live, more));
    TRY(rows_any(g, more, &any));
    *only = !any;
    return OK;
}

/* The places of all rows that matter, or NULL. Where these are the rows that attention's mask shows, they are those by
 * how they are made: attention over them needs no mask then (attention_lengths). */
static status emit_rows_that_matter(graph *g, const row_reach *r, value **rows) {
    value *live = NULL, *shown = NULL;
    bool by_torch = false, only = false;
    const int keys = need_of_keys(g, r, &by_torch);
    int64_t count;

    *rows = NULL;
    for (int i = 0; i < r->n_needs; i++) {
        const row_need *need = &r->needs[i];
        value *more;
        if (keys >= 0 && i != keys && need->kind == NEED_NONZERO &&
            attention_mask_same(need->value, r->needs[keys].value))
            continue;
        TRY(emit_need(g, r, need, &more));
        if (i == keys) shown = more;
        if (live) TRY(emit(g, &live, "Or", live, more));
        else live = more;
    }
    if (!live) return OK;
    TRY(rows_count(g, live, &count));
    const bool fewer = rows_pay(count, r->batch * r->length);
    if (shown && (by_torch || (fewer && !g->cuda))) TRY(is_only_shown(g, live, shown, &only));
    if (!fewer && !only) return OK;
    return emit_with(g, rows, "RowIndex", NODE_ATTRS(INT("count", count)), only ? shown : live);
}

/* --- rewriting ------------------------------------------------------------------------------------------------------ */

typedef struct rewrite {
    const row_reach *reach;
    row_set rows;
    bool *computed;   /* [n_values] for the rows that matter only */
    value **in_place; /* [n_values] such a value with all its rows */
} rewrite;

static bool moves(const row_reach *r, const row_set *s, const node *n) {
    if (!n->n_out || !n->out[0] || !rows_lead(r, n->out[0]) || !rows_apart(s, n)) return false;
    if (rows_axes(s, n->out[0]) != r->states[n->out[0]->id].at[0].token + 1) return false;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && r->states[n->in[i]->id].count && !(rows_operand(s, n, i) && rows_lead(r, n->in[i])))
            return false;
    return true;
}

static status put_in_place(rewrite *w, value *v, value **out) {
    value *packed = rows_known(&w->rows, v);

    if (!w->in_place[v->id]) {
        TRY(emit_with(w->rows.g, out, "UnpackRows", NODE_ATTRS(INT("size", w->rows.all)), packed, w->rows.rows));
        TRY(emit_reshape(w->rows.g, *out, &v->shape, &w->in_place[v->id]));
    }
    *out = w->in_place[v->id];
    return OK;
}

static bool is_computed(const rewrite *w, const value *v) {
    return v && v->id < w->reach->n_values && w->computed[v->id];
}

static status rewrite_node(rewrite *w, node *n) {
    graph *g = w->rows.g;

    g->before = n;
    if (n->mark) {
        TRY(rows_compute(&w->rows, n));
        w->computed[n->out[0]->id] = true;
        return OK;
    }
    for (int i = 0; i < n->n_in; i++) {
        value *whole;
        if (!is_computed(w, n->in[i])) continue;
        TRY(put_in_place(w, n->in[i], &whole));
        graph_set_operand(g, n, i, whole);
    }
    return OK;
}

static status rewrite_all(graph *g, const row_reach *reach, value *rows, node *first) {
    rewrite w = {.reach = reach};

    w.rows = rows_of(g, reach->batch * reach->length, rows, true);
    TRY(NEW(g->scratch, w.computed, reach->n_values));
    TRY(NEW(g->scratch, w.in_place, reach->n_values));
    for (node *n = first; n; n = n->next) TRY(rewrite_node(&w, n));
    g->before = NULL;
    for (int i = 0; i < g->n_outputs; i++)
        if (is_computed(&w, g->outputs[i])) {
            value *whole;
            TRY(put_in_place(&w, g->outputs[i], &whole));
            TRY(graph_set_end(g, &g->outputs[i], whole));
        }
    return OK;
}

/* Marks what is computed for some rows; returns the first such node, NULL where there is no matrix product to save. */
static node *mark_moving(graph *g, const row_reach *r) {
    node *first = NULL;
    bool products = false;
    row_set s = {.g = g, .all = r->batch * r->length};

    for (node *n = g->first; n; n = n->next) {
        n->mark = n->op->flags & EFFECT ? 0 : moves(r, &s, n);
        if (n->mark && !first) first = n;
        products |= n->mark && strncmp(n->op->name, "MatMul", 6) == 0;
    }
    return products ? first : NULL;
}

static status remove_padding(graph *g, int64_t batch, int64_t length, bool *fired) {
    row_reach reach;
    node *first;
    value *rows;
    bool closed;

    TRY(rows_follow(g, batch, length, &reach, &closed));
    if (!closed || reach.n_needs == 0 || !(first = mark_moving(g, &reach))) return OK;
    for (int i = 0; i < reach.n_needs; i++)
        if (!hoist(g, &reach, reach.needs[i].value, first)) return OK;
    g->before = first;
    TRY(emit_rows_that_matter(g, &reach, &rows));
    g->before = NULL;
    if (!rows || !mark_moving(g, &reach)) return OK;
    *fired = true;
    return rewrite_all(g, &reach, rows, first);
}

/* --- the pass ------------------------------------------------------------------------------------------------------ */

enum { MOST_BATCHES = 8 };

/* Every size [B, S] of keys that attention masks. */
static int find_batches(const graph *g, int64_t sizes[MOST_BATCHES][2]) {
    int found = 0;

    for (const node *n = g->first; n && found < MOST_BATCHES; n = n->next) {
        const shape *s = n->n_out && n->out[0] ? &n->out[0]->shape : NULL;
        bool known = false;
        if (!node_is(n, "MaskedSoftmax") || !node_in(n, 1) || s->rank != 4) continue;
        if (s->dim[0] < 2 || s->dim[3] < 2 || s->dim[0] * s->dim[3] < FEWEST_ROWS) continue;
        for (int i = 0; i < found; i++) known |= sizes[i][0] == s->dim[0] && sizes[i][1] == s->dim[3];
        if (known) continue;
        sizes[found][0] = s->dim[0];
        sizes[found++][1] = s->dim[3];
    }
    return found;
}

static status run(graph *g, int *fired) {
    int64_t sizes[MOST_BATCHES][2];
    int count = g->pending ? 0 : find_batches(g, sizes);

    for (int i = 0; i < count; i++) {
        bool here = false;
        TRY(remove_padding(g, sizes[i][0], sizes[i][1], &here));
        *fired += here;
        graph_remove_dead(g);
    }
    return OK;
}

const pass_def padding_removal = {.name = "padding_removal", .stage = BEFORE_GRADIENT, .run = run};
