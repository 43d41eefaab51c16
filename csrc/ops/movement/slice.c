/* slice.c -- boxes cut out of a tensor, and put back.
 *
 * Slice and Split become StridedSlice, whose attributes say for every axis of x where it starts, how many elements it
 * takes and by which step:
 *     StridedSlice   y[i] = x[start + i * step]
 *     Place          y[start + i * step] = x[i], a filler (0) everywhere else
 * Each is the gradient of the other. A StridedSlice is always a view. Backward needs shapes only. */
#include "core/ints.h"
#include "core/size.h"
#include "ops/movement/move.h"

#include <inttypes.h>
#include <string.h>

static const int64_t zeros[MAX_RANK] = {0}, ones[MAX_RANK] = {1, 1, 1, 1, 1, 1, 1, 1};

/* The attribute `name`, one number an axis of x. */
static status read_box(graph *g, const node *n, const char *name, const int64_t **out) {
    TRY(require(g, n, 0));
    if (node_ints(n, name, out) == n->in[0]->shape.rank) return OK;
    return fail(g->c, E_INVALID, "%s needs %s for each axis of its operand", n->op->name, name);
}

static shape shape_of(int rank, const int64_t *dims) {
    shape s = {.rank = rank};
    memcpy(s.dim, dims, (size_t)rank * sizeof *dims);
    return s;
}

/* Does start, start + step, ... (`count` of them) stay inside [0, size)? */
static bool inside(int64_t start, int64_t step, int64_t count, int64_t size) {
    if (count <= 0) return count == 0;
    if (step == 0 || start < 0 || start >= size) return false;
    const int64_t last = size_add(size_mul(count - 1, step), start);
    return last >= 0 && last < size;
}

/* --- StridedSlice ------------------------------------------------------------------------------------------------- */

static status infer_slice(graph *g, node *n) {
    const int64_t *starts, *counts, *steps;
    shape s;

    TRY(read_box(g, n, "starts", &starts));
    TRY(read_box(g, n, "counts", &counts));
    TRY(read_box(g, n, "steps", &steps));
    s = shape_of(n->in[0]->shape.rank, counts);
    for (int i = 0; i < s.rank; i++)
        if (!inside(starts[i], steps[i], counts[i], n->in[0]->shape.dim[i]))
            return fail(g->c, E_SHAPE, "a slice reaches outside axis %d, whose size is %" PRId64, i,
                        n->in[0]->shape.dim[i]);
    return set_out(g, n, 0, n->in[0]->type, &s);
}

/* A slice of a slice is one slice: forward nothing changes, backward the middle gradient is never written. */
static status simplify_slice(graph *g, const node *n, value **out) {
    const node *inner = n->in[0]->def;
    const int64_t *start, *step, *inner_start, *inner_step;
    int64_t from[MAX_RANK] = {0}, by[MAX_RANK] = {0};

    if (!inner || inner->op != n->op) return OK;
    TRY(read_box(g, n, "starts", &start));
    TRY(read_box(g, n, "steps", &step));
    TRY(read_box(g, inner, "starts", &inner_start));
    TRY(read_box(g, inner, "steps", &inner_step));
    for (int i = 0; i < n->out[0]->shape.rank; i++) {
        from[i] = inner_start[i] + start[i] * inner_step[i];
        by[i] = step[i] * inner_step[i];
    }
    return emit_slice(g, inner->in[0], from, &n->out[0]->shape, by, out);
}

static status grad_slice(graph *g, const node *n, value *const dy[], value *dx[]) {
    const int64_t *start, *step;
    TRY(read_box(g, n, "starts", &start));
    TRY(read_box(g, n, "steps", &step));
    return emit_place(g, dy[0], NULL, start, &n->in[0]->shape, step, &dx[0]);
}

static status view_slice(ctx *c, const node *n, const tensor *in, tensor *out, int64_t *offset, bool *possible) {
    const int64_t *start = zeros, *step = ones;

    (void)c;
    node_ints(n, "starts", &start);
    node_ints(n, "steps", &step);
    *offset = 0;
    for (int i = 0; i < in->shape.rank; i++) {
        out->stride[i] = in->stride[i] * step[i];
        if (tensor_count(out)) *offset += in->stride[i] * start[i];
    }
    *possible = true;
    return OK;
}

/* --- Place -------------------------------------------------------------------------------------------------------- */

static status infer_place(graph *g, node *n) {
    const int64_t *starts, *dims, *steps;
    shape s;

    TRY(read_box(g, n, "starts", &starts));
    TRY(read_box(g, n, "shape", &dims));
    TRY(read_box(g, n, "steps", &steps));
    TRY(same_types(g, n, 0));
    s = shape_of(n->in[0]->shape.rank, dims);
    for (int i = 0; i < s.rank; i++)
        if (!inside(starts[i], steps[i], n->in[0]->shape.dim[i], s.dim[i]))
            return fail(g->c, E_SHAPE, "axis %d of size %" PRId64 " has no place in a size of %" PRId64, i,
                        n->in[0]->shape.dim[i], s.dim[i]);
    if (node_in(n, 1) && shape_count(&n->in[1]->shape) != 1)
        return fail(g->c, E_SHAPE, "the value to pad with is not one number");
    return set_out(g, n, 0, n->in[0]->type, &s);
}

