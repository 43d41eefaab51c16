/* product_cast.c -- Cast(a b, to float32), of a 16-bit product no other node reads  ->  MatMulBias(a, b, wide), before Reshapes
 *                    and Transposes between the two
 *                    Cast(Cast(x, to 16 bits), to float32)  ->  x      where LinearCrossEntropy left x in float32
 *
 * The sums are float32 anyway: they are stored as they are, instead of being rounded to 16 bits, stored, read and
 * stored again. Under autocast that is the way of every weight's gradient, and of logits that a loss widens. The
 * result is nearer to the exact one than PyTorch's, which rounds. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/queries.h"

enum { X };

static status widen(graph *g, value *const v[], const node *root, value **out) {
    view_steps steps;
    value *y = view_steps_before(v[X], &steps);
    const node *product = y->def;

    if (root->out[0]->type != F32 || !dtype_is_narrow(y->type) || steps.repeats) return OK;
    if (!value_is_private(y) || !product || !product_is(product) || node_in(product, 2)) return OK;
    if (value_is_end(root->out[0]) && !view_steps_keep_order(&steps, y)) return OK; /* it would be copied, in float32 */
    TRY(emit_with(g, &y, "MatMulBias", NODE_ATTRS(FLOAT("alpha", product_alpha(product)), INT("wide", 1)),
                  product->in[0], product->in[1]));
    return view_steps_again(g, &steps, y, out);
}

static bool is_loss_gradient(const value *v) {
    if (value_is(v, "LinearCrossEntropyGrad")) return true;
    return value_is(v, "Mul") &&
           (value_is(v->def->in[0], "LinearCrossEntropy") || value_is(v->def->in[1], "LinearCrossEntropy"));
}

/* The gradient that is rounded to `v`, which may be reshaped after; NULL: it is none that was left in float32. */
static value *loss_gradient_behind(value *v) {
    v = value_before_reshapes(v);
    if (!value_is_private(v) || !value_is(v, "Cast")) return NULL;
    v = v->def->in[0];
    return v->type == F32 && is_loss_gradient(v) ? v : NULL;
}

static status keep_gradient(graph *g, value *const v[], const node *root, value **out) {
    value *x;

    if (root->out[0]->type != F32 || !(x = loss_gradient_behind(v[X]))) return OK;
    return emit_reshape(g, x, &root->out[0]->shape, out);
}

static const rule rules[] = {
    {OP("Cast", VAR(X)), widen},
    {OP("Cast", VAR(X)), keep_gradient},
    {0},
};

const pass_def product_cast = {.name = "product_cast", .stage = AFTER_GRADIENT, .rules = rules};
