/* row_selection.c -- a selection of rows moves up: only they are computed
 *
 *   f(x)[:, 0],  f(x)[i, j],  f(x)[rows]   ->  f(x[rows])
 *
 * for everything row by row between x and the selection (StridedSlice, Gather, GatherND): of a classifier's last layer
 * the first token, of a language model's the last one. The same selection from the numbers 0, 1, ... of all rows says
 * which they are, wraps what is negative, and refuses what is out of range. */
#include "passes/rowwise.h"

#include "ops/op.h"

#include <string.h>

enum { MOST_ROWS = 1 << 20 };

/* The axes that a selection takes rows of; 0: it is none. */
static int selected_axes(const node *n) {
    const shape *x;

    if (!node_in(n, 0)) return 0;
    x = &n->in[0]->shape;
    if (node_is(n, "StridedSlice")) {
        int k = x->rank;
        while (k > 0 && slice_keeps(n, k - 1)) k--;
        return k;
    }
    if (node_is(n, "Gather")) return node_axis(n, x->rank) + 1;
    if (node_is(n, "GatherND")) {
        const shape *index = &n->in[1]->shape;
        return (int)(node_int(n, "batch_dims") + index->dim[index->rank - 1]);
    }
    return 0;
}

/* The numbers of all rows, in the shape of the selected axes. */
static status row_numbers(graph *g, const shape *s, int64_t all, value **out) {
    int64_t *numbers;
    TRY(NEW(g->scratch, numbers, all));
    for (int64_t i = 0; i < all; i++) numbers[i] = i;
    return graph_add_constant(g, I64, s, numbers, out);
}

/* A node's attribute without what belongs to the axes behind the rows. */
static status select_numbers(graph *g, const node *n, int k, value *numbers, value *index, value **rows) {
    attr attrs[4] = {{0}};
    int count = 0;

    for (const attr *a = n->attrs; a && a->name && count < 3; a++, count++) {
        attrs[count] = *a;
        if (a->kind == ATTR_INTS && a->count > k) attrs[count].count = k;
        if (strcmp(a->name, "axis") == 0) attrs[count].i = k - 1;
    }
    TRY(graph_emit_op(g, n->op, attrs, n->n_in, (value *[]){numbers, index}, 1, rows));
    return emit_reshape(g, *rows, &SHAPE(shape_count(&(*rows)->shape)), rows);
}

/* How many rows `n` gives; `behind`: elements of a row. */
static int64_t selected_rows(const node *n, int64_t behind) {
    return behind > 0 ? shape_count(&n->out[0]->shape) / behind : INT64_MAX;
}

static status rows_in(graph *g, const node *n, int k, const shape *lead, int64_t all, value *index, value **rows) {
    value *numbers;
    TRY(row_numbers(g, lead, all, &numbers));
    return select_numbers(g, n, k, numbers, index, rows);
}

/* The numbers of the rows that `n` selects. Where they can be computed now the numbers of all rows are gone then. */
static status find_rows(graph *g, const node *n, int k, const shape *lead, int64_t all, value **rows) {
    value *index = node_in(n, 1), *there = NULL, *found = NULL;
    ctx scratch;
    graph *aside;
    status s;

    if (index && !index->data) return rows_in(g, n, k, lead, all, index, rows);
    ctx_scratch_begin(g->c, &scratch);
    s = graph_new(&scratch, &aside);
    if (s == OK) aside->specialised = true;
    if (s == OK && index) s = graph_share_constant(aside, index, &there);
    if (s == OK) s = rows_in(aside, n, k, lead, all, there, &found);
    if (s == OK && found->data) s = graph_add_constant(g, I64, &found->shape, found->data, rows);
    TRY(ctx_scratch_end(g->c, &scratch, s));
    return *rows ? OK : rows_in(g, n, k, lead, all, index, rows);
}

static status select_rows(graph *g, node *n, int *fired) {
    int k = selected_axes(n);
    shape lead = {.rank = k};
    value *rows = NULL, *out;
    int64_t all = 1, behind = 1;
    int products;
    row_set r;

    if (k == 0) return OK;
    for (int i = 0; i < k; i++) all *= lead.dim[i] = n->in[0]->shape.dim[i];
    for (int i = k; i < n->in[0]->shape.rank; i++) behind *= n->in[0]->shape.dim[i];
    if (all < 2 || all > MOST_ROWS || !rows_pay(selected_rows(n, behind), all)) return OK;
    r = rows_of(g, all, NULL, false);
    if (rows_axes(&r, n->in[0]) == 0) return OK;
    TRY(rows_find_above(&r, n, 0, &products));
    if (products == 0) return OK;
    TRY(find_rows(g, n, k, &lead, all, &rows));
    r.rows = rows;
    r.count = rows->shape.dim[0];
    TRY(rows_compute_above(&r, n, 0, &out));
    TRY(emit_reshape(g, out, &n->out[0]->shape, &out));
    ++*fired;
    return graph_replace(g, n->out[0], out);
}

static status run(graph *g, int *fired) { return rows_rewrite_each(g, select_rows, fired); }

const pass_def row_selection = {.name = "row_selection", .stage = BEFORE_GRADIENT, .run = run};
