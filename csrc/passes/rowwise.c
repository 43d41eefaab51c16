/* rowwise.c -- which operators work row by row, and how one is written for some of the rows. */
#include "passes/rowwise.h"

#include "ops/op.h"
#include "passes/match.h"

#include <string.h>

status rows_begin(graph *g, int64_t all, value *rows, bool packed, row_set *out) {
    *out = (row_set){.g = g, .all = all, .rows = rows, .packed = packed, .n_known = g->n_values};
    if (rows) out->count = rows->shape.dim[0];
    return NEW(g->c, out->known, g->n_values);
}

status rows_count(graph *g, value *live, int64_t *count) {
    value *counter;
    TRY(emit(g, &counter, "RowCount", live));
    if (!value_is_constant(counter)) return graph_data_size(g, counter, count);
    *count = *(const int64_t *)counter->data;
    return OK;
}

int rows_axes(const row_set *r, const value *v) {
    int64_t product = 1;
    for (int k = 0; k < v->shape.rank; k++) {
        product *= v->shape.dim[k];
        if (product == r->all) return k + 1;
        if (product > r->all) return 0;
    }
    return 0;
}

/* --- operators ------------------------------------------------------------------------------------------------------ */

/* `k`: axes of the rows of n->out[0]. */
typedef bool fits_fn(const row_set *r, const node *n, int k);

static bool same_axes(const row_set *r, const value *v, int k) { return v && rows_axes(r, v) == k; }

/* As broadcasting sees `v` beside `y`: are their leading k axes the same? */
static bool leads_like(const value *v, const value *y, int k) {
    return v->shape.rank == y->shape.rank && memcmp(v->shape.dim, y->shape.dim, (size_t)k * sizeof *y->shape.dim) == 0;
}

static bool fits_pointwise(const row_set *r, const node *n, int k) {
    (void)r;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && leads_like(n->in[i], n->out[0], k)) return true;
    return false;
}

/* The other axes, of which one is looked along, lie behind the rows. */
static bool fits_axis(const row_set *r, const node *n, int k) {
    int64_t axis = node_int(n, "axis");
    return same_axes(r, n->in[0], k) && (axis < 0 ? axis + n->in[0]->shape.rank : axis) >= k;
}

static bool fits_last_axis(const row_set *r, const node *n, int k) {
    return same_axes(r, n->in[0], k) && n->in[0]->shape.rank > k;
}

static bool fits_product(const row_set *r, const node *n, int k) {
    return fits_last_axis(r, n, k) && n->in[1]->shape.rank == 2 && (!node_in(n, 2) || n->in[2]->shape.rank == 1);
}

static bool fits_reshape(const row_set *r, const node *n, int k) {
    (void)k;
    return rows_axes(r, n->in[0]) > 0;
}

static bool fits_transpose(const row_set *r, const node *n, int k) {
    const int64_t *perm;
    if (!same_axes(r, n->in[0], k) || node_ints(n, "perm", &perm) < k) return false;
    for (int i = 0; i < k; i++)
        if (perm[i] != i) return false;
    return true;
}

static bool fits_slice(const row_set *r, const node *n, int k) {
    for (int i = 0; i < k; i++)
        if (!slice_keeps(n, i)) return false;
    return same_axes(r, n->in[0], k);
}

static bool fits_dropout(const row_set *r, const node *n, int k) { return same_axes(r, n->in[0], k) && !node_in(n, 1); }

static bool fits_look_up(const row_set *r, const node *n, int k) {
    return node_int(n, "axis") == 0 && same_axes(r, n->in[1], k);
}

static bool fits_concat(const row_set *r, const node *n, int k) {
    for (int i = 0; i < n->n_in; i++)
        if (!same_axes(r, n->in[i], k)) return false;
    return fits_axis(r, n, k);
}

static bool fits_expand(const row_set *r, const node *n, int k) {
    return same_axes(r, n->in[0], k) && n->in[0]->shape.rank == n->out[0]->shape.rank;
}

typedef enum operands { FIRST, SECOND, ALL, BROADCAST } operands; /* that are cut into rows */
typedef enum rewritten { NOTHING, AXIS, PERM, BOX, NEW_SHAPE, ROWS } rewritten;

typedef struct row_rule {
    const char *op;
    fits_fn *fits;
    operands cut;
    rewritten changes;
} row_rule;

