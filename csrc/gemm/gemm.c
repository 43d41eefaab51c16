/* gemm.c -- chooses who multiplies: what the table of measured ways says (gemm/gemm_table.h), else our own for
 * AVX-512 and AMX where it is faster, BLAS as torch carries it, torch's own 16-bit product, the reference. */
#include "gemm/gemm.h"

#include "core/parallel.h"
#include "core/torch_lib.h"
#include "gemm/gemm_table.h"

#include <limits.h>
#include <string.h>

/* --- BLAS --------------------------------------------------------------------------------------------------------- */

typedef struct blas_job {
    const gemm *g;
    const torch_lib *lib;
    gemm_stored a, b;
} blas_job;

/* BLAS counts by columns: what it sees are the transposes, and C' = B' A'. */
static void blas_pairs(void *arg, int64_t begin, int64_t end) {
    const blas_job *j = arg;
    const gemm *g = j->g;
    const float alpha = (float)g->alpha, beta = (float)g->beta;

    for (int64_t i = begin; i < end; i++) {
        gemm_offsets at = gemm_batch_at(g, i);
        if (g->type == F64)
            j->lib->dgemm_(&j->b.transposed, &j->a.transposed, &g->n, &g->m, &g->k, &g->alpha,
                           (const double *)g->b + at.b, &j->b.ld, (const double *)g->a + at.a, &j->a.ld, &g->beta,
                           (double *)g->c + at.c, &g->c_row);
        else if (g->type == BF16)
            j->lib->gemm_bf16bf16f32_(&j->b.transposed, &j->a.transposed, &g->n, &g->m, &g->k, &alpha,
                                      (const uint16_t *)g->b + at.b, &j->b.ld, (const uint16_t *)g->a + at.a, &j->a.ld,
                                      &beta, (float *)g->c + at.c, &g->c_row);
        else
            j->lib->sgemm_(&j->b.transposed, &j->a.transposed, &g->n, &g->m, &g->k, &alpha, (const float *)g->b + at.b,
                           &j->b.ld, (const float *)g->a + at.a, &j->a.ld, &beta, (float *)g->c + at.c, &g->c_row);
    }
}

/* Of 16-bit floats MKL has a product that leaves its sums in float32. */
static bool blas_has(const torch_lib *lib, const gemm *g) {
    if (g->wide_a || g->wide_b) return false;
    if (g->type == BF16) return g->wide_c && lib->gemm_bf16bf16f32_;
    return g->type == F32 ? lib->sgemm_ != NULL : g->type == F64 && lib->dgemm_;
}

static bool blas(gemm *g) {
    blas_job j = {.g = g, .lib = torch_lib_get()};
    int64_t count = gemm_pairs(g), threads = parallel_threads();
    double work = (double)g->m * (double)g->n * (double)g->k;

    if (!blas_has(j.lib, g)) return false;
    if (!gemm_as_stored(g->m, g->k, g->a_row, g->a_col, &j.a) || !gemm_as_stored(g->k, g->n, g->b_row, g->b_col, &j.b))
        return false;
    if (g->m == 1) g->c_row = g->n;
    if (g->c_row < g->n || g->c_row > INT_MAX) return false;
    /* Many pairs: one thread each, the library stays serial inside. Few large ones: it spreads each over threads. */
    if (count >= 4 * threads || (count > 1 && work < (double)threads * (1 << 20)))
        parallel_for(count, work < GRAIN ? (int64_t)(4 * GRAIN / work) : 1, blas_pairs, &j);
    else blas_pairs(&j, 0, count);
    return true;
}

/* --- BLAS, of copies ----------------------------------------------------------------------------------------------- */

/* Bytes of an operand that are copied at a time, on the stack; products below so many multiplications are not worth it. */
enum { COPIED = 1 << 16, WORTH_COPIES = 1 << 14 };

/* C in blocks: each needs of an operand that BLAS does not take as it lies (a row that is all rows, as the gradient of a
 * mean has it; a reversed one) no more than fits the stack. */
typedef struct copies_job {
    const gemm *g;
    bool copies_a, copies_b;
    int64_t rows, columns, row_blocks, column_blocks;
} copies_job;

static void copy_rows(char *to, const char *from, int64_t rows, int64_t columns, int64_t row, int64_t column,
                      size_t size) {
    for (int64_t i = 0; i < rows; i++)
        for (int64_t j = 0; j < columns; j++, to += size) {
            const char *at = from + (i * row + j * column) * (int64_t)size;
            if (size == sizeof(float)) memcpy(to, at, sizeof(float));
            else memcpy(to, at, sizeof(double));
        }
}

