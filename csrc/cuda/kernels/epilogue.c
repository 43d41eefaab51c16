/* epilogue.c -- runs ops/products/epilogue.c on a GPU: cuBLASLt's epilogues, or else the product and then the
 * operators that they stand for. */
#include "cuda/kernels/reduce.h"
#include "cuda/libraries/blas.h"
#include "ops/products/matmul.h"

#include <stdatomic.h>

kernel_fn matmul_gelu_cuda, matmul_gelu_grad_cuda, matmul_totals_cuda, matmul_cuda; /* the last in matmul.cu */
size_t matmul_cuda_workspace(const node *n), matmul_totals_cuda_workspace(const node *n);

static int64_t columns(const call *k) { return k->out[0].shape.dim[k->out[0].shape.rank - 1]; }
static bool has_second(const call *k) { return k->n_out > 1 && tensor_present(&k->out[1]); }

/* The product alone, and what is added to it, into `to`. */
static status product_into(ctx *c, const call *k, int n_in, tensor *to) {
    call inner = *k;

    inner.n_in = n_in;
    inner.out = to;
    inner.n_out = 1;
    return matmul_cuda(c, &inner);
}

/* A pointwise operator of ours, on contiguous operands, in the place of this one. */
static status pointwise(ctx *c, const call *k, const op_def *op, const tensor *in, int n_in, tensor *out) {
    const node stand_in = {.id = k->node->id, .op = op, .name = k->node->name};
    const call inner = {.node = &stand_in, .in = in, .n_in = n_in, .out = out, .n_out = 1, .cuda = k->cuda};

    return op->cuda(c, &inner);
}

static const op_def *operator_of(const char *name, const op_def *_Atomic *known) {
    if (!*known) *known = op_find(ORT_DOMAIN, name, 0);
    return *known;
}

status matmul_gelu_cuda(ctx *c, const call *k) {
    static const op_def *_Atomic gelu;
    const gemm g = matmul_gemm(k);
    const bool is_seen = has_second(k);
    tensor *x = &k->out[is_seen ? 1 : 0];
    const epilogue then = {GELU_OF_SUMS, .has_extra = is_seen, .extra = is_seen ? x->data : NULL};
    addend plus = {.kind = ADD_NOTHING};
    bool done = false, fits = true;

    if (k->n_in > 2 && tensor_present(&k->in[2])) {
        plus = (addend){ADD_VECTOR, k->in[2].data};
        fits = k->in[2].shape.rank == 1 && k->in[2].shape.dim[0] == columns(k) &&
               (k->in[2].stride[0] == 1 || columns(k) == 1);
    }
    if (fits) TRY(blas_product_and(c, k, &g, &plus, &then, &done));
    if (done) return OK;
    TRY(product_into(c, k, k->n_in, x));
    return pointwise(c, k, operator_of("GeluTanh", &gelu), x, 1, &k->out[0]);
}

/* Of a matrix of so many rows and columns, that lies as it reads. */
static status totals_of_columns(ctx *c, const call *k, const tensor *x, void *out) {
    const int64_t n = columns(k);
    const matrix m = {x->type, x->data, n, n ? tensor_count(x) / n : 0, 1, n};

    return cuda_totals(c, k, &m, x->type, out);
}

status matmul_gelu_grad_cuda(ctx *c, const call *k) {
    static const op_def *_Atomic slope;
    const gemm g = matmul_gemm(k);
    const tensor operands[] = {k->out[0], k->in[2]};
    const addend plus = {.kind = ADD_NOTHING};
    epilogue then = {GELU_SLOPE, .has_extra = true, .extra = k->in[2].data, .has_totals = has_second(k)};
    bool done = false;

    if (then.has_totals) then.totals = k->out[1].data;
    if (tensor_contiguous(&k->in[2])) TRY(blas_product_and(c, k, &g, &plus, &then, &done));
    if (done) return OK;
    TRY(product_into(c, k, 2, &k->out[0]));
    TRY(pointwise(c, k, operator_of("GeluTanhGrad", &slope), operands, 2, &k->out[0]));
    return then.has_totals ? totals_of_columns(c, k, &k->out[0], k->out[1].data) : OK;
}

status matmul_totals_cuda(ctx *c, const call *k) {
    const gemm g = matmul_gemm(k);
    const bool right = node_int(k->node, "right");
    const addend plus = {.kind = ADD_NOTHING};
    epilogue then = {.kind = NO_EPILOGUE};
    matrix m = {g.type, right ? g.b : g.a,         right ? g.n : g.m,
                g.k,    right ? g.b_col : g.a_row, right ? g.b_row : g.a_col};
    bool done;

    if (!has_second(k)) return product_into(c, k, 2, &k->out[0]);
    then = (epilogue){right ? RIGHT_TOTALS : LEFT_TOTALS, .has_totals = true, .totals = k->out[1].data};
    TRY(blas_product_and(c, k, &g, &plus, &then, &done));
    if (done) return OK;
    TRY(product_into(c, k, 2, &k->out[0]));
    return cuda_totals(c, k, &m, k->out[1].type, k->out[1].data);
}

/* The product and the totals take it one after the other. */
size_t matmul_totals_cuda_workspace(const node *n) {
    const shape *a = &n->in[0]->shape, *y = &n->out[0]->shape;
    const bool of_result = n->n_in > 2; /* MatMulGeluGrad */
    const int64_t last = y->dim[y->rank - 1], lines = of_result || node_int(n, "right") ? last : y->dim[0];
    const int64_t length = of_result ? (last ? shape_count(y) / last : 0) : a->dim[1];
    const size_t product = matmul_cuda_workspace(n);

    if (n->n_out < 2 || !n->out[1]) return product;
    const size_t totals = cuda_totals_workspace(lines, length);
    return product > totals ? product : totals;
}
