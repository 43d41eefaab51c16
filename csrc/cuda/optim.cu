/* optim.cu -- twin of optim/adam.c, and sums of squares: chunks of many tensors in one launch.
 *
 * The tensors of a launch are in its argument, so that nothing has to be copied to the GPU first: MOST_ROWS of them, of
 * any sizes, but of one combination of types. What depends on a step's number, the loss scale, an overflow or a norm
 * is read where it is. */
#ifndef T
#include "cuda/kernel.h"

enum { MOST_ROWS = 48, CHUNK = 8192 };

/* Which chunks of a launch are whose: those of row i are first[i] to first[i + 1]. */
typedef struct chunks {
    int64_t first[MOST_ROWS + 1];
    int32_t n;
} chunks;

typedef struct adam_row {
    void *p, *g, *m, *v;
    void *most;   /* AMSGrad's, or NULL */
    float *exact; /* weights of which p is the rounded copy, or NULL */
    void *counter;
    int64_t count;
} adam_row;

typedef struct adam_args {
    adam_row rows[MOST_ROWS];
    chunks cut;
    int32_t type, grad_type, state_type, counter_type, lr_type;
    int32_t mode, correct_bias, clear;
    double lr, beta_1, beta_2, eps, decay, grad;
    const void *lr_at;
    const float *scale, *overflow;
    const double *clip;
} adam_args;

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
#include "cuda/optim.h"

enum { THREADS = 256 };
_Static_assert(sizeof(adam_args) <= 4096, "what a launch may be given");

static void cut_in(chunks *cut, int64_t pieces) {
    cut->first[cut->n + 1] = cut->first[cut->n] + pieces;
    cut->n++;
}

static int64_t pieces_of(int64_t count, int64_t each) { return (count + each - 1) / each; }

bool cuda_has_rule(const update_rule *rule) { return rule == &adam_rule; }

static bool alike(const update_tensor *a, const update_tensor *b) {
    return a->type == b->type && a->grad_type == b->grad_type && a->state_type == b->state_type &&
           a->counter_type == b->counter_type && !a->exact == !b->exact;
}

/* Counts the steps, then updates what is in `a`. */
static status launch_adam(ctx *c, const call *k, const update_tensor *t, const adam_args *a) {
    static kernel count = {"adam_count", NULL}, same[DTYPE_COUNT] = FLOAT_KERNELS(adam),
                  mixed[2] = {{"adam_mixed_f32", NULL}, {"adam_mixed_f64", NULL}};
    const bool one_type = t->type == t->grad_type && t->type == t->state_type && !t->exact;
    kernel *f = one_type ? &same[t->type] : &mixed[t->type == F64];

    TRY(cuda_launch(c, k, &count, geometry_over(a->cut.n, WARP * 2, WARP * 2), a));
    return cuda_launch(c, k, f, geometry_over(a->cut.first[a->cut.n], 1, THREADS), a);
}

