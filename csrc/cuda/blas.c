/* blas.c -- the one place that calls cuBLASLt.
 *
 * A product is described once: layouts, epilogue and the algorithm that the library's heuristic names are kept for all
 * products of the same types, sizes, strides and alignments, since asking takes longer than starting. When plans are
 * made every product is asked for, so a step finds them all. The library counts by columns: what it sees are the
 * transposes, and C' = B' A'. Sums are float (double for float64); parts of a sum are never rounded to 16 bits. */
#include "cuda/blas.h"

#include "cuda/library.h"

#include <pthread.h>
#include <string.h>

/* --- entry points ------------------------------------------------------------------------------------------------- */

/* The structure that holds an algorithm, and what the heuristic answers. */
typedef struct algorithm {
    uint64_t data[8];
} algorithm;

typedef struct answer {
    algorithm algorithm;
    size_t workspace;
    int state;
    float waves;
    int reserved[4];
} answer;

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
                                       int most, answer *answers, int *count))                                         \
    F(cublasLtMatmul, (void *handle, void *product, const void *alpha, const void *a, void *a_layout, const void *b,   \
                       void *b_layout, const void *beta, const void *c, void *c_layout, void *d, void *d_layout,       \
                       const algorithm *how, void *work, size_t work_bytes, void *stream))

typedef struct blas_functions {
    BLAS_FUNCTIONS(ENTRY_MEMBER)
} blas_functions;

enum { OUT_OF_MEMORY = 3, INVALID_VALUE = 7, NOT_SUPPORTED = 15 };
enum { COMPUTE_F32 = 68, COMPUTE_F64 = 70, COMPUTE_TF32 = 77 };
enum { PRODUCT_TRANS_A = 3, PRODUCT_TRANS_B = 4, PRODUCT_EPILOGUE = 7, PRODUCT_BIAS = 8 };
enum { LAYOUT_BATCH = 5, LAYOUT_STEP = 6 };
enum { WISH_WORKSPACE = 1, WISH_REDUCTION = 3, WISH_ALIGNMENT_A = 5 }; /* of B, C (added) and D (result) follow */
enum { EPILOGUE_NONE = 1, EPILOGUE_BIAS = 4 };
enum { REDUCE_IN_PLACE = 1, REDUCE_AS_COMPUTED = 2 };

static const int library_type[DTYPE_COUNT] = {[F32] = 0, [F64] = 1, [F16] = 2, [BF16] = 14};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below */
static blas_functions blas;
static void *handles[MOST_DEVICES]; /* for the life of the process */

static status refuse(ctx *c, int result, const char *what) {
    static const char *const texts[] = {[1] = "not initialized",           [OUT_OF_MEMORY] = "out of memory",
                                        [INVALID_VALUE] = "invalid value", [8] = "architecture mismatch",
                                        [13] = "execution failed",         [14] = "internal error",
                                        [NOT_SUPPORTED] = "not supported"};
    const bool known = result >= 0 && result < (int)(sizeof texts / sizeof texts[0]) && texts[result];
    return fail(c, result == OUT_OF_MEMORY ? E_NOMEM : E_RUNTIME, "cuBLASLt error %d in %s: %s", result, what,
                known ? texts[result] : "unknown error");
}

