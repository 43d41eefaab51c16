/* blas_product.h -- declares cuBLASLt's entry points and products that it knows: what blas.c and blas_tune.c share. */
#ifndef ORT_CUDA_BLAS_PRODUCT_H
#define ORT_CUDA_BLAS_PRODUCT_H

#include "cuda/host/library.h"
#include "cuda/libraries/blas.h"

/* What the heuristic answers. */
typedef struct blas_answer {
    blas_algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} blas_answer;

#define BLAS_FUNCTIONS(F)                                                                                              \
    F(cublasLtCreate, (void **out))                                                                                    \
    F(cublasLtDestroy, (void *handle))                                                                                 \
    F(cublasLtMatmulDescCreate, (void **out, int compute, int scale))                                                  \
    F(cublasLtMatmulDescSetAttribute, (void *product, int attribute, const void *value, size_t size))                  \
    F(cublasLtMatmulDescDestroy, (void *product))                                                                      \
    F(cublasLtMatrixLayoutCreate, (void **out, int type, uint64_t rows, uint64_t cols, int64_t ld))                    \
    F(cublasLtMatrixLayoutSetAttribute, (void *layout, int attribute, const void *value, size_t size))                 \
    F(cublasLtMatrixLayoutDestroy, (void *layout))                                                                     \
    F(cublasLtMatmulPreferenceCreate, (void **out))                                                                    \
    F(cublasLtMatmulPreferenceSetAttribute, (void *wish, int attribute, const void *value, size_t size))               \
    F(cublasLtMatmulPreferenceDestroy, (void *wish))                                                                   \
    F(cublasLtMatmulAlgoGetHeuristic, (void *handle, void *product, void *a, void *b, void *c, void *d, void *wish,    \
                                       int most, blas_answer *answers, int *count))                                    \
    F(cublasLtMatmulAlgoCheck,                                                                                         \
      (void *handle, void *product, void *a, void *b, void *c, void *d, const blas_algorithm *how, blas_answer *out))  \
    F(cublasLtGetProperty, (int which, int *out))                                                                      \
    F(cublasLtMatmul, (void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b,   \
                       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,       \
                       const blas_algorithm *how, void *work, size_t work_bytes, void *stream))

typedef struct blas_functions {
    BLAS_FUNCTIONS(ENTRY_MEMBER)
} blas_functions;

typedef enum blas_result {
    OUT_OF_MEMORY = 3,
    INVALID_VALUE = 7,
    ARCH_MISMATCH = 8,
    EXECUTION_FAILED = 13,
    INTERNAL_ERROR = 14,
    NOT_SUPPORTED = 15
} blas_result;
/* Of blas.c, loaded by the time that there is a product. */
extern blas_functions blas;

enum { A_LAYOUT, B_LAYOUT, C_LAYOUT, LAYOUTS };

typedef struct blas_described {
    blas_key key;
    bool used, taken; /* in the table; by the library */
    bool refused;     /* when it was described or started: it is not asked for again */
    bool settled;     /* it has run, or been measured: its bits stay as they are */
    void *description, *layout[LAYOUTS];
    blas_algorithm algorithm;
} blas_described;

/* No operand is known to be aligned better; what an epilogue reads or leaves never is worse. */
enum { BLAS_ALIGNED = 16 };

/* E_UNSUPPORTED where another way may do what the library does not. */
MUST_USE status blas_refuse(ctx *c, int result, const char *what);
/* Whether it says that the library does not do such a product. A kernel that faulted says so, too: then the next call
 * of the driver's fails. */
static inline bool blas_is_no(int result) {
    return result == NOT_SUPPORTED || result == INVALID_VALUE || result == ARCH_MISMATCH ||
           result == EXECUTION_FAILED || result == INTERNAL_ERROR;
}

/* Makes p->description and p->layout from its key. */
MUST_USE status blas_describe(ctx *c, blas_described *p);
/* Up to `most` algorithms that the library would take, its best guess first. E_UNSUPPORTED: it knows none. */
MUST_USE status blas_ask(ctx *c, void *handle, const blas_described *p, int most, blas_answer *answers, int *count);
/* Where the epilogue's vector and matrix are. When it chooses the library looks at the addresses' alignment only. */
MUST_USE status blas_set_addresses(ctx *c, const blas_described *p, const void *vector, const void *extra);
/* Measures a product and takes what was fastest from then on (blas_tune.c). */
MUST_USE status blas_tune(ctx *c, void *handle, blas_described *p, struct measuring *m);

#define BLAS_CALL(c, name, ...)                                                                                        \
    do {                                                                                                               \
        int result_ = blas.name(__VA_ARGS__);                                                                          \
        if (result_ != 0) return blas_refuse((c), result_, #name);                                                     \
    } while (0)

#endif
