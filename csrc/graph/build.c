/* build.c -- emits nodes: the one way a node gets into a specialised graph.
 *
 * lower -> reuse an equal node -> infer -> simplify -> fold -> append. Each step may end it. */
#include "core/hash.h"
#include "core/ints.h"
#include "core/limit.h"
#include "core/memory.h"
#include "core/size.h"
#include "ops/op.h"

#include <inttypes.h>
#include <math.h>
#include <string.h>

enum { MOST_REPEATED = 4 }; /* operands */
static const double most_exact = 0x1p52;
enum { SMALL_CONSTANT = 256, MAX_NUMBERS = 128 };

/* What is larger is computed in each run: the result of a node; results of a plan together, but for those that are as
 * small as shapes are. */
enum { FOLD_BYTES = 1 << 20, FOLD_BYTES_ALL = 64 << 20, FOLD_SMALL = 1 << 12, FOLD_SHARE = 64 /* of all memory */ };

/* --- equality of nodes -------------------------------------------------------------------------------------------- */

static size_t constant_bytes(const value *v) { return (size_t)shape_count(&v->shape) * dtype_size(v->type); }

/* Where there are none, there may be no address either. */
static bool same_bytes(const void *a, const void *b, size_t bytes) { return bytes == 0 || memcmp(a, b, bytes) == 0; }

static bool same_operand(const value *a, const value *b) {
    if (a == b) return true;
    if (!a || !b || !a->data || !b->data || a->type != b->type || !shape_equal(&a->shape, &b->shape)) return false;
    return a->data == b->data ||
           (constant_bytes(a) <= SMALL_CONSTANT && same_bytes(a->data, b->data, constant_bytes(a)));
}

static bool same_attr(const attr *a, const attr *b) {
    if (strcmp(a->name, b->name) != 0 || a->kind != b->kind || a->count != b->count) return false;
    switch (a->kind) {
    case ATTR_INT: return a->i == b->i;
    case ATTR_FLOAT: return memcmp(&a->f, &b->f, sizeof a->f) == 0;
    case ATTR_STRING: return strcmp(a->s, b->s) == 0;
    case ATTR_INTS: return same_bytes(a->ints, b->ints, (size_t)a->count * sizeof *a->ints);
    case ATTR_FLOATS: return same_bytes(a->floats, b->floats, (size_t)a->count * sizeof *a->floats);
    case ATTR_TENSOR:
        return a->t->type == b->t->type && shape_equal(&a->t->shape, &b->t->shape) &&
               same_bytes(a->t->data, b->t->data, (size_t)tensor_count(a->t) * dtype_size(a->t->type));
    }
    return false;
}

static bool same_node(const node *a, const node *b) {
    const attr *x = a->attrs, *y = b->attrs;

    if (a->op != b->op || a->n_in != b->n_in || a->n_out != b->n_out) return false;
    for (int i = 0; i < a->n_in; i++)
        if (!same_operand(a->in[i], b->in[i])) return false;
    for (; x && x->name && y && y->name; x++, y++)
        if (!same_attr(x, y)) return false;
    return (!x || !x->name) == (!y || !y->name);
}

static uint64_t mix_bytes(uint64_t h, const void *data, size_t bytes) {
    const char *p = data;
    uint64_t word;

    for (; bytes >= sizeof word; p += sizeof word, bytes -= sizeof word) {
        memcpy(&word, p, sizeof word);
        h = hash_mix(h, word);
    }
    word = 0;
    if (bytes > 0) memcpy(&word, p, bytes);
    return hash_mix(h, word);
}

/* All that same_attr compares, but of a tensor its beginning. */
static uint64_t mix_attr(uint64_t h, const attr *a) {
    switch (a->kind) {
    case ATTR_INT: return hash_mix(h, (uint64_t)a->i);
    case ATTR_FLOAT: return mix_bytes(h, &a->f, sizeof a->f);
    case ATTR_STRING: return mix_bytes(h, a->s, strlen(a->s));
    case ATTR_INTS: return mix_bytes(h, a->ints, (size_t)a->count * sizeof *a->ints);
    case ATTR_FLOATS: return mix_bytes(h, a->floats, (size_t)a->count * sizeof *a->floats);
    case ATTR_TENSOR: {
        size_t bytes = (size_t)tensor_count(a->t) * dtype_size(a->t->type);
        return mix_bytes(h, a->t->data, bytes < SMALL_CONSTANT ? bytes : SMALL_CONSTANT);
    }
    }
    return h;
}

