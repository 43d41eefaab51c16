/* attention_fusion.c -- dropout(softmax(alpha q k' + bias, where allowed)) v  ->  FusedAttention
 *
 * Heads and sequences come as [B, H, S, D]; the operator's are [B, S, H, D], as linear layers make and take them, so
 * that the transposes around attention cancel. Keys and values that are repeated for groups of heads (Reshape of Expand)
 * are taken as they were before; where a kernel wants as many heads as of queries, they are repeated behind the transpose.
 * No other node may read what is between the products.
 *
 * Three passes: attention_fusion where it is measured to be faster, or saves much memory; efficient_attention everywhere,
 * for who asks for it; flash_dropout where a kernel of torch's on a GPU drops elements, which it draws from torch's
 * generator: the numbers are others than those of the operators one by one. */
#include "passes/attention_mask.h"
#include "passes/pipeline.h"

#include "graph/triton.h"
#include "ops/queries.h"

#include <math.h>

enum { WEIGHTS, VALUES };
enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, OPERANDS }; /* of FusedAttention */

/* --- what there is between the products ------------------------------------------------------------------------------ */

typedef struct attention {
    value *q, *k, *v, *allowed, *bias; /* q [B, H, Q, D], k [B, G, K, D], v [B, G, K, W] */
    double scale, ratio;
    int64_t key;
    bool safe;
    torch_attention torch, lists; /* lists: of rows, once attention_lengths has found them */
    torch_attention triton;       /* which keys Triton's kernel is asked for */
    value *pack;                  /* which keys are packed, bool [B, 1, 1, K]; or NULL */
} attention;

/* Before a cast between a 16-bit type and float32. */
static value *before_cast(value *v) {
    if (!value_is(v, "Cast") || !value_is_private(v)) return v;
    value *x = v->def->in[0];
    const bool wide = (dtype_is_narrow(x->type) && v->type == F32) || (x->type == F32 && dtype_is_narrow(v->type));
    return wide ? x : v;
}

static value *before_dropout(value *v, attention *a) {
    if (!value_is(v, "DropoutTrain") || !value_is_private(v) || node_in(v->def, 1)) return v;
    a->ratio = node_float(v->def, "ratio");
    a->key = node_int(v->def, "key");
    return v->def->in[0];
}

/* That scores are -inf there, which the operator finds out by itself; nothing else reads these. */
static bool says_not_hidden(const value *allowed, const value *x) {
    if (!attention_mask_finite(allowed, x) || value_is_end(x)) return false;
    for (const use *u = x->uses; u; u = u->next)
        if (!node_is(u->user, "MaskedSoftmax") && (!node_is(u->user, "Equal") || u->user->out[0]->n_uses > 1))
            return false;
    return allowed->n_uses == 1 && x->n_uses <= 2;
}

static value *before_softmax(value *v, attention *a) {
    const int last = v->shape.rank - 1;

    if (!value_is_private(v)) return NULL;
    if (value_is(v, "Softmax")) {
        const int64_t axis = node_int(v->def, "axis");
        return (axis == -1 || axis == last) && value_is_private(v->def->in[0]) ? v->def->in[0] : NULL;
    }
    if (!value_is(v, "MaskedSoftmax")) return NULL;
    value *x = v->def->in[0];
    a->safe = true;
    a->allowed = node_in(v->def, 1);
    if (a->allowed && says_not_hidden(a->allowed, x)) {
        a->allowed = NULL;
        return x;
    }
    return value_is_private(x) ? x : NULL;
}

static bool is_product(const value *v) {
    return v->def && product_is(v->def) && !node_in(v->def, 2) && v->type == v->def->in[0]->type;
}

/* The product of queries and keys behind scores, with what is added to it. */
static value *before_bias(value *v, attention *a) {
    value *product = before_cast(v);

    for (int i = 0; value_is(product, "Add") && i < 2; i++) {
        value *x = before_cast(product->def->in[i]);
        if (!is_product(x) || !value_is_private(product->def->in[i]) || !value_is_private(x)) continue;
        if (!shape_equal(&x->shape, &product->shape)) continue;
        a->bias = product->def->in[1 - i];
        return x;
    }
    return is_product(product) && value_is_private(product) ? product : NULL;
}

