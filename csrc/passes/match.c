/* match.c -- matching by search, and the driver of rules. */
#include "passes/match.h"

#include "ops/queries.h"

#include <math.h>
#include <string.h>

/* --- searching ------------------------------------------------------------------------------------------------------
 *
 * What is left to match is a list of (pattern, value) on the C stack. A step takes the first entry off and goes on with
 * the rest, so a choice made early (an operand order, an alternative) is taken back when it fails anywhere later. */

typedef struct todo {
    const pattern *pattern;
    value *value;
    const struct todo *next;
} todo;

typedef struct search {
    const graph *g;
    value **captured;
    const node *matched[MAX_MATCHED]; /* the root first */
    const pattern *as[MAX_MATCHED];   /* what each of them matched */
    int n_matched;
} search;

static bool solve(search *s, const todo *t);

/* Constants are written as their type holds them: 1.4142135 in float32, 1.4140625 in bfloat16. */
static bool near(dtype type, double x, double number) {
    double tolerance = type == F64 ? 1e-11 : 1e-6, held;

    dtype_set_value(type, &held, 0, number);
    return x == dtype_get(type, &held, 0) || (isfinite(number) && fabs(x - number) <= tolerance * fabs(number));
}

static bool is_number(const value *v, double number) {
    double x;
    return value_is_filled(v, &x) && near(v->type, x, number);
}

/* --- what may not be taken away ----------------------------------------------------------------------------------- */

bool node_is(const node *n, const char *op) { return strcmp(n->op->name, op) == 0; }
bool value_is(const value *v, const char *op) { return v->def && node_is(v->def, op); }

bool slice_keeps(const node *n, int axis) {
    const int64_t *steps;

    node_ints(n, "steps", &steps); /* all elements with a step of 1 begin at the first */
    return steps[axis] == 1 && n->out[0]->shape.dim[axis] == n->in[0]->shape.dim[axis];
}

bool node_swaps_middle_axes(const node *n) {
    static const int64_t swapped[] = {0, 2, 1, 3};
    const int64_t *perm;
    return node_is(n, "Transpose") && node_ints(n, "perm", &perm) == 4 && !memcmp(perm, swapped, sizeof swapped);
}

int node_axis(const node *n, int rank) {
    const int64_t axis = node_int(n, "axis");
    return (int)(axis < 0 ? axis + rank : axis);
}

bool node_is_along_last_axis(const node *n) {
    const int rank = n->in[0]->shape.rank;
    return rank > 0 && node_axis(n, rank) == rank - 1;
}

bool node_looks_up_rows(const node *n) {
    return node_is(n, "Embedding") || (node_is(n, "Gather") && node_axis(n, n->in[0]->shape.rank) == 0);
}

bool node_is_read(const node *n) {
    for (int i = 0; i < n->n_out; i++)
        if (n->out[i] && value_is_read(n->out[i])) return true;
    return false;
}

bool value_is_before(const value *v, const node *n) { return !v || !v->def || node_is_before(v->def, n); }

bool node_is_read_by_a_chain(const node *n) {
    const shape *s = &n->out[0]->shape;

    for (const use *u = n->out[0]->uses; u; u = u->next)
        if (u->user->backward == n->backward && u->user->n_out == 1 && u->user->out[0] &&
            shape_equal(&u->user->out[0]->shape, s) && fused_holds(u->user))
            return true;
    return false;
}

static bool is_matched(const search *s, const node *n) {
    for (int i = 0; i < s->n_matched; i++)
        if (s->matched[i] == n) return true;
    return false;
}

static bool is_private(const search *s, const value *v) {
    for (const use *u = v->uses; u; u = u->next)
        if (!is_matched(s, u->user)) return false;
    return !value_is_end(v);
}

/* Of what goes away only the root's first result may be seen from outside. */
static bool all_private(const search *s) {
    for (int k = 0; k < s->n_matched; k++) {
        const node *n = s->matched[k];
        for (int i = k == 0; i < n->n_out && !s->as[k]->shared; i++)
            if (n->out[i] && !is_private(s, n->out[i])) return false;
    }
    return true;
}

/* --- steps -------------------------------------------------------------------------------------------------------- */

/* Captures `v` for the rest of the search. */
static bool solve_captured(search *s, int slot, value *v, const todo *rest) {
    value *before;

    if (slot < 0) return solve(s, rest);
    before = s->captured[slot];
    if (before && before != v) return false;
    s->captured[slot] = v;
    if (solve(s, rest)) return true;
    s->captured[slot] = before;
    return false;
}

/* The same operator with as many operands, none of them absent; their number in *count. */
static bool same_form(const pattern *p, const node *n, int *count) {
    if (strcmp(p->op, n->op->name) != 0) return false;
    for (*count = 0; p->in[*count]; ++*count)
        if (!node_in(n, *count)) return false;
    for (int i = *count; i < n->n_in; i++)
        if (n->in[i]) return false;
    return *count <= MAX_CAPTURES && (!p->where || p->where(n));
}