static uint64_t hash_node(const node *n) {
    uint64_t h = hash_mix(0, (uint64_t)(uintptr_t)n->op);
    for (int i = 0; i < n->n_in; i++) {
        const value *v = n->in[i];
        if (v && v->data && constant_bytes(v) > SMALL_CONSTANT) {
            h = hash_mix(h, (uint64_t)(uintptr_t)v->data);
        } else if (v && v->data) {
            h = mix_bytes(h, v->data, constant_bytes(v));
        } else {
            h = hash_mix(h, (uint64_t)(uintptr_t)v);
        }
    }
    for (const attr *a = n->attrs; a && a->name; a++) h = mix_attr(h, a);
    return h;
}

static status grow_table(graph *g) {
    node **old = g->table;
    int old_size = g->table_size;

    g->table_size = old_size ? old_size * 2 : 256;
    g->table_used = 0;
    TRY(NEW(g->c, g->table, g->table_size));
    for (int i = 0; i < old_size; i++) {
        if (!old[i] || !old[i]->op) continue;
        uint64_t h = hash_node(old[i]);
        while (g->table[h & (uint64_t)(g->table_size - 1)]) h++;
        g->table[h & (uint64_t)(g->table_size - 1)] = old[i];
        g->table_used++;
    }
    return OK;
}

/* The slot of an equal node, or the free slot where `n` belongs. */
static status find_slot(graph *g, const node *n, node ***slot) {
    uint64_t h = hash_node(n);

    if (g->table_used * 2 >= g->table_size) TRY(grow_table(g));
    for (;; h++) {
        node **s = &g->table[h & (uint64_t)(g->table_size - 1)];
        /* A removed node has lost its operator; a rewritten one may no longer equal what it was stored as, which
         * only loses a reuse. */
        if (!*s || ((*s)->op && same_node(*s, n))) {
            *slot = s;
            return OK;
        }
    }
}

/* --- folding ------------------------------------------------------------------------------------------------------ */

static tensor constant_tensor(const value *v) {
    tensor t = {.type = DT_NONE};
    if (!v) return t;
    t = (tensor){.data = (void *)(uintptr_t)v->data, .type = v->type, .shape = v->shape};
    stride_contiguous(&v->shape, t.stride);
    return t;
}

/* May results of so many bytes be folded? Small ones always; what the machine has is read for others, which takes long. */
static bool has_room(graph *g, int64_t bytes) {
    if (bytes <= FOLD_SMALL) return true;
    if (!g->fold_most) g->fold_most = least(FOLD_BYTES_ALL, (int64_t)(memory_limits_now().most / FOLD_SHARE));
    return bytes <= FOLD_BYTES && bytes <= g->fold_most - g->folded;
}

status graph_check_table(graph *g, int64_t count, size_t size) {
    enum { LEAST = 16 << 20, SHARE = 32 };
    const int64_t bytes = size_mul(count, (int64_t)size);

    if (bytes <= LEAST || (size_t)bytes <= memory_limits_now().most / SHARE) return OK;
    return fail(g->c, E_NOMEM, "out of memory: a table of %" PRId64 " bytes is needed before anything runs", bytes);
}

static bool foldable(graph *g, const node *n) {
    int64_t bytes = 0;

    if (!n->op->cpu || (n->op->flags & (RANDOM | EFFECT | KEEP))) return false;
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i] && !n->in[i]->data) return false;
    for (int i = 0; i < n->n_out; i++) bytes = size_add(bytes, value_bytes(n->out[i]));
    return has_room(g, bytes);
}

/* Runs the node's own kernel on its constant operands: its outputs become constants. */
static status fold(graph *g, node *n) {
    size_t work = n->op->workspace ? n->op->workspace(n) : 0;
    call k = {.node = n, .n_in = n->n_in, .n_out = n->n_out};
    tensor *in, *out;
    status s;

    TRY(NEW(g->c, in, n->n_in));
    TRY(NEW(g->c, out, n->n_out));
    for (int i = 0; i < n->n_in; i++) in[i] = constant_tensor(n->in[i]);
    for (int i = 0; i < n->n_out; i++) {
        void *data = arena_array(g->c, (size_t)shape_count(&n->out[i]->shape), dtype_size(n->out[i]->type));
        if (!data) return E_NOMEM;
        n->out[i]->data = data;
        out[i] = constant_tensor(n->out[i]);
    }
    if (work && !(k.work = memory_take(work)))
        return fail(g->c, E_NOMEM, "out of memory: a workspace of %zu bytes", work);
    k.in = in;
    k.out = out;
    s = n->op->cpu(g->c, &k);
    memory_give(k.work);
    TRY(s);
    for (int i = 0; i < n->n_out; i++) {
        n->out[i]->def = NULL;
        g->folded += value_bytes(n->out[i]);
    }
    return OK;
}

/* --- emit --------------------------------------------------------------------------------------------------------- */

