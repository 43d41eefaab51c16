/* nonzero.c -- operators whose result is as large as the data says: NonZero, Compress, Unique.
 *
 * A plan needs every size as a number. NonZero counts first: from a constant (a mask that depends on shapes only) the
 * count folds; from data it is asked for, found by a prologue, and part of what the plan is for (graph_data_size).
 * Unique is computed while the graph is specialised, from constants, and otherwise refused with a sentence. */
#include "ops/movement/move.h"

#include <inttypes.h>

static status require_constant(graph *g, const node *n, int i, const char *what) {
    TRY(require(g, n, i));
    if (value_is_constant(n->in[i])) return OK;
    return fail(g->c, E_UNSUPPORTED, "%s depends on %s, which is data: its size is unknown before running", n->op->name,
                what);
}

/* --- NonZero ------------------------------------------------------------------------------------------------------ */

static int64_t count_nonzero(const tensor *x) {
    int64_t count = 0, total = tensor_count(x);
    for (int64_t i = 0; i < total; i++) count += dtype_get(x->type, x->data, i) != 0;
    return count;
}

static status nonzero_count_cpu(ctx *c, const call *k) {
    (void)c;
    *(int64_t *)k->out[0].data = count_nonzero(&k->in[0]);
    return OK;
}

static status nonzero_sized_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    int64_t *at = k->out[0].data, count = node_int(k->node, "count"), total = tensor_count(x), found = 0;

    for (int64_t i = 0; i < total; i++) {
        if (dtype_get(x->type, x->data, i) == 0) continue;
        for (int d = 0; d < x->shape.rank && found < count; d++)
            at[d * count + found] = i / x->stride[d] % x->shape.dim[d];
        found++;
    }
    if (found == count) return OK;
    return fail(c, E_RUNTIME, "NonZero finds %" PRId64 " elements; %" PRId64 " were counted before", found, count);
}

kernel_fn nonzero_count_cuda, nonzero_sized_cuda; /* cuda/kernels/nonzero.cu */

static status infer_nonzero_count(graph *g, node *n) {
    TRY(require(g, n, 0));
    return set_out(g, n, 0, I64, &SCALAR);
}

static status infer_nonzero_sized(graph *g, node *n) {
    TRY(require(g, n, 0));
    return set_out(g, n, 0, I64, &SHAPE(n->in[0]->shape.rank, node_int(n, "count")));
}

/* Of a constant the count folds; otherwise it is one of the sizes that data decides. */
static status lower_nonzero(graph *g, const node *n, value **out) {
    value *counter;
    int64_t count;

    TRY(require(g, n, 0));
    TRY(emit(g, &counter, "NonZeroCount", n->in[0]));
    if (value_is_constant(counter)) count = *(const int64_t *)counter->data;
    else TRY(graph_data_size(g, counter, &count));
    return emit_with(g, out, "NonZeroSized", NODE_ATTRS(INT("count", count)), n->in[0]);
}

/* --- Compress ----------------------------------------------------------------------------------------------------- */

/* A Gather of the places where the condition holds. */
static status lower_compress(graph *g, const node *n, value **out) {
    value *x = node_in(n, 0), *condition = node_in(n, 1), *indices;
    int64_t start = 0;
    int axis = 0;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    if (condition->type != BOOL || condition->shape.rank != 1)
        return fail(g->c, E_TYPE, "the condition of Compress is not a vector of booleans");
    if (!node_has(n, "axis")) TRY(emit_reshape(g, x, &SHAPE(shape_count(&x->shape)), &x));
    else TRY(shape_axis(g->c, node_int(n, "axis"), x->shape.rank, &axis));
    if (x->shape.rank == 0) return fail(g->c, E_SHAPE, "Compress along an axis of a scalar");
    if (condition->shape.dim[0] > x->shape.dim[axis])
        TRY(emit_slice_axis(g, condition, 0, start, x->shape.dim[axis], &condition));
    TRY(emit(g, &indices, "NonZero", condition));
    TRY(emit_reshape(g, indices, &SHAPE(indices->shape.dim[1]), &indices));
    return emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", axis)), x, indices);
}

/* --- Unique ------------------------------------------------------------------------------------------------------- */

/* Items are compared element by element; an item is an element, or what lies at one place of the axis. */
typedef struct items {
    const value *x;
    int64_t count, outer, inner; /* x is [outer, count, inner] */
    int64_t *order;              /* item numbers, sorted */
} items;

static int compare(const items *s, int64_t a, int64_t b) {
    for (int64_t o = 0; o < s->outer; o++)
        for (int64_t i = 0; i < s->inner; i++) {
            uint64_t x = order_key(s->x->type, s->x->data, (o * s->count + a) * s->inner + i);
            uint64_t y = order_key(s->x->type, s->x->data, (o * s->count + b) * s->inner + i);
            if (x != y) return x < y ? -1 : 1;
        }
    return 0;
}

