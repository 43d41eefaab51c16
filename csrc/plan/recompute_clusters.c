/* recompute_clusters.c -- groups what can be made again by the operators that do it, and follows users' wishes. */
#include "plan/recompute_clusters.h"

#include "core/hash.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

/* --- names ---------------------------------------------------------------------------------------------------------- */

enum { MOST_NAMED = 12 /* operators of a chain that its name has in full */, ENDS = 4 };

static const char *operator_of(const recompute_option *o, const node *const *order, int i) {
    return order[o->chain[i]]->op->name;
}

/* "Mul+Add+Tanh+"; of a long chain both ends, and a hash of all of it. */
static status name_of(ctx *c, const recompute_option *o, const node *const *order, const char **out) {
    const bool is_long = o->n_chain > MOST_NAMED;
    size_t size = 32, used = 0;
    uint64_t hash = 0;
    char *text;

    for (int i = 0; i < o->n_chain; i++) {
        const char *name = operator_of(o, order, i);
        size += strlen(name) + 1;
        for (const char *x = name; *x; x++) hash = hash_mix(hash, (uint64_t)*x);
        hash = hash_mix(hash, UINT64_MAX);
    }
    TRY(NEW(c, text, size));
    for (int i = 0; i < o->n_chain; i++) {
        if (is_long && i == ENDS) used += (size_t)snprintf(text + used, size - used, "%08" PRIx32 "+", (uint32_t)hash);
        if (is_long && i >= ENDS && i < o->n_chain - ENDS) continue;
        used += (size_t)snprintf(text + used, size - used, "%s+", operator_of(o, order, i));
    }
    *out = text;
    return OK;
}

static recompute_strategy strategy_of(const recompute_option *o) {
    return o->stash < 0 ? MAKE_AGAIN : MAKE_AGAIN_FROM_STASH;
}

/* --- clusters ------------------------------------------------------------------------------------------------------- */

typedef struct named {
    const char *name;
    recompute_strategy strategy;
    int option;
} named;

static int by_name(const void *a, const void *b) {
    const named *x = a, *y = b;
    const int order = strcmp(x->name, y->name);
    if (order) return order;
    return x->strategy != y->strategy ? (int)x->strategy - (int)y->strategy : x->option - y->option;
}

static bool same_cluster(const named *x, const named *y) {
    return x->strategy == y->strategy && strcmp(x->name, y->name) == 0;
}

/* Clusters are numbered by the first of their options. */
static status number_clusters(ctx *c, named *sorted, recompute_clusters *out) {
    const named **first; /* [option] of its cluster, if it is that one */

    TRY(NEW(c, first, out->n_options));
    qsort(sorted, (size_t)out->n_options, sizeof *sorted, by_name);
    for (int i = 0, begin = 0; i < out->n_options; i++) {
        if (i > 0 && !same_cluster(&sorted[i - 1], &sorted[i])) begin = i;
        out->of[sorted[i].option] = sorted[begin].option;
        if (begin == i) first[sorted[i].option] = &sorted[i];
    }
    for (int i = 0; i < out->n_options; i++) {
        if (!first[i]) {
            out->of[i] = out->of[out->of[i]]; /* an earlier option, which has its number */
            continue;
        }
        out->names[out->n] = first[i]->name;
        out->strategies[out->n] = first[i]->strategy;
        out->of[i] = out->n++;
    }
    return OK;
}

status clusters_find(ctx *c, const recompute_problem *p, const node *const *order, recompute_clusters *out) {
    named *all;

    *out = (recompute_clusters){.problem = p};
    TRY(recompute_options(c, p, &out->options, &out->n_options));
    TRY(NEW(c, out->of, out->n_options));
    TRY(NEW(c, out->names, out->n_options));
    TRY(NEW(c, out->strategies, out->n_options));
    TRY(NEW(c, all, out->n_options));
    for (int i = 0; i < out->n_options; i++) {
        all[i] = (named){.strategy = strategy_of(&out->options[i]), .option = i};
        TRY(name_of(c, &out->options[i], order, &all[i].name));
    }
    return number_clusters(c, all, out);
}

