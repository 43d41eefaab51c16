/* concat_gradient.c -- Place(a) + Place(b) + ... + rest  ->  Concat(a, b, ...) + rest
 *
 * where the pieces lie side by side along one axis, with zeros between them. That is the gradient of a value that was
 * split, or cut into slices, one for each step of a loop: each piece alone is a tensor of the whole size, nearly all
 * zeros, and so are their sums. */
#include "passes/pipeline.h"

#include "ops/op.h"

#include <stdlib.h>

/* --- the terms of a sum --------------------------------------------------------------------------------------------- */

typedef struct list {
    value **items;
    int count, room;
} list;

static status append(ctx *c, list *l, value *v) {
    TRY(MORE(c, l->items, l->count, l->room));
    l->items[l->count++] = v;
    return OK;
}

/* An addition of two tensors of the result's shape. */
static bool adds(const node *n, const shape *s) {
    return node_is(n, "Add") && shape_equal(&n->in[0]->shape, s) && shape_equal(&n->in[1]->shape, s);
}

/* One that nothing else looks at. */
static bool is_inner_sum(const value *v, const shape *s) { return v->def && adds(v->def, s) && value_is_private(v); }

/* In the order in which they are written. */
static status find_terms(graph *g, const node *n, list *terms) {
    const shape *s = &n->out[0]->shape;
    list waiting = {0};

    for (int i = 1; i >= 0; i--) TRY(append(g->scratch, &waiting, n->in[i]));
    while (waiting.count) {
        value *v = waiting.items[--waiting.count];
        if (!is_inner_sum(v, s)) TRY(append(g->scratch, terms, v));
        else
            for (int i = 1; i >= 0; i--) TRY(append(g->scratch, &waiting, v->def->in[i]));
    }
    return OK;
}

/* --- pieces --------------------------------------------------------------------------------------------------------- */

typedef struct piece {
    value *x;
    int64_t start, size;
    int term;
} piece;

/* The only axis along which the piece is smaller than the whole; -1: it is no such piece. */
static int axis_of_piece(const value *v, const shape *whole) {
    const shape *part;
    const int64_t *steps;
    int axis = -1;

    if (!value_is(v, "Place") || v->def->n_in > 1 || !shape_equal(&v->shape, whole)) return -1;
    part = &v->def->in[0]->shape;
    node_ints(v->def, "steps", &steps);
    for (int i = 0; i < whole->rank; i++) {
        if (steps[i] != 1 || (part->dim[i] != whole->dim[i] && axis >= 0)) return -1;
        if (part->dim[i] != whole->dim[i]) axis = i;
    }
    return axis;
}

static int by_end(const void *a, const void *b) {
    const piece *x = a, *y = b;
    const int64_t end = x->start + x->size, other = y->start + y->size;
    return end != other ? (end < other ? -1 : 1) : x->term - y->term;
}

/* The pieces along `axis`, the one first that ends first; returns their number. */
static int sort_pieces(const list *terms, int axis, const shape *whole, piece *pieces) {
    int count = 0;

    for (int i = 0; i < terms->count; i++) {
        value *v = terms->items[i];
        const int64_t *starts;
        if (axis_of_piece(v, whole) != axis) continue;
        node_ints(v->def, "starts", &starts);
        pieces[count++] = (piece){v->def->in[0], starts[axis], v->def->in[0]->shape.dim[axis], i};
    }
    qsort(pieces, (size_t)count, sizeof *pieces, by_end);
    return count;
}

/* Keeps as many as do not overlap; returns their number. */
static int keep_apart(piece *pieces, int count) {
    int64_t at = 0;
    int kept = 0;

    for (int i = 0; i < count; i++) {
        if (pieces[i].start < at) continue;
        at = pieces[i].start + pieces[i].size;
        pieces[kept++] = pieces[i];
    }
    return kept;
}

/* --- the pass ------------------------------------------------------------------------------------------------------- */

static status append_zeros(graph *g, list *parts, dtype type, int axis, const shape *whole, int64_t size) {
    shape s = *whole;
    value *zero;

    s.dim[axis] = size;
    if (size == 0) return OK;
    TRY(graph_full(g, type, &s, 0, &zero));
    return append(g->scratch, parts, zero);
}

static status concat_pieces(graph *g, const piece *pieces, int count, int axis, const shape *whole, value **out) {
    list parts = {0};
    int64_t at = 0;

    for (int i = 0; i < count; i++) {
        TRY(append_zeros(g, &parts, pieces[0].x->type, axis, whole, pieces[i].start - at));
        TRY(append(g->scratch, &parts, pieces[i].x));
        at = pieces[i].start + pieces[i].size;
    }
    TRY(append_zeros(g, &parts, pieces[0].x->type, axis, whole, whole->dim[axis] - at));
    return graph_emit(g, "Concat", NODE_ATTRS(INT("axis", axis)), parts.count, parts.items, 1, out);
}

/* Joins what can be joined of at least two pieces; tells whether anything was. */
static status join_pieces(graph *g, list *terms, int axis, const shape *whole, bool *joined) {
    value *together;
    piece *pieces;
    int count, left = 0;

    TRY(NEW(g->scratch, pieces, terms->count));
    count = keep_apart(pieces, sort_pieces(terms, axis, whole, pieces));
    *joined = count > 1;
    if (!*joined) return OK;
    TRY(concat_pieces(g, pieces, count, axis, whole, &together));
    for (int i = 0; i < count; i++) terms->items[pieces[i].term] = NULL;
    for (int i = 0; i < terms->count; i++)
        if (terms->items[i]) terms->items[left++] = terms->items[i];
    terms->count = left;
    return append(g->scratch, terms, together);
}

/* Of a sum that is a term of another the other takes care. */
static bool is_term(const value *v) { return value_is_private(v) && adds(v->uses->user, &v->shape); }

static status rewrite_sum(graph *g, value *const v[], const node *n, value **out) {
    const shape *whole = &n->out[0]->shape;
    bool changed = false, joined;
    list terms = {0};
    value *total;

    (void)v;
    if (!adds(n, whole) || is_term(n->out[0])) return OK;
    TRY(find_terms(g, n, &terms));
    for (int axis = 0; axis < whole->rank; axis += !joined) {
        TRY(join_pieces(g, &terms, axis, whole, &joined));
        changed |= joined;
    }
    if (!changed) return OK;
    total = terms.items[0];
    for (int i = 1; i < terms.count; i++) TRY(emit(g, &total, "Add", total, terms.items[i]));
    *out = total;
    return OK;
}

static const rule rules[] = {
    {OP("Add", VAR(0), VAR(1)), rewrite_sum},
    {0},
};

const pass_def concat_gradient = {.name = "concat_gradient", .stage = AFTER_GRADIENT, .rules = rules};
