/* gemm_reference.c -- multiplies matrices where no library does: machines without a BLAS, operands
 * without a unit stride, 16-bit floats that torch is slow at, integers.
 *
 * C is cut into tiles. For each tile, slices of A and B are widened to the type sums are kept in (float, double, or
 * 64-bit integers, which wrap like the narrow ones they stand for) and packed as panels that the inner kernel reads
 * from end to end:
 *
 *     A panel: MR rows      a[k][0..MR)          sum[i][j] += a[k][i] * b[k][j]
 *     B panel: NR columns   b[k][0..NR)
 *
 * A sum stays in the wide type until its tile is stored, so 16-bit results are rounded once; and it is made of partial
 * sums over TILE_K steps each, so that float32 loses little over long ones. */
#include "core/ints.h"
#include "core/names.h"
#include "core/parallel.h"
#include "gemm/gemm_ways.h"

enum { VECTOR = 64 };                   /* bytes of a vector; compilers split it for narrower machines */
enum { MR = 8, NR_BYTES = 2 * VECTOR }; /* the inner kernel's block */
enum { TILE_M = 12 * MR, TILE_N_BYTES = 6 * NR_BYTES, TILE_K = 128 };

/* --- inner kernels: one for each type sums are kept in ------------------------------------------------------------ */

/* sum[MR][NR] += A panel * B panel, over `depth` steps; rows of `sum` are TILE_N_BYTES apart. */
typedef void inner_fn(int64_t depth, const void *a, const void *b, void *sum);

#define INNER(name, T)                                                                                                 \
    typedef T name##_vector __attribute__((vector_size(VECTOR)));                                                      \
    SIMD static void name(int64_t depth, const void *a_panel, const void *b_panel, void *sum_block) {                  \
        enum { LANES = VECTOR / sizeof(T), ROW = TILE_N_BYTES / VECTOR };                                              \
        const T *a = a_panel;                                                                                          \
        const name##_vector *b = b_panel;                                                                              \
        name##_vector *sum = sum_block, s[MR][2] = {{{0}}};                                                            \
        for (int64_t k = 0; k < depth; k++, a += MR, b += 2) _Pragma("GCC unroll 8") for (int i = 0; i < MR; i++) {    \
                s[i][0] += a[i] * b[0];                                                                                \
                s[i][1] += a[i] * b[1];                                                                                \
            }                                                                                                          \
        _Pragma("GCC unroll 8") for (int i = 0; i < MR; i++) {                                                         \
            sum[i * ROW] += s[i][0];                                                                                   \
            sum[i * ROW + 1] += s[i][1];                                                                               \
        }                                                                                                              \
    }

INNER(inner_float, float)
INNER(inner_double, double)
INNER(inner_int, uint64_t)

/* --- in and out: one pair of functions for each stored type ------------------------------------------------------- */

/* Panels of `width` lanes over `depth` steps, the last padded with zeros. */
typedef void pack_fn(void *out, const void *in, int64_t lanes, int64_t depth, int64_t lane_step, int64_t depth_step,
                     int width);
/* One row of a tile: c = alpha * sum + beta * c. */
typedef void store_fn(void *c, const void *sum, int64_t n, double alpha, double beta);

#define NAME(f) JOIN_NAMES(f, TYPE)

#define WIDEN(x) ((T)(x))
#define NARROW(x) ((S)(x))
#define T float
#define TYPE f32
#define S float
#include "gemm/gemm_stored.h"
#define TYPE f16
#define S f16
#include "gemm/gemm_stored.h"
#undef T

#define T double
#define TYPE f64
#define S double
#include "gemm/gemm_stored.h"
#undef T

#define T uint64_t
#define TYPE i64
#define S uint64_t
#include "gemm/gemm_stored.h"
#define TYPE i32
#define S int32_t
#include "gemm/gemm_stored.h"
#define TYPE i16
#define S int16_t
#include "gemm/gemm_stored.h"
#define TYPE i8
#define S int8_t
#include "gemm/gemm_stored.h"
#define TYPE u8
#define S uint8_t
#include "gemm/gemm_stored.h"
#undef T
#undef WIDEN
#undef NARROW

#define T float
#define WIDEN(x) bf16_to_f32(x)
#define NARROW(x) f32_to_bf16(x)
#define TYPE bf16
#define S bf16
#include "gemm/gemm_stored.h"
#undef WIDEN
#undef NARROW

/* float32 that a 16-bit product reads: rounded first. */
#define WIDEN(x) bf16_to_f32(f32_to_bf16(x))
#define TYPE f32_as_bf16
#define S float
#include "gemm/gemm_stored.h"
#undef WIDEN
#define WIDEN(x) ((float)(f16)(x))
#define TYPE f32_as_f16
#define S float
#include "gemm/gemm_stored.h"
#undef WIDEN
#undef T
#undef NAME

