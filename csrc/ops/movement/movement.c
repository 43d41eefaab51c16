/* movement.c -- operators that put whole elements somewhere else.
 *
 * Concat, Trilu and ReverseSequence have kernels. The others are compositions: Pad with a constant is Place (slice.c),
 * the other modes of Pad gather every axis by an index that reflects, repeats or wraps; Tile is Expand; DepthToSpace
 * and SpaceToDepth are transposes. Backward needs shapes, and the lengths of ReverseSequence. */
#include "core/ints.h"
#include "core/parallel.h"
#include "core/size.h"
#include "ops/movement/move.h"

#include <inttypes.h>

/* --- Concat ------------------------------------------------------------------------------------------------------- */

/* PyTorch lets vectors of no elements stand in for nothing, whatever the rank of the others. */
static bool is_nothing(const value *v) { return v->shape.rank == 1 && v->shape.dim[0] == 0; }

/* Where all are such vectors, PyTorch looks at no axis: the first one stands for any. */
static status lower_concat(graph *g, const node *n, value **out) {
    if (node_int(n, "axis") == 0) return OK;
    for (int i = 0; i < n->n_in; i++)
        if (!n->in[i] || !is_nothing(n->in[i])) return OK;
    return graph_emit(g, "Concat", NODE_ATTRS(INT("axis", 0)), n->n_in, n->in, 1, out);
}

static status infer_concat(graph *g, node *n) {
    shape s = {.rank = -1};
    char first[SHAPE_TEXT], other[SHAPE_TEXT];
    int axis = 0;

    TRY(same_types(g, n, 0));
    for (int i = 0; i < n->n_in; i++) {
        const shape *x;
        bool fits;
        TRY(require(g, n, i));
        if (is_nothing(n->in[i])) continue;
        x = &n->in[i]->shape;
        if (s.rank < 0) {
            s = *x;
            if (s.rank == 0) return fail(g->c, E_SHAPE, "Concat of tensors of rank 0");
            TRY(shape_axis(g->c, node_int(n, "axis"), s.rank, &axis));
            continue;
        }
        fits = x->rank == s.rank;
        for (int d = 0; fits && d < s.rank; d++) fits = d == axis || x->dim[d] == s.dim[d];
        if (!fits)
            return fail(g->c, E_SHAPE, "Concat along axis %d of %s and %s", axis, shape_text(&s, first),
                        shape_text(x, other));
        s.dim[axis] = size_add(s.dim[axis], x->dim[axis]);
    }
    return set_out(g, n, 0, n->in[0]->type, s.rank < 0 ? &n->in[0]->shape : &s);
}

/* `v` when it is a Reshape that merges some axes of its operand into `axis` and keeps the others: that operand. */
static value *before_merging(const value *v, int axis) {
    value *x = v->def && strcmp(v->def->op->name, "Reshape") == 0 ? v->def->in[0] : NULL;
    int merged = x ? x->shape.rank - v->shape.rank : 0;

    if (merged <= 0) return NULL;
    for (int i = 0; i < v->shape.rank; i++)
        if (i != axis && x->shape.dim[i < axis ? i : i + merged] != v->shape.dim[i]) return NULL;
    return x;
}

/* Operands that differ along `axis` only. */
static bool line_up(value *const *x, int count, int axis) {
    for (int i = 1; i < count; i++) {
        if (x[i]->shape.rank != x[0]->shape.rank) return false;
        for (int d = 0; d < x[0]->shape.rank; d++)
            if (d != axis && x[i]->shape.dim[d] != x[0]->shape.dim[d]) return false;
    }
    return true;
}

/* A Concat of Reshapes that merge the same axes is a Reshape of a Concat. The operands may be transposed, so that each
 * of those Reshapes is a copy: the gradients of query, key and value are. */
