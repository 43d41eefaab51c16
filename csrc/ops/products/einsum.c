/* einsum.c -- writes Einsum as a composition of views, sums and products: its gradient is theirs.
 *
 * Each letter of the equation is a label, and so is each dimension under an ellipsis. An operand is a value whose axes
 * carry distinct labels (a letter repeated within one operand takes a diagonal first). Operands are contracted from
 * left to right; of two that meet, a label is
 *
 *     batch      in both, and still wanted           right      only in the right one
 *     left       only in the left one                contracted in both, and wanted nowhere else
 *
 * so that the pair is MatMul([batch, left, contracted], [batch, contracted, right]), or a broadcast Mul where nothing
 * is contracted. Labels that only one operand has are summed in it beforehand. */
#include <ctype.h>
#include <inttypes.h>
#include <stdio.h>
#include <string.h>

#include "ops/movement/move.h"

enum { LETTERS = 52, LABELS = LETTERS + MAX_RANK };

typedef uint64_t label_set;
#define LABEL(l) (UINT64_C(1) << (l))

typedef struct operand {
    value *v;
    int label[MAX_RANK]; /* of each axis */
} operand;

static label_set labels_of(const operand *x) {
    label_set s = 0;
    for (int i = 0; i < x->v->shape.rank; i++) s |= LABEL(x->label[i]);
    return s;
}

static int axis_of(const operand *x, int label) {
    int i = 0;
    while (x->label[i] != label) i++;
    return i;
}

/* --- the equation ------------------------------------------------------------------------------------------------- */

/* One term: labels in order, -1 for the ellipsis. */
typedef struct term {
    int label[LABELS], count;
    bool ellipsis;
} term;

static int letter_label(char c) { return isupper((unsigned char)c) ? c - 'A' : c - 'a' + 26; }

/* Reads up to ',' or '-' or the end; returns where it stopped. */
static status read_term(ctx *c, const char **text, term *out) {
    const char *p = *text;

    *out = (term){.count = 0};
    for (; *p && *p != ',' && *p != '-'; p++) {
        if (*p == ' ') continue;
        if (out->count == LABELS) return fail(c, E_INVALID, "an Einsum term of more than %d labels", LABELS);
        if (strncmp(p, "...", 3) == 0 && !out->ellipsis) {
            out->label[out->count++] = -1;
            out->ellipsis = true;
            p += 2;
        } else if (isalpha((unsigned char)*p)) {
            out->label[out->count++] = letter_label(*p);
        } else {
            return fail(c, E_INVALID, "an Einsum equation cannot contain \"%.3s\" here", p);
        }
    }
    *text = p;
    return OK;
}

/* The ellipsis stands for the labels [LETTERS + MAX_RANK - covered, LETTERS + MAX_RANK): its dimensions broadcast, so
 * they are counted from the right. */
static void expand_term(const term *t, int covered, int label[LABELS], int *count) {
    *count = 0;
    for (int i = 0; i < t->count; i++) {
        if (t->label[i] >= 0) label[(*count)++] = t->label[i];
        else
            for (int j = LABELS - covered; j < LABELS; j++) label[(*count)++] = j;
    }
}

/* Without "->": the ellipsis, then the letters that occur once, in order. */
static void implicit_output(const int seen[LABELS], bool ellipsis, term *out) {
    *out = (term){.ellipsis = ellipsis};
    if (ellipsis) out->label[out->count++] = -1;
    for (int l = 0; l < LETTERS; l++)
        if (seen[l] == 1) out->label[out->count++] = l;
}

/* --- steps on one operand ----------------------------------------------------------------------------------------- */

static status move_axes(graph *g, operand *x, const int perm[MAX_RANK]) {
    const operand old = *x;
    bool moved = false;

    for (int i = 0; i < x->v->shape.rank; i++) {
        x->label[i] = old.label[perm[i]];
        moved |= perm[i] != i;
    }
    return moved ? emit_transpose(g, x->v, perm, &x->v) : OK;
}

static status drop_axis(graph *g, operand *x, int axis) {
    shape s = x->v->shape;
    s.rank--;
    for (int i = axis; i < s.rank; i++) {
        s.dim[i] = s.dim[i + 1];
        x->label[i] = x->label[i + 1];
    }
    return emit_reshape(g, x->v, &s, &x->v);
}

