/* blas_tune.c -- which of its algorithms cuBLASLt is fastest with, product by product.
 *
 * The library's heuristic names some, best guess first. Each runs on memory that the caller gave, where the operands lie
 * and are aligned as in the plan; the least of some turns counts, and the best guess stays unless another is clearly
 * faster. All of them keep the rules that the product was described with: no sum is rounded on the way. */
#include "cuda/libraries/blas_product.h"

#include <time.h>

enum { ROUNDS = 5, MOST_TIMES = 64, PLACE = BLAS_WORK_ALIGNED };
#define SAMPLE 1e-3  /* seconds of work that are long enough to be measured */
#define CLEARLY 0.97 /* of the best guess's time: less is worth another choice */
#define HOPELESS 2.0 /* times the shortest of the first try */

/* A product on memory that was given for it. */
typedef struct trial {
    void *handle;
    const blas_described *p;
    const blas_tuning *t;
    const blas_algorithm *algorithm;
    char *a, *b, *result, *work;
    int times;
    bool refused;
} trial;

static int64_t extent(int64_t lines, int64_t length, int64_t ld, int64_t step, int64_t batch) {
    return (batch - 1) * step + (lines - 1) * ld + length;
}

/* The next place of the memory, whose address is aligned as the operand is and no better; NULL while it is counted. */
static char *take(const blas_tuning *t, size_t *at, int64_t elements, dtype type, int64_t aligned) {
    const size_t from = *at + (aligned < BLAS_ALIGNED ? (size_t)aligned : 0);

    *at = (from + (size_t)elements * dtype_size(type) + PLACE - 1) / PLACE * PLACE;
    return t->memory ? t->memory + from : NULL;
}

/* Where each is in the memory. Returns how many bytes all take. */
static size_t place_operands(trial *r, const blas_key *k, void **vector, void **extra) {
    const dtype type = (dtype)k->type, result = (dtype)k->result_type;
    size_t at = 0;

    r->a = take(r->t, &at,
                extent(k->trans_a ? k->rows : k->inner, k->trans_a ? k->inner : k->rows, k->a_ld, k->a_step, k->batch),
                type, k->a_aligned);
    r->b = take(r->t, &at,
                extent(k->trans_b ? k->inner : k->cols, k->trans_b ? k->cols : k->inner, k->b_ld, k->b_step, k->batch),
                type, k->b_aligned);
    r->result = take(r->t, &at, extent(k->cols, k->rows, k->c_ld, k->c_step, k->batch), result, k->c_aligned);
    *vector = take(r->t, &at, k->rows > k->cols ? k->rows : k->cols, result, k->vector_aligned);
    *extra = k->extra_aligned ? take(r->t, &at, k->rows * k->cols, result, k->extra_aligned) : NULL;
    r->work = take(r->t, &at, (int64_t)k->workspace, U8, PLACE);
    return at;
}

static status try_it(ctx *c, void *arg) {
    trial *r = arg;
    const float one = 1, beta = r->p->key.beta ? 1 : 0;
    const double wide_one = 1, wide_beta = beta;
    const bool is_wide = r->p->key.type == F64;
    void *const *l = r->p->layout;

    for (int i = 0; i < r->times && !r->refused; i++) {
        const int result = blas.cublasLtMatmul(
            r->handle, r->p->description, is_wide ? (const void *)&wide_one : &one, r->a, l[A_LAYOUT], r->b,
            l[B_LAYOUT], is_wide ? (const void *)&wide_beta : &beta, r->result, l[C_LAYOUT], r->result, l[C_LAYOUT],
            r->algorithm, r->work, (size_t)r->p->key.workspace, r->t->at.stream);
        r->refused = blas_is_no(result);
        if (result != 0 && !r->refused) return blas_refuse(c, result, "cublasLtMatmul");
    }
    return OK;
}

