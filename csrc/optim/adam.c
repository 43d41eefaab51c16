/* adam.c -- every tensor is cut into tiles, the tiles of all tensors are shared out among the threads.
 *
 *     g' = ±f g + l2 p                         f: grad_factor, l2: weight decay of ADAM_L2
 *     m += (1 - b1) (g' - m)
 *     v  = b2 v + (1 - b2) g'²
 *     p  = before p - rate m / (√v / root + eps)
 *     p -= after p
 *
 * where before = 1 - lr wd for ADAMW_TORCH and 1 otherwise, after = lr wd for ADAMW_TRANSFORMERS and 0 otherwise: the
 * rounding of a factor is the same at every step and adds up, so each is formed as the optimizer in question does. With
 * the biases c1 = 1 - b1^t and c2 = 1 - b2^t: rate = lr / c1 and root = √c2; for ADAMW_TRANSFORMERS rate = lr √c2 / c1,
 * root = 1.
 *
 * Tiles of float32 (float64) tensors are updated where they lie; others by way of a float tile in the first-level
 * cache. */
#include "optim/adam.h"

#include "core/parallel.h"

#include <math.h>
#include <string.h>

/* Products are rounded before they are added, as PyTorch does: the results of thousands of steps stay together. */
#pragma GCC optimize("fp-contract=off")

enum { TILE = 2048 };

/* --- tiles ------------------------------------------------------------------------------------------------------------ */

typedef void convert_fn(void *to, const void *from, int64_t n);

#define CONVERT(name, TO, FROM, EXPR)                                                                                  \
    SIMD static void name(void *to, const void *from, int64_t n) {                                                     \
        TO *restrict y = to;                                                                                           \
        const FROM *restrict in = from;                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            FROM x = in[i];                                                                                            \
            y[i] = EXPR;                                                                                               \
        }                                                                                                              \
    }

CONVERT(f64_to_float, float, double, (float)x)
CONVERT(bf16_to_float, float, bf16, bf16_to_f32(x))
CONVERT(f16_to_float, float, uint16_t, f16_bits_to_f32(x))
CONVERT(float_to_f64, double, float, x)
CONVERT(float_to_bf16, bf16, float, f32_to_bf16(x))
CONVERT(float_to_f16, uint16_t, float, f32_to_f16_bits(x))
CONVERT(f32_to_double, double, float, x)
CONVERT(bf16_to_double, double, bf16, bf16_to_f32(x))
CONVERT(f16_to_double, double, uint16_t, f16_bits_to_f32(x))
CONVERT(double_to_f32, float, double, (float)x)
CONVERT(double_to_bf16, bf16, double, f32_to_bf16((float)x))
CONVERT(double_to_f16, uint16_t, double, f32_to_f16_bits((float)x))

/* By the stored type; none where it is the type that is computed in. */
typedef struct converters {
    convert_fn *in[DTYPE_COUNT], *out[DTYPE_COUNT];
} converters;

static const converters for_float = {.in = {[F64] = f64_to_float, [BF16] = bf16_to_float, [F16] = f16_to_float},
                                     .out = {[F64] = float_to_f64, [BF16] = float_to_bf16, [F16] = float_to_f16}};
static const converters for_double = {.in = {[F32] = f32_to_double, [BF16] = bf16_to_double, [F16] = f16_to_double},
                                      .out = {[F32] = double_to_f32, [BF16] = double_to_bf16, [F16] = double_to_f16}};

static void *at(void *data, dtype type, int64_t first) { return (char *)data + first * (int64_t)dtype_size(type); }

/* --- the update ------------------------------------------------------------------------------------------------------- */

typedef struct factors {
    double grad, l2, keep_1, keep_2, rate, root, eps, before, after;
} factors;

static factors factors_of(const adam_settings *s, double step) {
    const double c1 = s->correct_bias ? 1 - pow(s->beta_1, step) : 1,
                 c2 = s->correct_bias ? 1 - pow(s->beta_2, step) : 1;
    const double decay = s->lr * s->weight_decay;
    factors f = {.grad = s->maximize ? -s->grad_factor : s->grad_factor,
                 .keep_1 = s->beta_1,
                 .keep_2 = s->beta_2,
                 .rate = s->lr / c1,
                 .root = sqrt(c2),
                 .eps = s->eps,
                 .before = 1};

    if (s->mode == ADAM_L2) f.l2 = s->weight_decay;
    if (s->mode == ADAMW_TORCH) f.before = 1 - decay;
    if (s->mode == ADAMW_TRANSFORMERS) {
        f.after = decay;
        f.rate *= f.root;
        f.root = 1;
    }
    return f;
}

