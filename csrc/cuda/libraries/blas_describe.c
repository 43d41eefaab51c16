/* blas_describe.c -- describes a product to cuBLASLt, and lists the algorithms that the library names for it. */
#include "cuda/libraries/blas_product.h"

enum { COMPUTE_F32 = 68, COMPUTE_F64 = 70, COMPUTE_TF32 = 77 };
enum { PRODUCT_TRANS_A = 3, PRODUCT_TRANS_B = 4, PRODUCT_EPILOGUE = 7 };
enum { PRODUCT_VECTOR = 8, PRODUCT_EXTRA = 11, PRODUCT_EXTRA_LD = 12 };
enum { LAYOUT_BATCH = 5, LAYOUT_STEP = 6 };
enum { WISH_WORKSPACE = 1, WISH_REDUCTION = 3, WISH_ALIGNMENT_A = 5 }; /* of B, C (added) and D (result) follow */
enum { REDUCE_IN_PLACE = 1, REDUCE_AS_COMPUTED = 2 };

static const int library_type[DTYPE_COUNT] = {[F32] = 0, [F64] = 1, [F16] = 2, [BF16] = 14};

status blas_refuse(ctx *c, int result, const char *what) {
    static const char *const texts[] = {[1] = "CUBLAS_STATUS_NOT_INITIALIZED",
                                        [OUT_OF_MEMORY] = "CUBLAS_STATUS_ALLOC_FAILED",
                                        [INVALID_VALUE] = "CUBLAS_STATUS_INVALID_VALUE",
                                        [ARCH_MISMATCH] = "CUBLAS_STATUS_ARCH_MISMATCH",
                                        [EXECUTION_FAILED] = "CUBLAS_STATUS_EXECUTION_FAILED",
                                        [INTERNAL_ERROR] = "CUBLAS_STATUS_INTERNAL_ERROR",
                                        [NOT_SUPPORTED] = "CUBLAS_STATUS_NOT_SUPPORTED"};
    const bool known = result >= 0 && result < (int)(sizeof texts / sizeof texts[0]) && texts[result];
    const status code = result == OUT_OF_MEMORY ? E_NOMEM : blas_is_no(result) ? E_UNSUPPORTED : E_RUNTIME;
    return fail(c, code, "cuBLASLt error %d in %s: %s", result, what, known ? texts[result] : "unknown error");
}

#define CALL BLAS_CALL

static status describe_layout(ctx *c, const blas_key *k, int type, int64_t rows, int64_t cols, int64_t ld, int64_t step,
                              void **out) {
    const int32_t batch = (int32_t)k->batch;

    CALL(c, cublasLtMatrixLayoutCreate, out, type, (uint64_t)rows, (uint64_t)cols, ld);
    if (k->batch == 1) return OK;
    CALL(c, cublasLtMatrixLayoutSetAttribute, *out, LAYOUT_BATCH, &batch, sizeof batch);
    CALL(c, cublasLtMatrixLayoutSetAttribute, *out, LAYOUT_STEP, &step, sizeof step);
    return OK;
}

status blas_set_addresses(ctx *c, const blas_described *p, const void *vector, const void *extra) {
    if (p->key.vector_aligned)
        CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_VECTOR, &vector, sizeof vector);
    if (p->key.extra_aligned)
        CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_EXTRA, &extra, sizeof extra);
    return OK;
}

status blas_describe(ctx *c, blas_described *p) {
    const blas_key *k = &p->key;
    const int type = library_type[k->type], result = library_type[k->result_type];
    const int32_t trans_a = k->trans_a, trans_b = k->trans_b, which = k->epilogue;
    const int compute = k->type == F64 ? COMPUTE_F64 : k->type == F32 && k->tf32 ? COMPUTE_TF32 : COMPUTE_F32;

    CALL(c, cublasLtMatmulDescCreate, &p->description, compute, library_type[k->type == F64 ? F64 : F32]);
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_TRANS_A, &trans_a, sizeof trans_a);
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_TRANS_B, &trans_b, sizeof trans_b);
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_EPILOGUE, &which, sizeof which);
    if (k->extra_aligned)
        CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_EXTRA_LD, &k->rows, sizeof k->rows);
    TRY(blas_set_addresses(c, p, (void *)(uintptr_t)k->vector_aligned, (void *)(uintptr_t)k->extra_aligned));
    TRY(describe_layout(c, k, type, trans_a ? k->inner : k->rows, trans_a ? k->rows : k->inner, k->a_ld, k->a_step,
                        &p->layout[A_LAYOUT]));
    TRY(describe_layout(c, k, type, trans_b ? k->cols : k->inner, trans_b ? k->inner : k->cols, k->b_ld, k->b_step,
                        &p->layout[B_LAYOUT]));
    return describe_layout(c, k, result, k->rows, k->cols, k->c_ld, k->c_step, &p->layout[C_LAYOUT]);
}

static status wish_for(ctx *c, const blas_key *k, void *wish) {
    const int64_t added = k->beta ? k->added_aligned : k->c_aligned;
    const uint32_t aligned[] = {(uint32_t)k->a_aligned, (uint32_t)k->b_aligned, (uint32_t)added,
                                (uint32_t)k->c_aligned};
    const uint32_t reduction =
        k->result_type == F32 || k->result_type == F64 ? REDUCE_IN_PLACE | REDUCE_AS_COMPUTED : REDUCE_AS_COMPUTED;

    CALL(c, cublasLtMatmulPreferenceSetAttribute, wish, WISH_WORKSPACE, &k->workspace, sizeof k->workspace);
    CALL(c, cublasLtMatmulPreferenceSetAttribute, wish, WISH_REDUCTION, &reduction, sizeof reduction);
    for (int i = 0; i < 4; i++)
        CALL(c, cublasLtMatmulPreferenceSetAttribute, wish, WISH_ALIGNMENT_A + i, &aligned[i], sizeof aligned[i]);
    return OK;
}

status blas_ask(ctx *c, void *handle, const blas_described *p, int most, blas_answer *answers, int *count) {
    void *wish = NULL, *const *l = p->layout;
    int given = 0, result = 0;
    status s;

    *count = 0;
    CALL(c, cublasLtMatmulPreferenceCreate, &wish);
    s = wish_for(c, &p->key, wish);
    if (s == OK)
        result = blas.cublasLtMatmulAlgoGetHeuristic(handle, p->description, l[A_LAYOUT], l[B_LAYOUT], l[C_LAYOUT],
                                                     l[C_LAYOUT], wish, most, answers, &given);
    (void)blas.cublasLtMatmulPreferenceDestroy(wish);
    TRY(s);
    if (result != 0) return blas_refuse(c, result, "cublasLtMatmulAlgoGetHeuristic");
    for (int i = 0; i < given; i++)
        if (answers[i].state == 0 && answers[i].workspace <= p->key.workspace) answers[(*count)++] = answers[i];
    return *count > 0 ? OK : fail(c, E_UNSUPPORTED, "cuBLASLt's heuristic knows no algorithm");
}
