/* recompute_choice.c -- chooses what is made again, to a number of bytes. */
#include "plan/recompute_simulation.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* One thing to do. */
typedef struct move {
    int v;                          /* is made again */
    const recompute_option *option; /* if it takes a stash, with all that its step makes */
    double cost;
    bool offloads; /* it is offloaded instead */
} move;

typedef struct offer {
    double key;
    move move;
} offer;

static void take_option(chooser *s, const recompute_option *o, bool taken) {
    const recompute_step *x = &s->p->steps[o->step];
    for (int i = 0; i < x->n_out; i++)
        if (s->kept_for[x->out[i]] && !s->p->held[x->out[i]]) s->again[x->out[i]] = taken;
    if (o->stash == NEVER) return;
    s->stashes[o->stash] += taken ? 1 : -1;
    s->kept_for[o->stash] = s->stashes[o->stash] > 0;
}

static void take(chooser *s, const move *m, bool taken) {
    if (m->offloads) s->offloaded[m->v] = taken;
    else if (m->option) take_option(s, m->option, taken);
    else s->again[m->v] = taken;
}

static bool is_taken(const chooser *s, const move *m) { return m->offloads ? s->offloaded[m->v] : s->again[m->v]; }

enum { LOOKS = 64 /* of a round at a step; a few are the rule */ };

/* What goes first: the least. */
typedef double move_key(double cost, double bytes);
static double by_cost_of_a_byte(double cost, double bytes) { return cost / bytes; }
static double by_cost(double cost, double bytes) { return bytes > 0 ? cost : INFINITY; }
static double by_bytes(double cost, double bytes) { return cost < INFINITY ? -bytes : 0; }
static move_key *const keys[] = {by_cost_of_a_byte, by_cost, by_bytes};

/* The choices that are looked at are the same for every target: of those that reach it the cheapest is taken. So a lower
 * target never costs less, and never takes more memory. They are found by keys: what goes first of all that is kept over
 * the time of the peak is made again, unless the peak grows; and so on, until there is nothing left.
 *
 * After each round the step is simulated. A round is one move, and in graphs so large that this would take long, where
 * each move matters less, several: work grows with the size and not with its square. */
typedef struct search {
    chooser *s;
    lives *l;
    const recompute_option *const *stashed; /* [step] the option with a stash, of one that cannot run again without */
    int64_t target;
    double most_cost;               /* of a choice */
    offer *offers;                  /* moves of a round */
    int *by_cost;                   /* moves of the path */
    move *path;                     /* what has been taken */
    int n;                          /* moves in it */
    int together;                   /* moves of a round, at most */
    int rounds;                     /* with one key, at most */
    bool *tried;                    /* [value] */
    bool *again, *offloaded, *kept; /* the best so far */
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
    if ((x->any && !better) || x->l->cost > x->most_cost) return;
    x->any = true;
    x->peak = x->s->peak;
    x->cost = x->l->cost;
    memcpy(x->again, x->s->again, size);
    memcpy(x->offloaded, x->s->offloaded, size);
    memcpy(x->kept, x->s->kept_for, size);
}

static int by_key(const void *a, const void *b) {
    const offer *x = a, *y = b;
    if (x->key != y->key) return x->key < y->key ? -1 : 1;
    return (x->move.v > y->move.v) - (x->move.v < y->move.v);
}

static double moving_a_byte(const recompute_problem *p, int v) {
    return p->moving ? p->moving[v] / (double)p->bytes[v] : INFINITY;
}

/* What `v` need not be kept by: made again, or offloaded where that costs less for a byte. False: it has to be kept. */
static bool find_offer(search *x, int v, move_key *key, offer *out) {
    chooser *s = x->s;
    const recompute_problem *p = s->p;
    const recompute_option *o = x->stashed[p->maker[v]];
    const double bytes = (double)(o ? o->bytes : p->bytes[v]);
    double cost = o ? o->cost : 0;

    const bool twice = !p->nothing_twice && (o || chooser_steps_for(s, x->l, p->maker[v], &cost) != NEVER);
    if (twice && cost / bytes <= moving_a_byte(p, v)) {
        *out = (offer){key(cost, bytes), {v, o, cost, false}};
        return true;
    }
    if (!p->moving) return false;
    *out = (offer){key(p->moving[v], (double)p->bytes[v]), {v, NULL, p->moving[v], true}};
    return true;
}