/* Axes `a` and `b` carry one label: keeps the elements where they are equal, which lie d + 1 apart when the two axes of
 * size d are one of d * d. */
static status take_diagonal(graph *g, operand *x, int a, int b) {
    int perm[MAX_RANK], rank = x->v->shape.rank, used = 0;
    int64_t d = x->v->shape.dim[a], start[MAX_RANK] = {0}, step[MAX_RANK];
    shape s;

    if (x->v->shape.dim[b] != d)
        return fail(g->c, E_SHAPE, "Einsum takes a diagonal of axes of sizes %" PRId64 " and %" PRId64, d,
                    x->v->shape.dim[b]);
    for (int i = 0; i < rank; i++)
        if (i != a && i != b) perm[used++] = i;
    perm[used++] = a;
    perm[used] = b;
    TRY(move_axes(g, x, perm));
    s = x->v->shape;
    s.rank--;
    s.dim[s.rank - 1] = d * d;
    TRY(emit_reshape(g, x->v, &s, &x->v));
    for (int i = 0; i < s.rank; i++) step[i] = 1;
    step[s.rank - 1] = d + 1;
    s.dim[s.rank - 1] = d;
    return emit_slice(g, x->v, start, &s, step, &x->v);
}

static status take_diagonals(graph *g, operand *x) {
    for (int b = 1; b < x->v->shape.rank; b++)
        for (int a = 0; a < b; a++)
            if (x->label[a] == x->label[b]) {
                TRY(take_diagonal(g, x, a, b));
                b = 0; /* axes have moved */
                break;
            }
    return OK;
}

/* Sums over the axes whose labels are in `which`. */
static status sum_labels(graph *g, operand *x, label_set which) {
    int64_t axes[MAX_RANK];
    int n = 0, kept = 0;

    for (int i = 0; i < x->v->shape.rank; i++) {
        if (which & LABEL(x->label[i])) axes[n++] = i;
        else x->label[kept++] = x->label[i];
    }
    return n ? emit_reduce(g, "ReduceSum", x->v, n, axes, false, &x->v) : OK;
}

/* --- steps on a pair ---------------------------------------------------------------------------------------------- */

/* Labels that are treated alike, in the order they lie in their operand. */
typedef struct group {
    int label[MAX_RANK], count;
    int64_t dim[MAX_RANK], size; /* size: their product */
} group;

static group group_of(const operand *x, label_set which) {
    group r = {.size = 1};
    for (int i = 0; i < x->v->shape.rank; i++) {
        if (!(which & LABEL(x->label[i]))) continue;
        r.label[r.count] = x->label[i];
        r.dim[r.count++] = x->v->shape.dim[i];
        r.size *= x->v->shape.dim[i];
    }
    return r;
}

/* `x` with the axes of `batch` first, then one axis for each of `p` and `q`. */
static status as_matrices(graph *g, operand *x, const group *batch, const group *p, const group *q, value **out) {
    const group *const groups[] = {batch, p, q};
    int perm[MAX_RANK], used = 0;
    shape s = {.rank = batch->count + 2};

    for (int i = 0; i < 3; i++)
        for (int j = 0; j < groups[i]->count; j++) perm[used++] = axis_of(x, groups[i]->label[j]);
    TRY(move_axes(g, x, perm));
    memcpy(s.dim, batch->dim, sizeof s.dim);
    s.dim[s.rank - 2] = p->size;
    s.dim[s.rank - 1] = q->size;
    return emit_reshape(g, x->v, &s, out);
}

/* `x` with its axes in the order of `like`, and axes of size 1 where it lacks a label. */
static status spread(graph *g, operand *x, const operand *like, int rank, value **out) {
    const label_set has = labels_of(x);
    int perm[MAX_RANK], used = 0;
    shape s = {.rank = rank};

    for (int i = 0; i < rank; i++) {
        bool there = has & LABEL(like->label[i]);
        s.dim[i] = there ? x->v->shape.dim[axis_of(x, like->label[i])] : 1;
        if (there) perm[used++] = axis_of(x, like->label[i]);
    }
    TRY(move_axes(g, x, perm));
    return emit_reshape(g, x->v, &s, out);
}

/* Of the labels in `a` and `b`, the first in `order` is in `b`. */
static bool comes_first(label_set b, label_set a, const int *order, int count) {
    for (int i = 0; i < count; i++)
        if ((a | b) & LABEL(order[i])) return (b & LABEL(order[i])) != 0;
    return false;
}