static status concat_before_merging(graph *g, const node *n, value **out) {
    value **x;
    int axis;

    TRY(shape_axis(g->c, node_int(n, "axis"), n->out[0]->shape.rank, &axis));
    TRY(NEW(g->c, x, n->n_in));
    for (int i = 0; i < n->n_in; i++)
        if (!(x[i] = before_merging(n->in[i], axis))) return OK;
    if (!line_up(x, n->n_in, axis)) return OK;
    TRY(graph_emit(g, "Concat", NODE_ATTRS(INT("axis", axis)), n->n_in, x, 1, out));
    return emit_reshape(g, out[0], &n->out[0]->shape, out);
}

/* Operands without elements are dropped, but those that receive a gradient without elements. What is left may be a single
 * operand. */
static status simplify_concat(graph *g, const node *n, value **out) {
    value **kept;
    int count = 0;

    TRY(NEW(g->c, kept, n->n_in));
    for (int i = 0; i < n->n_in; i++)
        if (shape_count(&n->in[i]->shape) || n->in[i]->needs_grad) kept[count++] = n->in[i];
    if (count == 1) out[0] = kept[0];
    else if (count == 0 && shape_equal(&n->in[0]->shape, &n->out[0]->shape)) out[0] = n->in[0];
    else if (count > 1 && count < n->n_in) return graph_emit_op(g, n->op, n->attrs, count, kept, 1, out);
    else if (count > 1) return concat_before_merging(g, n, out);
    return OK;
}

static status grad_concat(graph *g, const node *n, value *const dy[], value *dx[]) {
    int64_t at = 0;
    int axis;

    TRY(shape_axis(g->c, node_int(n, "axis"), dy[0]->shape.rank, &axis));
    for (int i = 0; i < n->n_in; i++) {
        if (is_nothing(n->in[i])) {
            if (need(n, i)) TRY(zeros_like(g, n->in[i], &dx[i]));
            continue;
        }
        int64_t size = n->in[i]->shape.dim[axis];
        if (need(n, i)) TRY(emit_slice_axis(g, dy[0], axis, at, size, &dx[i]));
        at += size;
    }
    return OK;
}

static status concat_cpu(ctx *c, const call *k) {
    int64_t at = 0;
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), k->out[0].shape.rank, &axis));
    for (int i = 0; i < k->n_in; i++) {
        const tensor *x = &k->in[i];
        if (tensor_count(x) == 0) continue;
        tensor part = tensor_slice(&k->out[0], axis, at, x->shape.dim[axis], 1);
        copy_elements(&part, x);
        at += x->shape.dim[axis];
    }
    return OK;
}

/* --- Pad ---------------------------------------------------------------------------------------------------------- */

typedef enum pad_mode { PAD_CONSTANT, PAD_REFLECT, PAD_EDGE, PAD_WRAP, PAD_MODES } pad_mode;

static int64_t padded(int64_t size, int64_t before, int64_t after) { return size_add(size_add(size, before), after); }

static status read_pads(graph *g, const node *n, int64_t before[MAX_RANK], int64_t after[MAX_RANK]) {
    const int64_t *pads = NULL, *axes = NULL;
    int rank = n->in[0]->shape.rank, count = node_ints(n, "pads", &pads), n_axes = rank, axis;
    bool seen[MAX_RANK] = {false};

    if (count < 0) {
        TRY(require(g, n, 1));
        TRY(value_ints(g, n->in[1], "the pads of Pad", &count, &pads));
    }
    if (node_in(n, 3)) TRY(value_ints(g, n->in[3], "the axes of Pad", &n_axes, &axes));
    if (count != 2 * n_axes)
        return fail(g->c, E_SHAPE, "Pad of %d axes by %d numbers, not %d", n_axes, count, 2 * n_axes);
    for (int i = 0; i < n_axes; i++) {
        TRY(shape_axis(g->c, axes ? axes[i] : i, rank, &axis));
        if (rank == 0 || seen[axis]) return fail(g->c, E_SHAPE, "Pad names axis %d twice, or of rank 0", axis);
        seen[axis] = true;
        before[axis] = pads[i];
        after[axis] = pads[n_axes + i];
        if (before[axis] > INT32_MAX || before[axis] < -INT32_MAX || after[axis] > INT32_MAX ||
            after[axis] < -INT32_MAX || padded(n->in[0]->shape.dim[axis], before[axis], after[axis]) < 0)
            return fail(g->c, E_SHAPE, "Pad of axis %d, of size %" PRId64 ", by %" PRId64 " and %" PRId64, axis,
                        n->in[0]->shape.dim[axis], before[axis], after[axis]);
    }
    return OK;
}

