/* attention_mask.c -- looks at how masks of attention are made. */
#include "passes/attention_mask.h"

#include "ops/op.h"
#include "passes/index_formula.h"
#include "passes/match.h"

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