static status time_it(ctx *c, trial *r, const blas_algorithm *a, int times, double *seconds) {
    r->algorithm = a;
    r->times = times;
    r->refused = false;
    *seconds = 0;
    TRY(cuda_seconds(c, &r->t->at, try_it, r, seconds));
    *seconds = r->refused ? 0 : *seconds > 0 ? *seconds / times : 1e-9;
    return OK;
}

static double now(void) {
    struct timespec t;
    (void)clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static double least_of(const blas_measured *m) {
    double least = 0;
    for (int i = 0; i < m->count; i++)
        if (m->seconds[i] > 0 && (least == 0 || m->seconds[i] < least)) least = m->seconds[i];
    return least;
}

/* One try of each, which also loads its kernel; then turns of all that may win, the shortest time of each. */
static status measure(ctx *c, trial *r, const blas_answer *answers, blas_measured *m) {
    const double end = r->t->limit > 0 ? now() + r->t->limit : 0;
    double seconds;

    for (int i = 0; i < m->count; i++) {
        TRY(time_it(c, r, &answers[i].algorithm, 1, &seconds));
        if (seconds > 0) TRY(time_it(c, r, &answers[i].algorithm, 1, &m->seconds[i]));
    }
    const double hopeless = HOPELESS * least_of(m);
    for (int round = 0; round < ROUNDS && (end == 0 || now() < end); round++)
        for (int i = 0; i < m->count; i++) {
            if (m->seconds[i] == 0 || m->seconds[i] > hopeless) continue;
            const double times = SAMPLE / m->seconds[i];
            TRY(time_it(c, r, &answers[i].algorithm,
                        times < 1            ? 1
                        : times < MOST_TIMES ? (int)times
                                             : MOST_TIMES,
                        &seconds));
            if (seconds > 0 && seconds < m->seconds[i]) m->seconds[i] = seconds;
        }
    return OK;
}

static int best_of(const blas_measured *m) {
    int best = 0;
    double least = CLEARLY * m->seconds[0];

    for (int i = 1; i < m->count; i++)
        if (m->seconds[i] > 0 && (least == 0 || m->seconds[i] < least)) best = i, least = m->seconds[i];
    return best;
}

/* With the lock. */
status blas_tune(ctx *c, void *handle, blas_described *p, blas_tuning *t) {
    trial r = {.handle = handle, .p = p, .t = t};
    blas_answer answers[BLAS_ANSWERS];
    blas_measured *m;
    void *vector, *extra;
    const size_t needed = place_operands(&r, &p->key, &vector, &extra);

    if (needed > t->needed) t->needed = needed;
    if (!t->memory || needed > t->bytes) return OK;
    TRY(NEW(c, m, 1));
    TRY(blas_ask(c, handle, p, BLAS_ANSWERS, answers, &m->count));
    TRY(blas_set_addresses(c, p, vector, extra));
    TRY(measure(c, &r, answers, m));
    p->settled = true;
    if (least_of(m) == 0) return OK;
    m->of = p->key;
    m->best = p->algorithm = answers[best_of(m)].algorithm;
    if (!blas_choice_set(&p->key, &m->best)) return OK; /* it holds for as long as the product is known */
    m->next = t->found;
    t->found = m;
    return OK;
}

/* Half of its bits are random, and a number of 16 bits or more that starts with any of them is between 1e-20 and 2. */
status blas_fill(ctx *c, const blas_tuning *t) {
    enum { OWN = 1 << 14 };
    uint16_t own[OWN];
    uint64_t state = 1;
    size_t have = t->bytes < sizeof own ? t->bytes : sizeof own;

    for (int i = 0; i < OWN; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        own[i] = (uint16_t)(0x3c00 | (state >> 40 & 0x83ff));
    }
    TRY(cuda_upload(c, &t->at, t->memory, own, have));
    for (size_t more; have < t->bytes; have += more) {
        more = t->bytes - have < have ? t->bytes - have : have;
        TRY(cuda_move(c, &t->at, t->memory + have, t->memory, more));
    }
    return OK;
}