/* Negative pads cut off; then what is left is put into the larger box. */
static status pad_constant(graph *g, const node *n, const int64_t *before, const int64_t *after, value **out) {
    static const int64_t ones[MAX_RANK] = {1, 1, 1, 1, 1, 1, 1, 1};
    int64_t cut[MAX_RANK] = {0}, at[MAX_RANK] = {0};
    value *x = n->in[0], *filler = node_in(n, 2);
    shape kept = x->shape, whole = x->shape;
    double number = 0;

    for (int i = 0; i < x->shape.rank; i++) {
        cut[i] = most(-before[i], 0);
        at[i] = most(before[i], 0);
        kept.dim[i] -= cut[i] + most(-after[i], 0);
        /* Cut from one side by more than there is: the rest is taken from the other side's padding. */
        if (kept.dim[i] < 0) {
            cut[i] = at[i] = 0;
            kept.dim[i] = 0;
        }
        whole.dim[i] = padded(whole.dim[i], before[i], after[i]);
    }
    if (node_has(n, "value")) TRY(graph_scalar(g, x->type, node_float(n, "value"), &filler));
    if (filler && value_is_filled(filler, &number) && number == 0) filler = NULL;
    TRY(emit_slice(g, x, cut, &kept, ones, &x));
    return emit_place(g, x, filler, at, &whole, ones, out);
}

/* Which element stands at position i of an axis of n elements that goes on forever. */
static int64_t position(pad_mode mode, int64_t i, int64_t n) {
    int64_t period;

    if (mode == PAD_EDGE) return i < 0 ? 0 : i >= n ? n - 1 : i;
    period = mode == PAD_WRAP ? n : most(2 * (n - 1), 1);
    i %= period;
    if (i < 0) i += period;
    return i < n ? i : period - i;
}

static status pad_axis(graph *g, value *x, pad_mode mode, int axis, int64_t before, int64_t after, value **out) {
    int64_t n = x->shape.dim[axis], count = padded(n, before, after), *index;
    value *indices;

    if (n == 0 && count > 0)
        return fail(g->c, E_SHAPE, "Pad has nothing to repeat along axis %d, which is empty", axis);
    TRY(graph_check_table(g, count, sizeof *index));
    TRY(NEW(g->c, index, count));
    for (int64_t i = 0; i < count; i++) index[i] = position(mode, i - before, n);
    TRY(graph_add_constant(g, I64, &SHAPE(count), index, &indices));
    return emit_with(g, out, "Gather", NODE_ATTRS(INT("axis", axis)), x, indices);
}

/* Axes first..last that are padded, seen as one: elements are read, and gradients added, in one go, as PyTorch does. */
static status pad_axes(graph *g, value *x, pad_mode mode, int first, int last, const int64_t *before, const shape *y,
                       value **out) {
    const int64_t inner = shape_span(&x->shape, last + 1, x->shape.rank), count = shape_span(y, first, last + 1);
    shape joined = SHAPE(shape_span(&x->shape, 0, first), shape_span(&x->shape, first, last + 1), inner);
    int32_t *index;
    value *indices;

    TRY(NEW(g->c, index, count));
    for (int64_t k = 0; k < count; k++) {
        int64_t rest = k, stride = 1, at = 0;
        for (int i = last; i >= first; i--) {
            at += position(mode, rest % y->dim[i] - before[i], x->shape.dim[i]) * stride;
            rest /= y->dim[i];
            stride *= x->shape.dim[i];
        }
        index[k] = (int32_t)at;
    }
    TRY(graph_add_constant(g, I32, &SHAPE(count), index, &indices));
    TRY(emit_reshape(g, x, &joined, &x));
    TRY(emit_with(g, &x, "Gather", NODE_ATTRS(INT("axis", 1)), x, indices));
    return emit_reshape(g, x, y, out);
}

