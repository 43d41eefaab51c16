/* embedding_norm.c -- the embeddings that a model begins with, their sum and its norm as one operator:
 *
 *   s = Gather(words, i) + Gather(types, j) + positions, LayerNormalization(s)  ->  EmbeddingNorm: the norm's results, s
 *
 * An addend is rows of a table that an index selects, or rows as they lie; one at least is of the first kind. Where it
 * has fewer rows than the sum (positions are the same for each sequence), those of its last axes repeat. No other node
 * reads an addend that was selected, or a part of the sum; the sum itself may be read, as the norm's gradient does. */
#include "passes/pipeline.h"

#include "ops/queries.h"

typedef struct addends {
    value *in[EMBEDDING_ADDENDS + 2 * EMBEDDING_TABLES];
    int count;
    int64_t from_end; /* a bit of each */
    bool selects;
} addends;

static bool is_selection(const value *v) {
    return v->def && node_looks_up_rows(v->def) && v->def->in[0]->shape.rank == 2 && value_is_private(v);
}

/* Are rows of `v` those of `sum`, or those of its last axes again and again? */
static bool rows_repeat(const shape *v, const shape *sum) {
    const int missing = sum->rank - v->rank;
    int first = 0;

    if (missing < 0 || v->rank < 1) return false;
    while (first < v->rank - 1 && v->dim[first] == 1) first++;
    for (int i = first; i < v->rank; i++)
        if (v->dim[i] != sum->dim[i + missing]) return false;
    return true;
}

/* Rows as they lie had better not be the result of a chain of pointwise operators, which can add the others itself. */
static bool read_addend(value *v, const value *sum, addends *a) {
    const bool selects = is_selection(v);

    if (a->count == EMBEDDING_TABLES || v->type != sum->type || !rows_repeat(&v->shape, &sum->shape)) return false;
    if (!selects && v->def && v->def->op && fused_holds(v->def) && value_is_private(v)) return false;
    a->in[EMBEDDING_ADDENDS + 2 * a->count] = selects ? v->def->in[0] : v;
    a->in[EMBEDDING_ADDENDS + 2 * a->count + 1] = selects ? v->def->in[1] : NULL;
    if (selects && node_int(v->def, "from_end")) a->from_end |= (int64_t)1 << a->count;
    a->count++;
    a->selects |= selects;
    return true;
}

/* In the order in which they are added: what is a sum itself comes first. */
static bool read_sum(const graph *g, const value *v, const value *sum, addends *a) {
    value *const *in = v->def->in;
    const int deep = value_is(in[1], "Add") && value_is_private(in[1]) ? 1 : 0;
    const bool is_sum = value_is(in[deep], "Add") && value_is_private(in[deep]);

    return (is_sum ? read_sum(g, in[deep], sum, a) : read_addend(in[deep], sum, a)) &&
           read_addend(in[1 - deep], sum, a);
}

enum { Y, MEANS, INVERSES, SUM, RESULTS };

static status fuse(graph *g, node *n, int *fired) {
    value *s = n->in[0], *out[RESULTS] = {NULL};
    addends a = {.in = {n->in[1], node_in(n, 2)}};

    if (!node_is_along_last_axis(n) || !value_is(s, "Add") || s->def->backward != n->backward) return OK;
    if (!read_sum(g, s, s, &a) || !a.selects) return OK;
    node *before = value_first_reader(s);
    if (!value_is_before(a.in[EMBEDDING_SCALE], before) || !value_is_before(a.in[EMBEDDING_BIAS], before)) return OK;
    pass_emits(g, before, n);
    TRY(graph_emit(g, "EmbeddingNorm",
                   NODE_ATTRS(INTS("shape", s->shape.rank, s->shape.dim), FLOAT("epsilon", node_float(n, "epsilon")),
                              INT("from_end", a.from_end)),
                   EMBEDDING_ADDENDS + 2 * a.count, a.in, RESULTS, out));
    TRY(graph_replace(g, s, out[SUM]));
    TRY(graph_replace(g, n->out[0], out[Y]));
    for (int i = 1; i < n->n_out; i++)
        if (n->out[i]) TRY(graph_replace(g, n->out[i], out[i]));
    ++*fired;
    return OK;
}

static status visit(graph *g, node *n, int *fired) {
    return node_is(n, "LayerNormalization") && value_is_read(n->out[0]) ? fuse(g, n, fired) : OK;
}

static status run(graph *g, int *fired) { return pass_rewrite_each(g, visit, fired); }

const pass_def embedding_norm = {.name = "embedding_norm", .stage = LAST, .device = FOR_CPUS, .run = run};
