/* lamb.c -- updates by LAMB: You et al., 2020 (arXiv 1904.00962), algorithm 2 with φ(z) = z.
 *
 *     m += (1 - b1) (f g - m)
 *     v  = b2 v + (1 - b2) (f g)²
 *     u  = (m / c1) / (√(v / c2) + eps) + wd p         c1 = 1 - b1^t, c2 = 1 - b2^t
 *     p -= lr ‖p‖ / ‖u‖ u                               ‖p‖ / ‖u‖ is 1 where either is 0
 *
 * The norms are those of a whole tensor, so there are two passes; u is formed in both. */
#include "core/parallel.h"
#include "optim/update.h"

#include <math.h>

#pragma GCC optimize("fp-contract=off")

enum { LR, BETA_1, BETA_2, EPS, DECAY, CORRECT_BIAS, SETTINGS };
enum { GRAD, TAKE_1, KEEP_2, TAKE_2, MEAN, ROOT, EPSILON, L2, RATE };
enum { M, V };

static void factors_of(const double *s, double step, double grad, double *f) {
    const bool correct = s[CORRECT_BIAS] != 0;

    f[GRAD] = grad;
    f[TAKE_1] = 1 - s[BETA_1];
    f[KEEP_2] = s[BETA_2];
    f[TAKE_2] = 1 - s[BETA_2];
    f[MEAN] = correct ? 1 / (1 - pow(s[BETA_1], step)) : 1;
    f[ROOT] = correct ? sqrt(1 - pow(s[BETA_2], step)) : 1;
    f[EPSILON] = s[EPS];
    f[L2] = s[DECAY];
    f[RATE] = s[LR];
}

static void scale(double *f, const double sums[2]) {
    if (sums[0] > 0 && sums[1] > 0) f[RATE] *= sqrt(sums[0] / sums[1]);
}

#define FACTORS(A)                                                                                                     \
    const A mean = (A)factors[MEAN], root = (A)factors[ROOT], eps = (A)factors[EPSILON], l2 = (A)factors[L2];

#define DIRECTION(SQRT) (mean * m[i] / (SQRT(v[i]) / root + eps) + l2 * p[i])

#define MEASURE(A, SQRT)                                                                                               \
    A *restrict m = t->state[M], *restrict v = t->state[V];                                                            \
    const A *restrict p = t->p, *restrict g = t->g;                                                                    \
    const A grad = (A)factors[GRAD], take_1 = (A)factors[TAKE_1], keep_2 = (A)factors[KEEP_2];                         \
    const A take_2 = (A)factors[TAKE_2];                                                                               \
    double weights = 0, steps = 0;                                                                                     \
    FACTORS(A)                                                                                                         \
    _Pragma("omp simd reduction(+ : weights, steps)") for (int64_t i = 0; i < t->n; i++) {                             \
        const A d = grad * g[i];                                                                                       \
        m[i] += take_1 * (d - m[i]);                                                                                   \
        v[i] = keep_2 * v[i] + take_2 * d * d;                                                                         \
        const A u = DIRECTION(SQRT);                                                                                   \
        weights += (double)p[i] * p[i];                                                                                \
        steps += (double)u * u;                                                                                        \
    }                                                                                                                  \
    sums[0] = weights;                                                                                                 \
    sums[1] = steps;

#define LAMB(A, SQRT)                                                                                                  \
    A *restrict p = t->p;                                                                                              \
    const A *restrict m = t->state[M], *restrict v = t->state[V];                                                      \
    const A rate = (A)factors[RATE];                                                                                   \
    FACTORS(A)                                                                                                         \
    (void)sums;                                                                                                        \
    for (int64_t i = 0; i < t->n; i++) p[i] -= rate * DIRECTION(SQRT);

RULE(measure, MEASURE)
RULE(lamb, LAMB)

const update_rule lamb_rule = {.name = "lamb",
                               .n_settings = SETTINGS,
                               .n_needed = 2,
                               .n_states = 2,
                               .factors = factors_of,
                               .measure = {measure_float, measure_double},
                               .update = {lamb_float, lamb_double},
                               .scale = scale};
