/* row_reach.c -- follows rows through the graph, operator by operator. What is not in the table lets nothing pass. */
#include "passes/row_reach.h"

#include "ops/op.h"
#include "passes/match.h"

#include <string.h>

typedef struct visit {
    row_reach *r;
    const node *n;
    row_state out;
} visit;

/* Sets v->out from the states of the operands; false: something may change that must not. */
typedef bool visit_fn(visit *v);

static const row_state *state_of(const row_reach *r, const value *v) { return &r->states[v->id]; }
static const row_state *operand(const visit *v, int i) {
    static const row_state nothing;
    return node_in(v->n, i) ? state_of(v->r, v->n->in[i]) : &nothing;
}

static bool same_pair(row_axes a, row_axes b) { return a.batch == b.batch && a.token == b.token; }

/* The same rows along other axes. */
static row_axes moved(row_axes p, int batch, int token) { return (row_axes){batch, token, p.stream}; }

static int stream_of(const row_reach *r, row_axes p) {
    int stream = p.stream;
    while (r->joined[stream] != stream) stream = r->joined[stream];
    return stream;
}

static void join_streams(row_reach *r, row_axes a, row_axes b) {
    const int one = stream_of(r, a), other = stream_of(r, b);
    r->joined[other] = one;
    r->masked[one] |= r->masked[other];
}

static bool add_pair(visit *v, row_axes p) {
    row_state *s = &v->out;

    for (int i = 0; i < s->count; i++)
        if (same_pair(s->at[i], p)) {
            join_streams(v->r, s->at[i], p);
            return true;
        }
    if (s->count == 2) return false;
    s->at[s->count++] = p;
    return true;
}

static bool add_need(row_reach *r, need_kind kind, value *of, int64_t ignored) {
    for (int i = 0; i < r->n_needs; i++)
        if (r->needs[i].kind == kind && r->needs[i].value == of && r->needs[i].ignored == ignored) return true;
    if (r->n_needs == MOST_NEEDS) return false;
    r->needs[r->n_needs++] = (row_need){kind, of, ignored};
    return true;
}

static bool only_operand(const visit *v, int i) {
    for (int k = 0; k < v->n->n_in; k++)
        if (k != i && operand(v, k)->count) return false;
    return true;
}

static bool touches(const row_state *s, int axis) {
    for (int i = 0; i < s->count; i++)
        if (s->at[i].batch == axis || s->at[i].token == axis) return true;
    return false;
}

static row_axes shifted(row_axes p, int shift) { return moved(p, p.batch + shift, p.token + shift); }

/* Axes of an operand are those of the result, moved by `shift`. */
static bool add_shifted(visit *v, const row_state *s, int shift) {
    for (int i = 0; i < s->count; i++)
        if (!add_pair(v, shifted(s->at[i], shift))) return false;
    return true;
}

/* --- row by row ----------------------------------------------------------------------------------------------------- */

static bool visit_broadcast(visit *v) {
    for (int i = 0; i < v->n->n_in; i++)
        if (v->n->in[i] && !add_shifted(v, operand(v, i), v->n->out[0]->shape.rank - v->n->in[i]->shape.rank))
            return false;
    return true;
}

/* `v` before casts and before it was made larger: one number for each row, or NULL. */
static value *row_numbers(const row_reach *r, value *v) {
    for (;;) {
        bool grown = v->def && (node_is(v->def, "Expand") || node_is(v->def, "Cast"));
        if (shape_count(&v->shape) == r->batch * r->length) return v;
        if (!grown) return NULL;
        v = v->def->in[0];
    }
}

/* Has `v`, seen with the rank of the result, the sizes of the pair's axes there and 1 everywhere else? Its elements are
 * in the order of rows, then. */
static bool lies_along(const row_reach *r, const value *v, row_axes p, int rank) {
    int shift = rank - v->shape.rank;

    if (p.batch > p.token) return false;
    for (int i = 0; i < rank; i++) {
        int64_t size = i < shift ? 1 : v->shape.dim[i - shift];
        if (p.batch == p.token && i == p.batch) {
            if (size != r->batch * r->length) return false;
        } else if (size != (i == p.batch ? r->batch : i == p.token ? r->length : 1)) {
            return false;
        }
    }
    return true;
}