static bool solve_op(search *s, const pattern *p, const node *n, const todo *rest) {
    todo operands[MAX_CAPTURES];
    int count, orders;

    if (s->n_matched == MAX_MATCHED || !same_form(p, n, &count)) return false;
    orders = n->op->flags & COMMUTATIVE && count == 2 ? 2 : 1;
    s->as[s->n_matched] = p;
    s->matched[s->n_matched++] = n;
    for (int order = 0; order < orders; order++) {
        const todo *list = rest;
        for (int i = count - 1; i >= 0; i--) {
            operands[i] = (todo){p->in[i], n->in[order ? 1 - i : i], list};
            list = &operands[i];
        }
        if (solve_captured(s, p->slot, n->out[0], list)) return true;
    }
    s->n_matched--;
    return false;
}

static bool solve_either(search *s, const pattern *p, value *v, const todo *rest) {
    for (int i = 0; p->in[i]; i++)
        if (solve(s, &(todo){p->in[i], v, rest})) return true;
    return false;
}

static bool solve(search *s, const todo *t) {
    const pattern *p;
    value *v;

    if (!t) return all_private(s);
    p = t->pattern;
    v = t->value;
    switch (p->kind) {
    case MATCH_OP: return v->def && v->def_index == 0 && solve_op(s, p, v->def, t->next);
    case MATCH_VAR: return solve_captured(s, p->slot, v, t->next);
    case MATCH_CONST: return is_number(v, p->number) && solve(s, t->next);
    case MATCH_ANYCONST: return value_is_constant(v) && solve_captured(s, p->slot, v, t->next);
    case MATCH_EITHER: return solve_either(s, p, v, t->next);
    }
    return false;
}

bool match(const graph *g, const pattern *p, const node *root, value *v[MAX_CAPTURES]) {
    search s = {.g = g, .captured = v};
    memset(v, 0, MAX_CAPTURES * sizeof *v);
    return root->n_out && root->out[0] && solve_op(&s, p, root, NULL);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

/* Rewriting strictly shrinks or normalises a graph, a few rounds do; more would mean two rules undoing each other. */
enum { MAX_ROUNDS = 16 };

/* Emits in the place, and on behalf, of `n`. */
static status rewrite_at(graph *g, const rule *r, node *n, value *const v[], bool *fired) {
    value *root = n->out[0], *out = NULL;
    const char *name = g->emit_name;
    bool backward = g->in_backward;
    status s;

    g->before = n;
    g->emit_name = n->name;
    g->in_backward = n->backward;
    s = r->rewrite(g, v, n, &out);
    g->before = NULL;
    g->emit_name = name;
    g->in_backward = backward;
    TRY(s);
    *fired = out && out != root && out->type == root->type && shape_equal(&out->shape, &root->shape);
    return *fired ? graph_replace(g, root, out) : OK;
}

/* Could the graph have what matches `p`? */
static bool may_match(const graph *g, const pattern *p) {
    bool any = false;

    switch (p->kind) {
    case MATCH_VAR:
    case MATCH_CONST:
    case MATCH_ANYCONST: return true;
    case MATCH_EITHER:
        for (int i = 0; p->in[i] && !any; i++) any = may_match(g, p->in[i]);
        return any;
    case MATCH_OP: break;
    }
    if (!graph_has_made(g, p->op)) return false;
    for (int i = 0; p->in[i]; i++)
        if (!may_match(g, p->in[i])) return false;
    return true;
}

/* The rules of a pass that may fire: in most graphs few have all of a pattern's operators. */
typedef struct candidates {
    const rule **rules; /* ended by NULL */
    uint64_t initials;  /* of their roots, a set */
    int n_made;         /* operators that the graph had when they were chosen */
} candidates;

static uint64_t initial_of(const char *op) { return UINT64_C(1) << (op[0] & 63); }

static status candidates_new(graph *g, const rule *all, candidates *out) {
    int count = 0;

    while (all[count].pattern) count++;
    out->n_made = -1;
    return NEW(g->scratch, out->rules, count + 1);
}

static void choose(const graph *g, const rule *all, candidates *x) {
    int count = 0;

    if (x->n_made == g->n_made) return;
    x->n_made = g->n_made;
    x->initials = 0;
    for (const rule *r = all; r->pattern; r++) {
        if (!may_match(g, r->pattern)) continue;
        x->rules[count++] = r;
        x->initials |= initial_of(r->pattern->op);
    }
    x->rules[count] = NULL;
}

static status apply_at(graph *g, const candidates *x, node *n, bool *fired) {
    value *v[MAX_CAPTURES];

    *fired = false;
    for (const rule *const *r = x->rules; *r && !*fired; r++)
        if ((*r)->pattern->op[0] == n->op->name[0] && match(g, (*r)->pattern, n, v))
            TRY_AT(g->c, rewrite_at(g, *r, n, v, fired), "rewriting %s (%s)", n->op->name, n->name ? n->name : "-");
    return OK;
}

status rules_apply(graph *g, const rule *rules, int *fired) {
    candidates x = {0};

    *fired = 0;
    TRY(candidates_new(g, rules, &x));
    for (int round = 0, before = -1; round < MAX_ROUNDS && *fired != before; round++) {
        before = *fired;
        choose(g, rules, &x);
        for (node *n = g->first; n && x.rules[0]; n = n->next) {
            bool here = false;
            if (!(x.initials & initial_of(n->op->name)) || !node_is_read(n)) continue;
            TRY(apply_at(g, &x, n, &here));
            *fired += here;
            choose(g, rules, &x);
        }
        graph_remove_dead(g);
    }
    return OK;
}