static bool find_attention(value *weights, attention *a) {
    value *x = before_cast(weights);

    x = before_dropout(x, a);
    x = before_cast(x);
    if (!(x = before_softmax(x, a)) || !(x = before_bias(x, a))) return false;
    a->q = x->def->in[0];
    a->k = x->def->in[1]; /* transposed */
    a->scale = product_alpha(x->def);
    return true;
}

/* --- its form -------------------------------------------------------------------------------------------------------- */

/* Same sequences, heads, keys and widths, and of one type. */
static bool fits(const attention *a, const node *root) {
    const shape *q = &a->q->shape, *k = &a->k->shape, *v = &a->v->shape;

    if (q->rank != 4 || k->rank != 4 || v->rank != 4 || shape_count(&root->out[0]->shape) == 0) return false;
    for (int i = 0; i < 2; i++)
        if (k->dim[i] != q->dim[i] || v->dim[i] != q->dim[i]) return false;
    if (k->dim[2] != q->dim[3] || k->dim[3] != v->dim[2] || k->dim[3] == 0 || q->dim[3] == 0) return false;
    if (q->dim[3] > FUSED_ATTENTION_WIDTH || v->dim[3] > FUSED_ATTENTION_WIDTH) return false;
    return a->q->type == a->k->type && a->q->type == a->v->type && a->q->type == root->out[0]->type;
}

/* Added in the type of the products, or of their sums. */
static bool bias_fits(const attention *a) {
    const value *b = a->bias;
    return !b || b->type == a->q->type || (dtype_is_narrow(a->q->type) && b->type == F32);
}

/* Our kernels make a bias's gradient of whole tiles. */
static bool bias_is_whole(const attention *a) {
    const value *b = a->bias;
    const int rank = b ? b->shape.rank : 0;

    if (!b || !b->needs_grad) return true;
    return rank >= 2 && b->shape.dim[rank - 2] == a->q->shape.dim[2] && b->shape.dim[rank - 1] == a->k->shape.dim[3];
}

/* A constant bias of 0 and -inf is a mask. */
static status bias_to_mask(graph *g, attention *a) {
    value *zero;

    if (!value_is_constant(a->bias) || a->allowed) return OK;
    for (int64_t i = 0, n = shape_count(&a->bias->shape); i < n; i++) {
        const double x = dtype_get(a->bias->type, a->bias->data, i);
        if (x != 0 && x != -INFINITY) return OK;
    }
    TRY(graph_scalar(g, a->bias->type, 0, &zero));
    TRY(emit(g, &a->allowed, "Equal", a->bias, zero));
    a->bias = NULL;
    return OK;
}

/* Keys or values [B, G n, S, D] whose G heads are repeated, each for a group of n heads of queries:
 * Reshape(Expand([B, G, 1, S, D] to [B, G, n, S, D])), and perhaps a Cast. */
typedef struct repeat {
    value *few; /* [B, G, 1, S, D]; NULL: none is repeated */
    int64_t times;
    dtype type; /* behind the cast */
    bool seen;  /* others read what is repeated */
} repeat;

static repeat find_repeat(value *x) {
    const value *heads = value_is(x, "Cast") ? x->def->in[0] : x, *all;
    repeat r = {.few = NULL};

    if (!value_is(heads, "Reshape") || !value_is(all = heads->def->in[0], "Expand")) return r;
    const shape *s = &all->def->in[0]->shape, *e = &all->shape, *h = &heads->shape;
    if (s->rank != 5 || e->rank != 5 || s->dim[2] != 1 || h->rank != 4) return r;
    for (int i = 0; i < 5; i++)
        if (i != 2 && s->dim[i] != e->dim[i]) return r;
    if (h->dim[1] != e->dim[1] * e->dim[2] || h->dim[2] != e->dim[3]) return r;
    return (repeat){.few = all->def->in[0],
                    .times = e->dim[2],
                    .type = x->type,
                    .seen = !value_is_private(x) || !value_is_private(heads) || !value_is_private(all)};
}

/* The heads before they are repeated, [B, G, S, D]. */
static status emit_few(graph *g, const repeat *r, value **out) {
    const int64_t *d = r->few->shape.dim;
    TRY(emit_reshape(g, r->few, &SHAPE(d[0], d[1], d[3], d[4]), out));
    return emit_cast(g, *out, r->type, out);
}

static status tokens_first(graph *g, value *x, value **out) {
    return emit_transpose(g, x, (const int[]){0, 2, 1, 3}, out);
}

