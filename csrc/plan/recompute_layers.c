/* recompute_layers.c -- finds layers of forward by repetition, and makes again what lies inside of them. */
#include "plan/recompute_simulation.h"

enum {
    SHORTEST_PERIOD = 2,
    LONGEST_PERIOD = 512 /* steps of a layer */,
    MOST_GROUPS = 64,
    LOOKS = 64 /* for a step */
};

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

typedef struct search {
    chooser s;
    lives l;
    int *last;  /* [value] the last step of forward that reads it */
    int groups; /* of layers that are still looked for */
    int most;   /* of a row of layers, from the first; 0: all */
    bool stash; /* keeps what layers give to those behind them even if backward would not read it */
    bool all;   /* the last of the layers, too, which backward begins with */
} search;

/* All that lies inside of layers. */
static void forget_inside(search *f, const layers *x) {
    chooser *s = &f->s;
    double cost;

    for (int k = 0; k + !f->all < x->count && (!f->most || k < f->most); k++) {
        const int begin = x->begin + k * x->period, end = begin + x->period;
        for (int t = begin; t < end; t++)
            for (int i = 0; i < s->p->steps[t].n_out; i++) {
                const int v = s->p->steps[t].out[i];
                if (bytes_behind(s, f->last, v, end)) s->kept_for[v] |= f->stash;
                else if (chooser_may_drop(s, v)) s->again[v] = chooser_steps_for(s, &f->l, t, &cost) != NEVER;
            }
    }
}

/* Layers of [from, to), and those before and behind them: of a model with many kinds the ones that cover most. */
static void forget_layers(search *f, int from, int to) {
    layers x = find_layers(f->s.p, from, to);
    int64_t least = INT64_MAX;
    int shift = 0;

    if (!x.count || --f->groups < 0) return;
    for (int d = 0; d < x.period; d++) {
        const int64_t bytes = bytes_between(&f->s, f->last, &x, d);
        if (bytes >= least) continue;
        least = bytes;
        shift = d;
    }
    const int end = x.begin + x.count * x.period;
    x.begin += shift;
    x.count = (end - x.begin) / x.period;
    forget_inside(f, &x);
    forget_layers(f, from, x.begin);
    forget_layers(f, end, to);
}

static status find(ctx *c, const recompute_problem *p, int most, bool stash, bool all, recompute_choice *out) {
    search f = {.groups = MOST_GROUPS, .most = most, .stash = stash, .all = all};

    TRY(chooser_new(c, p, &f.s, &f.l));
    chooser_allow(&f.s, LOOKS);
    TRY(NEW(c, f.last, p->n_values));
    for (int t = 0; t < p->n_forward; t++)
        for (int i = 0; i < p->steps[t].n_in; i++) f.last[p->steps[t].in[i]] = t;
    chooser_simulate(&f.s, &f.l);
    out->before = f.s.peak;
    lives_clear(p, &f.l);
    forget_layers(&f, 0, p->n_forward);
    chooser_simulate(&f.s, &f.l);
    chooser_result(&f.s, &f.l, out);
    return OK;
}

/* Where backward does not read what one layer gives to the next, it runs all layers again before the last one, or keeps it
 * all the same: what takes less memory. The last layer is kept, unless the peak is where it waits: at a large loss. */
status recompute_layers(ctx *c, const recompute_problem *p, int most, recompute_choice *out) {
    recompute_choice other;

    TRY(find(c, p, most, false, false, out));
    TRY(find(c, p, most, true, false, &other));
    if (other.peak < out->peak || (other.peak == out->peak && other.cost < out->cost)) *out = other;
    for (int stash = 0; stash < 2; stash++) {
        TRY(find(c, p, most, stash, true, &other));
        if (other.peak < out->peak - out->peak / WORTH_IT) *out = other;
    }
    return OK;
}