static bool visit_mul(visit *v) {
    int rank = v->n->out[0]->shape.rank;

    if (!visit_broadcast(v)) return false;
    for (int i = 0; i < 2; i++) {
        value *factor = v->n->in[i];
        if (operand(v, i)->count || !operand(v, 1 - i)->count) continue;
        factor = factor->shape.rank == rank ? row_numbers(v->r, factor) : NULL;
        if (!factor || v->out.count != 1 || !lies_along(v->r, factor, v->out.at[0], rank)) continue;
        v->out.has_zeros = true;
        v->out.zeros = v->out.at[0];
        v->out.factor = factor;
    }
    return true;
}

static bool visit_same(visit *v) {
    v->out = *operand(v, 0);
    return only_operand(v, 0);
}

static bool visit_norm(visit *v) {
    int axis = node_axis(v->n, v->n->in[0]->shape.rank);
    for (int i = axis; i < v->n->in[0]->shape.rank; i++)
        if (touches(operand(v, 0), i)) return false;
    if (!visit_same(v)) return false;
    v->out.has_zeros = false;
    return true;
}

static bool visit_softmax(visit *v) {
    if (touches(operand(v, 0), node_axis(v->n, v->n->in[0]->shape.rank)) || !visit_same(v)) return false;
    v->out.has_zeros = false;
    return true;
}

static bool visit_rotary(visit *v) { return visit_broadcast(v) && !touches(&v->out, v->n->out[0]->shape.rank - 1); }

/* --- moving axes ---------------------------------------------------------------------------------------------------- */

static bool visit_transpose(visit *v) {
    const row_state *s = operand(v, 0);
    const int64_t *perm;
    int rank = node_ints(v->n, "perm", &perm), to[MAX_RANK];

    if (rank != v->n->out[0]->shape.rank) return false;
    for (int i = 0; i < rank; i++) to[perm[i]] = i;
    v->out = *s;
    for (int i = 0; i < s->count; i++) v->out.at[i] = moved(s->at[i], to[s->at[i].batch], to[s->at[i].token]);
    if (s->has_zeros) v->out.zeros = moved(s->zeros, to[s->zeros.batch], to[s->zeros.token]);
    return true;
}

/* Elements behind an axis. */
static int64_t stride_of(const shape *s, int axis) { return shape_span(s, axis + 1, s->rank); }

/* The axis of `s` with this size and so many elements behind; -1: none. */
static int find_axis(const shape *s, int64_t size, int64_t behind) {
    for (int i = 0; i < s->rank; i++)
        if (s->dim[i] == size && stride_of(s, i) == behind) return i;
    return -1;
}

/* In the order of elements an axis is known by its size and what lies behind it. Both axes may become one. */
static bool reshape_pair(const row_reach *r, const shape *from, const shape *to, row_axes p, row_axes *out) {
    int64_t behind = stride_of(from, p.token);

    if (p.batch == p.token || stride_of(from, p.batch) == r->length * behind) {
        int all = find_axis(to, r->batch * r->length, behind);
        if (all >= 0) {
            *out = moved(p, all, all);
            return true;
        }
        *out = moved(p, find_axis(to, r->batch, r->length * behind), find_axis(to, r->length, behind));
    } else {
        *out = moved(p, find_axis(to, r->batch, stride_of(from, p.batch)), find_axis(to, r->length, behind));
    }
    return out->token >= 0 && out->batch >= 0;
}

static bool visit_reshape(visit *v) {
    const shape *from = &v->n->in[0]->shape, *to = &v->n->out[0]->shape;
    const row_state *s = operand(v, 0);

    v->out = *s;
    for (int i = 0; i < s->count; i++)
        if (!reshape_pair(v->r, from, to, s->at[i], &v->out.at[i])) return false;
    v->out.has_zeros = s->has_zeros && reshape_pair(v->r, from, to, s->zeros, &v->out.zeros);
    return true;
}