/* Padding that goes over an axis once, or, where PyTorch allows it, along the whole of it: beyond that PyTorch refuses,
 * or its memory is undefined. */
static status check_once(graph *g, pad_mode mode, int axis, int64_t n, int64_t before, int64_t after) {
    const int64_t largest = mode == PAD_REFLECT ? n - 1 : n;

    if (mode == PAD_EDGE || (before <= largest && after <= largest)) return OK;
    return fail(g->c, E_UNSUPPORTED, "Pad by %s of axis %d, of size %" PRId64 ", by %" PRId64 " and %" PRId64,
                mode == PAD_WRAP ? "wrapping" : "reflection", axis, n, before, after);
}

/* Not worth a list of more places than this. */
enum { MOST_PLACES = 1 << 20 };

static status lower_pad(graph *g, const node *n, value **out) {
    static const char *const names[PAD_MODES] = {"constant", "reflect", "edge", "wrap"};
    int64_t before[MAX_RANK] = {0}, after[MAX_RANK] = {0};
    value *x = node_in(n, 0);
    shape y;
    int mode = 0, first = 0, last = -1;

    TRY(require(g, n, 0));
    while (mode < PAD_MODES && strcmp(names[mode], node_string(n, "mode")) != 0) mode++;
    if (mode == PAD_MODES) return fail(g->c, E_UNSUPPORTED, "Pad with the mode \"%s\"", node_string(n, "mode"));
    TRY(read_pads(g, n, before, after));
    if (mode == PAD_CONSTANT) return pad_constant(g, n, before, after, out);
    y = x->shape;
    for (int i = 0; i < y.rank; i++) {
        y.dim[i] = padded(y.dim[i], before[i], after[i]);
        if (!before[i] && !after[i]) continue;
        TRY(check_once(g, (pad_mode)mode, i, x->shape.dim[i], before[i], after[i]));
        if (last < 0) first = i;
        last = i;
    }
    if (first < last && shape_count(&x->shape) > 0 && shape_span(&x->shape, first, last + 1) <= INT32_MAX &&
        shape_span(&y, first, last + 1) <= MOST_PLACES)
        return pad_axes(g, x, (pad_mode)mode, first, last, before, &y, out);
    for (int i = 0; i < n->in[0]->shape.rank; i++)
        if (before[i] || after[i]) TRY(pad_axis(g, x, (pad_mode)mode, i, before[i], after[i], &x));
    out[0] = x;
    return OK;
}

/* --- Tile --------------------------------------------------------------------------------------------------------- */

/* Axes of size 1 are expanded as they are, at once; an axis [d] of the others is expanded as [1, d] to [r, d]. */
static status lower_tile(graph *g, const node *n, value **out) {
    value *x = node_in(n, 0);
    const int64_t *repeats;
    shape s;
    int count;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(value_ints(g, n->in[1], "the repeats of Tile", &count, &repeats));
    s = x->shape;
    if (count != s.rank) return fail(g->c, E_SHAPE, "Tile of a tensor of rank %d by %d repeats", s.rank, count);
    for (int i = 0; i < s.rank; i++)
        if (repeats[i] < 0 || repeats[i] > INT32_MAX)
            return fail(g->c, E_INVALID, "Tile of axis %d by %" PRId64, i, repeats[i]);
    for (int i = 0; i < s.rank; i++)
        if (x->shape.dim[i] == 1) s.dim[i] = repeats[i];
    TRY(emit_expand(g, x, &s, &x));
    for (int i = 0; i < s.rank; i++) {
        shape once, many;
        if (repeats[i] == 1 || n->in[0]->shape.dim[i] == 1) continue;
        once = SHAPE(shape_span(&s, 0, i), 1, shape_span(&s, i, s.rank));
        many = SHAPE(once.dim[0], repeats[i], once.dim[2]);
        s.dim[i] = size_mul(s.dim[i], repeats[i]);
        TRY(shape_check(g->c, &s));
        TRY(emit_reshape(g, x, &once, &x));
        TRY(emit_expand(g, x, &many, &x));
        TRY(emit_reshape(g, x, &s, &x));
    }
    out[0] = x;
    return OK;
}

