/* wide_operands.c -- a product that reads weights in float32, and rounds them to 16 bits on its way:
 *
 *     w' = Cast(w);  a w'  ->  a w          and by a transpose of w'
 *
 * Under autocast every weight is cast once a step, written, and read by one product of forward and one of backward. Our
 * own products pack an operand before they multiply; that they round it meanwhile costs a quarter of what the cast
 * does, and the copy is not there. What more products read than MOST is cast once, and so is what others read, too.
 * Only where the CPU has a kernel that rounds (product_rounds). */
#include "passes/pipeline.h"

#include "ops/queries.h"

enum { MOST = 3 };

static const value *unturned(const value *v) {
    while (v->def && node_is(v->def, "Transpose")) v = v->def->in[0];
    return v;
}

/* Of 16-bit operands one stays, which says what is multiplied: so they may not be the same weight, turned or not. */
static bool is_product_by(const use *u, dtype narrow) {
    const node *n = u->user;

    return u->index < 2 && product_is(n) && unturned(n->in[0]) != unturned(n->in[1]) &&
           n->in[1 - u->index]->type == narrow;
}

/* How many products read `v`; more than MOST where others do. */
static int products_of(const graph *g, const value *v) {
    int n = 0;

    if (value_is_end(v)) return MOST + 1;
    for (const use *u = v->uses; u && n <= MOST; u = u->next) {
        if (node_is(u->user, "Transpose")) n += products_of(g, u->user->out[0]);
        else n += is_product_by(u, v->type) ? 1 : MOST + 1;
    }
    return n;
}

static status multiply(graph *g, const node *n, int side, value *wide) {
    value *in[] = {n->in[0], n->in[1], node_in(n, 2)}, *y;

    in[side] = wide;
    pass_emits(g, n->next, n);
    TRY(product_emit(g, n, n->n_in, in, &y));
    return graph_replace(g, n->out[0], y);
}

/* What reads `narrow` reads `wide`. */
static status read_wide(graph *g, const value *narrow, value *wide) {
    for (const use *u = narrow->uses; u; u = u->next) {
        value *turned;
        if (!node_is(u->user, "Transpose")) {
            TRY(multiply(g, u->user, u->index, wide));
            continue;
        }
        pass_emits(g, u->user->next, u->user);
        TRY(emit_transpose_like(g, u->user, wide, &turned));
        TRY(read_wide(g, u->user->out[0], turned));
    }
    return OK;
}

static bool is_weight(const value *v) { return !v->def && !value_is_constant(v) && v->type == F32; }

static status run_all(graph *g, int *fired) {
    for (node *n = g->first; n; n = n->next) {
        if (!node_is(n, "Cast") || !is_weight(n->in[0]) || !product_rounds(n->out[0]->type)) continue;
        const int count = products_of(g, n->out[0]);
        if (count == 0 || count > MOST) continue;
        TRY(read_wide(g, n->out[0], n->in[0]));
        ++*fired;
    }
    return OK;
}

static status run(graph *g, int *fired) { return pass_end(g, run_all(g, fired)); }

const pass_def wide_operands = {.name = "wide_operands", .stage = LAST, .device = FOR_CPUS, .run = run};