static status grad_place(graph *g, const node *n, value *const dy[], value *dx[]) {
    const int64_t *start, *step, axes[MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    value *part, *hole;

    TRY(read_box(g, n, "starts", &start));
    TRY(read_box(g, n, "steps", &step));
    TRY(emit_slice(g, dy[0], start, &n->in[0]->shape, step, &part));
    dx[0] = part;
    if (!need(n, 1)) return OK;
    TRY(emit_place(g, part, NULL, start, &dy[0]->shape, step, &hole));
    TRY(emit(g, &hole, "Sub", dy[0], hole));
    TRY(emit_reduce(g, "ReduceSum", hole, hole->shape.rank, axes, false, &hole));
    return emit_reshape(g, hole, &n->in[1]->shape, &dx[1]);
}

/* Axis by axis, what lies before and behind the box is filled; the box that is left takes x. Nothing is written
 * twice, unless a step leaves gaps. */
static status place_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0];
    const int64_t *start = zeros, *step = ones;
    const uint64_t zero = 0;
    const void *filler = k->n_in > 1 && tensor_present(&k->in[1]) ? k->in[1].data : &zero;
    tensor box = k->out[0], before, behind;

    (void)c;
    node_ints(k->node, "starts", &start);
    node_ints(k->node, "steps", &step);
    for (int i = 0; i < box.shape.rank; i++) {
        int64_t count = x->shape.dim[i], size = box.shape.dim[i], first = start[i], last, by = step[i];
        if (count == 0) {
            fill_elements(&box, filler);
            return OK;
        }
        last = first + (count - 1) * by;
        if (by < 0) {
            int64_t swap = first;
            first = last;
            last = swap;
        }
        before = tensor_slice(&box, i, 0, first, 1);
        behind = tensor_slice(&box, i, last + 1, size - last - 1, 1);
        fill_elements(&before, filler);
        fill_elements(&behind, filler);
        box = tensor_slice(&box, i, first, last - first + 1, 1);
        if (by > 1 || by < -1) fill_elements(&box, filler);
        box = tensor_slice(&box, i, by < 0 ? last - first : 0, count, by);
    }
    copy_elements(&box, x);
    return OK;
}

/* --- Slice -------------------------------------------------------------------------------------------------------- */

/* Python's rules: negative positions count from the end, and everything is clamped to the axis. */
static int64_t slice_axis(int64_t size, int64_t *start, int64_t end, int64_t step) {
    int64_t low = step < 0 ? -1 : 0, high = step < 0 ? size - 1 : size;

    *start = clamp(*start < 0 ? *start + size : *start, low, high);
    end = clamp(end < 0 ? end + size : end, low, high);
    if (step > 0) return end > *start ? (end - *start - 1) / step + 1 : 0;
    return end < *start ? (*start - end - 1) / -step + 1 : 0;
}

/* `axes` and `steps` may be NULL: the first axes, step 1. */
static status slice_axes(graph *g, const node *n, int count, const int64_t *starts, const int64_t *ends,
                         const int64_t *axes, const int64_t *steps, value **out) {
    int64_t start[MAX_RANK] = {0}, step[MAX_RANK];
    bool seen[MAX_RANK] = {false};
    shape counts = n->in[0]->shape;
    int axis;

    memcpy(step, ones, sizeof step);
    for (int i = 0; i < count; i++) {
        TRY(shape_axis(g->c, axes ? axes[i] : i, counts.rank, &axis));
        if (counts.rank == 0 || seen[axis])
            return fail(g->c, E_SHAPE, "Slice of axis %d of a tensor of rank %d, or twice of it", axis, counts.rank);
        if (steps && steps[i] == 0) return fail(g->c, E_INVALID, "Slice with a step of 0 along axis %d", axis);
        seen[axis] = true;
        start[axis] = starts[i];
        if (steps) step[axis] = clamp(steps[i], -(INT64_C(1) << 60), INT64_C(1) << 60);
        counts.dim[axis] = slice_axis(counts.dim[axis], &start[axis], ends[i], step[axis]);
    }
    return emit_slice(g, n->in[0], start, &counts, step, out);
}

static status lower_slice_1(graph *g, const node *n, value **out) {
    const int64_t *starts = NULL, *ends = NULL, *axes = NULL;
    int count = node_ints(n, "starts", &starts), n_axes = node_ints(n, "axes", &axes);

    TRY(require(g, n, 0));
    if (count < 0 || node_ints(n, "ends", &ends) != count || (n_axes >= 0 && n_axes != count))
        return fail(g->c, E_INVALID, "the starts, ends and axes of Slice differ in length");
    return slice_axes(g, n, count, starts, ends, n_axes >= 0 ? axes : NULL, NULL, out);
}