/* Arguments p, g, m, v, v_most (or NULL), all of type A. */
typedef void update_fn(void *p, const void *g, void *m, void *v, void *v_most, int64_t n, const factors *f);

#define UPDATE_ONE(SECOND, A, SQRT)                                                                                    \
    {                                                                                                                  \
        const A d = grad * g[i] + l2 * p[i];                                                                           \
        m[i] += take_1 * (d - m[i]);                                                                                   \
        v[i] = keep_2 * v[i] + take_2 * d * d;                                                                         \
        const A second = (SECOND);                                                                                     \
        const A q = before * p[i] - rate * m[i] / (SQRT(second) / root + eps);                                         \
        p[i] = q - after * q;                                                                                          \
    }

#define UPDATE(name, A, SQRT)                                                                                          \
    SIMD static void name(void *p_, const void *g_, void *m_, void *v_, void *v_most_, int64_t n, const factors *f) {  \
        A *restrict p = p_, *restrict m = m_, *restrict v = v_, *restrict v_most = v_most_;                            \
        const A *restrict g = g_;                                                                                      \
        const A grad = (A)f->grad, l2 = (A)f->l2, take_1 = (A)(1 - f->keep_1), keep_2 = (A)f->keep_2;                  \
        const A take_2 = (A)(1 - f->keep_2), rate = (A)f->rate, root = (A)f->root, eps = (A)f->eps;                    \
        const A before = (A)f->before, after = (A)f->after;                                                            \
        if (v_most)                                                                                                    \
            for (int64_t i = 0; i < n; i++) UPDATE_ONE(v_most[i] = v_most[i] > v[i] ? v_most[i] : v[i], A, SQRT)       \
        else                                                                                                           \
            for (int64_t i = 0; i < n; i++) UPDATE_ONE(v[i], A, SQRT)                                                  \
    }

UPDATE(update_float, float, sqrtf)
UPDATE(update_double, double, sqrt)

/* --- one tile --------------------------------------------------------------------------------------------------------- */

/* A tensor's elements from `first` on, as the type that is computed in: where they lie, or converted into `room`. */
static void *load(const converters *c, void *data, dtype type, int64_t first, int64_t n, void *room) {
    void *source = data ? at(data, type, first) : NULL;

    if (!source || !c->in[type]) return source;
    c->in[type](room, source, n);
    return room;
}

static void save(const converters *c, void *data, dtype type, int64_t first, int64_t n, const void *tile) {
    if (data && c->out[type]) c->out[type](at(data, type, first), tile, n);
}

static void update_tile(const adam_tensor *t, const factors *f, int64_t first, int64_t n, bool clear) {
    _Alignas(64) double room[5][TILE];
    const bool wide = t->type == F64;
    const converters *c = wide ? &for_double : &for_float;
    void *weights = t->exact ? (void *)t->exact : t->param;
    const dtype type = t->exact ? F32 : t->type;
    void *p = load(c, weights, type, first, n, room[0]), *g = load(c, t->grad, t->grad_type, first, n, room[1]);
    void *m = load(c, t->m, t->state_type, first, n, room[2]), *v = load(c, t->v, t->state_type, first, n, room[3]);
    void *v_most = load(c, t->v_most, t->state_type, first, n, room[4]);

    (wide ? update_double : update_float)(p, g, m, v, v_most, n, f);
    save(c, weights, type, first, n, p);
    save(c, t->m, t->state_type, first, n, m);
    save(c, t->v, t->state_type, first, n, v);
    save(c, t->v_most, t->state_type, first, n, v_most);
    if (t->exact) save(&for_float, t->param, t->type, first, n, p);
    if (clear) memset(at(t->grad, t->grad_type, first), 0, (size_t)n * dtype_size(t->grad_type));
}

/* --- all tiles -------------------------------------------------------------------------------------------------------- */

static int64_t tiles_of(int64_t count) { return (count + TILE - 1) / TILE; }