static const row_rule rules[] = {
    {"LayerNormalization", fits_axis, FIRST, AXIS},
    {"RMSNormalization", fits_axis, FIRST, AXIS},
    {"Softmax", fits_axis, FIRST, AXIS},
    {"LogSoftmax", fits_axis, FIRST, AXIS},
    {"MaskedSoftmax", fits_last_axis, BROADCAST, NOTHING},
    {"Rotary", fits_last_axis, BROADCAST, NOTHING},
    {"MatMul", fits_product, FIRST, NOTHING},
    {"MatMulBias", fits_product, FIRST, NOTHING},
    {"Reshape", fits_reshape, FIRST, NEW_SHAPE},
    {"Expand", fits_expand, FIRST, NEW_SHAPE},
    {"Transpose", fits_transpose, FIRST, PERM},
    {"StridedSlice", fits_slice, FIRST, BOX},
    {"DropoutTrain", fits_dropout, FIRST, ROWS},
    {"Gather", fits_look_up, SECOND, NOTHING},
    {"Embedding", fits_look_up, SECOND, NOTHING},
    {"Concat", fits_concat, ALL, AXIS},
    {0},
};

static const row_rule *rule_of(const node *n) {
    static const row_rule pointwise = {"", fits_pointwise, BROADCAST, NOTHING};

    for (const row_rule *how = rules; how->op; how++)
        if (strcmp(how->op, n->op->name) == 0) return how;
    return n->op->flags & POINTWISE && !(n->op->flags & (RANDOM | EFFECT)) ? &pointwise : NULL;
}

bool rows_apart(const row_set *r, const node *n) {
    const row_rule *how = rule_of(n);
    int k;

    if (!how || !n->n_out || !n->out[0] || !(k = rows_axes(r, n->out[0]))) return false;
    for (int i = 1; i < n->n_out; i++)
        if (n->out[i] && (n->out[i]->n_uses || value_is_end(r->g, n->out[i]))) return false;
    return how->fits(r, n, k);
}

bool rows_operand(const row_set *r, const node *n, int i) {
    const row_rule *how = rule_of(n);
    switch (how->cut) {
    case FIRST: return i == 0;
    case SECOND: return i == 1;
    case ALL: return true;
    case BROADCAST: break;
    }
    return leads_like(n->in[i], n->out[0], rows_axes(r, n->out[0]));
}

/* --- emitting ------------------------------------------------------------------------------------------------------- */

/* `s` with the k axes of its rows replaced by one. */
static shape rows_shape(const shape *s, int k, int64_t count) {
    shape rest = {.rank = s->rank - k + 1};
    rest.dim[0] = count;
    for (int i = k; i < s->rank; i++) rest.dim[i - k + 1] = s->dim[i];
    return rest;
}

