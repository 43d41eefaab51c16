/* generate.h -- steps of chains by operator, and a chain as the text of a kernel. */
#ifndef ORT_CUDA_GENERATE_H
#define ORT_CUDA_GENERATE_H

#include "cuda/kernels/chain.h"
#include "ops/pointwise/pointwise.h"

/* The step that is this operator, of operands whose last is of class `from`; -1: there is none. */
int chain_step_kind(const op_def *op, tile_class from, tile_class to);

/* A step by its number: the operator, the classes, how many operands, the formula and what it declares, as C. The formula is
 * empty for what is written out in its own way. False: there are no more. */
typedef struct step_formula {
    const char *name, *expression, *before;
    tile_class from, to;
    int operands;
} step_formula;
bool chain_step_formula(int kind, step_formula *out);

/* How many elements a thread of the compiled kernel takes at a time: 4, or 8 where any is narrower than 32 bits. */
int chain_at_once(const chain_program *p);
/* How a compiled kernel for `at_once` elements at a time reads an operand. */
reach chain_reach(const space *a, const source *s, int at_once);

/* The program as the text of a kernel "chain", which includes cuda/kernels/chain.h and takes chain_args. Writes at most `room`
 * bytes, a null byte among them, and returns the bytes of the whole text without it. */
size_t chain_text(const chain_program *p, char *to, size_t room);

#endif
