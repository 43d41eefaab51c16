/* recompute_choice.c -- simulates a step with some values made again, and chooses these. */
#include "plan/recompute_choice.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { NEVER = -1, SHORTEST_PERIOD = 2, LONGEST_PERIOD = 512 /* steps of a layer */ };

/* When each value is there, in half steps: at 2t + 1 step t has made its results, and at 2t it has not yet. */
typedef struct lives {
    int *born, *last; /* [value] as it is made first, and read last, by what keeps it */
    int *first;       /* [value] when backward reads it first */
    int *again_born, *again_last;
    bool *ran_again; /* [step] */
    int now;         /* steps so far, those that run again included */
    int64_t *change; /* [half steps] bytes that come and go */
    double cost;
} lives;

typedef struct chooser {
    const recompute_problem *p;
    bool *kept_for; /* [value] backward reads what forward makes */
    bool *again;
    int *stashes;                /* [value] options that have been taken and keep it in their place */
    int *queue, *stamp, stamped; /* steps that one value needs; stamp[step] == stamped: it is in the queue */
    int64_t peak;
    int at; /* half step of the peak */
} chooser;

static status lives_new(ctx *c, const recompute_problem *p, lives *l) {
    const int times = 2 * (p->n_steps + p->n_forward) + 4;

    TRY(NEW(c, l->born, p->n_values));
    TRY(NEW(c, l->last, p->n_values));
    TRY(NEW(c, l->first, p->n_values));
    TRY(NEW(c, l->again_born, p->n_values));
    TRY(NEW(c, l->again_last, p->n_values));
    TRY(NEW(c, l->ran_again, p->n_steps));
    return NEW(c, l->change, times);
}

static void lives_clear(const recompute_problem *p, lives *l) {
    for (int v = 0; v < p->n_values; v++)
        l->born[v] = l->last[v] = l->first[v] = l->again_born[v] = l->again_last[v] = NEVER;
    memset(l->ran_again, 0, (size_t)p->n_steps * sizeof *l->ran_again);
    memset(l->change, 0, (size_t)(2 * (p->n_steps + p->n_forward) + 4) * sizeof *l->change);
    l->now = 0;
    l->cost = 0;
}

static bool is_forwards(const recompute_problem *p, int v) { return p->maker[v] >= 0 && p->maker[v] < p->n_forward; }

/* Is what forward has made of it there in backward? */
static bool is_there(const chooser *s, int v) {
    return s->p->held[v] || !is_forwards(s->p, v) || (s->kept_for[v] && !s->again[v]);
}

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* The steps that run for `step` to run again: s->queue[0, count). With `l`, those that ran again already are left out.
 * Returns the count, or NEVER where one of them must not run twice; *cost: of all. */
static int steps_for(chooser *s, const lives *l, int step_wanted, double *cost) {
    const recompute_problem *p = s->p;
    int count = 0;

    *cost = 0;
    s->stamped++;
    s->queue[count++] = step_wanted;
    s->stamp[step_wanted] = s->stamped;
    for (int i = 0; i < count; i++) {
        const recompute_step *step = &p->steps[s->queue[i]];
        if (step->cost < 0) return NEVER;
        *cost += step->cost;
        for (int k = 0; k < step->n_in; k++) {
            const int u = step->in[k];
            if (is_there(s, u) || s->stamp[p->maker[u]] == s->stamped || (l && l->ran_again[p->maker[u]])) continue;
            s->stamp[p->maker[u]] = s->stamped;
            s->queue[count++] = p->maker[u];
        }
    }
    return count;
}

/* --- the simulation ------------------------------------------------------------------------------------------------- */

static void read_value(const chooser *s, lives *l, int v, bool dies_early) {
    const int when = 2 * l->now + !dies_early;
    if (is_there(s, v)) l->last[v] = when;
    else l->again_last[v] = when;
}

/* A step of backward, or one of forward that runs again. */
static void run_again(const chooser *s, lives *l, int step) {
    const recompute_step *x = &s->p->steps[step];

    for (int i = 0; i < x->n_in; i++) read_value(s, l, x->in[i], x->in_place);
    for (int i = 0; i < x->n_out; i++) {
        const int v = x->out[i];
        if (is_there(s, v)) continue;
        l->again_born[v] = l->again_last[v] = 2 * l->now + 1;
    }
    l->change[2 * l->now + 1] += x->work;
    l->change[2 * l->now + 2] -= x->work;
    l->ran_again[step] = true;
    l->cost += x->cost;
    l->now++;
}

