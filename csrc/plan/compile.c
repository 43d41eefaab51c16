/* compile.c -- specialises, rewrites, differentiates, rewrites, plans. */
#include "plan/compile.h"

#include "core/size.h"
#include "grad/grad.h"
#include "plan/peak.h"

#include <inttypes.h>
#include <string.h>

#ifdef ORT_VERIFY
#define VERIFY(g, when) TRY_AT((g)->c, graph_verify(g), "verifying the graph %s", when)
#else
#define VERIFY(g, when) (void)(g)
#endif

/* A pass that needs a size which is not known ends them all: the plan is a prologue. */
static status rewrite(graph *g, const compile_options *o, int *fired, made_by *made) {
    status s = passes_run_noting(g, BEFORE_GRADIENT, o->disabled_passes, fired, made);
    if (s != E_PENDING) return s;
    TRY(make_prologue(g));
    graph_remove_dead(g);
    return OK;
}

/* A graph with nothing in it yet. */
static status graph_for(ctx *c, const compile_options *o, graph **out) {
    TRY(graph_new(c, out));
    (*out)->known = o->known;
    (*out)->n_known = o->n_known;
    (*out)->sizes = o->sizes;
    (*out)->n_sizes = o->n_sizes;
    (*out)->host = o->host;
    (*out)->cuda = o->cuda;
    (*out)->joint_from = o->joint_from;
    (*out)->padding_unseen = o->padding_unseen;
    (*out)->attention_everywhere = !(o->disabled_passes & pass_bit("efficient_attention"));
    (*out)->triton = o->triton;
    (*out)->as_written = o->disabled_passes & pass_bit("clean_up");
    return OK;
}

static status make(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, plan **out) {
    int fired[MAX_PASSES] = {0};
    recompute_result again = {0};
    made_by made = {0};
    graph *g;

    TRY(graph_for(c, o, &g));
    TRY(specialise(g, model, inputs));
    graph_remove_dead(g);
    VERIFY(g, "after specialisation");
    TRY(rewrite(g, o, fired, &made));
    if (o->output_grads && !g->pending) {
        TRY(grad_build(g, o->output_grads));
        graph_remove_dead(g);
        VERIFY(g, "after the gradient");
        TRY(passes_run_noting(g, AFTER_GRADIENT, o->disabled_passes, fired, &made));
        graph_renumber(g);
        TRY(recompute(g, &o->again, &again));
        VERIFY(g, "after recomputation");
    }
    TRY(passes_run_noting(g, LAST, o->disabled_passes, fired, &made));
    TRY(passes_run(g, WHILE_EMITTED, o->disabled_passes, fired));
    if (!g->pending) graph_renumber(g);
    TRY(plan_make(g, o->cuda, out));
    memcpy((*out)->fired, fired, sizeof fired);
    (*out)->again = again;
    (*out)->made = made;
    (*out)->compiles = 1;
    return OK;
}

static void start_anew(ctx *c) {
    const int64_t fail_after = c->mem.fail_after;
    ctx_release(c);
    ctx_init(c);
    c->mem.fail_after = fail_after;
}

/* A way to choose what is made again. */
typedef struct way {
    recompute_goal goal;
    bool offload;
} way;

enum { OTHER_WAYS = 3 };

/* What may take less memory than a choice that was estimated to take the least: what is made again is not fused as it was
 * before, and what is read back waits for its reader. out[0, n). */
static int other_ways(const recompute_request *r, way *out) {
    int n = 0;

    if (r->goal == RECOMPUTE_TO && r->offload) out[n++] = (way){RECOMPUTE_TO, false};
    out[n++] = (way){RECOMPUTE_CHEAP, false};
    if (r->goal == RECOMPUTE_TO) out[n++] = (way){RECOMPUTE_LAYERS, false};
    return n;
}

/* Of the plan that was asked for and the other ones the smallest. */
static status make_smaller(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, plan **out) {
    way ways[OTHER_WAYS + 1];
    const int n = other_ways(&o->again, ways) + 1;
    compile_options to = *o;
    int64_t least = INT64_MAX;
    int best = 0, compiles = 0;

    ways[n - 1] = (way){o->again.goal, o->again.offload};
    for (int i = 0; i <= n; i++) {
        if (i == n && best == n - 1) break; /* it is there */
        if (compiles++ > 0) start_anew(c);
        to.again.goal = ways[i < n ? i : best].goal;
        to.again.offload = ways[i < n ? i : best].offload;
        TRY(make(c, model, inputs, &to, out));
        const int64_t bytes = plan_beside_gradients(*out);
        if (i == n || bytes > least) continue;
        least = bytes;
        best = i;
    }
    (*out)->compiles = compiles;
    return OK;
}