status cuda_update(ctx *c, const cuda_run *where, const update_rule *rule, const update_tensor *tensors, int count,
                   const double *settings, double grad, bool clear_gradients, cuda_scalars at) {
    enum { MODE, LR, BETA_1, BETA_2, EPS, DECAY, CORRECT_BIAS }; /* optim/adam.c */
    const call k = {.cuda = where};
    adam_args a = {.mode = (int32_t)settings[MODE],
                   .correct_bias = settings[CORRECT_BIAS] != 0,
                   .clear = clear_gradients,
                   .lr = settings[LR],
                   .beta_1 = settings[BETA_1],
                   .beta_2 = settings[BETA_2],
                   .eps = settings[EPS],
                   .decay = settings[DECAY],
                   .grad = grad,
                   .lr_at = at.lr,
                   .lr_type = at.lr_type,
                   .scale = at.scale,
                   .overflow = at.overflow,
                   .clip = at.clip};

    if (!cuda_has_rule(rule)) return fail(c, E_UNSUPPORTED, "there are no kernels of %s", rule->name);
    for (int i = 0; i < count; i++) {
        const update_tensor *t = &tensors[i];
        a.type = t->type;
        a.grad_type = t->grad_type;
        a.state_type = t->state_type;
        a.counter_type = t->counter_type;
        a.rows[a.cut.n] = (adam_row){.p = t->param,
                                     .g = t->grad,
                                     .m = t->state[0],
                                     .v = t->state[1],
                                     .most = t->state[2],
                                     .exact = t->exact,
                                     .counter = t->counter,
                                     .count = t->tiles.count};
        cut_in(&a.cut, pieces_of(t->tiles.count, CHUNK));
        if (a.cut.n < MOST_ROWS && i + 1 < count && alike(t, &tensors[i + 1])) continue;
        TRY(launch_adam(c, &k, t, &a));
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
        const int64_t most = pieces_of(t->tiles.count, CUDA_SUM_PARTS), each = most > CHUNK ? most : CHUNK;
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

KERNEL(adam_count, adam_args) {
    if (a.overflow && *a.overflow != 0) return;
    FOR_EACH(i, a.cut.n) {
        void *counter = a.rows[i].counter;
        set_number(counter, a.counter_type, 0, number_f64(counter, a.counter_type, 0) + 1);
    }
}

/* As in optim/adam.c, where each is explained. */
enum { GRAD, L2, TAKE_1, KEEP_2, TAKE_2, RATE, ROOT, EPSILON, BEFORE, AFTER, FACTORS };
enum { ADAM_L2, ADAMW_TRANSFORMERS, ADAMW_TORCH };

DEVICE void adam_factors(const adam_args *a, double step, double *f) {
    const double lr = a->lr_at ? number_f64(a->lr_at, a->lr_type, 0) : a->lr;
    const double c1 = a->correct_bias ? 1 - pow(a->beta_1, step) : 1,
                 c2 = a->correct_bias ? 1 - pow(a->beta_2, step) : 1;
    double grad = a->grad;

    if (a->scale) grad /= *a->scale;
    if (a->clip) grad *= *a->clip;
    f[GRAD] = grad;
    f[L2] = a->mode == ADAM_L2 ? a->decay : 0;
    f[TAKE_1] = 1 - a->beta_1;
    f[KEEP_2] = a->beta_2;
    f[TAKE_2] = 1 - a->beta_2;
    f[RATE] = a->mode == ADAMW_TRANSFORMERS ? lr / c1 * sqrt(c2) : lr / c1;
    f[ROOT] = a->mode == ADAMW_TRANSFORMERS ? 1 : sqrt(c2);
    f[EPSILON] = a->eps;
    f[BEFORE] = a->mode == ADAMW_TORCH ? 1 - lr * a->decay : 1;
    f[AFTER] = a->mode == ADAMW_TRANSFORMERS ? lr * a->decay : 0;
}

/* One element, from m, v and most, which is less than any without AMSGrad; q is the new weight. */
#define ADAM_ELEMENT(A, SQRT_OF, P, G)                                                                                 \
    const A before_p = (P), d = grad * (G) + l2 * before_p;                                                            \
    m += take_1 * (d - m);                                                                                             \
    v = keep_2 * v + take_2 * d * d;                                                                                   \
    most = most > v ? most : v;                                                                                        \
    A q = before * before_p - rate * m / (SQRT_OF(most) / root + eps);                                                 \
    q -= after * q;

/* What follows is done for every element i of every chunk; `row` is the chunk's. Where the step is left out gradients
 * are cleared nevertheless. */
#define FOR_ADAM_ELEMENTS(A, ...)                                                                                      \
    SHARED(double, f, FACTORS);                                                                                        \
    const int skip = a.overflow && *a.overflow != 0;                                                                   \
    FOR_BLOCKS(chunk, a.cut.first[a.cut.n]) {                                                                          \
        const int at = row_of(a.cut.first, a.cut.n, chunk);                                                            \
        const adam_row row = a.rows[at];                                                                               \
        const int64_t begin = (chunk - a.cut.first[at]) * CHUNK;                                                       \
        const int64_t end = begin + CHUNK < row.count ? begin + CHUNK : row.count;                                     \
        __syncthreads(); /* those of the chunk before have been read */                                                \
        if (threadIdx.x == 0) adam_factors(&a, number_f64(row.counter, a.counter_type, 0), f);                         \
        __syncthreads();                                                                                               \
        const A grad = (A)f[GRAD], l2 = (A)f[L2], take_1 = (A)f[TAKE_1], keep_2 = (A)f[KEEP_2];                        \
        const A take_2 = (A)f[TAKE_2], rate = (A)f[RATE], root = (A)f[ROOT], eps = (A)f[EPSILON];                      \
        const A before = (A)f[BEFORE], after = (A)f[AFTER];                                                            \
        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {                                              \
            if (!skip) __VA_ARGS__                                                                                     \
            if (a.clear) set_number(row.g, a.grad_type, i, 0);                                                         \
        }                                                                                                              \
    }

/* Types differ, or there are exact weights. */
#define MIXED(name, A, READ, SQRT_OF)                                                                                  \
    KERNEL(name, adam_args) {                                                                                          \
        FOR_ADAM_ELEMENTS(A, {                                                                                         \
            A m = READ(row.m, a.state_type, i), v = READ(row.v, a.state_type, i);                                      \
            A most = row.most ? READ(row.most, a.state_type, i) : -INFINITY;                                           \
            ADAM_ELEMENT(A, SQRT_OF, row.exact ? (A)row.exact[i] : READ(row.p, a.type, i),                             \
                         READ(row.g, a.grad_type, i))                                                                  \
            set_number(row.m, a.state_type, i, m);                                                                     \
            set_number(row.v, a.state_type, i, v);                                                                     \
            if (row.most) set_number(row.most, a.state_type, i, most);                                                 \
            if (row.exact) row.exact[i] = (float)q;                                                                    \
            set_number(row.p, a.type, i, q);                                                                           \
        })                                                                                                             \
    }
MIXED(adam_mixed_f32, float, number_f32, sqrtf)
MIXED(adam_mixed_f64, double, number_f64, sqrt)

KERNEL(squares_join, squares_args) {
    FOR_EACH(i, a.cut.n) {
        const int64_t parts = a.cut.first[i + 1] - a.cut.first[i];
        double total = 0;
        for (int64_t part = 0; part < parts; part++) total += a.room[i * SUM_PARTS + part];
        a.sums[i] = total;
    }
}

#define TEMPLATE "cuda/optim.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(adam), adam_args){FOR_ADAM_ELEMENTS(A,
                                                {
                                                    T *p_at = (T *)row.p, *m_at = (T *)row.m, *v_at = (T *)row.v,
                                                      *most_at = (T *)row.most;
                                                    A m = GET(m_at[i]), v = GET(v_at[i]),
                                                      most = most_at ? GET(most_at[i]) : -INFINITY;
                                                    ADAM_ELEMENT(A, SQRT, GET(p_at[i]), GET(((const T *)row.g)[i]))
                                                    m_at[i] = PUT(m);
                                                    v_at[i] = PUT(v);
                                                    if (most_at) most_at[i] = PUT(most);
                                                    p_at[i] = PUT(q);
                                                })}

KERNEL(NAME(squares), squares_args) {
    FOR_BLOCKS(chunk, a.cut.first[a.cut.n]) {
        const int at = row_of(a.cut.first, a.cut.n, chunk);
        const squares_row row = a.rows[at];
        const int64_t part = chunk - a.cut.first[at], begin = part * row.each;
        const int64_t end = begin + row.each < row.count ? begin + row.each : row.count;
        double total = 0;

        for (int64_t i = begin + threadIdx.x; i < end; i += blockDim.x) {
            const double x = GET(((const T *)row.x)[i]);
            total += x * x;
        }
        total = block_sum_f64(total);
        if (threadIdx.x == 0) a.room[(int64_t)at * SUM_PARTS + part] = total;
    }
}
#endif