static bool before(const items *s, int64_t a, int64_t b) {
    int order = compare(s, a, b);
    return order ? order < 0 : a < b;
}

/* Merges ever longer sorted runs. */
static status sort_items(ctx *c, items *s) {
    int64_t *from, *to;

    TRY(NEW(c, from, s->count));
    TRY(NEW(c, to, s->count));
    for (int64_t i = 0; i < s->count; i++) from[i] = i;
    for (int64_t run = 1; run < s->count; run *= 2) {
        for (int64_t begin = 0; begin < s->count; begin += 2 * run) {
            int64_t a = begin, b = begin + run, end = b + run < s->count ? b + run : s->count;
            int64_t middle = b < s->count ? b : s->count;
            for (int64_t i = begin; i < end; i++)
                to[i] = a < middle && (b >= end || before(s, from[a], from[b])) ? from[a++] : from[b++];
        }
        int64_t *swap = from;
        from = to;
        to = swap;
    }
    s->order = from;
    return OK;
}

typedef struct groups {
    int64_t count, *first, *size, *of; /* first item and size of a group; the group of an item */
} groups;

/* Equal items stand together in sorted order; unsorted, groups are numbered as their first items come. */
static status group_items(ctx *c, const items *s, bool sorted, groups *r) {
    int64_t *leader; /* of an item: the first one equal to it */

    TRY(NEW(c, leader, s->count));
    TRY(NEW(c, r->first, s->count));
    TRY(NEW(c, r->size, s->count));
    TRY(NEW(c, r->of, s->count));
    for (int64_t i = 0; i < s->count; i++) {
        bool same = i > 0 && compare(s, s->order[i - 1], s->order[i]) == 0;
        leader[s->order[i]] = same ? leader[s->order[i - 1]] : s->order[i];
    }
    for (int64_t i = 0; i < s->count; i++) {
        int64_t item = sorted ? s->order[i] : i;
        if (leader[item] == item) {
            r->of[item] = r->count;
            r->first[r->count++] = item;
        }
    }
    for (int64_t item = 0; item < s->count; item++) {
        r->of[item] = r->of[leader[item]];
        r->size[r->of[item]]++;
    }
    return OK;
}

static status lower_unique(graph *g, const node *n, value **out) {
    value *x = node_in(n, 0), *first;
    items s = {.x = x, .outer = 1, .inner = 1};
    groups r = {0};
    int axis = 0;

    TRY(require_constant(g, n, 0, "its operand"));
    if (n->n_out > 4) return fail(g->c, E_INVALID, "Unique has 4 results, not %d", n->n_out);
    s.count = shape_count(&x->shape);
    if (node_has(n, "axis")) {
        TRY(shape_axis(g->c, node_int(n, "axis"), x->shape.rank, &axis));
        if (x->shape.rank == 0) return fail(g->c, E_SHAPE, "Unique along an axis of a scalar");
        s.outer = shape_span(&x->shape, 0, axis);
        s.count = x->shape.dim[axis];
        s.inner = shape_span(&x->shape, axis + 1, x->shape.rank);
    } else {
        TRY(emit_reshape(g, x, &SHAPE(s.count), &x));
    }
    TRY(sort_items(g->c, &s));
    TRY(group_items(g->c, &s, node_int(n, "sorted") != 0, &r));
    TRY(graph_ints(g, (int)r.count, r.first, &first));
    TRY(emit_with(g, &out[0], "Gather", NODE_ATTRS(INT("axis", axis)), x, first));
    if (n->n_out > 1) out[1] = first;
    if (n->n_out > 2) TRY(graph_ints(g, (int)s.count, r.of, &out[2]));
    if (n->n_out > 3) TRY(graph_ints(g, (int)r.count, r.size, &out[3]));
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

/* clang-format off */
const op_def nonzero_ops[] = {
    {ONNX("NonZero", 9, 1, 1, 1, ANY_TYPE), .lower = lower_nonzero},
    {OURS("NonZeroCount", 1, 1, 1, ANY_TYPE), .plain = OPERAND(0), .flags = NO_GRAD, .infer = infer_nonzero_count, .cpu = nonzero_count_cpu,
     .cuda = nonzero_count_cuda},
    {OURS("NonZeroSized", 1, 1, 1, ANY_TYPE), .checked = OPERAND(0), .flags = NO_GRAD,
     .attrs = NODE_ATTRS(INT("count", 0)),
     .infer = infer_nonzero_sized, .cpu = nonzero_sized_cpu, .cuda = nonzero_sized_cuda},
    {ONNX("Compress", 9, 2, 2, 1, ANY_TYPE), .attrs = NODE_ATTRS(NO_DEFAULT("axis", INT)), .lower = lower_compress},
    {ONNX("Unique", 11, 1, 1, VARIADIC, ANY_TYPE), .attrs = NODE_ATTRS(NO_DEFAULT("axis", INT), INT("sorted", 1)),
     .lower = lower_unique},
    {0},
};
/* clang-format on */