static bool visit_expand(visit *v) { return only_operand(v, 0) && visit_broadcast(v); }

static bool visit_concat(visit *v) {
    int axis = node_axis(v->n, v->n->out[0]->shape.rank);
    return visit_broadcast(v) && !touches(&v->out, axis);
}

/* --- what mixes rows ------------------------------------------------------------------------------------------------ */

static bool is_zero_at(const row_state *s, row_axes p, int shift) {
    return s->has_zeros && !s->factor && s->zeros.batch + shift == p.batch && s->zeros.token + shift == p.token;
}

/* a [.., m, k] times b [.., k, n]: rows along k change nothing where the other factor is 0. */
static bool visit_product(visit *v) {
    const value *a = v->n->in[0], *b = v->n->in[1];
    const row_state *sa = operand(v, 0), *sb = operand(v, 1);
    int rank = v->n->out[0]->shape.rank, to_a = rank - a->shape.rank, to_b = rank - b->shape.rank;

    if (a->shape.rank < 2 || b->shape.rank < 2 || operand(v, 2)->count || touches(sa, a->shape.rank - 1)) return false;
    if (!add_shifted(v, sa, to_a)) return false;
    for (int i = 0; i < sb->count; i++) {
        row_axes p = shifted(sb->at[i], to_b);
        if (p.token != rank - 2) {
            if (p.batch == rank - 2 || !add_pair(v, p)) return false;
        } else if (!is_zero_at(sa, moved(p, p.batch, rank - 1), to_a)) {
            return false;
        }
    }
    return true;
}

/* Of a conjunction the part that speaks of keys alone: [B, 1, 1, S]. */
static value *mask_of_keys(const row_reach *r, value *mask, row_axes keys, int rank) {
    value *found;

    while (value_is(mask, "Expand")) mask = mask->def->in[0];
    if (lies_along(r, mask, keys, rank)) return mask;
    if (!value_is(mask, "And")) return NULL;
    found = mask_of_keys(r, mask->def->in[0], keys, rank);
    return found ? found : mask_of_keys(r, mask->def->in[1], keys, rank);
}

/* Keys that no query may look at have weight 0. */
static bool visit_attention(visit *v) {
    const row_state *s = operand(v, 0);
    const value *x = v->n->in[0];
    int rank = x->shape.rank, last = rank - 1;
    value *mask = node_in(v->n, 1), *keys;

    if (operand(v, 1)->count) return false;
    for (int i = 0; i < s->count; i++) {
        if (s->at[i].batch == last || (s->at[i].token == last && !mask)) return false;
        if (s->at[i].token != last) {
            if (!add_pair(v, s->at[i])) return false;
            continue;
        }
        keys = mask_of_keys(v->r, mask, s->at[i], rank);
        if (!add_need(v->r, keys ? NEED_NONZERO : NEED_ALLOWED, keys ? keys : mask, 0)) return false;
        if (!keys && (rank != 4 || mask->shape.rank != 4 || s->at[i].batch != 0)) return false;
        v->out.has_zeros = true;
        v->out.zeros = s->at[i];
        v->r->masked[stream_of(v->r, s->at[i])] = true;
    }
    return true;
}

/* --- where rows end ------------------------------------------------------------------------------------------------- */

static bool visit_reduce(visit *v) {
    const row_state *s = operand(v, 0);
    bool reduced[MAX_RANK] = {false}, keep = node_int(v->n, "keepdims") != 0, adds;
    const value *axes = node_in(v->n, 1);
    int to[MAX_RANK], rank = v->n->in[0]->shape.rank, next = 0;

    if (axes && !value_is_constant(axes)) return false;
    for (int64_t i = 0; axes && i < shape_count(&axes->shape); i++) {
        const int64_t axis = dtype_get_int(axes->type, axes->data, i);
        reduced[axis < 0 ? axis + rank : axis] = true;
    }
    for (int i = 0; i < rank; i++) {
        if (!axes) reduced[i] = true;
        to[i] = keep || !reduced[i] ? next++ : -1;
    }
    adds = node_is(v->n, "ReduceSum") || node_is(v->n, "ReduceMean");
    for (int i = 0; i < s->count; i++) {
        row_axes p = s->at[i];
        if (!reduced[p.batch] && !reduced[p.token]) {
            if (!add_pair(v, moved(p, to[p.batch], to[p.token]))) return false;
        } else if (!adds || !s->has_zeros || !same_pair(p, s->zeros) ||
                   (s->factor && !add_need(v->r, NEED_NONZERO, s->factor, 0))) {
            return false;
        }
    }
    return true;
}

