/* verify.c -- checks what must be true of every graph, after each stage and pass in test builds.
 *
 * Structure first (each value has one place it comes from, order is topological, uses and operands say the same), then,
 * for specialised graphs, types and shapes: they must be what the operators infer from their operands. */
#include "ops/op.h"

#include <inttypes.h>

/* What has been seen while walking. */
typedef struct verifier {
    graph *g;
    const value **known;  /* [value id] the value, once it exists: inputs, constants, results of earlier nodes */
    const node **members; /* [node id] */
    int *n_operands;      /* [value id] operands that refer to it */
    int *n_ends;          /* [value id] places among the results that hold it */
    int *first_slot;      /* [node id] where its operands begin in `listed` */
    bool *listed;         /* [operand of the whole graph] it is in its value's list of uses */
} verifier;

/* "MatMul (/h.0/attn)" for messages. */
#define NODE_FORMAT "%s (%s)"
#define NODE_ARGS(n) (n)->op->name, (n)->name ? (n)->name : "-"

/* --- values ------------------------------------------------------------------------------------------------------- */

static status check_id(verifier *v, const value *x) {
    if (x->id < 0 || x->id >= v->g->n_values)
        return fail(v->g->c, E_INVALID, "value %d has no place among %d values", x->id, v->g->n_values);
    if (v->known[x->id] && v->known[x->id] != x) return fail(v->g->c, E_INVALID, "two values have the id %d", x->id);
    return OK;
}

static status check_typed(verifier *v, const value *x) {
    if (!v->g->specialised) return OK;
    if (x->type <= DT_NONE || x->type >= DTYPE_COUNT)
        return fail(v->g->c, E_INVALID, "value %%%d has no element type", x->id);
    return shape_check(v->g->c, &x->shape);
}

/* An operand, an output, a gradient: something that must exist by now. */
static status check_known(verifier *v, const value *x) {
    TRY(check_id(v, x));
    if (x->data) {
        if (x->def || x->input >= 0)
            return fail(v->g->c, E_INVALID, "constant %%%d is also an input or a result", x->id);
        v->known[x->id] = x;
        return check_typed(v, x);
    }
    if (!v->known[x->id]) return fail(v->g->c, E_INVALID, "value %%%d is used before it is computed", x->id);
    return OK;
}

static status check_inputs(verifier *v) {
    for (int i = 0; i < v->g->n_inputs; i++) {
        const value *x = v->g->inputs[i];
        TRY(check_id(v, x));
        if (x->input != i || x->def || x->data)
            return fail(v->g->c, E_INVALID, "input %d does not know that it is one", i);
        v->known[x->id] = x;
        TRY(check_typed(v, x));
    }
    return OK;
}

/* --- nodes -------------------------------------------------------------------------------------------------------- */

static status check_operands(verifier *v, const node *n) {
    for (int i = 0; i < n->n_in; i++) {
        const value *x = n->in[i];
        if (!x) continue;
        TRY(check_known(v, x));
        v->n_operands[x->id]++;
        if (!n->backward && x->def && x->def->backward)
            return fail(v->g->c, E_INVALID, "operand %d of a forward node comes from backward", i);
    }
    return OK;
}

static status check_results(verifier *v, const node *n) {
    for (int i = 0; i < n->n_out; i++) {
        const value *x = n->out[i];
        if (!x) continue;
        TRY(check_id(v, x));
        if (v->known[x->id]) return fail(v->g->c, E_INVALID, "value %%%d is computed twice", x->id);
        if (x->def != n || x->def_index != i || x->input >= 0 || x->data)
            return fail(v->g->c, E_INVALID, "result %d does not know where it comes from", i);
        v->known[x->id] = x;
    }
    return OK;
}

static status check_inferred(verifier *v, const node *n) {
    graph *g = v->g;
    node copy = *n;
    value *results;

    if (!n->op->infer) return fail(g->c, E_INVALID, "the operator has no inference: it should have been lowered");
    for (int i = 0; n->op->dtypes && i < n->n_in; i++) {
        if (!n->in[i]) continue;
        if (!(n->op->dtypes & SET(n->in[i]->type)))
            return fail(g->c, E_INVALID, "the operator is not defined for %s", dtype_name(n->in[i]->type));
        break;
    }
    TRY(NEW(g->c, results, n->n_out));
    TRY(NEW(g->c, copy.out, n->n_out));
    for (int i = 0; i < n->n_out; i++) {
        results[i] = (value){.def = &copy, .def_index = i, .input = -1, .shape = {.rank = -1}};
        if (n->out[i]) copy.out[i] = &results[i];
    }
    TRY(n->op->infer(g, &copy));
    for (int i = 0; i < n->n_out; i++) {
        char is[SHAPE_TEXT], inferred[SHAPE_TEXT];
        const value *x = n->out[i];
        if (!x || (x->type == DT_NONE && results[i].type == DT_NONE)) continue;
        if (x->type != results[i].type || !shape_equal(&x->shape, &results[i].shape))
            return fail(g->c, E_INVALID, "result %d is %s%s, but inference says %s%s", i, dtype_name(x->type),
                        shape_text(&x->shape, is), dtype_name(results[i].type),
                        shape_text(&results[i].shape, inferred));
        TRY(shape_check(g->c, &x->shape));
    }
    return OK;
}

static status check_node(verifier *v, const node *n) {
    TRY(check_operands(v, n));
    TRY(check_results(v, n));
    for (const attr *a = n->attrs; a && a->name; a++) TRY(attr_check(v->g->c, n->op, a));
    return v->g->specialised ? check_inferred(v, n) : OK;
}

