/* recompute_choice.h -- chooses, purely, which values backward computes again, or gets from elsewhere.
 *
 * Steps and values are numbers here; it knows nothing of nodes or kernels. A value that forward makes and backward reads
 * is kept from one to the other, or it is made *again* right before backward reads it first, by its step, from what is
 * there then; operands that are not there are made again, too. Or it is *offloaded*: written to other memory as soon as
 * it is made, and read back right before backward, or a step that runs again, reads it first. */
#ifndef ORT_PLAN_RECOMPUTE_CHOICE_H
#define ORT_PLAN_RECOMPUTE_CHOICE_H

#include "core/ctx.h"

#include <stdbool.h>

typedef struct recompute_step {
    const int *in, *out; /* values; `out` in the memory of this plan alone */
    int n_in, n_out;
    double cost;         /* of running it once more; negative: it must not run twice */
    int64_t work;        /* bytes of scratch memory */
    bool in_place;       /* an operand that dies here makes room for a result */
    uint64_t kind;       /* equal for steps that do the same to operands of the same shapes */
    uint64_t checkpoint; /* equal for those of forward that lie in the same one; 0: in none */
} recompute_step;

typedef struct recompute_problem {
    int n_values, n_steps, n_forward; /* steps [0, n_forward) are forward's, in the order of execution */
    const recompute_step *steps;
    const int64_t *bytes; /* [value] */
    const int *maker;     /* [value] the step that makes it, or -1: it is there from the beginning on */
    const bool *held;     /* [value] something else holds it all the time: it takes no memory of the plan's */
    const bool *to_end;   /* [value] there until the last step has run, as a gradient in the arena; NULL: none is */
    const double *moving; /* [value] the cost of writing it to other memory and reading it back; NULL: there is none */
    bool nothing_twice;   /* values are offloaded alone */
    bool
        beside; /* they are copied beside other work: written until the next is made, and read from when the one before is */
} recompute_problem;

/* What one step of forward makes and backward reads, and how it is made again as one. */
typedef struct recompute_option {
    int step;         /* of forward */
    int stash;        /* a smaller value that is kept in its place, for steps that run again to read; -1: none */
    const int *chain; /* steps that run again while all else is kept, in order; the last is `step` */
    int n_chain;
    double cost;   /* of the chain */
    int64_t bytes; /* that need not be kept */
} recompute_option;

typedef struct recompute_choice {
    bool *kept;           /* [value] forward makes it, what runs in backward reads it, and it is kept or made again */
    bool *again;          /* [value] it is made again */
    bool *offloaded;      /* [value] */
    int64_t before, peak; /* the most bytes that are needed at one time: without, and with this choice */
    double cost;          /* of all steps that run twice, and of what is moved */
    double bound;         /* of recompute_to alone: no choice with its target costs less; INFINITY: there is none */
    int count;            /* values that are made again */
    int n_offloaded;
} recompute_choice;

/* All options in the order of their steps: without a stash where everything may run twice; and with the one that costs the
 * least, where its bytes are at most half of what it is kept for and it makes the chain cheaper, or possible. */
MUST_USE status recompute_options(ctx *c, const recompute_problem *p, recompute_option **out, int *count);
/* Takes `taken`, and makes then so much again, or offloads it where that costs less, that `peak` is at most `target`,
 * the least cost for a byte first, or as little as can be reached. */
MUST_USE status recompute_to(ctx *c, const recompute_problem *p, const recompute_option *const *taken, int n_taken,
                             int64_t target, recompute_choice *out);
/* What recompute_to has for one target after the other, which lie a thirty-second of `before` apart, from much memory to
 * none; each choice once. One search finds them. `out`: room for RECOMPUTE_TARGETS, with what they point to in `keeps`. */
enum { RECOMPUTE_TARGETS = 32 };
MUST_USE status recompute_to_each(ctx *c, const recompute_problem *p, const recompute_option *const *taken, int n_taken,
                                  ctx *keeps, recompute_choice *out, int *count);
/* Makes again what lowers the peak most at a cost of at most `most_cost`; nothing where that is not worth it. */
MUST_USE status recompute_cheaply(ctx *c, const recompute_problem *p, double most_cost, recompute_choice *out);
/* Makes all again that lies inside of layers, stretches of forward that repeat: what one gives to those behind it is kept,
 * and all of the last. Layers begin where the least goes from one to the next. Nothing where there are no two. Of each row of
 * layers the first `most`; 0: all. */
MUST_USE status recompute_layers(ctx *c, const recompute_problem *p, int most, recompute_choice *out);
/* Makes all again that lies inside of checkpoints: what goes into them is kept. Of the last one only where that lowers the
 * peak. */
MUST_USE status recompute_checkpoints(ctx *c, const recompute_problem *p, recompute_choice *out);

#endif