static void run_forward(lives *l, const recompute_step *x) {
    for (int i = 0; i < x->n_in; i++) l->last[x->in[i]] = 2 * l->now + !x->in_place;
    for (int i = 0; i < x->n_out; i++) l->born[x->out[i]] = l->last[x->out[i]] = 2 * l->now + 1;
    l->change[2 * l->now + 1] += x->work;
    l->change[2 * l->now + 2] -= x->work;
    l->now++;
}

static void run_backward(chooser *s, lives *l, const recompute_step *x) {
    double cost;

    for (int i = 0; i < x->n_in; i++) {
        const int v = x->in[i];
        if (l->first[v] == NEVER) l->first[v] = 2 * l->now;
        if (is_there(s, v) || l->again_born[v] != NEVER) continue;
        int count = steps_for(s, l, s->p->maker[v], &cost);
        qsort(s->queue, (size_t)count, sizeof *s->queue, ascending);
        for (int k = 0; k < count; k++) run_again(s, l, s->queue[k]);
    }
    for (int i = 0; i < x->n_in; i++) read_value(s, l, x->in[i], x->in_place);
    for (int i = 0; i < x->n_out; i++) l->born[x->out[i]] = l->last[x->out[i]] = 2 * l->now + 1;
    l->change[2 * l->now + 1] += x->work;
    l->change[2 * l->now + 2] -= x->work;
    l->now++;
}

/* Sets s->peak and s->at. */
static void simulate(chooser *s, lives *l) {
    const recompute_problem *p = s->p;
    int64_t bytes = 0;

    lives_clear(p, l);
    for (int t = 0; t < p->n_forward; t++) run_forward(l, &p->steps[t]);
    for (int t = p->n_forward; t < p->n_steps; t++) run_backward(s, l, &p->steps[t]);
    for (int v = 0; v < p->n_values; v++) {
        if (p->held[v]) continue;
        if (l->born[v] != NEVER) l->change[l->born[v]] += p->bytes[v];
        if (l->born[v] != NEVER) l->change[l->last[v] + 1] -= p->bytes[v];
        if (l->again_born[v] != NEVER) l->change[l->again_born[v]] += p->bytes[v];
        if (l->again_born[v] != NEVER) l->change[l->again_last[v] + 1] -= p->bytes[v];
    }
    s->peak = 0;
    s->at = 0;
    for (int t = 0; t <= 2 * l->now; t++)
        if ((bytes += l->change[t]) > s->peak) {
            s->peak = bytes;
            s->at = t;
        }
}

static status chooser_new(ctx *c, const recompute_problem *p, chooser *s, lives *l) {
    *s = (chooser){.p = p};
    TRY(NEW(c, s->kept_for, p->n_values));
    TRY(NEW(c, s->again, p->n_values));
    TRY(NEW(c, s->stashes, p->n_values));
    TRY(NEW(c, s->queue, p->n_forward));
    TRY(NEW(c, s->stamp, p->n_steps));
    for (int t = p->n_forward; t < p->n_steps; t++)
        for (int i = 0; i < p->steps[t].n_in; i++) s->kept_for[p->steps[t].in[i]] = is_forwards(p, p->steps[t].in[i]);
    return lives_new(c, p, l);
}

static void take_result(const chooser *s, const lives *l, recompute_choice *out) {
    out->kept = s->kept_for;
    out->again = s->again;
    out->peak = s->peak;
    out->cost = l->cost;
    out->count = 0;
    for (int v = 0; v < s->p->n_values; v++) out->count += s->again[v];
}

static bool may_go(const chooser *s, int v) {
    return s->kept_for[v] && !s->p->held[v] && !s->again[v] && s->p->bytes[v];
}

/* --- options -------------------------------------------------------------------------------------------------------- */

enum { MOST_STASHES = 64 /* that are looked at for one step */ };

/* Of what a step of forward makes and backward reads. */
static int64_t bytes_kept(const chooser *s, int step) {
    const recompute_step *x = &s->p->steps[step];
    int64_t sum = 0;
    for (int i = 0; i < x->n_out; i++)
        if (may_go(s, x->out[i])) sum += s->p->bytes[x->out[i]];
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
            bool known = is_there(s, u);
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
        if (steps_for(s, NULL, step, &cost) != NEVER && cost < most) {
            best = stashes[i];
            most = cost;
        }
        s->kept_for[stashes[i]] = false;
    }
    return best;
}

