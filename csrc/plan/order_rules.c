/* order_rules.c -- finds orders of a program's steps that hold less at one time, by list scheduling from either end. */
#include "plan/order_rules.h"

#include "plan/sweep.h"

/* Steps ahead of the first that waits, among which one is chosen: so far may a step be moved, and the whole stays linear. */
enum { REACH = 128 };

const char *const order_names[ORDER_RULES] = {"as written", "shrinking first", "smallest first", "depth first",
                                              "latest"};

status order_facts_new(ctx *c, const order_problem *p, order_facts *out) {
    int *next;

    *out = (order_facts){.p = p};
    TRY(NEW(c, out->maker, p->n_values));
    TRY(NEW(c, out->first, p->n_values + 1));
    for (int t = 0; t < p->n_steps; t++) {
        for (int i = 0; i < p->steps[t].n_out; i++) out->maker[p->steps[t].out[i]] = t;
        for (int i = 0; i < p->steps[t].n_in; i++) out->first[p->steps[t].in[i] + 1]++;
    }
    for (int v = 0; v < p->n_values; v++) out->first[v + 1] += out->first[v];
    TRY(NEW(c, out->reads, out->first[p->n_values]));
    TRY(NEW(c, next, p->n_values));
    for (int t = 0; t < p->n_steps; t++)
        for (int i = 0; i < p->steps[t].n_in; i++) {
            const int v = p->steps[t].in[i];
            out->reads[out->first[v] + next[v]++] = t;
        }
    return OK;
}

/* --- from the beginning on -------------------------------------------------------------------------------------------- */

typedef struct walk {
    const order_facts *f;
    order_rule rule;
    bool *ran;    /* [step] */
    int *waits;   /* [step] for so many operands; backwards: for so many readers */
    int *left;    /* [value] readers that have not run; one more of what is there to the end */
    int *made_at; /* [value] after so many steps */
    bool *there;  /* [value] backwards: something that runs later needs it */
    int count;    /* steps so far */
} walk;

static int64_t growth(const walk *w, const order_step *s) {
    const int64_t *bytes = w->f->p->bytes;
    int64_t sum = 0;

    for (int i = 0; i < s->n_out; i++) sum += bytes[s->out[i]];
    for (int i = 0; i < s->n_in; i++) sum -= w->left[s->in[i]] == 1 ? bytes[s->in[i]] : 0;
    return sum;
}

/* The step with the smallest is next, and of equal ones the first. */
static int64_t key_of(const walk *w, const order_step *s) {
    int64_t key = 0;

    if (w->rule == SMALLEST_FIRST) return growth(w, s);
    if (w->rule == SHRINKING_FIRST) return (key = growth(w, s)) < 0 ? key : 0;
    for (int i = 0; i < s->n_in; i++)
        if (-w->made_at[s->in[i]] < key) key = -w->made_at[s->in[i]];
    return key;
}

static void run_step(walk *w, int t) {
    const order_facts *f = w->f;
    const order_step *s = &f->p->steps[t];

    w->ran[t] = true;
    w->count++;
    for (int i = 0; i < s->n_in; i++) w->left[s->in[i]]--;
    for (int i = 0; i < s->n_out; i++) {
        w->made_at[s->out[i]] = w->count;
        for (int k = f->first[s->out[i]]; k < f->first[s->out[i] + 1]; k++) w->waits[f->reads[k]]--;
    }
}

/* The first step that has not run is always one that can. */
static void forwards(walk *w, int from, int to, int *order) {
    for (int low = from; w->count < to;) {
        if (w->ran[low]) {
            low++;
            continue;
        }
        int best = low;
        int64_t least = key_of(w, &w->f->p->steps[low]);
        for (int t = low + 1; t < to && t < low + REACH; t++) {
            if (w->ran[t] || w->waits[t]) continue;
            const int64_t key = key_of(w, &w->f->p->steps[t]);
            if (key < least) least = key, best = t;
        }
        order[w->count] = best;
        run_step(w, best);
    }
}

/* --- from the end on -------------------------------------------------------------------------------------------------- */

/* What is there before the step beyond what is there behind it. */
static int64_t growth_backwards(const walk *w, const order_step *s) {
    const int64_t *bytes = w->f->p->bytes;
    int64_t sum = 0;

    for (int i = 0; i < s->n_in; i++) sum += w->there[s->in[i]] ? 0 : bytes[s->in[i]];
    for (int i = 0; i < s->n_out; i++) sum -= w->there[s->out[i]] ? bytes[s->out[i]] : 0;
    return sum;
}

