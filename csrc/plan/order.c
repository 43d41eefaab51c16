/* order.c -- says which nodes run before forward returns, and looks for an order of them that needs less memory. */
#include "passes/convex.h"
#include "plan/order_rules.h"
#include "plan/plan.h"

#include <string.h>

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
    bool cuda;
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
    size_t (*workspace)(const node *n) = m->cuda ? n->op->cuda_workspace : n->op->workspace;
    out->work = workspace ? (int64_t)workspace(n) : 0;
    out->in_place = (n->op->flags & (INPLACE_0 | INPLACE_1)) != 0;
    return OK;
}

/* Others see when it runs, or it waits for a copy that was begun before. */
static bool has_its_place(const node *n) {
    static const char *const copies[] = {"Offload", "OffloadEnd", "Reload", "ReloadEnd"};
    bool is_copy = false;

    for (size_t i = 0; i < sizeof copies / sizeof *copies; i++)
        is_copy = is_copy || strcmp(n->op->name, copies[i]) == 0;
    return is_copy || node_is_seen(n);
}

/* Nothing moves from forward to backward, and nothing past what has its place. */
static status make_ranges(const maker *m, order_problem *p) {
    int *at, count = 0;

    TRY(NEW(m->c, at, 2 * m->order->count + 2));
    for (int t = 0; t <= m->order->count; t++) {
        const bool seen = t < m->order->count && has_its_place(m->order->at[t]);
        const bool behind = t > 0 && has_its_place(m->order->at[t - 1]);
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

/* --- the comparison --------------------------------------------------------------------------------------------------- */

/* An order is worth a plan of its own where it saves one of so many parts. */
enum { WORTH = 32 };

bool order_is_worth(int64_t bytes, int64_t than) { return bytes < than - than / WORTH; }

static status compare(ctx *c, const graph *g, const layout *where, bool cuda, const run_order *written,
                      order_choice *out) {
    maker m = {.c = c, .g = g, .where = where, .order = written, .cuda = cuda};
    order_problem problem;
    order_facts f;
    int *order;

    TRY(make_problem(&m, &problem));
    TRY(order_facts_new(c, &problem, &f));
    TRY(NEW(c, order, problem.n_steps));
    out->rule = AS_WRITTEN;
    for (order_rule by = AS_WRITTEN; by < ORDER_RULES; by++) {
        TRY(order_by(c, &f, by, order));
        TRY(order_peak(c, &problem, order, &out->bytes[by]));
        if (out->bytes[by] >= out->bytes[out->rule] || !order_is_worth(out->bytes[by], out->bytes[AS_WRITTEN]))
            continue;
        out->rule = by;
        for (int t = 0; t < written->count; t++) out->order.at[t] = written->at[order[t]];
    }
    return OK;
}

status order_choose(const graph *g, const layout *where, bool cuda, const run_order *written, order_choice *out) {
    ctx scratch;

    *out = (order_choice){.order = *written};
    TRY(NEW(g->c, out->order.at, written->count));
    ctx_scratch_begin(g->c, &scratch);
    return ctx_scratch_end(g->c, &scratch, compare(&scratch, g, where, cuda, written, out));
}
