/* adam.c -- updates by Adam: Kingma and Ba, 2015; AdamW: Loshchilov and Hutter, 2019; AMSGrad: Reddi and others, 2018.
 *
 *     g' = f g + l2 p                          f: of the gradient, l2: weight decay of ADAM_L2
 *     m += (1 - b1) (g' - m)
 *     v  = b2 v + (1 - b2) g'²
 *     p  = before p - rate m / (√v / root + eps)
 *     p -= after p
 *
 * where before = 1 - lr wd for ADAMW_TORCH and 1 otherwise, after = lr wd for ADAMW_TRANSFORMERS and 0 otherwise: the
 * rounding of a factor is the same at every step and adds up, so each is formed as the optimizer in question does. With
 * the biases c1 = 1 - b1^t and c2 = 1 - b2^t: rate = lr / c1 and root = √c2; for ADAMW_TRANSFORMERS rate = lr √c2 / c1,
 * root = 1. */
#include "core/parallel.h"
#include "optim/update.h"

#include <math.h>

/* Products are rounded before they are added, as PyTorch does: the results of thousands of steps stay together. */
#pragma GCC optimize("fp-contract=off")

enum { MODE, LR, BETA_1, BETA_2, EPS, DECAY, CORRECT_BIAS, SETTINGS };
enum { GRAD, L2, TAKE_1, KEEP_2, TAKE_2, RATE, ROOT, EPSILON, BEFORE, AFTER };
enum { M, V, V_MOST }; /* running means of the gradient and of its square; AMSGrad: the largest v so far */
/* Where the weights decay. */
enum {
    ADAM_L2,            /* in the gradient */
    ADAMW_TRANSFORMERS, /* in the weight, after the update; epsilon is added before the bias is corrected */
    ADAMW_TORCH         /* in the weight, before the update */
};

static const char *refuse(const double *s) {
    return s[MODE] == ADAM_L2 || s[MODE] == ADAMW_TRANSFORMERS || s[MODE] == ADAMW_TORCH ? NULL
                                                                                         : "there is no such mode";
}

static void factors_of(const double *s, double step, double grad, double *f) {
    const double c1 = s[CORRECT_BIAS] != 0 ? 1 - pow(s[BETA_1], step) : 1,
                 c2 = s[CORRECT_BIAS] != 0 ? 1 - pow(s[BETA_2], step) : 1;
    const double decay = s[LR] * s[DECAY];

    f[GRAD] = grad;
    f[L2] = s[MODE] == ADAM_L2 ? s[DECAY] : 0;
    f[TAKE_1] = 1 - s[BETA_1];
    f[KEEP_2] = s[BETA_2];
    f[TAKE_2] = 1 - s[BETA_2];
    f[RATE] = s[LR] / c1;
    f[ROOT] = sqrt(c2);
    f[EPSILON] = s[EPS];
    f[BEFORE] = s[MODE] == ADAMW_TORCH ? 1 - decay : 1;
    f[AFTER] = 0;
    if (s[MODE] == ADAMW_TRANSFORMERS) {
        f[AFTER] = decay;
        f[RATE] *= f[ROOT];
        f[ROOT] = 1;
    }
}

#define ONE(SECOND, A, SQRT)                                                                                           \
    {                                                                                                                  \
        const A d = grad * g[i] + l2 * p[i];                                                                           \
        m[i] += take_1 * (d - m[i]);                                                                                   \
        v[i] = keep_2 * v[i] + take_2 * d * d;                                                                         \
        const A second = (SECOND);                                                                                     \
        const A q = before * p[i] - rate * m[i] / (SQRT(second) / root + eps);                                         \
        p[i] = q - after * q;                                                                                          \
    }

#define ADAM(A, SQRT)                                                                                                  \
    A *restrict p = t->p, *restrict m = t->state[M], *restrict v = t->state[V], *restrict most = t->state[V_MOST];     \
    const A *restrict g = t->g;                                                                                        \
    const A grad = (A)factors[GRAD], l2 = (A)factors[L2], take_1 = (A)factors[TAKE_1], keep_2 = (A)factors[KEEP_2];    \
    const A take_2 = (A)factors[TAKE_2], rate = (A)factors[RATE], root = (A)factors[ROOT], eps = (A)factors[EPSILON];  \
    const A before = (A)factors[BEFORE], after = (A)factors[AFTER];                                                    \
    (void)sums;                                                                                                        \
    if (most)                                                                                                          \
        for (int64_t i = 0; i < t->n; i++) ONE(most[i] = most[i] > v[i] ? most[i] : v[i], A, SQRT)                     \
    else                                                                                                               \
        for (int64_t i = 0; i < t->n; i++) ONE(v[i], A, SQRT)

RULE(adam, ADAM)

const update_rule adam_rule = {.name = "adam",
                               .n_settings = SETTINGS,
                               .n_needed = 2,
                               .n_states = 3,
                               .refuse = refuse,
                               .factors = factors_of,
                               .update = {adam_float, adam_double}};