/* Of what is kept over the time of the peak, what goes first: x->offers[0, count), at most `most`. Returns how many. */
static int next_moves(search *x, move_key *key, int most) {
    chooser *s = x->s;
    int n = 0;

    chooser_allow(s, LOOKS);
    for (int v = 0; v < s->p->n_values; v++) {
        offer found;
        if (!chooser_may_drop(s, v) || x->tried[v] || x->l->born[v] > s->at || x->l->first[v] <= s->at) continue;
        if (!find_offer(x, v, key, &found) || x->l->cost + found.move.cost > x->most_cost) continue;
        if (most > 1) x->offers[n++] = found;
        else if (n == 0 || by_key(&found, x->offers) < 0) x->offers[0] = found, n = 1;
    }
    if (n > 1) qsort(x->offers, (size_t)n, sizeof *x->offers, by_key);
    return n < most ? n : most;
}

/* More is not simulated to leave moves out; a step takes some ten nanoseconds. */
enum { MOST_WORK = 1000000, PRUNINGS = 16 /* of one key, for many moves */, LONGEST_PRUNING = 4 * MOST_WORK };

/* The moves of the path, the most expensive first; of those that cost the same the first. */
static void sort_path(search *x) {
    for (int i = 0; i < x->n; i++) {
        x->offers[i] = (offer){-x->path[i].cost, {.v = i}};
    }
    qsort(x->offers, (size_t)x->n, sizeof *x->offers, by_key);
    for (int i = 0; i < x->n; i++) x->by_cost[i] = x->offers[i].move.v;
}

/* What the path did before and need not have done to come as low: the most expensive first. */
static void prune(search *x) {
    const int64_t peak = x->s->peak, end = x->work + LONGEST_PRUNING;

    sort_path(x);
    for (int i = 0; i < x->n && x->work < end; i++) {
        const move *m = &x->path[x->by_cost[i]];
        take(x->s, m, false);
        chooser_simulate(x->s, x->l);
        x->work += x->s->p->n_steps;
        if (x->s->peak > peak) take(x->s, m, true);
    }
    chooser_simulate(x->s, x->l);
    note_choice(x);
    for (int i = 0; i < x->n; i++) /* all of the path again */
        if (!is_taken(x->s, &x->path[i])) take(x->s, &x->path[i], true);
    chooser_simulate(x->s, x->l);
}

/* Takes `count` moves of the round, unless the peak grows, or it costs too much. */
static bool take_together(search *x, int count) {
    const int64_t peak = x->s->peak;
    const int before = x->n;

    for (int i = 0; i < count; i++) {
        const move m = x->offers[i].move;
        if (is_taken(x->s, &m)) continue; /* by an option before it */
        take(x->s, &m, true);
        x->path[x->n++] = m;
    }
    chooser_simulate(x->s, x->l);
    if (x->s->peak <= peak && x->l->cost <= x->most_cost) return true;
    while (x->n > before) take(x->s, &x->path[--x->n], false);
    chooser_simulate(x->s, x->l);
    return false;
}

/* `spacing`: moves after which what turned out to be unnecessary is left out; 0: it never is. */
static void follow(search *x, move_key *key, int spacing) {
    int most = x->together, count;

    memset(x->tried, 0, (size_t)x->s->p->n_values * sizeof *x->tried);
    for (int round = 0; round < x->rounds && (count = next_moves(x, key, most)) > 0; round++) {
        const int before = x->n;
        const bool taken = take_together(x, count);
        if (taken || count == 1) /* (half of them are looked at again, and so on) */
            for (int i = 0; i < count; i++) x->tried[x->offers[i].move.v] = true;
        most = taken ? (2 * most < x->together ? 2 * most : x->together) : (count + 1) / 2;
        if (!taken) continue;
        note_choice(x);
        if (spacing && x->n / spacing > before / spacing && x->work < MOST_WORK) prune(x);
    }
    while (x->n) take(x->s, &x->path[--x->n], false);
    chooser_simulate(x->s, x->l);
}

/* What a step that runs twice, or whose results are offloaded, costs, and what need not be kept over the time of the peak then, at most. */
typedef struct saving {
    double cost;
    int64_t bytes;
} saving;

static int cheaper(const void *a, const void *b) {
    const saving *x = a, *y = b;
    const double p = x->cost * (double)y->bytes, q = y->cost * (double)x->bytes;
    return (p > q) - (p < q);
}

/* The least cost of any choice that reaches `target`: steps, and parts of one, that free as many bytes at the time of the
 * peak as lie above it. Whatever else a choice computes again, and keeps for it, comes on top. */