/* Replaces `x` by its contraction with `y`; labels outside `wanted` end here. `order` is that of the final result: it
 * decides which operand is the left one, so that the last transpose has little to do. */
static status contract(graph *g, operand *x, operand *y, label_set wanted, const int *order, int count) {
    operand *l = x, *r = y, result = {.v = NULL};
    value *a, *b;
    shape s = {.rank = 0};

    TRY(sum_labels(g, x, labels_of(x) & ~(labels_of(y) | wanted)));
    TRY(sum_labels(g, y, labels_of(y) & ~(labels_of(x) | wanted)));
    const label_set both = labels_of(x) & labels_of(y);
    if (comes_first(labels_of(y) & ~both, labels_of(x) & ~both, order, count)) {
        l = y;
        r = x;
    }
    const group batch = group_of(l, both & wanted), inner = group_of(l, both & ~wanted);
    const group left = group_of(l, ~both), right = group_of(r, ~both), *const parts[] = {&batch, &left, &right};

    if (batch.count + left.count + right.count > MAX_RANK || batch.count + 2 > MAX_RANK)
        return fail(g->c, E_UNSUPPORTED, "an Einsum with an intermediate result of rank %d; at most %d are supported",
                    batch.count + left.count + right.count, MAX_RANK);
    for (int i = 0; i < 3; i++)
        for (int j = 0; j < parts[i]->count; j++) {
            result.label[s.rank] = parts[i]->label[j];
            s.dim[s.rank++] = parts[i]->dim[j];
        }
    if (inner.count) {
        TRY(as_matrices(g, l, &batch, &left, &inner, &a));
        TRY(as_matrices(g, r, &batch, &inner, &right, &b));
        TRY(emit(g, &result.v, "MatMul", a, b));
        TRY(emit_reshape(g, result.v, &s, &result.v));
    } else {
        TRY(spread(g, l, &result, s.rank, &a));
        TRY(spread(g, r, &result, s.rank, &b));
        TRY(emit(g, &result.v, "Mul", a, b));
    }
    *x = result;
    return OK;
}

/* --- the operator ------------------------------------------------------------------------------------------------- */

static status refuse_sizes(ctx *c, const node *n, int64_t a, int64_t b) {
    char text[SHAPE_TEXT], shapes[4 * SHAPE_TEXT];
    size_t used = 0;

    for (int i = 0; i < n->n_in && used < sizeof shapes; i++)
        used += (size_t)snprintf(shapes + used, sizeof shapes - used, "%s%s", i ? ", " : "",
                                 shape_text(&n->in[i]->shape, text));
    return fail(c, E_SHAPE, "Einsum \"%s\" of %s: one label stands for %" PRId64 " and %" PRId64,
                node_string(n, "equation"), shapes, a, b);
}

/* Axes of size 1 whose label is larger elsewhere broadcast: they are dropped. */
static status drop_broadcast(graph *g, const node *n, operand *x, const int64_t size[LABELS]) {
    for (int i = x->v->shape.rank - 1; i >= 0; i--) {
        int64_t d = x->v->shape.dim[i], full = size[x->label[i]];
        if (d == full) continue;
        if (d != 1) return refuse_sizes(g->c, n, d, full);
        TRY(drop_axis(g, x, i));
    }
    return OK;
}

typedef struct equation {
    const char *text;
    term *in, out;
    int covered; /* most dimensions under an ellipsis */
} equation;

/* Dimensions that the ellipsis of a term covers in an operand of this rank. */
static int covered_by(const term *t, int rank) { return t->ellipsis ? rank - (t->count - 1) : 0; }

static status read_operands(graph *g, const node *n, equation *e, const char **text, int seen[LABELS]) {
    for (int i = 0; i < n->n_in; i++) {
        term *t = &e->in[i];
        int labels[LABELS], count, rank;

        TRY(require(g, n, i));
        TRY(read_term(g->c, text, t));
        rank = n->in[i]->shape.rank;
        if (t->ellipsis ? t->count - 1 > rank : t->count != rank)
            return fail(g->c, E_SHAPE, "Einsum \"%s\": operand %d has rank %d", e->text, i, rank);
        if (covered_by(t, rank) > e->covered) e->covered = covered_by(t, rank);
        expand_term(t, covered_by(t, rank), labels, &count);
        for (int j = 0; j < count; j++) seen[labels[j]]++;
        if ((**text == ',') != (i + 1 < n->n_in))
            return fail(g->c, E_INVALID, "Einsum \"%s\" is not an equation of %d operands", e->text, n->n_in);
        if (**text == ',') ++*text;
    }
    return OK;
}