/* --- DepthToSpace, SpaceToDepth ----------------------------------------------------------------------------------- */

/* Reshape, Transpose, Reshape. */
static status rearrange(graph *g, value *x, const shape *split, const int *perm, const shape *joined, value **out) {
    TRY(emit_reshape(g, x, split, &x));
    TRY(emit_transpose(g, x, perm, &x));
    return emit_reshape(g, x, joined, out);
}

static status image_block(graph *g, const node *n, int64_t *block) {
    TRY(require(g, n, 0));
    *block = node_int(n, "blocksize");
    if (n->in[0]->shape.rank != 4)
        return fail(g->c, E_SHAPE, "%s of a tensor of rank %d, not 4", n->op->name, n->in[0]->shape.rank);
    return *block > 0 && *block < 1 << 20 ? OK
                                          : fail(g->c, E_INVALID, "%s with blocks of %" PRId64, n->op->name, *block);
}

static status lower_depth_to_space(graph *g, const node *n, value **out) {
    static const int depth_first[] = {0, 3, 4, 1, 5, 2}, column_first[] = {0, 1, 4, 2, 5, 3};
    const char *mode = node_string(n, "mode");
    int64_t b;

    TRY(image_block(g, n, &b));
    const int64_t *d = n->in[0]->shape.dim, square = size_mul(b, b), depth = d[1] / square;
    if (d[1] % square != 0)
        return fail(g->c, E_SHAPE, "DepthToSpace of %" PRId64 " channels in blocks of %" PRId64, d[1], b);
    shape joined = SHAPE(d[0], depth, size_mul(d[2], b), size_mul(d[3], b));
    if (strcmp(mode, "DCR") == 0)
        return rearrange(g, n->in[0], &SHAPE(d[0], b, b, depth, d[2], d[3]), depth_first, &joined, out);
    if (strcmp(mode, "CRD") == 0)
        return rearrange(g, n->in[0], &SHAPE(d[0], depth, b, b, d[2], d[3]), column_first, &joined, out);
    return fail(g->c, E_UNSUPPORTED, "DepthToSpace with the mode \"%s\"", mode);
}

static status lower_space_to_depth(graph *g, const node *n, value **out) {
    static const int perm[] = {0, 3, 5, 1, 2, 4};
    int64_t b;

    TRY(image_block(g, n, &b));
    const int64_t *d = n->in[0]->shape.dim;
    if (d[2] % b != 0 || d[3] % b != 0)
        return fail(g->c, E_SHAPE, "SpaceToDepth of %" PRId64 " x %" PRId64 " in blocks of %" PRId64, d[2], d[3], b);
    return rearrange(g, n->in[0], &SHAPE(d[0], d[1], d[2] / b, b, d[3] / b, b), perm,
                     &SHAPE(d[0], size_mul(d[1], size_mul(b, b)), d[2] / b, d[3] / b), out);
}

/* --- Trilu -------------------------------------------------------------------------------------------------------- */

