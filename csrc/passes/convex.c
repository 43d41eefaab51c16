/* convex.c -- walks over the nodes from a group's first member to its last. */
#include "passes/convex.h"

#include "ops/op.h"
#include "passes/match.h"

/* What a walk finds about a node, added to twice its number. */
enum { MEMBER = 0, DEPENDENT = 1 };

status convex_begin(graph *g, value *(*source)(value *v), convex *out) {
    *out = (convex){.n_seen = 2 * g->n_nodes, .source = source};
    return NEW(g->scratch, out->seen, out->n_seen);
}

static int found(const convex *w, const node *n) { return n->id < w->n_seen ? w->seen[n->id] - 2 * w->walk : -1; }
static void set_found(convex *w, const node *n, int what) { w->seen[n->id] = 2 * w->walk + what; }

bool convex_has(node *const *members, int count, const node *n) {
    for (int i = 0; i < count; i++)
        if (members[i] == n) return true;
    return false;
}

void convex_sort(node **members, int count, node *first) {
    int sorted = 0;

    for (node *n = first; sorted < count; n = n->next)
        for (int i = sorted; i < count; i++) {
            if (members[i] != n) continue;
            members[i] = members[sorted];
            members[sorted++] = n;
        }
}

static bool depends(const convex *w, const node *n) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && n->in[i]->def && found(w, n->in[i]->def) >= MEMBER) return true;
    return false;
}

static bool depends_through_others(const convex *w, const node *n) {
    for (int i = 0; i < n->n_in; i++) {
        const value *v = n->in[i] && w->source ? w->source(n->in[i]) : n->in[i];
        if (v && v->def && found(w, v->def) == DEPENDENT) return true;
    }
    return false;
}

bool node_is_seen(const node *n) { return n->op->flags & EFFECT || node_is(n, "HostGrad"); }

bool convex_holds(convex *w, node *const *members, int count, const node *first, const node *last) {
    bool moves = false; /* one that is seen, behind what follows */

    w->walk++;
    for (const node *n = first;; n = n->next) {
        const bool member = convex_has(members, count, n);
        if (member && depends_through_others(w, n)) return false;
        if (member) set_found(w, n, MEMBER);
        else if (node_is_live(n) && depends(w, n)) {
            set_found(w, n, DEPENDENT);
            moves = moves || node_is_seen(n);
        } else if (moves && node_is_live(n) && node_is_seen(n)) return false;
        if (n == last) return true;
    }
}

void convex_clear(convex *w, graph *g, node *const *members, int count, node *first, node *last) {
    node *const behind = last->next;

    for (node *n = first, *next; n != behind; n = next) {
        next = n->next;
        if (node_is_live(n) && !convex_has(members, count, n) && found(w, n) == DEPENDENT) graph_move(g, n, behind);
        if (n == last) break;
    }
}