/* --- wishes --------------------------------------------------------------------------------------------------------- */

static bool is_meant(const recompute_clusters *x, int option, const recompute_wish *w) {
    const int k = x->of[option];
    if (strcmp(x->names[k], w->cluster) != 0) return false;
    return w->strategy == KEEP_ALL || w->strategy == x->strategies[k];
}

/* Of each cluster that is meant the first `count`: they take the place of what earlier wishes say of the same step. */
static void follow(const recompute_clusters *x, const recompute_wish *w, const recompute_option **of_step, int *seen) {
    memset(seen, 0, (size_t)x->n * sizeof *seen);
    for (int i = 0; i < x->n_options; i++) {
        const recompute_option *o = &x->options[i];
        if (!is_meant(x, i, w) || (w->count >= 0 && seen[x->of[i]]++ >= w->count)) continue;
        if (w->strategy != KEEP_ALL) of_step[o->step] = o;
        else if (of_step[o->step] == o) of_step[o->step] = NULL;
    }
}

status clusters_wished(ctx *c, const recompute_clusters *x, const recompute_wish *wishes, int n_wishes,
                       const recompute_option ***out, int *n) {
    const recompute_option **of_step;
    int *seen;

    *n = 0;
    TRY(NEW(c, of_step, x->problem->n_steps));
    TRY(NEW(c, seen, x->n));
    TRY(NEW(c, *out, x->problem->n_steps));
    for (int i = 0; i < n_wishes; i++) follow(x, &wishes[i], of_step, seen);
    for (int t = 0; t < x->problem->n_steps; t++)
        if (of_step[t]) (*out)[(*n)++] = of_step[t];
    return OK;
}

/* --- what there is -------------------------------------------------------------------------------------------------- */

/* Is all of it made again, with or without this stash? */
static bool is_taken(const recompute_problem *p, const recompute_option *o, const recompute_choice *choice) {
    const recompute_step *x = &p->steps[o->step];
    bool any = false;

    if (o->stash >= 0 && !choice->kept[o->stash]) return false;
    for (int i = 0; i < x->n_out; i++) {
        if (!choice->kept[x->out[i]] || p->held[x->out[i]] || !p->bytes[x->out[i]]) continue;
        if (!choice->again[x->out[i]]) return false;
        any = true;
    }
    return any;
}

static bool is_of_stash(const recompute_clusters *x, int i, const recompute_choice *choice) {
    const recompute_option *next = i + 1 < x->n_options ? &x->options[i + 1] : NULL;
    return next && next->step == x->options[i].step && is_taken(x->problem, next, choice);
}

status clusters_list(ctx *c, const recompute_clusters *x, const recompute_choice *choice, recompute_cluster **out,
                     int *n) {
    int64_t **bytes; /* [cluster] */
    recompute_cluster *all;

    TRY(NEW(c, all, x->n));
    TRY(NEW(c, bytes, x->n));
    for (int i = 0; i < x->n_options; i++) all[x->of[i]].count++;
    for (int k = 0; k < x->n; k++) {
        TRY(NEW(c, bytes[k], all[k].count));
        all[k].name = arena_text(c, x->names[k], strlen(x->names[k]));
        if (!all[k].name) return E_NOMEM;
        all[k].strategy = x->strategies[k];
        all[k].bytes = bytes[k];
        all[k].count = 0;
    }
    for (int i = 0; i < x->n_options; i++) {
        recompute_cluster *cluster = &all[x->of[i]];
        bytes[x->of[i]][cluster->count++] = x->options[i].bytes;
        cluster->again += is_taken(x->problem, &x->options[i], choice) && !is_of_stash(x, i, choice);
    }
    *out = all;
    *n = x->n;
    return OK;
}
