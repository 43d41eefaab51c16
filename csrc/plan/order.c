/* order.c -- which nodes run before forward returns, and which wait for backward. */
#include "plan/plan.h"

status order_make(graph *g, const layout *where, const node ***out, int *count, int *n_forward) {
    const node **order;
    int total = 0, used = 0;

    graph_mark_parts(g);
    for (const node *n = g->first; n; n = n->next) total++;
    TRY(NEW(g->c, order, total));
    for (int part = PART_FORWARD; part >= PART_BACKWARD; part--) {
        for (const node *n = g->first; n; n = n->next)
            if (n->mark == part && (!n->op->view || where[n->out[0]->id].root == n->out[0])) order[used++] = n;
        if (part == PART_FORWARD) *n_forward = used;
    }
    *out = order;
    *count = used;
    return OK;
}
