/* recompute_simulation.c -- runs a step in numbers: when each value is made, made again and read, and how many bytes that is. */
#include "plan/recompute_simulation.h"

#include "plan/sweep.h"

#include <stdlib.h>
#include <string.h>

/* Half steps: of all steps, of forward's once more, and of what they make as it is read back. */
static int most_times(const recompute_problem *p) {
    return 2 * (p->n_steps + p->n_forward + (p->moving ? p->n_values : 0)) + 4;
}

static status lives_new(ctx *c, const recompute_problem *p, lives *l) {
    const int times = most_times(p);

    TRY(NEW(c, l->born, p->n_values));
    TRY(NEW(c, l->last, p->n_values));
    TRY(NEW(c, l->first, p->n_values));
    TRY(NEW(c, l->again_born, p->n_values));
    TRY(NEW(c, l->again_last, p->n_values));
    TRY(NEW(c, l->ran_again, p->n_steps));
    return NEW(c, l->change, times);
}

void lives_clear(const recompute_problem *p, lives *l) {
    for (int v = 0; v < p->n_values; v++)
        l->born[v] = l->last[v] = l->first[v] = l->again_born[v] = l->again_last[v] = NEVER;
    memset(l->ran_again, 0, (size_t)p->n_steps * sizeof *l->ran_again);
    memset(l->change, 0, (size_t)most_times(p) * sizeof *l->change);
    l->now = 0;
    l->cost = 0;
    l->written = l->read_at = NEVER;
}

static bool is_forwards(const recompute_problem *p, int v) { return p->maker[v] >= 0 && p->maker[v] < p->n_forward; }

