/* score_mask.c -- a softmax whose scores are replaced, or lowered, by so much that they have no weight  ->  MaskedSoftmax
 *
 *   Softmax(where(allowed, x, lowest)),  Softmax(x + where(allowed, bias, lowest))  ->  MaskedSoftmax(x + bias, allowed)
 *   Softmax(product + given)  ->  MaskedSoftmax(product + clip(given), given is moderate)
 *
 * with `lowest` -inf or the lowest number of float32 or bfloat16, and several such masks, behind casts and expansions. The
 * two differ for a query that sees no key: PyTorch weighs all keys alike, or gives NaN, the operator zeros. So a plan is
 * made for either answer, and data is asked, as for the number of rows that matter; where some query sees no key nothing
 * is changed. On a GPU, where attention as one operator wants to know it, an addend that is given from outside, without a
 * gradient, is both: data is asked, too, whether each number in it is moderate, or hides. A mask is an operand of attention as one operator then, and padding can be left out. */
#include "passes/attention_mask.h"
#include "passes/rowwise.h"

#include "ops/op.h"
#include "ops/queries.h"

#include <math.h>

enum { MOST_MASKS = 4, MOST_ASKED = 16, MOST_ABOVE = 64 };
static const double far_below = -1e37; /* added to a score, or in its place, it leaves no weight */

/* What a mask is made from: a condition, or constants of 0 and of what hides. */
typedef struct mask {
    enum { SHOWS, HIDES, ADDED, GIVEN } kind;
    value *of;
    shape as;      /* before it is broadcast */
    double number; /* that hides */
} mask;

typedef struct masks {
    bool given; /* what is given from outside may be one */
    int count;
    mask mask[MOST_MASKS];
} masks;

/* --- what hides ------------------------------------------------------------------------------------------------------ */

static status strip(graph *g, value *v, masks *m, value **rest);

static bool hides(const value *v, double *number) { return value_is_filled(v, number) && *number <= far_below; }

static bool add_mask(masks *m, int kind, value *of, double number) {
    if (m->count == MOST_MASKS) return false;
    while (value_is(of, "Expand")) of = of->def->in[0]; /* the operator broadcasts itself */
    m->mask[m->count++] = (mask){kind, of, of->shape, number};
    return true;
}

/* Constants, of which each is 0 or hides. */
static bool is_added(const value *v, double *number) {
    const int64_t count = shape_count(&v->shape);
    bool any = false;

    if (!value_is_constant(v) || !dtype_is_float(v->type) || v->shape.rank == 0) return false;
    for (int64_t i = 0; i < count; i++) {
        const double x = dtype_get(v->type, v->data, i);
        if (x == 0) continue;
        if (!(x <= far_below)) return false;
        *number = any && *number > x ? *number : x; /* the one that hides least */
        any = true;
    }
    return any;
}

static status strip_where(graph *g, value *v, masks *m, value **rest) {
    value *const *in = v->def->in;
    double number;

    if (hides(in[2], &number) && add_mask(m, SHOWS, in[0], number)) return strip(g, in[1], m, rest);
    if (hides(in[1], &number) && add_mask(m, HIDES, in[0], number)) return strip(g, in[2], m, rest);
    return OK;
}

/* --- what is given from outside -------------------------------------------------------------------------------------- */

/* Floats of the caller's, seen in some way, that nothing trains. */
static bool is_given(const value *v) {
    static const char *const views[] = {"Expand", "StridedSlice", "Reshape", "Transpose", "Cast"};
    const value *at = v;

    if (!dtype_is_float(v->type) || v->shape.rank == 0 || v->needs_grad || value_is_constant(v)) return false;
    while (at->def) {
        bool sees = false;
        for (size_t i = 0; i < sizeof views / sizeof *views; i++) sees |= node_is(at->def, views[i]);
        if (!sees) return false;
        at = at->def->in[0];
    }
    return !value_is_constant(at);
}

/* A product, in some type, by a number, or with something added. */
static bool has_product(const value *v, int looks) {
    const node *n = v->def;
    if (!n || looks == 0) return false;
    if (product_is(n)) return true;
    if (node_is(n, "Cast") || node_is(n, "Mul") || node_is(n, "Div")) return has_product(n->in[0], looks - 1);
    return node_is(n, "Add") && (has_product(n->in[0], looks - 1) || has_product(n->in[1], looks - 1));
}

/* What is moderate of it as it is: the same for all layers. */
static status emit_near(graph *g, value *v, value **out) {
    value *low, *high;

    for (const use *u = v->uses; u; u = u->next)
        if (node_is(u->user, "Clamp") && u->index == 0 && attention_is_moderate(u->user->out[0], v->shape.dim[0]))
            return *out = u->user->out[0], OK;
    TRY(graph_scalar(g, v->type, -ATTENTION_FAR, &low));
    TRY(graph_scalar(g, v->type, ATTENTION_FAR, &high));
    return emit(g, out, "Clamp", v, low, high);
}

