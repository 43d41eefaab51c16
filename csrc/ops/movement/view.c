/* view.c -- operators that only look at the same elements differently.
 *
 * Identity, Reshape, Flatten, Squeeze, Unsqueeze, Transpose, Expand; slices have a file of their own. All of them
 * cost nothing where the planner can describe the result as strides over the operand's memory; Contiguous is the
 * copy it makes where a reader cannot take strides. Squeeze, Unsqueeze and Flatten become Reshape, so there are
 * three operators to reason about: Reshape (order of elements kept), Transpose (axes permuted), Expand (repeated).
 * Backward needs shapes only. */
#include "core/size.h"
#include "ops/movement/move.h"

#include <inttypes.h>
#include <string.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

status view_cpu(ctx *c, const call *k) {
    tensor from = k->in[0], to = k->out[0], seen = {.type = to.type, .shape = to.shape};
    int64_t offset = 0;
    bool possible = false;

    TRY(k->node->op->view(c, k->node, &k->in[0], &seen, &offset, &possible));
    if (possible) {
        seen.data = (char *)from.data + offset * (int64_t)dtype_size(from.type);
        copy_elements(&to, &seen);
    } else {
        to.shape = from.shape;
        stride_contiguous(&to.shape, to.stride);
        copy_elements(&to, &from);
    }
    return OK;
}

static status contiguous_cpu(ctx *c, const call *k) {
    (void)c;
    copy_elements(&k->out[0], &k->in[0]);
    return OK;
}

static status pass_gradient(graph *g, const node *n, value *const dy[], value *dx[]) {
    (void)g, (void)n;
    dx[0] = dy[0];
    return OK;
}

/* The value goes on, its gradient does not: detach(), no_grad(). */
static status simplify_stop(graph *g, const node *n, value **out) {
    (void)g;
    if (!n->in[0]->needs_grad) out[0] = n->in[0];
    return OK;
}

/* Sloped(y, x, slope): y, from where a gradient goes to x, too: times the slope, of y's shape. For functions whose gradient
 * PyTorch defines where the derivative of a composition is something else (0 * infinity). */
static status infer_sloped(graph *g, node *n) {
    shape s;
    for (int i = 0; i < 3; i++) TRY(require(g, n, i));
    TRY(same_types(g, n, 0));
    TRY(shape_broadcast(g->c, &n->in[1]->shape, &n->in[2]->shape, &s));
    if (!shape_equal(&s, &n->in[0]->shape)) {
        char found[SHAPE_TEXT], wanted[SHAPE_TEXT];
        return fail(g->c, E_SHAPE, "the slope of Sloped is of shape %s, its value of %s", shape_text(&s, found),
                    shape_text(&n->in[0]->shape, wanted));
    }
    return set_out(g, n, 0, n->in[0]->type, &n->in[0]->shape);
}

static status simplify_sloped(graph *g, const node *n, value **out) {
    (void)g;
    if (!n->in[1]->needs_grad) out[0] = n->in[0];
    return OK;
}

static status grad_sloped(graph *g, const node *n, value *const dy[], value *dx[]) {
    dx[0] = dy[0];
    return need(n, 1) ? emit(g, &dx[1], "Mul", dy[0], n->in[2]) : OK;
}

static status view_same(ctx *c, const node *n, const tensor *in, tensor *out, int64_t *offset, bool *possible) {
    (void)c, (void)n;
    memcpy(out->stride, in->stride, sizeof out->stride);
    *offset = 0;
    *possible = true;
    return OK;
}

/* x itself, unless one of these dimensions is 1: what was captured for others does not hold then. */
static status lower_not_one(graph *g, const node *n, value **out) {
    const int64_t *axes;
    int count = node_ints(n, "axes", &axes), axis;

    TRY(require(g, n, 0));
    for (int i = 0; i < count; i++) {
        TRY(shape_axis(g->c, axes[i], n->in[0]->shape.rank, &axis));
        if (n->in[0]->shape.dim[axis] == 1)
            return fail(g->c, E_SHAPE, "dimension %d is 1, and was not when the module was captured", axis);
    }
    out[0] = n->in[0];
    return OK;
}

