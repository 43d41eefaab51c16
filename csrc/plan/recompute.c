/* recompute.c -- turns a graph with its gradient into a recompute_problem, and the choice into nodes of backward. */
#include "plan/recompute.h"

#include "core/hash.h"
#include "plan/cost.h"
#include "plan/recompute_clusters.h"

#include <stdlib.h>
#include <string.h>

typedef struct planner {
    graph *g;
    ctx *c; /* memory that dies with it */
    const node **order;
    int count, n_forward;
    value **root;  /* [value id] whose memory it is in, through views */
    int *phase;    /* [node id] */
    int n_nodes;   /* before there were copies */
    value **copy;  /* [value id] what backward makes again */
    int known;     /* values before there were copies */
    node **needed; /* by one value that is made again */
    recompute_problem problem;
    recompute_choice choice;
} planner;

static uint64_t kind_of(const node *n) {
    uint64_t h = hash_mix(0, (uint64_t)(uintptr_t)n->op);
    for (int i = 0; i < n->n_in + n->n_out; i++) {
        const value *v = i < n->n_in ? n->in[i] : n->out[i - n->n_in];
        h = hash_mix(h, v ? (uint64_t)v->type + 1 : 0);
        for (int k = 0; v && k < v->shape.rank; k++) h = hash_mix(h, (uint64_t)v->shape.dim[k]);
    }
    return h;
}

/* A library draws its own numbers, and says with integers which: it would draw others. */
static bool may_run_twice(const node *n) {
    if (n->op->flags & EFFECT) return false;
    for (int i = 0; i < n->n_out; i++)
        if (n->op->flags & RANDOM && dtype_is_int(n->out[i]->type) && n->out[i]->type != BOOL) return false;
    return true;
}

/* --- the problem ---------------------------------------------------------------------------------------------------- */

static bool is_view(const node *n) { return n->op->view && n->n_out == 1; }

static status find_roots(planner *pl) {
    const graph *g = pl->g;

    TRY(NEW(pl->c, pl->root, g->n_values));
    for (const node *n = g->first; n; n = n->next) {
        for (int i = 0; i < n->n_in; i++)
            if (n->in[i] && !n->in[i]->def) pl->root[n->in[i]->id] = n->in[i];
        for (int i = 0; i < n->n_out; i++)
            pl->root[n->out[i]->id] = is_view(n) && n->in[0] ? pl->root[n->in[0]->id] : n->out[i];
    }
    return OK;
}

/* Nodes in the order of execution, views aside. */
static status find_order(planner *pl) {
    graph *g = pl->g;
    int total = 0;

    graph_mark_phases(g);
    for (const node *n = g->first; n; n = n->next) total++;
    TRY(NEW(pl->c, pl->order, total));
    TRY(NEW(pl->c, pl->phase, g->n_nodes));
    for (int phase = PHASE_FORWARD; phase >= PHASE_BACKWARD; phase--) {
        for (node *n = g->first; n; n = n->next) {
            if (n->mark != phase) continue;
            pl->phase[n->id] = phase;
            if (!is_view(n)) pl->order[pl->count++] = n;
        }
        if (phase == PHASE_FORWARD) pl->n_forward = pl->count;
    }
    return OK;
}

static status make_step(planner *pl, const node *n, recompute_step *out) {
    size_t (*workspace)(const node *n) = pl->g->cuda ? n->op->cuda_workspace : n->op->workspace;
    int *in, *results, k = 0;

    TRY(NEW(pl->c, in, n->n_in));
    TRY(NEW(pl->c, results, n->n_out));
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && !n->in[i]->data) in[k++] = pl->root[n->in[i]->id]->id;
    for (int i = 0; i < n->n_out; i++) results[i] = n->out[i]->id;
    *out = (recompute_step){.in = in, .n_in = k, .out = results, .n_out = n->n_out, .kind = kind_of(n)};
    out->work = workspace ? (int64_t)workspace(n) : 0;
    out->in_place = (n->op->flags & (INPLACE_0 | INPLACE_1 | POINTWISE)) != 0;
    TRY(cost_of_node(pl->c, n, pl->g->cuda, &out->cost));
    if (!may_run_twice(n)) out->cost = -1;
    return OK;
}

static void hold(bool *held, const planner *pl, value *const *list, int count) {
    for (int i = 0; list && i < count; i++)
        if (list[i] && pl->root[list[i]->id]) held[pl->root[list[i]->id]->id] = true;
}

static status make_problem(planner *pl) {
    graph *g = pl->g;
    recompute_problem *p = &pl->problem;
    recompute_step *steps;
    int64_t *bytes;
    bool *held;
    int *maker;

    TRY(NEW(pl->c, steps, pl->count));
    TRY(NEW(pl->c, bytes, g->n_values));
    TRY(NEW(pl->c, maker, g->n_values));
    TRY(NEW(pl->c, held, g->n_values));
    for (int v = 0; v < g->n_values; v++) {
        maker[v] = -1;
        held[v] = true; /* inputs, constants */
    }
    for (int t = 0; t < pl->count; t++) {
        const node *n = pl->order[t];
        TRY(make_step(pl, n, &steps[t]));
        for (int i = 0; i < n->n_out; i++) {
            const value *v = n->out[i];
            maker[v->id] = t;
            held[v->id] = false;
            bytes[v->id] = value_is_read(v) ? value_bytes(v) : 0;
        }
    }
    hold(held, pl, g->outputs, g->n_outputs);
    hold(held, pl, g->input_grads, g->n_input_grads);
    for (state_write *w = g->writes; w; w = w->next) hold(held, pl, &w->value, 1);
    *p = (recompute_problem){.n_values = g->n_values,
                             .n_steps = pl->count,
                             .n_forward = pl->n_forward,
                             .steps = steps,
                             .bytes = bytes,
                             .maker = maker,
                             .held = held};
    return OK;
}

