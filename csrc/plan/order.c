/* order.c -- chooses the order of execution: what runs before forward returns, and where another order needs less memory. */
#include "passes/convex.h"
#include "plan/order_rules.h"
#include "plan/plan.h"
#include "plan/recompute_simulation.h"

status order_make(graph *g, const layout *where, run_order *out) {
    int total = 0;

    *out = (run_order){0};
    graph_mark_phases(g);
    for (const node *n = g->first; n; n = n->next) total++;
    TRY(NEW(g->c, out->at, total));
    for (int phase = PHASE_FORWARD; phase >= PHASE_BACKWARD; phase--) {
        for (const node *n = g->first; n; n = n->next)
            if (n->mark == phase && (!n->op->view || where[n->out[0]->id].root == n->out[0])) out->at[out->count++] = n;
        if (phase == PHASE_FORWARD) out->n_forward = out->count;
    }
    return OK;
}

/* --- a program in numbers --------------------------------------------------------------------------------------------- */

typedef struct maker {
    ctx *c; /* of the search */
    const graph *g;
    const layout *where;
    const run_order *order;
    int64_t *bytes;
    bool *to_end;
    int *stamp; /* [value] one more than the last step that has it as an operand */
} maker;

/* Memory of its own, which is no place of the arena. */
static void leave_out(const maker *m, const value *v) {
    if (v) m->bytes[m->where[v->id].root->id] = 0;
}

static status make_values(maker *m) {
    const graph *g = m->g;
    const bool joint = graph_gradients_in_arena(g) > 0;

    TRY(NEW(m->c, m->bytes, g->n_values));
    TRY(NEW(m->c, m->to_end, g->n_values));
    TRY(NEW(m->c, m->stamp, g->n_values));
    for (int t = 0; t < m->order->count; t++)
        for (int i = 0; i < m->order->at[t]->n_out; i++) {
            const value *v = m->order->at[t]->out[i];
            m->bytes[v->id] = value_is_read(v) && v->type != DT_NONE ? value_bytes(v) : 0;
        }
    for (int i = 0; i < g->n_outputs; i++) leave_out(m, g->outputs[i]);
    for (const state_write *w = g->writes; w; w = w->next) leave_out(m, w->value);
    for (int i = 0; i < g->n_input_grads; i++) {
        if (!g->input_grads[i]) continue;
        if (joint) m->to_end[m->where[g->input_grads[i]->id].root->id] = true;
        else leave_out(m, g->input_grads[i]);
    }
    return OK;
}

static status make_step(const maker *m, int t, order_step *out) {
    const node *n = m->order->at[t];
    int *in, *results;

    TRY(NEW(m->c, in, n->n_in));
    TRY(NEW(m->c, results, n->n_out));
    *out = (order_step){.in = in, .out = results, .n_out = n->n_out};
    for (int i = 0; i < n->n_in; i++) {
        const value *root = n->in[i] && !n->in[i]->data ? m->where[n->in[i]->id].root : NULL;
        if (!root || !root->def || m->stamp[root->id] == t + 1) continue;
        m->stamp[root->id] = t + 1;
        in[out->n_in++] = root->id;
    }
    for (int i = 0; i < n->n_out; i++) results[i] = n->out[i]->id;
    out->work = n->op->workspace ? (int64_t)n->op->workspace(n) : 0;
    out->in_place = (n->op->flags & (INPLACE_0 | INPLACE_1)) != 0;
    return OK;
}

/* Nothing moves from forward to backward, and nothing past what others see. */
static status make_ranges(const maker *m, order_problem *p) {
    int *at, count = 0;

    TRY(NEW(m->c, at, 2 * m->order->count + 2));
    for (int t = 0; t <= m->order->count; t++) {
        const bool seen = t < m->order->count && node_is_seen(m->order->at[t]);
        const bool behind = t > 0 && node_is_seen(m->order->at[t - 1]);
        if (t == 0 || t == m->order->count || t == m->order->n_forward || seen || behind) at[count++] = t;
    }
    p->ranges = at;
    p->n_ranges = count - 1;
    return OK;
}

static status make_problem(maker *m, order_problem *out) {
    order_step *steps;

    TRY(make_values(m));
    TRY(NEW(m->c, steps, m->order->count));
    for (int t = 0; t < m->order->count; t++) TRY(make_step(m, t, &steps[t]));
    *out = (order_problem){
        .n_steps = m->order->count, .n_values = m->g->n_values, .steps = steps, .bytes = m->bytes, .to_end = m->to_end};
    return make_ranges(m, out);
}

/* --- the choice ------------------------------------------------------------------------------------------------------- */

/* `best`: nodes in the order that needs the least; the first of equal ones. */
static status compare(maker *m, order_choice *out, const node **best) {
    order_problem p;
    order_facts f;
    int *order;

    TRY(make_problem(m, &p));
    TRY(order_facts_new(m->c, &p, &f));
    TRY(NEW(m->c, order, p.n_steps));
    out->compared = true;
    for (order_rule rule = AS_WRITTEN; rule < ORDER_RULES; rule++) {
        TRY(order_by(m->c, &f, rule, order));
        TRY(order_peak(m->c, &p, order, &out->peaks[rule]));
        if (rule > AS_WRITTEN && out->peaks[rule] >= out->peaks[out->rule]) continue;
        out->rule = rule;
        for (int t = 0; t < p.n_steps; t++) best[t] = m->order->at[order[t]];
    }
    return OK;
}

/* Gradients that are handed over while backward goes on come in the order that is written: processes that communicate in
 * hooks agree on it, whatever their shapes. */
static bool may_move(const graph *g) { return !g->cuda && !g->pending && (g->joint_from > 0 || !g->n_input_grads); }

bool order_saves(int64_t before, int64_t after) { return before - after > before / WORTH_IT; }

status order_other(graph *g, const layout *where, const run_order *written, order_choice *choice, run_order *out) {
    ctx scratch;

    *choice = (order_choice){.rule = AS_WRITTEN};
    *out = (run_order){.count = written->count, .n_forward = written->n_forward};
    if (!may_move(g)) return OK;
    TRY(NEW(g->c, out->at, written->count));
    ctx_scratch_begin(g->c, &scratch);
    maker m = {.c = &scratch, .g = g, .where = where, .order = written};
    TRY(ctx_scratch_end(g->c, &scratch, compare(&m, choice, out->at)));
    if (!order_saves(choice->peaks[AS_WRITTEN], choice->peaks[choice->rule])) out->at = NULL;
    return OK;
}
