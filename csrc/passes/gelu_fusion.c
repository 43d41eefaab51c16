/* gelu_fusion.c -- the two GELU formulas  ->  Gelu(x)
 *
 *   erf    0.5 * x * (1 + erf(x / sqrt(2)))
 *   tanh   0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
 *
 * Models spell them by hand and the exporter spells them for nn.GELU: the three factors grouped in every way, the
 * division as a multiplication, x drawn out of the bracket. (A cube is a product by now, even where it was a power.) */
#include "passes/pipeline.h"

enum { X };

#define HALF CONST(0.5)
#define SQRT_2_OVER_PI CONST(0.79788456080286536)
#define CUBIC CONST(0.044715)

#define X_OVER_SQRT_2                                                                                                  \
    EITHER(OP("Div", VAR(X), CONST(1.41421356237309505)), OP("Mul", VAR(X), CONST(0.70710678118654752)))
#define ONE_PLUS_ERF OP("Add", OP("Erf", X_OVER_SQRT_2), CONST(1))

#define X_SQUARED OP("Mul", VAR(X), VAR(X))
#define X_CUBED OP("Mul", X_SQUARED, VAR(X))
#define X_PLUS_CUBIC OP("Add", OP("Mul", X_CUBED, CUBIC), VAR(X))
/* x * c * (1 + 0.044715 * x * x) */
#define ONE_PLUS_CUBIC                                                                                                 \
    OP("Add", EITHER(OP("Mul", OP("Mul", VAR(X), CUBIC), VAR(X)), OP("Mul", X_SQUARED, CUBIC)), CONST(1))
#define TANH_ARGUMENT                                                                                                  \
    EITHER(OP("Mul", X_PLUS_CUBIC, SQRT_2_OVER_PI), OP("Mul", OP("Mul", VAR(X), SQRT_2_OVER_PI), ONE_PLUS_CUBIC))
#define ONE_PLUS_TANH OP("Add", OP("Tanh", TANH_ARGUMENT), CONST(1))

static status to_gelu(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return emit(g, out, "Gelu", v[X]);
}

static status to_gelu_tanh(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return emit_with(g, out, "Gelu", NODE_ATTRS(STRING("approximate", "tanh")), v[X]);
}

static const rule rules[] = {
    {OP("Mul", OP("Mul", VAR(X), ONE_PLUS_ERF), HALF), to_gelu},
    {OP("Mul", OP("Mul", VAR(X), HALF), ONE_PLUS_ERF), to_gelu},
    {OP("Mul", OP("Mul", ONE_PLUS_ERF, HALF), VAR(X)), to_gelu},
    {OP("Mul", OP("Mul", VAR(X), ONE_PLUS_TANH), HALF), to_gelu_tanh},
    {OP("Mul", OP("Mul", VAR(X), HALF), ONE_PLUS_TANH), to_gelu_tanh},
    {OP("Mul", OP("Mul", ONE_PLUS_TANH, HALF), VAR(X)), to_gelu_tanh},
    {0},
};

/* Before the gradient: a fused forward gets the fused gradient. */
const pass_def gelu_fusion = {.name = "gelu_fusion", .stage = BEFORE_GRADIENT, .level = 1, .rules = rules};
