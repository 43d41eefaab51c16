/* tune.c -- products of a plan, one of each class, run every way there is on random numbers.
 *
 * Ways take turns, so that what else happens on the machine meets all of them, and the least time of each counts. The
 * way that would be taken anyway stays unless another is clearly faster, so that noise changes nothing. */
#include "exec/tune.h"

#include "core/memory.h"
#include "exec/exec.h"

#include <string.h>
#include <time.h>

enum { ROUNDS = 5 };
static const double SAMPLE = 2e-4;  /* seconds: what is shorter is repeated within one measurement */
static const double HOPELESS = 4;   /* a way whose first run takes so many times the fastest's is not run again */
static const double CLEARLY = 0.97; /* of the time of the way taken anyway */
static const double REFERENCE_WORK = 1 << 24; /* multiplications: more are never faster without a kernel */

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

/* --- operands ----------------------------------------------------------------------------------------------------- */

/* What an operand's strides reach: elements before and after its first one. */
typedef struct reach {
    int64_t before, after;
} reach;

static void go(reach *r, int64_t size, int64_t stride) {
    if (stride < 0) r->before -= (size - 1) * stride;
    else r->after += (size - 1) * stride;
}

static reach reach_of(const gemm *g, int64_t rows, int64_t cols, int64_t row, int64_t col, const int64_t *step) {
    reach r = {0, 0};
    go(&r, rows, row);
    go(&r, cols, col);
    for (int i = 0; i < g->n_batch; i++) go(&r, g->batch[i], step[i]);
    return r;
}

/* Random numbers between -1 and 1: zeros would be faster than what a model has. They repeat, which changes nothing. */
static void fill(dtype type, char *data, int64_t count) {
    enum { OWN = 4093 };
    const int64_t size = (int64_t)dtype_size(type), own = count < OWN ? count : OWN;
    uint64_t state = 1;

    for (int64_t i = 0; i < own; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        dtype_set_value(type, data, i, (double)(state >> 40) * 0x1p-23 - 1);
    }
    for (int64_t i = own; i < count; i += own)
        memcpy(data + i * size, data, (size_t)((count - i < own ? count - i : own) * size));
}

/* Memory for one operand, and where its first element is. NULL: there is none. */
static void *take(dtype type, reach r, void **first) {
    const int64_t count = r.before + r.after + 1;
    char *data = memory_take((size_t)count * dtype_size(type));

    if (!data) return NULL;
    fill(type, data, count);
    *first = data + r.before * (int64_t)dtype_size(type);
    return data;
}

/* --- one product -------------------------------------------------------------------------------------------------- */

static double time_of(gemm_way way, const gemm *g, int64_t times) {
    const double start = now();
    for (int64_t i = 0; i < times; i++) (void)gemm_run_by(way, g);
    return (now() - start) / (double)times;
}

static bool may_go(gemm_way way, const gemm *g) {
    const double work = (double)g->m * (double)g->n * (double)g->k * (double)gemm_pairs(g);
    return way != GEMM_REFERENCE || work < REFERENCE_WORK;
}

/* seconds[way] > 0 for those that can; returns how many. The first run also brings pages and code near. */
static int try_all(const gemm *g, double seconds[GEMM_WAYS]) {
    int count = 0;

    for (int way = 1; way < GEMM_WAYS; way++) {
        if (!may_go((gemm_way)way, g) || !gemm_run_by((gemm_way)way, g)) continue;
        seconds[way] = time_of((gemm_way)way, g, 1) + 1e-9;
        count++;
    }
    return count;
}

static double least_of(const double seconds[GEMM_WAYS]) {
    double least = 0;
    for (int way = 1; way < GEMM_WAYS; way++)
        if (seconds[way] > 0 && (least == 0 || seconds[way] < least)) least = seconds[way];
    return least;
}

