/* optim.cu -- mirrors optim/: the rules, and sums of squares; chunks of many tensors in one launch.
 *
 * The tensors of a launch are in its argument, so that nothing has to be copied to the GPU first: MOST_ROWS of them, of
 * any sizes, but of one combination of types. What depends on a step's number, the loss scale, an overflow or a norm
 * is read where it is. */
#ifndef A
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

enum { MOST_ROWS = 48, CHUNK = 8192 };

/* Which chunks of a launch are whose: those of row i are first[i] to first[i + 1]. */
typedef struct chunks {
    int64_t first[MOST_ROWS + 1];
    int32_t n;
} chunks;

typedef struct update_row {
    void *p, *g, *s[3]; /* states, or NULL, as the rule names them */
    float *exact;       /* weights of which p is the rounded copy, or NULL */
    void *counter;      /* or NULL */
    int64_t count;
} update_row;

typedef struct update_args {
    update_row rows[MOST_ROWS];
    chunks cut;
    int32_t type, grad_type, state_type, counter_type, lr_type;
    int32_t clear, grown; /* grown: a tensor has at most SUM_PARTS chunks, which grow */
    double settings[8], grad;
    const void *lr_at;
    const float *scale, *overflow;
    const double *clip;
    double *room; /* what a rule measures of every chunk, two sums; or NULL */
} update_args;

typedef struct squares_row {
    const void *x;
    int64_t count, each; /* elements of a chunk */
} squares_row;

typedef struct squares_args {
    squares_row rows[MOST_ROWS];
    chunks cut;
    int32_t type;
    double *sums, *room;
} squares_args;

#ifdef ORT_HOST
#include "cuda/kernels/optim.h"

enum { THREADS = 256 };
_Static_assert(sizeof(update_args) <= 4096, "what a launch may be given");
_Static_assert(MOST_SETTINGS == 8 && MOST_STATES == 3, "optim.cu repeats optim/update.h");

static void cut_in(chunks *cut, int64_t pieces) {
    cut->first[cut->n + 1] = cut->first[cut->n] + pieces;
    cut->n++;
}

static int64_t pieces_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

/* Elements of a chunk, of which a tensor has at most CUDA_SUM_PARTS. */
static int64_t grown_chunk(int64_t count) {
    const int64_t most = pieces_of(count, CUDA_SUM_PARTS);
    return most > CHUNK ? most : CHUNK;
}

/* Kernels for tensors all of one type, by it; and for types that differ, in float and in double. */
typedef struct update_kernels {
    kernel *same, *mixed;
} update_kernels;

typedef struct twin {
    const update_rule *rule;
    update_kernels measure, update;
    bool counts; /* a step's number is needed */
} twin;

#define KERNELS_OF(f)                                                                                                  \
    static kernel f##_same[DTYPE_COUNT] = FLOAT_KERNELS(f),                                                            \
                  f##_mixed[] = {{.name = #f "_mixed_f32"}, {.name = #f "_mixed_f64"}};
#define KERNELS(f) {f##_same, f##_mixed}
KERNELS_OF(adam)
KERNELS_OF(sgd)
KERNELS_OF(adagrad)
KERNELS_OF(lamb)
KERNELS_OF(lamb_measure)

static const twin *twin_of(const update_rule *rule) {
    static const twin twins[] = {{&adam_rule, {NULL, NULL}, KERNELS(adam), true},
                                 {&sgd_rule, {NULL, NULL}, KERNELS(sgd), false},
                                 {&adagrad_rule, {NULL, NULL}, KERNELS(adagrad), true},
                                 {&lamb_rule, KERNELS(lamb_measure), KERNELS(lamb), true}};

    for (size_t i = 0; i < sizeof twins / sizeof twins[0]; i++)
        if (twins[i].rule == rule) return &twins[i];
    return NULL;
}

static bool alike(const update_tensor *a, const update_tensor *b) {
    return a->type == b->type && a->grad_type == b->grad_type && a->state_type == b->state_type &&
           a->counter_type == b->counter_type && !a->exact == !b->exact;
}

