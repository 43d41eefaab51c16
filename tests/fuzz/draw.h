/* draw.h -- draws models of a few nodes from bytes. They have operators of the registry with drawn operands and
 * attributes, and the compositions that passes look for. */
#ifndef ORT_FUZZ_DRAW_H
#define ORT_FUZZ_DRAW_H

#include "fuzz.h"
#include "plan/compile.h"

enum { MOST_INPUTS = 16, MOST_NODES = 30, MOST_OUTPUTS = 3 };

typedef struct drawn {
    graph *model; /* of operators and names; in the context that draw_model was given */
    input_spec inputs[MOST_INPUTS];
    bool grads[MOST_OUTPUTS]; /* which outputs get a gradient */
    unsigned seed;            /* of the inputs' elements */
} drawn;

/* Sizes up to about `largest` an axis. Every node of the model is accepted for the inputs' shapes. */
void draw_model(ctx *c, choices *from, int64_t largest, drawn *out);

#endif
