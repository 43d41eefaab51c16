/* index_formula.c -- finds the formula of an element's indices behind ranges, comparisons, triangles and their like. */
#include "passes/index_formula.h"

#include "ops/op.h"
#include "passes/match.h"

#include <string.h>

/* Values that are looked at for one; factors and sums, with which no result overflows. */
enum { MOST_LOOKS = 64 };
static const int64_t most_by = INT64_C(1) << 20, most_plus = INT64_C(1) << 40, most_size = INT64_C(1) << 31;

typedef index_formula formula;

static bool read_value(const value *v, formula *f, int *looks);

static bool is_number(const value *v) { return v->type == I64 || v->type == I32; }

static bool is_same_everywhere(const formula *f) {
    for (int d = 0; d < MAX_RANK; d++)
        if (f->by[d]) return false;
    return true;
}

/* Gives `f` the form that the header says, for elements of `v`. False: its numbers are too large. */
static bool settle(formula *f, const value *v) {
    int64_t low = f->plus, high = f->plus;

    if (f->plus > most_plus || f->plus < -most_plus) return false;
    for (int d = 0; d < v->shape.rank; d++) {
        const int64_t size = v->shape.dim[d];
        if (size == 1) f->by[d] = 0;
        if (size < 1 || size > most_size || f->by[d] > most_by || f->by[d] < -most_by) return false;
        *(f->by[d] < 0 ? &low : &high) += f->by[d] * (size - 1);
    }
    if (v->type == BOOL && (high <= 0 || low > 0)) *f = (formula){.plus = low > 0};
    return v->type != I32 || (low >= INT32_MIN && high <= INT32_MAX);
}

/* --- constants ---------------------------------------------------------------------------------------------------- */

static int64_t number_at(const value *v, int64_t i) {
    return v->type == I64 ? ((const int64_t *)v->data)[i] : ((const int32_t *)v->data)[i];
}

static bool read_numbers(const value *v, formula *f) {
    const int64_t count = shape_count(&v->shape);
    int64_t stride = 1;

    f->plus = number_at(v, 0);
    for (int d = v->shape.rank - 1; d >= 0; stride *= v->shape.dim[d--])
        if (v->shape.dim[d] > 1) f->by[d] = (int64_t)((uint64_t)number_at(v, stride) - (uint64_t)f->plus);
    if (!settle(f, v)) return false;
    for (int64_t i = 0; i < count; i++) {
        int64_t rest = i, x = f->plus;
        for (int d = v->shape.rank - 1; d >= 0; rest /= v->shape.dim[d--]) x += rest % v->shape.dim[d] * f->by[d];
        if (x != number_at(v, i)) return false;
    }
    return true;
}

/* Of a triangle below (`lower`) or above a diagonal: k - q - at <= 0, or q + at - k <= 0. */
static formula triangle(int rank, bool lower, int64_t at) {
    formula f = {.plus = lower ? -at : at};
    f.by[rank - 1] = lower ? 1 : -1;
    f.by[rank - 2] = lower ? -1 : 1;
    return f;
}

/* How many of the first elements are as the first one. */
static int64_t ends_at(const uint8_t *x, int64_t count) {
    int64_t n = 1;
    while (n < count && (x[n] != 0) == (x[0] != 0)) n++;
    return n;
}

static bool read_mask(const value *v, formula *f) {
    const uint8_t *x = v->data;
    const int rank = v->shape.rank;
    const int64_t count = shape_count(&v->shape), keys = rank ? v->shape.dim[rank - 1] : 1;
    int64_t row = 0, cut = ends_at(x, count);

    if (cut == count) return f->plus = !x[0], true;
    if (rank < 2) return false;
    const int64_t rows = v->shape.dim[rank - 2];
    while (row < rows && (cut = ends_at(x + row * keys, keys)) == keys) row++; /* to one that has both */
    if (row == rows) return false;
    const bool lower = x[row * keys] != 0;
    const int64_t at = cut - 1 - row; /* k <= q + at is one side of it */
    for (int64_t i = 0; i < count; i++)
        if ((x[i] != 0) != ((i % keys <= i / keys % rows + at) == lower)) return false;
    *f = triangle(rank, lower, lower ? at : at + 1);
    return true;
}

/* --- operators ---------------------------------------------------------------------------------------------------- */

/* Of `v`, whose axes are the last ones of `rank`. */
static bool read_operand(const value *v, int rank, formula *f, int *looks) {
    formula own = {.plus = 0};
    const int more = rank - v->shape.rank;

    if (more < 0 || !read_value(v, &own, looks)) return false;
    *f = (formula){.plus = own.plus};
    for (int d = 0; d < v->shape.rank; d++) f->by[d + more] = own.by[d];
    return true;
}

/* a + factor b */
static formula sum(const formula *a, const formula *b, int64_t factor) {
    formula f = {.plus = a->plus + factor * b->plus};
    for (int d = 0; d < MAX_RANK; d++) f.by[d] = a->by[d] + factor * b->by[d];
    return f;
}

static formula negated(const formula *f) { return sum(&(formula){.plus = 1}, f, -1); }

static bool both(const formula *a, const formula *b, formula *f) {
    const formula *same = is_same_everywhere(a) ? a : is_same_everywhere(b) ? b : NULL;

    if (same) return *f = same->plus > 0 ? *same : same == a ? *b : *a, true;
    if (memcmp(a->by, b->by, sizeof a->by) != 0) return false;
    return *f = a->plus > b->plus ? *a : *b, true;
}

