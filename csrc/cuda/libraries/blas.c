/* blas.c -- products by cuBLASLt, which only this file, blas_describe.c and blas_tune.c call.
 *
 * A product is described once: layouts, epilogue and the algorithm that the library's heuristic names are kept for all
 * products of the same types, sizes, strides and alignments, since asking takes longer than starting. When plans are
 * made every product is asked for, so a step finds them all. The library counts by columns: what it sees are the
 * transposes, and C' = B' A'. Sums are float (double for float64); parts of a sum are never rounded to 16 bits. */
#include "cuda/host/refusals.h"
#include "cuda/libraries/blas_product.h"
#include "cuda/libraries/measure.h"

#include <pthread.h>
#include <stdio.h>
#include <string.h>

/* The library's A is our B, its columns are our rows. */
enum {
    EPILOGUE_NONE = 1,
    EPILOGUE_BIAS = 4,
    EPILOGUE_GELU = 32,
    WITH_EXTRA = 128,
    EPILOGUE_GELU_SLOPE = 64 | WITH_EXTRA,
    WITH_TOTALS = 16,
    EPILOGUE_RIGHT_TOTALS = 256,
    EPILOGUE_LEFT_TOTALS = 512,
};
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below */
blas_functions blas;
static void *handles[MOST_DEVICES]; /* for the life of the process */

#define CALL BLAS_CALL

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

enum { SLOTS = 2048, MOST_PRODUCTS = SLOTS / 2 };

static blas_described products[SLOTS];
static int n_products;

static void dispose(blas_described *p) {
    if (p->description) (void)blas.cublasLtMatmulDescDestroy(p->description);
    for (int i = 0; i < LAYOUTS; i++)
        if (p->layout[i]) (void)blas.cublasLtMatrixLayoutDestroy(p->layout[i]);
    *p = (blas_described){.used = false};
}

/* What measuring has chosen, now or in an earlier process, if the library still takes it; else its best guess. */
static status take_algorithm(ctx *c, void *handle, blas_described *p) {
    const blas_algorithm *chosen = blas_choice_get(&p->key);
    void *const *l = p->layout;
    blas_answer found = {.state = NOT_SUPPORTED};
    int count = 0, result;

    if (chosen) {
        result = blas.cublasLtMatmulAlgoCheck(handle, p->description, l[A_LAYOUT], l[B_LAYOUT], l[C_LAYOUT],
                                              l[C_LAYOUT], chosen, &found);
        p->taken = p->settled = result == 0 && found.state == 0 && found.workspace <= p->key.workspace;
        p->algorithm = *chosen;
        if (p->taken) return OK;
        if (result != 0 && !blas_is_no(result)) return blas_refuse(c, result, "cublasLtMatmulAlgoCheck");
    }
    TRY(blas_ask(c, handle, p, 1, &found, &count));
    p->taken = true;
    p->algorithm = found.algorithm;
    return OK;
}

/* What the library has said against a product is noted, and holds for as long as the product is known. */
static status refused(ctx *c, blas_described *p) {
    char text[BLAS_KEY_TEXT];

    refusal_note(c, "cuBLASLt", ", for the product %s", blas_key_text(&p->key, text));
    p->refused = true;
    p->taken = false;
    return OK;
}

static void forget_products(void) {
    for (int i = 0; i < SLOTS; i++) dispose(&products[i]);
    n_products = 0;
}