/* Heads that are repeated, tokens first: the copy that repeats is the only one, and what comes back of a group of heads
 * lies together, where it is added up. */
static status repeat_tokens_first(graph *g, const repeat *r, value **out) {
    const int64_t *d = r->few->shape.dim, b = d[0], groups = d[1], tokens = d[3], width = d[4];
    TRY(emit_few(g, r, out));
    TRY(tokens_first(g, *out, out));
    TRY(emit_reshape(g, *out, &SHAPE(b, tokens, groups, 1, width), out));
    TRY(emit_expand(g, *out, &SHAPE(b, tokens, groups, r->times, width), out));
    return emit_reshape(g, *out, &SHAPE(b, tokens, groups * r->times, width), out);
}

/* `x` tokens first; heads that are repeated for it alone are repeated behind the transpose. */
static status heads_tokens_first(graph *g, const repeat *r, value *x, value **out) {
    return r->few && g->cuda && !r->seen ? repeat_tokens_first(g, r, out) : tokens_first(g, x, out);
}

/* Queries, keys and values as the operator takes them, tokens first, the latter of as few heads as it can read: torch's
 * kernels want as many as of queries, but for flash attention. */
static status emit_operands(graph *g, const attention *a, value *in[3]) {
    const int64_t width = a->q->shape.dim[3], value_width = a->v->shape.dim[3];
    value *k, *v = a->v;

    TRY(emit_transpose(g, a->k, (const int[]){0, 1, 3, 2}, &k));
    repeat rk = find_repeat(k), rv = find_repeat(v);
    rk.seen |= !value_is_private(a->k);
    const int64_t groups = rk.few ? rk.few->shape.dim[1] : k->shape.dim[1];
    const bool same_groups = groups == (rv.few ? rv.few->shape.dim[1] : v->shape.dim[1]);
    if (same_groups && a->torch != TORCH_BIASED &&
        ((!a->torch && !a->lists) || fused_attention_flash(g, a->q->type, width, value_width))) {
        if (rk.few) TRY(emit_few(g, &rk, &k));
        if (rv.few) TRY(emit_few(g, &rv, &v));
        rk.few = rv.few = NULL;
    }
    TRY(tokens_first(g, a->q, &in[0]));
    TRY(heads_tokens_first(g, &rk, k, &in[1]));
    return heads_tokens_first(g, &rv, v, &in[2]);
}

/* Keys and values [B, K, G, D] as the rows [B * K, G, D] that the mask shows, in the place of the mask. */
static status pack_keys(graph *g, const attention *a, value *in[OPERANDS]) {
    const int64_t all = a->v->shape.dim[0] * a->v->shape.dim[2];
    value *shown;

    TRY(emit_reshape(g, a->pack, &SHAPE(all), &shown));
    TRY(emit_with(g, &in[K_ROWS], "RowIndex", NODE_ATTRS(INT("count", all)), shown));
    for (int i = K; i <= V; i++) {
        const int64_t *d = in[i]->shape.dim;
        TRY(emit_reshape(g, in[i], &SHAPE(all, d[2], d[3]), &in[i]));
        TRY(emit(g, &in[i], "PackRows", in[i], in[K_ROWS]));
    }
    in[ALLOWED] = NULL;
    return OK;
}

/* What a bias of torch's kernel was made of: whatever was hidden, and added. */
static bool is_made_of(const value *v, const attention *a) {
    const value *added;

    while (value_is(v, "StridedSlice") || value_is(v, "Place") || value_is(v, "Expand") || value_is(v, "Reshape"))
        v = v->def->in[0];
    if (!a->allowed) return v == a->bias;
    if (!value_is(v, "Where") || v->def->in[0] != a->allowed) return false;
    for (added = v->def->in[1]; added != a->bias && value_is(added, "Cast");) added = added->def->in[0];
    return a->bias ? added == a->bias : value_is_constant(added);
}

/* The bias that an attention before has of the same; NULL: none has. Gradients of several are not added in 16 bits. */
static value *made_before(const graph *g, const attention *a, const node *root) {
    if (a->bias && a->bias->needs_grad) return NULL;
    for (const node *n = g->first; n && n != root; n = n->next) {
        if (!node_is(n, "FusedAttention") || node_int(n, "torch") != TORCH_BIASED || !is_made_of(n->in[BIAS], a))
            continue;
        if (n->in[BIAS]->type == a->q->type) return n->in[BIAS];
    }
    return NULL;
}