/* The axes of more than one element are the same, in the same order. */
static bool read_reshaped(const value *v, const value *x, formula *f, int *looks) {
    formula own = {.plus = 0};
    int from = 0;

    if (!read_value(x, &own, looks)) return false;
    f->plus = own.plus;
    for (int d = 0; d < v->shape.rank; d++) {
        if (v->shape.dim[d] == 1) continue;
        while (from < x->shape.rank && x->shape.dim[from] == 1) from++;
        if (from == x->shape.rank || x->shape.dim[from] != v->shape.dim[d]) return false;
        f->by[d] = own.by[from++];
    }
    return true;
}

static bool read_moved(const node *n, formula *f, int *looks) {
    const int rank = n->out[0]->shape.rank;
    const int64_t *start, *step;
    formula own = {.plus = 0};

    if (!read_value(n->in[0], &own, looks)) return false;
    f->plus = own.plus;
    if (node_is(n, "Transpose")) {
        if (node_ints(n, "perm", &start) != rank) return false;
        for (int d = 0; d < rank; d++) f->by[d] = own.by[start[d]];
        return true;
    }
    if (node_ints(n, "starts", &start) != rank || node_ints(n, "steps", &step) != rank) return false;
    for (int d = 0; d < rank; d++) {
        if (start[d] > most_size || step[d] > most_by || step[d] < -most_by) return false;
        f->plus += own.by[d] * start[d];
        f->by[d] = own.by[d] * step[d];
    }
    return true;
}

static bool read_range(const node *n, formula *f) {
    if (!is_number(n->in[0]) || !n->in[0]->data || !n->in[2]->data) return false;
    f->plus = number_at(n->in[0], 0);
    f->by[0] = number_at(n->in[2], 0);
    return true;
}

static bool read_triangle(const node *n, formula *f, int *looks) {
    const value *shift = node_in(n, 1);
    const bool lower = node_int(n, "upper") == 0;
    formula x;

    if (n->out[0]->type != BOOL || (shift && (!shift->data || shift->type != I64))) return false;
    const int64_t at = shift ? number_at(shift, 0) : 0;
    if (at > most_size || at < -most_size || !read_operand(n->in[0], n->out[0]->shape.rank, &x, looks)) return false;
    formula kept = triangle(n->out[0]->shape.rank, lower, at);
    return settle(&kept, n->out[0]) && both(&x, &kept, f);
}

/* Of a mask that chooses between all and nothing. */
static bool read_choice(const node *n, formula *f, int *looks) {
    const int rank = n->out[0]->shape.rank;
    formula which, yes, no;

    if (n->out[0]->type != BOOL || !read_operand(n->in[0], rank, &which, looks) ||
        !read_operand(n->in[1], rank, &yes, looks) || !read_operand(n->in[2], rank, &no, looks) ||
        !is_same_everywhere(&yes) || !is_same_everywhere(&no))
        return false;
    *f = yes.plus == no.plus ? yes : yes.plus > 0 ? negated(&which) : which;
    return true;
}

static bool read_logic(const node *n, formula *f, int *looks) {
    const int rank = n->out[0]->shape.rank;
    formula a, b;

    if (!read_operand(n->in[0], rank, &a, looks)) return false;
    if (node_is(n, "Not")) return *f = negated(&a), true;
    if (!read_operand(n->in[1], rank, &b, looks)) return false;
    if (node_is(n, "And")) return both(&a, &b, f);
    a = negated(&a), b = negated(&b); /* Or */
    if (!both(&a, &b, f)) return false;
    return *f = negated(f), true;
}

static bool read_arithmetic(const node *n, formula *f, int *looks) {
    static const struct {
        const char *op;
        int64_t first, second, plus; /* of the operands */
    } rows[] = {{"Add", 1, 1, 0},          {"Sub", 1, -1, 0},     {"Less", 1, -1, 1},
                {"LessOrEqual", 1, -1, 0}, {"Greater", -1, 1, 1}, {"GreaterOrEqual", -1, 1, 0}};
    const int rank = n->out[0]->shape.rank;
    formula a, b;

    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; i++) {
        if (!node_is(n, rows[i].op)) continue;
        if (!is_number(n->in[0]) || !read_operand(n->in[0], rank, &a, looks) ||
            !read_operand(n->in[1], rank, &b, looks))
            return false;
        *f = sum(&(formula){.plus = rows[i].plus}, &a, rows[i].first);
        return *f = sum(f, &b, rows[i].second), true;
    }
    return false;
}

static bool read_node(const node *n, formula *f, int *looks) {
    const value *v = n->out[0];

    if (node_is(n, "Range")) return read_range(n, f);
    if (node_is(n, "Expand")) return read_operand(n->in[0], v->shape.rank, f, looks);
    if (node_is(n, "Cast")) return (v->type == BOOL) == (n->in[0]->type == BOOL) && read_value(n->in[0], f, looks);
    if (node_is(n, "Reshape")) return read_reshaped(v, n->in[0], f, looks);
    if (node_is(n, "Transpose") || node_is(n, "StridedSlice")) return read_moved(n, f, looks);
    if (node_is(n, "Trilu")) return read_triangle(n, f, looks);
    if (node_is(n, "Where")) return read_choice(n, f, looks);
    if (node_is(n, "And") || node_is(n, "Or") || node_is(n, "Not")) return read_logic(n, f, looks);
    return read_arithmetic(n, f, looks);
}

static bool read_value(const value *v, formula *f, int *looks) {
    *f = (formula){.plus = 0};
    if (--*looks < 0 || (v->type != BOOL && !is_number(v)) || shape_count(&v->shape) == 0) return false;
    if (v->data) return v->type == BOOL ? read_mask(v, f) : read_numbers(v, f);
    return v->def && v->def->out[0] == v && read_node(v->def, f, looks) && settle(f, v);
}

bool index_formula_of(const value *v, index_formula *out) {
    int looks = MOST_LOOKS;
    return read_value(v, out, &looks);
}