#define CALL(c, name, ...)                                                                                             \
    do {                                                                                                               \
        int result_ = blas.name(__VA_ARGS__);                                                                          \
        if (result_ != 0) return refuse((c), result_, #name);                                                          \
    } while (0)

static status load_blas(ctx *c) {
    LIBRARY_ONCE(c, "cuBLASLt", blas, BLAS_FUNCTIONS, "libcublasLt.so.13", "libcublasLt.so.12");
}

/* With the device's context current. */
static status handle_of(ctx *c, int device, void **out) {
    TRY(load_blas(c));
    if (!handles[device]) {
        void *made = NULL;
        CALL(c, cublasLtCreate, &made);
        handles[device] = made;
    }
    *out = handles[device];
    return OK;
}

/* --- products that are described ---------------------------------------------------------------------------------- */

enum { ALIGNED = 16, SLOTS = 2048, MOST_PRODUCTS = SLOTS / 2 };

/* What the library's choice depends on. Operands as the library sees them: A is our B. Without padding, for memcmp. */
typedef struct key {
    int32_t device, type, result_type, epilogue, beta, tf32, trans_a, trans_b;
    int64_t rows, cols, inner, a_ld, b_ld, c_ld;
    int64_t batch, a_step, b_step, c_step;
    int64_t a_aligned, b_aligned, c_aligned, added_aligned; /* bytes */
    uint64_t workspace;
} key;

enum { A_LAYOUT, B_LAYOUT, C_LAYOUT, LAYOUTS };

typedef struct product {
    key key;
    bool used, taken; /* in the table; by the library */
    void *description, *layout[LAYOUTS];
    algorithm algorithm;
} product;

static product products[SLOTS];
static int n_products;

static void dispose(product *p) {
    if (p->description) (void)blas.cublasLtMatmulDescDestroy(p->description);
    for (int i = 0; i < LAYOUTS; i++)
        if (p->layout[i]) (void)blas.cublasLtMatrixLayoutDestroy(p->layout[i]);
    *p = (product){.used = false};
}

static status describe_layout(ctx *c, const key *k, int type, int64_t rows, int64_t cols, int64_t ld, int64_t step,
                              void **out) {
    const int32_t batch = (int32_t)k->batch;

    CALL(c, cublasLtMatrixLayoutCreate, out, type, (uint64_t)rows, (uint64_t)cols, ld);
    if (k->batch == 1) return OK;
    CALL(c, cublasLtMatrixLayoutSetAttribute, *out, LAYOUT_BATCH, &batch, sizeof batch);
    CALL(c, cublasLtMatrixLayoutSetAttribute, *out, LAYOUT_STEP, &step, sizeof step);
    return OK;
}

/* The library looks at the alignment of the vector's address when it chooses. */
static status set_vector(ctx *c, const product *p, const void *data) {
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_BIAS, &data, sizeof data);
    return OK;
}

static status describe(ctx *c, product *p) {
    const key *k = &p->key;
    const int type = library_type[k->type], result = library_type[k->result_type];
    const int32_t trans_a = k->trans_a, trans_b = k->trans_b, epilogue = k->epilogue;
    const int compute = k->type == F64 ? COMPUTE_F64 : k->type == F32 && k->tf32 ? COMPUTE_TF32 : COMPUTE_F32;

    CALL(c, cublasLtMatmulDescCreate, &p->description, compute, library_type[k->type == F64 ? F64 : F32]);
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_TRANS_A, &trans_a, sizeof trans_a);
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_TRANS_B, &trans_b, sizeof trans_b);
    CALL(c, cublasLtMatmulDescSetAttribute, p->description, PRODUCT_EPILOGUE, &epilogue, sizeof epilogue);
    if (epilogue == EPILOGUE_BIAS) TRY(set_vector(c, p, (void *)(uintptr_t)k->added_aligned));
    TRY(describe_layout(c, k, type, trans_a ? k->inner : k->rows, trans_a ? k->rows : k->inner, k->a_ld, k->a_step,
                        &p->layout[A_LAYOUT]));
    TRY(describe_layout(c, k, type, trans_b ? k->cols : k->inner, trans_b ? k->inner : k->cols, k->b_ld, k->b_step,
                        &p->layout[B_LAYOUT]));
    return describe_layout(c, k, result, k->rows, k->cols, k->c_ld, k->c_step, &p->layout[C_LAYOUT]);
}

