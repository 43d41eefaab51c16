/* product_epilogue.c -- what cuBLASLt computes on the way of a product into memory, on a GPU:
 *
 *   GeluTanh(a b + c)                                   ->  MatMulGelu(a, b, c)
 *   GeluTanhGrad(a b, x), ReduceSum of it over rows     ->  MatMulGeluGrad(a, b, x)
 *   dy' x or x' dy, and ReduceSum of dy over its rows   ->  MatMulTotals: the gradients of a weight and of its bias
 *
 * Each spares a pass over a matrix that memory bounds. GELU goes to a chain of pointwise operators instead where its
 * result is read by one: that spares more. Totals of 16-bit operands of a product that stays in float32 do, too, so
 * they are taken where they are widened. */
#include "passes/pipeline.h"

#include "ops/queries.h"

static bool is_product(const value *v) {
    const node *n = v->def;

    return n && product_is(n) && v->type != F64 && dtype_is_float(v->type) && n->in[0]->shape.rank > 1 &&
           n->in[1]->shape.rank > 1;
}

/* One weight for all rows, so that the library sees one product. */
static bool has_one_weight(const node *product) {
    const shape *b = &product->in[1]->shape;
    return shape_span(b, 0, b->rank - 2) == 1;
}

/* As the library stores GELU's operands. */
enum { COLUMNS = 8 };
static bool suits_gelu(const value *v) {
    return is_product(v) && v->type == v->def->in[0]->type && has_one_weight(v->def) &&
           v->shape.dim[v->shape.rank - 1] % COLUMNS == 0;
}

/* --- GELU --------------------------------------------------------------------------------------------------------- */

static status fuse_gelu(graph *g, node *n, int *fired) {
    value *x = n->in[0], *c, *out[2] = {NULL, NULL};

    if (!suits_gelu(x) || x->def->backward != n->backward || node_is_read_by_a_chain(n)) return OK;
    c = node_in(x->def, 2);
    if (c && (c->shape.rank != 1 || c->shape.dim[0] != x->shape.dim[x->shape.rank - 1])) return OK;
    pass_emits(g, x->def, n);
    TRY(graph_emit(g, "MatMulGelu", NODE_ATTRS(FLOAT("alpha", product_alpha(x->def))), c ? 3 : 2,
                   (value *[]){x->def->in[0], x->def->in[1], c}, value_is_private(x) ? 1 : 2, out));
    TRY(graph_replace(g, n->out[0], out[0]));
    if (out[1]) TRY(graph_replace(g, x, out[1]));
    ++*fired;
    return OK;
}

/* --- totals ------------------------------------------------------------------------------------------------------- */

/* A sum over all axes of `v` but the last. */
static status totals_all_rows(graph *g, const value *v, const node *sum, bool *does) {
    const int last = v->shape.rank - 1;
    const int64_t *axes;
    unsigned seen = 0;
    int count;

    *does = false;
    if (!node_is(sum, "ReduceSum") || sum->in[0] != v || !value_is_constant(node_in(sum, 1))) return OK;
    TRY(value_ints(g, sum->in[1], "axes", &count, &axes));
    for (int i = 0; i < count; i++) seen |= 1U << (axes[i] < 0 ? axes[i] + last + 1 : axes[i]);
    *does = last > 0 && seen == (1U << last) - 1;
    return OK;
}

/* Of a value with more readers each product would look at all of them. */
enum { MOST_READERS = 64 };

/* In the same phase as the product `with`. */
static status find_totals(graph *g, const value *v, const node *with, node **out) {
    *out = NULL;
    if (v->n_uses > MOST_READERS) return OK;
    for (const use *u = v->uses; u && !*out; u = u->next) {
        bool does;
        const value *sum = u->user->n_out ? u->user->out[0] : NULL;
        if (!sum || !value_is_read(sum)) continue; /* replaced by now */
        TRY(totals_all_rows(g, v, u->user, &does));
        if (does && u->user->backward == with->backward) *out = u->user;
    }
    return OK;
}

static status fuse_gelu_grad(graph *g, node *n, int *fired) {
    value *dy = n->in[0], *x = n->in[1], *out[2] = {NULL, NULL}, *totals;
    node *sum;

    if (!suits_gelu(dy) || node_in(dy->def, 2) || !value_is_private(dy) || node_is_read_by_a_chain(n)) return OK;
    if (x->type != dy->type || !shape_equal(&x->shape, &dy->shape)) return OK;
    TRY(find_totals(g, n->out[0], n, &sum));
    pass_emits(g, n, n);
    TRY(graph_emit(g, "MatMulGeluGrad", NODE_ATTRS(FLOAT("alpha", product_alpha(dy->def))), 3,
                   (value *[]){dy->def->in[0], dy->def->in[1], x}, sum ? 2 : 1, out));
    if (sum) {
        TRY(emit_reshape(g, out[1], &sum->out[0]->shape, &totals));
        TRY(graph_replace(g, sum->out[0], totals));
    }
    TRY(graph_replace(g, n->out[0], out[0]));
    ++*fired;
    return OK;
}

