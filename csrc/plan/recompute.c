/* recompute.c -- turns a graph with its gradient into a recompute_problem, and the choice into nodes of backward. */
#include "plan/recompute.h"

#include "core/hash.h"
#include "core/size.h"
#include "plan/recompute_clusters.h"

#include <stdlib.h>
#include <string.h>

typedef struct planner {
    graph *g;
    ctx *c; /* memory that dies with it */
    cost_rates rates;
    const node **order;
    int count, n_forward;
    value **root;  /* [value id] whose memory it is in, through views */
    int *phase;    /* [node id] */
    int n_nodes;   /* before there were copies */
    value **copy;  /* [value id] what backward makes again, or reads back */
    int known;     /* values before there were copies */
    int64_t room;  /* bytes of what is offloaded */
    node *read;    /* on a GPU, the ReloadEnd that comes last so far */
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

/* Of the checkpoint that a node lies in; 0: it lies in none. Steps of a loop have "@" and their number behind the name. */
static uint64_t checkpoint_of(const node *n) {
    const char *at = n->name ? strstr(n->name, "/" CHECKPOINT_STEP) : NULL;
    if (!at) return 0;
    const char *number = at + strlen("/" CHECKPOINT_STEP), *step = strchr(number, '@');
    uint64_t h = hash_mix(1, strtoull(number, NULL, 10));
    for (; step && *step; step++) h = hash_mix(h, (uint64_t)*step);
    return h ? h : 1;
}

bool recompute_has_checkpoints(const graph *model) {
    for (const node *n = model->first; n; n = n->next)
        if (checkpoint_of(n)) return true;
    return false;
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
    out->checkpoint = checkpoint_of(n);
    out->work = workspace ? (int64_t)workspace(n) : 0;
    out->in_place = (n->op->flags & (INPLACE_0 | INPLACE_1 | POINTWISE)) != 0;
    TRY(cost_of_node(pl->c, n, &pl->rates, &out->cost));
    if (!may_run_twice(n)) out->cost = -1;
    return OK;
}

static void hold(bool *held, const planner *pl, value *const *list, int count) {
    for (int i = 0; list && i < count; i++)
        if (list[i] && pl->root[list[i]->id]) held[pl->root[list[i]->id]->id] = true;
}

/* Gradients that a run has in its arena are there to the end of it. */
static status keep_gradients(planner *pl, bool *held, const int *maker, const bool **out) {
    const graph *g = pl->g;
    bool *to_end;

    if (graph_gradients_in_arena(g) == 0) {
        hold(held, pl, g->input_grads, g->n_input_grads);
        return OK;
    }
    TRY(NEW(pl->c, to_end, g->n_values));
    for (int i = 0; i < g->n_input_grads; i++) {
        const value *root = g->input_grads[i] ? pl->root[g->input_grads[i]->id] : NULL;
        if (!root) continue;
        if (maker[root->id] >= pl->n_forward) to_end[root->id] = true;
        else held[root->id] = true;
    }
    *out = to_end;
    return OK;
}

/* Inputs of the caller's that backward reads anyway. What else the caller gave may have changed by then, as a loader's
 * buffer that is filled again: PyTorch has what forward made of it. */
static status find_read_anyway(const planner *pl, bool **out) {
    TRY(NEW(pl->c, *out, pl->g->n_values));
    for (int t = pl->n_forward; t < pl->count; t++)
        for (int i = 0; i < pl->order[t]->n_in; i++)
            if (pl->order[t]->in[i]) (*out)[pl->root[pl->order[t]->in[i]->id]->id] = true;
    return OK;
}

static bool reads_more(const planner *pl, const node *n, const bool *read_anyway) {
    for (int i = 0; i < n->n_in; i++) {
        const value *root = n->in[i] ? pl->root[n->in[i]->id] : NULL;
        if (root && !root->def && !root->data && !root->needs_grad && !read_anyway[root->id]) return true;
    }
    return false;
}

/* `unasked`: nothing is made again of what the caller may have changed. */
static status make_problem(planner *pl, bool with_offload, bool unasked) {
    graph *g = pl->g;
    bool *read_anyway = NULL;
    recompute_problem *p = &pl->problem;
    recompute_step *steps;
    int64_t *bytes;
    bool *held;
    const bool *to_end = NULL;
    int *maker;
    double *moving = NULL;

    TRY(NEW(pl->c, steps, pl->count));
    if (with_offload) TRY(NEW(pl->c, moving, g->n_values));
    TRY(NEW(pl->c, bytes, g->n_values));
    TRY(NEW(pl->c, maker, g->n_values));
    TRY(NEW(pl->c, held, g->n_values));
    for (int v = 0; v < g->n_values; v++) {
        maker[v] = -1;
        held[v] = true; /* inputs, constants */
    }
    if (unasked) TRY(find_read_anyway(pl, &read_anyway));
    for (int t = 0; t < pl->count; t++) {
        const node *n = pl->order[t];
        TRY(make_step(pl, n, &steps[t]));
        if (unasked && reads_more(pl, n, read_anyway)) steps[t].cost = -1;
        for (int i = 0; i < n->n_out; i++) {
            const value *v = n->out[i];
            maker[v->id] = t;
            held[v->id] = false;
            bytes[v->id] = value_is_read(v) ? value_bytes(v) : 0;
            if (moving) moving[v->id] = cost_of_moving(bytes[v->id], &pl->rates, g->cuda);
        }
    }
    hold(held, pl, g->outputs, g->n_outputs);
    TRY(keep_gradients(pl, held, maker, &to_end));
    for (state_write *w = g->writes; w; w = w->next) hold(held, pl, &w->value, 1);
    *p = (recompute_problem){.n_values = g->n_values,
                             .n_steps = pl->count,
                             .n_forward = pl->n_forward,
                             .steps = steps,
                             .bytes = bytes,
                             .maker = maker,
                             .held = held,
                             .to_end = to_end,
                             .moving = moving};
    return OK;
}

/* --- the nodes ------------------------------------------------------------------------------------------------------ */

/* Made by forward, and not there in backward unless it is made again. */
static bool is_gone(const planner *pl, const value *v) {
    const recompute_problem *p = &pl->problem;
    if (!v || !v->def || v->id >= pl->known || pl->phase[v->def->id] != PHASE_FORWARD) return false;
    const int root = pl->root[v->id]->id;
    if (p->held[root]) return false;
    return pl->choice.again[root] || pl->choice.offloaded[root] || !pl->choice.kept[root];
}

static bool is_offloaded(const planner *pl, const value *v) {
    return v->id < pl->known && pl->root[v->id] == v && pl->choice.offloaded[v->id];
}

enum { OFFLOAD_ALIGNED = 4096 };

static status add_end(planner *pl, const char *op, const char *name, value *v, node *before, node **out) {
    pl->g->before = before;
    TRY(graph_add_node(pl->g, op_find(ORT_DOMAIN, op, 0), name, NULL, 1, &v, 1, out));
    return (*out)->op->infer(pl->g, *out);
}

/* Copies of a GPU go on beside other work: what is read back begins when the one before is there. */
static status end_reload(planner *pl, const value *v, value *coming, node *before) {
    TRY(add_end(pl, "ReloadEnd", v->def->name, coming, before, &pl->read));
    pl->copy[v->id] = pl->read->out[0];
    return OK;
}

/* And what is written ends before the next begins, or where backward reads the first back. */
static status end_offloads(planner *pl) {
    const op_def *begins = op_find(ORT_DOMAIN, "Offload", 0), *reads = op_find(ORT_DOMAIN, "Reload", 0);
    node *last = NULL, *end;

    pl->g->in_backward = false;
    for (node *n = pl->g->first; n; n = n->next) {
        if (n->op != begins && n->op != reads) continue;
        if (last) TRY(add_end(pl, "OffloadEnd", last->name, last->in[0], n, &end));
        last = n->op == begins ? n : NULL;
        if (n->op == reads) break;
    }
    return OK;
}

/* An Offload behind what makes `v`, and a Reload before `before`. */
static status offload(planner *pl, value *v, node *before) {
    const attr *where = NODE_ATTRS(INT("offset", pl->room));
    graph *g = pl->g;
    node *out, *back;

    g->before = v->def->next;
    g->in_backward = false;
    TRY(graph_add_node(g, op_find(ORT_DOMAIN, "Offload", 0), v->def->name, where, 1, &v, 1, &out));
    TRY(out->op->infer(g, out));
    g->before = pl->read ? pl->read->next : before;
    g->in_backward = true;
    TRY(graph_add_node(
        g, op_find(ORT_DOMAIN, "Reload", 0), v->def->name,
        NODE_ATTRS(INT("offset", pl->room), INT("type", v->type), INTS("shape", v->shape.rank, v->shape.dim)), 1,
        &out->out[0], 1, &back));
    TRY(back->op->infer(g, back));
    pl->copy[v->id] = back->out[0];
    if (g->cuda) TRY(end_reload(pl, v, back->out[0], before));
    pl->copy[v->id]->needs_grad = v->needs_grad;
    pl->room += (value_bytes(v) + OFFLOAD_ALIGNED - 1) / OFFLOAD_ALIGNED * OFFLOAD_ALIGNED;
    return OK;
}

/* What there is of `v` in backward; what has been offloaded is read back before `before`. */
static status there(planner *pl, value *v, node *before, value **out) {
    *out = v;
    if (!is_gone(pl, v)) return OK;
    if (is_offloaded(pl, v) && !pl->copy[v->id]) TRY(offload(pl, v, before));
    *out = pl->copy[v->id];
    return OK;
}

/* The operator that takes the node's other results besides its operands and makes the first one, or NULL. */
static const op_def *shorter_way(const planner *pl, const node *n) {
    if (!n->op->again || pl->g->cuda) return NULL;
    for (int i = 1; i < n->n_out; i++)
        if (!n->out[i] || is_gone(pl, n->out[i])) return NULL;
    return op_find(ORT_DOMAIN, n->op->again, 0);
}

static status copy_node(planner *pl, const node *n, node *before) {
    const op_def *shorter = shorter_way(pl, n);
    const int n_out = shorter ? 1 : n->n_out;
    graph *g = pl->g;
    value **in;
    node *again;
    int n_in = n->n_in;

    TRY(NEW(pl->c, in, n->n_in + n->n_out));
    for (int i = 0; i < n->n_in; i++) TRY(there(pl, n->in[i], before, &in[i]));
    for (int i = 1; shorter && i < n->n_out; i++) in[n_in++] = n->out[i];
    g->before = before;
    g->in_backward = true;
    TRY(graph_add_node(g, shorter ? shorter : n->op, n->name, n->attrs, n_in, in, n_out, &again));
    again->again = true; /* kernels of forward rely on their first result */
    for (int i = 0; i < n_out; i++) {
        again->out[i]->type = n->out[i]->type;
        again->out[i]->shape = n->out[i]->shape;
        again->out[i]->needs_grad = n->out[i]->needs_grad;
        if (!is_offloaded(pl, n->out[i])) pl->copy[n->out[i]->id] = again->out[i];
    }
    return OK;
}

static int by_place(const void *a, const void *b) {
    const node *x = *(node *const *)a, *y = *(node *const *)b;
    return (x->place > y->place) - (x->place < y->place);
}

/* Notes that `v` is to be made again, unless it is noted. */
static void note_needed(planner *pl, const value *v, int mark, int *count) {
    if (!is_gone(pl, v) || is_offloaded(pl, v) || pl->copy[v->id] || v->def->mark == mark) return;
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
            value *v = n->in[i];
            if (!is_gone(pl, v)) continue;
            if (!pl->copy[v->id]) TRY(make_again(pl, v, n));
            TRY(there(pl, v, n, &v));
            graph_set_operand(g, n, i, v);
        }
    }
    if (g->cuda) TRY(end_offloads(pl));
    g->before = NULL;
    g->in_backward = false;
    graph_remove_dead(g);
    return OK;
}

