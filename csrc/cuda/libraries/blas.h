/* blas.h -- products by cuBLASLt, as torch has loaded it: found at run time like the driver. */
#ifndef ORT_CUDA_BLAS_H
#define ORT_CUDA_BLAS_H

#include "cuda/host/driver.h"
#include "cuda/libraries/blas_choice.h"
#include "gemm/gemm_product.h"

/* What is added to a product. */
typedef enum addend_kind {
    ADD_NOTHING,
    ADD_VECTOR, /* n numbers, the same for every row */
    ADD_MATRIX, /* elements that lie as the result does; the result itself may be it */
} addend_kind;

typedef struct addend {
    addend_kind kind;
    const void *data; /* of the result's type */
} addend;

/* What becomes of the sums, alpha A B + addend, on their way into C, and what is computed beside. None adds a matrix. */
typedef enum epilogue_kind {
    NO_EPILOGUE,
    GELU_OF_SUMS, /* GELU's tanh form of them. extra, if there is one: gets the sums, m x n */
    GELU_SLOPE, /* they are a gradient: times the slope of that form at `extra`. totals, if there are: [n], of C's columns */
    LEFT_TOTALS,  /* C as it is, and [m] totals of A's rows; alpha is 1 */
    RIGHT_TOTALS, /* and [n] totals of B's columns */
} epilogue_kind;

typedef struct epilogue {
    epilogue_kind kind;
    bool has_extra, has_totals; /* also where nothing runs and there are no addresses */
    void *extra, *totals;       /* of the result's type */
} epilogue;

/* Starts C = alpha A B + addend; beta is not read. *done is false, and nothing was started, where the library does not
 * take such a product: other types, strides or alignments than it knows. E_RUNTIME without the library. The
 * workspace is the call's, of blas_workspace bytes. */
MUST_USE status blas_product(ctx *c, const call *k, const gemm *g, const addend *plus, bool *done);

/* The same with an epilogue. The library has them for one pair, not for float64; its GELU reads and leaves 8 columns at a
 * time, and only where C is of the operands' type. */
MUST_USE status blas_product_and(ctx *c, const call *k, const gemm *g, const addend *plus, const epilogue *then,
                                 bool *done);

/* --- measuring ---------------------------------------------------------------------------------------------------- */

/* A product that was measured: the library's answers, best guess first; 0 seconds: it does not run. */
enum { BLAS_ANSWERS = 12 };
typedef struct blas_measured {
    blas_key of;
    blas_algorithm best;
    double seconds[BLAS_ANSWERS];
    int count;
    struct blas_measured *next;
} blas_measured;

/* "13.1.0" */
enum { BLAS_VERSION = 48 };
MUST_USE status blas_version(ctx *c, char text[BLAS_VERSION]);
/* Products of that key take this algorithm, where the library finds that they can, unless they have run. False: no room. */
bool blas_choose(const blas_key *k, const blas_algorithm *a);
/* Nothing is chosen, and what the library was told of products is forgotten. */
void blas_forget(void);

/* For a result of so many elements. */
size_t blas_workspace(int64_t elements);

#endif