static status wish_for(ctx *c, const key *k, void *wish) {
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

static status ask(ctx *c, void *handle, product *p) {
    answer found = {.state = NOT_SUPPORTED};
    void *wish = NULL;
    int count = 0, result = 0;
    status s;

    CALL(c, cublasLtMatmulPreferenceCreate, &wish);
    s = wish_for(c, &p->key, wish);
    if (s == OK)
        result = blas.cublasLtMatmulAlgoGetHeuristic(handle, p->description, p->layout[A_LAYOUT], p->layout[B_LAYOUT],
                                                     p->layout[C_LAYOUT], p->layout[C_LAYOUT], wish, 1, &found, &count);
    (void)blas.cublasLtMatmulPreferenceDestroy(wish);
    TRY(s);
    if (result != 0 && result != NOT_SUPPORTED && result != INVALID_VALUE)
        return refuse(c, result, "cublasLtMatmulAlgoGetHeuristic");
    p->taken = result == 0 && count > 0 && found.state == 0 && found.workspace <= p->key.workspace;
    p->algorithm = found.algorithm;
    return OK;
}

static uint64_t hash(const key *k) {
    uint64_t words[sizeof *k / sizeof(uint64_t)], h = 14695981039346656037u;
    _Static_assert(sizeof *k % sizeof(uint64_t) == 0, "a key is made of words");
    memcpy(words, k, sizeof words);
    for (size_t i = 0; i < sizeof words / sizeof words[0]; i++) h = (h ^ words[i]) * 1099511628211u;
    return h ^ h >> 32;
}

/* Its place in the table, described when it was not. A full table is forgotten. */
static status find(ctx *c, void *handle, const key *k, product **out) {
    uint64_t at = hash(k);
    product *p = NULL;
    status s;

    for (; (p = &products[at % SLOTS])->used; at++)
        if (memcmp(&p->key, k, sizeof *k) == 0) {
            *out = p;
            return OK;
        }
    if (n_products == MOST_PRODUCTS) {
        for (int i = 0; i < SLOTS; i++) dispose(&products[i]);
        n_products = 0;
        p = &products[hash(k) % SLOTS];
    }
    p->key = *k;
    s = describe(c, p);
    if (s == OK) s = ask(c, handle, p);
    if (s != OK) {
        dispose(p);
        return s;
    }
    p->used = true;
    n_products++;
    *out = p;
    return OK;
}

/* --- starting ----------------------------------------------------------------------------------------------------- */

/* The largest power of two, of at most ALIGNED, that divides an address and the steps from it. */
static int64_t alignment(const void *data, const gemm *g, const int64_t *step, dtype type) {
    uintptr_t all = (uintptr_t)data | ALIGNED;
    for (int i = 0; i < g->n_batch; i++) all |= (uintptr_t)step[i] * dtype_size(type);
    return (int64_t)(all & (~all + 1));
}

/* The longest batch dimension last: the library walks it, we the others. */
static void longest_last(gemm *g) {
    int longest = 0;
    const int last = g->n_batch - 1;

    for (int i = 1; i < g->n_batch; i++)
        if (g->batch[i] >= g->batch[longest]) longest = i;
    int64_t *const lists[] = {g->batch, g->a_step, g->b_step, g->c_step};
    for (int i = 0; g->n_batch && i < 4; i++) {
        const int64_t moved = lists[i][longest];
        lists[i][longest] = lists[i][last];
        lists[i][last] = moved;
    }
}

static bool describes(const call *k, const gemm *g, const addend *plus, size_t workspace, key *out) {
    const int last = g->n_batch - 1;
    gemm_stored a, b;

    if (!dtype_is_float(g->type) || g->wide_a || g->wide_b || g->k == 0) return false;
    if (!gemm_as_stored(g->k, g->n, g->b_row, g->b_col, &a) || !gemm_as_stored(g->m, g->k, g->a_row, g->a_col, &b))
        return false;
    if (plus->kind == ADD_VECTOR && (gemm_pairs(g) > 1 || g->type == F64 || g->wide_c)) return false;
    if (g->n_batch && (g->batch[last] > INT32_MAX || g->a_step[last] < 0 || g->b_step[last] < 0)) return false;
    memset(out, 0, sizeof *out);
    out->device = k->cuda->device;
    out->type = g->type;
    out->result_type = gemm_type_c(g);
    out->epilogue = plus->kind == ADD_VECTOR ? EPILOGUE_BIAS : EPILOGUE_NONE;
    out->beta = plus->kind == ADD_MATRIX;
    out->tf32 = (k->cuda->tf32 & TF32_PRODUCTS) != 0;
    out->trans_a = a.transposed == 'T';
    out->trans_b = b.transposed == 'T';
    out->rows = g->n, out->cols = g->m, out->inner = g->k;
    out->a_ld = a.ld, out->b_ld = b.ld, out->c_ld = g->m == 1 ? g->n : g->c_row;
    out->batch = g->n_batch ? g->batch[last] : 1;
    if (g->n_batch) out->a_step = g->b_step[last], out->b_step = g->a_step[last], out->c_step = g->c_step[last];
    out->a_aligned = alignment(g->b, g, g->b_step, g->type);
    out->b_aligned = alignment(g->a, g, g->a_step, g->type);
    out->c_aligned = alignment(g->c, g, g->c_step, gemm_type_c(g));
    if (plus->kind != ADD_NOTHING) out->added_aligned = alignment(plus->data, g, g->c_step, gemm_type_c(g));
    out->workspace = workspace;
    return out->c_ld >= g->n;
}

static const void *moved(const void *data, int64_t elements, dtype type) {
    return (const char *)data + elements * (int64_t)dtype_size(type);
}

/* *done is false where the library finds only now that it does not take the product. */
static status start(ctx *c, const call *k, void *handle, const product *p, const gemm *g, const addend *plus,
                    int64_t pair, bool *done) {
    const gemm_offsets at = gemm_batch_at(g, pair);
    const float alpha = (float)g->alpha, beta = p->key.beta ? 1 : 0;
    const double wide_beta = beta;
    const bool is_wide = g->type == F64;
    const dtype type = gemm_type_c(g);
    void *d = (void *)(uintptr_t)moved(g->c, at.c, type);
    int result = blas.cublasLtMatmul(
        handle, p->description, is_wide ? (const void *)&g->alpha : &alpha, moved(g->b, at.b, g->type),
        p->layout[A_LAYOUT], moved(g->a, at.a, g->type), p->layout[B_LAYOUT],
        is_wide ? (const void *)&wide_beta : &beta, p->key.beta ? moved(plus->data, at.c, type) : d,
        p->layout[C_LAYOUT], d, p->layout[C_LAYOUT], &p->algorithm, k->work, (size_t)p->key.workspace, k->cuda->stream);

    *done = result == 0;
    return result == 0 || result == NOT_SUPPORTED ? OK : refuse(c, result, "cublasLtMatmul");
}

/* With the lock. */
static status run(ctx *c, const call *k, const gemm *g, const addend *plus, const key *of, bool *done) {
    void *handle = NULL;
    product *p = NULL;

    TRY(handle_of(c, k->cuda->device, &handle));
    TRY(find(c, handle, of, &p));
    *done = p->taken;
    if (!p->taken || k->cuda->dry) return OK;
    if (plus->kind == ADD_VECTOR) TRY(set_vector(c, p, plus->data));
    for (int64_t i = 0; i < gemm_pairs(g) && *done; i += of->batch) TRY(start(c, k, handle, p, g, plus, i, done));
    return OK;
}

status blas_product(ctx *c, const call *k, const gemm *given, const addend *plus, bool *done) {
    gemm g = *given;
    key of;
    status s;

    *done = false;
    gemm_simplify(&g);
    longest_last(&g);
    if (g.m == 0 || g.n == 0 || gemm_pairs(&g) == 0) *done = true;
    else if (describes(k, &g, plus, blas_workspace(given->m * given->n * gemm_pairs(given)), &of)) {
        (void)pthread_mutex_lock(&lock);
        s = run(c, k, &g, plus, &of, done);
        (void)pthread_mutex_unlock(&lock);
        return s;
    }
    return OK;
}

/* Room for some parts of each sum. */
size_t blas_workspace(int64_t elements) {
    const size_t least = (size_t)1 << 18, most = (size_t)32 << 20, parts = (size_t)elements * 8 * sizeof(float);
    return elements == 0 ? 0 : (size_t)elements > most || parts > most ? most : parts < least ? least : parts;
}
