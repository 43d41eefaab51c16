/* pointwise_fusion.c -- pointwise nodes that are connected  ->  one Fused, which runs them tile by tile in cache; with
 * reductions of what they compute  ->  one FusedReduce
 *
 * A group begins with a node and takes others of the same shape that read a member's result, are read by a member, or
 * read an operand that a member reads. It stays convex: nothing outside it stands between two of its members, so that it
 * can run at once. It runs where its last member did; what depends on it and stood before that moves behind it.
 *
 * A reduction of a member's result joins in the end: it depends on nothing else, and what depends on it moves behind the
 * group anyway. Those of one group are along the same axes.
 *
 * Forward and backward have groups of their own. A backward group computes a value of forward again when its operands
 * are at hand there and no other node of backward needs it: then it is neither written nor kept. The bits are the
 * same, a Fused rounds as its steps do. */
#include "passes/convex.h"
#include "passes/pipeline.h"

#include "ops/queries.h"

/* Nodes between the last member and the next; between two that have only an operand in common; sweeps. */
enum { WINDOW = 96, NEIGHBOURS = 24, SWEEPS = 3 };
/* What has more readers than this is kept: every group of theirs would look at all of them. */
enum { MOST_READERS = 256 };

typedef struct group {
    node *members[FUSED_STEPS]; /* in program order, once complete */
    int count;
    const value *operands[FUSED_OPERANDS]; /* what members read of others */
    int n_operands;
    bool seen[FUSED_STEPS]; /* while it grows: a node outside needs what the member computes */
    int n_seen;
    node *folds[FUSED_FOLDS];
    int n_folds;
    unsigned axes; /* of the folds */
    const shape *shape;
} group;

typedef struct fuser {
    graph *g;
    convex around;
    node **steps; /* [value id] the node that a result of a Fused stands for; NULL: none */
    int n_steps;
    int fired;
} fuser;

static bool may_join(const group *gr, const node *n) {
    const node *first = gr->members[0];
    return n->mark == first->mark && n->backward == first->backward && n->n_out == 1 &&
           shape_equal(&n->out[0]->shape, gr->shape) && fused_holds(n);
}

/* --- operands and results ----------------------------------------------------------------------------------------- */

static bool is_member(const group *gr, const node *n) { return convex_has(gr->members, gr->count, n); }
static bool is_fold(const group *gr, const node *n) { return convex_has(gr->folds, gr->n_folds, n); }

/* (A member has one result.) */
static bool makes(const group *gr, const value *v) { return v && v->def && is_member(gr, v->def); }

static bool reads(const group *gr, const value *v) {
    for (int i = 0; i < gr->n_operands; i++)
        if (gr->operands[i] == v) return true;
    return false;
}

/* Lists what a member reads of others; false when they are too many. */
static bool list_operands_of(group *gr, const node *member) {
    for (int j = 0; j < member->n_in; j++) {
        const value *v = member->in[j];
        if (makes(gr, v) || reads(gr, v)) continue;
        if (gr->n_operands == FUSED_OPERANDS) return false;
        gr->operands[gr->n_operands++] = v;
    }
    return true;
}

static bool list_operands(group *gr) {
    gr->n_operands = 0;
    for (int i = 0; i < gr->count; i++)
        if (!list_operands_of(gr, gr->members[i])) return false;
    return true;
}

/* The last member's result was an operand if one before it read that. */
static void unlist_operand(group *gr, const value *v) {
    int kept = 0;
    for (int i = 0; i < gr->n_operands; i++)
        if (gr->operands[i] != v) gr->operands[kept++] = gr->operands[i];
    gr->n_operands = kept;
}

/* A node outside the group needs what the member computes. */
static bool is_result(const group *gr, const node *member) {
    const value *v = member->out[0];
    for (const use *u = v->uses; u; u = u->next)
        if (node_is_live(u->user) && !is_member(gr, u->user) && !is_fold(gr, u->user)) return true;
    return value_is_end(v);
}

static int list_results(const group *gr, int results[FUSED_STEPS]) {
    int count = 0;
    for (int i = 0; i < gr->count; i++)
        if (is_result(gr, gr->members[i])) results[count++] = i;
    return count;
}

/* --- groups ------------------------------------------------------------------------------------------------------- */

static bool consumes(const group *gr, const node *n) {
    for (int i = 0; i < n->n_in; i++)
        if (makes(gr, n->in[i])) return true;
    return false;
}

static bool feeds(const group *gr, const node *n) { return reads(gr, n->out[0]); }

