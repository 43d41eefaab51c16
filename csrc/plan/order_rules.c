/* order_rules.c -- finds orders of a program's steps that hold less at one time, by list scheduling from either end. */
#include "plan/order_rules.h"

#include "plan/sweep.h"

/* Steps ahead of the first that waits, among which one is chosen: so far may a step be moved, and the whole stays linear. */
enum { REACH = 128, NONE = -1 };

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

/* What is known of a step changes with what has run, by as much as has changed: a step of many operands is not looked at
 * again for each that runs before it. */
typedef struct walk {
    const order_facts *f;
    order_rule rule;
    bool *ran;       /* [step] */
    int *waits;      /* [step] for so many operands; backwards: for so many readers */
    int64_t *growth; /* [step] bytes that are there behind it beyond those before it; backwards the other way round */
    int *newest;     /* [step] when the last of its operands was made: after so many steps */
    int *left;       /* [value] readers that have not run; one more of what is there to the end */
    bool *there;     /* [value] backwards: something that runs later needs it */
    int count;       /* steps so far */
} walk;

/* The step with the smallest is next, and of equal ones the first. */
static int64_t key_of(const walk *w, int t) {
    switch (w->rule) {
    case DEPTH_FIRST: return -w->newest[t];
    case SHRINKING_FIRST: return w->growth[t] < 0 ? w->growth[t] : 0;
    default: return w->growth[t];
    }
}

/* One reader is left, after which it is gone. */
static void last_reader(walk *w, int v) {
    const order_facts *f = w->f;
    for (int k = f->first[v]; k < f->first[v + 1]; k++)
        if (!w->ran[f->reads[k]]) w->growth[f->reads[k]] -= f->p->bytes[v];
}

static void run_step(walk *w, int t) {
    const order_facts *f = w->f;
    const order_step *s = &f->p->steps[t];

    w->ran[t] = true;
    w->count++;
    for (int i = 0; i < s->n_in; i++)
        if (--w->left[s->in[i]] == 1) last_reader(w, s->in[i]);
    for (int i = 0; i < s->n_out; i++)
        for (int k = f->first[s->out[i]]; k < f->first[s->out[i] + 1]; k++) {
            w->waits[f->reads[k]]--;
            w->newest[f->reads[k]] = w->count;
        }
}

/* Is `t`, which comes after `best`, to run before it? Of two steps as deep the one behind which less is held. */
static bool goes_before(const walk *w, int t, int best) {
    const int64_t a = key_of(w, t), b = key_of(w, best);
    return a < b || (a == b && w->rule == DEPTH_FIRST && w->newest[t] > 0 && w->growth[t] < w->growth[best]);
}

/* What can run of what `t` waits for: `t` itself where that is nothing, and NONE where it is far. */
static int needed_first(const walk *w, int t) {
    const order_facts *f = w->f;

    for (int hops = 0; hops < REACH; hops++) {
        if (!w->waits[t]) return t;
        const order_step *s = &f->p->steps[t];
        for (int i = 0; i < s->n_in; i++)
            if (!w->ran[f->maker[s->in[i]]]) {
                t = f->maker[s->in[i]];
                break;
            }
    }
    return NONE;
}

/* The next of those that can run, from `low` on. Depth first goes on with what reads the newest value, and what that waits
 * for comes first: something that is made again has only old operands, and would wait itself until all else has run. */
static int next_step(const walk *w, int low, int to) {
    int best = low, deepest = low;

    for (int t = low + 1; t < to && t < low + REACH; t++) {
        if (w->ran[t]) continue;
        if (!w->waits[t] && goes_before(w, t, best)) best = t;
        if (goes_before(w, t, deepest)) deepest = t;
    }
    const int needed = w->rule == DEPTH_FIRST ? needed_first(w, deepest) : NONE;
    return needed == NONE ? best : needed;
}

/* The first step that has not run is always one that can. */
static void forwards(walk *w, int from, int to, int *order) {
    for (int low = from; w->count < to;) {
        if (w->ran[low]) {
            low++;
            continue;
        }
        const int next = next_step(w, low, to);
        order[w->count] = next;
        run_step(w, next);
    }
}

/* --- from the end on -------------------------------------------------------------------------------------------------- */

static void run_backwards(walk *w, int t) {
    const order_facts *f = w->f;
    const order_step *s = &f->p->steps[t];

    w->ran[t] = true;
    w->count++;
    for (int i = 0; i < s->n_in; i++) {
        const int v = s->in[i];
        w->waits[f->maker[v]]--;
        if (w->there[v]) continue;
        w->there[v] = true;
        w->growth[f->maker[v]] -= f->p->bytes[v];
        for (int k = f->first[v]; k < f->first[v + 1]; k++) w->growth[f->reads[k]] -= f->p->bytes[v];
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
        for (int t = high - 1; t >= from && t > high - REACH; t--)
            if (!w->ran[t] && !w->waits[t] && key_of(w, t) < key_of(w, best)) best = t;
        order[n - 1 - w->count] = best;
        run_backwards(w, best);
    }
}

/* ---------------------------------------------------------------------------------------------------------------------- */

static void begin_forwards(walk *w) {
    const order_facts *f = w->f;
    const order_problem *p = f->p;

    for (int v = 0; v < p->n_values; v++) w->left[v] = f->first[v + 1] - f->first[v] + p->to_end[v];
    for (int t = 0; t < p->n_steps; t++) {
        const order_step *s = &p->steps[t];
        w->waits[t] = s->n_in;
        for (int i = 0; i < s->n_out; i++) w->growth[t] += p->bytes[s->out[i]];
        for (int i = 0; i < s->n_in; i++) w->growth[t] -= w->left[s->in[i]] == 1 ? p->bytes[s->in[i]] : 0;
    }
}

static void begin_backwards(walk *w) {
    const order_facts *f = w->f;
    const order_problem *p = f->p;

    for (int v = 0; v < p->n_values; v++) w->there[v] = p->to_end[v];
    for (int t = 0; t < p->n_steps; t++) {
        const order_step *s = &p->steps[t];
        for (int i = 0; i < s->n_in; i++) w->growth[t] += w->there[s->in[i]] ? 0 : p->bytes[s->in[i]];
        for (int i = 0; i < s->n_out; i++) {
            const int v = s->out[i];
            w->waits[t] += f->first[v + 1] - f->first[v];
            w->growth[t] -= w->there[v] ? p->bytes[v] : 0;
        }
    }
}

static status walk_new(ctx *c, const order_facts *f, order_rule rule, walk *w) {
    const order_problem *p = f->p;

    *w = (walk){.f = f, .rule = rule};
    TRY(NEW(c, w->ran, p->n_steps));
    TRY(NEW(c, w->waits, p->n_steps));
    TRY(NEW(c, w->growth, p->n_steps));
    TRY(NEW(c, w->newest, p->n_steps));
    TRY(NEW(c, w->left, p->n_values));
    TRY(NEW(c, w->there, p->n_values));
    (rule == LATEST ? begin_backwards : begin_forwards)(w);
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
