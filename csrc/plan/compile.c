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

/* What is made again is not fused as it was before, and may so take more memory than it frees: what was estimated to take
 * the least is compared, as a plan, with what levels below it choose, and the smallest is taken. */
static status make_smaller(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, plan **out) {
    const recompute_goal goals[] = {RECOMPUTE_CHEAP, RECOMPUTE_LAYERS, o->again.goal};
    const int n = sizeof goals / sizeof *goals, without_layers = o->again.goal != RECOMPUTE_TO;
    compile_options to = *o;
    int64_t least = INT64_MAX;
    int best = 0, compiles = 0;

    for (int i = 0; i < n; i++) {
        if (i == 1 && without_layers) continue;
        if (compiles++ > 0) start_anew(c);
        to.again.goal = goals[i];
        TRY(make(c, model, inputs, &to, out));
        const int64_t bytes = plan_beside_gradients(*out);
        if (bytes > least) continue;
        least = bytes;
        best = i;
    }
    if (best < n - 1) {
        start_anew(c);
        to.again.goal = goals[best];
        TRY(make(c, model, inputs, &to, out));
        compiles++;
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

status compile_within(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, int64_t budget,
                      plan **out) {
    enum { TRIES = 8, A_LITTLE = 256 };
    compile_options to = *o;
    recompute_request *again = &to.again;
    int64_t least = INT64_MAX, bytes;
    char largest[LARGEST_TEXT] = "";

    again->goal = RECOMPUTE_TO;
    again->target = INT64_MAX; /* nothing runs twice; how much is needed is estimated all the same */
    for (int i = 0; i <= TRIES; i++) {
        if (i > 0) start_anew(c);
        TRY(make(c, model, inputs, &to, out));
        (*out)->compiles = i + 1;
        bytes = step_bytes(*out);
        if (bytes <= budget || !o->output_grads) return o->any_size ? OK : plan_check_limit(c, *out);
        if (bytes < least) {
            least = bytes;
            TRY(plan_largest(c, *out, largest, sizeof largest));
        }
        if (i > 0 && (*out)->again.after > again->target) break; /* as little as can be reached */
        /* What the choice estimates and what the plan takes differ: by results, passes between them, and gaps. */
        if (i == 0) again->target = (*out)->again.before - (bytes - budget);
        else again->target -= bytes - budget + (*out)->again.before / A_LITTLE;
        if (i == TRIES - 1) again->target = 0;
    }
    /* What is made again is not fused as it was before: where that takes more, nearly nothing is, or layers as a whole. */
    static const recompute_goal others[] = {RECOMPUTE_CHEAP, RECOMPUTE_LAYERS};
    for (size_t k = 0; k < sizeof others / sizeof *others; k++) {
        const int compiles = (*out)->compiles + 1;
        start_anew(c);
        again->goal = others[k];
        TRY(make(c, model, inputs, &to, out));
        (*out)->compiles = compiles;
        bytes = step_bytes(*out);
        if (bytes <= budget) return o->any_size ? OK : plan_check_limit(c, *out);
        if (bytes < least) {
            least = bytes;
            TRY(plan_largest(c, *out, largest, sizeof largest));
        }
    }
    return fail(c, E_NOMEM,
                "a step needs %" PRId64
                " bytes for activations, workspace and results, however much is computed again, and the "
                "memory budget leaves %" PRId64 "; the largest: %s",
                least, budget, largest);
}
