/* common.c -- what the families share: inference of the usual shapes, and the vocabulary of gradient rules. */
#include "ops/op.h"

#include <string.h>

/* --- inference ---------------------------------------------------------------------------------------------------- */

status require(graph *g, const node *n, int i) {
    return node_in(n, i) ? OK : fail(g->c, E_INVALID, "operand %d of %s is missing", i, n->op->name);
}

status set_out(graph *g, node *n, int i, dtype type, const shape *s) {
    if (i >= n->n_out || !n->out[i]) return OK;
    n->out[i]->type = type;
    n->out[i]->shape = *s;
    return shape_check(g->c, s);
}

status same_types(graph *g, const node *n, int first) {
    const value *a = NULL;
    for (int i = first; i < n->n_in; i++) {
        const value *b = n->in[i];
        if (a && b && a->type != b->type)
            return fail(g->c, E_TYPE, "operands of %s have different types, %s and %s", n->op->name,
                        dtype_name(a->type), dtype_name(b->type));
        if (!a) a = b;
    }
    return OK;
}

status infer_same(graph *g, node *n) {
    TRY(require(g, n, 0));
    return set_out(g, n, 0, n->in[0]->type, &n->in[0]->shape);
}

status infer_broadcast(graph *g, node *n) {
    shape s = SCALAR;

    TRY(require(g, n, 0));
    TRY(same_types(g, n, 0));
    for (int i = 0; i < n->n_in; i++)
        if (n->in[i]) TRY(shape_broadcast(g->c, &s, &n->in[i]->shape, &s));
    return set_out(g, n, 0, n->in[0]->type, &s);
}

/* --- gradient vocabulary ------------------------------------------------------------------------------------------- */

status sum_to(graph *g, value *dy, const shape *s, value **out) {
    int64_t axes[MAX_RANK];
    int n = 0, shift = dy->shape.rank - s->rank;

    for (int i = 0; i < dy->shape.rank; i++)
        if (i < shift || (s->dim[i - shift] == 1 && dy->shape.dim[i] != 1)) axes[n++] = i;
    if (n) TRY(emit_reduce(g, "ReduceSum", dy, n, axes, true, &dy));
    return emit_reshape(g, dy, s, out);
}

status zeros_like(graph *g, const value *v, value **out) { return graph_full(g, v->type, &v->shape, 0, out); }

status emit_scaled(graph *g, value *x, double factor, value **out) {
    value *f;
    if (factor == 1) {
        *out = x;
        return OK;
    }
    TRY(graph_scalar(g, x->type, factor, &f));
    return emit(g, out, "Mul", x, f);
}

status emit_cast(graph *g, value *x, dtype type, value **out) {
    if (x->type == type) {
        *out = x;
        return OK;
    }
    return emit_with(g, out, "Cast", NODE_ATTRS(INT("to", dtype_table[type].onnx)), x);
}

status emit_reshape(graph *g, value *x, const shape *s, value **out) {
    value *dims;
    if (shape_equal(&x->shape, s)) {
        *out = x;
        return OK;
    }
    TRY(graph_ints(g, s->rank, s->dim, &dims));
    return emit_with(g, out, "Reshape", NODE_ATTRS(INT("allowzero", 1)), x, dims);
}

status emit_transpose(graph *g, value *x, const int *perm, value **out) {
    int64_t p[MAX_RANK] = {0};
    for (int i = 0; i < x->shape.rank; i++) p[i] = perm[i];
    return emit_with(g, out, "Transpose", NODE_ATTRS(INTS("perm", x->shape.rank, p)), x);
}

status emit_reduce(graph *g, const char *op, value *x, int n_axes, const int64_t *axes, bool keep, value **out) {
    value *a;
    TRY(graph_ints(g, n_axes, axes, &a));
    return emit_with(g, out, op, NODE_ATTRS(INT("keepdims", keep)), x, a);
}
