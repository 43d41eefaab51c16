/* view_steps.c -- walks along Reshapes, Transposes, Expands and Casts, and repeats steps. */
#include "passes/view_steps.h"

#include "passes/match.h"

value *view_steps_before(value *v, view_steps *steps) {
    steps->count = 0;
    steps->repeats = false;
    for (; value_is_private(v) && steps->count < MOST_VIEW_STEPS; v = v->def->in[0]) {
        if (!value_is(v, "Reshape") && !value_is(v, "Transpose") && !value_is(v, "Expand")) break;
        steps->repeats |= value_is(v, "Expand");
        steps->step[steps->count++] = v->def;
    }
    return v;
}

status view_steps_again(graph *g, const view_steps *steps, value *x, value **out) {
    for (int i = steps->count - 1; i >= 0; i--) {
        const node *n = steps->step[i];
        value *in[2] = {x, node_in(n, 1)};
        TRY(graph_emit_op(g, n->op, n->attrs, n->n_in, in, 1, &x));
    }
    *out = x;
    return OK;
}

/* The axes with more than one element, as numbers that grow where memory is walked in order. */
typedef struct axes {
    int64_t size[MAX_RANK];
    int place[MAX_RANK], count;
} axes;

static bool in_order(const axes *a) {
    for (int i = 1; i < a->count; i++)
        if (a->place[i] < a->place[i - 1]) return false;
    return true;
}

static axes axes_of(const shape *s) {
    axes a = {.count = 0};
    for (int i = 0; i < s->rank; i++) {
        if (s->dim[i] == 1) continue;
        a.size[a.count] = s->dim[i];
        a.place[a.count] = a.count;
        a.count++;
    }
    return a;
}

/* Axes of size 1 come and go in any order; others can be split or joined only while they are in theirs. */
static bool reshape_axes(axes *a, const shape *to) {
    axes next = axes_of(to);
    bool same = next.count == a->count;

    for (int i = 0; i < next.count && same; i++) same = next.size[i] == a->size[i];
    if (same) return true;
    if (!in_order(a)) return false;
    *a = next;
    return true;
}

static void transpose_axes(axes *a, const shape *from, const int64_t *perm) {
    const axes old = *a;
    int at[MAX_RANK]; /* of each axis of `from`, among those with more than one element */

    for (int i = 0, n = 0; i < from->rank; i++) at[i] = from->dim[i] == 1 ? -1 : n++;
    a->count = 0;
    for (int i = 0; i < from->rank; i++) {
        const int old_at = at[perm[i]];
        if (old_at < 0) continue;
        a->size[a->count] = old.size[old_at];
        a->place[a->count++] = old.place[old_at];
    }
}

bool view_steps_keep_order(const view_steps *steps, const value *first) {
    axes a = axes_of(&first->shape);

    if (steps->repeats) return false;
    for (int i = steps->count - 1; i >= 0; i--) {
        const node *n = steps->step[i];
        const int64_t *perm;
        if (value_is(n->out[0], "Transpose")) {
            node_ints(n, "perm", &perm);
            transpose_axes(&a, &n->in[0]->shape, perm);
        } else if (!reshape_axes(&a, &n->out[0]->shape)) return false;
    }
    return in_order(&a);
}

static bool widens(const node *n) {
    if (!node_is(n, "Cast")) return false;
    const dtype from = n->in[0]->type, to = n->out[0]->type;
    return dtype_is_float(from) && dtype_is_float(to) && dtype_size(from) < dtype_size(to);
}

static value *walk(value *v, bool casts) {
    while (value_is_private(v) && v->def && (node_is(v->def, "Reshape") || (casts && widens(v->def))))
        v = v->def->in[0];
    return v;
}

value *value_before_reshapes(value *v) { return walk(v, false); }
value *value_behind(value *v) { return walk(v, true); }

bool value_is_widened(const value *v) {
    return v->type == F32 && value_is(v, "Cast") && dtype_is_narrow(v->def->in[0]->type);
}

value *value_before_widening(value *v) {
    v = value_before_reshapes(v);
    return value_is_private(v) && value_is_widened(v) ? v->def->in[0] : NULL;
}
