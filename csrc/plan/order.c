/* order.c -- says which nodes run before forward returns, and which wait for backward. */
#include "plan/plan.h"

status order_make(graph *g, const layout *where, const node ***out, int *count, int *n_forward) {
    const node **order;
    int total = 0, used = 0;

    graph_mark_phases(g);
    for (const node *n = g->first; n; n = n->next) total++;
    TRY(NEW(g->c, order, total));
    for (int phase = PHASE_FORWARD; phase >= PHASE_BACKWARD; phase--) {
        for (const node *n = g->first; n; n = n->next)
            if (n->mark == phase && (!n->op->view || where[n->out[0]->id].root == n->out[0])) order[used++] = n;
        if (phase == PHASE_FORWARD) *n_forward = used;
    }
    *out = order;
    *count = used;
    return OK;
}
