/* gradient_sum.c -- gradients that meet in one value, the second added in the memory of the first:
 *
 *     c + a b                  ->  MatMulAdd(c, a, b)
 *     c + GatherGrad(dy, i)    ->  GatherGradAdd(c, dy, i)
 *     Transpose(a) + Transpose(b)  ->  Transpose(a + b)
 *
 * Where a value has several readers, as the input of query, key and value has, its gradient is a sum. The product that
 * comes second adds to what the first has made: one buffer and a sweep over three less. So do the few rows of a table of
 * words that a batch has read, where the table is the weight of the last layer, too. Where a chain of pointwise
 * operators reads the sum, it reads the addends instead (pointwise_fusion), which is faster still. The gradients of a
 * weight that a loop multiplies by at each step come transposed: they are added as they are, and the sum is transposed.
 *
 * On the CPU float32 and float64: sums of 16 bits are rounded to them one by one, as in PyTorch. On a GPU the product's
 * library adds what it has in float32 to c, whose other readers do not matter (it is not copied), and rounds once: so 16
 * bits too, and products of 16 bits that stay wide. Its rows it adds nowhere. */
#include "passes/pipeline.h"

#include "graph/emit.h"
#include "ops/queries.h"

#include <string.h>

/* A product, or rows, of backward that only the sum sees. */
static bool is_addend(const graph *g, const value *v) {
    if (!v->def || !v->def->backward || !value_is_private(v)) return false;
    if (!product_is(v->def)) return !g->cuda && node_is(v->def, "GatherGrad");
    return !node_in(v->def, 2) && (g->cuda || v->def->in[0]->type == v->type);
}

/* Memory that no other node reads, and that is there when `addend` runs. */
static bool may_take(const graph *g, const value *c, const value *addend) {
    if (!c->def || !c->def->op || !c->def->backward || c->def->op->view) return false;
    if (!g->cuda && !value_is_private(c)) return false;
    return c != addend && node_is_before(c->def, addend->def) && shape_equal(&c->shape, &addend->shape);
}

static bool is_sum(const node *n) { return n->backward && node_is(n, "Add"); }

static bool is_of_type(const graph *g, const value *v) {
    return g->cuda ? dtype_is_float(v->type) : v->type == F32 || v->type == F64;
}

/* What a node's mark says of the chain of additions that it is in. */
enum { UNKNOWN, READ_BY_A_CHAIN, READ_OTHERWISE };

static node *next_sum(const node *sum) {
    return sum->out[0]->n_uses == 1 && is_sum(sum->out[0]->uses->user) ? sum->out[0]->uses->user : NULL;
}

/* Widened for the gradient of a norm alone, which reads it as it is (norm_residual). */
static bool goes_to_a_norm(const value *v) {
    const node *n = value_is_private(v) ? v->uses->user : NULL;

    while (n && (node_is(n, "Cast") || node_is(n, "Reshape")) && value_is_private(n->out[0])) {
        v = n->out[0];
        n = v->uses->user;
    }
    return n && (node_is(n, "LayerNormGrad") || node_is(n, "RMSNormGrad")) && n->in[0] == v;
}

static bool is_read_by_a_chain(const node *n) { return node_is_read_by_a_chain(n) && !goes_to_a_norm(n->out[0]); }

/* Behind the additions that follow, of which each is asked once: a sum of many terms is one long row of them. */
static bool ends_in_a_chain(node *sum) {
    node *last = sum;
    int found;

    for (node *next; last->mark == UNKNOWN && (next = next_sum(last)); last = next);
    found = last->mark != UNKNOWN ? last->mark : is_read_by_a_chain(last) ? READ_BY_A_CHAIN : READ_OTHERWISE;
    for (node *n = sum; n != last; n = next_sum(n)) n->mark = found;
    last->mark = found;
    return found == READ_BY_A_CHAIN;
}

static status emit_into(graph *g, value *c, const node *n, value **y) {
    if (node_is(n, "GatherGrad"))
        return emit_with(g, y, "GatherGradAdd",
                         NODE_ATTRS(INT("axis", node_int(n, "axis")), INT("padding_idx", node_int(n, "padding_idx"))),
                         c, n->in[0], n->in[1]);
    return emit_with(g, y, "MatMulAdd", NODE_ATTRS(FLOAT("alpha", product_alpha(n))), c, n->in[0], n->in[1]);
}

static status add_into(graph *g, const node *sum, value *c, const value *addend, int *fired) {
    value *y;

    pass_emits(g, addend->def, addend->def);
    TRY(emit_into(g, c, addend->def, &y));
    TRY(graph_replace(g, sum->out[0], y));
    ++*fired;
    return OK;
}

static status add_all(graph *g, int *fired) {
    for (node *n = g->first; n; n = n->next) n->mark = UNKNOWN;
    for (node *n = g->first, *next; n; n = next) {
        next = n->next;
        if (!is_sum(n) || !is_of_type(g, n->out[0]) || ends_in_a_chain(n)) continue;
        for (int i = 0; i < 2; i++) {
            value *addend = n->in[i], *c = n->in[1 - i];
            if (!is_addend(g, addend) || !may_take(g, c, addend)) continue;
            TRY(add_into(g, n, c, addend, fired));
            break;
        }
    }
    return OK;
}

/* What only a sum sees, transposed by `n`. */
static const node *transposed(const value *v) {
    const node *n = v->def;
    return n && n->backward && node_is(n, "Transpose") && value_is_private(v) ? n : NULL;
}

static status transpose_sum(graph *g, node *sum, int *fired) {
    const node *a = is_sum(sum) ? transposed(sum->in[0]) : NULL, *b = a ? transposed(sum->in[1]) : NULL;
    const int64_t *of_a, *of_b;
    value *y;
    int rank;

    if (!b || a == b || !shape_equal(&sum->in[0]->shape, &sum->in[1]->shape)) return OK;
    rank = node_ints(a, "perm", &of_a);
    if (rank < 0 || node_ints(b, "perm", &of_b) != rank || memcmp(of_a, of_b, (size_t)rank * sizeof *of_a) != 0)
        return OK;
    TRY(emit(g, &y, "Add", a->in[0], b->in[0]));
    TRY(emit_transpose_like(g, a, y, &y));
    TRY(graph_replace(g, sum->out[0], y));
    ++*fired;
    return OK;
}

static status run(graph *g, int *fired) {
    TRY(pass_rewrite_each(g, transpose_sum, fired));
    return pass_end(g, add_all(g, fired));
}

const pass_def gradient_sum = {.name = "gradient_sum", .stage = AFTER_GRADIENT, .run = run};
