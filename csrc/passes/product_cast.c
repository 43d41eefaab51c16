/* product_cast.c -- Cast(a b, to float32), of a 16-bit product no other node reads  ->  MatMulBias(a, b, wide)
 *                    Cast(Cast(x, to 16 bits), to float32)  ->  x      where LinearCrossEntropy left x in float32
 *
 * The sums are float32 anyway: they are stored as they are, instead of being rounded to 16 bits, stored, read and
 * stored again. Under autocast that is the way of every weight's gradient, and of logits that a loss widens. The
 * result is nearer to the exact one than PyTorch's, which rounds. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { A, B, PRODUCT };

static status widen(graph *g, value *const v[], const node *root, value **out) {
    const dtype from = v[PRODUCT]->type;
    const node *product = v[PRODUCT]->def;

    if (root->out[0]->type != F32 || (from != BF16 && from != F16)) return OK;
    return emit_with(g, out, "MatMulBias", NODE_ATTRS(FLOAT("alpha", product_alpha(product)), INT("wide", 1)), v[A],
                     v[B]);
}

static bool is_loss_gradient(const value *v) {
    if (value_is(v, "LinearCrossEntropyGrad")) return true;
    return value_is(v, "Mul") &&
           (value_is(v->def->in[0], "LinearCrossEntropy") || value_is(v->def->in[1], "LinearCrossEntropy"));
}

/* The gradient that is rounded to `v`, which may be reshaped after; NULL: it is none that was left in float32. */
static value *loss_gradient_behind(value *v) {
    while (value_is_private(v) && value_is(v, "Reshape")) v = v->def->in[0];
    if (!value_is_private(v) || !value_is(v, "Cast")) return NULL;
    v = v->def->in[0];
    return v->type == F32 && is_loss_gradient(v) ? v : NULL;
}

static status keep_gradient(graph *g, value *const v[], const node *root, value **out) {
    value *x;

    if (root->out[0]->type != F32 || !(x = loss_gradient_behind(v[A]))) return OK;
    return emit_reshape(g, x, &root->out[0]->shape, out);
}

static const rule rules[] = {
    {OP("Cast", EITHER(OP_AS(PRODUCT, "MatMul", VAR(A), VAR(B)), OP_AS(PRODUCT, "MatMulBias", VAR(A), VAR(B)))), widen},
    {OP("Cast", VAR(A)), keep_gradient},
    {0},
};

const pass_def product_cast = {.name = "product_cast", .stage = AFTER_GRADIENT, .level = 1, .rules = rules};
