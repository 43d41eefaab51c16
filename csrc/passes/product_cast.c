/* product_cast.c -- Cast(a b, to float32), of a 16-bit product nobody else looks at  ->  MatMulBias(a, b, wide)
 *
 * The sums are float32 anyway: they are stored as they are, instead of being rounded to 16 bits, stored, read and
 * stored again. Under autocast that is the way of every weight's gradient, and of logits that a loss widens. The
 * result is nearer to the exact one than PyTorch's, which rounds. */
#include "passes/pipeline.h"

#include "ops/op.h"

#include <string.h>

enum { A, B, PRODUCT };

static status widen(graph *g, value *const v[], const node *root, value **out) {
    const dtype from = v[PRODUCT]->type;
    const node *product = v[PRODUCT]->def;
    double alpha = node_attr(product, "alpha") ? node_float(product, "alpha") : 1;

    if (root->out[0]->type != F32 || (from != BF16 && from != F16)) return OK;
    return emit_with(g, out, "MatMulBias", NODE_ATTRS(FLOAT("alpha", alpha), INT("wide", 1)), v[A], v[B]);
}

static const rule rules[] = {
    {OP("Cast", EITHER(OP_AS(PRODUCT, "MatMul", VAR(A), VAR(B)), OP_AS(PRODUCT, "MatMulBias", VAR(A), VAR(B)))), widen},
    {0},
};

const pass_def product_cast = {.name = "product_cast", .stage = AFTER_GRADIENT, .level = 1, .rules = rules};
