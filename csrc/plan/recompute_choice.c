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

/* A choice that was met. */
typedef struct choice_met {
    bool *again, *offloaded, *kept; /* [value] */
    int64_t peak;
    double cost;
    bool any;
} choice_met;

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
    const int64_t *targets;                 /* [n_targets] descending */
    int n_targets;
    choice_met *reaching; /* [n_targets] the cheapest that reaches it so far */
    choice_met lowest;    /* what a target gets that none reaches */
    double most_cost;     /* of a choice */
    offer *offers;        /* moves of a round */
    int *by_cost;         /* moves of the path */
    move *path;           /* what has been taken */
    int n;                /* moves in it */
    int together;         /* moves of a round, at most */
    int rounds;           /* with one key, at most */
    int moves;            /* that there are */
    bool *tried;          /* [value] */
    int64_t work;         /* steps that were simulated to leave moves out */
} search;

static status choice_new(ctx *c, const recompute_problem *p, choice_met *out) {
    TRY(NEW(c, out->again, p->n_values));
    TRY(NEW(c, out->offloaded, p->n_values));
    return NEW(c, out->kept, p->n_values);
}

static void note(const search *x, choice_met *out) {
    const size_t size = (size_t)x->s->p->n_values * sizeof(bool);

    out->any = true;
    out->peak = x->s->peak;
    out->cost = x->l->cost;
    memcpy(out->again, x->s->again, size);
    memcpy(out->offloaded, x->s->offloaded, size);
    memcpy(out->kept, x->s->kept_for, size);
}

/* One number after the other: is the first pair less? */
static bool is_less(double a, double b, double then_a, double then_b) { return a < b || (a == b && then_a < then_b); }

static void note_choice(search *x) {
    const double peak = (double)x->s->peak, cost = x->l->cost;

    if (cost > x->most_cost) return;
    if (!x->lowest.any || is_less(peak, (double)x->lowest.peak, cost, x->lowest.cost)) note(x, &x->lowest);
    for (int i = 0; i < x->n_targets && x->s->peak <= x->targets[i]; i++) {
        choice_met *m = &x->reaching[i];
        if (!m->any || is_less(cost, m->cost, peak, (double)m->peak)) note(x, m);
    }
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

static void set_rounds(search *x) {
    int rounds = x->most_cost < INFINITY ? LEAST_ROUNDS : WORK_OF_ROUNDS / (x->s->p->n_steps + 1);

    if (rounds < LEAST_ROUNDS) rounds = LEAST_ROUNDS;
    x->together = (x->moves + rounds - 1) / rounds;
    x->rounds = ALSO_FAILED * (x->moves < rounds ? x->moves : rounds);
}

static status search_new(ctx *c, search *x) {
    const recompute_problem *p = x->s->p;

    TRY(NEW(c, x->path, p->n_values));
    TRY(NEW(c, x->by_cost, p->n_values));
    TRY(NEW(c, x->offers, p->n_values));
    TRY(NEW(c, x->tried, p->n_values));
    TRY(NEW(c, x->reaching, x->n_targets));
    for (int i = 0; i < x->n_targets; i++) TRY(choice_new(c, p, &x->reaching[i]));
    TRY(choice_new(c, p, &x->lowest));
    for (int v = 0; v < p->n_values; v++) x->moves += chooser_may_drop(x->s, v);
    set_rounds(x);
    return OK;
}

/* With a bound on the cost it is quick: one key, in rounds that are as many for each size. */
static void look(search *x) {
    const bool quick = x->most_cost < INFINITY;

    note_choice(x);
    for (size_t k = 0; k < (quick ? 1 : sizeof keys / sizeof *keys); k++)
        if (k == 0 || x->work < MOST_WORK) follow(x, keys[k], quick ? 0 : 1 + x->moves / PRUNINGS);
}

/* What was found for target `i` is what the chooser has now. */
static void recall(const search *x, int i) {
    const choice_met *m = x->reaching[i].any ? &x->reaching[i] : &x->lowest;
    const size_t size = (size_t)x->s->p->n_values * sizeof(bool);

    memcpy(x->s->again, m->again, size);
    memcpy(x->s->offloaded, m->offloaded, size);
    memcpy(x->s->kept_for, m->kept, size);
    chooser_simulate(x->s, x->l);
}

static status lower_to(ctx *c, chooser *s, lives *l, const recompute_option *const *stashed, int64_t target,
                       double most_cost) {
    search x = {.s = s, .l = l, .stashed = stashed, .targets = &target, .n_targets = 1, .most_cost = most_cost};

    TRY(search_new(c, &x));
    look(&x);
    recall(&x, 0);
    return OK;
}

static void take_all(chooser *s, lives *l, const recompute_option *const *taken, int n_taken) {
    for (int i = 0; i < n_taken; i++) take_option(s, taken[i], true);
    if (n_taken) chooser_simulate(s, l);
}

status recompute_to(ctx *c, const recompute_problem *p, const recompute_option *const *taken, int n_taken,
                    int64_t target, recompute_choice *out) {
    const recompute_option **stashed;
    chooser s;
    lives l = {0};

    TRY(chooser_new(c, p, &s, &l));
    chooser_simulate(&s, &l);
    out->before = s.peak;
    TRY(find_bound(c, &s, &l, target, &out->bound));
    take_all(&s, &l, taken, n_taken);
    if (s.peak > target) {
        TRY(find_stashed(c, p, &stashed));
        TRY(lower_to(c, &s, &l, stashed, target, INFINITY));
    }
    chooser_result(&s, &l, out);
    return OK;
}

static status copy_flags(ctx *c, int count, bool **flags) {
    const bool *from = *flags;

    TRY(NEW(c, *flags, count));
    memcpy(*flags, from, (size_t)count * sizeof **flags);
    return OK;
}

static status copy_choice(ctx *keeps, const recompute_problem *p, recompute_choice *out) {
    TRY(copy_flags(keeps, p->n_values, &out->kept));
    TRY(copy_flags(keeps, p->n_values, &out->again));
    return copy_flags(keeps, p->n_values, &out->offloaded);
}

status recompute_to_each(ctx *c, const recompute_problem *p, const recompute_option *const *taken, int n_taken,
                         ctx *keeps, recompute_choice *out, int *count) {
    int64_t targets[RECOMPUTE_TARGETS];
    const recompute_option **stashed;
    chooser s;
    lives l = {0};
    search x = {.s = &s, .l = &l, .targets = targets, .n_targets = RECOMPUTE_TARGETS, .most_cost = INFINITY};

    *count = 0;
    TRY(chooser_new(c, p, &s, &l));
    TRY(find_stashed(c, p, &stashed));
    x.stashed = stashed;
    chooser_simulate(&s, &l);
    const int64_t before = s.peak;
    for (int i = 0; i < RECOMPUTE_TARGETS; i++) targets[i] = before / RECOMPUTE_TARGETS * (RECOMPUTE_TARGETS - 1 - i);
    take_all(&s, &l, taken, n_taken);
    TRY(search_new(c, &x));
    look(&x);
    for (int i = 0; i < RECOMPUTE_TARGETS; i++) {
        recompute_choice *next = &out[*count];
        recall(&x, i);
        next->before = before;
        next->bound = 0;
        chooser_result(&s, &l, next);
        if (*count > 0 && next->peak == next[-1].peak && next->cost == next[-1].cost) continue; /* the same */
        const status copied = copy_choice(keeps, p, next);
        if (copied != OK) {
            c->err = keeps->err;
            return copied;
        }
        ++*count;
    }
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
