/* lookup.c -- makes and reads tables of functions of one bfloat16.
 *
 * Of a table of 256 KB a tensor's usual values meet little, 16 KB for what is normally distributed: it is read from the
 * nearest caches. Reading is scalar on purpose: gather instructions are no faster. */
#include "ops/pointwise/lookup.h"

#include "core/prefetch.h"

lookup_kind lookup_of(const op_def *op, dtype last_operand, dtype output) {
    if (last_operand != BF16 || output != BF16 || !op->pointwise) return NO_LOOKUP;
    if (op->pointwise->slope) return LOOKUP_SLOPE;
    return op->flags & COSTLY && op->min_in == 1 ? LOOKUP_VALUE : NO_LOOKUP;
}

typedef struct making {
    lookup_kind kind;
    tile_fn *fn;
    const double *param;
    float *table;
} making;

/* Tiles [begin, end) of the table. */
static void make_tiles(void *arg, int64_t begin, int64_t end) {
    const making *m = arg;
    _Alignas(64) float ones[TILE], operand[TILE];

    for (int i = 0; i < TILE; i++) ones[i] = 1;
    for (int64_t tile = begin; tile < end; tile++) {
        float *out = m->table + tile * TILE;
        const void *in[] = {m->kind == LOOKUP_SLOPE ? ones : operand, operand};
        for (int64_t i = 0; i < TILE; i++) operand[i] = bf16_to_f32((bf16)(tile * TILE + i));
        m->fn(TILE, out, in, m->param);
        if (m->kind == LOOKUP_VALUE) tile_round(BF16, out, TILE);
    }
}

void lookup_make(lookup_kind kind, tile_fn *fn, const double *param, float *table) {
    making m = {.kind = kind, .fn = fn, .param = param, .table = table};
    parallel_for(LOOKUP_VALUES / TILE, GRAIN / TILE, make_tiles, &m);
}

static inline int64_t place_of(float bfloat16) {
    union {
        float f;
        uint32_t u;
    } v = {.f = bfloat16};
    return v.u >> 16;
}

SIMD static void multiply(int64_t n, const float *x, const float *slope, float *out) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = slope[i] * x[i];
}

SIMD static void multiply_elements(int64_t n, const bf16 *x, const float *slope, bf16 *out) {
#pragma omp simd
    for (int64_t i = 0; i < n; i++) out[i] = f32_to_bf16(slope[i] * bf16_to_f32(x[i]));
}

/* out may be y: an element depends on no other, which the compiler is told, so that it writes vectors. */
static void read_values(const float *table, int64_t n, const bf16 *y, bf16 *out) {
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = (bf16)place_of(table[y[i]]);
}

static void read_slopes(const float *table, int64_t n, const bf16 *y, float *out) {
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = table[y[i]];
}

static void read_tile(const float *table, int64_t n, const float *y, float *out) {
    _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) out[i] = table[place_of(y[i])];
}

void lookup_tile(const float *table, int64_t n, const float *x, const float *y, float *out) {
    _Alignas(64) float slope[TILE];

    read_tile(table, n, y, x ? slope : out);
    if (x) multiply(n, x, slope, out);
}

/* So many that memory is asked for what comes next between them, some lines at a time. */
enum { CHUNK = 128 };

void lookup_elements(const float *table, int64_t n, const bf16 *x, const bf16 *y, bf16 *out) {
    _Alignas(64) float slope[CHUNK];

    for (int64_t at = 0, m; at < n; at += m) {
        m = n - at < CHUNK ? n - at : CHUNK;
        prefetch_ahead(y + at, m * (int64_t)sizeof *y);
        prefetch_to(out + at, m * (int64_t)sizeof *out);
        if (!x) {
            read_values(table, m, y + at, out + at);
            continue;
        }
        prefetch_ahead(x + at, m * (int64_t)sizeof *x);
        read_slopes(table, m, y + at, slope);
        multiply_elements(m, x + at, slope, out + at);
    }
}