/* --- the nodes ------------------------------------------------------------------------------------------------------ */

/* Made by forward, and not there in backward unless it is made again. */
static bool is_gone(const planner *pl, const value *v) {
    const recompute_problem *p = &pl->problem;
    if (!v || !v->def || v->id >= pl->known || pl->phase[v->def->id] != PHASE_FORWARD) return false;
    const int root = pl->root[v->id]->id;
    if (p->held[root]) return false;
    return pl->choice.again[root] || !pl->choice.kept[root];
}

static status copy_node(planner *pl, const node *n, node *before) {
    graph *g = pl->g;
    value **in;
    node *again;

    TRY(NEW(pl->c, in, n->n_in));
    for (int i = 0; i < n->n_in; i++) in[i] = is_gone(pl, n->in[i]) ? pl->copy[n->in[i]->id] : n->in[i];
    g->before = before;
    g->in_backward = true;
    TRY(graph_add_node(g, n->op, n->name, n->attrs, n->n_in, in, n->n_out, &again));
    again->again = true; /* kernels of forward rely on their first result */
    for (int i = 0; i < n->n_out; i++) {
        again->out[i]->type = n->out[i]->type;
        again->out[i]->shape = n->out[i]->shape;
        again->out[i]->needs_grad = n->out[i]->needs_grad;
        pl->copy[n->out[i]->id] = again->out[i];
    }
    return OK;
}

static int by_place(const void *a, const void *b) {
    const node *x = *(node *const *)a, *y = *(node *const *)b;
    return (x->place > y->place) - (x->place < y->place);
}

/* Notes that `v` is to be made again, unless it is noted. */
static void note_needed(planner *pl, const value *v, int mark, int *count) {
    if (!is_gone(pl, v) || pl->copy[v->id] || v->def->mark == mark) return;
    v->def->mark = mark;
    pl->needed[(*count)++] = v->def;
}

/* Everything that `v` needs, and `v`, in front of `before`. */
static status make_again(planner *pl, const value *v, node *before) {
    int count = 0;

    note_needed(pl, v, before->id + 1, &count);
    for (int k = 0; k < count; k++)
        for (int i = 0; i < pl->needed[k]->n_in; i++) note_needed(pl, pl->needed[k]->in[i], before->id + 1, &count);
    qsort(pl->needed, (size_t)count, sizeof *pl->needed, by_place);
    for (int k = 0; k < count; k++) TRY(copy_node(pl, pl->needed[k], before));
    return OK;
}

static status rewrite(planner *pl) {
    graph *g = pl->g;

    pl->known = g->n_values;
    TRY(NEW(pl->c, pl->copy, g->n_values));
    TRY(NEW(pl->c, pl->needed, pl->n_nodes));
    for (node *n = g->first; n; n = n->next) {
        n->mark = 0;
        if (pl->phase[n->id] == PHASE_BACKWARD) n->backward = true; /* forward has nodes that backward alone needs */
    }
    for (node *n = g->first; n; n = n->next) {
        if (n->id >= pl->n_nodes || pl->phase[n->id] != PHASE_BACKWARD) continue;
        for (int i = 0; i < n->n_in; i++) {
            const value *v = n->in[i];
            if (!is_gone(pl, v)) continue;
            if (!pl->copy[v->id]) TRY(make_again(pl, v, n));
            graph_set_operand(g, n, i, pl->copy[v->id]);
        }
    }
    g->before = NULL;
    g->in_backward = false;
    graph_remove_dead(g);
    return OK;
}

static status choose(planner *pl, const recompute_request *r, recompute_clusters *clusters) {
    const recompute_option **taken = NULL;
    const int64_t target = r->goal == RECOMPUTE_TO ? r->target : INT64_MAX;
    int n = 0;

    if (r->list || r->n_wishes) TRY(clusters_find(pl->c, &pl->problem, pl->order, clusters));
    if (r->goal == RECOMPUTE_LAYERS) return recompute_layers(pl->c, &pl->problem, &pl->choice);
    if (r->n_wishes) TRY(clusters_wished(pl->c, clusters, r->wishes, r->n_wishes, &taken, &n));
    return recompute_to(pl->c, &pl->problem, taken, n, target, &pl->choice);
}

static status run(planner *pl, const recompute_request *r, recompute_result *out) {
    recompute_clusters clusters = {0};

    TRY(find_roots(pl));
    TRY(find_order(pl));
    pl->n_nodes = pl->g->n_nodes;
    TRY(make_problem(pl));
    TRY(choose(pl, r, &clusters));
    *out = (recompute_result){
        .before = pl->choice.before, .after = pl->choice.peak, .cost = pl->choice.cost, .count = pl->choice.count};
    for (int t = 0; t < pl->count; t++)
        if (pl->problem.steps[t].cost > 0) out->total += pl->problem.steps[t].cost;
    if (r->list) TRY(clusters_list(pl->g->c, &clusters, &pl->choice, &out->clusters, &out->n_clusters));
    return pl->choice.count ? rewrite(pl) : OK;
}

status recompute(graph *g, const recompute_request *r, recompute_result *out) {
    planner pl = {.g = g};
    ctx scratch;

    *out = (recompute_result){0};
    if (!g->input_grads || (r->goal == RECOMPUTE_NOTHING && !r->list && !r->n_wishes)) return OK;
    ctx_scratch_begin(g->c, &scratch);
    pl.c = &scratch;
    return ctx_scratch_end(g->c, &scratch, run(&pl, r, out));
}