static bool visit_loss(visit *v) {
    const row_state *s = operand(v, 0);
    bool rows = s->count == 1 && s->at[0].batch == 0 && s->at[0].token == 0 && v->n->in[0]->shape.rank == 2;
    return rows && only_operand(v, 0) && node_has(v->n, "ignore_index") &&
           add_need(v->r, NEED_LABELS, v->n->in[1], node_int(v->n, "ignore_index"));
}

static bool visit_pack(visit *v) {
    const row_state *s = operand(v, 0);
    const node *index = v->n->in[1]->def;
    bool rows = s->count == 1 && s->at[0].batch == 0 && s->at[0].token == 0;
    return rows && only_operand(v, 0) && index && node_is(index, "RowIndex") &&
           add_need(v->r, NEED_NONZERO, index->in[0], 0);
}

static bool visit_gather(visit *v) {
    const row_state *s = operand(v, 0);
    int axis = node_axis(v->n, v->n->in[0]->shape.rank);
    return s->count == 1 && s->at[0].batch == axis && s->at[0].token == axis && axis == 0 && only_operand(v, 0) &&
           v->n->in[1]->type == I64 && add_need(v->r, NEED_INDEX, v->n->in[1], 0);
}

/* The numbers of the rows that a slice takes, when it takes no whole axis of them. */
static bool need_slice(visit *v, row_axes p) {
    const int64_t *start, *count, *step;
    row_reach *r = v->r;
    bool merged = p.batch == p.token;
    int64_t outer, *rows, n = 0;
    value *list;

    node_ints(v->n, "starts", &start);
    node_ints(v->n, "counts", &count);
    node_ints(v->n, "steps", &step);
    outer = merged ? 1 : count[p.batch];
    if (NEW(r->g->scratch, rows, outer * count[p.token]) != OK) return false;
    for (int64_t b = 0; b < outer; b++)
        for (int64_t i = 0; i < count[p.token]; i++)
            rows[n++] =
                (merged ? 0 : (start[p.batch] + b * step[p.batch]) * r->length) + start[p.token] + i * step[p.token];
    return graph_ints(r->g, (int)n, rows, &list) == OK && add_need(r, NEED_INDEX, list, 0);
}

static bool visit_slice(visit *v) {
    const row_state *s = operand(v, 0);

    for (int i = 0; i < s->count; i++) {
        row_axes p = s->at[i];
        if (slice_keeps(v->n, p.batch) && slice_keeps(v->n, p.token)) {
            if (!add_pair(v, p)) return false;
        } else if (s->count > 1 || !need_slice(v, p)) {
            return false;
        }
    }
    return true;
}

/* --- the walk ------------------------------------------------------------------------------------------------------- */

static const struct {
    const char *op;
    visit_fn *visit;
} visits[] = {
    {"Mul", visit_mul},
    {"Rotary", visit_rotary},
    {"DropoutTrain", visit_same},
    {"Cast", visit_same},
    {"LayerNormalization", visit_norm},
    {"RMSNormalization", visit_norm},
    {"Softmax", visit_softmax},
    {"LogSoftmax", visit_softmax},
    {"MaskedSoftmax", visit_attention},
    {"MatMul", visit_product},
    {"MatMulBias", visit_product},
    {"Transpose", visit_transpose},
    {"Reshape", visit_reshape},
    {"Expand", visit_expand},
    {"Concat", visit_concat},
    {"StridedSlice", visit_slice},
    {"ReduceSum", visit_reduce},
    {"ReduceMean", visit_reduce},
    {"ReduceMax", visit_reduce},
    {"ReduceMin", visit_reduce},
    {"ReduceSumSquare", visit_reduce},
    {"ReduceL2", visit_reduce},
    {"CrossEntropy", visit_loss},
    {"Nll", visit_loss},
    {"PackRows", visit_pack},
    {"Gather", visit_gather},
};