static status lower_identity(graph *g, const node *n, value **out) {
    TRY(require(g, n, 0));
    out[0] = n->in[0];
    return OK;
}

/* --- Reshape ------------------------------------------------------------------------------------------------------ */

/* 0 keeps the operand's dimension (unless allowzero), one -1 takes what is left. */
static status infer_reshape(graph *g, node *n) {
    const value *x = n->in[0];
    const int64_t *dims;
    int64_t known = 1, total;
    shape s = {0};
    int free = -1;
    char from[SHAPE_TEXT], to[SHAPE_TEXT];

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(value_ints(g, n->in[1], "the shape given to Reshape", &s.rank, &dims));
    if (s.rank > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "Reshape to rank %d; at most %d", s.rank, MAX_RANK);
    total = shape_count(&x->shape);
    for (int i = 0; i < s.rank; i++) {
        s.dim[i] = dims[i];
        if (dims[i] == 0 && !node_int(n, "allowzero")) {
            if (i >= x->shape.rank) return fail(g->c, E_SHAPE, "Reshape copies axis %d, which is not there", i);
            s.dim[i] = x->shape.dim[i];
        }
        if (dims[i] == -1) {
            if (free >= 0) return fail(g->c, E_SHAPE, "Reshape has two dimensions to find out (-1)");
            free = i;
        } else if (s.dim[i] < 0) {
            return fail(g->c, E_SHAPE, "Reshape to a dimension of %" PRId64, dims[i]);
        } else {
            known = size_mul(known, s.dim[i]);
        }
    }
    if (free >= 0) {
        if (known == 0 || total % known != 0)
            return fail(g->c, E_SHAPE, "Reshape of %s to %s: no size fits the dimension -1",
                        shape_text(&x->shape, from), shape_text(&s, to));
        s.dim[free] = total / known;
    } else if (known != total) {
        return fail(g->c, E_SHAPE, "Reshape of %s (%" PRId64 " elements) to %s (%" PRId64 ")",
                    shape_text(&x->shape, from), total, shape_text(&s, to), known);
    }
    return set_out(g, n, 0, x->type, &s);
}

static bool dims_are(const value *v, const shape *s) {
    return v->type == I64 && memcmp(v->data, s->dim, (size_t)s->rank * sizeof s->dim[0]) == 0;
}

/* One form for one meaning: the dimensions written out, a Reshape of a Reshape in one step. */
static status simplify_reshape(graph *g, const node *n, value **out) {
    const shape *to = &n->out[0]->shape;
    value *x = n->in[0];

    while (x->def && strcmp(x->def->op->name, "Reshape") == 0) x = x->def->in[0];
    if (x == n->in[0] && !shape_equal(&x->shape, to) && node_int(n, "allowzero") && dims_are(n->in[1], to)) return OK;
    return emit_reshape(g, x, to, out);
}

static status grad_reshape(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_reshape(g, dy[0], &n->in[0]->shape, &dx[0]);
}

/* The operand as runs of axes over which elements are equally spaced; each run is cut into new axes from the right. */
static status view_reshape(ctx *c, const node *n, const tensor *in, tensor *out, int64_t *offset, bool *possible) {
    int64_t size[MAX_RANK + 1] = {1}, spacing[MAX_RANK + 1] = {1}, left, stride;
    int run = 0;

    (void)c, (void)n;
    *offset = 0;
    *possible = true;
    stride_contiguous(&out->shape, out->stride);
    if (tensor_count(in) == 0) return OK;
    for (int i = 0; i < in->shape.rank; i++) {
        int64_t d = in->shape.dim[i], s = in->stride[i];
        if (d == 1) continue;
        if (size[run] != 1 && spacing[run] != d * s) size[++run] = 1;
        size[run] *= d;
        spacing[run] = s;
    }
    left = size[run];
    stride = spacing[run];
    for (int i = out->shape.rank - 1; i >= 0; i--) {
        int64_t d = out->shape.dim[i];
        if (d == 1) continue;
        if (left == 1) {
            left = size[--run];
            stride = spacing[run];
        }
        if (left % d != 0) {
            *possible = false;
            return OK;
        }
        out->stride[i] = stride;
        stride *= d;
        left /= d;
    }
    return OK;
}

