/* chain.h -- describes a chain of pointwise operators to kernels: a small program over one element of every operand.
 *
 * The interpreter of fused.cu walks it; generate.c writes a kernel that is it. Both do what pointwise.cu does for one
 * operator, and round every step to its type, so that the bits are those of the single operators. */
#ifndef ORT_CUDA_CHAIN_H
#define ORT_CUDA_CHAIN_H

#include "cuda/kernels/elements.h"
#include "cuda/kernels/steps.h"

enum { CHAIN_OPERANDS = 12, CHAIN_STEPS = 24, CHAIN_RESULTS = 8, STEP_OPERANDS = 4, STEP_PARAMETERS = 2 };

/* Every step there is, by operator and type. */
#define FLOAT_STEP(op, name, ...) STEP_##name##_f32, STEP_##name##_f64,
#define INT_STEP(op, name, ...) STEP_##name##_i64, STEP_##name##_i32,
#define NUMBER_STEP(op, name, ...) FLOAT_STEP(op, name, ) INT_STEP(op, name, )
#define BOOL_STEP(op, name, ...) STEP_##name##_bool,
#define CAST_STEP(from, ...)                                                                                           \
    STEP_##from##_to_f32, STEP_##from##_to_f64, STEP_##from##_to_i64, STEP_##from##_to_i32, STEP_##from##_to_bool,
#define WHERE_STEP(name, ...) STEP_where_##name,
typedef enum step_kind {
#define FORMULA(op, name, ...) FLOAT_STEP(op, name, )
#include "ops/pointwise/operators.h"
    FLOAT_TESTS(FLOAT_STEP) COMPARISONS(NUMBER_STEP) INT_OPERATORS(INT_STEP) BOOL_OPERATORS(BOOL_STEP) CASTS(CAST_STEP)
        CLASSES(WHERE_STEP) STEP_drop_f32,
    STEP_drop_f64,
    STEP_KINDS
} step_kind;

/* Operands and results are places: operands first, in their order, then steps. */
typedef struct chain_step {
    uint16_t kind;
    uint8_t type, out; /* rounded to; place */
    uint8_t in[STEP_OPERANDS];
} chain_step;

/* What a compiled kernel is for: no addresses, sizes or parameters. Without padding, for memcmp. */
typedef struct chain_program {
    int32_t n_in, n_steps, n_out, draws;
    int32_t wide; /* places of elements take 64 bits */
    uint8_t type[CHAIN_OPERANDS], how[CHAIN_OPERANDS];
    uint8_t result[CHAIN_RESULTS], result_type[CHAIN_RESULTS]; /* places */
    chain_step steps[CHAIN_STEPS];
} chain_program;

typedef struct chain_args {
    space space;
    source in[CHAIN_OPERANDS];
    void *out[CHAIN_RESULTS];
    double param[CHAIN_STEPS][STEP_PARAMETERS]; /* of a dropout: the factor, and (key, threshold) as two words */
    const uint64_t *seed_at;                    /* or NULL */
    uint64_t seed;
    chain_program program;
} chain_args;

enum { MOST_PLACES = CHAIN_OPERANDS + CHAIN_STEPS };

#ifdef ORT_DEVICE
#include "cuda/kernels/philox.h"

#define CHAIN_SEED (a.seed_at ? *a.seed_at : a.seed)

/* The two words that a dropout has for its second parameter. */
DEVICE uint32_t word_in(double parameter, int which) {
    union {
        double d;
        uint32_t u[2];
    } v;
    v.d = parameter;
    return v.u[which];
}

#endif

#endif
