/* silu_fusion.c -- x * sigmoid(x)  ->  Swish(x), which PyTorch calls SiLU */
#include "passes/pipeline.h"

enum { X };

static status to_silu(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return emit(g, out, "Swish", v[X]);
}

const pass_def silu_fusion = {
    .name = "silu_fusion",
    .stage = BEFORE_GRADIENT,
    .level = 1,
    .rules = (const rule[]){
        {OP("Mul", OP("Sigmoid", VAR(X)), VAR(X)), to_silu},
        {0},
    },
};
