/* matmul.c -- multiplies matrices: MatMul, Gemm, MatMulInteger, MatMulBias behind Gemm, and products by groups of rows.
 *
 *     MatMul              y = a b
 *     MatMulBias          y = alpha a b + c      c broadcast to y, and optional; without it, and `wide`, y is float32
 *                                                where a and b are 16-bit floats: the sums as they are. A fourth
 *                                                operand is what Prepack has made of b
 *     Prepack             b packed as products of that many `rows` read it (gemm/gemm.h); bytes, which only they understand
 *     MatMulAdd           y = c + alpha a b      operands c, a, b; y may be c's memory
 *     GroupedMatMul       y[r] = a[r] b[e]       rows r of group e: from ends[e - 1] to ends[e]; others are 0
 *     GroupedMatMulOuter  y[e] = sum of a[r]' b[r] over the rows r of group e: the gradient of GroupedMatMul's b
 *
 * Operands are multiplied where they lie: transposed and sliced views become strides of gemm/gemm.h, broadcast batch
 * dimensions strides of 0. A linear layer over [batch, length, width] is one product of batch * length rows, and so is
 * the gradient of its weight. Backward keeps a and b alive, not y. */
#include <inttypes.h>
#include <string.h>

#include "ops/movement/move.h"
#include "ops/products/matmul.h"
#include "ops/queries.h"

/* --- shapes ------------------------------------------------------------------------------------------------------- */

/* A vector on the left is a row, on the right a column; the dimension added is dropped from the result. */
static shape left_matrix(const shape *s) { return s->rank == 1 ? SHAPE(1, s->dim[0]) : *s; }
static shape right_matrix(const shape *s) { return s->rank == 1 ? SHAPE(s->dim[0], 1) : *s; }

static shape batch_of(const shape *s) {
    shape batch = *s;
    batch.rank -= 2;
    return batch;
}

/* `batch` followed by a matrix of `rows` x `cols`. */
static shape with_matrix(shape batch, int64_t rows, int64_t cols) {
    batch.dim[batch.rank++] = rows;
    batch.dim[batch.rank++] = cols;
    return batch;
}

/* What is multiplied: where an operand is float32 and the other of 16 bits, it is rounded to these. */
static dtype narrower(dtype a, dtype b) { return dtype_is_narrow(b) ? b : a; }

/* Only a pass has written that (passes/wide_operands.c). */
static bool rounds_an_operand(const node *n) {
    const dtype a = n->in[0]->type, b = n->in[1]->type, narrow = narrower(a, b);

    if (strcmp(n->op->name, "MatMulBias") != 0 || a == b || !dtype_is_narrow(narrow)) return false;
    return (a == F32 || b == F32) && (!node_in(n, 2) || n->in[2]->type == narrow);
}

/* One type, but for what is packed. */
static status require_one_type(graph *g, const node *n) {
    node only = *n;
    if (only.n_in > 3) only.n_in = 3;
    return same_types(g, &only, 0);
}

status infer_matmul(graph *g, node *n) {
    char ta[SHAPE_TEXT], tb[SHAPE_TEXT];
    shape a, b, y;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    if (!rounds_an_operand(n)) TRY(require_one_type(g, n));
    if (n->in[0]->shape.rank == 0 || n->in[1]->shape.rank == 0)
        return fail(g->c, E_SHAPE, "%s multiplies matrices and vectors, not a tensor without dimensions", n->op->name);
    a = left_matrix(&n->in[0]->shape);
    b = right_matrix(&n->in[1]->shape);
    if (a.dim[a.rank - 1] != b.dim[b.rank - 2])
        return fail(g->c, E_SHAPE, "%s of shapes %s and %s: %" PRId64 " columns meet %" PRId64 " rows", n->op->name,
                    shape_text(&n->in[0]->shape, ta), shape_text(&n->in[1]->shape, tb), a.dim[a.rank - 1],
                    b.dim[b.rank - 2]);
    shape a_batch = batch_of(&a), b_batch = batch_of(&b);
    TRY_AT(g->c, shape_broadcast(g->c, &a_batch, &b_batch, &y), "pairing the matrices of %s and %s",
           shape_text(&n->in[0]->shape, ta), shape_text(&n->in[1]->shape, tb));
    if (n->in[0]->shape.rank > 1) y.dim[y.rank++] = a.dim[a.rank - 2];
    if (n->in[1]->shape.rank > 1) y.dim[y.rank++] = b.dim[b.rank - 1];
    bool wide = node_attr(n, "wide") && node_int(n, "wide");
    const dtype type = narrower(n->in[0]->type, n->in[1]->type);
    if (wide && !dtype_is_narrow(type))
        return fail(g->c, E_TYPE, "%s leaves float32 sums of 16-bit floats, not of %s", n->op->name, dtype_name(type));
    return set_out(g, n, 0, wide ? F32 : type, &y);
}

