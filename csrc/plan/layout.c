/* layout.c -- views, and the copies that are left.
 *
 * Reshape, Transpose, Slice, Expand and their like cost nothing when their reader takes strides. A reader that does
 * not gets one contiguous copy, shared by all readers of that value. What a kernel trusts (`owned` of its record) is read
 * from memory that only the engine writes: what the caller gave is copied, and so is what the caller gets. */
#include "plan/plan.h"

tensor layout_tensor(const value *v, const layout *where) {
    tensor t = {.type = v->type, .shape = v->shape};
    for (int i = 0; i < v->shape.rank; i++) t.stride[i] = where[v->id].stride[i];
    return t;
}

static void place_alone(const value *v, layout *where) {
    where[v->id].root = (value *)(uintptr_t)v;
    where[v->id].offset = 0;
    stride_contiguous(&v->shape, where[v->id].stride);
}

/* `v` in memory of its own, as a node before g->before. */
static status emit_copy(graph *g, value *v, layout *where, value **out) {
    const op_def *op = op_find(ORT_DOMAIN, "Contiguous", 0);
    node *n;

    TRY(graph_make_node(g, op, v->def ? v->def->name : NULL, NULL, 1, &v, 1, &n));
    TRY(op->infer(g, n));
    graph_insert_node(g, n);
    n->out[0]->needs_grad = v->needs_grad;
    place_alone(n->out[0], where);
    *out = n->out[0];
    return OK;
}

/* `viewed`: whether the result is a view of the first operand. */
static status place_results(graph *g, const node *n, layout *where, bool *viewed) {
    bool possible = false;
    int64_t offset = 0;
    tensor in, out;

    *viewed = false;

    for (int i = 0; i < n->n_out; i++) place_alone(n->out[i], where);
    if (!n->op->view) return OK;
    in = layout_tensor(n->in[0], where);
    out = (tensor){.type = n->out[0]->type, .shape = n->out[0]->shape};
    TRY(n->op->view(g->c, n, &in, &out, &offset, &possible));
    if (!possible) return OK;
    layout *l = &where[n->out[0]->id];
    l->root = where[n->in[0]->id].root;
    l->offset = where[n->in[0]->id].offset + offset;
    /* Along axes of one element a view may have any stride; kernels divide by those of contiguous operands. */
    if (tensor_contiguous(&out)) stride_contiguous(&out.shape, out.stride);
    for (int i = 0; i < out.shape.rank; i++) l->stride[i] = out.stride[i];
    *viewed = true;
    return OK;
}

/* Operand i of `n` becomes its contiguous copy. */
static status read_copy(graph *g, node *n, int i, layout *where, value **copies) {
    value *v = n->in[i];

    if (!copies[v->id]) {
        g->before = n;
        g->in_backward = n->backward;
        TRY(emit_copy(g, v, where, &copies[v->id]));
    }
    graph_set_operand(g, n, i, copies[v->id]);
    return OK;
}

/* The same, unless it is contiguous already. */
static status straighten(graph *g, node *n, int i, layout *where, value **copies, bool *changed) {
    tensor t = layout_tensor(n->in[i], where);

    *changed = !tensor_contiguous(&t);
    return *changed ? read_copy(g, n, i, where, copies) : OK;
}

/* Operand i of `n`, which its kernel trusts, is read where only the engine writes: owned[root id]. */
static status keep_owned(graph *g, node *n, int i, layout *where, value **copies, bool *owned) {
    if (where[n->in[i]->id].root->input >= 0) TRY(read_copy(g, n, i, where, copies));
    owned[where[n->in[i]->id].root->id] = true;
    return OK;
}

/* `v` is all of its root's memory in another shape, and what forward computes is no result of backward. */
static bool is_whole(const value *v, const layout *where, bool backward) {
    const value *root = where[v->id].root;
    const tensor t = layout_tensor(v, where);

    if (root == v || !root->def || root->input >= 0 || root->data || root->mark) return false;
    return root->def->backward == backward && where[v->id].offset == 0 && root->type == v->type &&
           shape_count(&root->shape) == shape_count(&v->shape) && tensor_contiguous(&t);
}

/* Results that leave the engine must own their memory, each its own: it may be that of their root. */
static status own_result(graph *g, value **slot, layout *where, const bool *owned, bool backward) {
    value *v = *slot;

    if (!v) return OK;
    if (v->data) place_alone(v, where);
    if (is_whole(v, where, backward) && !owned[where[v->id].root->id]) {
        where[v->id].root->mark = 1;
        return OK;
    }
    if (v->input >= 0 || v->data || where[v->id].root != v || v->mark || owned[v->id]) {
        value *copy;
        g->in_backward = v->def && v->def->backward;
        g->before = backward && v->def ? v->def->next : NULL; /* at once: the gradient may be handed over early */
        TRY(emit_copy(g, v, where, &copy));
        g->before = NULL;
        TRY(graph_set_end(g, slot, copy));
        v = copy;
    }
    v->mark = 1;
    return OK;
}

/* Of all nodes, in program order; copies[value id]: its contiguous copy. */
static status place_nodes(graph *g, layout *where, value **copies, bool *owned) {
    for (node *n = g->first; n; n = n->next) {
        bool changed, viewed;
        for (int i = 0; i < n->n_in; i++) {
            if (!n->in[i]) continue;
            if (n->in[i]->data) place_alone(n->in[i], where);
            if (n->op->owned & OPERAND(i) && dtype_is_int(n->in[i]->type))
                TRY(keep_owned(g, n, i, where, copies, owned));
            if (n->op->flags & STRIDED || n->op->view) continue;
            TRY(straighten(g, n, i, where, copies, &changed));
        }
        TRY(place_results(g, n, where, &viewed));
        if (!n->op->view || viewed) continue;
        /* A Reshape, say, of a transposed value: another one shares the copy. */
        TRY(straighten(g, n, 0, where, copies, &changed));
        if (changed) TRY(place_results(g, n, where, &viewed));
    }
    g->before = NULL;
    return OK;
}

static status own_results(graph *g, layout *where, const bool *owned) {
    for (const node *n = g->first; n; n = n->next)
        for (int i = 0; i < n->n_out; i++) n->out[i]->mark = 0;
    for (int i = 0; i < g->n_inputs; i++) g->inputs[i]->mark = 0;
    for (int i = 0; i < g->n_outputs; i++) TRY(own_result(g, &g->outputs[i], where, owned, false));
    for (state_write *w = g->writes; w; w = w->next) TRY(own_result(g, &w->value, where, owned, false));
    for (int i = 0; i < g->n_input_grads; i++) TRY(own_result(g, &g->input_grads[i], where, owned, true));
    g->in_backward = false;
    return OK;
}

status layout_make(graph *g, layout **out) {
    value **copies;
    bool *owned; /* [root id] a kernel trusts what is there */
    int known = g->n_values, room = known + g->n_outputs + g->n_input_grads;

    for (const node *n = g->first; n; n = n->next) room += n->n_in;
    for (const state_write *w = g->writes; w; w = w->next) room++;
    TRY(NEW(g->c, *out, room));
    TRY(NEW(g->c, copies, known));
    TRY(NEW(g->c, owned, room));
    for (int i = 0; i < g->n_inputs; i++) place_alone(g->inputs[i], *out);
    TRY(place_nodes(g, *out, copies, owned));
    return own_results(g, *out, owned);
}