static status check_operands(graph *g, const op_def *op, int n_in, value *const *in) {
    if (n_in < op->min_in || (op->max_in != VARIADIC && n_in > op->max_in))
        return fail(g->c, E_INVALID, "%s takes %d to %d operands, not %d", op->name, op->min_in, op->max_in, n_in);
    /* What comes from a model may leave out anything; operators that only the engine emits know what they can miss. */
    const bool in_models = !op->domain[0] || (op->flags & IN_MODELS);
    for (int i = 0; in_models && i < op->min_in; i++)
        if (!in[i]) return fail(g->c, E_INVALID, "operand %d of %s is missing", i, op->name);
    for (int i = 0; i < n_in; i++) {
        if (!in[i]) continue;
        if (op->dtypes && !(op->dtypes & SET(in[i]->type)))
            return fail(g->c, E_TYPE, "%s is not defined for %s", op->name, dtype_name(in[i]->type));
        break;
    }
    return OK;
}

/* Of every operand of integers the record says what they are. */
static status check_integers(graph *g, const node *n) {
    const op_def *op = n->op;
    const unsigned known = op->checked | op->owned | op->plain;

    if (op->flags & POINTWISE || op->view || !op->cpu) return OK;
    for (int i = 0; i < n->n_in; i++) {
        const value *v = n->in[i];
        if (!v || !dtype_is_int(v->type) || v->type == BOOL || known & OPERAND(i)) continue;
        return fail(g->c, E_INVALID, "the record of %s does not say what the integers of operand %d are", op->name, i);
    }
    return OK;
}

static void propagate_needs_grad(node *n) {
    bool any = false;
    for (int i = 0; i < n->n_in; i++) any |= n->in[i] && n->in[i]->needs_grad;
    for (int i = 0; i < n->n_out; i++)
        n->out[i]->needs_grad = any && !(n->op->flags & NO_GRAD) && dtype_is_float(n->out[i]->type);
}

static void take_outputs(const node *n, value **out) {
    for (int i = 0; i < n->n_out; i++) out[i] = n->out[i];
}

/* A pointwise operator of operands that are each the same everywhere, and too large to be folded: one element of its result,
 * repeated. So masks and biases that change nothing are known as such, however large. */
static status repeat_one(graph *g, const node *n, value **out) {
    value *in[MOST_REPEATED] = {NULL}, *one = NULL;
    double x[MOST_REPEATED];

    if (!(n->op->flags & POINTWISE) || n->op->flags & (RANDOM | EFFECT | KEEP) || n->n_out != 1 ||
        n->n_in > MOST_REPEATED || shape_count(&n->out[0]->shape) <= 1)
        return OK;
    for (int i = 0; i < n->n_in; i++) {
        if (!n->in[i] || !value_is_filled(n->in[i], &x[i])) return OK;
        if (!dtype_is_float(n->in[i]->type) && fabs(x[i]) > most_exact) return OK; /* it has been rounded */
    }
    for (int i = 0; i < n->n_in; i++) TRY(graph_scalar(g, n->in[i]->type, x[i], &in[i]));
    TRY(graph_emit(g, n->op->name, n->attrs, n->n_in, in, 1, &one));
    if (!one->data) return OK;
    TRY(graph_ints(g, n->out[0]->shape.rank, n->out[0]->shape.dim, &in[0]));
    return emit(g, out, "Expand", one, in[0]);
}

/* out[0..n->n_out) receives what stands for the node's outputs. */
static status emit_node(graph *g, node *n, value **out) {
    const op_def *op = n->op;
    node **slot = NULL;

    if (op->lower) {
        TRY(op->lower(g, n, out));
        if (out[0]) return OK;
    }
    if (!op->infer) return fail(g->c, E_UNSUPPORTED, "%s cannot be computed in this form", op->name);
    /* Before a cursor an equal node may lie behind it: reuse only when appending. */
    if (!(op->flags & (RANDOM | EFFECT)) && !g->before) {
        TRY(find_slot(g, n, &slot));
        if (*slot) {
            take_outputs(*slot, out);
            return OK;
        }
    }
    TRY(op->infer(g, n));
    TRY(check_integers(g, n));
    for (int i = 0; i < n->n_out; i++) {
        if (n->out[i]->type == DT_NONE) n->out[i]->shape = SHAPE(0); /* an output this form does not have */
        TRY(shape_check(g->c, &n->out[i]->shape));
    }
    if (op->simplify && !g->as_written) {
        TRY(op->simplify(g, n, out));
        g->n_simplified += out[0] != NULL;
        if (out[0]) return OK;
    }
    const bool folds = foldable(g, n);
    if (!folds && !g->as_written) {
        TRY(repeat_one(g, n, out));
        g->n_simplified += out[0] != NULL;
        if (out[0]) return OK;
    }
    if (folds) {
        TRY(fold(g, n));
    } else {
        propagate_needs_grad(n);
        graph_insert_node(g, n);
    }
    if (slot) {                      /* of a folded node, too: what every layer makes anew is there once */
        TRY(find_slot(g, n, &slot)); /* simplify may have grown the table */
        if (!*slot) {
            *slot = n;
            g->table_used++;
        }
    }
    take_outputs(n, out);
    return OK;
}