/* Can `c` be added to the product `y`, which keeps its shape? */
static status check_added(graph *g, const node *n, const value *y, const value *c) {
    char ty[SHAPE_TEXT], tc[SHAPE_TEXT];
    shape both;

    TRY_AT(g->c, shape_broadcast(g->c, &y->shape, &c->shape, &both), "adding to a product");
    if (!shape_equal(&both, &y->shape))
        return fail(g->c, E_SHAPE, "%s adds %s to a product of shape %s", n->op->name, shape_text(&c->shape, tc),
                    shape_text(&y->shape, ty));
    return OK;
}

status infer_matmul_bias(graph *g, node *n) {
    const value *c = node_in(n, 2);

    TRY(infer_matmul(g, n));
    if (!c) return OK;
    if (node_int(n, "wide")) return fail(g->c, E_TYPE, "%s adds nothing to float32 sums", n->op->name);
    return check_added(g, n, n->out[0], c);
}

/* --- gradient ----------------------------------------------------------------------------------------------------- */

/* The last two dimensions exchanged: a view. */
static status transposed(graph *g, value *x, value **out) {
    int perm[MAX_RANK], rank = x->shape.rank;
    for (int i = 0; i < rank; i++) perm[i] = i;
    perm[rank - 2] = rank - 1;
    perm[rank - 1] = rank - 2;
    return emit_transpose(g, x, perm, out);
}

/* [..., r, c] -> [... * r, c] */
static status rows_of(graph *g, value *x, value **out) {
    int last = x->shape.rank - 1;
    return emit_reshape(g, x, &SHAPE(shape_span(&x->shape, 0, last), x->shape.dim[last]), out);
}

/* [..., r, c] -> [r, ... * c] */
static status cols_of(graph *g, value *x, value **out) {
    int perm[MAX_RANK], rank = x->shape.rank;
    int64_t rows = x->shape.dim[rank - 2], rest = shape_span(&x->shape, 0, rank - 2) * x->shape.dim[rank - 1];

    perm[0] = rank - 2;
    for (int i = 1; i < rank - 1; i++) perm[i] = i - 1;
    perm[rank - 1] = rank - 1;
    TRY(emit_transpose(g, x, perm, &x));
    return emit_reshape(g, x, &SHAPE(rows, rest), out);
}

static status product(graph *g, value *a, value *b, double alpha, value **out) {
    if (alpha == 1) return emit(g, out, "MatMul", a, b);
    return emit_with(g, out, "MatMulBias", NODE_ATTRS(FLOAT("alpha", alpha)), a, b);
}

static bool is_transposed(const value *x) {
    const int64_t *perm = NULL;
    int rank = x->shape.rank;

    if (!x->def || strcmp(x->def->op->name, "Transpose") != 0 || rank < 2) return false;
    if (node_ints(x->def, "perm", &perm) != rank) return false;
    for (int i = 0; i < rank - 2; i++)
        if (perm[i] != i) return false;
    return perm[rank - 2] == rank - 1;
}

/* The gradient a b of `of`. Where `of` is the transpose of a weight, as in every linear layer, it is made as the
 * transpose of b' a': going back through the transpose then gives the weight's own layout, without a copy. */
static status gradient_product(graph *g, const value *of, value *a, value *b, double alpha, value **out) {
    if (!is_transposed(of)) return product(g, a, b, alpha, out);
    TRY(transposed(g, a, &a));
    TRY(transposed(g, b, &b));
    TRY(product(g, b, a, alpha, out));
    return transposed(g, *out, out);
}

static bool one_matrix(const value *x) { return shape_span(&x->shape, 0, x->shape.rank - 2) == 1; }

/* With a and b matrices, da = dy b' and db = a' dy. Where one operand serves a whole batch its gradient is a sum over
 * the batch: that is one product whose inner dimension runs over the batch too, not many products and then a sum. */