bool chooser_has(const chooser *s, int v) {
    return s->p->held[v] || !is_forwards(s->p, v) || (s->kept_for[v] && !s->again[v] && !s->offloaded[v]);
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* As chooser_steps_for, with looks of its own. */
static int steps_for(chooser *s, const lives *l, int step_wanted, double *cost, int64_t *looks) {
    const recompute_problem *p = s->p;
    int count = 0;

    *cost = 0;
    s->stamped++;
    s->queue[count++] = step_wanted;
    s->stamp[step_wanted] = s->stamped;
    for (int i = 0; i < count; i++) {
        const recompute_step *step = &p->steps[s->queue[i]];
        *looks -= step->n_in + 1;
        if (step->cost < 0 || *looks < 0) return NEVER;
        *cost += step->cost;
        for (int k = 0; k < step->n_in; k++) {
            const int u = step->in[k];
            if (chooser_has(s, u) || s->offloaded[u]) continue;
            if (s->stamp[p->maker[u]] == s->stamped || (l && l->ran_again[p->maker[u]])) continue;
            s->stamp[p->maker[u]] = s->stamped;
            s->queue[count++] = p->maker[u];
        }
    }
    return count;
}

void chooser_allow(chooser *s, int looks) {
    s->looks = (int64_t)looks * s->p->n_steps;
    for (int t = 0; t < s->p->n_steps; t++) s->looks += (int64_t)looks * s->p->steps[t].n_in;
}

int chooser_steps_for(chooser *s, const lives *l, int step, double *cost) {
    return steps_for(s, l, step, cost, &s->looks);
}

/* --- the simulation ------------------------------------------------------------------------------------------------- */

static void read_value(const chooser *s, lives *l, int v, bool dies_early) {
    const int when = 2 * l->now + !dies_early;
    if (chooser_has(s, v)) l->last[v] = when;
    else l->again_last[v] = when;
}

/* What the step that comes next reads is read back before it, unless it is there. */
static void read_back(const chooser *s, lives *l, const recompute_step *x) {
    for (int i = 0; i < x->n_in; i++) {
        const int v = x->in[i];
        if (!s->offloaded[v] || l->again_born[v] != NEVER) continue;
        l->again_last[v] = 2 * l->now + 1;
        l->again_born[v] = s->p->beside && l->read_at != NEVER ? l->read_at : l->again_last[v];
        l->read_at = l->again_last[v];
        l->cost += s->p->moving[v];
        l->now++;
    }
}

/* A step of forward that runs again. */
static void run_again(const chooser *s, lives *l, int step) {
    const recompute_step *x = &s->p->steps[step];

    read_back(s, l, x);
    for (int i = 0; i < x->n_in; i++) read_value(s, l, x->in[i], x->in_place);
    for (int i = 0; i < x->n_out; i++) {
        const int v = x->out[i];
        if (chooser_has(s, v) || s->offloaded[v]) continue;
        l->again_born[v] = l->again_last[v] = 2 * l->now + 1;
    }
    sweep_add(l->change, 2 * l->now + 1, 2 * l->now + 1, x->work);
    l->ran_again[step] = true;
    l->cost += x->cost;
    l->now++;
}

/* `v` has been made and is written out, which ends with the next such value, or with forward. */
static void write_out(const chooser *s, lives *l, int v, int when) {
    if (!s->p->beside) return;
    if (l->written != NEVER && l->last[l->written] < when) l->last[l->written] = when;
    l->written = v;
}

static void run_forward(const chooser *s, lives *l, const recompute_step *x) {
    for (int i = 0; i < x->n_in; i++) l->last[x->in[i]] = 2 * l->now + !x->in_place;
    for (int i = 0; i < x->n_out; i++) l->born[x->out[i]] = l->last[x->out[i]] = 2 * l->now + 1;
    for (int i = 0; i < x->n_out; i++)
        if (s->offloaded[x->out[i]]) write_out(s, l, x->out[i], 2 * l->now + 1);
    sweep_add(l->change, 2 * l->now + 1, 2 * l->now + 1, x->work);
    l->now++;
}

static void run_backward(chooser *s, lives *l, const recompute_step *x) {
    int64_t all = INT64_MAX;
    double cost;

    for (int i = 0; i < x->n_in; i++) {
        const int v = x->in[i];
        if (l->first[v] == NEVER) l->first[v] = 2 * l->now;
        if (chooser_has(s, v) || s->offloaded[v] || l->again_born[v] != NEVER) continue;
        int count = steps_for(s, l, s->p->maker[v], &cost, &all);
        qsort(s->queue, (size_t)count, sizeof *s->queue, ascending);
        for (int k = 0; k < count; k++) run_again(s, l, s->queue[k]);
    }
    read_back(s, l, x);
    for (int i = 0; i < x->n_in; i++) read_value(s, l, x->in[i], x->in_place);
    for (int i = 0; i < x->n_out; i++) l->born[x->out[i]] = l->last[x->out[i]] = 2 * l->now + 1;
    sweep_add(l->change, 2 * l->now + 1, 2 * l->now + 1, x->work);
    l->now++;
}

void chooser_simulate(chooser *s, lives *l) {
    const recompute_problem *p = s->p;

    lives_clear(p, l);
    for (int t = 0; t < p->n_forward; t++) run_forward(s, l, &p->steps[t]);
    write_out(s, l, NEVER, 2 * l->now - 1);
    for (int t = p->n_forward; t < p->n_steps; t++) run_backward(s, l, &p->steps[t]);
    for (int v = 0; v < p->n_values; v++) {
        if (p->held[v]) continue;
        if (p->to_end && p->to_end[v] && l->born[v] != NEVER) l->last[v] = 2 * l->now;
        if (l->born[v] != NEVER) sweep_add(l->change, l->born[v], l->last[v], p->bytes[v]);
        if (l->again_born[v] != NEVER) sweep_add(l->change, l->again_born[v], l->again_last[v], p->bytes[v]);
    }
    s->peak = sweep_most(l->change, 2 * l->now + 1, &s->at);
}

status chooser_new(ctx *c, const recompute_problem *p, chooser *s, lives *l) {
    *s = (chooser){.p = p};
    TRY(NEW(c, s->kept_for, p->n_values));
    TRY(NEW(c, s->again, p->n_values));
    TRY(NEW(c, s->offloaded, p->n_values));
    TRY(NEW(c, s->stashes, p->n_values));
    TRY(NEW(c, s->queue, p->n_forward));
    TRY(NEW(c, s->stamp, p->n_steps));
    for (int t = p->n_forward; t < p->n_steps; t++)
        for (int i = 0; i < p->steps[t].n_in; i++) s->kept_for[p->steps[t].in[i]] = is_forwards(p, p->steps[t].in[i]);
    return lives_new(c, p, l);
}

void chooser_result(const chooser *s, const lives *l, recompute_choice *out) {
    out->kept = s->kept_for;
    out->again = s->again;
    out->offloaded = s->offloaded;
    out->peak = s->peak;
    out->cost = l->cost;
    out->count = out->n_offloaded = 0;
    for (int v = 0; v < s->p->n_values; v++) {
        out->count += s->again[v];
        out->n_offloaded += s->offloaded[v];
    }
}

bool chooser_may_drop(const chooser *s, int v) {
    return s->kept_for[v] && !s->p->held[v] && !s->again[v] && !s->offloaded[v] && s->p->bytes[v];
}
