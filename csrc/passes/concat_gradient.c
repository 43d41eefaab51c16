/* concat_gradient.c -- Place(a) + Place(b) + ... + rest  ->  Concat(a, b, ...) + rest
 *
 * where the pieces lie side by side along one axis and fill it. That is the gradient of a value that was split, or cut
 * into slices: each piece alone is a tensor of the whole size, nearly all zeros, and so are their sums. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { MAX_TERMS = 16 };

/* --- the terms of a sum --------------------------------------------------------------------------------------------- */

typedef struct sum {
    value *terms[MAX_TERMS];
    int count;
} sum;

/* An addition of two tensors of the result's shape, that nothing else looks at. */
static bool is_inner_sum(const graph *g, const value *v, const shape *s) {
    return value_is(v, "Add") && v->n_uses == 1 && !value_is_end(g, v) && shape_equal(&v->def->in[0]->shape, s) &&
           shape_equal(&v->def->in[1]->shape, s);
}

static bool add_terms(const graph *g, const node *n, sum *s) {
    for (int i = 0; i < 2; i++) {
        value *v = n->in[i];
        if (is_inner_sum(g, v, &n->out[0]->shape)) {
            if (!add_terms(g, v->def, s)) return false;
        } else {
            if (s->count == MAX_TERMS) return false;
            s->terms[s->count++] = v;
        }
    }
    return true;
}

/* --- pieces --------------------------------------------------------------------------------------------------------- */

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

/* The term that is a piece from `start` on along `axis`; -1: none. */
static int find_piece(const sum *s, int axis, const shape *whole, int64_t start) {
    for (int i = 0; i < s->count; i++) {
        const int64_t *starts;
        if (axis_of_piece(s->terms[i], whole) != axis) continue;
        if (node_ints(s->terms[i]->def, "starts", &starts) > axis && starts[axis] == start) return i;
    }
    return -1;
}

/* Takes pieces that fill `axis` out of the sum, in order; returns their number, 0 when they do not fill it. */
static int take_pieces(sum *s, int axis, const shape *whole, value *pieces[MAX_TERMS]) {
    sum rest = *s;
    int64_t at = 0;
    int count = 0;

    while (at < whole->dim[axis]) {
        int i = find_piece(&rest, axis, whole, at);
        if (i < 0) return 0;
        pieces[count] = rest.terms[i]->def->in[0];
        at += pieces[count++]->shape.dim[axis];
        rest.terms[i] = rest.terms[--rest.count];
    }
    *s = rest;
    return count;
}

/* --- the pass ------------------------------------------------------------------------------------------------------- */

/* Joins what can be joined; `changed` tells whether anything was. */
static status join_pieces(graph *g, sum *s, const shape *whole, bool *changed) {
    *changed = false;
    for (int axis = 0; axis < whole->rank; axis++) {
        value *pieces[MAX_TERMS];
        int count = take_pieces(s, axis, whole, pieces);
        if (!count) continue;
        TRY(graph_emit(g, "Concat", NODE_ATTRS(INT("axis", axis)), count, pieces, 1, &s->terms[s->count++]));
        *changed = true;
    }
    return OK;
}

static status rewrite_sum(graph *g, value *const v[], const node *n, value **out) {
    sum s = {.count = 0};
    value *total;
    bool changed;

    (void)v;
    if (!add_terms(g, n, &s)) return OK;
    TRY(join_pieces(g, &s, &n->out[0]->shape, &changed));
    if (!changed) return OK;
    total = s.terms[0];
    for (int i = 1; i < s.count; i++) TRY(emit(g, &total, "Add", total, s.terms[i]));
    *out = total;
    return OK;
}

static const rule rules[] = {
    {OP("Add", VAR(0), VAR(1)), rewrite_sum},
    {0},
};

const pass_def concat_gradient = {.name = "concat_gradient", .stage = AFTER_GRADIENT, .level = 1, .rules = rules};