/* --- Flatten, Squeeze, Unsqueeze ---------------------------------------------------------------------------------- */

static status lower_flatten(graph *g, const node *n, value **out) {
    const shape *s;
    int64_t axis = node_int(n, "axis");

    TRY(require(g, n, 0));
    s = &n->in[0]->shape;
    if (axis < -s->rank || axis > s->rank)
        return fail(g->c, E_SHAPE, "Flatten at axis %" PRId64 " of a tensor of rank %d", axis, s->rank);
    if (axis < 0) axis += s->rank;
    shape flat = SHAPE(shape_span(s, 0, (int)axis), shape_span(s, (int)axis, s->rank));
    return emit_reshape(g, n->in[0], &flat, out);
}

/* Axes of Squeeze and Unsqueeze: an attribute, an operand since opset 13. -1: none given. */
static status read_axes(graph *g, const node *n, const char *what, int *count, const int64_t **axes) {
    *count = node_ints(n, "axes", axes);
    return *count < 0 && node_in(n, 1) ? value_ints(g, n->in[1], what, count, axes) : OK;
}

/* Marks axes of a tensor of rank `rank`. */
static status mark_axes(graph *g, const node *n, int count, const int64_t *axes, int rank, bool marked[MAX_RANK]) {
    int axis;

    for (int i = 0; i < count; i++) {
        TRY(shape_axis(g->c, axes[i], rank, &axis));
        if (marked[axis]) return fail(g->c, E_SHAPE, "%s names axis %d twice", n->op->name, axis);
        marked[axis] = true;
    }
    return OK;
}

static status lower_squeeze(graph *g, const node *n, value **out) {
    bool gone[MAX_RANK] = {false};
    const int64_t *axes = NULL;
    const shape *s;
    shape r = {0};
    int count;

    TRY(require(g, n, 0));
    s = &n->in[0]->shape;
    TRY(read_axes(g, n, "the axes of Squeeze", &count, &axes));
    if (s->rank) TRY(mark_axes(g, n, count, axes, s->rank, gone));
    for (int i = 0; i < s->rank; i++) {
        if (gone[i] && s->dim[i] != 1)
            return fail(g->c, E_SHAPE, "Squeeze of axis %d, whose size is %" PRId64, i, s->dim[i]);
        if (!gone[i] && (count >= 0 || s->dim[i] != 1)) r.dim[r.rank++] = s->dim[i];
    }
    return emit_reshape(g, n->in[0], &r, out);
}

static status lower_unsqueeze(graph *g, const node *n, value **out) {
    bool added[MAX_RANK] = {false};
    const int64_t *axes = NULL;
    const shape *s;
    shape r;
    int count;

    TRY(require(g, n, 0));
    s = &n->in[0]->shape;
    TRY(read_axes(g, n, "the axes of Unsqueeze", &count, &axes));
    if (count < 0) return fail(g->c, E_INVALID, "Unsqueeze without axes");
    if (count > MAX_RANK - s->rank)
        return fail(g->c, E_UNSUPPORTED, "Unsqueeze to rank %d; at most %d", s->rank + count, MAX_RANK);
    r = (shape){.rank = s->rank + count};
    TRY(mark_axes(g, n, count, axes, r.rank, added));
    for (int i = 0, from = 0; i < r.rank; i++) r.dim[i] = added[i] ? 1 : s->dim[from++];
    return emit_reshape(g, n->in[0], &r, out);
}

