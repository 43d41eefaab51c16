/* rewrite.c -- where in a graph a pass emits, and the walk over nodes that a pass rewrites one by one. */
#include "passes/pipeline.h"

void pass_emits(graph *g, node *before, const node *n) {
    g->before = before;
    g->emit_name = n->name;
    g->in_backward = n->backward;
}

status pass_end(graph *g, status s) {
    g->before = NULL;
    g->emit_name = NULL;
    g->in_backward = false;
    if (s == OK) graph_remove_dead(g);
    return s;
}

status pass_rewrite_each(graph *g, node_rewrite *rewrite, int *fired) {
    status s = OK;

    for (node *n = g->first; n && s == OK; n = n->next) {
        if (!node_is_read(n)) continue;
        pass_emits(g, n, n);
        s = rewrite(g, n, fired);
    }
    return pass_end(g, s);
}