/* What is hidden, and the bias, as a bias [1 or B, 1 or H, 1 or Q, K] in the type of the queries, whose rows lie on 16
 * bytes. All layers that hide the same have the same one. */
static status emit_bias(graph *g, const attention *a, const node *root, value **out) {
    enum { STEP = 8 };
    const int64_t zero[MAX_RANK] = {0}, one[] = {1, 1, 1, 1}, keys = a->v->shape.dim[2], queries = a->q->shape.dim[2];
    value *lowest, *b;

    if ((*out = made_before(g, a, root))) return OK;
    if (a->bias) TRY(emit_cast(g, a->bias, a->q->type, &b));
    else TRY(graph_scalar(g, a->q->type, 0, &b));
    if (a->allowed) {
        TRY(graph_scalar(g, a->q->type, -INFINITY, &lowest));
        TRY(emit(g, &b, "Where", a->allowed, b, lowest));
    }
    shape s = SHAPE(1, 1, 1, 1);
    for (int d = 4 - b->shape.rank; d < 4; d++) s.dim[d] = b->shape.dim[d - 4 + b->shape.rank];
    if (b->needs_grad) s.dim[2] = queries;
    TRY(emit_expand(g, b, &s, &b));
    if (keys % STEP) {
        s.dim[3] = keys + STEP - keys % STEP;
        TRY(emit_place(g, b, NULL, zero, &s, one, &b));
        TRY(emit_slice_axis(g, b, 3, 0, keys, &b));
    }
    *out = b;
    return OK;
}

static status emit_attention(graph *g, const attention *a, const node *root, value **out) {
    value *in[OPERANDS] = {[ALLOWED] = a->allowed, [BIAS] = a->bias}, *y[3];
    const bool sized = a->pack; /* sizes that lists of rows do not show */

    TRY(emit_operands(g, a, in));
    if (a->torch == TORCH_BIASED) {
        TRY(emit_bias(g, a, root, &in[BIAS]));
        in[ALLOWED] = NULL;
    }
    if (a->triton) {
        const attr *attrs = NODE_ATTRS(FLOAT("scale", a->scale), FLOAT("ratio", a->ratio), INT("key", a->key),
                                       INT("safe", a->safe), INT("triton", a->triton));
        TRY(graph_emit(g, "FusedAttention", attrs, Q_ROWS, in, 2, y));
    } else {
        if (a->pack) TRY(pack_keys(g, a, in));
        TRY(graph_emit(
            g, "FusedAttention",
            NODE_ATTRS(FLOAT("scale", a->scale), FLOAT("ratio", a->ratio), INT("key", a->key), INT("safe", a->safe),
                       INT("torch", a->torch), INT("lists", a->lists), INT("batch", sized ? a->q->shape.dim[0] : 0),
                       INT("queries", sized ? a->q->shape.dim[2] : 0), INT("keys", sized ? a->v->shape.dim[2] : 0)),
            a->pack ? OPERANDS : Q_ROWS, in, a->torch && a->ratio > 0 ? 3 : 2, y));
    }
    for (const use *u = root->out[0]->uses; u; u = u->next) /* tokens first is what its reader wants */
        if (node_swaps_middle_axes(u->user) && u->user->out[0]->n_uses) TRY(graph_replace(g, u->user->out[0], y[0]));
    return tokens_first(g, y[0], out);
}

/* --- whether it pays -------------------------------------------------------------------------------------------------- */

/* Of the rows that padding_removal kept: attention_lengths leaves the others out. */
static bool of_some_rows(const value *v) {
    return value_is(v, "Transpose") && value_is(v->def->in[0], "Reshape") &&
           value_is(v->def->in[0]->def->in[0], "UnpackRows");
}

static torch_attention by_torch(const graph *g, const attention *a, bool paying) {
    const shape *q = &a->q->shape, *v = &a->v->shape;
    const shape scores = SHAPE(q->dim[0], q->dim[1], q->dim[2], v->dim[2]);
    const torch_attention keys = a->allowed ? TORCH_CAUSAL : TORCH_ALL;

    if (a->bias || of_some_rows(a->q)) return TORCH_NONE;
    if (!fused_attention_by_torch(g, a->q->type, keys, &scores, q->dim[3], v->dim[3], a->ratio > 0, paying))
        return TORCH_NONE;
    return !a->allowed || (q->dim[2] == v->dim[2] && attention_mask_causal(a->allowed, q->dim[2])) ? keys : TORCH_NONE;
}