static status read_result(graph *g, equation *e, const char *text, const int seen[LABELS]) {
    int labels[LABELS], count;
    label_set already = 0;

    if (strncmp(text, "->", 2) != 0) return fail(g->c, E_INVALID, "Einsum \"%s\": expected \"->\"", e->text);
    text += 2;
    TRY(read_term(g->c, &text, &e->out));
    if (*text) return fail(g->c, E_INVALID, "Einsum \"%s\" goes on after its result", e->text);
    expand_term(&e->out, e->covered, labels, &count);
    if (count > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "Einsum \"%s\" has a result of rank %d", e->text, count);
    for (int i = 0; i < count; i++) {
        if (!seen[labels[i]] || already & LABEL(labels[i]))
            return fail(g->c, E_INVALID, "Einsum \"%s\": a label of the result is in no operand, or twice there",
                        e->text);
        already |= LABEL(labels[i]);
    }
    return OK;
}

static status read_equation(graph *g, const node *n, equation *e) {
    int seen[LABELS] = {0};
    bool ellipsis = false;
    const char *text;

    *e = (equation){.text = text = node_string(n, "equation")};
    if (!node_has(n, "equation")) return fail(g->c, E_INVALID, "Einsum without an equation");
    TRY(NEW(g->c, e->in, n->n_in));
    TRY(read_operands(g, n, e, &text, seen));
    for (int i = 0; i < n->n_in; i++) ellipsis |= e->in[i].ellipsis;
    if (*text) return read_result(g, e, text, seen);
    implicit_output(seen, ellipsis, &e->out);
    return OK;
}

static status lower_einsum(graph *g, const node *n, value **out) {
    int64_t size[LABELS]; /* of each label, -1: not seen */
    int order[LABELS], rank, labels[LABELS], perm[MAX_RANK];
    label_set wanted = 0;
    equation e;
    operand *x;

    TRY(require(g, n, 0));
    TRY(same_types(g, n, 0));
    TRY(read_equation(g, n, &e));
    TRY(NEW(g->c, x, n->n_in));
    for (int l = 0; l < LABELS; l++) size[l] = -1;
    for (int i = 0; i < n->n_in; i++) {
        int count;
        x[i].v = n->in[i];
        expand_term(&e.in[i], covered_by(&e.in[i], x[i].v->shape.rank), labels, &count);
        memcpy(x[i].label, labels, sizeof(int) * (size_t)count);
        TRY(take_diagonals(g, &x[i]));
        for (int j = 0; j < x[i].v->shape.rank; j++) {
            int64_t *s = &size[x[i].label[j]];
            if (*s < 0 || *s == 1) *s = x[i].v->shape.dim[j];
        }
    }
    for (int i = 0; i < n->n_in; i++) TRY(drop_broadcast(g, n, &x[i], size));

    expand_term(&e.out, e.covered, order, &rank);
    for (int i = 0; i < rank; i++) wanted |= LABEL(order[i]);
    for (int i = 1; i < n->n_in; i++) {
        label_set later = 0;
        for (int j = i + 1; j < n->n_in; j++) later |= labels_of(&x[j]);
        TRY(contract(g, &x[0], &x[i], wanted | later, order, rank));
    }
    TRY(sum_labels(g, &x[0], labels_of(&x[0]) & ~wanted));
    for (int i = 0; i < rank; i++) perm[i] = axis_of(&x[0], order[i]);
    TRY(move_axes(g, &x[0], perm));
    out[0] = x[0].v;
    return OK;
}

#define EINSUM .name = "Einsum", .domain = "", .since = 12, .min_in = 1, .max_in = VARIADIC, .max_out = 1

/* clang-format off */
const op_def einsum_ops[] = {
    {EINSUM, .dtypes = NUMBERS, .attrs = NODE_ATTRS(NO_DEFAULT("equation", STRING)), .lower = lower_einsum},
    {0},
};
/* clang-format on */
