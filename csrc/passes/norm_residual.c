/* norm_residual.c -- a norm and what stands around it as one operator, so that rows are read and written once:
 *
 *   s = x + residual, Norm(s)                     ->  FusedNorm(x, residual): the norm's results and s
 *   s = Dropout(x) + residual, Norm(s)            ->  FusedNormRandom(x, residual)
 *   Cast(Norm(x), to 16 bits)                     ->  FusedNorm(x): the norm's result in 16 bits
 *   NormGrad(dy, ...) + gradient                  ->  NormGrad(dy, ..., gradient)
 *   NormGrad(Cast(dy, to float32), ...)           ->  NormGrad(dy, ...)
 *
 * The norms are LayerNormalization and RMSNormalization; x may be widened from 16 bits on its way, as autocast does,
 * and reshapes may stand before the casts. Values are rounded to their types as by the operators one by one; within
 * float32 and float64 a product and the sum after it may be rounded once. An addition stays where a chain of pointwise
 * operators makes what it adds, which would have to be stored then, or where it reads through strides. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/queries.h"

/* An addition had better read `v` itself: a chain of pointwise operators need not store it, and reads through strides
 * where a norm would have a copy made. */
static bool suits_a_chain(const value *v) {
    if (!v->def || !v->def->op) return false;
    if (v->def->op->view) return !node_is(v->def, "Reshape");
    return fused_holds(v->def) && value_is_private(v);
}

/* Another node than a chain of the same shape reads it, or the graph gives it back. */
static bool is_stored(const value *v) {
    for (const use *u = v->uses; u; u = u->next)
        if (u->user->n_out != 1 || !shape_equal(&u->user->out[0]->shape, &v->shape) || !fused_holds(u->user))
            return true;
    return value_is_end(v);
}

/* Whether what the norm `n` scales with is there when `at` runs, and is not the sum `s` that it would make then. */
static bool is_ready(const node *n, const value *s, const node *at) {
    for (int i = 1; i < n->n_in; i++)
        if (n->in[i] == s || !value_is_before(n->in[i], at)) return false;
    return true;
}

/* --- forward ------------------------------------------------------------------------------------------------------ */

/* x + residual, of which the dropout (NULL: there is none) has left some. */
typedef struct sum {
    value *x, *residual;
    const node *dropout;
} sum;

/* Takes the steps between x and the sum off an addend. */
static void peel(value *v, sum *s) {
    s->x = v;
    s->dropout = NULL;
    if (value_is_widened(v) && value_is_private(v)) s->x = v->def->in[0];
    v = s->x;
    if (!value_is(v, "DropoutTrain") || node_in(v->def, 1) || !value_is_private(v)) return;
    s->dropout = v->def;
    s->x = v->def->in[0];
}

static bool read_sum(const value *v, const node *norm, sum *s) {
    const node *n = v->def;

    if (!value_is(v, "Add") || n->backward != norm->backward || !is_ready(norm, v, value_first_reader(v))) return false;
    for (int i = 0; i < 2; i++) {
        if (!shape_equal(&n->in[i]->shape, &v->shape) || !shape_equal(&n->in[1 - i]->shape, &v->shape)) return false;
        peel(n->in[i], s);
        s->residual = n->in[1 - i];
        if (!suits_a_chain(s->x) && !suits_a_chain(s->residual)) return true;
    }
    return false;
}

enum { MOST_CASTS = 4 };

typedef struct casts {
    value *to[MOST_CASTS]; /* what is narrowed, maybe behind reshapes */
    int count;
} casts;

/* Casts of `v` to 16 bits, all to one type, whose results are in memory. */
static void find_casts(const graph *g, const value *v, casts *found) {
    for (const use *u = v->uses; u && found->count < MOST_CASTS; u = u->next) {
        value *y = u->user->n_out ? u->user->out[0] : NULL;
        if (!y || u->index != 0) continue;
        if (value_is(y, "Reshape")) find_casts(g, y, found);
        else if (value_is(y, "Cast") && dtype_is_narrow(y->type) && is_stored(y) &&
                 (!found->count || found->to[0]->type == y->type))
            found->to[found->count++] = y;
    }
}

enum { Y, MEANS, INVERSES, SUM, NARROW, RESULTS };