/* Which of all rows `v` has, if it is made of some of them; or NULL. */
static const value *rows_of_heads(const value *v) {
    for (; v->def; v = v->def->in[0]) {
        if (value_is(v, "UnpackRows")) return v->def->in[1];
        if (!value_is(v, "Transpose") && !value_is(v, "Reshape") && !value_is(v, "Expand") && !value_is(v, "Cast"))
            break;
    }
    return NULL;
}

/* Over lists of rows flash attention alone has fewer heads of keys than of queries, and drops elements. */
static bool lists_fit(const graph *g, const attention *a) {
    return (!find_repeat(a->v).few && a->ratio == 0) ||
           fused_attention_flash(g, a->q->type, a->q->shape.dim[3], a->v->shape.dim[3]);
}

/* Which of a GPU's kernels of torch's takes it over lists of rows: the keys' list just those that the mask shows, so
 * that nothing else is left of the mask than that a query sees no later key. */
static torch_attention by_lists(const graph *g, const attention *a, bool paying) {
    const shape *q = &a->q->shape, *v = &a->v->shape;
    const shape scores = SHAPE(q->dim[0], q->dim[1], q->dim[2], v->dim[2]);
    const value *rows = rows_of_heads(a->v);
    attention_mask m;

    if (!g->cuda || a->bias || !a->allowed || !a->safe || !rows || rows_of_heads(a->k) != rows) return TORCH_NONE;
    if (!attention_mask_split(a->allowed, q->dim[0], v->dim[2], &m) || !attention_mask_lists(m.keys, rows))
        return TORCH_NONE;
    if (m.rest && (q->dim[2] != v->dim[2] || rows_of_heads(a->q) != rows || !attention_mask_causal(m.rest, v->dim[2])))
        return TORCH_NONE;
    if (!lists_fit(g, a)) return TORCH_NONE;
    const torch_attention keys = m.rest ? TORCH_CAUSAL : TORCH_ALL;
    return fused_attention_by_torch(g, a->q->type, keys, &scores, q->dim[3], v->dim[3], a->ratio > 0, paying)
               ? keys
               : TORCH_NONE;
}

/* Keys that a mask shows, the same for all queries, where all rows are there: packed, they are such lists of rows. */
static value *keys_to_pack(const graph *g, const attention *a, bool paying) {
    const shape *q = &a->q->shape, *v = &a->v->shape;
    const shape scores = SHAPE(q->dim[0], q->dim[1], q->dim[2], v->dim[2]);
    attention_mask m;

    if (!g->cuda || a->bias || !a->allowed || !a->safe || rows_of_heads(a->q) || rows_of_heads(a->v)) return NULL;
    if (!attention_mask_split(a->allowed, q->dim[0], v->dim[2], &m) || m.rest) return NULL;
    if (!lists_fit(g, a)) return NULL;
    if (!fused_attention_by_torch(g, a->q->type, TORCH_ALL, &scores, q->dim[3], v->dim[3], a->ratio > 0, paying))
        return NULL;
    return m.keys;
}

/* Along all keys, so that rows of it can be read as they lie. */
static bool is_of_all_keys(const value *v, int64_t keys) {
    return v && v->shape.rank > 0 && v->shape.rank <= 4 && v->shape.dim[v->shape.rank - 1] == keys;
}

/* Whether torch's memory-efficient kernel is asked for all that is hidden, and added, as a bias. */
static bool by_bias(const graph *g, const attention *a, bool paying) {
    const shape *q = &a->q->shape, *v = &a->v->shape;
    const shape scores = SHAPE(q->dim[0], q->dim[1], q->dim[2], v->dim[2]);

    if (!g->cuda || (!a->bias && !a->allowed)) return false;
    if ((a->allowed && a->allowed->shape.rank > 4) || (a->bias && a->bias->shape.rank > 4)) return false;
    if (!is_of_all_keys(a->bias, v->dim[2]) && !is_of_all_keys(a->allowed, v->dim[2])) return false;
    if (a->bias && !attention_is_moderate(a->bias, v->dim[2])) return false;
    return fused_attention_by_torch(g, a->q->type, TORCH_BIASED, &scores, q->dim[3], v->dim[3], a->ratio > 0, paying);
}

