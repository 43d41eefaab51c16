/* order_rules.h -- finds orders in which steps of a program may run, and the bytes that each needs.
 *
 * Steps and values are numbers here; it knows nothing of nodes or kernels. */
#ifndef ORT_PLAN_ORDER_RULES_H
#define ORT_PLAN_ORDER_RULES_H

#include "core/ctx.h"

#include <stdbool.h>

/* The first is the order that is given, the others look for one that needs less. */
typedef enum order_rule {
    AS_WRITTEN,
    SHRINKING_FIRST, /* as written, but at once what frees more than it makes */
    SMALLEST_FIRST,  /* always what makes the least more than it frees */
    DEPTH_FIRST,     /* what reads the newest value */
    LATEST,          /* from the end on: nothing earlier than its reader needs it, the smallest operands last */
    ORDER_RULES,
} order_rule;

typedef struct order_step {
    const int *in, *out; /* values; each once, and all of `in` are made by earlier steps */
    int n_in, n_out;
    int64_t work;  /* bytes of scratch memory */
    bool in_place; /* an operand that dies here makes room for a result of its size */
} order_step;

typedef struct order_problem {
    int n_steps, n_values;
    const order_step *steps; /* as written */
    const int64_t *bytes;    /* [value] */
    const bool *to_end;      /* [value] there until the last step has run */
    const int *ranges;       /* [n_ranges + 1] steps from one of these to before the next may change places */
    int n_ranges;
} order_problem;

/* What the rules ask of a problem. */
typedef struct order_facts {
    const order_problem *p;
    int *maker;         /* [value] */
    int *first, *reads; /* reads[first[v], first[v + 1]): the steps that read v */
} order_facts;

extern const char *const order_names[ORDER_RULES];

MUST_USE status order_facts_new(ctx *c, const order_problem *p, order_facts *out);
/* order[0, n_steps): the steps, each behind what makes its operands. */
MUST_USE status order_by(ctx *c, const order_facts *f, order_rule rule, int *order);
/* The most bytes that are needed at one time. */
MUST_USE status order_peak(ctx *c, const order_problem *p, const int *order, int64_t *peak);

#endif
