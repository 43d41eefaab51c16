/* recompute_choice.c -- chooses what is made again. */
#include "plan/recompute_simulation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

enum { SHORTEST_PERIOD = 2, LONGEST_PERIOD = 512 /* steps of a layer */ };

static int ascending(const void *a, const void *b) { return *(const int *)a - *(const int *)b; }

/* --- options -------------------------------------------------------------------------------------------------------- */

enum { MOST_STASHES = 64 /* that are looked at for one step */ };

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

/* `stash`: NEVER, or one that makes it possible. */
static status describe_option(ctx *c, chooser *s, int step, int stash, recompute_option *out) {
    int *chain;

    *out = (recompute_option){.step = step, .stash = stash, .bytes = bytes_kept(s, step)};
    if (stash != NEVER) {
        s->kept_for[stash] = true;
        out->bytes -= s->p->bytes[stash];
    }
    out->n_chain = chooser_steps_for(s, NULL, step, &out->cost);
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
        const bool plain = chooser_steps_for(s, NULL, t, &cost) != NEVER;
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
    double cost;
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

static bool is_taken(const chooser *s, const move *m) { return s->again[m->v]; }

/* What goes first: the least. */
typedef double move_key(double cost, double bytes);
static double by_cost_of_a_byte(double cost, double bytes) { return cost / bytes; }
static double by_cost(double cost, double bytes) { return bytes > 0 ? cost : INFINITY; }
static double by_bytes(double cost, double bytes) { return cost < INFINITY ? -bytes : 0; }
static move_key *const keys[] = {by_cost_of_a_byte, by_cost, by_bytes};

/* The choices that are looked at are the same for every target: of those that reach it the cheapest is taken. So a lower
 * target never costs less, and never takes more memory. They are found by keys: what goes first of all that is kept over
 * the time of the peak is made again, unless the peak grows; and so on, until there is nothing left. */
typedef struct search {
    chooser *s;
    lives *l;
    const recompute_option *const *stashed; /* [step] the option with a stash, of one that cannot run again without */
    int64_t target;
    move *path;         /* what has been taken */
    int n;              /* moves in it */
    bool *tried;        /* [value] */
    bool *removed;      /* [move] */
    bool *again, *kept; /* the best so far */
    int64_t peak;
    double cost;
    bool any;
    int64_t work; /* steps that were simulated to leave moves out */
} search;

static void note_choice(search *x) {
    const bool now = x->s->peak <= x->target, before = x->any && x->peak <= x->target;
    const size_t size = (size_t)x->s->p->n_values * sizeof(bool);
    bool better = now != before ? now : now ? x->l->cost < x->cost : x->s->peak < x->peak;

    if (now == before && now && x->l->cost == x->cost) better = x->s->peak < x->peak;
    if (now == before && !now && x->s->peak == x->peak) better = x->l->cost < x->cost;
    if (x->any && !better) return;
    x->any = true;
    x->peak = x->s->peak;
    x->cost = x->l->cost;
    memcpy(x->again, x->s->again, size);
    memcpy(x->kept, x->s->kept_for, size);
}

/* Of what is kept over the time of the peak, what goes first. */
static move next_move(search *x, move_key *key) {
    chooser *s = x->s;
    move found = {.v = NEVER};
    double best = 0, cost;

    for (int v = 0; v < s->p->n_values; v++) {
        if (!chooser_may_drop(s, v) || x->tried[v] || x->l->born[v] > s->at || x->l->first[v] <= s->at) continue;
        const recompute_option *o = x->stashed[s->p->maker[v]];
        if (o) cost = o->cost;
        else if (chooser_steps_for(s, x->l, s->p->maker[v], &cost) == NEVER) continue;
        const double k = key(cost, (double)(o ? o->bytes : s->p->bytes[v]));
        if (found.v != NEVER && k >= best) continue;
        best = k;
        found = (move){v, o, cost};
    }
    return found;
}

/* More is not simulated to leave moves out; a step takes some ten nanoseconds. */
enum { MOST_WORK = 1000000, PRUNINGS = 16 /* of one key, for many moves */ };

/* What the path did before and need not have done to come as low: the most expensive first. */
static void prune(search *x) {
    const int64_t peak = x->s->peak;

    memset(x->removed, 0, (size_t)x->n * sizeof *x->removed);
    for (int i = 0; i < x->n; i++) {
        int k = NEVER;
        for (int j = 0; j < x->n; j++) /* 1: left out, or looked at */
            if (!x->removed[j] && (k == NEVER || x->path[j].cost > x->path[k].cost)) k = j;
        x->removed[k] = true;
        take(x->s, &x->path[k], false);
        chooser_simulate(x->s, x->l);
        x->work += x->s->p->n_steps;
        if (x->s->peak > peak) take(x->s, &x->path[k], true);
    }
    chooser_simulate(x->s, x->l);
    note_choice(x);
    for (int i = 0; i < x->n; i++) /* all of the path again */
        if (!is_taken(x->s, &x->path[i])) take(x->s, &x->path[i], true);
    chooser_simulate(x->s, x->l);
}

static void follow(search *x, move_key *key, int spacing) {
    move m;

    memset(x->tried, 0, (size_t)x->s->p->n_values * sizeof *x->tried);
    while ((m = next_move(x, key)).v != NEVER) {
        const int64_t peak = x->s->peak;
        x->tried[m.v] = true;
        take(x->s, &m, true);
        chooser_simulate(x->s, x->l);
        if (x->s->peak > peak) {
            take(x->s, &m, false);
            chooser_simulate(x->s, x->l);
            continue;
        }
        x->path[x->n++] = m;
        note_choice(x);
        if (x->n % spacing == 0 && x->work < MOST_WORK) prune(x);
    }
    while (x->n) take(x->s, &x->path[--x->n], false);
    chooser_simulate(x->s, x->l);
}

/* What a step that runs twice costs, and what need not be kept over the time of the peak then, at most. */
typedef struct offer {
    double cost;
    int64_t bytes;
} offer;

static int cheaper(const void *a, const void *b) {
    const offer *x = a, *y = b;
    const double p = x->cost * (double)y->bytes, q = y->cost * (double)x->bytes;
    return (p > q) - (p < q);
}

/* The least cost of any choice that reaches `target`: steps, and parts of one, that free as many bytes at the time of the
 * peak as lie above it. Whatever else a choice computes again, and keeps for it, comes on top. */
static status find_bound(ctx *c, const chooser *s, const lives *l, int64_t target, double *out) {
    const recompute_problem *p = s->p;
    int64_t above = s->peak > target ? s->peak - target : 0; /* (a target may be any number) */
    offer *offers;
    int n = 0;

    *out = 0;
    TRY(NEW(c, offers, p->n_forward));
    for (int t = 0; t < p->n_forward; t++) {
        const recompute_step *x = &p->steps[t];
        int64_t bytes = 0;
        for (int i = 0; i < x->n_out; i++) {
            const int v = x->out[i];
            if (chooser_may_drop(s, v) && l->born[v] <= s->at && l->first[v] > s->at) bytes += p->bytes[v];
        }
        if (bytes && x->cost >= 0) offers[n++] = (offer){x->cost, bytes};
    }
    qsort(offers, (size_t)n, sizeof *offers, cheaper);
    for (int i = 0; i < n && above > 0; i++) {
        const double share = offers[i].bytes > above ? (double)above / (double)offers[i].bytes : 1;
        *out += share * offers[i].cost;
        above -= offers[i].bytes;
    }
    if (above > 0) *out = INFINITY;
    return OK;
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
    search x = {.s = s, .l = l, .stashed = stashed, .target = target};
    const size_t size = (size_t)s->p->n_values * sizeof(bool);
    int count = 0;

    TRY(NEW(c, x.path, s->p->n_values));
    TRY(NEW(c, x.tried, s->p->n_values));
    TRY(NEW(c, x.removed, s->p->n_values));
    TRY(NEW(c, x.again, s->p->n_values));
    TRY(NEW(c, x.kept, s->p->n_values));
    for (int v = 0; v < s->p->n_values; v++) count += chooser_may_drop(s, v);
    note_choice(&x);
    for (size_t k = 0; k < sizeof keys / sizeof *keys; k++)
        if (k == 0 || x.work < MOST_WORK) follow(&x, keys[k], 1 + count / PRUNINGS);
    memcpy(s->again, x.again, size);
    memcpy(s->kept_for, x.kept, size);
    chooser_simulate(s, l);
    return OK;
}

status recompute_to(ctx *c, const recompute_problem *p, const recompute_option *const *taken, int n_taken,
                    int64_t target, recompute_choice *out) {
    const recompute_option **stashed = NULL;
    chooser s;
    lives l = {0};

    TRY(chooser_new(c, p, &s, &l));
    if (target < INT64_MAX) TRY(find_stashed(c, &s, &stashed));
    chooser_simulate(&s, &l);
    out->before = s.peak;
    TRY(find_bound(c, &s, &l, target, &out->bound));
    for (int i = 0; i < n_taken; i++) take_option(&s, taken[i], true);
    if (n_taken) chooser_simulate(&s, &l);
    if (s.peak > target) TRY(lower_to(c, &s, &l, stashed, target));
    chooser_result(&s, &l, out);
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
                if (bytes_behind(s, last, v, end) || !chooser_may_drop(s, v)) continue;
                s->again[v] = chooser_steps_for(s, l, s->p->maker[v], &cost) != NEVER;
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
    chooser_simulate(&s, &l);
    out->before = s.peak;
    lives_clear(p, &l);
    forget_layers(&s, &l, last, 0, p->n_forward);
    chooser_simulate(&s, &l);
    chooser_result(&s, &l, out);
    return OK;
}
