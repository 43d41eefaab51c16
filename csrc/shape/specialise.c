/* specialise.c -- emits a model, node by node, for the types and shapes of its inputs.
 *
 * Shapes are numbers, not symbols. Shape arithmetic, more than half of an exported model, then folds away in emit
 * like any other constant expression, by the kernels themselves; passes and gradient rules see plain integers; and
 * what depends on sizes (a broadcast that happens only at batch 1) is right by construction. The price is one walk
 * over the model for a batch shape that was never seen: milliseconds (docs/architecture.md). */
#include "shape/specialise.h"

#include "ops/op.h"

#include <inttypes.h>

static status check_input(ctx *c, const value *declared, const input_spec *spec) {
    const char *name = declared->name ? declared->name : "?";

    TRY_AT(c, shape_check(c, &spec->shape), "checking input %s", name);
    if (declared->type != DT_NONE && spec->type != declared->type)
        return fail(c, E_TYPE, "input %s is %s, but the model was captured with %s", name, dtype_name(spec->type),
                    dtype_name(declared->type));
    if (declared->shape.rank < 0) return OK;
    if (spec->shape.rank != declared->shape.rank)
        return fail(c, E_SHAPE, "input %s has rank %d, but the model was captured with rank %d", name, spec->shape.rank,
                    declared->shape.rank);
    for (int i = 0; i < spec->shape.rank; i++)
        if (declared->shape.dim[i] >= 0 && spec->shape.dim[i] != declared->shape.dim[i])
            return fail(c, E_SHAPE, "axis %d of input %s is %" PRId64 ", but the model was captured with %" PRId64, i,
                        name, spec->shape.dim[i], declared->shape.dim[i]);
    return OK;
}

static status emit_model_node(graph *g, const node *n, value **map, value **buffer) {
    value **in = buffer, **out = buffer + n->n_in;

    for (int i = 0; i < n->n_in; i++) {
        in[i] = n->in[i] ? map[n->in[i]->id] : NULL;
        if (n->in[i] && n->in[i]->data && !in[i]) {
            TRY(graph_share_constant(g, n->in[i], &in[i]));
            map[n->in[i]->id] = in[i];
        }
        if (n->in[i] && !in[i])
            return fail(g->c, E_UNSUPPORTED, "operand %d of %s (%s) is not computed", i, n->op->name,
                        n->name ? n->name : "-");
    }
    g->emit_name = n->name;
    g->n_asked = 0;
    TRY(graph_emit_op(g, n->op, n->attrs, n->n_in, in, n->n_out, out));
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i]) map[n->out[i]->id] = out[i];
    return OK;
}

/* One vector of all pending sizes, since a prologue has one output. */
static status join_pending(graph *g) {
    value **all, *one;

    TRY(NEW(g->c, all, g->n_pending));
    TRY(graph_ints(g, 1, (int64_t[]){1}, &one));
    for (int i = 0; i < g->n_pending; i++) TRY(emit(g, &all[i], "Reshape", g->pending_sizes[i].v, one));
    return graph_emit(g, "Concat", NODE_ATTRS(INT("axis", 0)), g->n_pending, all, 1, &g->pending);
}

status make_prologue(graph *g) {
    g->before = NULL;
    g->emit_name = NULL;
    for (state_write *w = g->writes; w; w = w->next) TRY(graph_set_end(g, &w->value, NULL));
    for (int i = 0; i < g->n_outputs; i++) TRY(graph_set_end(g, &g->outputs[i], NULL));
    g->writes = NULL;
    g->n_outputs = 0;
    if (g->n_pending > 1) TRY(join_pending(g));
    return graph_add_output(g, g->pending);
}

/* Does a draw decide `v`? `seen`: values that none decides, by their ids. */
static bool is_drawn(const value *v, bool *seen) {
    if (!v->def || seen[v->id]) return false;
    if (v->def->op->flags & RANDOM) return true;
    seen[v->id] = true;
    for (int i = 0; i < v->def->n_in; i++)
        if (v->def->in[i] && is_drawn(v->def->in[i], seen)) return true;
    return false;
}

static bool is_computed(const node *n, value *const *map) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && !n->in[i]->data && !map[n->in[i]->id]) return false;
    return true;
}

/* Behind a node that waits for a size: what other nodes will ask for, so that one prologue finds it, too. A node that cannot
 * be emitted now, for whatever reason, is looked at again when this size is known. What is drawn is not looked for: a
 * generator would be further than in the plan. */
static status look_ahead(graph *g, const node *n, value **map, value **buffer) {
    for (; n; n = n->next) {
        const int before = g->n_pending;
        g->place += MODEL_PLACE;
        if (!is_computed(n, map) || (n->op->flags & EFFECT)) continue;
        const status s = emit_model_node(g, n, map, buffer);
        if (s == E_NOMEM) return s;
        if (g->n_pending == before) continue;
        bool *seen;
        TRY(NEW(g->c, seen, g->n_values));
        for (int i = before; i < g->n_pending; i++)
            if (is_drawn(g->pending_sizes[i].v, seen)) g->n_pending = before;
    }
    return OK;
}

status specialise(graph *g, const graph *model, const input_spec *specs) {
    ctx *c = g->c;
    value **map, **buffer;
    int widest = 0;

    g->opset = model->opset;
    g->specialised = true;
    TRY(NEW(c, map, model->n_values));
    for (int i = 0; i < model->n_inputs; i++) {
        value *declared = model->inputs[i], *v;
        TRY(check_input(c, declared, &specs[i]));
        TRY(graph_add_input(g, declared->name, specs[i].type, &specs[i].shape, &v));
        v->needs_grad = specs[i].needs_grad && dtype_is_float(v->type);
        map[declared->id] = v;
    }
    for (const node *n = model->first; n; n = n->next)
        if (n->n_in + n->n_out > widest) widest = n->n_in + n->n_out;
    TRY(NEW(c, buffer, widest));
    for (const node *n = model->first; n; n = n->next) {
        g->place += MODEL_PLACE;
        status s = emit_model_node(g, n, map, buffer);
        if (s == E_PENDING) {
            if (g->n_pending) TRY(look_ahead(g, n->next, map, buffer));
            g->place = 0;
            return make_prologue(g);
        }
        TRY(s);
    }
    g->emit_name = NULL;
    g->place = 0;

    for (int i = 0; i < model->n_outputs; i++) {
        value *v = model->outputs[i];
        if (!map[v->id] && v->data) TRY(graph_share_constant(g, v, &map[v->id]));
        if (!map[v->id]) return fail(c, E_UNSUPPORTED, "output %s is not computed", v->name ? v->name : "?");
        if (map[v->id]->type == DT_NONE)
            return fail(c, E_UNSUPPORTED, "output %s is a sequence, not a tensor", v->name ? v->name : "?");
        TRY(graph_add_output(g, map[v->id]));
    }
    return OK;
}