/* Where nothing else says what is made again, checkpoints of the module's do. */
static bool follows_checkpoints(const graph *model, const compile_options *o) {
    return o->output_grads && o->again.goal == RECOMPUTE_CHEAP && !o->again.n_wishes &&
           recompute_has_checkpoints(model);
}

status compile(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, plan **out) {
    compile_options own = *o;

    if (follows_checkpoints(model, o)) own.again.goal = RECOMPUTE_CHECKPOINTS;
    const recompute_goal goal = own.again.goal;
    const bool smaller = o->output_grads && goal != RECOMPUTE_NOTHING && goal != RECOMPUTE_CHEAP;

    TRY((smaller ? make_smaller : make)(c, model, inputs, &own, out));
    return o->any_size ? OK : plan_check_limit(c, *out);
}

/* What a budget is for: a run beside its gradients, and those that backward is given. */
static int64_t step_bytes(const plan *p) {
    int64_t sum = p->run_bytes - p->arena_bytes + plan_beside_gradients(p);
    for (int i = 0; p->g->output_grads && i < p->g->n_outputs; i++)
        if (p->g->output_grads[i]) sum = size_add(sum, value_bytes(p->g->output_grads[i]));
    return sum;
}

/* Plans of a step within a budget, of which one is looked for. */
typedef struct within {
    ctx *c;
    const graph *model;
    const input_spec *inputs;
    compile_options o;
    int64_t budget, least; /* bytes; of those that were made, the smallest */
    int compiles;
    char largest[LARGEST_TEXT]; /* of the smallest */
} within;

/* Makes the next; *fits: it does. */
static status make_next(within *w, plan **out, bool *fits) {
    if (w->compiles++ > 0) start_anew(w->c);
    TRY(make(w->c, w->model, w->inputs, &w->o, out));
    (*out)->compiles = w->compiles;
    const int64_t bytes = step_bytes(*out);
    *fits = bytes <= w->budget || !w->o.output_grads;
    if (bytes >= w->least) return OK;
    w->least = bytes;
    return plan_largest(w->c, *out, w->largest, sizeof w->largest);
}

/* The first of a series of choices, the same for all budgets, whose plan fits. So a smaller budget never takes more memory
 * or less work than a larger one. What a choice is estimated to take and what its plan takes differ: by results, passes
 * between them, and gaps. A choice is left out where its plan, if it took as much less than estimated as the one that keeps
 * all, and a step of the series less than that, were still too large. */
static status make_of_series(within *w, plan **out, bool *fits) {
    const int64_t before = (*out)->again.before;
    recompute_request *again = &w->o.again;
    recompute_series series = {0};
    ctx keeps;
    status s;

    ctx_scratch_begin(w->c, &keeps);
    series.c = &keeps;
    again->series = &series;
    again->target = size_add(w->budget, before - step_bytes(*out) + before / RECOMPUTE_TARGETS);
    do {
        s = make_next(w, out, fits);
        if (s == OK) again->from = (*out)->again.place + 1;
    } while (s == OK && !*fits && again->from < series.n);
    again->series = NULL;
    ctx_release(&keeps);
    return s;
}

static status make_otherwise(within *w, plan **out, bool *fits) {
    way ways[OTHER_WAYS];
    const int n = other_ways(&w->o.again, ways);

    w->o.again.target = 0;
    for (int i = 0; i < n && !*fits; i++) {
        w->o.again.goal = ways[i].goal;
        w->o.again.offload = ways[i].offload;
        TRY(make_next(w, out, fits));
    }
    return OK;
}

status compile_within(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, int64_t budget,
                      plan **out) {
    within w = {.c = c, .model = model, .inputs = inputs, .o = *o, .budget = budget, .least = INT64_MAX};
    bool fits;

    w.o.again.goal = RECOMPUTE_TO;
    w.o.again.target = INT64_MAX; /* nothing runs twice; how much is needed is estimated all the same */
    TRY(make_next(&w, out, &fits));
    if (!fits) TRY(make_of_series(&w, out, &fits));
    if (!fits) TRY(make_otherwise(&w, out, &fits));
    if (fits) return o->any_size ? OK : plan_check_limit(c, *out);
    return fail(c, E_NOMEM,
                "a step needs %" PRId64
                " bytes for activations, workspace and results, however much is computed again, and the "
                "memory budget leaves %" PRId64 "; the largest: %s",
                w.least, budget, w.largest);
}