static status fuse_norm(graph *g, node *n, int *fired) {
    const bool centred = value_is(n->out[0], "LayerNormalization");
    value *in[] = {n->in[0], n->in[1], node_in(n, 2), NULL}, *out[RESULTS] = {NULL};
    sum s = {.x = NULL};
    casts found = {.count = 0};

    if (n->in[0]->type == F32) find_casts(g, n->out[0], &found);
    const bool adds = read_sum(n->in[0], n, &s);
    if (!adds && !found.count) return OK;
    if (adds) in[0] = s.x, in[3] = s.residual;
    pass_emits(g, adds ? value_first_reader(n->in[0]) : n, n);
    TRY(graph_emit(g, adds && s.dropout ? "FusedNormRandom" : "FusedNorm",
                   NODE_ATTRS(INT("axis", node_int(n, "axis")), FLOAT("epsilon", node_float(n, "epsilon")),
                              INT("centred", centred), INT("narrow", found.count ? found.to[0]->type : DT_NONE),
                              FLOAT("ratio", s.dropout ? node_float(s.dropout, "ratio") : 0),
                              INT("key", s.dropout ? node_int(s.dropout, "key") : 0)),
                   adds ? 4 : 3, in, RESULTS, out));
    for (int i = 0; i < found.count; i++) {
        value *y;
        TRY(emit_reshape(g, out[NARROW], &found.to[i]->shape, &y));
        TRY(graph_replace(g, found.to[i], y));
    }
    if (adds) TRY(graph_replace(g, n->in[0], out[SUM]));
    TRY(graph_replace(g, n->out[0], out[Y]));
    if (n->n_out > 1 && n->out[1]) TRY(graph_replace(g, n->out[1], out[centred ? MEANS : INVERSES]));
    if (n->n_out > 2 && n->out[2]) TRY(graph_replace(g, n->out[2], out[INVERSES]));
    ++*fired;
    return OK;
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

/* What arrived before it was widened to float32, reshaped as `v`; `v` itself where it was not. */
static status before_cast(graph *g, value *v, value **out) {
    value *x = value_before_widening(v);

    *out = v;
    return x ? emit_reshape(g, x, &v->shape, out) : OK;
}

/* The addition of dx and a gradient that is there before; NULL: none, or a chain makes that gradient. */
static node *addition_to(const value *dx, value **other) {
    node *n = value_is_private(dx) ? dx->uses->user : NULL;

    if (!n || !value_is(n->out[0], "Add") || !n->backward) return NULL;
    *other = n->in[0] == dx ? n->in[1] : n->in[0];
    if (!shape_equal(&(*other)->shape, &dx->shape) || suits_a_chain(*other)) return NULL;
    if (!value_is_before(*other, dx->def)) return NULL;
    return n;
}

enum { DY, X, SCALE, GRAD_INVERSES, GRAD_MEANS, ADDED, GRAD_OPERANDS };

static status fuse_gradient(graph *g, node *n, int *fired) {
    value *in[GRAD_OPERANDS] = {NULL}, *out[3] = {NULL};
    node *addition = n->n_in <= ADDED ? addition_to(n->out[0], &in[ADDED]) : NULL;

    for (int i = 0; i < n->n_in; i++) in[i] = n->in[i];
    if (!addition) in[ADDED] = node_in(n, ADDED);
    pass_emits(g, n, n);
    TRY(before_cast(g, in[DY], &in[DY]));
    if (!addition && in[DY] == n->in[DY]) return OK;
    TRY(graph_emit_op(g, n->op, n->attrs, in[ADDED] ? GRAD_OPERANDS : n->n_in, in, n->n_out, out));
    TRY(graph_replace(g, addition ? addition->out[0] : n->out[0], out[0]));
    for (int i = 1; i < n->n_out; i++) TRY(graph_replace(g, n->out[i], out[i]));
    ++*fired;
    return OK;
}

/* --- the pass ----------------------------------------------------------------------------------------------------- */

static bool is_any_of(const node *n, const char *a, const char *b) { return node_is(n, a) || node_is(n, b); }

static status fuse(graph *g, node *n, int *fired) {
    if (is_any_of(n, "LayerNormalization", "RMSNormalization")) return fuse_norm(g, n, fired);
    return is_any_of(n, "LayerNormGrad", "RMSNormGrad") ? fuse_gradient(g, n, fired) : OK;
}

static status run(graph *g, int *fired) { return pass_rewrite_each(g, fuse, fired); }

const pass_def norm_residual = {.name = "norm_residual", .stage = LAST, .run = run};