/* An operand of the whole shape: reading it once saves something. */
static bool shares_operand(const group *gr, const node *n) {
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && shape_equal(&n->in[i]->shape, gr->shape) && reads(gr, n->in[i])) return true;
    return false;
}

static void look_at(group *gr, int member) {
    gr->n_seen -= gr->seen[member];
    gr->seen[member] = is_result(gr, gr->members[member]);
    gr->n_seen += gr->seen[member];
}

/* Those whose results the last member reads may have no other reader. */
static void look_again(group *gr) {
    const node *n = gr->members[gr->count - 1];

    gr->seen[gr->count - 1] = false;
    look_at(gr, gr->count - 1);
    for (int i = 0; i < gr->count - 1; i++)
        for (int j = 0; j < n->n_in && gr->seen[i]; j++)
            if (n->in[j] == gr->members[i]->out[0]) look_at(gr, i);
}

/* Takes `n` in if the group stays small enough and convex. */
static bool join(fuser *f, group *gr, node *n, const node *first, const node *last) {
    const group before = *gr;

    if (gr->count == FUSED_STEPS) return false;
    gr->members[gr->count++] = n;
    unlist_operand(gr, n->out[0]);
    if (list_operands_of(gr, n)) {
        look_again(gr);
        if (gr->n_seen <= FUSED_RESULTS && convex_holds(&f->around, gr->members, gr->count, first, last)) return true;
    }
    *gr = before;
    return false;
}

/* One walk from the first member on; returns how many nodes have joined. */
static int sweep(fuser *f, group *gr, node *first, node **last) {
    int joined = 0, distance = 0;
    bool past = first == *last; /* behind the last member */

    for (node *n = first->next; n && distance < WINDOW && n->mark <= first->mark; n = n->next) {
        distance += past;
        past |= n == *last;
        if (!node_is_live(n) || !n->op->pointwise || is_member(gr, n)) continue;
        bool near = consumes(gr, n) || feeds(gr, n) || (distance < NEIGHBOURS && shares_operand(gr, n));
        if (!near || !may_join(gr, n) || !join(f, gr, n, first, past ? n : *last)) continue;
        joined++;
        if (!past) continue;
        *last = n;
        distance = 0;
    }
    return joined;
}

/* --- values of forward, computed again in backward ------------------------------------------------------------------ */

/* The forward node behind an operand of a backward group, when it can be a step of it. */
static node *source_of(const fuser *f, const group *gr, const value *v) {
    node *n = v->id < f->n_steps && f->steps[v->id] ? f->steps[v->id] : v->def;

    if (!n || n->backward || !n->op || !shape_equal(&v->shape, gr->shape)) return NULL;
    if (n->mark == PHASE_BACKWARD || n->n_out != 1 || !fused_holds(n)) return NULL;
    /* Of 16 bits an element a CPU's memory delivers more than such a function computes; a GPU computes more. */
    if (!f->g->cuda && n->op->flags & COSTLY && dtype_size(v->type) <= 2) return NULL;
    if (v->n_uses > MOST_READERS) return NULL;
    for (const use *u = v->uses; u; u = u->next)
        if (u->user->mark == PHASE_BACKWARD && !is_member(gr, u->user)) return NULL;
    for (int i = 0; i < n->n_in; i++)
        if (!n->in[i]->data && !reads(gr, n->in[i])) return NULL;
    return value_is_end(v) ? NULL : n;
}

/* A copy of `n` for `v`, at the front of the group: its members read the copy's result. */
static status compute_again(fuser *f, group *gr, node *n, value *v) {
    node *copy;

    TRY(graph_make_node(f->g, n->op, n->name, n->attrs, n->n_in, n->in, 1, &copy));
    copy->out[0]->type = v->type;
    copy->out[0]->shape = v->shape;
    copy->mark = TAKEN;
    for (int i = 0; i < gr->count; i++)
        for (int j = 0; j < gr->members[i]->n_in; j++)
            if (gr->members[i]->in[j] == v) graph_set_operand(f->g, gr->members[i], j, copy->out[0]);
    for (int i = gr->count++; i > 0; i--) gr->members[i] = gr->members[i - 1];
    gr->members[0] = copy;
    list_operands(gr);
    return OK;
}

static status compute_forward_again(fuser *f, group *gr) {
    for (int i = 0; i < gr->n_operands && gr->count < FUSED_STEPS; i++) {
        value *v = (value *)(uintptr_t)gr->operands[i];
        node *n = source_of(f, gr, v);
        if (!n) continue;
        TRY(compute_again(f, gr, n, v));
        i = -1; /* the list is another one */
    }
    return OK;
}