/* --- a weight's gradient and its bias's --------------------------------------------------------------------------- */

static bool has_columns_of(const value *x, const value *v) {
    return x->shape.rank && x->shape.dim[x->shape.rank - 1] == v->shape.dim[v->shape.rank - 1];
}

/* `v` seen with other leading axes: what was reshaped to it. */
static value *before_reshapes(value *v) {
    while (value_is(v, "Reshape") && has_columns_of(v->def->in[0], v)) v = v->def->in[0];
    return v;
}

/* Totals of `v` seen with other leading axes: of what it was reshaped from, and of what else is reshaped from that, as
 * the heads of attention's gradients are for each of their readers. */
static status find_totals_beside(graph *g, value *v, const node *with, node **out) {
    v = before_reshapes(v);
    TRY(find_totals(g, v, with, out));
    if (*out || !value_is(v, "Reshape") || v->def->in[0]->n_uses > MOST_READERS) return OK;
    for (const use *u = v->def->in[0]->uses; u && !*out; u = u->next)
        if (node_is(u->user, "Reshape") && u->index == 0 && has_columns_of(u->user->out[0], v))
            TRY(find_totals(g, u->user->out[0], with, out));
    return OK;
}

static bool is_transposed(const value *v) { return value_is(v, "Transpose") && v->shape.rank == 2; }

/* The last value of a sum that no other node reads before, of a type. */
static value *end_of(value *v, dtype type) {
    while (value_is_private(v)) {
        const node *user = v->uses->user;
        const bool widens = node_is(user, "Cast") && v->type != type && user->out[0]->type == type;
        if (!widens && (!node_is(user, "Reshape") || v->uses->index != 0)) break;
        v = user->out[0];
    }
    return v->type == type ? v : NULL;
}

/* Every reader of `v` stands behind `n`. */
static bool is_read_behind(const value *v, const node *n) {
    for (const use *u = v->uses; u; u = u->next)
        if (!node_is_before(n, u->user)) return false;
    return true;
}

/* With dy, of whose rows the totals are wanted, as the operand `side`. */
static status fuse_totals(graph *g, node *n, int side, bool *done) {
    value *rows = side == 0 ? (is_transposed(n->in[0]) ? n->in[0]->def->in[0] : NULL) : n->in[1];
    value *out[2] = {NULL, NULL}, *end, *totals;
    const bool wide = n->out[0]->type != n->in[0]->type;
    node *sum = NULL;

    *done = false;
    if (!rows || rows->shape.rank != 2) return OK;
    TRY(find_totals(g, rows, n, &sum));
    if (!sum) TRY(find_totals_beside(g, rows, n, &sum));
    if (!sum) return OK;
    end = end_of(sum->out[0], n->out[0]->type);
    if (!end || !is_read_behind(end, n)) return OK;
    pass_emits(g, n, n);
    TRY(graph_emit(g, "MatMulTotals", NODE_ATTRS(INT("right", side), INT("wide", wide)), 2, n->in, 2, out));
    TRY(emit_reshape(g, out[1], &end->shape, &totals));
    TRY(graph_replace(g, end, totals));
    TRY(graph_replace(g, n->out[0], out[0]));
    *done = true;
    return OK;
}

static status fuse_weight_gradient(graph *g, node *n, int *fired) {
    bool done;

    if (!is_product(n->out[0]) || node_in(n, 2) || product_alpha(n) != 1) return OK;
    if (n->in[0]->shape.rank != 2 || n->in[1]->shape.rank != 2) return OK;
    TRY(fuse_totals(g, n, 0, &done));
    if (!done) TRY(fuse_totals(g, n, 1, &done));
    *fired += done;
    return OK;
}

/* --- the pass ----------------------------------------------------------------------------------------------------- */

static status visit(graph *g, node *n, int *fired) {
    if (!n->n_out || !n->out[0] || !value_is_read(n->out[0])) return OK;
    if (value_is(n->out[0], "GeluTanh")) return fuse_gelu(g, n, fired);
    if (value_is(n->out[0], "GeluTanhGrad")) return fuse_gelu_grad(g, n, fired);
    return fuse_weight_gradient(g, n, fired);
}

static status run(graph *g, int *fired) { return pass_rewrite_each(g, visit, fired); }

const pass_def product_epilogue = {.name = "product_epilogue", .stage = LAST, .device = FOR_GPUS, .run = run};
