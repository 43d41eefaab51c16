/* adagrad.c -- updates by Adagrad: Duchi, Hazan and Singer, 2011.
 *
 *     g' = f g + l2 p
 *     s += g'²
 *     p -= lr / (1 + (t - 1) lr_decay) g' / (√s + eps) */
#include "core/parallel.h"
#include "optim/update.h"

#include <math.h>

#pragma GCC optimize("fp-contract=off")

enum { LR, LR_DECAY, DECAY, EPS, SETTINGS };
enum { GRAD, L2, RATE, EPSILON };

static void factors_of(const double *s, double step, double grad, double *f) {
    f[GRAD] = grad;
    f[L2] = s[DECAY];
    f[RATE] = s[LR] / (1 + (step - 1) * s[LR_DECAY]);
    f[EPSILON] = s[EPS];
}

#define ADAGRAD(A, SQRT)                                                                                               \
    A *restrict p = t->p, *restrict s = t->state[0];                                                                   \
    const A *restrict g = t->g;                                                                                        \
    const A grad = (A)factors[GRAD], l2 = (A)factors[L2], rate = (A)factors[RATE], eps = (A)factors[EPSILON];          \
    (void)sums;                                                                                                        \
    for (int64_t i = 0; i < t->n; i++) {                                                                               \
        const A d = grad * g[i] + l2 * p[i];                                                                           \
        s[i] += d * d;                                                                                                 \
        p[i] -= rate * (d / (SQRT(s[i]) + eps));                                                                       \
    }

RULE(adagrad, ADAGRAD)

const update_rule adagrad_rule = {.name = "adagrad",
                                  .n_settings = SETTINGS,
                                  .n_needed = 1,
                                  .n_states = 1,
                                  .factors = factors_of,
                                  .update = {adagrad_float, adagrad_double}};
