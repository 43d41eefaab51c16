/* recompute_choice.c -- simulates a step with some values made again, and chooses these. */
#include "plan/recompute_choice.h"

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

/* The steps that make `v` again, in order: s->queue[0, count). With `l`, those that ran again already are left out.
 * Returns the count, or NEVER where one of them must not run twice; *cost: of all. */
static int steps_for(chooser *s, const lives *l, int v, double *cost) {
    const recompute_problem *p = s->p;
    int count = 0;

    *cost = 0;
    s->stamped++;
    s->queue[count++] = p->maker[v];
    s->stamp[p->maker[v]] = s->stamped;
    for (int i = 0; i < count; i++) {
        const recompute_step *step = &p->steps[s->queue[i]];
        if (step->cost < 0) return NEVER;
        *cost += step->cost;
        for (int k = 0; k < step->n_in; k++) {
            const int u = step->in[k];
            if (is_there(s, u) || s->stamp[p->maker[u]] == s->stamped || l->ran_again[p->maker[u]]) continue;
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
        int count = steps_for(s, l, v, &cost);
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

/* --- to a number of bytes ------------------------------------------------------------------------------------------- */

/* Of what is kept over the time of the peak, the value that costs the least for a byte; NEVER: there is none. */
static int cheapest(chooser *s, const lives *l, const bool *tried) {
    double best = 0, cost;
    int found = NEVER;

    for (int v = 0; v < s->p->n_values; v++) {
        if (!may_go(s, v) || tried[v] || l->born[v] > s->at || l->first[v] <= s->at) continue;
        if (steps_for(s, l, v, &cost) == NEVER) continue;
        cost /= (double)s->p->bytes[v];
        if (found != NEVER && cost >= best) continue;
        best = cost;
        found = v;
    }
    return found;
}

status recompute_to(ctx *c, const recompute_problem *p, int64_t target, recompute_choice *out) {
    chooser s;
    lives l = {0};
    bool *tried;
    int v;

    TRY(chooser_new(c, p, &s, &l));
    TRY(NEW(c, tried, p->n_values));
    simulate(&s, &l);
    out->before = s.peak;
    while (s.peak > target && (v = cheapest(&s, &l, tried)) != NEVER) {
        const int64_t peak = s.peak;
        s.again[v] = tried[v] = true;
        simulate(&s, &l);
        if (s.peak <= peak) continue;
        s.again[v] = false;
        simulate(&s, &l);
    }
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
                s->again[v] = steps_for(s, l, v, &cost) != NEVER;
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
