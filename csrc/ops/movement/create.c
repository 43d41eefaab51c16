/* create.c -- tensors made from attributes and shapes.
 *
 * In a specialised graph every shape is a number, so Constant, Shape and Size are constants, and ConstantOfShape is
 * one number seen with strides of 0. Range and EyeLike are computed, at planning time when they are small. */
#include "core/ints.h"
#include "core/size.h"
#include "ops/movement/move.h"

#include <inttypes.h>
#include <math.h>

/* --- Constant ----------------------------------------------------------------------------------------------------- */

static status lower_constant(graph *g, const node *n, value **out) {
    const attr *a;
    float *floats;

    if ((a = node_attr(n, "value")) != NULL) return graph_add_constant(g, a->t->type, &a->t->shape, a->t->data, out);
    if ((a = node_attr(n, "value_int")) != NULL) return graph_add_constant(g, I64, &SCALAR, &a->i, out);
    if ((a = node_attr(n, "value_float")) != NULL) return graph_scalar(g, F32, a->f, out);
    if ((a = node_attr(n, "value_ints")) != NULL) return graph_ints(g, a->count, a->ints, out);
    if ((a = node_attr(n, "value_floats")) == NULL)
        return fail(g->c, E_UNSUPPORTED, "a Constant that is neither a tensor nor numbers");
    TRY(NEW(g->c, floats, a->count));
    for (int i = 0; i < a->count; i++) floats[i] = (float)a->floats[i];
    return graph_add_constant(g, F32, &SHAPE(a->count), floats, out);
}

/* --- ConstantOfShape ---------------------------------------------------------------------------------------------- */

static status lower_constant_of_shape(graph *g, const node *n, value **out) {
    const attr *a = node_attr(n, "value");
    const int64_t *dims;
    value *number;
    shape s = {0};

    TRY(require(g, n, 0));
    TRY(value_ints(g, n->in[0], "the shape given to ConstantOfShape", &s.rank, &dims));
    if (a && tensor_count(a->t) != 1) return fail(g->c, E_INVALID, "the value of ConstantOfShape is not one number");
    if (s.rank > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "ConstantOfShape of rank %d; at most %d", s.rank, MAX_RANK);
    for (int i = 0; i < s.rank; i++) s.dim[i] = dims[i];
    TRY(shape_check(g->c, &s));
    if (a) TRY(graph_add_constant(g, a->t->type, &SCALAR, a->t->data, &number));
    else TRY(graph_scalar(g, F32, 0, &number));
    return emit_expand(g, number, &s, out);
}

/* --- Shape, Size -------------------------------------------------------------------------------------------------- */

static status lower_shape(graph *g, const node *n, value **out) {
    const shape *s;
    int64_t start = node_int(n, "start"), end;

    TRY(require(g, n, 0));
    s = &n->in[0]->shape;
    end = node_has(n, "end") ? node_int(n, "end") : s->rank;
    start = clamp(start < 0 ? start + s->rank : start, 0, s->rank);
    end = clamp(end < 0 ? end + s->rank : end, start, s->rank);
    return graph_ints(g, (int)(end - start), s->dim + start, out);
}

static status lower_size(graph *g, const node *n, value **out) {
    int64_t count;
    TRY(require(g, n, 0));
    count = shape_count(&n->in[0]->shape);
    return graph_add_constant(g, I64, &SCALAR, &count, out);
}

/* --- Range -------------------------------------------------------------------------------------------------------- */

static status range_length(graph *g, const node *n, int64_t *length) {
    const value *start = n->in[0], *limit = n->in[1], *delta = n->in[2];
    dtype t = start->type;

    if (dtype_is_float(t)) {
        double by = dtype_get(t, delta->data, 0);
        double count = ceil((dtype_get(t, limit->data, 0) - dtype_get(t, start->data, 0)) / by);
        if (by == 0 || !isfinite(count)) return fail(g->c, E_INVALID, "Range of a length that is not a number");
        *length = count <= 0 ? 0 : count >= 0x1p48 ? INT64_C(1) << 48 : (int64_t)count;
        return OK;
    }
    const int64_t by = dtype_get_int(t, delta->data, 0), from = dtype_get_int(t, start->data, 0);
    const int64_t to = dtype_get_int(t, limit->data, 0), span = from == INT64_MIN ? to : size_add(to, -from);
    if (by == 0) return fail(g->c, E_INVALID, "Range with a step of 0");
    if (from == INT64_MIN || span == INT64_MAX || span == INT64_MIN)
        return fail(g->c, E_INVALID, "Range of more numbers than fit");
    *length = (span > 0) != (by > 0) || span == 0 ? 0 : by == INT64_MIN ? 1 : (span - (by > 0 ? 1 : -1)) / by + 1;
    return OK;
}

