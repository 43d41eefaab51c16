/* silu_fusion.c -- x * sigmoid(x)  and  x * sigmoid(alpha * x)  ->  Swish(x, alpha), with alpha a number */
#include "passes/pipeline.h"

enum { X, ALPHA };

static status to_swish(graph *g, value *const v[], const node *root, value **out) {
    double alpha = 1;

    (void)root;
    if (v[ALPHA] && !value_is_filled(v[ALPHA], &alpha)) return OK;
    return emit_with(g, out, "Swish", NODE_ATTRS(FLOAT("alpha", alpha)), v[X]);
}

static const rule rules[] = {
    {OP("Mul", OP("Sigmoid", VAR(X)), VAR(X)), to_swish},
    {OP("Mul", OP("Sigmoid", OP("Mul", VAR(X), ANYCONST(ALPHA))), VAR(X)), to_swish},
    {0},
};

const pass_def silu_fusion = {.name = "silu_fusion", .stage = BEFORE_GRADIENT, .rules = rules};
