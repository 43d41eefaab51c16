/* packed_weights.c -- a matrix that many products multiply by is packed once for all of them:
 *
 *     x b, y b, ...  ->  p = Prepack(b);  x b with p, y b with p, ...
 *
 * as our own products read it, which pack it for themselves otherwise: the weights of layers that share them, and of
 * cells that run step by step. Forward and backward each have their own, since they read the matrix in other directions. */
#include "passes/pipeline.h"

#include "ops/queries.h"

#include <stdlib.h>

/* A copy takes as long as it saves one product or two. */
enum { LEAST = 4 };

static int64_t rows_of(const node *n) { return shape_span(&n->in[0]->shape, 0, n->in[0]->shape.rank - 1); }

/* A product by one matrix for all of its rows, which is not packed yet. */
static bool is_product(const node *n) {
    return product_is(n) && n->n_in < 4 && n->in[0]->shape.rank > 1 && n->in[1]->shape.rank == 2 &&
           n->in[0] != n->in[1];
}

/* Products that read the matrix alike are neighbours, in program order. */
static int compare(const void *a, const void *b) {
    const node *x = *(node *const *)a, *y = *(node *const *)b;
    const int64_t rows_x = rows_of(x), rows_y = rows_of(y);

    if (x->backward != y->backward) return x->backward - y->backward;
    if (x->in[0]->type != y->in[0]->type) return x->in[0]->type < y->in[0]->type ? -1 : 1;
    if (rows_x != rows_y) return rows_x < rows_y ? -1 : 1;
    return node_is_before(x, y) ? -1 : x != y;
}

static bool are_alike(const node *n, const node *m) {
    return n->backward == m->backward && n->in[0]->type == m->in[0]->type && rows_of(n) == rows_of(m);
}

/* All products by `matrix`, sorted. */
static status find_products(graph *g, const value *matrix, node ***found, int *count) {
    *count = 0;
    TRY(NEW(g->scratch, *found, matrix->n_uses));
    for (const use *u = matrix->uses; u; u = u->next)
        if (u->index == 1 && is_product(u->user) && value_is_read(u->user->out[0])) (*found)[(*count)++] = u->user;
    if (*count) qsort(*found, (size_t)*count, sizeof **found, compare);
    return OK;
}

static status read_packed(graph *g, node *n, value *packed) {
    value *in[] = {n->in[0], n->in[1], node_in(n, 2), packed}, *y;

    pass_emits(g, n->next, n);
    TRY(product_emit(g, n, 4, in, &y));
    return graph_replace(g, n->out[0], y);
}

/* Packs the matrix for products that read it alike, where there are enough of them. */
static status pack_for(graph *g, node *const *products, int count, int *fired) {
    value *packed;

    if (count < LEAST) return OK;
    pass_emits(g, products[0], products[0]);
    TRY(product_prepack(g, products[0], &packed));
    for (int i = 0; packed && i < count; i++) TRY(read_packed(g, products[i], packed));
    *fired += packed != NULL;
    return OK;
}

static status pack(graph *g, const value *matrix, int *fired) {
    node **products;
    int count;

    TRY(find_products(g, matrix, &products, &count));
    for (int first = 0, i = 1; i <= count; i++) {
        if (i < count && are_alike(products[first], products[i])) continue;
        TRY(pack_for(g, products + first, i - first, fired));
        first = i;
    }
    return OK;
}

static status run_all(graph *g, int *fired) {
    for (const node *n = g->first; n; n = n->next)
        if (is_product(n)) n->in[1]->mark = 0;
    for (node *n = g->first; n; n = n->next) {
        if (!is_product(n) || n->in[1]->n_uses < LEAST || n->in[1]->mark) continue;
        n->in[1]->mark = 1;
        TRY(pack(g, n->in[1], fired));
    }
    return OK;
}

static status run(graph *g, int *fired) { return pass_end(g, run_all(g, fired)); }

const pass_def packed_weights = {.name = "packed_weights", .stage = LAST, .device = FOR_CPUS, .run = run};
