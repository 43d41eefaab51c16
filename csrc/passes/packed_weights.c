/* packed_weights.c -- a matrix that many products multiply by is laid out once for all of them:
 *
 *     x b, y b, ...  ->  p = LaidOut(b);  x b with p, y b with p, ...
 *
 * as our own products read it, which lay it out for themselves otherwise: the weights of layers that share them, and of
 * cells that run step by step. Forward and backward each have their own, since they read the matrix in other directions. */
#include "passes/pipeline.h"

#include "ops/op.h"

/* A copy takes as long as it saves one product or two. */
enum { LEAST = 4 };

static int64_t rows_of(const node *n) { return shape_span(&n->in[0]->shape, 0, n->in[0]->shape.rank - 1); }

/* A product by one matrix for all of its rows, which is not laid out yet. */
static bool is_product(const node *n) {
    return product_is(n) && n->n_in < 4 && n->in[0]->shape.rank > 1 && n->in[1]->shape.rank == 2 &&
           n->in[0] != n->in[1];
}

static bool are_alike(const node *n, const node *m) {
    return is_product(m) && m->in[1] == n->in[1] && m->backward == n->backward && m->in[0]->type == n->in[0]->type &&
           rows_of(m) == rows_of(n);
}

/* Those that multiply by what `n`, the first of them, does. */
static status find_products(graph *g, node *n, node ***found, int *count) {
    *count = 0;
    TRY(NEW(g->c, *found, n->in[1]->n_uses));
    for (const use *u = n->in[1]->uses; u; u = u->next)
        if (u->index == 1 && are_alike(n, u->user)) (*found)[(*count)++] = u->user;
    return OK;
}

static status read_laid_out(graph *g, node *n, value *laid) {
    value *in[] = {n->in[0], n->in[1], node_in(n, 2), laid}, *y;

    pass_emits(g, n->next, n);
    TRY(product_emit(g, n, 4, in, &y));
    return graph_replace(g, n->out[0], y);
}

static status run_all(graph *g, int *fired) {
    for (node *n = g->first; n; n = n->next) {
        node **products;
        value *laid;
        int count;
        if (!is_product(n) || n->in[1]->n_uses < LEAST || !value_is_read(g, n->out[0])) continue;
        TRY(find_products(g, n, &products, &count));
        if (count < LEAST) continue;
        pass_emits(g, n, n);
        TRY(product_lay_out(g, n, &laid));
        for (int i = 0; laid && i < count; i++) TRY(read_laid_out(g, products[i], laid));
        *fired += laid != NULL;
    }
    return OK;
}

static status run(graph *g, int *fired) { return pass_end(g, run_all(g, fired)); }

const pass_def packed_weights = {.name = "packed_weights", .stage = LAST, .level = 1, .device = FOR_CPUS, .run = run};