static status grad_left(graph *g, value *a, value *b, value *dy, double alpha, value **da) {
    const value *of = a;
    if (one_matrix(a) && !one_matrix(dy)) {
        TRY(cols_of(g, dy, &dy));
        TRY(cols_of(g, b, &b));
    }
    TRY(transposed(g, b, &b));
    return gradient_product(g, of, dy, b, alpha, da);
}

static status grad_right(graph *g, value *a, value *b, value *dy, double alpha, value **db) {
    const value *of = b;
    if (one_matrix(b) && !one_matrix(dy)) {
        TRY(rows_of(g, dy, &dy));
        TRY(rows_of(g, a, &a));
    }
    TRY(transposed(g, a, &a));
    return gradient_product(g, of, a, dy, alpha, db);
}

static status grad_products(graph *g, const node *n, value *dy, double alpha, value *dx[]) {
    shape a_shape = left_matrix(&n->in[0]->shape), b_shape = right_matrix(&n->in[1]->shape);
    shape a_batch = batch_of(&a_shape), b_batch = batch_of(&b_shape), batch, dy_shape;
    value *a, *b;

    TRY(shape_broadcast(g->c, &a_batch, &b_batch, &batch));
    dy_shape = with_matrix(batch, a_shape.dim[a_shape.rank - 2], b_shape.dim[b_shape.rank - 1]);
    TRY(emit_reshape(g, n->in[0], &a_shape, &a));
    TRY(emit_reshape(g, n->in[1], &b_shape, &b));
    TRY(emit_reshape(g, dy, &dy_shape, &dy));
    if (need(n, 0)) TRY(grad_left(g, a, b, dy, alpha, &dx[0]));
    if (!need(n, 1)) return OK;
    TRY(grad_right(g, a, b, dy, alpha, &dx[1]));
    if (n->in[1]->shape.rank > 1) return OK;
    shape vector = dx[1]->shape; /* the column was no dimension of b */
    vector.rank--;
    return emit_reshape(g, dx[1], &vector, &dx[1]);
}

static status grad_matmul(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_products(g, n, dy[0], 1, dx);
}

static status grad_matmul_bias(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *dproduct = dy[0];
    if (n->n_in > 2) dx[2] = dproduct;
    if (dproduct->type != n->in[0]->type) TRY(emit_cast(g, dproduct, n->in[0]->type, &dproduct));
    return grad_products(g, n, dproduct, node_float(n, "alpha"), dx);
}

/* --- lowering ----------------------------------------------------------------------------------------------------- */

/* y = alpha a' b' + beta c, with a' and b' transposed on request. */
static status lower_gemm(graph *g, const node *n, value **out) {
    value *a = node_in(n, 0), *b = node_in(n, 1), *c = node_in(n, 2);
    double alpha = node_float(n, "alpha"), beta = node_float(n, "beta");

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    if (a->shape.rank != 2 || b->shape.rank != 2)
        return fail(g->c, E_SHAPE, "Gemm multiplies matrices, not tensors of rank %d and %d", a->shape.rank,
                    b->shape.rank);
    if (node_int(n, "transA")) TRY(transposed(g, a, &a));
    if (node_int(n, "transB")) TRY(transposed(g, b, &b));
    if (!c) return product(g, a, b, alpha, &out[0]);
    if (beta == 0) {
        TRY(product(g, a, b, alpha, &out[0]));
        return check_added(g, n, out[0], c);
    }
    TRY(emit_scaled(g, c, beta, &c));
    return emit_with(g, &out[0], "MatMulBias", NODE_ATTRS(FLOAT("alpha", alpha)), a, b, c);
}

/* `x` as int32 less its zero point, which is one number or one for each row or column. */
static status centred(graph *g, value *x, value *zero, bool per_row, value **out) {
    TRY(emit_cast(g, x, I32, out));
    if (!zero) return OK;
    TRY(emit_cast(g, zero, I32, &zero));
    if (per_row && zero->shape.rank == 1) TRY(emit_reshape(g, zero, &SHAPE(zero->shape.dim[0], 1), &zero));
    return emit(g, out, "Sub", *out, zero);
}

static status lower_matmul_integer(graph *g, const node *n, value **out) {
    value *a, *b;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    TRY(centred(g, n->in[0], node_in(n, 2), n->in[0]->shape.rank > 1, &a));
    TRY(centred(g, n->in[1], node_in(n, 3), false, &b));
    return emit(g, &out[0], "MatMul", a, b);
}

/* --- kernel ------------------------------------------------------------------------------------------------------- */

