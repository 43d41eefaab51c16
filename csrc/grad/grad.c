/* grad.c -- drives the building of gradients.
 *
 * Walks the program backwards. An operator's rule states the maths; only here are contributions added up, broadcast
 * dimensions summed away and types cast back. Nothing is computed for values that need no gradient, because rules ask
 * need() and nodes without an arriving gradient are skipped. */
#include "grad/grad.h"

#include "ops/op.h"

typedef struct driver {
    graph *g;
    value **total; /* [value id] the gradient so far */
    int n_total;
} driver;

static status accumulate(driver *d, const value *v, value *dx) {
    graph *g = d->g;
    value **total = &d->total[v->id];

    TRY(sum_to(g, dx, &v->shape, &dx));
    TRY(emit_cast(g, dx, v->type, &dx));
    if (!*total) {
        *total = dx;
        return OK;
    }
    return emit(g, total, "Add", *total, dx);
}

static status differentiate(driver *d, const node *n, value **dy, value **dx) {
    bool arriving = false, needed = false;

    for (int i = 0; i < n->n_out; i++) {
        dy[i] = n->out[i] && n->out[i]->needs_grad ? d->total[n->out[i]->id] : NULL;
        arriving |= dy[i] != NULL;
    }
    for (int i = 0; i < n->n_in; i++) {
        dx[i] = NULL;
        needed |= need(n, i);
    }
    if (!arriving || !needed) return OK;
    if (!n->op->grad)
        return fail(d->g->c, E_UNSUPPORTED, "%s (%s) has no gradient", n->op->name, n->name ? n->name : "-");
    d->g->emit_name = n->name;
    TRY_AT(d->g->c, n->op->grad(d->g, n, dy, dx), "differentiating %s (%s)", n->op->name, n->name ? n->name : "-");
    for (int i = 0; i < n->n_in; i++)
        if (dx[i] && need(n, i)) TRY(accumulate(d, n->in[i], dx[i]));
    return OK;
}

static status seed_outputs(driver *d, const bool *output_grads) {
    graph *g = d->g;

    TRY(NEW(g->c, g->output_grads, g->n_outputs ? g->n_outputs : 1));
    for (int i = 0; i < g->n_outputs; i++) {
        value *v = g->outputs[i], *dy;
        if (!output_grads[i] || !v->needs_grad) continue;
        TRY(graph_add_input(g, NULL, v->type, &v->shape, &dy));
        g->output_grads[i] = dy;
        TRY(accumulate(d, v, dy));
    }
    return OK;
}

status grad_build(graph *g, const bool *output_grads) {
    driver d = {.g = g, .n_total = g->n_values};
    node *last = g->last;
    value **dy, **dx;
    int widest = 1;

    for (const node *n = g->first; n; n = n->next) {
        if (n->n_in > widest) widest = n->n_in;
        if (n->n_out > widest) widest = n->n_out;
    }
    TRY(NEW(g->c, dy, widest));
    TRY(NEW(g->c, dx, widest));
    TRY(NEW(g->c, d.total, d.n_total));
    g->n_input_grads = g->n_inputs;
    TRY(NEW(g->c, g->input_grads, g->n_input_grads ? g->n_input_grads : 1));

    g->in_backward = true;
    TRY(seed_outputs(&d, output_grads));
    for (node *n = last; n; n = n->prev) TRY(differentiate(&d, n, dy, dx));
    g->emit_name = NULL;
    g->in_backward = false;
    for (int i = 0; i < g->n_input_grads; i++)
        if (g->inputs[i]->needs_grad) TRY(graph_set_end(g, &g->input_grads[i], d.total[g->inputs[i]->id]));
    return OK;
}