/* Counts the steps, then updates what is in `a`. */
static status launch_update(ctx *c, const call *k, const twin *w, const update_tensor *t, const update_args *a) {
    static kernel count = {"update_count", NULL};
    const bool one_type = t->type == t->grad_type && (!t->state_type || t->type == t->state_type) && !t->exact;
    const geometry blocks = geometry_over(a->cut.first[a->cut.n], 1, THREADS);

    if (t->counter) TRY(cuda_launch(c, k, &count, geometry_over(a->cut.n, WARP * 2, WARP * 2), a));
    for (int pass = w->measure.same ? 0 : 1; pass < 2; pass++) {
        const update_kernels *f = pass ? &w->update : &w->measure;
        TRY(cuda_launch(c, k, one_type ? &f->same[t->type] : &f->mixed[t->type == F64], blocks, a));
    }
    return OK;
}

status cuda_update(ctx *c, const cuda_run *where, const update_rule *rule, const update_tensor *tensors, int count,
                   const double *settings, double grad, bool clear_gradients, cuda_scalars at) {
    const twin *w = twin_of(rule);
    const call k = {.cuda = where};
    update_args a = {.clear = clear_gradients,
                     .grad = grad,
                     .lr_at = at.lr,
                     .lr_type = at.lr_type,
                     .scale = at.scale,
                     .overflow = at.overflow,
                     .clip = at.clip};

    if (!w) return fail(c, E_UNSUPPORTED, "there are no kernels of %s", rule->name);
    for (int i = 0; i < rule->n_settings; i++) a.settings[i] = settings[i];
    if (w->measure.same && !at.room) return fail(c, E_INVALID, "%s needs room for its sums", rule->name);
    if (w->measure.same) {
        a.room = at.room;
        a.grown = true;
    }
    for (int i = 0; i < count; i++) {
        const update_tensor *t = &tensors[i];
        if (w->counts && !t->counter) return fail(c, E_INVALID, "step %d is not there", i);
        a.type = t->type;
        a.grad_type = t->grad_type;
        a.state_type = t->state_type;
        a.counter_type = t->counter_type;
        a.rows[a.cut.n] = (update_row){.p = t->param,
                                       .g = t->grad,
                                       .s = {t->state[0], t->state[1], t->state[2]},
                                       .exact = t->exact,
                                       .counter = t->counter,
                                       .count = t->tiles.count};
        cut_in(&a.cut, pieces_of(t->tiles.count, a.grown ? grown_chunk(t->tiles.count) : CHUNK));
        if (a.cut.n < MOST_ROWS && i + 1 < count && alike(t, &tensors[i + 1])) continue;
        TRY(launch_update(c, &k, w, t, &a));
        a.cut.n = 0;
    }
    return OK;
}

status cuda_sums_of_squares(ctx *c, const cuda_run *where, const dense *tensors, int count, double *sums,
                            double *room) {
    static kernel squares[DTYPE_COUNT] = FLOAT_KERNELS(squares), join = {"squares_join", NULL};
    const call k = {.cuda = where};
    squares_args a = {.sums = sums, .room = room};

    for (int i = 0; i < count; i++) {
        const dense *t = &tensors[i];
        const int64_t each = grown_chunk(t->tiles.count);
        a.type = t->type;
        a.rows[a.cut.n] = (squares_row){t->data, t->tiles.count, each};
        cut_in(&a.cut, pieces_of(t->tiles.count, each));
        if (a.cut.n < MOST_ROWS && i + 1 < count && t->type == tensors[i + 1].type) continue;
        TRY(cuda_launch(c, &k, &squares[t->type], geometry_over(a.cut.first[a.cut.n], 1, THREADS), &a));
        TRY(cuda_launch(c, &k, &join, geometry_over(a.cut.n, WARP * 2, WARP * 2), &a));
        a.sums += a.cut.n;
        a.room += (int64_t)a.cut.n * CUDA_SUM_PARTS;
        a.cut.n = 0;
    }
    return OK;
}
#endif

#ifdef ORT_DEVICE
enum { SUM_PARTS = 128 }; /* CUDA_SUM_PARTS */

/* The row of a chunk. */
DEVICE int row_of(const int64_t *first, int n, int64_t chunk) {
    int low = 0, high = n - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (first[middle] <= chunk) low = middle;
        else high = middle - 1;
    }
    return low;
}

KERNEL(update_count, update_args) {
    if (a.overflow && *a.overflow != 0) return;
    FOR_EACH(i, a.cut.n) {
        void *counter = a.rows[i].counter;
        set_number(counter, a.counter_type, 0, number_f64(counter, a.counter_type, 0) + 1);
    }
}