/* --- reductions ----------------------------------------------------------------------------------------------------- */

static bool has_whole_operand(const group *gr) {
    for (int i = 0; i < gr->n_operands; i++)
        if (shape_equal(&gr->operands[i]->shape, gr->shape)) return true;
    return false;
}

static bool is_random(const group *gr) {
    for (int i = 0; i < gr->count; i++)
        if (gr->members[i]->op->flags & RANDOM) return true;
    return false;
}

static bool may_fold(const fuser *f, const group *gr, const node *n, unsigned *axes) {
    const node *first = gr->members[0];

    if (!node_is_live(n) || n->mark != first->mark || n->backward != first->backward || is_fold(gr, n)) return false;
    return fused_folds(f->g, n, is_random(gr), axes) && (gr->n_folds == 0 || *axes == gr->axes);
}

/* Of the last members first: what a chain comes to is what is most likely folded. */
static void take_folds(const fuser *f, group *gr) {
    int results[FUSED_STEPS];

    for (int i = gr->count - 1; i >= 0; i--)
        for (const use *u = gr->members[i]->out[0]->uses; u && gr->n_folds < FUSED_FOLDS; u = u->next) {
            unsigned axes;
            if (!may_fold(f, gr, u->user, &axes)) continue;
            gr->axes = axes;
            gr->folds[gr->n_folds++] = u->user;
        }
    if (list_results(gr, results) == 0 && !has_whole_operand(gr)) gr->n_folds = 0;
}

/* --- the pass ------------------------------------------------------------------------------------------------------- */

static status note_step(fuser *f, const value *v, node *n) {
    if (v->id < f->n_steps) f->steps[v->id] = n;
    return OK;
}

static status replace_group(fuser *f, group *gr, node *first, node *last) {
    graph *g = f->g;
    value *out[FUSED_RESULTS + FUSED_FOLDS];
    int mark = first->mark;

    if (!convex_holds(&f->around, gr->members, gr->count, first, last)) return OK;
    convex_clear(&f->around, g, gr->members, gr->count, first, last);
    if (first->backward && mark == PHASE_BACKWARD) TRY(compute_forward_again(f, gr));
    fused_chain ch = {.n_steps = gr->count, .n_folds = gr->n_folds, .axes = gr->axes};
    for (int i = 0; i < gr->count; i++) ch.steps[i] = gr->members[i];
    for (int i = 0; i < gr->n_folds; i++) ch.folds[i] = gr->folds[i];
    ch.n_results = list_results(gr, ch.results);
    /* In front of what has moved. */
    pass_emits(g, last->next, last);
    TRY(fused_emit(g, &ch, out));
    for (int i = 0; i < ch.n_results; i++) {
        node *n = gr->members[ch.results[i]];
        TRY(graph_replace(g, n->out[0], out[i]));
        TRY(note_step(f, out[i], n));
    }
    for (int i = 0; i < gr->n_folds; i++) TRY(graph_replace(g, gr->folds[i]->out[0], out[ch.n_results + i]));
    for (int i = 0; i < gr->count; i++) gr->members[i]->mark = TAKEN;
    for (int i = 0; i < gr->n_folds; i++) gr->folds[i]->mark = TAKEN;
    for (node *n = last->next; n != g->before; n = n->next) n->mark = mark;
    f->fired++;
    return OK;
}

static status fuse_from(fuser *f, node *seed) {
    group gr = {.members = {seed}, .count = 1, .shape = &seed->out[0]->shape};
    node *last = seed;

    if (seed->n_out != 1 || !fused_holds(seed) || !list_operands(&gr)) return OK;
    look_at(&gr, 0);
    for (int i = 0; i < SWEEPS && sweep(f, &gr, seed, &last); i++);
    convex_sort(gr.members, gr.count, seed);
    take_folds(f, &gr);
    if (gr.count + gr.n_folds < 2) return OK;
    return replace_group(f, &gr, seed, last);
}

static status fuse_all(fuser *f) {
    for (node *n = f->g->first; n; n = n->next)
        if (node_is_live(n)) TRY(fuse_from(f, n));
    return OK;
}

static status run(graph *g, int *fired) {
    fuser f = {.g = g, .n_steps = 2 * g->n_values};
    status s;

    graph_mark_phases(g);
    TRY(convex_begin(g, NULL, &f.around));
    TRY(NEW(g->scratch, f.steps, f.n_steps));
    s = fuse_all(&f);
    *fired = f.fired;
    return pass_end(g, s);
}

const pass_def pointwise_fusion = {.name = "pointwise_fusion", .stage = LAST, .run = run};
