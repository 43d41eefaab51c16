/* gemm.h -- the one way to multiply matrices: C = alpha * A * B + beta * C, for one pair or a batch of pairs.
 *
 * An operand is described by its strides, so a transposed or sliced view is multiplied where it lies. Implementations
 * are tried in order, the fastest library first and a kernel of our own last, so there is always an answer. */
#ifndef ORT_EXEC_GEMM_H
#define ORT_EXEC_GEMM_H

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

/* The ways there are to multiply. GEMM_DEFAULT: the first of gemm.c's order that can and pays. */
typedef enum gemm_way {
    GEMM_DEFAULT,
    GEMM_PACKED_F32,  /* our own with packed panels (gemm_packed.c), by inner kernel */
    GEMM_PACKED_BF16, /* AVX-512-BF16 */
    GEMM_PACKED_AMX,
    GEMM_PACKED_AMX_F32, /* float32 */
    GEMM_BLAS,           /* as torch carries it */
    GEMM_TORCH,          /* torch's 16-bit product */
    GEMM_REFERENCE,
    GEMM_WAYS,
} gemm_way;

const char *gemm_way_name(gemm_way way);
gemm_way gemm_way_named(const char *name); /* GEMM_WAYS: there is none */

/* Uses torch's threads; called within a parallel loop it stays on its thread. Allocates nothing of ours. */
void gemm_run(const gemm *g);
/* The same by one way: false, with nothing done, where it cannot. */
bool gemm_run_by(gemm_way way, const gemm *g);
/* The same by gemm.c's own order, whatever the table of measured ways says; returns the way it went. */
gemm_way gemm_run_default(const gemm *g);

/* Element offsets of pair `index` of the batch. */
typedef struct gemm_offsets {
    int64_t a, b, c;
} gemm_offsets;
gemm_offsets gemm_batch_at(const gemm *g, int64_t index);
int64_t gemm_pairs(const gemm *g);

/* The same product as fewer and larger ones: batch dimensions that walk memory as one become one, and a dimension that
 * merely continues A's rows under the same B, as in a linear layer over [batch, length, width], becomes rows. */
void gemm_simplify(gemm *g);

/* A matrix as BLAS takes it: 'N' or, stored by columns, 'T', and the distance between its stored lines. */
typedef struct gemm_stored {
    char transposed;
    int64_t ld;
} gemm_stored;

/* False where the strides of `rows` x `cols` elements are no such. */
bool gemm_as_stored(int64_t rows, int64_t cols, int64_t row, int64_t col, gemm_stored *out);

/* Our own with AVX-512 and AMX (gemm_packed.c), by the best kernel or that of one way: false, with nothing done, where it
 * cannot; whether it is faster than a library. */
bool gemm_packed(gemm *g);
bool gemm_packed_by(gemm_way way, gemm *g);
gemm_way gemm_packed_way(const gemm *g); /* of the best kernel; GEMM_DEFAULT: there is none */
bool gemm_packed_pays(const gemm *g);
/* Whether sums of this 16-bit type can be left in float32 (wide_c) without the reference. */
bool gemm_sums_wide(dtype type);
/* Whether float32 operands can be rounded to this 16-bit type (wide_a, wide_b) without it. */
bool gemm_rounds(dtype type);

/* B packed as our own kernel for this product reads it, for all products by it with as many columns and any rows: bytes, 64-byte
 * aligned; 0: no such kernel, or it does not pay. Only `a` and `c` may be NULL. The sums are the same bit by bit. */
size_t gemm_prepack_bytes(const gemm *g);
void gemm_prepack(const gemm *g, void *to);

/* The last implementation (gemm_reference.c): any type, any strides. */
void gemm_reference(const gemm *g);

#endif