static status strip_addend(graph *g, value *v, const value *other, masks *m, value **rest) {
    enum { LOOKS = 6 };
    if (!m->given || !is_given(v) || !has_product(other, LOOKS)) return strip(g, v, m, rest);
    if (!add_mask(m, GIVEN, v, far_below)) return *rest = v, OK;
    return emit_near(g, m->mask[m->count - 1].of, rest);
}

static status strip_sum(graph *g, value *v, masks *m, value **rest) {
    const int before = m->count;
    value *x, *y;

    TRY(strip_addend(g, v->def->in[0], v->def->in[1], m, &x));
    TRY(strip_addend(g, v->def->in[1], v->def->in[0], m, &y));
    if (m->count == before) return OK;
    *rest = x ? x : y;
    return x && y ? emit(g, rest, "Add", x, y) : OK;
}

static status strip_cast(graph *g, value *v, masks *m, value **rest) {
    const int before = m->count;
    union {
        int64_t align;
        char bytes[8];
    } one = {0};
    value *x;

    if (!dtype_is_float(v->def->in[0]->type) || !dtype_is_float(v->type)) return OK;
    TRY(strip(g, v->def->in[0], m, &x));
    for (int i = before; i < m->count; i++) {
        dtype_set_value(v->type, one.bytes, 0, m->mask[i].number);
        m->mask[i].number = dtype_get(v->type, one.bytes, 0);
    }
    if (m->count == before) return OK;
    *rest = x;
    return x ? emit_cast(g, x, v->type, rest) : OK;
}

/* Expand, or a Reshape of a mask alone. */
static status strip_view(graph *g, value *v, masks *m, value **rest) {
    const int before = m->count;
    const bool expands = node_is(v->def, "Expand");
    value *x;

    TRY(strip(g, v->def->in[0], m, &x));
    if (m->count == before) return OK;
    if (x && expands) return emit_expand(g, x, &v->shape, rest);
    for (int i = before; i < m->count && !expands; i++)
        if (x || !shape_equal(&m->mask[i].as, &v->def->in[0]->shape)) return m->count = before, OK;
    for (int i = before; i < m->count && !expands; i++) m->mask[i].as = v->shape;
    *rest = NULL;
    return OK;
}

/* Adds to `m` what hides some of `v`; *rest is what is left of it, `v` itself where nothing is found, NULL: zeros. */
static status strip(graph *g, value *v, masks *m, value **rest) {
    double number;

    *rest = v;
    if (value_is_filled(v, &number) && number == 0) return *rest = NULL, OK;
    if (is_added(v, &number)) return add_mask(m, ADDED, v, number) ? *rest = NULL, OK : OK;
    if (value_is(v, "Where")) return strip_where(g, v, m, rest);
    if (value_is(v, "Add")) return strip_sum(g, v, m, rest);
    if (value_is(v, "Cast")) return strip_cast(g, v, m, rest);
    return value_is(v, "Expand") || value_is(v, "Reshape") ? strip_view(g, v, m, rest) : OK;
}

/* --- whether every query sees a key ---------------------------------------------------------------------------------- */

/* What is known of masks that several layers have. */
typedef struct answer {
    masks of;
    value *allowed;
    bool some_see_none;
} answer;

typedef struct answers {
    int count;
    answer answer[MOST_ASKED];
} answers;

static bool are_same(const masks *a, const masks *b) {
    bool same = a->count == b->count;
    for (int i = 0; same && i < a->count; i++)
        same = a->mask[i].kind == b->mask[i].kind && a->mask[i].of == b->mask[i].of &&
               shape_equal(&a->mask[i].as, &b->mask[i].as);
    return same;
}

/* Made of inputs by a few nodes that compute little, so that it can be asked for before the rest. */
static bool is_made_of_inputs(const value *v, int *looks) {
    const node *n = v->def;

    if (--*looks < 0) return false;
    if (!n) return !v->needs_grad;
    if (product_is(n) || (n->op->flags & (RANDOM | EFFECT)) || n->n_out != 1) return false;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && !is_made_of_inputs(n->in[i], looks)) return false;
    return true;
}

/* Whether data may be asked: attention of some sequences, whose tokens padding_removal would count. */
static bool may_ask(const shape *s, const value *allowed) {
    int looks = MOST_ABOVE;
    return s->rank == 4 && s->dim[0] * s->dim[3] >= FEWEST_ROWS && is_made_of_inputs(allowed, &looks);
}

/* Which keys a query sees, of all masks. */
static status emit_allowed(graph *g, const masks *m, value **allowed) {
    value *one, *zero;

    *allowed = NULL;
    for (int i = 0; i < m->count; i++) {
        const mask *own = &m->mask[i];
        one = own->of;
        if (own->kind == HIDES) TRY(emit(g, &one, "Not", one));
        if (own->kind == ADDED) {
            TRY(graph_scalar(g, one->type, 0, &zero));
            TRY(emit(g, &one, "Equal", one, zero));
        }
        if (own->kind == GIVEN) {
            TRY(graph_scalar(g, one->type, -ATTENTION_FAR, &zero));
            TRY(emit(g, &one, "GreaterOrEqual", one, zero));
        }
        TRY(emit_reshape(g, one, &own->as, &one));
        if (*allowed) TRY(emit(g, allowed, "And", *allowed, one));
        else *allowed = one;
    }
    return OK;
}