/* Its place in the table, described when it was not. A full table is forgotten. */
static status find(ctx *c, void *handle, const blas_key *k, blas_described **out) {
    uint64_t at = blas_hash(k);
    blas_described *p = NULL;
    status s;

    for (; (p = &products[at % SLOTS])->used; at++)
        if (memcmp(&p->key, k, sizeof *k) == 0) {
            *out = p;
            return OK;
        }
    if (n_products == MOST_PRODUCTS) {
        forget_products();
        p = &products[blas_hash(k) % SLOTS];
    }
    p->key = *k;
    s = blas_describe(c, p);
    if (s == OK) s = take_algorithm(c, handle, p);
    if (s == E_UNSUPPORTED) s = refused(c, p);
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

/* The largest power of two, of at most BLAS_ALIGNED, that divides an address and the steps from it. */
static int64_t alignment(const void *data, const gemm *g, const int64_t *step, dtype type) {
    uintptr_t all = (uintptr_t)data | BLAS_ALIGNED;
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

/* The largest power of two, of at most BLAS_ALIGNED, that divides an address. */
static int64_t address_alignment(const void *data) {
    const uintptr_t all = (uintptr_t)data | BLAS_ALIGNED;
    return (int64_t)(all & (~all + 1));
}

static bool is_apart(const void *data) { return address_alignment(data) < BLAS_ALIGNED; }

enum { GELU_COLUMNS = 8 };

/* False where the library has no such epilogue. The biases that it adds and the totals that it leaves are both its
 * vector, so none has two of them. */
static bool describe_epilogue(const gemm *g, const addend *plus, const epilogue *then, blas_key *out) {
    const bool is_gelu = then->kind == GELU_OF_SUMS || then->kind == GELU_SLOPE;
    const bool may_add = then->kind == NO_EPILOGUE || then->kind == GELU_OF_SUMS;
    const void *vector = plus->kind == ADD_VECTOR ? plus->data : then->totals;
    int which = plus->kind == ADD_VECTOR ? EPILOGUE_BIAS : EPILOGUE_NONE;

    if (plus->kind == ADD_VECTOR && (!may_add || gemm_pairs(g) > 1 || g->type == F64 || g->wide_c)) return false;
    if (then->kind != NO_EPILOGUE && (gemm_pairs(g) > 1 || g->type == F64 || plus->kind == ADD_MATRIX)) return false;
    if ((then->kind == LEFT_TOTALS || then->kind == RIGHT_TOTALS) && g->alpha != 1) return false;
    if (is_gelu && (g->wide_c || (then->has_extra && g->n % GELU_COLUMNS != 0))) return false;
    /* The library's heuristic has no wish for their alignment, and may name a kernel that reads 16 bytes at a time. */
    if (is_apart(plus->kind == ADD_VECTOR || then->has_totals ? vector : NULL) ||
        is_apart(then->has_extra ? then->extra : NULL))
        return false;
    if (then->kind == GELU_OF_SUMS)
        which = EPILOGUE_GELU | (which == EPILOGUE_BIAS ? EPILOGUE_BIAS : 0) | (then->has_extra ? WITH_EXTRA : 0);
    else if (then->kind == GELU_SLOPE) which = EPILOGUE_GELU_SLOPE | (then->has_totals ? WITH_TOTALS : 0);
    else if (then->kind == LEFT_TOTALS) which = EPILOGUE_LEFT_TOTALS;
    else if (then->kind == RIGHT_TOTALS) which = EPILOGUE_RIGHT_TOTALS;
    out->epilogue = which;
    if (plus->kind == ADD_VECTOR || then->has_totals) out->vector_aligned = address_alignment(vector);
    if (then->has_extra) out->extra_aligned = address_alignment(then->extra);
    return true;
}

static bool describes(const call *k, const gemm *g, const addend *plus, const epilogue *then, size_t workspace,
                      blas_key *out) {
    const int last = g->n_batch - 1;
    gemm_stored a, b;

    if (!dtype_is_float(g->type) || g->wide_a || g->wide_b || g->k == 0) return false;
    if (!gemm_as_stored(g->k, g->n, g->b_row, g->b_col, &a) || !gemm_as_stored(g->m, g->k, g->a_row, g->a_col, &b))
        return false;
    if (g->n_batch && (g->batch[last] > INT32_MAX || g->a_step[last] < 0 || g->b_step[last] < 0)) return false;
    memset(out, 0, sizeof *out);
    if (!describe_epilogue(g, plus, then, out)) return false;
    out->device = k->cuda->device;
    out->type = g->type;
    out->result_type = gemm_type_c(g);
    out->beta = plus->kind == ADD_MATRIX;
    out->tf32 = (k->cuda->math & TF32_PRODUCTS) != 0;
    out->trans_a = a.transposed == 'T';
    out->trans_b = b.transposed == 'T';
    out->rows = g->n, out->cols = g->m, out->inner = g->k;
    out->a_ld = a.ld, out->b_ld = b.ld, out->c_ld = g->m == 1 ? g->n : g->c_row;
    out->batch = g->n_batch ? g->batch[last] : 1;
    if (g->n_batch) out->a_step = g->b_step[last], out->b_step = g->a_step[last], out->c_step = g->c_step[last];
    out->a_aligned = alignment(g->b, g, g->b_step, g->type);
    out->b_aligned = alignment(g->a, g, g->a_step, g->type);
    out->c_aligned = alignment(g->c, g, g->c_step, gemm_type_c(g));
    if (plus->kind == ADD_MATRIX) out->added_aligned = alignment(plus->data, g, g->c_step, gemm_type_c(g));
    out->workspace = workspace;
    return out->c_ld >= g->n;
}

static const void *moved(const void *data, int64_t elements, dtype type) {
    return (const char *)data + elements * (int64_t)dtype_size(type);
}

/* E_UNSUPPORTED where the library finds only now that it does not take the product. */
static status start(ctx *c, const call *k, void *handle, const blas_described *p, const gemm *g, const addend *plus,
                    int64_t pair) {
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

    return result == 0 ? OK : blas_refuse(c, result, "cublasLtMatmul");
}

/* All pairs. *done is false where the library does not take them: what it has begun is begun anew, which it cannot be
 * where the result was added to. */
static status start_all(ctx *c, const call *k, void *handle, blas_described *p, const gemm *g, const addend *plus,
                        bool *done) {
    int64_t i = 0;
    status s = OK;

    for (; i < gemm_pairs(g) && s == OK; i += p->key.batch) s = start(c, k, handle, p, g, plus, i);
    if (s != E_UNSUPPORTED) return s;
    TRY(refused(c, p));
    if (i > p->key.batch && plus->kind == ADD_MATRIX && plus->data == g->c)
        return fail(c, E_RUNTIME, "cuBLASLt began to add a product to a tensor, and refused the rest of it");
    *done = false;
    return OK;
}

/* --- choices ------------------------------------------------------------------------------------------------------ */

static status read_version(ctx *c, char text[BLAS_VERSION]) {
    int number[3];

    TRY(load_blas(c));
    for (int i = 0; i < 3; i++) CALL(c, cublasLtGetProperty, i, &number[i]);
    (void)snprintf(text, BLAS_VERSION, "%d.%d.%d", number[0], number[1], number[2]);
    return OK;
}

status blas_version(ctx *c, char text[BLAS_VERSION]) {
    (void)pthread_mutex_lock(&lock);
    const status s = read_version(c, text);
    (void)pthread_mutex_unlock(&lock);
    return s;
}

bool blas_choose(const blas_key *k, const blas_algorithm *a) {
    (void)pthread_mutex_lock(&lock);
    const bool done = blas_choice_set(k, a);
    (void)pthread_mutex_unlock(&lock);
    return done;
}

void blas_forget(void) {
    (void)pthread_mutex_lock(&lock);
    if (n_products) forget_products();
    blas_choices_clear();
    (void)pthread_mutex_unlock(&lock);
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* What has been chosen since it was described, or is found out now. */
static status settle(ctx *c, const call *k, void *handle, blas_described *p) {
    if (!p->taken || p->settled) return OK;
    if (blas_choice_get(&p->key)) TRY(take_algorithm(c, handle, p));
    return k->cuda->measuring && k->cuda->measuring->products && !p->settled
               ? blas_tune(c, handle, p, k->cuda->measuring)
               : OK;
}

/* With the lock. */
static status run(ctx *c, const call *k, const gemm *g, const addend *plus, const epilogue *then, const blas_key *of,
                  bool *done) {
    void *handle = NULL;
    blas_described *p = NULL;
    status s;

    TRY(handle_of(c, k->cuda->device, &handle));
    TRY(find(c, handle, of, &p));
    s = settle(c, k, handle, p);
    if (s == E_UNSUPPORTED) s = refused(c, p);
    TRY(s);
    *done = p->taken;
    if (!p->taken || k->cuda->dry) return OK;
    p->settled = true;
    TRY(blas_set_addresses(c, p, plus->kind == ADD_VECTOR ? plus->data : then->totals, then->extra));
    return start_all(c, k, handle, p, g, plus, done);
}

status blas_product_and(ctx *c, const call *k, const gemm *given, const addend *plus, const epilogue *then,
                        bool *done) {
    gemm g = *given;
    blas_key of;
    status s;

    *done = false;
    gemm_simplify(&g);
    longest_last(&g);
    if (g.m == 0 || g.n == 0 || gemm_pairs(&g) == 0) *done = !then->has_totals;
    else if (describes(k, &g, plus, then, blas_workspace(given->m * given->n * gemm_pairs(given)), &of)) {
        (void)pthread_mutex_lock(&lock);
        s = run(c, k, &g, plus, then, &of, done);
        (void)pthread_mutex_unlock(&lock);
        return s;
    }
    return OK;
}

status blas_product(ctx *c, const call *k, const gemm *g, const addend *plus, bool *done) {
    return blas_product_and(c, k, g, plus, &(epilogue){.kind = NO_EPILOGUE}, done);
}

/* Room for some parts of each sum. */
size_t blas_workspace(int64_t elements) {
    const size_t least = (size_t)1 << 18, most = (size_t)32 << 20, parts = (size_t)elements * 8 * sizeof(float);
    return elements == 0 ? 0 : (size_t)elements > most || parts > most ? most : parts < least ? least : parts;
}
