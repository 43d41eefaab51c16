/* linear_loss.c -- CrossEntropy(h W' + bias, labels)  ->  LinearCrossEntropy(h, W, labels, bias)
 *
 * where nothing else looks at the logits, which are the largest values of a language model: with the loss they are gone,
 * and so is their gradient. The new operator keeps the gradients of h and W instead, so it pays where there are more
 * rows than the weight is wide. Logits of 16 bits may be widened before the loss, as autocast does; they are not rounded
 * in between then, and where the operands were float32 before autocast their gradients are not, either
 * (product_cast.c). Losses that are not reduced are computed from the logits alone, unless the script makes one number of
 * them: where backward would compute the logits once more, a quarter of the time is paid for the memory of the largest
 * only. */
#include "passes/pipeline.h"
#include "passes/view_steps.h"

#include "ops/queries.h"

#include <string.h>

enum { LOGITS, LABELS, WEIGHTS };

/* What the logits `v` show, the same rows; NULL when others see it. */
static value *product_of(value *v) {
    value *x = value_behind(v);

    if (!value_is_private(x) || (x->type != v->type && (x->type != BF16 || v->type != F32))) return NULL;
    if (x->shape.rank == 0 || x->shape.dim[x->shape.rank - 1] != v->shape.dim[v->shape.rank - 1]) return NULL;
    return x;
}

static bool is_product(const value *v) { return v->def && product_is(v->def) && product_alpha(v->def) == 1; }

/* The product behind `v`, and its bias: of the product, or added to it. */
static const node *product_behind(const value *v, value **bias) {
    *bias = value_is(v, "MatMulBias") ? node_in(v->def, 2) : NULL;
    if (is_product(v)) return v->def;
    for (int i = 0; value_is(v, "Add") && i < 2; i++) {
        *bias = v->def->in[1 - i];
        if (value_is(v->def->in[i], "MatMul") && value_is_private(v->def->in[i])) return v->def->in[i]->def;
    }
    return NULL;
}

/* The weight of a linear layer: the operand is its transpose. */
static value *weight_of(const value *transpose) {
    return value_is(transpose, "Transpose") && transpose->shape.rank == 2 ? transpose->def->in[0] : NULL;
}

/* --- losses that are not reduced ------------------------------------------------------------------------------------ */

/* Operators through which a gradient passes times something that is known in forward, for these of their operands. */
static const struct {
    const char *name;
    unsigned operands;
} linear_ops[] = {{"Add", 3},        {"Sub", 3},        {"Mul", 3},     {"Div", 1},
                  {"Neg", 1},        {"Cast", 1},       {"Reshape", 1}, {"ReduceSum", 1},
                  {"ReduceMean", 1}, {"Where", 6},      {"Slice", 1},   {"StridedSlice", 1},
                  {"Gather", 1},     {"UnpackRows", 1}, {"Expand", 1},  {"Concat", ~0U}};
enum { FARTHEST = 16 };

static bool is_linear(const use *u) {
    for (size_t i = 0; i < sizeof linear_ops / sizeof *linear_ops; i++)
        if (strcmp(linear_ops[i].name, u->user->op->name) == 0)
            return u->index < 32 && linear_ops[i].operands >> u->index & 1;
    return false;
}

/* Becomes one number, likely the loss of the module, on all ways: then backward gets one gradient, and what it is for
 * each row is known in forward (loss_gradient.c, which looks closer; here it is about what pays). */
static bool becomes_a_number(const graph *g, const value *v, int farthest) {
    if (value_is_end(v)) return shape_count(&v->shape) == 1 && v->n_uses == 0;
    if (farthest == 0 || v->n_uses == 0) return false;
    for (const use *u = v->uses; u; u = u->next)
        if (!is_linear(u) || !becomes_a_number(g, u->user->out[0], farthest - 1)) return false;
    return true;
}

/* Will backward have to compute the logits once more? */
static bool computes_twice(const graph *g, const node *root, const value *h, const value *w, const value *bias) {
    if (strcmp(node_string(root, "reduction"), "none") != 0) return false;
    if (!w->needs_grad && !(bias && bias->needs_grad)) return false;
    return !becomes_a_number(g, root->out[0], FARTHEST) && (h->needs_grad || w->needs_grad);
}

static bool pays(const graph *g, const node *root, const value *h, const value *w, const value *bias) {
    return linear_loss_pays(g, h->type, shape_span(&h->shape, 0, h->shape.rank - 1), w->shape.dim[1], w->shape.dim[0],
                            computes_twice(g, root, h, w, bias));
}

/* --- the pass ------------------------------------------------------------------------------------------------------- */

static status to_linear_loss(graph *g, value *const v[], const node *root, value **out) {
    value *logits = v[LOGITS], *h, *w, *bias;
    attr attrs[5] = {STRING("reduction", node_string(root, "reduction"))};
    int n_attrs = 1;
    const node *product;
    const int64_t classes = logits->shape.rank == 2 ? logits->shape.dim[1] : 0;

    if (logits->shape.rank != 2 || logits->type == F16) return OK;
    if (v[WEIGHTS] && v[WEIGHTS]->needs_grad) return OK;
    if (!(logits = product_of(logits)) || !(product = product_behind(logits, &bias))) return OK;
    h = product->in[0];
    w = weight_of(product->in[1]);
    if (!w || h->shape.rank < 2 || w->shape.dim[0] != classes) return OK;
    if (bias && (bias->shape.rank != 1 || bias->shape.dim[0] != classes)) return OK;
    if (!pays(g, root, h, w, bias)) return OK;
    if (node_has(root, "ignore_index")) attrs[n_attrs++] = (attr)INT("ignore_index", node_int(root, "ignore_index"));
    if (node_has(root, "smoothing")) attrs[n_attrs++] = (attr)FLOAT("smoothing", node_float(root, "smoothing"));
    if (h->type != root->out[0]->type) attrs[n_attrs++] = (attr)INT("wide", 1);
    TRY(emit_reshape(g, h, &SHAPE(shape_span(&h->shape, 0, h->shape.rank - 1), w->shape.dim[1]), &h));
    return emit_with(g, out, "LinearCrossEntropy", attrs, h, w, v[LABELS], bias, v[WEIGHTS]);
}

static const rule rules[] = {
    {OP("CrossEntropy", VAR(LOGITS), VAR(LABELS)), to_linear_loss},
    {OP("CrossEntropy", VAR(LOGITS), VAR(LABELS), VAR(WEIGHTS)), to_linear_loss},
    {0},
};

const pass_def linear_loss = {.name = "linear_loss", .stage = BEFORE_GRADIENT, .rules = rules};