/* --- rules: as in optim/, where each is explained ----------------------------------------------------------------- */

enum { MOST_FACTORS = 12 };

DEVICE double rate_of(const update_args *a, int setting) {
    return a->lr_at ? number_f64(a->lr_at, a->lr_type, 0) : a->settings[setting];
}

DEVICE double grad_of(const update_args *a) {
    double grad = a->grad;
    if (a->scale) grad /= *a->scale;
    if (a->clip) grad *= *a->clip;
    return grad;
}

/* Of every rule: the factors of a tensor at a step (0: it is not counted), in double; for the template, their names in
 * the arithmetic's type A, and what is done to one element, from its weight p, gradient g and states s, which are 0
 * where there are none. */
enum { ADAM_MODE, ADAM_LR, ADAM_BETA_1, ADAM_BETA_2, ADAM_EPS, ADAM_DECAY, ADAM_CORRECTS };
enum { ADAM_L2, ADAMW_TRANSFORMERS, ADAMW_TORCH };

DEVICE void adam_factors(const update_args *a, double step, double *f) {
    const double *s = a->settings, lr = rate_of(a, ADAM_LR), decay = s[ADAM_DECAY];
    const int mode = (int)s[ADAM_MODE], correct = s[ADAM_CORRECTS] != 0;
    const double c1 = correct ? 1 - pow(s[ADAM_BETA_1], step) : 1, c2 = correct ? 1 - pow(s[ADAM_BETA_2], step) : 1;

    f[0] = grad_of(a);
    f[1] = mode == ADAM_L2 ? decay : 0;
    f[2] = 1 - s[ADAM_BETA_1];
    f[3] = s[ADAM_BETA_2];
    f[4] = 1 - s[ADAM_BETA_2];
    f[5] = mode == ADAMW_TRANSFORMERS ? lr / c1 * sqrt(c2) : lr / c1;
    f[6] = mode == ADAMW_TRANSFORMERS ? 1 : sqrt(c2);
    f[7] = s[ADAM_EPS];
    f[8] = mode == ADAMW_TORCH ? 1 - lr * decay : 1;
    f[9] = mode == ADAMW_TRANSFORMERS ? lr * decay : 0;
}
#define ADAM_NAMES                                                                                                     \
    const A grad = (A)f[0], l2 = (A)f[1], take_1 = (A)f[2], keep_2 = (A)f[3], take_2 = (A)f[4], rate = (A)f[5];        \
    const A root = (A)f[6], eps = (A)f[7], before = (A)f[8], after = (A)f[9];
#define ADAM_ELEMENT                                                                                                   \
    const A d = grad * g + l2 * p;                                                                                     \
    s[0] += take_1 * (d - s[0]);                                                                                       \
    s[1] = keep_2 * s[1] + take_2 * d * d;                                                                             \
    s[2] = row.s[2] && s[2] > s[1] ? s[2] : s[1];                                                                      \
    p = before * p - rate * s[0] / (SQRT(s[2]) / root + eps);                                                          \
    p -= after * p;

enum { SGD_LR, SGD_MOMENTUM, SGD_DAMPENING, SGD_DECAY, SGD_NESTEROV };

/* Only where momentum is dampened steps are counted: the first is not. */
DEVICE void sgd_factors(const update_args *a, double step, double *f) {
    const double *s = a->settings;
    f[0] = grad_of(a);
    f[1] = s[SGD_DECAY];
    f[2] = s[SGD_MOMENTUM];
    f[3] = step == 1 ? 1 : 1 - s[SGD_DAMPENING];
    f[4] = rate_of(a, SGD_LR);
    f[5] = s[SGD_NESTEROV];
}
#define SGD_NAMES                                                                                                      \
    const A grad = (A)f[0], l2 = (A)f[1], keep = (A)f[2], take = (A)f[3], rate = (A)f[4];                              \
    const int look_ahead = f[5] != 0;
#define SGD_ELEMENT                                                                                                    \
    const A d = grad * g + l2 * p;                                                                                     \
    s[0] = keep * s[0] + take * d;                                                                                     \
    p -= rate * (!row.s[0] ? d : look_ahead ? d + keep * s[0] : s[0]);

enum { ADAGRAD_LR, ADAGRAD_LR_DECAY, ADAGRAD_DECAY, ADAGRAD_EPS };