/* --- Transpose ---------------------------------------------------------------------------------------------------- */

/* The permutation, reversed axes when none is given. */
static void read_perm(const node *n, int rank, int perm[MAX_RANK]) {
    const int64_t *p = NULL;
    int count = node_ints(n, "perm", &p);
    for (int i = 0; i < rank; i++) perm[i] = count == rank ? (int)p[i] : rank - 1 - i;
}

static status infer_transpose(graph *g, node *n) {
    const int64_t *p = NULL;
    int perm[MAX_RANK], count = node_ints(n, "perm", &p), seen = 0;
    shape s;

    TRY(require(g, n, 0));
    s = n->in[0]->shape;
    if (count >= 0 && count != s.rank)
        return fail(g->c, E_SHAPE, "Transpose with %d axes of a tensor of rank %d", count, s.rank);
    for (int i = 0; i < count; i++) {
        if (p[i] < 0 || p[i] >= s.rank || seen & 1 << p[i])
            return fail(g->c, E_INVALID, "the perm of Transpose is not a permutation of its %d axes", count);
        seen |= 1 << p[i];
    }
    read_perm(n, s.rank, perm);
    for (int i = 0; i < s.rank; i++) s.dim[i] = n->in[0]->shape.dim[perm[i]];
    return set_out(g, n, 0, n->in[0]->type, &s);
}

static status simplify_transpose(graph *g, const node *n, value **out) {
    int perm[MAX_RANK], inner[MAX_RANK], rank = n->out[0]->shape.rank;
    const node *def = n->in[0]->def;
    value *x = n->in[0];
    bool same = true;

    read_perm(n, rank, perm);
    if (def && strcmp(def->op->name, "Transpose") == 0) {
        x = def->in[0];
        read_perm(def, rank, inner);
        for (int i = 0; i < rank; i++) perm[i] = inner[perm[i]];
    }
    for (int i = 0; i < rank; i++) same &= perm[i] == i;
    if (same) out[0] = x;
    else if (x != n->in[0] || !node_has(n, "perm")) return emit_transpose(g, x, perm, out);
    return OK;
}

static status grad_transpose(graph *g, const node *n, value *const dy[], value *dx[]) {
    int perm[MAX_RANK], inverse[MAX_RANK], rank = n->in[0]->shape.rank;
    read_perm(n, rank, perm);
    for (int i = 0; i < rank; i++) inverse[perm[i]] = i;
    return emit_transpose(g, dy[0], inverse, &dx[0]);
}

static status view_transpose(ctx *c, const node *n, const tensor *in, tensor *out, int64_t *offset, bool *possible) {
    int perm[MAX_RANK];

    (void)c;
    read_perm(n, in->shape.rank, perm);
    for (int i = 0; i < in->shape.rank; i++) out->stride[i] = in->stride[perm[i]];
    *offset = 0;
    *possible = true;
    return OK;
}

/* --- Expand ------------------------------------------------------------------------------------------------------- */

static status infer_expand(graph *g, node *n) {
    const int64_t *dims;
    shape to = {0};

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(value_ints(g, n->in[1], "the shape given to Expand", &to.rank, &dims));
    if (to.rank > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "Expand to rank %d; at most %d", to.rank, MAX_RANK);
    for (int i = 0; i < to.rank; i++) to.dim[i] = dims[i];
    TRY(shape_check(g->c, &to));
    TRY(shape_broadcast(g->c, &n->in[0]->shape, &to, &to));
    return set_out(g, n, 0, n->in[0]->type, &to);
}