gemm matmul_gemm(const call *k) {
    const tensor *a = &k->in[0], *b = &k->in[1], *y = &k->out[0];
    const bool row = a->shape.rank == 1, column = b->shape.rank == 1;
    const int a_last = a->shape.rank - 1, b_last = b->shape.rank - 1;
    gemm g = {
        .type = narrower(a->type, b->type), .alpha = product_alpha(k->node), .a = a->data, .b = b->data, .c = y->data};
    shape batch = y->shape;

    g.wide_a = a->type != g.type;
    g.wide_b = b->type != g.type;
    g.wide_c = y->type != g.type;
    if (k->n_in > 3) g.packed_b = k->in[3].data;
    batch.rank -= !row + !column;
    g.m = row ? 1 : a->shape.dim[a_last - 1];
    g.n = column ? 1 : b->shape.dim[b_last];
    g.k = a->shape.dim[a_last];
    g.a_row = row ? 0 : a->stride[a_last - 1];
    g.a_col = a->stride[a_last];
    g.b_row = column ? b->stride[0] : b->stride[b_last - 1];
    g.b_col = column ? 0 : b->stride[b_last];
    g.c_row = g.n;
    g.n_batch = batch.rank;
    for (int i = batch.rank - 1, ia = a_last - 2, ib = b_last - 2; i >= 0; i--, ia--, ib--) {
        g.batch[i] = batch.dim[i];
        g.a_step[i] = ia < 0 || a->shape.dim[ia] == 1 ? 0 : a->stride[ia];
        g.b_step[i] = ib < 0 || b->shape.dim[ib] == 1 ? 0 : b->stride[ib];
        g.c_step[i] = g.m * g.n * shape_span(&batch, i + 1, batch.rank);
    }
    return g;
}

bool product_rounds(dtype narrow) { return gemm_rounds(narrow); }

/* The product by `b` that Prepack is for. */
static gemm packed_gemm(const value *b, int64_t rows, dtype type) {
    return (gemm){
        .type = type, .wide_b = b->type != type, .alpha = 1, .m = rows, .n = b->shape.dim[1], .k = b->shape.dim[0]};
}

static dtype packed_type(const node *n) { return dtype_from_onnx((int)node_int(n, "to")); }

status product_prepack(graph *g, const node *n, value **out) {
    const dtype type = narrower(n->in[0]->type, n->in[1]->type);
    const int64_t rows = shape_span(&n->in[0]->shape, 0, n->in[0]->shape.rank - 1);
    const gemm p = packed_gemm(n->in[1], rows, type);

    *out = NULL;
    if (gemm_prepack_bytes(&p) == 0) return OK;
    return emit_with(g, out, "Prepack", NODE_ATTRS(INT("rows", rows), INT("to", dtype_table[type].onnx)), n->in[1]);
}

static status infer_prepack(graph *g, node *n) {
    const gemm p = packed_gemm(n->in[0], node_int(n, "rows"), packed_type(n));
    return set_out(g, n, 0, U8, &SHAPE((int64_t)gemm_prepack_bytes(&p)));
}

static status prepack_cpu(ctx *c, const call *k) {
    const tensor *b = &k->in[0];
    gemm g = packed_gemm(k->node->in[0], node_int(k->node, "rows"), packed_type(k->node));

    (void)c;
    g.b = b->data;
    g.b_row = b->stride[0];
    g.b_col = b->stride[1];
    gemm_prepack(&g, k->out[0].data);
    return OK;
}

bool product_is(const node *n) { return strcmp(n->op->name, "MatMul") == 0 || strcmp(n->op->name, "MatMulBias") == 0; }

status product_emit(graph *g, const node *n, int n_in, value *const in[], value **out) {
    const bool wide = node_attr(n, "wide") && node_int(n, "wide");

    *out = NULL;
    return graph_emit(g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", product_alpha(n)), INT("wide", wide)), n_in, in, 1,
                      out);
}

double product_alpha(const node *n) { return node_attr(n, "alpha") ? node_float(n, "alpha") : 1; }

/* MatMul and MatMulBias. */
static status matmul_cpu(ctx *c, const call *k) {
    gemm g = matmul_gemm(k);

    (void)c;
    if (k->n_in > 2 && tensor_present(&k->in[2])) {
        const tensor every_row = tensor_expand(&k->in[2], &k->out[0].shape);
        copy_elements(&k->out[0], &every_row);
        g.beta = 1;
    }
    gemm_run(&g);
    return OK;
}

static void matmul_products(const call *k, product_fn *each, void *arg) {
    const gemm g = matmul_gemm(k);
    each(arg, &g);
}

