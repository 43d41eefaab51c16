/* recompute_checkpoints.c -- makes again what lies inside of checkpoints, parts of forward for which the module asks for it. */
#include "plan/recompute_simulation.h"

/* The checkpoint that `step` lies in, or 0. A step that must not run twice lies in none, so what it makes is kept, nor do
 * those of `but`. */
static uint64_t inside_of(const recompute_problem *p, int step, uint64_t but) {
    const recompute_step *x = &p->steps[step];
    return x->cost < 0 || x->checkpoint == but ? 0 : x->checkpoint;
}

/* All inside of checkpoints but one is made again. Whatever else they read is kept until they have run again. */
static status find(ctx *c, const recompute_problem *p, uint64_t but, recompute_choice *out) {
    bool *leaves; /* [value] something outside of its checkpoint reads it */
    chooser s;
    lives l = {0};

    TRY(chooser_new(c, p, &s, &l));
    TRY(NEW(c, leaves, p->n_values));
    chooser_simulate(&s, &l);
    out->before = s.peak;
    for (int t = 0; t < p->n_forward; t++) {
        const uint64_t inside = inside_of(p, t, but);
        for (int i = 0; i < p->steps[t].n_in; i++) {
            const int v = p->steps[t].in[i];
            if (p->maker[v] < 0 || inside_of(p, p->maker[v], but) == inside) continue;
            leaves[v] = true;
            s.kept_for[v] |= inside != 0;
        }
    }
    for (int t = 0; t < p->n_forward; t++)
        for (int i = 0; inside_of(p, t, but) && i < p->steps[t].n_out; i++) {
            const int v = p->steps[t].out[i];
            if (!leaves[v] && chooser_may_drop(&s, v)) s.again[v] = true;
        }
    chooser_simulate(&s, &l);
    chooser_result(&s, &l, out);
    return OK;
}

/* Backward begins with the last one, whose values are needed all at once: it runs again where they wait for a large loss. */
status recompute_checkpoints(ctx *c, const recompute_problem *p, recompute_choice *out) {
    recompute_choice other;
    uint64_t last = 0;

    for (int t = 0; t < p->n_forward; t++)
        if (inside_of(p, t, 0)) last = p->steps[t].checkpoint;
    TRY(find(c, p, last, out));
    TRY(find(c, p, 0, &other));
    if (other.peak < out->peak - out->peak / WORTH_IT) *out = other;
    return OK;
}