status rows_take(row_set *r, value *v, value **out) {
    graph *g = r->g;
    shape flat;
    bool keeps = v->id < r->n_known;

    if (keeps && r->known[v->id]) {
        *out = r->known[v->id];
        return OK;
    }
    flat = rows_shape(&v->shape, rows_axes(r, v), r->all);
    TRY(emit_reshape(g, v, &flat, out));
    if (r->packed) TRY(emit(g, out, "PackRows", *out, r->rows));
    else TRY(emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", 0)), *out, r->rows));
    if (keeps) r->known[v->id] = *out;
    return OK;
}

static status emit_expand(graph *g, value *x, const shape *s, value **out) {
    value *sizes;
    TRY(graph_ints(g, s->rank, s->dim, &sizes));
    return emit(g, out, "Expand", x, sizes);
}

/* An operand that is broadcast: its rows, or what all rows share. */
static status take_broadcast(row_set *r, const value *y, int k, value *v, value **out) {
    int missing = y->shape.rank - v->shape.rank;
    bool shared = true;
    shape s;

    if (leads_like(v, y, k)) return rows_take(r, v, out);
    for (int i = missing; i < k; i++) shared &= v->shape.dim[i - missing] == 1;
    if (shared) {
        int from = missing < k ? k - missing : 0;
        s = (shape){.rank = v->shape.rank - from};
        for (int i = 0; i < s.rank; i++) s.dim[i] = v->shape.dim[i + from];
        return emit_reshape(r->g, v, &s, out);
    }
    s = y->shape;
    for (int i = k; i < s.rank; i++) s.dim[i] = v->shape.dim[i - missing];
    TRY(emit_expand(r->g, v, &s, &v));
    return rows_take(r, v, out);
}

static status take_operands(row_set *r, const row_rule *how, const node *n, int k, value **in) {
    for (int i = 0; i < n->n_in; i++) {
        in[i] = n->in[i];
        if (!in[i]) continue;
        if (how->cut == BROADCAST) TRY(take_broadcast(r, n->out[0], k, n->in[i], &in[i]));
        else if (rows_operand(r, n, i)) TRY(rows_take(r, n->in[i], &in[i]));
    }
    return OK;
}

enum { MOST_ATTRS = 8, MOST_OPERANDS = 64 };

/* Axes are counted behind the rows: one axis instead of k. */
static void shift_axis(attr *a, int rank) {
    if (a->i >= 0) a->i -= rank;
}

/* An attribute with a number an axis: of `most`, the first k become one, which is `first`. */
static void shift_list(attr *a, int k, int64_t first, int64_t shift, int64_t *list) {
    list[0] = first;
    for (int i = k; i < a->count; i++) list[i - k + 1] = a->ints[i] - shift;
    a->count += 1 - k;
    a->ints = list;
}

static status emit_rows(row_set *r, const row_rule *how, const node *n, int k, value **in, value **out) {
    int64_t lists[3][MAX_RANK];
    attr attrs[MOST_ATTRS] = {{0}};
    int n_in = n->n_in, count = 0;
    shape s = rows_shape(&n->out[0]->shape, k, r->count);

    if (how->changes == NEW_SHAPE)
        return node_is(n, "Expand") ? emit_expand(r->g, in[0], &s, out) : emit_reshape(r->g, in[0], &s, out);
    for (const attr *a = n->attrs; a && a->name && count < MOST_ATTRS - 1; a++, count++) {
        attr *to = &attrs[count];
        *to = *a;
        if (how->changes == AXIS && strcmp(a->name, "axis") == 0) shift_axis(to, n->in[0]->shape.rank);
        if (how->changes == PERM && strcmp(a->name, "perm") == 0) shift_list(to, k, 0, k - 1, lists[0]);
        if (how->changes != BOX) continue;
        if (strcmp(a->name, "starts") == 0) shift_list(to, k, 0, 0, lists[0]);
        if (strcmp(a->name, "counts") == 0) shift_list(to, k, r->count, 0, lists[1]);
        if (strcmp(a->name, "steps") == 0) shift_list(to, k, 1, 0, lists[2]);
    }
    if (how->changes == ROWS) {
        in[1] = r->rows;
        n_in = 2;
    }
    return graph_emit_op(r->g, n->op, attrs, n_in, in, 1, out);
}

status rows_compute(row_set *r, const node *n) {
    const row_rule *how = rule_of(n);
    int k = rows_axes(r, n->out[0]);
    const char *name = r->g->emit_name;
    value **in;

    TRY(NEW(r->g->c, in, n->n_in + 1));
    r->g->emit_name = n->name;
    TRY(take_operands(r, how, n, k, in));
    TRY(emit_rows(r, how, n, k, in, &r->known[n->out[0]->id]));
    r->g->emit_name = name;
    return OK;
}

/* --- rows move up --------------------------------------------------------------------------------------------------- */

static bool seen_by_marked_only(const row_set *r, const value *v, const node *sink, int operand) {
    for (const use *u = v->uses; u; u = u->next)
        if (u->user == sink ? u->index != operand : !u->user->mark || !rows_operand(r, u->user, u->index)) return false;
    return v->n_uses > 0 && !value_is_end(r->g, v);
}

int rows_mark_above(const row_set *r, const node *sink, int i) {
    int products = 0;

    for (node *n = r->g->first; n; n = n->next) n->mark = 0;
    for (node *n = sink->prev; n; n = n->prev) {
        n->mark = rows_apart(r, n) && seen_by_marked_only(r, n->out[0], sink, i);
        products += n->mark && rule_of(n)->fits == fits_product;
    }
    return products;
}

status rows_compute_above(row_set *r, const node *sink, int i, value **out) {
    for (const node *n = r->g->first; n != sink; n = n->next)
        if (n->mark == 1) TRY(rows_compute(r, n));
    return rows_take(r, sink->in[i], out);
}

/* --- a pass --------------------------------------------------------------------------------------------------------- */

status rows_rewrite_each(graph *g, row_rewrite *rewrite, int *fired) {
    if (g->pending) return OK;
    for (node *n = g->first; n; n = n->next) {
        bool here = false;
        if (!n->n_out || !n->out[0] || (!n->out[0]->n_uses && !value_is_end(g, n->out[0]))) continue;
        g->before = n;
        g->emit_name = n->name;
        TRY(rewrite(g, n, &here));
        *fired += here;
    }
    g->before = NULL;
    g->emit_name = NULL;
    graph_remove_dead(g);
    return OK;
}
