/* recompute_options.c -- lists for each step of forward how what backward reads of it is made again, with and without a stash. */
#include "plan/recompute_simulation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

enum { MOST_STASHES = 64 /* that are looked at for one step */, LOOKS = 1024 /* for a step; some tens are the rule */ };

/* Of what a step of forward makes and backward reads. */
static int64_t bytes_kept(const chooser *s, int step) {
    const recompute_step *x = &s->p->steps[step];
    int64_t sum = 0;
    for (int i = 0; i < x->n_out; i++)
        if (chooser_may_drop(s, x->out[i])) sum += s->p->bytes[x->out[i]];
    return sum;
}

/* Values that are not there, and that the steps read which would run for `step` to run again. Returns how many. */
static int find_stashes(chooser *s, int step, int found[MOST_STASHES]) {
    const recompute_problem *p = s->p;
    int count = 0, n = 0;

    s->stamped++;
    s->queue[count++] = step;
    s->stamp[step] = s->stamped;
    for (int i = 0; i < count; i++)
        for (int k = 0; k < p->steps[s->queue[i]].n_in && n < MOST_STASHES; k++) {
            const int u = p->steps[s->queue[i]].in[k], maker = p->maker[u];
            bool known = chooser_has(s, u);
            for (int j = 0; j < n && !known; j++) known = found[j] == u;
            if (known) continue;
            found[n++] = u;
            if (p->steps[maker].cost < 0 || s->stamp[maker] == s->stamped) continue;
            s->stamp[maker] = s->stamped;
            s->queue[count++] = maker;
        }
    return n;
}

/* The value with at most half of the bytes with which `step` runs again at the least cost, below `most`; NEVER: none. */
static int cheapest_stash(chooser *s, int step, double most) {
    const int64_t half = bytes_kept(s, step) / 2;
    int stashes[MOST_STASHES], best = NEVER;
    double cost;

    if (s->p->steps[step].cost < 0) return NEVER;
    const int n = find_stashes(s, step, stashes);
    for (int i = 0; i < n; i++) {
        if (s->p->bytes[stashes[i]] > half) continue;
        s->kept_for[stashes[i]] = true;
        if (chooser_steps_for(s, NULL, step, &cost) != NEVER && cost < most) {
            best = stashes[i];
            most = cost;
        }
        s->kept_for[stashes[i]] = false;
    }
    return best;
}

/* `stash`: NEVER, or one that makes it possible. Adds nothing where no looks are left. */
static status add_option(ctx *c, chooser *s, int step, int stash, recompute_option *options, int *count) {
    recompute_option o = {.step = step, .stash = stash, .bytes = bytes_kept(s, step)};
    int *chain;

    if (stash != NEVER) {
        s->kept_for[stash] = true;
        o.bytes -= s->p->bytes[stash];
    }
    o.n_chain = chooser_steps_for(s, NULL, step, &o.cost);
    if (stash != NEVER) s->kept_for[stash] = false;
    if (o.n_chain == NEVER) return OK;
    qsort(s->queue, (size_t)o.n_chain, sizeof *s->queue, ascending);
    TRY(NEW(c, chain, o.n_chain));
    memcpy(chain, s->queue, (size_t)o.n_chain * sizeof *chain);
    o.chain = chain;
    options[(*count)++] = o;
    return OK;
}

status recompute_options(ctx *c, const recompute_problem *p, recompute_option **out, int *count) {
    chooser s;
    lives l = {0};

    *count = 0;
    TRY(chooser_new(c, p, &s, &l));
    chooser_allow(&s, LOOKS);
    TRY(NEW(c, *out, 2 * p->n_forward));
    for (int t = 0; t < p->n_forward; t++) {
        double cost;
        if (!bytes_kept(&s, t)) continue;
        const bool plain = chooser_steps_for(&s, NULL, t, &cost) != NEVER;
        if (plain) TRY(add_option(c, &s, t, NEVER, *out, count));
        const int stash = cheapest_stash(&s, t, plain ? cost : INFINITY);
        if (stash != NEVER) TRY(add_option(c, &s, t, stash, *out, count));
    }
    return OK;
}
