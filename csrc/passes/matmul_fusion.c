/* matmul_fusion.c -- factors and a bias around a product  ->  MatMulBias: alpha * (a b) + bias
 *
 *   (a * s) b,  a (b * s),  (a b) * s      and the same with / s, for a number s
 *   a b + bias                             for a bias along the last axis
 *
 * and Cast(Transpose(x)) of an operand  ->  Transpose(Cast(x)): the cast goes along memory, the product reads the
 * transposed where it lies, and the gradient comes back in the layout of x.
 *
 * Attention is exported as (q * sqrt(s)) (k * sqrt(s))': two passes over the operands, one of which would also copy
 * the transposed k. The library multiplies by alpha for nothing. */
#include "passes/pipeline.h"

#include "ops/queries.h"

#include <math.h>

enum { A, B, BIAS, FACTOR, SCALED, PRODUCT, TURNED };

#define TIMES_FACTOR(x) EITHER(OP_AS(SCALED, "Mul", x, ANYCONST(FACTOR)), OP_AS(SCALED, "Div", x, ANYCONST(FACTOR)))
#define PRODUCT_OF_A_B EITHER(OP_AS(PRODUCT, "MatMul", VAR(A), VAR(B)), OP_AS(PRODUCT, "MatMulBias", VAR(A), VAR(B)))

/* The product at `n` with its alpha multiplied by the factor. */
static status scale_product(graph *g, value *const v[], const node *n, value **out) {
    double factor;

    if (!dtype_is_float(n->out[0]->type) || !value_is_filled(v[FACTOR], &factor)) return OK;
    if (node_is(v[SCALED]->def, "Div")) factor = 1 / factor;
    if (factor == 0 || !isfinite(factor)) return OK; /* alpha 0 would forget the NaN of an operand */
    return emit_with(g, out, "MatMulBias", NODE_ATTRS(FLOAT("alpha", product_alpha(n) * factor)), v[A], v[B]);
}

static status scale_operand(graph *g, value *const v[], const node *root, value **out) {
    return scale_product(g, v, root, out);
}

static status scale_result(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return scale_product(g, v, v[PRODUCT]->def, out);
}

static status add_bias(graph *g, value *const v[], const node *root, value **out) {
    const shape *y = &root->out[0]->shape, *bias = &v[BIAS]->shape;

    if (y->rank < 2 || bias->rank != 1 || bias->dim[0] != y->dim[y->rank - 1]) return OK;
    return emit_with(g, out, "MatMulBias", NODE_ATTRS(FLOAT("alpha", product_alpha(v[PRODUCT]->def))), v[A], v[B],
                     v[BIAS]);
}

static bool is_read_by_products(const value *v) {
    for (const use *u = v->uses; u; u = u->next)
        if (!product_is(u->user)) return false;
    return v->uses != NULL;
}

static status cast_before(graph *g, value *const v[], const node *root, value **out) {
    value *x;

    if (!value_is_private(v[TURNED]) || !is_read_by_products(root->out[0])) return OK;
    TRY(emit_cast(g, v[A], root->out[0]->type, &x));
    return emit_transpose_like(g, v[TURNED]->def, x, out);
}

static const rule rules[] = {
    {OP("Cast", OP_AS(TURNED, "Transpose", VAR(A))), cast_before},
    {OP("MatMul", TIMES_FACTOR(VAR(A)), VAR(B)), scale_operand},
    {OP("MatMul", VAR(A), TIMES_FACTOR(VAR(B))), scale_operand},
    {OP("MatMulBias", TIMES_FACTOR(VAR(A)), VAR(B)), scale_operand},
    {OP("MatMulBias", VAR(A), TIMES_FACTOR(VAR(B))), scale_operand},
    {OP_AS(SCALED, "Mul", PRODUCT_OF_A_B, ANYCONST(FACTOR)), scale_result},
    {OP_AS(SCALED, "Div", PRODUCT_OF_A_B, ANYCONST(FACTOR)), scale_result},
    {OP("Add", PRODUCT_OF_A_B, VAR(BIAS)), add_bias},
    {0},
};

const pass_def matmul_fusion = {.name = "matmul_fusion", .stage = BEFORE_GRADIENT, .rules = rules};
