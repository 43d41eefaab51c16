/* blas_tune.c -- measures which of its algorithms cuBLASLt is fastest with, product by product.
 *
 * The library's heuristic names some, best guess first. Each runs on memory that the caller gave, where the operands lie
 * and are aligned as in the plan (measure.c). All of them keep the rules that the product was described with: no sum is
 * rounded on the way. */
#include "cuda/libraries/blas_product.h"
#include "cuda/libraries/measure.h"

/* A product on memory that was given for it. */
typedef struct trial {
    void *handle;
    const blas_described *p;
    const measuring *m;
    const blas_answer *answers;
    char *a, *b, *result, *work;
} trial;

/* An operand lies as it does in the plan: no better than it is known to be; best, where it is not known to be worse. */
static size_t lies(int64_t aligned) { return aligned < BLAS_ALIGNED ? (size_t)aligned : MEASURE_ALIGNED; }

static size_t extent(int64_t lines, int64_t length, int64_t ld, int64_t step, int64_t batch, dtype type) {
    return (size_t)((batch - 1) * step + (lines - 1) * ld + length) * dtype_size(type);
}

/* Where each is in the memory. Returns how many bytes all take. */
static size_t place_operands(trial *r, const blas_key *k, void **vector, void **extra) {
    const dtype type = (dtype)k->type, result = (dtype)k->result_type;
    const size_t size = dtype_size(result);
    const measuring *m = r->m;
    size_t at = 0;

    r->a = measure_take(
        m, &at,
        extent(k->trans_a ? k->rows : k->inner, k->trans_a ? k->inner : k->rows, k->a_ld, k->a_step, k->batch, type),
        lies(k->a_aligned));
    r->b = measure_take(
        m, &at,
        extent(k->trans_b ? k->inner : k->cols, k->trans_b ? k->cols : k->inner, k->b_ld, k->b_step, k->batch, type),
        lies(k->b_aligned));
    r->result =
        measure_take(m, &at, extent(k->cols, k->rows, k->c_ld, k->c_step, k->batch, result), lies(k->c_aligned));
    *vector = measure_take(m, &at, (size_t)(k->rows > k->cols ? k->rows : k->cols) * size, lies(k->vector_aligned));
    *extra = k->extra_aligned ? measure_take(m, &at, (size_t)(k->rows * k->cols) * size, lies(k->extra_aligned)) : NULL;
    r->work = measure_take(m, &at, (size_t)k->workspace, MEASURE_ALIGNED);
    return at;
}

static status start(ctx *c, void *arg, int way, bool *refused) {
    const trial *r = arg;
    const float one = 1, beta = r->p->key.beta ? 1 : 0;
    const double wide_one = 1, wide_beta = beta;
    const bool is_wide = r->p->key.type == F64;
    void *const *l = r->p->layout;
    const int result = blas.cublasLtMatmul(r->handle, r->p->description, is_wide ? (const void *)&wide_one : &one, r->a,
                                           l[A_LAYOUT], r->b, l[B_LAYOUT], is_wide ? (const void *)&wide_beta : &beta,
                                           r->result, l[C_LAYOUT], r->result, l[C_LAYOUT], &r->answers[way].algorithm,
                                           r->work, (size_t)r->p->key.workspace, r->m->at.stream);

    *refused = blas_is_no(result);
    return result == 0 || *refused ? OK : blas_refuse(c, result, "cublasLtMatmul");
}

/* With the lock. */
status blas_tune(ctx *c, void *handle, blas_described *p, measuring *m) {
    blas_answer answers[BLAS_ANSWERS];
    trial r = {.handle = handle, .p = p, .m = m, .answers = answers};
    blas_measured *found;
    void *vector, *extra;

    if (!measure_fits(m, place_operands(&r, &p->key, &vector, &extra))) return OK;
    TRY(NEW(c, found, 1));
    TRY(blas_ask(c, handle, p, BLAS_ANSWERS, answers, &found->count));
    TRY(blas_set_addresses(c, p, vector, extra));
    TRY(measure_ways(c, m, found->count, start, &r, found->seconds));
    p->settled = true;
    const int best = measure_best(found->seconds, found->count);
    if (best < 0) return OK;
    found->of = p->key;
    found->best = p->algorithm = answers[best].algorithm;
    if (!blas_choice_set(&p->key, &found->best)) return OK; /* it holds for as long as the product is known */
    found->next = m->found;
    m->found = found;
    return OK;
}