static status check_nodes(verifier *v, int *n_slots) {
    graph *g = v->g;
    const node *before = NULL;

    for (const node *n = g->first; n; before = n, n = n->next) {
        if (!n->op || n->prev != before || n->id < 0 || n->id >= g->n_nodes || v->members[n->id])
            return fail(g->c, E_INVALID, "the list of nodes is broken at node %d", n->id);
        if (before && !node_is_before(before, n))
            return fail(g->c, E_INVALID, "node %d has a place that is not behind its predecessor's", n->id);
        v->members[n->id] = n;
        v->first_slot[n->id] = *n_slots;
        *n_slots += n->n_in;
        TRY_AT(g->c, check_node(v, n), "checking " NODE_FORMAT, NODE_ARGS(n));
    }
    return g->last == before ? OK : fail(g->c, E_INVALID, "the list of nodes does not end at its last node");
}

/* --- uses --------------------------------------------------------------------------------------------------------- */

/* As many uses as operands, each of them real and none listed twice: then the two say the same. */
static status check_uses(verifier *v, const value *x) {
    int count = 0;

    for (const use *u = x->uses; u; u = u->next, count++) {
        const node *n = u->user;
        bool real = n->op && n->id >= 0 && n->id < v->g->n_nodes && v->members[n->id] == n && u->index >= 0 &&
                    u->index < n->n_in && n->in[u->index] == x;
        if (!real || v->listed[v->first_slot[n->id] + u->index])
            return fail(v->g->c, E_INVALID, "value %%%d lists a use that does not exist, or lists it twice", x->id);
        v->listed[v->first_slot[n->id] + u->index] = true;
    }
    if (count != x->n_uses || count != v->n_operands[x->id])
        return fail(v->g->c, E_INVALID, "value %%%d lists %d uses, counts %d and has %d", x->id, count, x->n_uses,
                    v->n_operands[x->id]);
    return OK;
}

/* --- what the graph gives back ------------------------------------------------------------------------------------ */

/* Each place that holds a value is counted by it. */
static status check_counts(verifier *v) {
    const graph *g = v->g;

    for (int i = 0; i < g->n_outputs; i++) v->n_ends[g->outputs[i]->id]++;
    for (const state_write *w = g->writes; w; w = w->next) v->n_ends[w->value->id]++;
    for (int i = 0; i < g->n_input_grads; i++)
        if (g->input_grads[i]) v->n_ends[g->input_grads[i]->id]++;
    for (int i = 0; i < g->n_values; i++)
        if (v->known[i] && v->known[i]->n_ends != v->n_ends[i])
            return fail(g->c, E_INVALID, "value %%%d counts %d places among the results and has %d", i,
                        v->known[i]->n_ends, v->n_ends[i]);
    return OK;
}

static status check_like(verifier *v, const char *what, int i, const value *x, const value *like) {
    TRY_AT(v->g->c, check_known(v, x), "checking %s %d", what, i);
    if (v->g->specialised && like && (x->type != like->type || !shape_equal(&x->shape, &like->shape)))
        return fail(v->g->c, E_INVALID, "%s %d has another type or shape than what it belongs to", what, i);
    return OK;
}

static status check_ends(verifier *v) {
    graph *g = v->g;
    int i = 0;

    for (i = 0; i < g->n_outputs; i++) {
        TRY(check_like(v, "output", i, g->outputs[i], NULL));
        if (g->outputs[i]->def && g->outputs[i]->def->backward)
            return fail(g->c, E_INVALID, "output %d is computed in backward", i);
    }
    i = 0;
    for (const state_write *w = g->writes; w; w = w->next, i++) {
        if (w->input->input < 0) return fail(g->c, E_INVALID, "write %d does not write to an input", i);
        TRY(check_like(v, "write", i, w->input, NULL));
        TRY(check_like(v, "write", i, w->value, w->input));
    }
    for (i = 0; g->output_grads && i < g->n_outputs; i++) {
        if (!g->output_grads[i]) continue;
        if (g->output_grads[i]->input < 0) return fail(g->c, E_INVALID, "the gradient of output %d is not an input", i);
        TRY(check_like(v, "gradient of output", i, g->output_grads[i], g->outputs[i]));
    }
    for (i = 0; i < g->n_input_grads; i++)
        if (g->input_grads[i]) TRY(check_like(v, "gradient of input", i, g->input_grads[i], g->inputs[i]));
    return OK;
}

/* --- all of it ---------------------------------------------------------------------------------------------------- */

static status verify(verifier *v) {
    graph *g = v->g;
    int n_slots = 0;

    TRY(NEW(g->c, v->known, g->n_values));
    TRY(NEW(g->c, v->n_operands, g->n_values));
    TRY(NEW(g->c, v->members, g->n_nodes));
    TRY(NEW(g->c, v->first_slot, g->n_nodes));
    TRY(check_inputs(v));
    TRY(check_nodes(v, &n_slots));
    TRY(check_ends(v));
    TRY(NEW(g->c, v->n_ends, g->n_values));
    TRY(check_counts(v));
    TRY(NEW(g->c, v->listed, n_slots));
    for (int i = 0; i < g->n_values; i++)
        if (v->known[i]) TRY(check_uses(v, v->known[i]));
    return OK;
}

status graph_verify(graph *g) {
    verifier v = {.g = g};
    TRY_AT(g->c, verify(&v), "verifying the graph");
    return OK;
}