/* Whether any along the last axis is true. */
static status emit_some(graph *g, value *x, value **out) {
    const int64_t axis = x->shape.rank - 1;

    TRY(emit_cast(g, x, I32, out));
    TRY(emit_reduce(g, "ReduceMax", *out, 1, &axis, true, out));
    return emit_cast(g, *out, BOOL, out);
}

/* Numbers of a given mask that are neither moderate nor hide: large ones, NaN, and what is far below, but not enough. */
static status emit_odd(graph *g, const mask *m, value **out) {
    value *low, *high, *lowest, *near, *below;

    TRY(graph_scalar(g, m->of->type, -ATTENTION_FAR, &low));
    TRY(graph_scalar(g, m->of->type, ATTENTION_FAR, &high));
    TRY(graph_scalar(g, m->of->type, far_below, &lowest));
    TRY(emit(g, &near, "GreaterOrEqual", m->of, low));
    TRY(emit(g, &below, "LessOrEqual", m->of, high));
    TRY(emit(g, &near, "And", near, below));
    TRY(emit(g, &below, "LessOrEqual", m->of, lowest));
    TRY(emit(g, &near, "Or", near, below));
    return emit(g, out, "Not", near);
}

/* *any: some query sees no key, or a given mask is no mask. */
static status sees_none(graph *g, const shape *s, const masks *m, value *allowed, bool *any) {
    value *seen, *odd;

    if (attention_mask_causal(allowed, s->dim[s->rank - 1])) return *any = false, OK;
    TRY(emit_some(g, allowed, &seen));
    TRY(emit(g, &seen, "Not", seen));
    for (int i = 0; i < m->count; i++) {
        if (m->mask[i].kind != GIVEN) continue;
        TRY(emit_odd(g, &m->mask[i], &odd));
        TRY(emit_some(g, odd, &odd));
        TRY(emit(g, &seen, "Or", seen, odd));
    }
    TRY(emit_reshape(g, seen, &SHAPE(shape_count(&seen->shape)), &seen));
    if (!value_is_constant(seen) && !may_ask(s, allowed)) return *any = true, OK;
    return rows_any(g, seen, any);
}

static status find_answer(graph *g, const shape *s, const masks *m, answers *known, answer *out) {
    for (int i = 0; i < known->count; i++)
        if (are_same(&known->answer[i].of, m)) return *out = known->answer[i], OK;
    out->of = *m;
    TRY(emit_allowed(g, m, &out->allowed));
    TRY(sees_none(g, s, &out->of, out->allowed, &out->some_see_none));
    if (known->count < MOST_ASKED) known->answer[known->count++] = *out;
    return OK;
}

/* --- the pass --------------------------------------------------------------------------------------------------------- */

/* Nothing else hides, so that of a query that sees a key a weight is left. */
static bool fits(const node *n, const masks *m, const value *rest) {
    const value *x = n->in[0];

    for (int i = 0; i < m->count; i++)
        if (!(m->mask[i].number <= far_below) || m->mask[i].as.rank == 0) return false;
    return rest && rest->type == x->type && shape_equal(&rest->shape, &x->shape) && attention_is_computed(rest);
}

/* Attention as one operator of torch's may come of it: of so many scores. */
static bool wants_given(const graph *g, const shape *s) {
    return g->cuda && s->rank == 4 &&
           fused_attention_by_torch(g, F32, TORCH_BIASED, s, 8, 8, false, !g->attention_everywhere);
}

static status hide(graph *g, node *n, answers *known, int *fired) {
    const bool safe = node_is(n, "MaskedSoftmax");
    masks m = {0};
    value *rest, *out;
    answer a;

    if (!safe && (!node_is(n, "Softmax") || !node_is_along_last_axis(n))) return OK;
    if (node_in(n, 1) && !attention_mask_finite(n->in[1], n->in[0])) return OK;
    if (n->out[0]->shape.rank < 2 || shape_count(&n->out[0]->shape) == 0) return OK;
    m.given = wants_given(g, &n->out[0]->shape);
    TRY(strip(g, n->in[0], &m, &rest));
    if (m.count == 0 || !fits(n, &m, rest)) return OK;
    bool asks = !safe;
    for (int i = 0; i < m.count; i++) asks |= m.mask[i].number > -INFINITY;
    if (!asks) {
        TRY(emit_allowed(g, &m, &a.allowed));
    } else {
        TRY(find_answer(g, &n->out[0]->shape, &m, known, &a));
        if (a.some_see_none) return OK;
    }
    TRY(emit(g, &out, "MaskedSoftmax", rest, a.allowed));
    ++*fired;
    return graph_replace(g, n->out[0], out);
}

static status run(graph *g, int *fired) {
    answers known = {0};
    status s = OK;

    if (g->pending) return OK;
    for (node *n = g->first; n && s == OK; n = n->next) {
        if (!node_is_read(n)) continue;
        pass_emits(g, n, n);
        s = hide(g, n, &known, fired);
    }
    return pass_end(g, s);
}

const pass_def score_mask = {.name = "score_mask", .stage = BEFORE_GRADIENT, .run = run};