static status lower_slice(graph *g, const node *n, value **out) {
    static const char *const names[] = {"the starts of Slice", "the ends of Slice", "the axes of Slice",
                                        "the steps of Slice"};
    const int64_t *part[4] = {NULL};
    int count = 0, length;

    for (int i = 0; i < 3; i++) TRY(require(g, n, i));
    for (int i = 0; i < 4; i++) {
        if (i > 1 && !node_in(n, i + 1)) continue;
        TRY(value_ints(g, n->in[i + 1], names[i], &length, &part[i]));
        if (i && length != count)
            return fail(g->c, E_INVALID, "%s are %d, but there are %d starts", names[i], length, count);
        count = length;
    }
    return slice_axes(g, n, count, part[0], part[1], part[2], part[3], out);
}

/* --- Split -------------------------------------------------------------------------------------------------------- */

/* Sizes given, or as equal as they can be: `parts` of them, the last one smaller. */
static status lower_split(graph *g, const node *n, value **out) {
    const int64_t *sizes = NULL;
    int64_t total, at = 0, chunk = 0, parts = node_int(n, "num_outputs");
    int axis, count = node_ints(n, "split", &sizes);

    TRY(require(g, n, 0));
    TRY(shape_axis(g->c, node_int(n, "axis"), n->in[0]->shape.rank, &axis));
    if (n->in[0]->shape.rank == 0) return fail(g->c, E_SHAPE, "Split of a tensor of rank 0");
    total = n->in[0]->shape.dim[axis];
    if (count < 0 && node_in(n, 1)) TRY(value_ints(g, n->in[1], "the sizes given to Split", &count, &sizes));
    if (count >= 0 && count != n->n_out)
        return fail(g->c, E_INVALID, "Split has %d sizes for %d results", count, n->n_out);
    if (count < 0) {
        if (parts && parts != n->n_out)
            return fail(g->c, E_INVALID, "Split into %" PRId64 " parts has %d results", parts, n->n_out);
        if (!parts && total % n->n_out != 0)
            return fail(g->c, E_SHAPE, "Split of %" PRId64 " elements into %d equal parts", total, n->n_out);
        chunk = (total + n->n_out - 1) / n->n_out;
    }
    for (int i = 0; i < n->n_out; i++) {
        int64_t size = sizes ? sizes[i] : clamp(total - at, 0, chunk);
        if (size < 0 || size > total - at)
            return fail(g->c, E_SHAPE, "the sizes given to Split do not add up to %" PRId64, total);
        TRY(emit_slice_axis(g, n->in[0], axis, at, size, &out[i]));
        at += size;
    }
    return at == total ? OK : fail(g->c, E_SHAPE, "the sizes given to Split do not add up to %" PRId64, total);
}

kernel_fn place_cuda; /* cuda/kernels/move.cu */

/* --- records ------------------------------------------------------------------------------------------------------ */

/* clang-format off */
const op_def slice_ops[] = {
    {ONNX("Slice", 1, 1, 1, 1, ANY_TYPE),
     .attrs = NODE_ATTRS(NO_DEFAULT("starts", INTS), NO_DEFAULT("ends", INTS), NO_DEFAULT("axes", INTS)),
     .lower = lower_slice_1},
    {ONNX("Slice", 10, 3, 5, 1, ANY_TYPE), .lower = lower_slice},
    {ONNX("Split", 2, 1, 1, VARIADIC, ANY_TYPE), .attrs = NODE_ATTRS(INT("axis", 0), NO_DEFAULT("split", INTS)),
     .lower = lower_split},
    {ONNX("Split", 13, 1, 2, VARIADIC, ANY_TYPE), .attrs = NODE_ATTRS(INT("axis", 0)), .lower = lower_split},
    {ONNX("Split", 18, 1, 2, VARIADIC, ANY_TYPE), .attrs = NODE_ATTRS(INT("axis", 0), NO_DEFAULT("num_outputs", INT)),
     .lower = lower_split},
    {OURS("StridedSlice", 1, 1, 1, ANY_TYPE), .flags = STRIDED,
     .attrs = NODE_ATTRS(NO_DEFAULT("starts", INTS), NO_DEFAULT("counts", INTS), NO_DEFAULT("steps", INTS)),
     .infer = infer_slice,
     .simplify = simplify_slice, .grad = grad_slice, .view = view_slice, .cpu = view_cpu, .cuda = view_cuda},
    {OURS("Place", 1, 2, 1, ANY_TYPE), .plain = ALL_OPERANDS, .flags = STRIDED,
     .attrs = NODE_ATTRS(NO_DEFAULT("starts", INTS), NO_DEFAULT("shape", INTS), NO_DEFAULT("steps", INTS)),
     .infer = infer_place,
     .grad = grad_place, .cpu = place_cpu, .cuda = place_cuda},
    {0},
};
/* clang-format on */