DEVICE void adagrad_factors(const update_args *a, double step, double *f) {
    const double *s = a->settings;
    f[0] = grad_of(a);
    f[1] = s[ADAGRAD_DECAY];
    f[2] = rate_of(a, ADAGRAD_LR) / (1 + (step - 1) * s[ADAGRAD_LR_DECAY]);
    f[3] = s[ADAGRAD_EPS];
}
#define ADAGRAD_NAMES const A grad = (A)f[0], l2 = (A)f[1], rate = (A)f[2], eps = (A)f[3];
#define ADAGRAD_ELEMENT                                                                                                \
    const A d = grad * g + l2 * p;                                                                                     \
    s[0] += d * d;                                                                                                     \
    p -= rate * (d / (SQRT(s[0]) + eps));

enum { LAMB_LR, LAMB_BETA_1, LAMB_BETA_2, LAMB_EPS, LAMB_DECAY, LAMB_CORRECTS };

DEVICE void lamb_factors(const update_args *a, double step, double *f) {
    const double *s = a->settings;
    const int correct = s[LAMB_CORRECTS] != 0;
    f[0] = grad_of(a);
    f[1] = 1 - s[LAMB_BETA_1];
    f[2] = s[LAMB_BETA_2];
    f[3] = 1 - s[LAMB_BETA_2];
    f[4] = correct ? 1 / (1 - pow(s[LAMB_BETA_1], step)) : 1;
    f[5] = correct ? sqrt(1 - pow(s[LAMB_BETA_2], step)) : 1;
    f[6] = s[LAMB_EPS];
    f[7] = s[LAMB_DECAY];
    f[8] = rate_of(a, LAMB_LR);
}
#define LAMB_DIRECTION (mean * s[0] / (SQRT(s[1]) / root + eps) + l2 * p)
#define LAMB_NAMES const A mean = (A)f[4], root = (A)f[5], eps = (A)f[6], l2 = (A)f[7], rate = (A)f[8];
#define LAMB_ELEMENT                                                                                                   \
    (void)g;                                                                                                           \
    p -= rate * LAMB_DIRECTION;

#define LAMB_MEASURE_NAMES                                                                                             \
    const A grad = (A)f[0], take_1 = (A)f[1], keep_2 = (A)f[2], take_2 = (A)f[3];                                      \
    const A mean = (A)f[4], root = (A)f[5], eps = (A)f[6], l2 = (A)f[7];
#define LAMB_MEASURE_ELEMENT                                                                                           \
    const A d = grad * g;                                                                                              \
    s[0] += take_1 * (d - s[0]);                                                                                       \
    s[1] = keep_2 * s[1] + take_2 * d * d;                                                                             \
    const A u = LAMB_DIRECTION;                                                                                        \
    weights += (double)p * p;                                                                                          \
    steps += (double)u * u;

/* The rate's factor, from what lamb_measure has left of every chunk; the chunks are added up in order. */
DEVICE void lamb_scale(const update_args *a, int row, double *f) {
    const int64_t n = a->cut.first[row + 1] - a->cut.first[row];
    const double *parts = a->room + 2 * a->cut.first[row];
    double weights = 0, steps = 0;
    for (int64_t i = 0; i < n; i++) {
        weights += parts[2 * i];
        steps += parts[2 * i + 1];
    }
    if (weights > 0 && steps > 0) f[8] *= sqrt(weights / steps);
}

/* What a rule's kernel writes. */
enum { STATES = 1, WEIGHTS = 2, SUMS = 4 };

