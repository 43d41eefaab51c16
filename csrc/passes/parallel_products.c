/* parallel_products.c -- x a, x b, ...  ->  slices of x Concat(a, b, ...)
 *
 * for matrices of few columns: such a product takes as long as reading x does, which is then read once for all of them,
 * in forward and for the gradients of the matrices, and its own gradient is written once, not added up. So do adapters of
 * a low rank beside query, key and value, keys and values that several heads share, or small heads. Biases along the
 * last axis are joined, too.
 *
 * Forward and backward of two and three products apart, over the time of one, on a Xeon with AMX, two threads, float32
 * and bfloat16 under autocast, for x of
 *
 *     columns    256 x 768               1024 x 768              4096 x 768              4096 x 2048
 *     8          1.20 1.27   1.36 1.44   1.54 1.62   1.67 1.96   1.78 2.00   2.16 2.86   1.64 1.69   2.07 2.59
 *     32         0.98 1.10   1.15 1.26   1.01 1.25   1.42 1.76   1.14 1.37   1.85 2.08   1.16 1.42   1.86 2.07
 *     64         1.01 1.10   1.14 1.19   1.21 1.35   1.31 1.50   1.24 1.39   1.68 1.68   1.38 1.59   1.67 1.92
 *     128        0.98 1.05   0.97 1.12   1.03 1.05   1.18 1.26   1.10 1.12   1.29 1.34   1.20 1.26   1.39 1.52
 *     256        0.92 0.81   0.95 0.96   0.91 0.94   1.10 1.08   0.94 0.95   1.17 1.12   1.01 1.05   1.23 1.18
 *     512        0.90 0.89   0.96 0.92   0.90 0.93   0.97 0.95   0.94 0.95   1.04 1.01   0.98 1.01   1.05 1.00
 *
 * Wider ones stay apart: sums are then all there is, and joining the matrices costs a copy. Only CPUs have been
 * measured. */
#include "passes/pipeline.h"

#include "ops/queries.h"

/* The most products at once, and readers of x that are looked at for each. */
enum { MOST = 16, MOST_READERS = 32 };

/* The widest matrices for which that is faster, by so many rows of x. */
static int64_t widest(dtype t, int64_t rows) {
    const bool is_narrow = dtype_is_narrow(t);
    const int64_t most = is_narrow ? 256 : 128, by_rows = is_narrow ? rows / 4 : rows / 8;
    return rows < 256 ? 0 : by_rows < most ? by_rows : most;
}

static bool has_few_columns(const node *n) {
    const value *a, *b, *bias;
    int64_t width;

    if (!product_is(n)) return false;
    a = n->in[0];
    b = n->in[1];
    bias = node_in(n, 2);
    if (a->shape.rank < 2 || b->shape.rank != 2 || a == b || n->out[0]->type != a->type) return false;
    width = b->shape.dim[1];
    if (width == 0 || width > widest(a->type, shape_span(&a->shape, 0, a->shape.rank - 1))) return false;
    return !bias || (bias->shape.rank == 1 && bias->shape.dim[0] == width);
}

static bool are_alike(const node *n, const node *m) {
    const value *bias = node_in(n, 2), *other = node_in(m, 2);
    if (!has_few_columns(m) || m->in[0] != n->in[0] || m->in[1]->type != n->in[1]->type) return false;
    if (product_alpha(m) != product_alpha(n)) return false;
    return bias ? other && other->type == bias->type : !other;
}

/* Known so far, or the casts and transposes of what is: nodes so far are marked. */
static bool is_ready(const value *v) {
    const node *n = v ? v->def : NULL;
    return !n || n->mark || ((node_is(n, "Cast") || node_is(n, "Transpose")) && is_ready(n->in[0]));
}

static void make_ready(graph *g, const value *v, node *first) {
    node *n = v ? v->def : NULL;

    if (!n || n->mark) return;
    make_ready(g, n->in[0], first);
    graph_move(g, n, first);
    n->mark = true;
}

/* `first` and what follows and is like it; how many. */
static int find_parallel(node *first, node *found[MOST]) {
    int count = 0, looked_at = 0;

    found[count++] = first;
    for (const use *u = first->in[0]->uses; u && count < MOST && looked_at++ < MOST_READERS; u = u->next) {
        node *n = u->user;
        if (n == first || n->mark || !are_alike(first, n)) continue;
        if (is_ready(n->in[1]) && is_ready(node_in(n, 2))) found[count++] = n;
    }
    return count;
}

static status join(graph *g, int count, value *const *parts, int axis, value **out) {
    return graph_emit(g, "Concat", NODE_ATTRS(INT("axis", axis)), count, parts, 1, out);
}

/* Weights of linear layers come transposed: joined as they lie, rows behind rows. */
static status join_matrices(graph *g, node *const *of, int count, value **out) {
    value *parts[MOST];
    bool turned = true;

    for (int i = 0; i < count; i++) turned &= value_is(of[i]->in[1], "Transpose");
    for (int i = 0; i < count; i++) parts[i] = turned ? of[i]->in[1]->def->in[0] : of[i]->in[1];
    TRY(join(g, count, parts, turned ? 0 : 1, out));
    return turned ? emit_transpose(g, *out, (const int[]){1, 0}, out) : OK;
}

static status join_biases(graph *g, node *const *of, int count, value **out) {
    value *parts[MOST];

    *out = NULL;
    if (!node_in(of[0], 2)) return OK;
    for (int i = 0; i < count; i++) parts[i] = of[i]->in[2];
    return join(g, count, parts, 0, out);
}

static status multiply(graph *g, node *const *of, int count) {
    const node *first = of[0];
    const int last = first->out[0]->shape.rank - 1;
    value *all, *bias, *y, *part;
    int64_t at = 0;

    for (int i = 1; i < count; i++) {
        make_ready(g, of[i]->in[1], of[0]);
        make_ready(g, node_in(of[i], 2), of[0]);
    }
    pass_emits(g, of[0], first);
    TRY(join_matrices(g, of, count, &all));
    TRY(join_biases(g, of, count, &bias));
    TRY(emit_with(g, &y, "MatMulBias", NODE_ATTRS(FLOAT("alpha", product_alpha(first))), first->in[0], all, bias));
    for (int i = 0; i < count; i++) {
        const int64_t width = of[i]->in[1]->shape.dim[1];
        TRY(emit_slice_axis(g, y, last, at, width, &part));
        TRY(graph_replace(g, of[i]->out[0], part));
        graph_set_operand(g, of[i], 0, NULL); /* it is found among the readers of x no more */
        of[i]->mark = true;
        at += width;
    }
    return OK;
}

static status run_all(graph *g, int *fired) {
    for (node *n = g->first; n; n = n->next) n->mark = false;
    for (node *n = g->first; n; n = n->next) {
        node *of[MOST];
        if (n->mark) continue;
        n->mark = true;
        if (!has_few_columns(n) || n->in[0]->n_uses < 2) continue;
        const int count = find_parallel(n, of);
        if (count < 2) continue;
        TRY(multiply(g, of, count));
        *fired += count - 1;
    }
    return OK;
}

static status run(graph *g, int *fired) { return pass_end(g, run_all(g, fired)); }

const pass_def parallel_products = {
    .name = "parallel_products", .stage = BEFORE_GRADIENT, .device = FOR_CPUS, .run = run};
