/* sequence.c -- lists of tensors, as the exporter writes them for torch.tensor_split and lists of unknown origin.
 *
 * A list never exists while running. In a specialised graph it is the result, of no type, of a SequenceConstruct node
 * whose operands are its items; operators on lists look at that node and answer with the items themselves, so nothing
 * uses it afterwards and it is removed. */
#include "ops/movement/move.h"

#include <inttypes.h>

static status infer_sequence(graph *g, node *n) {
    for (int i = 0; i < n->n_in; i++) TRY(require(g, n, i));
    return OK;
}

static status emit_sequence(graph *g, int count, value *const *items, value **out) {
    return graph_emit(g, "SequenceConstruct", NULL, count, items, 1, out);
}

/* The node that lists the items of operand 0. */
static status read_sequence(graph *g, const node *n, const node **list) {
    const value *v = node_in(n, 0);
    if (!v || !v->def || strcmp(v->def->op->name, "SequenceConstruct") != 0)
        return fail(g->c, E_UNSUPPORTED, "%s of a list that is not made in the model", n->op->name);
    *list = v->def;
    return OK;
}

/* A constant position in a list of `length`, from the end when negative; at most `last`. */
static status read_position(graph *g, const node *n, int operand, int length, int last, int *out) {
    const int64_t *at;
    int count;

    TRY(value_ints(g, n->in[operand], "the position in a list", &count, &at));
    if (count != 1 || at[0] < -length || at[0] > last)
        return fail(g->c, E_INVALID, "%s at position %" PRId64 " of a list of %d", n->op->name, count ? at[0] : 0,
                    length);
    *out = (int)wrap_index(at[0], length);
    return OK;
}

static status lower_empty(graph *g, const node *n, value **out) {
    (void)n;
    return emit_sequence(g, 0, NULL, out);
}

static status lower_insert(graph *g, const node *n, value **out) {
    const node *list = NULL;
    value **items;
    int at;

    TRY(read_sequence(g, n, &list));
    TRY(require(g, n, 1));
    at = list->n_in;
    if (node_in(n, 2)) TRY(read_position(g, n, 2, at, at, &at));
    TRY(NEW(g->c, items, list->n_in + 1));
    for (int i = 0; i <= list->n_in; i++) items[i] = i == at ? n->in[1] : list->in[i - (i > at)];
    return emit_sequence(g, list->n_in + 1, items, out);
}

static status lower_at(graph *g, const node *n, value **out) {
    const node *list = NULL;
    int at;

    TRY(read_sequence(g, n, &list));
    TRY(require(g, n, 1));
    TRY(read_position(g, n, 1, list->n_in, list->n_in - 1, &at));
    out[0] = list->in[at];
    return OK;
}

static status lower_length(graph *g, const node *n, value **out) {
    const node *list = NULL;
    TRY(read_sequence(g, n, &list));
    return graph_scalar(g, I64, list->n_in, out);
}

static status unsqueeze(graph *g, value *x, int axis, value **out) {
    shape s = {.rank = x->shape.rank + 1};
    for (int i = 0; i < s.rank; i++) s.dim[i] = i == axis ? 1 : x->shape.dim[i - (i > axis)];
    return emit_reshape(g, x, &s, out);
}

static status lower_concat(graph *g, const node *n, value **out) {
    bool stack = node_int(n, "new_axis") != 0;
    const node *list = NULL;
    value **items;
    int axis;

    TRY(read_sequence(g, n, &list));
    if (list->n_in == 0) return fail(g->c, E_INVALID, "ConcatFromSequence of an empty list");
    if (list->in[0]->shape.rank + stack > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "a stack of rank over 8");
    TRY(shape_axis(g->c, node_int(n, "axis"), list->in[0]->shape.rank + stack, &axis));
    TRY(NEW(g->c, items, list->n_in));
    for (int i = 0; i < list->n_in; i++) {
        items[i] = list->in[i];
        if (!stack) continue;
        if (items[i]->shape.rank != list->in[0]->shape.rank)
            return fail(g->c, E_SHAPE, "ConcatFromSequence stacks tensors of different ranks");
        TRY(unsqueeze(g, items[i], axis, &items[i]));
    }
    return graph_emit(g, "Concat", NODE_ATTRS(INT("axis", axis)), list->n_in, items, 1, out);
}

/* Sizes given one by one; or one size for all, the last part smaller; or parts of 1, whose axis then goes away. */
static status lower_split(graph *g, const node *n, value **out) {
    value *x = node_in(n, 0), *sizes = node_in(n, 1), **items;
    const int64_t *given = NULL;
    int64_t total, at = 0, each = 1, count;
    int axis, n_given = 0;

    TRY(require(g, n, 0));
    TRY(shape_axis(g->c, node_int(n, "axis"), x->shape.rank, &axis));
    if (x->shape.rank == 0) return fail(g->c, E_SHAPE, "SplitToSequence of a scalar");
    total = x->shape.dim[axis];
    if (sizes) TRY(value_ints(g, sizes, "the sizes given to SplitToSequence", &n_given, &given));
    if (sizes && sizes->shape.rank == 0) {
        each = given[0];
        given = NULL;
        if (each <= 0) return fail(g->c, E_INVALID, "SplitToSequence into parts of %" PRId64, each);
    }
    count = given ? n_given : (total - 1) / each + 1;
    if (total == 0 && !given) count = 0;
    if (count > 1 << 16) return fail(g->c, E_UNSUPPORTED, "SplitToSequence into %" PRId64 " parts", count);
    TRY(NEW(g->c, items, count));
    for (int64_t i = 0; i < count; i++) {
        int64_t size = given ? given[i] : each < total - at ? each : total - at;
        if (size < 0 || size > total - at)
            return fail(g->c, E_SHAPE, "the sizes given to SplitToSequence do not add up to %" PRId64, total);
        TRY(emit_slice_axis(g, x, axis, at, size, &items[i]));
        at += size;
        if (sizes || node_int(n, "keepdims")) continue;
        shape s = {.rank = x->shape.rank - 1};
        for (int d = 0; d < s.rank; d++) s.dim[d] = x->shape.dim[d + (d >= axis)];
        TRY(emit_reshape(g, items[i], &s, &items[i]));
    }
    if (at != total) return fail(g->c, E_SHAPE, "the sizes given to SplitToSequence do not add up to %" PRId64, total);
    return emit_sequence(g, (int)count, items, out);
}

/* clang-format off */
const op_def sequence_ops[] = {
    {ONNX("SequenceConstruct", 11, 0, VARIADIC, 1, 0), .infer = infer_sequence},
    {ONNX("SequenceEmpty", 11, 0, 0, 1, 0), .attrs = NODE_ATTRS(NO_DEFAULT("dtype", INT)), .lower = lower_empty},
    {ONNX("SequenceInsert", 11, 2, 3, 1, 0), .lower = lower_insert},
    {ONNX("SequenceAt", 11, 2, 2, 1, 0), .lower = lower_at},
    {ONNX("SequenceLength", 11, 1, 1, 1, 0), .lower = lower_length},
    {ONNX("ConcatFromSequence", 11, 1, 1, 1, 0), .attrs = NODE_ATTRS(NO_DEFAULT("axis", INT), INT("new_axis", 0)),
     .lower = lower_concat},
    {ONNX("SplitToSequence", 11, 1, 2, 1, 0), .attrs = NODE_ATTRS(INT("axis", 0), INT("keepdims", 1)),
     .lower = lower_split},
    {0},
};
/* clang-format on */