KERNEL(squares_join, squares_args) {
    FOR_EACH(i, a.cut.n) {
        const int64_t parts = a.cut.first[i + 1] - a.cut.first[i];
        double total = 0;
        for (int64_t part = 0; part < parts; part++) total += a.room[i * SUM_PARTS + part];
        a.sums[i] = total;
    }
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Types differ, or there are exact weights. */
#define OWN_TYPE(type) type

#define MIXED(f) f##_mixed_f32
#define NAME(f) MIXED(f)
#define A float
#define SQRT sqrtf
#define TAKE take_float
#define GIVE give_float
#include "cuda/kernels/optim.cu"
#undef MIXED
#undef A
#undef SQRT
#undef TAKE
#undef GIVE

#define MIXED(f) f##_mixed_f64
#define A double
#define SQRT sqrt
#define TAKE take_double
#define GIVE give_double
#include "cuda/kernels/optim.cu"
#undef NAME
#undef A
#undef SQRT
#undef TAKE
#undef GIVE
#undef OWN_TYPE

/* All are of one type. */
#define OWN_TYPE(type) TYPE
#define TEMPLATE "cuda/kernels/optim.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

/* A piece's values, of a tensor's own type, of which there may be more than one. */
DEVICE void NAME(read_values)(const update_args *a, const update_row *row, int64_t i, int64_t begin, int64_t end,
                              A p[AT_ONCE], A g[AT_ONCE], A s[3][AT_ONCE]) {
    (void)a;
    if (row->exact) TAKE(row->exact, F32, i, begin, end, p);
    else TAKE(row->p, OWN_TYPE(a->type), i, begin, end, p);
    TAKE(row->g, OWN_TYPE(a->grad_type), i, begin, end, g);
    UNROLL for (int k = 0; k < 3; k++) {
        if (row->s[k]) {
            TAKE(row->s[k], OWN_TYPE(a->state_type), i, begin, end, s[k]);
        } else {
            UNROLL for (int j = 0; j < AT_ONCE; j++) s[k][j] = 0;
        }
    }
}

DEVICE void NAME(write_states)(const update_args *a, const update_row *row, int64_t i, int64_t begin, int64_t end,
                               A s[3][AT_ONCE]) {
    (void)a;
    UNROLL for (int k = 0; k < 3; k++) if (row->s[k]) GIVE(row->s[k], OWN_TYPE(a->state_type), i, begin, end, s[k]);
}

DEVICE void NAME(write_weights)(const update_args *a, const update_row *row, int64_t i, int64_t begin, int64_t end,
                                const A p[AT_ONCE]) {
    (void)a;
    if (row->exact) GIVE(row->exact, F32, i, begin, end, p);
    GIVE(row->p, OWN_TYPE(a->type), i, begin, end, p);
}

#define RULE adam
#define FACTORS(row, step) adam_factors(&a, step, f)
#define NAMES ADAM_NAMES
#define ELEMENT ADAM_ELEMENT
#define WRITES (STATES | WEIGHTS)
#include "cuda/kernels/optim_rule.h"

#define RULE sgd
#define FACTORS(row, step) sgd_factors(&a, step, f)
#define NAMES SGD_NAMES
#define ELEMENT SGD_ELEMENT
#define WRITES (STATES | WEIGHTS)
#include "cuda/kernels/optim_rule.h"

#define RULE adagrad
#define FACTORS(row, step) adagrad_factors(&a, step, f)
#define NAMES ADAGRAD_NAMES
#define ELEMENT ADAGRAD_ELEMENT
#define WRITES (STATES | WEIGHTS)
#include "cuda/kernels/optim_rule.h"

#define RULE lamb_measure
#define FACTORS(row, step) lamb_factors(&a, step, f)
#define NAMES LAMB_MEASURE_NAMES
#define ELEMENT LAMB_MEASURE_ELEMENT
#define WRITES (STATES | SUMS)
#include "cuda/kernels/optim_rule.h"

#define RULE lamb
#define FACTORS(row, step) (lamb_factors(&a, step, f), lamb_scale(&a, row, f))
#define NAMES LAMB_NAMES
#define ELEMENT LAMB_ELEMENT
#define WRITES WEIGHTS
#include "cuda/kernels/optim_rule.h"

#ifdef TYPE
KERNEL(NAME(squares), squares_args) {
    FOR_BLOCKS(chunk, a.cut.first[a.cut.n]) {
        const int at = row_of(a.cut.first, a.cut.n, chunk);
        const squares_row row = a.rows[at];
        const int64_t part = chunk - a.cut.first[at], begin = part * row.each;
        const int64_t end = begin + row.each < row.count ? begin + row.each : row.count;
        double total = 0;

        FOR_PIECES(i, begin, end) {
            A x[AT_ONCE];
            TAKE(row.x, TYPE, i, begin, end, x);
            EACH_OF(j, i, begin, end) total += (double)x[j] * x[j];
        }
        total = block_sum_f64(total);
        if (threadIdx.x == 0) a.room[(int64_t)at * SUM_PARTS + part] = total;
    }
}
#endif
#endif