/* Element `i` of `v` as an int64 scalar, from where it was before it was put into a list of sizes: one number in
 * several lists is found once. */
static status element_of(graph *g, value *v, int64_t i, value **out) {
    value *at;

    for (;;) {
        const bool joined = v->def && strcmp(v->def->op->name, "Concat") == 0 && v->shape.rank == 1;
        if (joined) {
            const node *n = v->def;
            int k = 0;
            while (i >= shape_count(&n->in[k]->shape)) i -= shape_count(&n->in[k++]->shape);
            v = n->in[k];
        } else if (v->def && strcmp(v->def->op->name, "Reshape") == 0) {
            v = v->def->in[0];
        } else {
            break;
        }
    }
    if (v->shape.rank > 1) {
        const int64_t count = shape_count(&v->shape);
        TRY(graph_ints(g, 1, &count, &at));
        TRY(emit(g, &v, "Reshape", v, at));
    }
    if (v->shape.rank == 1) {
        TRY(graph_scalar(g, I64, (double)i, &at));
        TRY(emit(g, &v, "Gather", v, at));
    }
    *out = v;
    return v->type == I64 ? OK : emit_with(g, out, "Cast", NODE_ATTRS(INT("to", dtype_table[I64].onnx)), v);
}

/* A constant with the numbers that `v` holds when this plan runs. */
static status numbers_of(graph *g, value *v, value **out) {
    const int64_t count = shape_count(&v->shape);
    bool is_pending = false;

    TRY(graph_add_constant(g, v->type, &v->shape, NULL, out));
    for (int64_t i = 0; i < count; i++) {
        int64_t number = 0;
        status s = OK;
        value *one;
        TRY(element_of(g, v, i, &one));
        if (one->data) number = *(const int64_t *)one->data;
        else s = graph_data_size(g, one, &number);
        is_pending |= s == E_PENDING; /* the others may be, too: one prologue finds them all */
        if (s != E_PENDING) TRY(s);
        dtype_set_int(v->type, (void *)(uintptr_t)(*out)->data, i, number);
    }
    return is_pending ? fail(g->c, E_PENDING, "a size is decided by data") : OK;
}

/* `n` with numbers in the place of the operand that was asked for. E_UNSUPPORTED when they cannot be found: the operand
 * is not the node's, or too large to be sizes. */
static status with_numbers(graph *g, node **n) {
    value *asked = g->asked, **in, *numbers;
    bool found = false;

    for (int i = 0; i < (*n)->n_in; i++) found |= (*n)->in[i] == asked;
    if (!found || shape_count(&asked->shape) > MAX_NUMBERS || !dtype_is_int(asked->type)) return E_UNSUPPORTED;
    TRY(numbers_of(g, asked, &numbers));
    TRY(NEW(g->c, in, (*n)->n_in));
    for (int i = 0; i < (*n)->n_in; i++) in[i] = (*n)->in[i] == asked ? numbers : (*n)->in[i];
    return graph_make_node(g, (*n)->op, (*n)->name, (*n)->attrs, (*n)->n_in, in, (*n)->n_out, n);
}

status graph_emit_op(graph *g, const op_def *op, const attr *attrs, int n_in, value *const *in, int n_out,
                     value **out) {
    int outputs = op->max_out == VARIADIC || n_out > op->max_out ? n_out : op->max_out;
    value **results;
    node *n;
    status s;

    while (n_in > op->min_in && !in[n_in - 1]) n_in--; /* trailing absent operands */
    TRY_AT(g->c, check_operands(g, op, n_in, in), "emitting %s", g->emit_name ? g->emit_name : op->name);
    TRY(graph_make_node(g, op, g->emit_name, attrs, n_in, in, outputs, &n));
    TRY(NEW(g->c, results, outputs));
    while ((s = emit_node(g, n, results)) == E_DATA)
        if ((s = with_numbers(g, &n)) != OK) break;
    TRY_AT(g->c, s, "emitting %s (%s)", op->name, g->emit_name ? g->emit_name : "-");
    for (int i = 0; i < n_out; i++) out[i] = results[i];
    return OK;
}

status graph_emit(graph *g, const char *name, const attr *attrs, int n_in, value *const *in, int n_out, value **out) {
    const op_def *op = op_find(NULL, name, 0);
    if (!op) return fail(g->c, E_UNSUPPORTED, "there is no operator %s", name);
    return graph_emit_op(g, op, attrs, n_in, in, n_out, out);
}