typedef struct kind {
    int wide; /* bytes of the type sums are kept in */
    inner_fn *inner;
    pack_fn *pack;
    store_fn *store;
} kind;

static const kind kinds[DTYPE_COUNT] = {
    [F32] = {4, inner_float, pack_f32, store_f32},    [F64] = {8, inner_double, pack_f64, store_f64},
    [BF16] = {4, inner_float, pack_bf16, store_bf16}, [F16] = {4, inner_float, pack_f16, store_f16},
    [I64] = {8, inner_int, pack_i64, store_i64},      [I32] = {8, inner_int, pack_i32, store_i32},
    [I16] = {8, inner_int, pack_i16, store_i16},      [I8] = {8, inner_int, pack_i8, store_i8},
    [U8] = {8, inner_int, pack_u8, store_u8},
};

static pack_fn *pack_of(dtype type, bool wide) {
    return !wide ? kinds[type].pack : type == BF16 ? pack_f32_as_bf16 : pack_f32_as_f16;
}

/* --- tiles -------------------------------------------------------------------------------------------------------- */

typedef struct tile {
    int64_t row, col, rows, cols;
} tile;

static void run_tile(const gemm *g, gemm_offsets at, tile t) {
    const kind *kd = &kinds[g->type];
    pack_fn *const pack_a = pack_of(g->type, g->wide_a), *const pack_b = pack_of(g->type, g->wide_b);
    store_fn *const store = kinds[gemm_type_c(g)].store;
    const int64_t a_size = (int64_t)dtype_size(gemm_type_a(g)), b_size = (int64_t)dtype_size(gemm_type_b(g));
    const int64_t c_size = (int64_t)dtype_size(gemm_type_c(g)), nr = NR_BYTES / kd->wide;
    const char *a = (const char *)g->a + (at.a + t.row * g->a_row) * a_size;
    const char *b = (const char *)g->b + (at.b + t.col * g->b_col) * b_size;
    char *c = (char *)g->c + (at.c + t.row * g->c_row + t.col) * c_size;
    _Alignas(VECTOR) char a_panels[TILE_M * TILE_K * sizeof(double)], b_panels[TILE_K * TILE_N_BYTES];
    _Alignas(VECTOR) char sum[TILE_M * TILE_N_BYTES];

    __builtin_memset(sum, 0, sizeof sum);
    for (int64_t k = 0; k < g->k; k += TILE_K) {
        int64_t depth = least(TILE_K, g->k - k);
        pack_a(a_panels, a + k * g->a_col * a_size, t.rows, depth, g->a_row, g->a_col, MR);
        pack_b(b_panels, b + k * g->b_row * b_size, t.cols, depth, g->b_col, g->b_row, (int)nr);
        for (int64_t j = 0; j < t.cols; j += nr)
            for (int64_t i = 0; i < t.rows; i += MR)
                kd->inner(depth, a_panels + i * depth * kd->wide, b_panels + j * depth * kd->wide,
                          sum + i * TILE_N_BYTES + j * kd->wide);
    }
    for (int64_t i = 0; i < t.rows; i++)
        store(c + i * g->c_row * c_size, sum + i * TILE_N_BYTES, t.cols, g->alpha, g->beta);
}

typedef struct tiling {
    const gemm *g;
    int64_t tile_n, down, across; /* tiles of one pair */
} tiling;

static void run_tiles(void *arg, int64_t begin, int64_t end) {
    const tiling *x = arg;
    for (int64_t i = begin; i < end; i++) {
        int64_t within = i % (x->down * x->across);
        tile t = {.row = within / x->across * TILE_M, .col = within % x->across * x->tile_n};
        t.rows = least(TILE_M, x->g->m - t.row);
        t.cols = least(x->tile_n, x->g->n - t.col);
        run_tile(x->g, gemm_batch_at(x->g, i / (x->down * x->across)), t);
    }
}

void gemm_reference(const gemm *g) {
    tiling x = {.g = g, .tile_n = TILE_N_BYTES / kinds[g->type].wide};
    int64_t pairs = 1, work;

    for (int i = 0; i < g->n_batch; i++) pairs *= g->batch[i];
    x.down = (g->m + TILE_M - 1) / TILE_M;
    x.across = (g->n + x.tile_n - 1) / x.tile_n;
    work = least(g->m, TILE_M) * least(g->n, x.tile_n) * (g->k > 0 ? g->k : 1);
    parallel_for(pairs * x.down * x.across, parallel_rows(work / 4), run_tiles, &x);
}