/* --- into what is there --------------------------------------------------------------------------------------------- */

/* The product of operands 1 and 2. */
static gemm added_gemm(const call *k) {
    call product = *k;

    product.in++;
    product.n_in--;
    return matmul_gemm(&product);
}

static status matmul_add_cpu(ctx *c, const call *k) {
    gemm g = added_gemm(k);

    (void)c;
    if (k->in[0].data != k->out[0].data) copy_elements(&k->out[0], &k->in[0]);
    g.beta = 1;
    gemm_run(&g);
    return OK;
}

static void matmul_add_products(const call *k, product_fn *each, void *arg) {
    const gemm g = added_gemm(k);
    each(arg, &g);
}

/* --- groups of rows ----------------------------------------------------------------------------------------------- */

/* A mixture of experts multiplies the rows that it sends to each expert, sorted by expert, by that expert's matrix. */
static status infer_grouped(graph *g, node *n) {
    const shape *a = &n->in[0]->shape, *b = &n->in[1]->shape, *ends = &n->in[2]->shape;
    const bool outer = !strcmp(n->op->name, "GroupedMatMulOuter");
    char ta[SHAPE_TEXT], tb[SHAPE_TEXT], te[SHAPE_TEXT];

    if (n->in[1]->type != n->in[0]->type || (n->in[2]->type != I32 && n->in[2]->type != I64))
        return fail(g->c, E_TYPE, "%s multiplies two tensors of one type by ends that are int32 or int64", n->op->name);
    if (a->rank != 2 || ends->rank != 1 || b->rank != (outer ? 2 : 3) ||
        a->dim[outer ? 0 : 1] != b->dim[outer ? 0 : 1] || (!outer && ends->dim[0] != b->dim[0]))
        return fail(g->c, E_SHAPE, "%s of shapes %s and %s by ends of shape %s", n->op->name, shape_text(a, ta),
                    shape_text(b, tb), shape_text(ends, te));
    if (outer) return set_out(g, n, 0, n->in[0]->type, &SHAPE(ends->dim[0], a->dim[1], b->dim[1]));
    return set_out(g, n, 0, n->in[0]->type, &SHAPE(a->dim[0], b->dim[2]));
}

static status grad_grouped(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *a = n->in[0], *b = n->in[1], *ends = n->in[2], *turned;

    if (need(n, 0)) {
        TRY(transposed(g, b, &turned));
        TRY(emit(g, &dx[0], "GroupedMatMul", dy[0], turned, ends));
    }
    if (!need(n, 1)) return OK;
    if (!is_transposed(b)) return emit(g, &dx[1], "GroupedMatMulOuter", a, dy[0], ends);
    TRY(emit(g, &turned, "GroupedMatMulOuter", dy[0], a, ends)); /* in the layout of the weight */
    return transposed(g, turned, &dx[1]);
}

/* Where group e ends: not before `begin`, not after the last row. */
static int64_t group_end(const tensor *ends, int64_t e, int64_t begin, int64_t rows) {
    int64_t at = e * ends->stride[0];
    int64_t end = ends->type == I32 ? ((const int32_t *)ends->data)[at] : ((const int64_t *)ends->data)[at];
    return end < begin ? begin : end > rows ? rows : end;
}

static status grouped_cpu(ctx *c, const call *k) {
    const tensor *a = &k->in[0], *b = &k->in[1], *ends = &k->in[2], *y = &k->out[0];
    const size_t item = dtype_size(y->type);
    const int64_t rows = a->shape.dim[0];
    gemm g = {.type = y->type, .alpha = 1, .k = a->shape.dim[1], .n = y->shape.dim[1]};
    int64_t begin = 0;

    (void)c;
    g.a_row = a->stride[0], g.a_col = a->stride[1];
    g.b_row = b->stride[1], g.b_col = b->stride[2];
    g.c_row = g.n;
    for (int64_t e = 0; e < ends->shape.dim[0]; e++) {
        int64_t end = group_end(ends, e, begin, rows);
        g.m = end - begin;
        g.a = (const char *)a->data + (ptrdiff_t)item * begin * a->stride[0];
        g.b = (const char *)b->data + (ptrdiff_t)item * e * b->stride[0];
        g.c = (char *)y->data + (ptrdiff_t)item * begin * g.n;
        if (g.m) gemm_run(&g);
        begin = end;
    }
    if (begin < rows) memset((char *)y->data + (ptrdiff_t)item * begin * g.n, 0, item * (size_t)((rows - begin) * g.n));
    return OK;
}

