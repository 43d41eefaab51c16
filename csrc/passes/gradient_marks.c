/* gradient_marks.c -- Sloped(y, x, slope)  ->  y        StopGradient(x)  ->  x        once the gradient is there
 *
 * Both say something to the gradient, and nothing else. Gone, they neither keep an operand that only the gradient would
 * have asked for, nor part chains of pointwise operators. */
#include "passes/pipeline.h"

enum { X, Y, SLOPE };

static status to_operand(graph *g, value *const v[], const node *root, value **out) {
    (void)g, (void)root;
    *out = v[X];
    return OK;
}

static const rule rules[] = {
    {OP("Sloped", VAR(X), VAR(Y), VAR(SLOPE)), to_operand},
    {OP("StopGradient", VAR(X)), to_operand},
    {0},
};

const pass_def gradient_marks = {.name = "gradient_marks", .stage = AFTER_GRADIENT, .rules = rules};