/* `stash`: NEVER, or one that makes it possible. */
static status describe_option(ctx *c, chooser *s, int step, int stash, recompute_option *out) {
    int *chain;

    *out = (recompute_option){.step = step, .stash = stash, .bytes = bytes_kept(s, step)};
    if (stash != NEVER) {
        s->kept_for[stash] = true;
        out->bytes -= s->p->bytes[stash];
    }
    out->n_chain = steps_for(s, NULL, step, &out->cost);
    if (stash != NEVER) s->kept_for[stash] = false;
    qsort(s->queue, (size_t)out->n_chain, sizeof *s->queue, ascending);
    TRY(NEW(c, chain, out->n_chain));
    memcpy(chain, s->queue, (size_t)out->n_chain * sizeof *chain);
    out->chain = chain;
    return OK;
}

static status find_options(ctx *c, chooser *s, recompute_option **out, int *count) {
    recompute_option *options;

    *count = 0;
    TRY(NEW(c, options, 2 * s->p->n_forward));
    for (int t = 0; t < s->p->n_forward; t++) {
        double cost;
        if (!bytes_kept(s, t)) continue;
        const bool plain = steps_for(s, NULL, t, &cost) != NEVER;
        if (plain) TRY(describe_option(c, s, t, NEVER, &options[(*count)++]));
        const int stash = cheapest_stash(s, t, plain ? cost : INFINITY);
        if (stash != NEVER) TRY(describe_option(c, s, t, stash, &options[(*count)++]));
    }
    *out = options;
    return OK;
}

status recompute_options(ctx *c, const recompute_problem *p, recompute_option **out, int *count) {
    chooser s;
    lives l = {0};

    TRY(chooser_new(c, p, &s, &l));
    return find_options(c, &s, out, count);
}

/* --- to a number of bytes ------------------------------------------------------------------------------------------- */

/* One thing to do next. */
typedef struct move {
    int v;                          /* is made again; NEVER: there is nothing to do */
    const recompute_option *option; /* if it takes a stash, with all that its step makes */
} move;

static void take_option(chooser *s, const recompute_option *o, bool taken) {
    const recompute_step *x = &s->p->steps[o->step];
    for (int i = 0; i < x->n_out; i++)
        if (s->kept_for[x->out[i]] && !s->p->held[x->out[i]]) s->again[x->out[i]] = taken;
    if (o->stash == NEVER) return;
    s->stashes[o->stash] += taken ? 1 : -1;
    s->kept_for[o->stash] = s->stashes[o->stash] > 0;
}

static void take(chooser *s, const move *m, bool taken) {
    if (m->option) take_option(s, m->option, taken);
    else s->again[m->v] = taken;
}

/* Of what is kept over the time of the peak, what costs the least for a byte. `stashed`: [step] the option with a stash of
 * a step that cannot run again without one. */
static move cheapest(chooser *s, const lives *l, const bool *tried, const recompute_option *const *stashed) {
    move found = {.v = NEVER};
    double best = 0, cost;

    for (int v = 0; v < s->p->n_values; v++) {
        if (!may_go(s, v) || tried[v] || l->born[v] > s->at || l->first[v] <= s->at) continue;
        const recompute_option *o = stashed[s->p->maker[v]];
        if (o) cost = o->cost / (double)o->bytes;
        else if (steps_for(s, l, s->p->maker[v], &cost) == NEVER) continue;
        else cost /= (double)s->p->bytes[v];
        if (found.v != NEVER && cost >= best) continue;
        best = cost;
        found = (move){v, o};
    }
    return found;
}

/* The options with a stash of those steps that have no other, [step]; before anything is made again. */
static status find_stashed(ctx *c, chooser *s, const recompute_option ***out) {
    recompute_option *options;
    int count;

    TRY(NEW(c, *out, s->p->n_steps));
    TRY(find_options(c, s, &options, &count));
    for (int i = 0; i < count; i++)
        if (options[i].stash != NEVER && (i == 0 || options[i - 1].step != options[i].step))
            (*out)[options[i].step] = &options[i];
    return OK;
}

static status lower_to(ctx *c, chooser *s, lives *l, const recompute_option *const *stashed, int64_t target) {
    bool *tried;
    move m;

    TRY(NEW(c, tried, s->p->n_values));
    while (s->peak > target && (m = cheapest(s, l, tried, stashed)).v != NEVER) {
        const int64_t peak = s->peak;
        take(s, &m, true);
        tried[m.v] = true;
        simulate(s, l);
        if (s->peak <= peak) continue;
        take(s, &m, false);
        simulate(s, l);
    }
    return OK;
}