static void run_backwards(walk *w, int t) {
    const order_step *s = &w->f->p->steps[t];

    w->ran[t] = true;
    w->count++;
    for (int i = 0; i < s->n_in; i++) {
        w->there[s->in[i]] = true;
        w->waits[w->f->maker[s->in[i]]]--;
    }
}

static void backwards(walk *w, int from, int to, int *order) {
    const int n = w->f->p->n_steps;

    for (int high = to - 1; w->count < n - from;) {
        if (w->ran[high]) {
            high--;
            continue;
        }
        int best = high;
        int64_t least = growth_backwards(w, &w->f->p->steps[high]);
        for (int t = high - 1; t >= from && t > high - REACH; t--) {
            if (w->ran[t] || w->waits[t]) continue;
            const int64_t key = growth_backwards(w, &w->f->p->steps[t]);
            if (key < least) least = key, best = t;
        }
        order[n - 1 - w->count] = best;
        run_backwards(w, best);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------- */

static status walk_new(ctx *c, const order_facts *f, order_rule rule, walk *w) {
    const order_problem *p = f->p;

    *w = (walk){.f = f, .rule = rule};
    TRY(NEW(c, w->ran, p->n_steps));
    TRY(NEW(c, w->waits, p->n_steps));
    TRY(NEW(c, w->left, p->n_values));
    TRY(NEW(c, w->made_at, p->n_values));
    TRY(NEW(c, w->there, p->n_values));
    for (int v = 0; v < p->n_values; v++) {
        w->left[v] = f->first[v + 1] - f->first[v] + p->to_end[v];
        w->there[v] = p->to_end[v];
    }
    for (int t = 0; t < p->n_steps; t++) {
        const order_step *s = &p->steps[t];
        if (rule != LATEST) w->waits[t] = s->n_in;
        else
            for (int i = 0; i < s->n_out; i++) w->waits[t] += f->first[s->out[i] + 1] - f->first[s->out[i]];
    }
    return OK;
}

status order_by(ctx *c, const order_facts *f, order_rule rule, int *order) {
    const order_problem *p = f->p;
    walk w;

    for (int t = 0; t < p->n_steps; t++) order[t] = t;
    if (rule == AS_WRITTEN) return OK;
    TRY(walk_new(c, f, rule, &w));
    if (rule == LATEST)
        for (int k = p->n_ranges - 1; k >= 0; k--) backwards(&w, p->ranges[k], p->ranges[k + 1], order);
    else
        for (int k = 0; k < p->n_ranges; k++) forwards(&w, p->ranges[k], p->ranges[k + 1], order);
    return OK;
}

/* Half steps: at 2t + 1 step t has made its results, and at 2t an operand that makes room for one is gone. */
status order_peak(ctx *c, const order_problem *p, const int *order, int64_t *peak) {
    int64_t *change;
    int *born, *last, at;

    TRY(NEW(c, change, 2 * p->n_steps + 1));
    TRY(NEW(c, born, p->n_values));
    TRY(NEW(c, last, p->n_values));
    for (int t = 0; t < p->n_steps; t++) {
        const order_step *s = &p->steps[order[t]];
        for (int i = 0; i < s->n_in; i++) last[s->in[i]] = 2 * t + 1;
        for (int i = 0; i < s->n_out; i++) born[s->out[i]] = last[s->out[i]] = 2 * t + 1;
        if (s->work) sweep_add(change, 2 * t + 1, 2 * t + 1, s->work);
    }
    for (int t = 0; t < p->n_steps; t++) {
        const order_step *s = &p->steps[order[t]];
        bool room = s->in_place && s->n_out > 0;
        for (int i = 0; i < s->n_in && room; i++) {
            const int v = s->in[i];
            if (last[v] != 2 * t + 1 || p->to_end[v] || p->bytes[v] != p->bytes[s->out[0]]) continue;
            last[v]--;
            room = false;
        }
    }
    for (int v = 0; v < p->n_values; v++) {
        if (born[v] == 0) continue; /* no step makes it */
        if (p->to_end[v]) last[v] = 2 * p->n_steps - 1;
        sweep_add(change, born[v], last[v], p->bytes[v]);
    }
    *peak = sweep_most(change, 2 * p->n_steps, &at);
    return OK;
}
