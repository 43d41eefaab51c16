/* triton.h -- says which operators may become Triton kernels (docs/architecture/triton.md), to a pass and a family. */
#ifndef ORT_GRAPH_TRITON_H
#define ORT_GRAPH_TRITON_H

#include <stdbool.h>
#include <stdint.h>

/* What an attribute or operand has to be: these numbers, one number, or a constant. */
typedef enum triton_wanted { WANTED_NUMBERS, WANTED_SINGLE, WANTED_CONSTANT } triton_wanted;
enum { TRITON_NUMBERS = 8 };
typedef struct triton_condition {
    const char *name; /* of an attribute; "axes" is an operand of reductions, too */
    triton_wanted wanted;
    int count;
    int64_t numbers[TRITON_NUMBERS];
} triton_condition;

typedef struct triton_operator {
    const char *name;
    unsigned classes; /* of the last operand's elements, a set of tile_class (ops/pointwise/pointwise.h) */
    bool is_no_op;    /* does not count among the nodes of a kernel */
    int n_conditions;
    const triton_condition *conditions;
} triton_operator;

typedef struct triton_rules {
    int n_operators, min_nodes;
    const triton_operator *operators;
    bool flash;     /* attention is a kernel, too */
    bool inlines;   /* constants of one element are part of a kernel's text */
    int64_t widest; /* the most elements of a row */
} triton_rules;

#endif
