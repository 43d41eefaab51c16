/* machine.h -- compiles a model for shapes and runs it with memory, as Python does. It is C, so that leaks can be found.
 *
 * Input i is machine.memory[AT_INPUT][i], and so on for every place; all of it is zero at first. */
#ifndef ORT_TEST_MACHINE_H
#define ORT_TEST_MACHINE_H

#include "exec/exec.h"
#include "plan/compile.h"

typedef struct machine {
    ctx c; /* the plan's */
    plan *p;
    const host *host; /* of the options it was compiled with */
    void *arena;
    void **memory[PLACES];
} machine;

/* A specification of an input: SPEC(F32, true, 2, 3). */
#define SPEC(type_, needs_grad_, ...)                                                                                  \
    {                                                                                                                  \
        .type = (type_), .needs_grad = (needs_grad_),                                                                  \
        .shape = {(int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), {__VA_ARGS__}}                            \
    }

/* Compiles; machine_free works after a failure too. */
status machine_make(machine *m, const graph *model, const input_spec *inputs, const compile_options *o);
void machine_free(machine *m);
status machine_forward(machine *m);
status machine_backward(machine *m);
/* Uniform numbers in [low, high) into a float input; the same for the same `seed`. */
void machine_fill(machine *m, int input, unsigned seed, double low, double high);

#endif