static status infer_trilu(graph *g, node *n) {
    const value *k = node_in(n, 1);

    TRY(infer_same(g, n));
    if (n->in[0]->shape.rank < 2) return fail(g->c, E_SHAPE, "Trilu of a tensor of rank %d", n->in[0]->shape.rank);
    if (k && (k->type != I64 || shape_count(&k->shape) != 1))
        return fail(g->c, E_INVALID, "the diagonal of Trilu is not one int64");
    return OK;
}

static status grad_trilu(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "Trilu", NODE_ATTRS(INT("upper", node_int(n, "upper"))), dy[0], node_in(n, 1));
}

typedef struct triangle {
    char *to;
    const char *from;
    int64_t rows, cols, shift; /* row i is cut before column i + shift */
    size_t size;
    bool upper;
} triangle;

static void trilu_range(void *arg, int64_t begin, int64_t end) {
    const triangle *t = arg;
    size_t bytes = (size_t)t->cols * t->size;

    for (int64_t r = begin; r < end; r++) {
        int64_t cut = r % t->rows + t->shift;
        size_t left = (size_t)(cut < 0 ? 0 : cut > t->cols ? t->cols : cut) * t->size;
        char *to = t->to + (size_t)r * bytes;
        const char *from = t->from + (size_t)r * bytes;
        if (t->upper) {
            memset(to, 0, left);
            if (to != from) memcpy(to + left, from + left, bytes - left);
        } else {
            if (to != from) memcpy(to, from, left);
            memset(to + left, 0, bytes - left);
        }
    }
}

static status trilu_cpu(ctx *c, const call *k) {
    const int64_t far = INT64_C(1) << 60;
    const tensor *x = &k->in[0];
    int rank = x->shape.rank;
    int64_t shift = k->n_in > 1 && tensor_present(&k->in[1]) ? *(const int64_t *)k->in[1].data : 0;
    triangle t = {.to = k->out[0].data,
                  .from = x->data,
                  .rows = x->shape.dim[rank - 2],
                  .cols = x->shape.dim[rank - 1],
                  .size = dtype_size(x->type),
                  .upper = node_int(k->node, "upper") != 0};

    (void)c;
    t.shift = (shift > far ? far : shift < -far ? -far : shift) + !t.upper;
    if (tensor_count(x)) parallel_for(tensor_count(x) / t.cols, parallel_rows(t.cols), trilu_range, &t);
    return OK;
}

/* --- ReverseSequence ---------------------------------------------------------------------------------------------- */

static status infer_reverse(graph *g, node *n) {
    int64_t batch = node_int(n, "batch_axis"), time = node_int(n, "time_axis");
    const shape *s, *lengths;

    TRY(infer_same(g, n));
    TRY(require(g, n, 1));
    s = &n->in[0]->shape;
    lengths = &n->in[1]->shape;
    if (s->rank < 2 || batch < 0 || time < 0 || batch + time != 1)
        return fail(g->c, E_SHAPE, "ReverseSequence with batch axis %" PRId64 " and time axis %" PRId64, batch, time);
    if (n->in[1]->type != I64 || lengths->rank != 1 || lengths->dim[0] != s->dim[batch])
        return fail(g->c, E_SHAPE, "the lengths of ReverseSequence are not one int64 a sequence");
    return OK;
}

static status grad_reverse(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(
        g, &dx[0], "ReverseSequence",
        NODE_ATTRS(INT("batch_axis", node_int(n, "batch_axis")), INT("time_axis", node_int(n, "time_axis"))), dy[0],
        n->in[1]);
}

typedef struct reversal {
    char *to;
    const char *from;
    const int64_t *length; /* of a sequence */
    int64_t second;        /* size of the second axis */
    size_t bytes;          /* of an element of a sequence */
    bool time_first;
} reversal;