static status find_bound(ctx *c, const chooser *s, const lives *l, int64_t target, double *out) {
    const recompute_problem *p = s->p;
    int64_t above = s->peak > target ? s->peak - target : 0; /* (a target may be any number) */
    saving *savings;
    int n = 0;

    *out = 0;
    TRY(NEW(c, savings, p->n_forward));
    for (int t = 0; t < p->n_forward; t++) {
        const recompute_step *x = &p->steps[t];
        double moving = INFINITY; /* a byte */
        int64_t bytes = 0;
        for (int i = 0; i < x->n_out; i++) {
            const int v = x->out[i];
            if (!chooser_may_drop(s, v) || l->born[v] > s->at || l->first[v] <= s->at) continue;
            bytes += p->bytes[v];
            moving = fmin(moving, moving_a_byte(p, v));
        }
        const double cost = x->cost >= 0 && !p->nothing_twice ? x->cost : INFINITY;
        const double least = bytes ? fmin(cost, moving * (double)bytes) : INFINITY;
        if (least < INFINITY) savings[n++] = (saving){least, bytes};
    }
    qsort(savings, (size_t)n, sizeof *savings, cheaper);
    for (int i = 0; i < n && above > 0; i++) {
        const double share = savings[i].bytes > above ? (double)above / (double)savings[i].bytes : 1;
        *out += share * savings[i].cost;
        above -= savings[i].bytes;
    }
    if (above > 0) *out = INFINITY;
    return OK;
}

/* The options with a stash of those steps that have no other, [step]. */
static status find_stashed(ctx *c, const recompute_problem *p, const recompute_option ***out) {
    recompute_option *options;
    int count;

    TRY(NEW(c, *out, p->n_steps));
    TRY(recompute_options(c, p, &options, &count));
    for (int i = 0; i < count; i++)
        if (options[i].stash != NEVER && (i == 0 || options[i - 1].step != options[i].step))
            (*out)[options[i].step] = &options[i];
    return OK;
}

/* A move is a round of its own where that is not more work than this, in steps of one key; there are some rounds anyway. */
enum { WORK_OF_ROUNDS = 4000000, LEAST_ROUNDS = 64, ALSO_FAILED = 2 /* rounds for each that lowers the peak */ };

static void set_rounds(search *x, int moves) {
    int rounds = x->most_cost < INFINITY ? LEAST_ROUNDS : WORK_OF_ROUNDS / (x->s->p->n_steps + 1);

    if (rounds < LEAST_ROUNDS) rounds = LEAST_ROUNDS;
    x->together = (moves + rounds - 1) / rounds;
    x->rounds = ALSO_FAILED * (moves < rounds ? moves : rounds);
}

/* With a bound on the cost it is quick: one key, in rounds that are as many for each size. */
static status lower_to(ctx *c, chooser *s, lives *l, const recompute_option *const *stashed, int64_t target,
                       double most_cost) {
    search x = {.s = s, .l = l, .stashed = stashed, .target = target, .most_cost = most_cost};
    const bool quick = most_cost < INFINITY;
    const size_t size = (size_t)s->p->n_values * sizeof(bool);
    int count = 0;

    TRY(NEW(c, x.path, s->p->n_values));
    TRY(NEW(c, x.by_cost, s->p->n_values));
    TRY(NEW(c, x.offers, s->p->n_values));
    TRY(NEW(c, x.tried, s->p->n_values));
    TRY(NEW(c, x.again, s->p->n_values));
    TRY(NEW(c, x.offloaded, s->p->n_values));
    TRY(NEW(c, x.kept, s->p->n_values));
    for (int v = 0; v < s->p->n_values; v++) count += chooser_may_drop(s, v);
    set_rounds(&x, count);
    note_choice(&x);
    for (size_t k = 0; k < (quick ? 1 : sizeof keys / sizeof *keys); k++)
        if (k == 0 || x.work < MOST_WORK) follow(&x, keys[k], quick ? 0 : 1 + count / PRUNINGS);
    memcpy(s->again, x.again, size);
    memcpy(s->offloaded, x.offloaded, size);
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
    if (target < INT64_MAX) TRY(find_stashed(c, p, &stashed));
    chooser_simulate(&s, &l);
    out->before = s.peak;
    TRY(find_bound(c, &s, &l, target, &out->bound));
    for (int i = 0; i < n_taken; i++) take_option(&s, taken[i], true);
    if (n_taken) chooser_simulate(&s, &l);
    if (s.peak > target) TRY(lower_to(c, &s, &l, stashed, target, INFINITY));
    chooser_result(&s, &l, out);
    return OK;
}

status recompute_cheaply(ctx *c, const recompute_problem *p, double most_cost, recompute_choice *out) {
    const recompute_option **stashed;
    chooser s;
    lives l = {0};

    TRY(chooser_new(c, p, &s, &l));
    TRY(NEW(c, stashed, p->n_steps)); /* none: what must not run twice is kept */
    chooser_simulate(&s, &l);
    out->before = s.peak;
    out->bound = 0;
    TRY(lower_to(c, &s, &l, stashed, 0, most_cost));
    if (s.peak > out->before - out->before / WORTH_IT) {
        TRY(chooser_new(c, p, &s, &l));
        chooser_simulate(&s, &l);
    }
    chooser_result(&s, &l, out);
    return OK;
}