static void copied_blocks(void *arg, int64_t begin, int64_t end) {
    const copies_job *j = arg;
    const gemm *g = j->g;
    const size_t size = dtype_size(g->type);
    _Alignas(64) char a[COPIED], b[COPIED];

    for (int64_t i = begin; i < end; i++) {
        const int64_t blocks = j->row_blocks * j->column_blocks;
        const int64_t row = i % blocks / j->column_blocks * j->rows, column = i % j->column_blocks * j->columns;
        const gemm_offsets at = gemm_batch_at(g, i / blocks);
        gemm one = *g;
        blas_job job = {.g = &one, .lib = torch_lib_get()};
        one.n_batch = 0;
        one.m = g->m - row < j->rows ? g->m - row : j->rows;
        one.n = g->n - column < j->columns ? g->n - column : j->columns;
        one.a = (const char *)g->a + (at.a + row * g->a_row) * (int64_t)size;
        one.b = (const char *)g->b + (at.b + column * g->b_col) * (int64_t)size;
        one.c = (char *)g->c + (at.c + row * g->c_row + column) * (int64_t)size;
        if (j->copies_a) {
            copy_rows(a, one.a, one.m, one.k, g->a_row, g->a_col, size);
            one.a = a, one.a_row = one.k, one.a_col = 1;
        }
        if (j->copies_b) {
            copy_rows(b, one.b, one.k, one.n, g->b_row, g->b_col, size);
            one.b = b, one.b_row = one.n, one.b_col = 1;
        }
        /* (Blocks of what is stored are stored.) */
        if (gemm_as_stored(one.m, one.k, one.a_row, one.a_col, &job.a) &&
            gemm_as_stored(one.k, one.n, one.b_row, one.b_col, &job.b))
            blas_pairs(&job, 0, 1);
        else gemm_reference(&one);
    }
}

static bool blas_of_copies(gemm *g) {
    const int64_t fit = COPIED / (int64_t)dtype_size(g->type) / g->k;
    copies_job j = {.g = g, .rows = g->m, .columns = g->n};
    gemm_stored any;

    if ((g->type != F32 && g->type != F64) || !blas_has(torch_lib_get(), g) || fit < 1) return false;
    if (g->m == 1) g->c_row = g->n;
    if (g->m * g->n * g->k < WORTH_COPIES || g->c_row < g->n || g->c_row > INT_MAX) return false;
    j.copies_a = !gemm_as_stored(g->m, g->k, g->a_row, g->a_col, &any);
    j.copies_b = !gemm_as_stored(g->k, g->n, g->b_row, g->b_col, &any);
    if (j.copies_a && j.rows > fit) j.rows = fit;
    if (j.copies_b && j.columns > fit) j.columns = fit;
    j.row_blocks = (g->m + j.rows - 1) / j.rows;
    j.column_blocks = (g->n + j.columns - 1) / j.columns;
    parallel_for(gemm_pairs(g) * j.row_blocks * j.column_blocks, 1, copied_blocks, &j);
    return true;
}

/* --- torch's 16-bit product --------------------------------------------------------------------------------------- */

/* torch takes its fast way from so many multiplications a call on. */
enum { SHIM_WORK = 16 * 16 * 16 };

/* `count` pairs of the innermost batch dimension from pair `at` on. */
static gemm part_of(const gemm *g, gemm_offsets at, int64_t count) {
    const int64_t size = (int64_t)dtype_size(g->type);
    gemm part = *g;

    part.a = (const char *)g->a + at.a * size;
    part.b = (const char *)g->b + at.b * size;
    part.c = (char *)g->c + at.c * size;
    while (part.n_batch > 1) gemm_drop_batch(&part, 0);
    part.batch[0] = count;
    if (count > 1) return part;
    part.a_step[0] = g->m * g->k;
    part.b_step[0] = g->k * g->n;
    part.c_step[0] = g->m * g->n;
    return part;
}

/* torch.baddbmm(C, A, B, out=C): it reads C only when beta is not 0. */
static bool shim_part(const torch_lib *t, const gemm *g) {
    aten a = torch_tensor(t, g->type, g->a, 3, (int64_t[]){g->batch[0], g->m, g->k},
                          (int64_t[]){g->a_step[0], g->a_row, g->a_col});
    aten b = torch_tensor(t, g->type, g->b, 3, (int64_t[]){g->batch[0], g->k, g->n},
                          (int64_t[]){g->b_step[0], g->b_row, g->b_col});
    aten c =
        torch_tensor(t, g->type, g->c, 3, (int64_t[]){g->batch[0], g->m, g->n}, (int64_t[]){g->c_step[0], g->c_row, 1});
    bool done = a && b && c && !t->aoti_torch_cpu_baddbmm_out(c, c, a, b, g->beta, g->alpha);

    torch_tensor_free(t, a);
    torch_tensor_free(t, b);
    torch_tensor_free(t, c);
    return done;
}

