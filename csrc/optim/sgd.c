/* sgd.c -- updates by stochastic gradient descent with momentum (Polyak, 1964; Nesterov: Sutskever et al., 2013).
 *
 *     g' = f g + l2 p
 *     b  = momentum b + (1 - dampening) g'     without b: d = g'
 *     d  = g' + momentum b with Nesterov, or b
 *     p -= lr d */
#include "core/parallel.h"
#include "optim/update.h"

#include <math.h>

#pragma GCC optimize("fp-contract=off")

enum { LR, MOMENTUM, DAMPENING, DECAY, NESTEROV, SETTINGS };
enum { GRAD, L2, KEEP, TAKE, RATE, LOOK_AHEAD };

static void factors_of(const double *s, double step, double grad, double *f) {
    (void)step;
    f[GRAD] = grad;
    f[L2] = s[DECAY];
    f[KEEP] = s[MOMENTUM];
    f[TAKE] = 1 - s[DAMPENING];
    f[RATE] = s[LR];
    f[LOOK_AHEAD] = s[NESTEROV];
}

#define SGD(A, SQRT)                                                                                                   \
    A *restrict p = t->p, *restrict b = t->state[0];                                                                   \
    const A *restrict g = t->g;                                                                                        \
    const A grad = (A)factors[GRAD], l2 = (A)factors[L2], keep = (A)factors[KEEP], take = (A)factors[TAKE];            \
    const A rate = (A)factors[RATE];                                                                                   \
    const bool look_ahead = factors[LOOK_AHEAD] != 0;                                                                  \
    (void)sums;                                                                                                        \
    if (!b) {                                                                                                          \
        for (int64_t i = 0; i < t->n; i++) p[i] -= rate * (grad * g[i] + l2 * p[i]);                                   \
        return;                                                                                                        \
    }                                                                                                                  \
    for (int64_t i = 0; i < t->n; i++) {                                                                               \
        const A d = grad * g[i] + l2 * p[i];                                                                           \
        b[i] = keep * b[i] + take * d;                                                                                 \
        p[i] -= rate * (look_ahead ? d + keep * b[i] : b[i]);                                                          \
    }

RULE(sgd, SGD)

const update_rule sgd_rule = {
    .name = "sgd", .n_settings = SETTINGS, .n_states = 1, .factors = factors_of, .update = {sgd_float, sgd_double}};