/* Triton's flash attention, where a module asks for it: with masks, biases and dropout, but the gradient of a bias only where
 * that has the shape of the scores. */
static torch_attention by_triton(const graph *g, const attention *a) {
    const shape *q = &a->q->shape, *v = &a->v->shape;
    const shape scores = SHAPE(q->dim[0], q->dim[1], q->dim[2], v->dim[2]);

    if (!g->triton || !g->triton->flash || a->q->type == F64 || of_some_rows(a->q)) return TORCH_NONE;
    if (q->dim[3] > FUSED_ATTENTION_WIDTH || v->dim[3] > FUSED_ATTENTION_WIDTH) return TORCH_NONE;
    if (a->bias && a->bias->needs_grad && !shape_equal(&a->bias->shape, &scores)) return TORCH_NONE;
    return a->allowed && q->dim[2] == v->dim[2] && attention_mask_causal(a->allowed, q->dim[2]) ? TORCH_CAUSAL
                                                                                                : TORCH_ALL;
}

enum { LONG = 1024 };

static bool pays(const graph *g, const attention *a) {
    if (a->allowed && of_some_rows(a->q))
        return fused_attention_pays(g, a->q->type, LONG, LONG, true, false); /* as far as there is a fast kernel */
    return fused_attention_pays(g, a->q->type, a->q->shape.dim[2], a->k->shape.dim[3], a->allowed != NULL,
                                a->ratio > 0);
}

typedef enum where { WHERE_IT_PAYS, ALWAYS, BY_FLASH_WITH_DROPOUT } where;

static status fuse(graph *g, value *const v[], const node *root, where place, value **out) {
    attention a = {.v = v[VALUES]};

    if (!find_attention(v[WEIGHTS], &a) || !fits(&a, root) || !bias_fits(&a)) return OK;
    if (place == BY_FLASH_WITH_DROPOUT && a.ratio == 0) return OK;
    TRY(bias_to_mask(g, &a));
    if (bias_is_whole(&a) && (a.triton = by_triton(g, &a))) return emit_attention(g, &a, root, out);
    if (a.ratio == 0 || place == BY_FLASH_WITH_DROPOUT) {
        const bool paying = place == BY_FLASH_WITH_DROPOUT || !g->attention_everywhere;
        a.torch = by_torch(g, &a, paying);
        a.lists = by_lists(g, &a, paying);
        a.pack = a.torch || a.lists ? NULL : keys_to_pack(g, &a, paying);
        if (a.pack) a.torch = TORCH_ALL;
        if (!a.torch && !a.lists && by_bias(g, &a, paying)) a.torch = TORCH_BIASED;
    }
    if ((place == BY_FLASH_WITH_DROPOUT && !a.torch && !a.lists) || (a.torch != TORCH_BIASED && !bias_is_whole(&a)))
        return OK;
    return place == ALWAYS || a.torch || a.lists || pays(g, &a) ? emit_attention(g, &a, root, out) : OK;
}

static status fuse_where_it_pays(graph *g, value *const v[], const node *root, value **out) {
    return fuse(g, v, root, WHERE_IT_PAYS, out);
}

static status fuse_always(graph *g, value *const v[], const node *root, value **out) {
    return fuse(g, v, root, ALWAYS, out);
}

static status fuse_flash(graph *g, value *const v[], const node *root, value **out) {
    return fuse(g, v, root, BY_FLASH_WITH_DROPOUT, out);
}

static const rule paying[] = {{OP("MatMul", VAR(WEIGHTS), VAR(VALUES)), fuse_where_it_pays}, {0}};
static const rule always[] = {{OP("MatMul", VAR(WEIGHTS), VAR(VALUES)), fuse_always}, {0}};
static const rule flash[] = {{OP("MatMul", VAR(WEIGHTS), VAR(VALUES)), fuse_flash}, {0}};

const pass_def flash_dropout = {.name = "flash_dropout", .stage = BEFORE_GRADIENT, .device = FOR_GPUS, .rules = flash};
const pass_def attention_fusion = {.name = "attention_fusion", .stage = BEFORE_GRADIENT, .rules = paying};
const pass_def efficient_attention = {.name = "efficient_attention", .stage = BEFORE_GRADIENT, .rules = always};
