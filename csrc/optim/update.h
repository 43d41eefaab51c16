/* update.h -- does an optimizer's step over many tensors, in one pass over their memory, by rule.
 *
 * A rule is what an optimizer does to one element. Everything around it is the same for all: types, threads, scaled
 * and clipped gradients, float32 weights of 16-bit parameters, gradients that are cleared. */
#ifndef ORT_OPTIM_UPDATE_H
#define ORT_OPTIM_UPDATE_H

#include "optim/tiles.h"

enum { MOST_STATES = 3, MOST_SETTINGS = 8, MOST_FACTORS = 12 };

/* One parameter with its gradient and state; all of `tiles.count` elements that lie in the same order. */
typedef struct update_tensor {
    tiled tiles;
    dtype type, grad_type, state_type;
    void *param, *grad;
    void *state[MOST_STATES]; /* as the rule names them; NULL: without */
    float *exact;             /* float32 weights of which `param` is the rounded copy; or NULL */
    void *counter;            /* where its steps are counted, of type counter_type; or NULL. update_tensors leaves it */
    dtype counter_type;
    double step;                  /* this one's number, from 1 */
    double factors[MOST_FACTORS]; /* what update_tensors works with */
} update_tensor;

/* A tile in the type that is computed in, float or double. */
typedef struct tile {
    void *p;
    const void *g;
    void *state[MOST_STATES];
    int64_t n;
} tile;

typedef void rule_fn(const tile *t, const double *factors, double sums[2]);

typedef struct update_rule {
    const char *name;
    int n_settings;
    int n_needed, n_states; /* states that must be there; and those that may be */
    /* A sentence when settings are none of this rule's; else NULL. */
    const char *(*refuse)(const double *settings);
    /* The factors that tiles are computed with, of a tensor at a step. `grad`: of its gradient; unscales, clips,
     * negates. */
    void (*factors)(const double *settings, double step, double grad, double *factors);
    /* Arithmetic in float and in double. With `measure` there are two passes: it updates the states alone, and what it
     * adds up over a tensor `scale` brings into the factors of the second. */
    rule_fn *measure[2], *update[2];
    void (*scale)(double *factors, const double sums[2]);
} update_rule;

extern const update_rule adam_rule, sgd_rule, adagrad_rule, lamb_rule;
/* NULL when there is none of this name. */
const update_rule *update_rule_find(const char *name);

/* Parameters, gradients and states may be any floats; sums are float, double for a double parameter. */
void update_tensors(const update_rule *rule, update_tensor *tensors, int count, const double *settings, double grad,
                    bool clear_gradients);

/* Takes a rule's arithmetic for both types. `LOOP(A, SQRT)` is the body, over t and factors. */
#define RULE(name, LOOP)                                                                                               \
    SIMD static void name##_float(const tile *t, const double *factors, double sums[2]){                               \
        LOOP(float, sqrtf)} SIMD static void name##_double(const tile *t, const double *factors, double sums[2]) {     \
        LOOP(double, sqrt)                                                                                             \
    }

#endif
