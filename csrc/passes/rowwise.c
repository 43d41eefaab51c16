/* rowwise.c -- which operators work row by row, and how one is written for some of the rows. */
#include "passes/rowwise.h"

#include "ops/op.h"

#include <stdlib.h>
#include <string.h>

row_set rows_of(graph *g, int64_t all, value *rows, bool packed) {
    return (row_set){.g = g, .all = all, .rows = rows, .packed = packed, .count = rows ? rows->shape.dim[0] : 0};
}

/* --- rows that are known -------------------------------------------------------------------------------------------- */

/* Where `v` is, or belongs. */
static known_rows *place_of(const row_set *r, const value *v) {
    uint32_t at = (uint32_t)v->id * UINT32_C(0x9e3779b1);
    for (;; at++) {
        known_rows *k = &r->known[at & (uint32_t)(r->table_size - 1)];
        if (!k->of || k->of == v) return k;
    }
}

value *rows_known(const row_set *r, const value *v) { return r->table_size ? place_of(r, v)->rows : NULL; }

static status remember(row_set *r, const value *v, value *rows) {
    if (r->n_known * 2 >= r->table_size) {
        const known_rows *old = r->known;
        const int size = r->table_size;
        r->table_size = size ? size * 2 : 16;
        TRY(NEW(r->g->scratch, r->known, r->table_size));
        for (int i = 0; i < size; i++)
            if (old[i].of) *place_of(r, old[i].of) = old[i];
    }
    known_rows *k = place_of(r, v);
    r->n_known += !k->of;
    *k = (known_rows){v, rows};
    return OK;
}

static status number_of(graph *g, value *counter, int64_t *number) {
    if (!value_is_constant(counter)) return graph_data_size(g, counter, number);
    *number = *(const int64_t *)counter->data;
    return OK;
}

status rows_count(graph *g, value *live, int64_t *count) {
    value *counter;
    TRY(emit(g, &counter, "RowCount", live));
    return number_of(g, counter, count);
}

status rows_any(graph *g, value *live, bool *any) {
    value *counter;
    int64_t number;
    TRY(emit_with(g, &counter, "RowCount", NODE_ATTRS(INT("any", 1)), live));
    TRY(number_of(g, counter, &number));
    *any = number != 0;
    return OK;
}

status rows_labelled(graph *g, value *labels, int64_t ignored, value **out) {
    value *number;
    TRY(graph_scalar(g, labels->type, (double)ignored, &number));
    TRY(emit(g, out, "Equal", labels, number));
    return emit(g, out, "Not", *out);
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
    return same_axes(r, n->in[0], k) && node_axis(n, n->in[0]->shape.rank) >= k;
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
    return node_looks_up_rows(n) && same_axes(r, n->in[1], k);
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
        if (n->out[i] && value_is_read(n->out[i])) return false;
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

    if ((*out = rows_known(r, v))) return OK;
    flat = rows_shape(&v->shape, rows_axes(r, v), r->all);
    TRY(emit_reshape(g, v, &flat, out));
    if (r->packed) TRY(emit(g, out, "PackRows", *out, r->rows));
    else TRY(emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", 0)), *out, r->rows));
    return remember(r, v, *out);
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

/* The rows of a look-up's indices. Those of the others are out of range as well where PyTorch would say so. */
static status take_checked(row_set *r, const node *n, value **out) {
    const int64_t size = n->in[0]->shape.dim[0];
    value *index;
    TRY(emit_with(r->g, &index, "CheckedIndex", NODE_ATTRS(INT("size", size), INT("from_end", node_int(n, "from_end"))),
                  n->in[1]));
    return rows_take(r, index, out);
}

static status take_operands(row_set *r, const row_rule *how, const node *n, int k, value **in) {
    for (int i = 0; i < n->n_in; i++) {
        in[i] = n->in[i];
        if (!in[i]) continue;
        if (how->cut == BROADCAST) TRY(take_broadcast(r, n->out[0], k, n->in[i], &in[i]));
        else if (how->cut == SECOND && i == 1) TRY(take_checked(r, n, &in[i]));
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
    value **in, *out;

    TRY(NEW(r->g->scratch, in, n->n_in + 1));
    r->g->emit_name = n->name;
    TRY(take_operands(r, how, n, k, in));
    TRY(emit_rows(r, how, n, k, in, &out));
    r->g->emit_name = name;
    return remember(r, n->out[0], out);
}

/* --- rows move up --------------------------------------------------------------------------------------------------- */

/* `n` computes what is wanted: it goes to the end of the list. */
static status add_above(row_set *r, node *n) {
    if ((r->n_above & (r->n_above - 1)) == 0) {
        node **bigger;
        TRY(NEW(r->g->scratch, bigger, r->n_above ? r->n_above * 2 : 1));
        if (r->n_above) memcpy(bigger, r->above, (size_t)r->n_above * sizeof *bigger);
        r->above = bigger;
    }
    r->above[r->n_above++] = n;
    return OK;
}

/* One more use of `v` is by something that wants rows; its mark counts them. With the last one its node is found. */
static status want_rows(row_set *r, value *v) {
    if (++v->mark < v->n_uses || value_is_end(v) || !v->def || v != v->def->out[0]) return OK;
    return rows_apart(r, v->def) ? add_above(r, v->def) : OK;
}

/* A node is found once all that reads it is: the order of the list is against that of the program. */
static status find_above(row_set *r, const node *sink, int i) {
    r->n_above = 0;
    TRY(want_rows(r, sink->in[i]));
    for (int k = 0; k < r->n_above; k++) {
        const node *n = r->above[k];
        for (int j = 0; j < n->n_in; j++)
            if (n->in[j] && rows_operand(r, n, j)) TRY(want_rows(r, n->in[j]));
    }
    return OK;
}

static void clear_marks(const node *n) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i]) n->in[i]->mark = 0;
}

static int in_program_order(const void *a, const void *b) {
    const node *x = *(node *const *)a, *y = *(node *const *)b;
    return node_is_before(x, y) ? -1 : x != y;
}

status rows_find_above(row_set *r, const node *sink, int i, int *products) {
    TRY(find_above(r, sink, i));
    *products = 0;
    clear_marks(sink);
    for (int k = 0; k < r->n_above; k++) {
        clear_marks(r->above[k]);
        *products += rule_of(r->above[k])->fits == fits_product;
    }
    return OK;
}

status rows_compute_above(row_set *r, const node *sink, int i, value **out) {
    if (r->n_above) qsort(r->above, (size_t)r->n_above, sizeof *r->above, in_program_order);
    for (int k = 0; k < r->n_above; k++) TRY(rows_compute(r, r->above[k]));
    return rows_take(r, sink->in[i], out);
}

/* --- a pass --------------------------------------------------------------------------------------------------------- */

status rows_rewrite_each(graph *g, node_rewrite *rewrite, int *fired) {
    if (g->pending) return OK;
    for (int i = 0; i < g->n_inputs; i++) g->inputs[i]->mark = 0;
    for (const node *n = g->first; n; n = n->next) clear_marks(n);
    return pass_rewrite_each(g, rewrite, fired);
}
