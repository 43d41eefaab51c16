/* order.c -- which nodes run before forward returns, and which wait for backward. */
#include "plan/plan.h"

enum { UNUSED, IN_BACKWARD, IN_FORWARD };

static void want(value *const *list, int count, int mark) {
    for (int i = 0; list && i < count; i++)
        if (list[i] && list[i]->def && list[i]->def->mark < mark) list[i]->def->mark = mark;
}

status order_make(graph *g, const layout *where, const node ***out, int *count, int *n_forward) {
    const node **order;
    int total = 0, used = 0;

    for (node *n = g->first; n; n = n->next, total++) n->mark = n->op->flags & EFFECT ? IN_FORWARD : UNUSED;
    want(g->outputs, g->n_outputs, IN_FORWARD);
    for (state_write *w = g->writes; w; w = w->next) want(&w->value, 1, IN_FORWARD);
    want(g->input_grads, g->n_input_grads, IN_BACKWARD);
    /* Backwards over a topological order: a node's mark is final when it is reached. */
    for (node *n = g->last; n; n = n->prev) want(n->in, n->n_in, n->mark);

    TRY(NEW(g->c, order, total));
    for (int part = IN_FORWARD; part >= IN_BACKWARD; part--) {
        for (const node *n = g->first; n; n = n->next)
            if (n->mark == part && (!n->op->view || where[n->out[0]->id].root == n->out[0])) order[used++] = n;
        if (part == IN_FORWARD) *n_forward = used;
    }
    *out = order;
    *count = used;
    return OK;
}