static visit_fn *visit_of(const node *n) {
    for (size_t i = 0; i < sizeof visits / sizeof *visits; i++)
        if (strcmp(visits[i].op, n->op->name) == 0) return visits[i].visit;
    return n->op->flags & POINTWISE && !(n->op->flags & (RANDOM | EFFECT)) ? visit_broadcast : NULL;
}

static void begin_rows(row_reach *r, const value *v) {
    r->states[v->id] = (row_state){.count = 1, .at = {{0, 1, v->id}}};
}

static bool is_batch(const row_reach *r, const value *v) {
    return v->shape.rank >= 2 && v->shape.dim[0] == r->batch && v->shape.dim[1] == r->length;
}

bool rows_begin_at(const row_reach *r, const node *n) {
    return node_looks_up_rows(n) && dtype_is_float(n->out[0]->type) && n->in[1]->shape.rank == 2 &&
           is_batch(r, n->in[1]) && !state_of(r, n->in[0])->count && !state_of(r, n->in[1])->count;
}

static bool follow_node(row_reach *r, const node *n) {
    visit v = {.r = r, .n = n};
    visit_fn *visit_it = visit_of(n);
    bool any = false, zeros = false;

    for (int i = 0; i < n->n_in; i++) any |= n->in[i] && state_of(r, n->in[i])->count;
    for (int i = 0; i < n->n_in; i++) zeros |= n->in[i] && state_of(r, n->in[i])->has_zeros;
    if (!any && zeros && visit_it && visit_it(&v)) r->states[n->out[0]->id] = v.out; /* weights behind a dropout */
    if (!any) {
        if (n->n_out && n->out[0] && rows_begin_at(r, n)) begin_rows(r, n->out[0]);
        return true;
    }
    if (!visit_it || !visit_it(&v)) return false;
    r->states[n->out[0]->id] = v.out;
    for (int i = 1; i < n->n_out; i++)
        if (n->out[i] && value_is_read(n->out[i])) return false;
    return true;
}

bool rows_lead(const row_reach *r, const value *v) {
    const row_state *s = v->id < r->n_values ? state_of(r, v) : NULL;
    return s && s->count == 1 && s->at[0].batch == 0 && s->at[0].token <= 1;
}

/* Rows of tokens, of which a mask tells what is padding. */
static bool is_padded(const row_reach *r, const value *v) {
    return rows_lead(r, v) && r->masked[stream_of(r, state_of(r, v)->at[0])];
}

status rows_follow(graph *g, int64_t batch, int64_t length, row_reach *out, bool *closed) {
    *out = (row_reach){.g = g, .batch = batch, .length = length, .n_values = g->n_values};
    *closed = false;
    TRY(NEW(g->scratch, out->states, g->n_values));
    TRY(NEW(g->scratch, out->joined, g->n_values));
    TRY(NEW(g->scratch, out->masked, g->n_values));
    for (int i = 0; i < g->n_values; i++) out->joined[i] = i;
    for (int i = 0; i < g->n_inputs; i++)
        if (g->inputs[i]->shape.rank > 2 && dtype_is_float(g->inputs[i]->type) && is_batch(out, g->inputs[i]))
            begin_rows(out, g->inputs[i]);
    for (const node *n = g->first; n; n = n->next)
        if (!follow_node(out, n)) return OK;
    for (const state_write *w = g->writes; w; w = w->next)
        if (state_of(out, w->value)->count) return OK;
    for (int i = 0; i < g->n_outputs; i++)
        if (state_of(out, g->outputs[i])->count && !(g->padding_unseen && is_padded(out, g->outputs[i]))) return OK;
    *closed = true;
    return OK;
}
