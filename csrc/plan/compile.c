/* compile.c -- specialise, rewrite, differentiate, rewrite, plan. */
#include "plan/compile.h"

#include "grad/grad.h"

#include <string.h>

#ifdef ORT_VERIFY
#define VERIFY(g, when) TRY_AT((g)->c, graph_verify(g), "verifying the graph %s", when)
#else
#define VERIFY(g, when) (void)(g)
#endif

/* A pass that needs a size which is not known ends them all: the plan is a prologue. */
static status rewrite(graph *g, const compile_options *o, int *fired) {
    status s = passes_run(g, BEFORE_GRADIENT, o->disabled_passes, fired);
    if (s != E_PENDING) return s;
    TRY(make_prologue(g));
    graph_remove_dead(g);
    return OK;
}

/* A graph with nothing in it yet. */
static status graph_for(ctx *c, const compile_options *o, graph **out) {
    TRY(graph_new(c, out));
    (*out)->sizes = o->sizes;
    (*out)->n_sizes = o->n_sizes;
    (*out)->host = o->host;
    (*out)->cuda = o->cuda;
    (*out)->padding_unseen = o->padding_unseen;
    (*out)->as_written = o->disabled_passes & pass_bit("clean_up");
    return OK;
}

status compile(ctx *c, const graph *model, const input_spec *inputs, const compile_options *o, plan **out) {
    int fired[MAX_PASSES] = {0};
    graph *g;

    TRY(graph_for(c, o, &g));
    TRY(specialise(g, model, inputs));
    graph_remove_dead(g);
    VERIFY(g, "after specialisation");
    TRY(rewrite(g, o, fired));
    if (o->output_grads && !g->pending) {
        TRY(grad_build(g, o->output_grads));
        graph_remove_dead(g);
        VERIFY(g, "after the gradient");
        TRY(passes_run(g, AFTER_GRADIENT, o->disabled_passes, fired));
    }
    TRY(passes_run(g, LAST, o->disabled_passes, fired));
    TRY(passes_run(g, WHILE_EMITTED, o->disabled_passes, fired));
    TRY(plan_make(g, o->cuda, out));
    memcpy((*out)->fired, fired, sizeof fired);
    return OK;
}