static status infer_range(graph *g, node *n) {
    int64_t length = 0;

    for (int i = 0; i < 3; i++) {
        TRY(require(g, n, i));
        TRY(value_known(g, n->in[i], "a bound of Range"));
        if (shape_count(&n->in[i]->shape) != 1)
            return fail(g->c, E_SHAPE, "the bounds of Range are not single numbers");
    }
    TRY(same_types(g, n, 0));
    TRY(range_length(g, n, &length));
    return set_out(g, n, 0, n->in[0]->type, &SHAPE(length));
}

static status range_cpu(ctx *c, const call *k) {
    const tensor *start = &k->in[0], *delta = &k->in[2];
    dtype t = start->type;
    void *out = k->out[0].data;
    int64_t count = tensor_count(&k->out[0]);

    (void)c;
    if (dtype_is_float(t)) {
        double from = dtype_get(t, start->data, 0), by = dtype_get(t, delta->data, 0);
        for (int64_t i = 0; i < count; i++) dtype_set_value(t, out, i, from + (double)i * by);
    } else {
        int64_t from = dtype_get_int(t, start->data, 0), by = dtype_get_int(t, delta->data, 0);
        for (int64_t i = 0; i < count; i++) dtype_set_int(t, out, i, from + i * by);
    }
    return OK;
}

/* --- EyeLike ------------------------------------------------------------------------------------------------------ */

static status infer_eye(graph *g, node *n) {
    dtype t;

    TRY(require(g, n, 0));
    t = node_has(n, "dtype") ? dtype_from_onnx((int)node_int(n, "dtype")) : n->in[0]->type;
    if (t == DT_NONE) return fail(g->c, E_UNSUPPORTED, "EyeLike of an element type that is not supported");
    if (n->in[0]->shape.rank != 2)
        return fail(g->c, E_SHAPE, "EyeLike of a tensor of rank %d, not 2", n->in[0]->shape.rank);
    return set_out(g, n, 0, t, &n->in[0]->shape);
}

static status eye_cpu(ctx *c, const call *k) {
    const tensor *y = &k->out[0];
    int64_t rows = y->shape.dim[0], cols = y->shape.dim[1], shift = node_int(k->node, "k");
    const uint64_t zero = 0;

    (void)c;
    fill_elements(y, &zero);
    shift = clamp(shift, -rows, cols);
    for (int64_t i = shift < 0 ? -shift : 0; i < rows && i + shift < cols; i++)
        dtype_set_int(y->type, y->data, i * cols + i + shift, 1);
    return OK;
}

/* --- records ------------------------------------------------------------------------------------------------------ */

kernel_fn range_cuda, eye_cuda; /* cuda/kernels/create.cu */

/* clang-format off */
const op_def create_ops[] = {
    {ONNX("Constant", 1, 0, 0, 1, 0),
     .attrs = NODE_ATTRS(NO_DEFAULT("value", TENSOR), NO_DEFAULT("value_int", INT),
                         NO_DEFAULT("value_float", FLOAT), NO_DEFAULT("value_ints", INTS),
                         NO_DEFAULT("value_floats", FLOATS)),
     .lower = lower_constant},
    {ONNX("ConstantOfShape", 9, 1, 1, 1, INTEGERS), .attrs = NODE_ATTRS(NO_DEFAULT("value", TENSOR)),
     .lower = lower_constant_of_shape},
    {ONNX("Shape", 1, 1, 1, 1, ANY_TYPE), .attrs = NODE_ATTRS(INT("start", 0), NO_DEFAULT("end", INT)),
     .lower = lower_shape},
    {ONNX("Size", 1, 1, 1, 1, ANY_TYPE), .lower = lower_size},
    {ONNX("Range", 11, 3, 3, 1, NUMBERS), .plain = ALL_OPERANDS, .flags = NO_GRAD, .infer = infer_range, .cpu = range_cpu, .cuda = range_cuda},
    {ONNX("EyeLike", 9, 1, 1, 1, ANY_TYPE), .plain = ALL_OPERANDS, .flags = NO_GRAD | STRIDED,
     .attrs = NODE_ATTRS(INT("k", 0), NO_DEFAULT("dtype", INT)), .infer = infer_eye, .cpu = eye_cpu, .cuda = eye_cuda},
    {0},
};
/* clang-format on */
