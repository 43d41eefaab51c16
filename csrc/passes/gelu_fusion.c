/* gelu_fusion.c -- the two GELU formulas  ->  Gelu(x)
 *
 *   erf    0.5 * x * (1 + erf(x / sqrt(2)))
 *   tanh   0.5 * x * (1 + tanh(sqrt(2 / pi) * (x + 0.044715 * x^3)))
 *
 * Models spell them by hand and the exporter spells them for nn.GELU: the three factors grouped in every way, the
 * division as a multiplication, x drawn out of the bracket. (A cube is a product by now, even where it was a power.)
 *
 * Autocast takes a power in float32, so that all after it is: x is a cast then, half of it is taken before, and the result
 * is rounded again. One operator of 16-bit floats computes and rounds just so: nothing is kept in float32. */
#include "passes/pipeline.h"

#include "ops/op.h"

enum { X, OF, GELU };

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

/* Where half of what was cast is taken: of 16-bit floats as good as exactly. */
static status to_gelu_of_cast(graph *g, value *const v[], const node *root, value **out) {
    return value_is(v[X], "Cast") && v[X]->def->in[0] == v[OF] ? to_gelu_tanh(g, v, root, out) : OK;
}

static status to_narrow(graph *g, value *const v[], const node *root, value **out) {
    const value *narrow = v[X];
    const bool fits = dtype_is_narrow(narrow->type) && narrow->type == root->out[0]->type && v[GELU]->type == F32;
    return fits ? emit(g, out, v[GELU]->def->op->name, v[X]) : OK;
}

#define CAST_OF_X OP_SHARED("Cast", VAR(X))

static const rule rules[] = {
    {OP("Mul", OP("Mul", VAR(X), ONE_PLUS_ERF), HALF), to_gelu},
    {OP("Mul", OP("Mul", VAR(X), HALF), ONE_PLUS_ERF), to_gelu},
    {OP("Mul", OP("Mul", ONE_PLUS_ERF, HALF), VAR(X)), to_gelu},
    {OP("Mul", OP("Mul", VAR(X), ONE_PLUS_TANH), HALF), to_gelu_tanh},
    {OP("Mul", OP("Mul", VAR(X), HALF), ONE_PLUS_TANH), to_gelu_tanh},
    {OP("Mul", OP("Mul", ONE_PLUS_TANH, HALF), VAR(X)), to_gelu_tanh},
    {OP("Mul", OP("Cast", OP("Mul", VAR(OF), HALF)), ONE_PLUS_TANH), to_gelu_of_cast},
    {OP("Cast", EITHER(OP_AS(GELU, "Gelu", CAST_OF_X), OP_AS(GELU, "GeluTanh", CAST_OF_X))), to_narrow},
    {0},
};

/* Before the gradient: a fused forward gets the fused gradient. */
const pass_def gelu_fusion = {.name = "gelu_fusion", .stage = BEFORE_GRADIENT, .rules = rules};