static status grouped_outer_cpu(ctx *c, const call *k) {
    const tensor *a = &k->in[0], *b = &k->in[1], *ends = &k->in[2], *y = &k->out[0];
    const size_t item = dtype_size(y->type);
    const int64_t rows = a->shape.dim[0];
    gemm g = {.type = y->type, .alpha = 1, .m = a->shape.dim[1], .n = b->shape.dim[1]};
    int64_t begin = 0;

    (void)c;
    g.a_row = a->stride[1], g.a_col = a->stride[0];
    g.b_row = b->stride[0], g.b_col = b->stride[1];
    g.c_row = g.n;
    for (int64_t e = 0; e < ends->shape.dim[0]; e++) {
        int64_t end = group_end(ends, e, begin, rows);
        g.k = end - begin;
        g.a = (const char *)a->data + (ptrdiff_t)item * begin * a->stride[0];
        g.b = (const char *)b->data + (ptrdiff_t)item * begin * b->stride[0];
        g.c = (char *)y->data + (ptrdiff_t)item * e * g.m * g.n;
        if (g.k) gemm_run(&g);
        else memset(g.c, 0, item * (size_t)(g.m * g.n));
        begin = end;
    }
    return OK;
}

kernel_fn matmul_cuda, matmul_add_cuda;     /* cuda/kernels/matmul.cu */
kernel_fn grouped_cuda, grouped_outer_cuda; /* cuda/kernels/grouped.cu */
size_t matmul_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

#define PRODUCT(name_, domain_, since_, most_)                                                                         \
    .name = name_, .domain = domain_, .since = since_, .min_in = 2, .max_in = most_, .max_out = 1

/* clang-format off */
const op_def matmul_ops[] = {
    {PRODUCT("MatMul", "", 1, 2), .dtypes = NUMBERS, .plain = ALL_OPERANDS, .flags = STRIDED, .infer = infer_matmul, .grad = grad_matmul,
     .cpu = matmul_cpu, .products = matmul_products, .cuda = matmul_cuda, .cuda_workspace = matmul_cuda_workspace},
    {PRODUCT("MatMulBias", ORT_DOMAIN, 1, 4), .dtypes = NUMBERS, .plain = ALL_OPERANDS, .flags = STRIDED,
     .attrs = NODE_ATTRS(FLOAT("alpha", 1), INT("wide", 0)), .infer = infer_matmul_bias, .grad = grad_matmul_bias,
     .cpu = matmul_cpu, .products = matmul_products, .cuda = matmul_cuda, .cuda_workspace = matmul_cuda_workspace},
    {"Prepack", ORT_DOMAIN, 1, 1, 1, 1, FLOATS, STRIDED | KEEP | NO_GRAD, NODE_ATTRS(NO_DEFAULT("rows", INT), NO_DEFAULT("to", INT)),
     .infer = infer_prepack, .cpu = prepack_cpu},
    {"MatMulAdd", ORT_DOMAIN, 1, 3, 3, 1, FLOATS, STRIDED | INPLACE_0 | DISJOINT, NODE_ATTRS(FLOAT("alpha", 1)),
     .infer = infer_same, .cpu = matmul_add_cpu, .products = matmul_add_products, .cuda = matmul_add_cuda,
     .cuda_workspace = matmul_cuda_workspace},
    {PRODUCT("Gemm", "", 7, 3), .dtypes = NUMBERS, .lower = lower_gemm,
     .attrs = NODE_ATTRS(FLOAT("alpha", 1), FLOAT("beta", 1), INT("transA", 0), INT("transB", 0))},
    {"GroupedMatMul", ORT_DOMAIN, 1, 3, 3, 1, FLOATS, STRIDED | IN_MODELS, NULL, .infer = infer_grouped, .grad = grad_grouped,
     .owned = OPERAND(2), .cpu = grouped_cpu, .cuda = grouped_cuda},
    {"GroupedMatMulOuter", ORT_DOMAIN, 1, 3, 3, 1, FLOATS, STRIDED, NULL, .infer = infer_grouped, .cpu = grouped_outer_cpu,
     .owned = OPERAND(2), .cuda = grouped_outer_cuda},
    {PRODUCT("MatMulInteger", "", 10, 4), .dtypes = SET(I8) | SET(U8), .lower = lower_matmul_integer},
    {0},
};
/* clang-format on */
