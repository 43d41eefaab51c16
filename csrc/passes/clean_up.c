/* clean_up.c -- what is written in a roundabout way goes into a graph in one form:
 *
 *     Reshape(Reshape(x)), Transpose(Transpose(x)), Expand(Expand(x))  ->  one step, or x
 *     an Expand that repeats nothing, a reduction over axes of size 1  ->  Reshape
 *     x + 0, x * 1, -(-x), a Cast to x's own type, there and back      ->  x
 *
 * and so on: each operator's record says what its own nodes may be replaced by (op_def.simplify). It happens while nodes
 * are emitted and not by a walk over the graph, so that a gradient or a pass that emits meets clean operands, and what it
 * emits is clean. Without it graphs are larger and fewer patterns are found; what they compute is the same. (What is another
 * number than PyTorch's unless it is rewritten is op_def.lower's.) */
#include "passes/pipeline.h"

static status run(graph *g, int *fired) {
    *fired = g->n_simplified;
    return OK;
}

const pass_def clean_up = {.name = "clean_up", .stage = WHILE_EMITTED, .run = run};
