/* common.c -- infers the usual shapes, which families share. */
#include "ops/op.h"

status require(graph *g, const node *n, int i) {
    return node_in(n, i) ? OK : fail(g->c, E_INVALID, "operand %d of %s is missing", i, n->op->name);
}

status set_out(graph *g, node *n, int i, dtype type, const shape *s) {
    if (i >= n->n_out || !n->out[i]) return OK;
    n->out[i]->type = type;
    n->out[i]->shape = *s;
    return shape_check(g->c, s);
}

status same_types(graph *g, const node *n, int first) {
    const value *a = NULL;
    for (int i = first; i < n->n_in; i++) {
        const value *b = n->in[i];
        if (a && b && a->type != b->type)
            return fail(g->c, E_TYPE, "operands of %s have different types, %s and %s", n->op->name,
                        dtype_name(a->type), dtype_name(b->type));
        if (!a) a = b;
    }
    return OK;
}

status infer_same(graph *g, node *n) {
    TRY(require(g, n, 0));
    return set_out(g, n, 0, n->in[0]->type, &n->in[0]->shape);
}

status infer_broadcast(graph *g, node *n) {
    shape s = SCALAR;

    TRY(require(g, n, 0));
    TRY(same_types(g, n, 0));
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i]) TRY(shape_broadcast(g->c, &s, &n->in[i]->shape, &s));
    return set_out(g, n, 0, n->in[0]->type, &s);
}