static bool shim(gemm *g) {
    const torch_lib *t = torch_lib_get();
    torch_quiet q;

    if (!torch_has_narrow(g->type) || !t->aoti_torch_cpu_baddbmm_out) return false;
    if (g->wide_a || g->wide_b || g->wide_c) return false;
    if (g->a_row < 0 || g->a_col < 0 || g->b_row < 0 || g->b_col < 0) return false; /* no tensor of torch's */
    for (int i = 0; i < g->n_batch; i++)
        if (g->a_step[i] < 0 || g->b_step[i] < 0) return false;
    if (g->n_batch == 0) {
        g->n_batch = g->batch[0] = 1;
        g->a_step[0] = g->m * g->k;
        g->b_step[0] = g->k * g->n;
        g->c_step[0] = g->m * g->n;
    }
    /* What pairs share torch copies for each of them. */
    const int last = g->n_batch - 1;
    const int64_t inner = g->a_step[last] && g->b_step[last] ? g->batch[last] : 1, count = gemm_pairs(g) / inner;
    if (g->m * g->n * g->k * inner < SHIM_WORK || !torch_enter(t, &q)) return false;
    for (int64_t i = 0; i < count; i++) {
        gemm part = part_of(g, gemm_batch_at(g, i * inner), inner);
        if (!shim_part(t, &part)) gemm_reference(&part);
    }
    torch_leave(&q);
    return true;
}

/* ------------------------------------------------------------------------------------------------------------------ */

static const char *const names[GEMM_WAYS] = {
    [GEMM_DEFAULT] = "default",       [GEMM_PACKED_F32] = "packed_f32",         [GEMM_PACKED_BF16] = "packed_bf16",
    [GEMM_PACKED_AMX] = "packed_amx", [GEMM_PACKED_AMX_F32] = "packed_amx_f32", [GEMM_BLAS] = "blas",
    [GEMM_TORCH] = "torch",           [GEMM_REFERENCE] = "reference",
};

const char *gemm_way_name(gemm_way way) { return names[way]; }

gemm_way gemm_way_named(const char *name) {
    int way = 0;
    while (way < GEMM_WAYS && strcmp(names[way], name) != 0) way++;
    return (gemm_way)way;
}

/* Of simplified products with k > 0. */
static bool run_by(gemm_way way, gemm *g) {
    switch (way) {
    case GEMM_PACKED_F32:
    case GEMM_PACKED_BF16:
    case GEMM_PACKED_AMX:
    case GEMM_PACKED_AMX_F32: return gemm_packed_by(way, g);
    case GEMM_BLAS: return blas(g);
    case GEMM_TORCH: return shim(g);
    case GEMM_REFERENCE: gemm_reference(g); return true;
    case GEMM_DEFAULT:
    case GEMM_WAYS: break;
    }
    return false;
}

static gemm_way run_in_order(gemm *g) {
    if (gemm_packed_pays(g) && gemm_packed(g)) return gemm_packed_way(g);
    if (blas(g)) return GEMM_BLAS;
    if (shim(g)) return GEMM_TORCH;
    if (gemm_packed(g)) return gemm_packed_way(g);
    if (blas_of_copies(g)) return GEMM_BLAS;
    gemm_reference(g);
    return GEMM_REFERENCE;
}

static bool is_empty(const gemm *g) { return g->m == 0 || g->n == 0 || gemm_pairs(g) == 0; }

bool gemm_run_by(gemm_way way, const gemm *given) {
    gemm g = *given;

    if (is_empty(&g) || g.k == 0) return false;
    gemm_simplify(&g);
    return run_by(way, &g);
}

gemm_way gemm_run_default(const gemm *given) {
    gemm g = *given;

    if (is_empty(&g)) return GEMM_DEFAULT;
    if (g.k > 0) {
        gemm_simplify(&g);
        return run_in_order(&g);
    }
    gemm_reference(&g);
    return GEMM_REFERENCE;
}

void gemm_run(const gemm *given) {
    if (!gemm_table_empty() && !is_empty(given) && given->k > 0) {
        gemm g = *given;
        gemm_simplify(&g);
        const gemm_way way = gemm_table_get(gemm_class_of(&g));
        if (run_by(way, &g)) {
            gemm_table_used(way);
            return;
        }
    }
    (void)gemm_run_default(given);
}