/* Of all work, one part in so many is done twice unasked: steps take as long as without (docs/benchmarks.md). */
enum { NEXT_TO_NOTHING = 32 };

static double all_work(const recompute_problem *p) {
    double sum = 0;
    for (int t = 0; t < p->n_steps; t++)
        if (p->steps[t].cost > 0) sum += p->steps[t].cost;
    return sum;
}

static status choose_of(planner *pl, const recompute_request *r, const recompute_option *const *taken, int n,
                        int *place) {
    recompute_series *s = r->series;

    if (s->n == 0 || s->n_values != pl->problem.n_values) {
        TRY(recompute_to_each(pl->c, &pl->problem, taken, n, s->c, s->at, &s->n));
        s->n_values = pl->problem.n_values;
    }
    *place = r->from < s->n ? r->from : s->n - 1;
    while (*place < s->n - 1 && s->at[*place].peak > r->target) ++*place;
    pl->choice = s->at[*place];
    return OK;
}

static status choose(planner *pl, const recompute_request *r, recompute_clusters *clusters, int *place) {
    const recompute_option **taken = NULL;
    const int64_t target = r->goal == RECOMPUTE_TO ? r->target : r->goal == OFFLOAD_ALL ? 0 : INT64_MAX;
    int n = 0;

    if (r->list || r->n_wishes) TRY(clusters_find(pl->c, &pl->problem, pl->order, clusters));
    if (r->goal == RECOMPUTE_LAYERS) return recompute_layers(pl->c, &pl->problem, r->layers, &pl->choice);
    if (r->goal == RECOMPUTE_CHECKPOINTS) return recompute_checkpoints(pl->c, &pl->problem, &pl->choice);
    if (r->goal == RECOMPUTE_CHEAP && !r->n_wishes) {
        const double most = all_work(&pl->problem) / NEXT_TO_NOTHING;
        return recompute_cheaply(pl->c, &pl->problem, most, &pl->choice);
    }
    if (r->n_wishes) TRY(clusters_wished(pl->c, clusters, r->wishes, r->n_wishes, &taken, &n));
    if (r->goal == RECOMPUTE_TO && r->series) return choose_of(pl, r, taken, n, place);
    return recompute_to(pl->c, &pl->problem, taken, n, target, &pl->choice);
}