/* Runs `body` for the tiles [begin, end) of a row of tensors: elements [first, first + n) of tensor i. */
#define FOR_TILES(begin, end, tensors, n_tensors, body)                                                                \
    do {                                                                                                               \
        int64_t base_ = 0;                                                                                             \
        for (int i = 0; i < (n_tensors) && base_ < (end); i++) {                                                       \
            const int64_t tiles_ = tiles_of((tensors)[i].count);                                                       \
            const int64_t from_ = (begin) > base_ ? (begin) - base_ : 0;                                               \
            const int64_t to_ = (end) < base_ + tiles_ ? (end) - base_ : tiles_;                                       \
            for (int64_t tile = from_; tile < to_; tile++) {                                                           \
                const int64_t first = tile * TILE;                                                                     \
                const int64_t n = (tensors)[i].count - first < TILE ? (tensors)[i].count - first : TILE;               \
                body;                                                                                                  \
            }                                                                                                          \
            base_ += tiles_;                                                                                           \
        }                                                                                                              \
    } while (0)

typedef struct job {
    const adam_tensor *tensors;
    int count;
    const adam_settings *settings;
} job;

static void update_tiles(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    int last = -1;
    factors f = {0};

    FOR_TILES(begin, end, j->tensors, j->count, {
        if (last < 0 || j->tensors[i].step != j->tensors[last].step) f = factors_of(j->settings, j->tensors[i].step);
        last = i;
        update_tile(&j->tensors[i], &f, first, n, j->settings->clear_gradients);
    });
}

void adam_update(const adam_tensor *tensors, int count, const adam_settings *s) {
    job j = {tensors, count, s};
    int64_t tiles = 0;

    for (int i = 0; i < count; i++) tiles += tiles_of(tensors[i].count);
    parallel_for(tiles, 4, update_tiles, &j);
}

/* --- the norm --------------------------------------------------------------------------------------------------------- */

/* In double: no square of a float32 overflows, so a sum is infinite or NaN only when an element is. */
#define SQUARES(name, A)                                                                                               \
    SIMD static double name(const void *data, int64_t n) {                                                             \
        const A *x = data;                                                                                             \
        double sum = 0;                                                                                                \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];             \
        return sum;                                                                                                    \
    }

SQUARES(squares_float, float)
SQUARES(squares_double, double)

/* A stretch of tiles is added up by one thread, in order: the results do not depend on the number of threads. The tiles
 * of a tensor that began in an earlier stretch go into the stretch's head; nobody else writes the sums of the others. */
enum { STRETCH = 64, STRETCHES = 1024 };

typedef struct norm_job {
    const dense *tensors;
    int count;
    int64_t tiles, from; /* of all tensors; the first tile of these stretches */
    double *sums, heads[STRETCHES];
    int owners[STRETCHES]; /* whose head it is; -1: there is none */
} norm_job;

static double squares_of_tile(const dense *t, int64_t first, int64_t n) {
    _Alignas(64) float room[TILE];
    void *x = at((void *)(uintptr_t)t->data, t->type, first);

    if (t->type == F64) return squares_double(x, n);
    if (for_float.in[t->type]) for_float.in[t->type](room, x, n);
    return squares_float(for_float.in[t->type] ? room : x, n);
}

static void sum_stretches(void *arg, int64_t begin, int64_t end) {
    norm_job *j = arg;

    for (int64_t s = begin; s < end; s++) {
        const int64_t from = j->from + s * STRETCH, to = from + STRETCH < j->tiles ? from + STRETCH : j->tiles;
        j->heads[s] = 0;
        j->owners[s] = -1;
        FOR_TILES(from, to, j->tensors, j->count, {
            const bool head = base_ < from;
            *(head ? &j->heads[s] : &j->sums[i]) += squares_of_tile(&j->tensors[i], first, n);
            if (head) j->owners[s] = i;
        });
    }
}

void sums_of_squares(const dense *tensors, int count, double *sums) {
    norm_job j = {.tensors = tensors, .count = count, .sums = sums};

    for (int i = 0; i < count; i++) {
        sums[i] = 0;
        j.tiles += tiles_of(tensors[i].count);
    }
    for (; j.from < j.tiles; j.from += STRETCH * STRETCHES) {
        int64_t stretches = (j.tiles - j.from + STRETCH - 1) / STRETCH;
        if (stretches > STRETCHES) stretches = STRETCHES;
        parallel_for(stretches, 1, sum_stretches, &j);
        for (int64_t s = 0; s < stretches; s++)
            if (j.owners[s] >= 0) sums[j.owners[s]] += j.heads[s];
    }
}
