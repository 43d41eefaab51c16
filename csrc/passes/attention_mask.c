/* attention_mask.c -- looks at how masks of attention are made. */
#include "passes/attention_mask.h"

#include "ops/op.h"
#include "ops/queries.h"
#include "passes/index_formula.h"
#include "passes/match.h"

#include <math.h>

/* bool, all true. */
static bool is_all(const value *v) {
    double x;
    while (value_is(v, "Expand")) v = v->def->in[0];
    return value_is_filled(v, &x) && x != 0;
}

/* Of data, one element for each key of each sequence, in this order. */
static bool is_of_keys(const value *v, int64_t batch, int64_t keys) {
    const shape *s = &v->shape;
    return !value_is_constant(v) && s->rank == 4 && s->dim[0] == batch && s->dim[1] == 1 && s->dim[2] == 1 &&
           s->dim[3] == keys;
}

/* False: two parts are of keys, or neither. */
static bool add_part(value *v, int64_t batch, int64_t keys, attention_mask *out) {
    while (value_is(v, "Expand")) v = v->def->in[0];
    if (is_all(v)) return true;
    value **to = is_of_keys(v, batch, keys) ? &out->keys : &out->rest;
    if (to == &out->rest && value_is(v, "And"))
        return add_part(v->def->in[0], batch, keys, out) && add_part(v->def->in[1], batch, keys, out);
    if (*to && *to != v) return false;
    *to = v;
    return true;
}

bool attention_mask_split(value *allowed, int64_t batch, int64_t keys, attention_mask *out) {
    *out = (attention_mask){NULL, NULL};
    return add_part(allowed, batch, keys, out) && out->keys;
}

bool attention_mask_causal(const value *allowed, int64_t length) {
    const shape *s = &allowed->shape;
    index_formula f;

    if (s->rank < 2 || s->dim[s->rank - 1] != length || s->dim[s->rank - 2] != length) return false;
    if (allowed->type != BOOL || !index_formula_of(allowed, &f)) return false;
    const int64_t by = f.by[s->rank - 1];
    if (length == 1) return by == 0 && f.plus <= 0;
    if (by < 1 || f.by[s->rank - 2] != -by || f.plus > 0 || f.plus <= -by) return false; /* by (k - q) + plus <= 0 */
    for (int d = 0; d < s->rank - 2; d++)
        if (f.by[d]) return false;
    return true;
}

/* Before casts that lose nothing, and what is -inf where the result is. */
static const value *before_widening(const value *v) {
    while ((value_is(v, "Cast") && v->type == F32 && dtype_is_narrow(v->def->in[0]->type)) || value_is(v, "Expand"))
        v = v->def->in[0];
    return v;
}

/* Is x what `part` is, or is that added to something? */
static bool has_addend(const value *x, const value *part, int *looks) {
    if (--*looks < 0) return false;
    if ((x = before_widening(x)) == part) return true;
    return value_is(x, "Add") && (has_addend(x->def->in[0], part, looks) || has_addend(x->def->in[1], part, looks));
}

bool attention_mask_finite(const value *allowed, const value *x) {
    enum { ADDENDS = 16 };
    int looks = ADDENDS;
    double number;

    while (value_is(allowed, "Expand")) allowed = allowed->def->in[0];
    if (!value_is(allowed, "Not") || !value_is(allowed->def->in[0], "Equal")) return false;
    const node *equal = allowed->def->in[0]->def;
    return value_is_filled(equal->in[1], &number) && number == -INFINITY &&
           has_addend(x, before_widening(equal->in[0]), &looks);
}

/* --- numbers -------------------------------------------------------------------------------------------------------- */

enum { FAR = ATTENTION_FAR, MOST_LOOKS = 64 };

static bool is_near(const value *v) {
    for (int64_t i = 0, count = shape_count(&v->shape); i < count; i++)
        if (!(fabs(dtype_get(v->type, v->data, i)) <= FAR)) return false;
    return true;
}

/* Divided by a number that makes nothing large. */
static bool divides_little(const node *n) {
    double x;
    return node_is(n, "Div") && value_is_filled(n->in[1], &x) && fabs(x) * FAR >= 1;
}

/* Between numbers that are not large. */
static bool is_clipped(const node *n) {
    double low, high;
    return node_is(n, "Clamp") && node_in(n, 1) && node_in(n, 2) && value_is_filled(n->in[1], &low) &&
           value_is_filled(n->in[2], &high) && fabs(low) <= FAR && fabs(high) <= FAR;
}

typedef struct search {
    int64_t keys;   /* of a causal mask */
    int64_t scores; /* what has as many elements, and is given, may be a mask, though it has a gradient; 0: none may */
    int looks;
    bool computed; /* some of it is no input */
} search;

/* False: some of it may be far. */
static bool look_for_far(const value *v, search *s) {
    static const char *const moves[] = {"Cast",   "Reshape",      "Transpose", "Expand",
                                        "Gather", "StridedSlice", "Neg",       "Contiguous"};
    const node *n = v->def;

    if (--s->looks < 0) return false;
    if (value_is_constant(v)) return is_near(v);
    if (!n) return v->needs_grad && shape_count(&v->shape) != s->scores; /* a parameter */
    if (product_is(n) || node_is(n, "Sigmoid") || node_is(n, "Tanh") || is_clipped(n)) return s->computed = true;
    for (size_t i = 0; i < sizeof moves / sizeof *moves; i++)
        if (node_is(n, moves[i])) return look_for_far(n->in[0], s);
    if (divides_little(n)) return look_for_far(n->in[0], s);
    if (node_is(n, "Where") && attention_mask_causal(n->in[0], s->keys))
        return look_for_far(n->in[1], s); /* each query sees itself: whatever the others get, it is hidden */
    if (!node_is(n, "Add") && !node_is(n, "Sub") && !node_is(n, "Mul") && !node_is(n, "Concat")) return false;
    for (int i = 0; i < n->n_in; i++)
        if (!look_for_far(n->in[i], s)) return false;
    return true;
}

bool attention_is_moderate(const value *v, int64_t keys) {
    return look_for_far(v, &(search){.keys = keys, .looks = MOST_LOOKS});
}

bool attention_is_computed(const value *v) {
    enum { NOWHERE = -1 };
    search s = {NOWHERE, shape_count(&v->shape), MOST_LOOKS, false};
    return look_for_far(v, &s) && s.computed;
}

/* --- equal masks ------------------------------------------------------------------------------------------------------ */

static bool is_integer(dtype t) { return !dtype_is_float(t); } /* or bool */

/* What is not 0 at the same places, in order of elements: integers that are not are no 0 as floats. */
static const value *same_nonzeros(const value *v) {
    for (;; v = v->def->in[0]) {
        if (value_is(v, "Reshape")) continue;
        if (!value_is(v, "Cast")) return v;
        const dtype from = v->def->in[0]->type;
        if (v->type != BOOL && from != BOOL && !(is_integer(from) && dtype_is_float(v->type))) return v;
    }
}

bool attention_mask_same(const value *a, const value *b) { return same_nonzeros(a) == same_nonzeros(b); }

bool attention_mask_lists(const value *keys, const value *rows) {
    return value_is(rows, "RowIndex") && attention_mask_same(rows->def->in[0], keys);
}
