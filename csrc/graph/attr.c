/* attr.c -- reads a node's attributes and constant operands. */
#include "ops/op.h"

#include <string.h>

static const attr *find(const attr *list, const char *name) {
    for (const attr *a = list; a && a->name; a++)
        if (strcmp(a->name, name) == 0) return a;
    return NULL;
}

const attr *node_attr(const node *n, const char *name) {
    const attr *a = find(n->attrs, name);
    if (!a) a = find(n->op->attrs, name);
    return a && a->kind ? a : NULL;
}

bool node_has(const node *n, const char *name) { return find(n->attrs, name) != NULL; }

int64_t node_int(const node *n, const char *name) {
    const attr *a = node_attr(n, name);
    return !a ? 0 : a->kind == ATTR_FLOAT ? (int64_t)a->f : a->i;
}

double node_float(const node *n, const char *name) {
    const attr *a = node_attr(n, name);
    return !a ? 0 : a->kind == ATTR_INT ? (double)a->i : a->f;
}

const char *node_string(const node *n, const char *name) {
    const attr *a = node_attr(n, name);
    return a && a->kind == ATTR_STRING ? a->s : "";
}

int node_ints(const node *n, const char *name, const int64_t **out) {
    const attr *a = node_attr(n, name);
    if (!a || a->kind != ATTR_INTS) return -1;
    *out = a->ints;
    return a->count;
}

status attr_check(ctx *c, const op_def *op, const attr *a) {
    static const char *const kinds[] = {
        [ATTR_INT] = "an integer",          [ATTR_FLOAT] = "a float",           [ATTR_STRING] = "text",
        [ATTR_INTS] = "a list of integers", [ATTR_FLOATS] = "a list of floats", [ATTR_TENSOR] = "a tensor",
    };
    const attr *known = find(op->attrs, a->name);
    attr_kind expected;

    if (!known) return fail(c, E_UNSUPPORTED, "%s has no attribute %s here", op->name, a->name);
    expected = known->kind ? known->kind : known->expected;
    if (expected != a->kind)
        return fail(c, E_INVALID, "attribute %s of %s is %s; it is defined to be %s", a->name, op->name, kinds[a->kind],
                    kinds[expected]);
    return OK;
}

status value_known(graph *g, value *v, const char *what) {
    if (value_is_constant(v)) return OK;
    g->asked = v;
    return fail(g->c, E_DATA, "%s is computed from data, not from shapes: its size is unknown before running", what);
}

status value_ints(graph *g, value *v, const char *what, int *count, const int64_t **out) {
    int64_t n;
    int64_t *copy;

    TRY(value_known(g, v, what));
    if (dtype_is_float(v->type)) return fail(g->c, E_TYPE, "%s must be integers, not %s", what, dtype_name(v->type));
    n = shape_count(&v->shape);
    if (n > 1 << 20) return fail(g->c, E_INVALID, "%s has %lld elements", what, (long long)n);
    *count = (int)n;
    if (v->type == I64) {
        *out = v->data;
        return OK;
    }
    TRY(NEW(g->c, copy, n));
    for (int64_t i = 0; i < n; i++) copy[i] = dtype_get_int(v->type, v->data, i);
    *out = copy;
    return OK;
}

/* Before it was repeated, or put otherwise: its elements are the same, but for how many there are. */
static const value *before_moves(const value *v) {
    static const char *const moves[] = {"Expand", "Reshape", "Transpose", "StridedSlice"};
    for (size_t i = 0; !value_is_constant(v) && v->def && i < sizeof moves / sizeof *moves; i++)
        if (strcmp(v->def->op->name, moves[i]) == 0) return before_moves(v->def->in[0]);
    return v;
}

bool value_is_filled(const value *v, double *x) {
    int64_t n;

    if (shape_count(&v->shape) == 0) return false;
    v = before_moves(v);
    if (!value_is_constant(v) || (n = shape_count(&v->shape)) == 0) return false;
    *x = dtype_get(v->type, v->data, 0);
    for (int64_t i = 1; i < n; i++)
        if (dtype_get(v->type, v->data, i) != *x) return false;
    return true;
}
