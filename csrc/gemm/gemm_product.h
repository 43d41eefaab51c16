/* gemm_product.h -- describes a product of matrices: types, sizes, strides, a batch of pairs. */
#ifndef ORT_GEMM_PRODUCT_H
#define ORT_GEMM_PRODUCT_H

#include "core/shape.h"

typedef struct gemm {
    dtype type;          /* what is multiplied: any number; 16-bit floats are summed in float32 */
    bool wide_a, wide_b; /* A or B is float32, rounded to the 16-bit `type` while it is read; else it is of `type` */
    bool wide_c;         /* C is float32, sums not rounded to the 16-bit `type`; else it is of `type` */
    int64_t m, n, k;     /* A is m x k, B is k x n, C is m x n; any of them may be 0 */
    double alpha, beta;  /* C is not read when beta is 0 */
    const void *a, *b;
    void *c;              /* overlaps neither A nor B */
    int64_t a_row, a_col; /* strides in elements; any, 0 included */
    int64_t b_row, b_col;
    int64_t c_row; /* C's rows are contiguous */
    int n_batch;   /* nested batch dimensions, outermost first; 0: one pair */
    int64_t batch[MAX_RANK];
    int64_t a_step[MAX_RANK], b_step[MAX_RANK], c_step[MAX_RANK]; /* 0 where an operand is shared */
    const void *packed_b; /* what gemm_prepack has made of B, or NULL; ways that cannot use it read B */
} gemm;

static inline dtype gemm_type_a(const gemm *g) { return g->wide_a ? F32 : g->type; }
static inline dtype gemm_type_b(const gemm *g) { return g->wide_b ? F32 : g->type; }
static inline dtype gemm_type_c(const gemm *g) { return g->wide_c ? F32 : g->type; }

/* Element offsets of pair `index` of the batch. */
typedef struct gemm_offsets {
    int64_t a, b, c;
} gemm_offsets;
gemm_offsets gemm_batch_at(const gemm *g, int64_t index);
int64_t gemm_pairs(const gemm *g);

/* The same product as fewer and larger ones: batch dimensions that walk memory as one become one, and a dimension that
 * merely continues A's rows under the same B, as in a linear layer over [batch, length, width], becomes rows. */
void gemm_simplify(gemm *g);
/* Forgets batch dimension `i`. */
void gemm_drop_batch(gemm *g, int i);

/* A matrix as BLAS takes it: 'N' or, stored by columns, 'T', and the distance between its stored lines. */
typedef struct gemm_stored {
    char transposed;
    int64_t ld;
} gemm_stored;

/* False where the strides of `rows` x `cols` elements are no such. */
bool gemm_as_stored(int64_t rows, int64_t cols, int64_t row, int64_t col, gemm_stored *out);

#endif