static void reverse_range(void *arg, int64_t begin, int64_t end) {
    const reversal *p = arg;

    for (int64_t r = begin; r < end; r++) {
        int64_t time = p->time_first ? r / p->second : r % p->second;
        int64_t last = p->length[p->time_first ? r % p->second : r / p->second] - 1;
        int64_t shift = time <= last ? last - 2 * time : 0;
        int64_t from = r + shift * (p->time_first ? p->second : 1);
        memcpy(p->to + (size_t)r * p->bytes, p->from + (size_t)from * p->bytes, p->bytes);
    }
}

static status reverse_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    reversal p = {.to = k->out[0].data,
                  .from = x->data,
                  .length = k->in[1].data,
                  .second = x->shape.dim[1],
                  .time_first = node_int(k->node, "time_axis") == 0};
    int64_t limit = x->shape.dim[p.time_first ? 0 : 1], inner = shape_span(&x->shape, 2, x->shape.rank);

    for (int64_t i = 0; i < tensor_count(&k->in[1]); i++)
        if (p.length[i] < 0 || p.length[i] > limit)
            return fail(c, E_RUNTIME, "a sequence of length %" PRId64 " in %" PRId64 " steps", p.length[i], limit);
    p.bytes = (size_t)inner * dtype_size(x->type);
    if (tensor_count(x)) parallel_for(shape_span(&x->shape, 0, 2), parallel_rows(inner), reverse_range, &p);
    return OK;
}

kernel_fn concat_cuda, reverse_cuda; /* cuda/kernels/move.cu */
kernel_fn trilu_cuda;                /* cuda/kernels/create.cu */

/* --- records ------------------------------------------------------------------------------------------------------ */

/* clang-format off */
const op_def movement_ops[] = {
    {ONNX("Concat", 4, 1, VARIADIC, 1, ANY_TYPE), .plain = ALL_OPERANDS, .flags = STRIDED,
     .attrs = NODE_ATTRS(NO_DEFAULT("axis", INT)),
     .lower = lower_concat, .infer = infer_concat, .simplify = simplify_concat, .grad = grad_concat, .cpu = concat_cpu,
     .cuda = concat_cuda},
    {ONNX("Pad", 2, 1, 1, 1, ANY_TYPE),
     .attrs = NODE_ATTRS(STRING("mode", "constant"), NO_DEFAULT("pads", INTS), FLOAT("value", 0)), .lower = lower_pad},
    {ONNX("Pad", 11, 2, 3, 1, ANY_TYPE), .attrs = NODE_ATTRS(STRING("mode", "constant")), .lower = lower_pad},
    {ONNX("Pad", 18, 2, 4, 1, ANY_TYPE), .attrs = NODE_ATTRS(STRING("mode", "constant")), .lower = lower_pad},
    {ONNX("Tile", 6, 2, 2, 1, ANY_TYPE), .lower = lower_tile},
    {ONNX("DepthToSpace", 1, 1, 1, 1, ANY_TYPE),
     .attrs = NODE_ATTRS(NO_DEFAULT("blocksize", INT), STRING("mode", "DCR")),
     .lower = lower_depth_to_space},
    {ONNX("SpaceToDepth", 1, 1, 1, 1, ANY_TYPE), .attrs = NODE_ATTRS(NO_DEFAULT("blocksize", INT)),
     .lower = lower_space_to_depth},
    {ONNX("Trilu", 14, 1, 2, 1, ANY_TYPE), .owned = OPERAND(1), .plain = OPERAND(0), .flags = INPLACE_0, .attrs = NODE_ATTRS(INT("upper", 1)),
     .infer = infer_trilu, .grad = grad_trilu, .cpu = trilu_cpu, .cuda = trilu_cuda},
    {ONNX("ReverseSequence", 10, 2, 2, 1, ANY_TYPE), .checked = OPERAND(1), .plain = OPERAND(0),
     .attrs = NODE_ATTRS(INT("batch_axis", 1), INT("time_axis", 0)),
     .infer = infer_reverse, .grad = grad_reverse, .cpu = reverse_cpu, .cuda = reverse_cuda},
    {0},
};
/* clang-format on */
