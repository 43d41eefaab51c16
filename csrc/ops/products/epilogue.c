/* epilogue.c -- products with what is computed on the way into the result, or beside it, as cuBLASLt's epilogues do:
 *
 *     MatMulGelu      y = GeluTanh(x)        x = alpha a b + c, the second result, where something else looks at it
 *     MatMulGeluGrad  dx = GeluTanhGrad(alpha a b, x), and the totals of dx's columns
 *     MatMulTotals    y = a b of two matrices, and the totals over the inner axis: of a's rows, or with `right` of b's
 *                     columns; `wide`: both are float32 where a and b are 16-bit floats
 *
 * Only graphs that run on a GPU have them (passes/product_epilogue.c), after the gradient. */
#include "ops/products/matmul.h"

static status infer_gelu(graph *g, node *n) {
    TRY(infer_matmul_bias(g, n));
    return set_out(g, n, 1, n->out[0]->type, &n->out[0]->shape);
}

static status infer_gelu_grad(graph *g, node *n) {
    const value *x = n->in[2];
    char ty[SHAPE_TEXT], tx[SHAPE_TEXT];

    TRY(infer_matmul(g, n));
    const shape *y = &n->out[0]->shape;
    if (!shape_equal(&x->shape, y) || y->rank == 0)
        return fail(g->c, E_SHAPE, "%s of a gradient of shape %s at %s", n->op->name, shape_text(y, ty),
                    shape_text(&x->shape, tx));
    return set_out(g, n, 1, x->type, &SHAPE(y->dim[y->rank - 1]));
}

static status infer_totals(graph *g, node *n) {
    TRY(infer_matmul(g, n));
    if (n->in[0]->shape.rank != 2 || n->in[1]->shape.rank != 2)
        return fail(g->c, E_SHAPE, "%s multiplies matrices, not tensors of rank %d and %d", n->op->name,
                    n->in[0]->shape.rank, n->in[1]->shape.rank);
    return set_out(g, n, 1, n->out[0]->type, &SHAPE(n->out[0]->shape.dim[node_int(n, "right") ? 1 : 0]));
}

kernel_fn matmul_gelu_cuda, matmul_gelu_grad_cuda, matmul_totals_cuda; /* cuda/kernels/epilogue.c */
size_t matmul_cuda_workspace(const node *n), matmul_totals_cuda_workspace(const node *n);

#define FLAGS STRIDED | KEEP | NO_GRAD

/* clang-format off */
const op_def epilogue_ops[] = {
    {"MatMulGelu", ORT_DOMAIN, 1, 2, 3, 2, FLOATS, FLAGS, NODE_ATTRS(FLOAT("alpha", 1)), .infer = infer_gelu,
     .cuda = matmul_gelu_cuda, .cuda_workspace = matmul_cuda_workspace},
    {"MatMulGeluGrad", ORT_DOMAIN, 1, 3, 3, 2, FLOATS, FLAGS, NODE_ATTRS(FLOAT("alpha", 1)), .infer = infer_gelu_grad,
     .cuda = matmul_gelu_grad_cuda, .cuda_workspace = matmul_totals_cuda_workspace},
    {"MatMulTotals", ORT_DOMAIN, 1, 2, 2, 2, FLOATS, FLAGS, NODE_ATTRS(INT("right", 0), INT("wide", 0)),
     .infer = infer_totals, .cuda = matmul_totals_cuda, .cuda_workspace = matmul_totals_cuda_workspace},
    {0},
};
/* clang-format on */