/* Nothing repeated: a Reshape. An Expand of an Expand: one. */
static status simplify_expand(graph *g, const node *n, value **out) {
    const shape *to = &n->out[0]->shape;
    value *x = n->in[0];

    while (x->def && strcmp(x->def->op->name, "Expand") == 0) x = x->def->in[0];
    if (shape_count(&x->shape) == shape_count(to)) return emit_reshape(g, x, to, out);
    if (x == n->in[0] && shape_count(&n->in[1]->shape) == to->rank && dims_are(n->in[1], to)) return OK;
    return emit_expand(g, x, to, out);
}

static status view_expand(ctx *c, const node *n, const tensor *in, tensor *out, int64_t *offset, bool *possible) {
    tensor seen = tensor_expand(in, &out->shape);
    (void)c, (void)n;
    memcpy(out->stride, seen.stride, sizeof out->stride);
    *offset = 0;
    *possible = true;
    return OK;
}

kernel_fn contiguous_cuda; /* cuda/kernels/move.cu */

/* --- records ------------------------------------------------------------------------------------------------------ */

/* clang-format off */
const op_def view_ops[] = {
    {ONNX("Identity", 1, 1, 1, 1, ANY_TYPE), .lower = lower_identity},
    {OURS("StopGradient", 1, 1, 1, ANY_TYPE), .flags = STRIDED | NO_GRAD | IN_MODELS, .infer = infer_same,
     .simplify = simplify_stop, .view = view_same, .cpu = view_cpu, .cuda = view_cuda},
    {OURS("Sloped", 3, 3, 1, FLOATS), .flags = STRIDED | IN_MODELS, .infer = infer_sloped, .simplify = simplify_sloped,
     .grad = grad_sloped, .view = view_same, .cpu = view_cpu, .cuda = view_cuda},
    {OURS("NotOne", 1, 1, 1, ANY_TYPE), .flags = IN_MODELS, .attrs = NODE_ATTRS(NO_DEFAULT("axes", INTS)),
     .lower = lower_not_one},
    {OURS("Contiguous", 1, 1, 1, ANY_TYPE), .plain = OPERAND(0), .flags = STRIDED, .infer = infer_same, .grad = pass_gradient,
     .cpu = contiguous_cpu, .cuda = contiguous_cuda},
    {ONNX("Reshape", 5, 2, 2, 1, ANY_TYPE), .flags = STRIDED, .attrs = NODE_ATTRS(INT("allowzero", 0)),
     .infer = infer_reshape, .simplify = simplify_reshape, .grad = grad_reshape, .view = view_reshape, .cpu = view_cpu, .cuda = view_cuda},
    {ONNX("Flatten", 1, 1, 1, 1, ANY_TYPE), .attrs = NODE_ATTRS(INT("axis", 1)), .lower = lower_flatten},
    {ONNX("Squeeze", 1, 1, 1, 1, ANY_TYPE), .attrs = NODE_ATTRS(NO_DEFAULT("axes", INTS)), .lower = lower_squeeze},
    {ONNX("Squeeze", 13, 1, 2, 1, ANY_TYPE), .lower = lower_squeeze},
    {ONNX("Unsqueeze", 1, 1, 1, 1, ANY_TYPE), .attrs = NODE_ATTRS(NO_DEFAULT("axes", INTS)), .lower = lower_unsqueeze},
    {ONNX("Unsqueeze", 13, 2, 2, 1, ANY_TYPE), .lower = lower_unsqueeze},
    {ONNX("Transpose", 1, 1, 1, 1, ANY_TYPE), .flags = STRIDED, .attrs = NODE_ATTRS(NO_DEFAULT("perm", INTS)),
     .infer = infer_transpose, .simplify = simplify_transpose, .grad = grad_transpose, .view = view_transpose,
     .cpu = view_cpu, .cuda = view_cuda},
    {ONNX("Expand", 8, 2, 2, 1, ANY_TYPE), .flags = STRIDED, .infer = infer_expand, .simplify = simplify_expand,
     .grad = pass_gradient, .view = view_expand, .cpu = view_cpu, .cuda = view_cuda},
    {0},
};
/* clang-format on */