static status run(planner *pl, const recompute_request *r, recompute_result *out) {
    recompute_clusters clusters = {0};
    int place = 0;

    TRY(find_roots(pl));
    TRY(find_order(pl));
    pl->n_nodes = pl->g->n_nodes;
    TRY(make_problem(pl, r->goal == OFFLOAD_ALL || (r->goal == RECOMPUTE_TO && r->offload),
                     r->goal == RECOMPUTE_CHEAP && !r->n_wishes));
    pl->problem.nothing_twice = r->goal == OFFLOAD_ALL;
    pl->problem.beside = pl->g->cuda;
    TRY(choose(pl, r, &clusters, &place));
    *out = (recompute_result){.before = pl->choice.before,
                              .after = pl->choice.peak,
                              .cost = pl->choice.cost,
                              .count = pl->choice.count,
                              .total = all_work(&pl->problem),
                              .n_offloaded = pl->choice.n_offloaded,
                              .place = place};
    if (r->list) TRY(clusters_list(pl->g->c, &clusters, &pl->choice, &out->clusters, &out->n_clusters));
    return pl->choice.count || pl->choice.n_offloaded ? rewrite(pl) : OK;
}

/* The search takes as long as the graph has steps, some of them many times. In a long loop over short values it would take as
 * long as all of planning, for a part of few bytes. */
enum { FEW_STEPS = 2048, SHORT_VALUE = 16 << 10 };

static bool is_worth_a_search(const graph *g) {
    int64_t bytes = 0, steps = 0;

    for (const node *n = g->first; n; n = n->next, steps++)
        for (int i = 0; i < n->n_out; i++) bytes = size_add(bytes, value_bytes(n->out[i]));
    return steps <= FEW_STEPS || bytes / steps >= SHORT_VALUE;
}

status recompute(graph *g, const recompute_request *r, recompute_result *out) {
    planner pl = {.g = g};
    recompute_request own = *r;
    ctx scratch;

    if (own.goal == RECOMPUTE_CHEAP && (g->as_written || !is_worth_a_search(g))) own.goal = RECOMPUTE_NOTHING;
    pl.rates = own.goal == RECOMPUTE_TO && own.rates.byte > 0 ? own.rates : cost_rates_usual(g->cuda);
    *out = (recompute_result){0};
    if (!g->input_grads || (own.goal == RECOMPUTE_NOTHING && !own.list && !own.n_wishes)) return OK;
    ctx_scratch_begin(g->c, &scratch);
    pl.c = &scratch;
    return ctx_scratch_end(g->c, &scratch, run(&pl, &own, out));
}