status recompute_to(ctx *c, const recompute_problem *p, const recompute_option *const *taken, int n_taken,
                    int64_t target, recompute_choice *out) {
    const recompute_option **stashed = NULL;
    chooser s;
    lives l = {0};

    TRY(chooser_new(c, p, &s, &l));
    if (target < INT64_MAX) TRY(find_stashed(c, &s, &stashed));
    simulate(&s, &l);
    out->before = s.peak;
    for (int i = 0; i < n_taken; i++) take_option(&s, taken[i], true);
    if (n_taken) simulate(&s, &l);
    if (s.peak > target) TRY(lower_to(c, &s, &l, stashed, target));
    take_result(&s, &l, out);
    return OK;
}

/* --- layers --------------------------------------------------------------------------------------------------------- */

/* A stretch of forward that repeats: `count` times `period` steps. */
typedef struct layers {
    int begin, period, count;
} layers;

/* The longest run of steps each of which is done once more `period` steps later. */
static layers longest_run(const recompute_problem *p, int period, int from, int to) {
    layers best = {.period = period};
    int length = 0;

    for (int t = from; t + period < to; t++) {
        length = p->steps[t].kind == p->steps[t + period].kind ? length + 1 : 0;
        if (length <= best.count) continue;
        best.count = length;
        best.begin = t + 1 - length;
    }
    best.count = best.count >= period ? best.count / period + 1 : 0;
    return best;
}

/* Those that cover most of [from, to), in the shortest period that does: a longer one has to cover a layer more. */
static layers find_layers(const recompute_problem *p, int from, int to) {
    layers best = {0};

    for (int q = SHORTEST_PERIOD; 2 * q <= to - from && q <= LONGEST_PERIOD; q++) {
        const layers now = longest_run(p, q, from, to);
        if (now.count > 1 && now.count * q > best.count * best.period + q / 2) best = now;
    }
    return best;
}

/* Bytes that `v` brings into the time behind a layer that ends at step `end`. */
static int64_t bytes_behind(const chooser *s, const int *last, int v, int end) {
    return s->p->held[v] || last[v] < end ? 0 : s->p->bytes[v];
}

/* What the layers give to those behind them, where they begin `shift` steps later. */
static int64_t bytes_between(const chooser *s, const int *last, const layers *x, int shift) {
    int64_t sum = 0;

    for (int k = 0; k + 1 < x->count; k++) {
        const int begin = x->begin + shift + k * x->period, end = begin + x->period;
        for (int t = begin; t < end && t < s->p->n_forward; t++)
            for (int i = 0; i < s->p->steps[t].n_out; i++) sum += bytes_behind(s, last, s->p->steps[t].out[i], end);
    }
    return sum;
}

/* All that lies inside of layers, but of the last, which backward begins with. */
static void forget_inside(chooser *s, const lives *l, const int *last, const layers *x) {
    double cost;

    for (int k = 0; k + 1 < x->count; k++) {
        const int begin = x->begin + k * x->period, end = begin + x->period;
        for (int t = begin; t < end; t++)
            for (int i = 0; i < s->p->steps[t].n_out; i++) {
                const int v = s->p->steps[t].out[i];
                if (bytes_behind(s, last, v, end) || !may_go(s, v)) continue;
                s->again[v] = steps_for(s, l, s->p->maker[v], &cost) != NEVER;
            }
    }
}

static void forget_layers(chooser *s, const lives *l, const int *last, int from, int to) {
    layers x = find_layers(s->p, from, to);
    int64_t least = INT64_MAX;
    int shift = 0;

    if (!x.count) return;
    for (int d = 0; d < x.period; d++) {
        const int64_t bytes = bytes_between(s, last, &x, d);
        if (bytes >= least) continue;
        least = bytes;
        shift = d;
    }
    const int end = x.begin + x.count * x.period;
    x.begin += shift;
    x.count = (end - x.begin) / x.period;
    forget_inside(s, l, last, &x);
    forget_layers(s, l, last, from, x.begin);
    forget_layers(s, l, last, end, to);
}

status recompute_layers(ctx *c, const recompute_problem *p, recompute_choice *out) {
    chooser s;
    lives l = {0};
    int *last; /* [value] the last step of forward that reads it */

    TRY(chooser_new(c, p, &s, &l));
    TRY(NEW(c, last, p->n_values));
    for (int t = 0; t < p->n_forward; t++)
        for (int i = 0; i < p->steps[t].n_in; i++) last[p->steps[t].in[i]] = t;
    simulate(&s, &l);
    out->before = s.peak;
    lives_clear(p, &l);
    forget_layers(&s, &l, last, 0, p->n_forward);
    simulate(&s, &l);
    take_result(&s, &l, out);
    return OK;
}