static void measure(const gemm *g, double end, double seconds[GEMM_WAYS]) {
    const double least = least_of(seconds);
    int64_t times[GEMM_WAYS];

    for (int way = 0; way < GEMM_WAYS; way++) {
        const bool worth = seconds[way] > 0 && seconds[way] <= HOPELESS * least;
        times[way] = !worth ? 0 : seconds[way] < SAMPLE ? (int64_t)(SAMPLE / seconds[way]) + 1 : 1;
    }
    for (int round = 0; round < ROUNDS && (end == 0 || now() < end); round++)
        for (int way = 1; way < GEMM_WAYS; way++) {
            if (times[way] == 0) continue;
            const double t = time_of((gemm_way)way, g, times[way]);
            if (t < seconds[way]) seconds[way] = t > 0 ? t : 1e-9;
        }
}

static gemm_way choose(const double seconds[GEMM_WAYS], gemm_way usual) {
    gemm_way best = usual;
    double least = seconds[usual] > 0 ? CLEARLY * seconds[usual] : 0;

    for (int way = 1; way < GEMM_WAYS; way++) {
        if (seconds[way] == 0 || (least > 0 && seconds[way] >= least)) continue;
        best = (gemm_way)way;
        least = seconds[way];
    }
    return best;
}

bool tune_product(const gemm *given, double limit, tuned *out) {
    const double end = limit > 0 ? now() + limit : 0;
    gemm g = *given;
    void *first_a = NULL, *first_b = NULL, *first_c = NULL;
    bool done = false;

    if (g.m == 0 || g.n == 0 || g.k == 0 || gemm_pairs(&g) == 0) return false;
    gemm_simplify(&g);
    *out = (tuned){.of = gemm_class_of(&g)};
    void *a = take(gemm_type_a(&g), reach_of(&g, g.m, g.k, g.a_row, g.a_col, g.a_step), &first_a);
    void *b = take(gemm_type_b(&g), reach_of(&g, g.k, g.n, g.b_row, g.b_col, g.b_step), &first_b);
    void *c = take(gemm_type_c(&g), reach_of(&g, g.m, g.n, g.c_row, 1, g.c_step), &first_c);
    if (a && b && c) {
        g.a = first_a;
        g.b = first_b;
        g.c = first_c;
        g.beta = 0;
        const gemm_way usual = gemm_run_default(&g);
        if ((done = try_all(&g, out->seconds) > 1)) {
            measure(&g, end, out->seconds);
            out->best = choose(out->seconds, usual);
        }
    }
    memory_give(c);
    memory_give(b);
    memory_give(a);
    return done;
}

/* --- a plan ------------------------------------------------------------------------------------------------------- */

typedef struct found {
    gemm *products; /* one of each class; NULL while they are counted */
    gemm_class *classes;
    int count;
} found;

static void count_product(void *arg, const gemm *g) {
    (void)g;
    ((found *)arg)->count++;
}

static void add_product(void *arg, const gemm *given) {
    found *f = arg;
    gemm g = *given;

    if (g.m == 0 || g.n == 0 || g.k == 0 || gemm_pairs(&g) == 0) return;
    gemm_simplify(&g);
    const gemm_class of = gemm_class_of(&g);
    if (gemm_table_get(of) != GEMM_DEFAULT) return;
    for (int i = 0; i < f->count; i++)
        if (f->classes[i] == of) return;
    f->classes[f->count] = of;
    f->products[f->count++] = g;
}

status tune_plan(ctx *c, const plan *p, double limit, tuned **out, int *count) {
    found all = {0}, f = {0};

    *count = 0;
    TRY(exec_products(c, p, count_product, &all));
    TRY(NEW(c, f.products, all.count));
    TRY(NEW(c, f.classes, all.count));
    TRY(NEW(c, *out, all.count));
    TRY(exec_products(c, p, add_product, &f));
    for (int i = 0; i < f.count; i++) {
        tuned *t = &(*out)[*count];
        if (tune_product(&f.products[i], limit, t) && gemm_table_set(t->of, t->best)) ++*count;
    }
    return OK;
}
