/* gemm_packed.c -- float32 products with AVX-512, for CPUs that have it and whose library does not use it.
 *
 * C is cut among the threads. A thread goes through its part by slices of K, in each by blocks of A's rows that fit the
 * second-level cache, and lays both operands out as the inner kernel reads them:
 *
 *     A panel: MR rows      a[k][0..MR)      a block of them stays in the second-level cache
 *     B panel: NR columns   b[k][0..NR)      one stays in the first-level cache while the block passes by
 *
 * The kernel keeps MR x NR sums in registers: for each k two vectors of B, and MR numbers of A spread over a vector. */
#include "exec/gemm.h"

#include "core/parallel.h"

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define AVX512 __attribute__((target("avx512f")))
#define INLINE static inline __attribute__((always_inline)) AVX512

enum {
    LANES = 16,
    MR = 14, /* 28 registers of sums, 2 of B, 1 of A */
    NR = 2 * LANES,
    DEPTH = 256,     /* of a slice of K: a B panel is 32 KB */
    BLOCK = 32 * MR, /* rows of A: 458 KB */
    WORTH_CUTTING = 1 << 18
};

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
static inline __mmask16 first(int64_t n) { return (__mmask16)(n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }

/* --- laying out ------------------------------------------------------------------------------------------------------- */

/* Rows become columns: out[i] holds element i of every row. */
INLINE void transpose(__m512 r[LANES]) {
    __m512 t[LANES];

#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        t[i] = _mm512_unpacklo_ps(r[i], r[i + 1]);
        t[i + 1] = _mm512_unpackhi_ps(r[i], r[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        __m512d a = _mm512_castps_pd(t[i]), b = _mm512_castps_pd(t[i + 1]);
        __m512d c = _mm512_castps_pd(t[i + 2]), d = _mm512_castps_pd(t[i + 3]);
        r[i] = _mm512_castpd_ps(_mm512_unpacklo_pd(a, c));
        r[i + 1] = _mm512_castpd_ps(_mm512_unpackhi_pd(a, c));
        r[i + 2] = _mm512_castpd_ps(_mm512_unpacklo_pd(b, d));
        r[i + 3] = _mm512_castpd_ps(_mm512_unpackhi_pd(b, d));
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        t[i] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0x88);
        t[i + 4] = _mm512_shuffle_f32x4(r[i], r[i + 4], 0xdd);
        t[i + 8] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0x88);
        t[i + 12] = _mm512_shuffle_f32x4(r[i + 8], r[i + 12], 0xdd);
    }
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++) {
        r[i] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0x88);
        r[i + 8] = _mm512_shuffle_f32x4(t[i], t[i + 8], 0xdd);
        r[i + 4] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0x88);
        r[i + 12] = _mm512_shuffle_f32x4(t[i + 4], t[i + 12], 0xdd);
    }
}

/* Up to LANES lines of the panel [depth][width], from memory where a line's steps lie side by side. */
INLINE void pack_lines(float *out, const float *in, int64_t lines, int64_t depth, int64_t line_step, int width) {
    const __mmask16 stored = first(least(width, LANES));

    for (int64_t k = 0; k < depth; k += LANES) {
        const __mmask16 wanted = first(depth - k);
        __m512 r[LANES];
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            r[i] = i < lines ? _mm512_maskz_loadu_ps(wanted, in + i * line_step + k) : _mm512_setzero_ps();
        transpose(r);
#pragma GCC unroll 16
        for (int i = 0; i < LANES; i++)
            if (k + i < depth) _mm512_mask_storeu_ps(out + (k + i) * width, stored, r[i]);
    }
}

/* The panel [depth][width] of `lines` lines, zeros after them. */
INLINE void pack(float *out, const float *in, int64_t lines, int64_t depth, int64_t line_step, int64_t depth_step,
                 int width) {
    if (line_step == 1) {
        for (int64_t k = 0; k < depth; k++)
            for (int i = 0; i < width; i += LANES)
                _mm512_mask_storeu_ps(out + k * width + i, first(width - i),
                                      _mm512_maskz_loadu_ps(first(lines - i), in + k * depth_step + i));
    } else if (depth_step == 1) {
        for (int i = 0; i < width; i += LANES)
            pack_lines(out + i, in + i * line_step, lines - i, depth, line_step, width);
    } else {
        for (int64_t k = 0; k < depth; k++)
            for (int i = 0; i < width; i++) out[k * width + i] = i < lines ? in[i * line_step + k * depth_step] : 0;
    }
}

AVX512 static void pack_a(float *out, const float *in, int64_t rows, int64_t depth, int64_t row, int64_t col) {
    for (int64_t i = 0; i < rows; i += MR, out += MR * depth)
        pack(out, in + i * row, least(MR, rows - i), depth, row, col, MR);
}

AVX512 static void pack_b(float *out, const float *in, int64_t cols, int64_t depth, int64_t row, int64_t col) {
    pack(out, in, cols, depth, col, row, NR);
}

/* --- the inner kernel ------------------------------------------------------------------------------------------------- */

/* Where sums go: c = alpha * sum + beta * c, for the columns of two masks. */
typedef struct target {
    float *c;
    int64_t row;
    float alpha, beta;
    __mmask16 mask[2];
} target;

INLINE void store(const target *t, int i, int half, __m512 sum) {
    float *c = t->c + i * t->row + half * LANES;

    sum = _mm512_mul_ps(_mm512_set1_ps(t->alpha), sum);
    if (t->beta != 0) sum = _mm512_fmadd_ps(_mm512_set1_ps(t->beta), _mm512_maskz_loadu_ps(t->mask[half], c), sum);
    _mm512_mask_storeu_ps(c, t->mask[half], sum);
}

/* `rows` and `halves` are constants where this is inlined. */
INLINE void kernel(int rows, int halves, int64_t depth, const float *a, const float *b, const target *t) {
    __m512 s[MR][2];

#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) { /* C is far away: on its way while the sums are made */
        _mm_prefetch((const char *)(t->c + i * t->row), _MM_HINT_T0);
        if (halves == 2) _mm_prefetch((const char *)(t->c + i * t->row + LANES), _MM_HINT_T0);
    }
    for (int64_t k = 0; k < depth; k++, a += MR, b += NR) {
        const __m512 b0 = _mm512_load_ps(b), b1 = _mm512_load_ps(b + LANES);
#pragma GCC unroll 14
        for (int i = 0; i < rows; i++) {
            const __m512 x = _mm512_set1_ps(a[i]);
            s[i][0] = _mm512_fmadd_ps(x, b0, s[i][0]);
            if (halves == 2) s[i][1] = _mm512_fmadd_ps(x, b1, s[i][1]);
        }
    }
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        store(t, i, 0, s[i][0]);
        if (halves == 2) store(t, i, 1, s[i][1]);
    }
}

typedef void kernel_fn(int64_t depth, const float *a, const float *b, const target *t);

#define KERNEL(rows, halves)                                                                                           \
    AVX512 static void kernel_##rows##_##halves(int64_t depth, const float *a, const float *b, const target *t) {      \
        kernel(rows, halves, depth, a, b, t);                                                                          \
    }
/* clang-format off */
#define KERNELS(X, halves)                                                                                             \
    X(1, halves) X(2, halves) X(3, halves) X(4, halves) X(5, halves) X(6, halves) X(7, halves) X(8, halves)            \
    X(9, halves) X(10, halves) X(11, halves) X(12, halves) X(13, halves) X(14, halves)
/* clang-format on */
#define NAME(rows, halves) kernel_##rows##_##halves,
KERNELS(KERNEL, 1)
KERNELS(KERNEL, 2)
static kernel_fn *const kernels[2][MR] = {{KERNELS(NAME, 1)}, {KERNELS(NAME, 2)}};

/* --- the parts of C --------------------------------------------------------------------------------------------------- */

typedef struct area {
    int64_t row, col, rows, cols;
} area;

static void run_area(const gemm *g, gemm_offsets at, area r) {
    const float *a = (const float *)g->a + at.a + r.row * g->a_row, *b = (const float *)g->b + at.b + r.col * g->b_col;
    float *c = (float *)g->c + at.c + r.row * g->c_row + r.col;
    _Alignas(64) float a_block[BLOCK * DEPTH], b_panel[DEPTH * NR];

    for (int64_t k = 0; k < g->k; k += DEPTH) {
        const int64_t depth = least(DEPTH, g->k - k);
        for (int64_t top = 0; top < r.rows; top += BLOCK) {
            const int64_t rows = least(BLOCK, r.rows - top);
            pack_a(a_block, a + top * g->a_row + k * g->a_col, rows, depth, g->a_row, g->a_col);
            for (int64_t j = 0; j < r.cols; j += NR) {
                const int64_t cols = least(NR, r.cols - j);
                target t = {.row = g->c_row,
                            .alpha = (float)g->alpha,
                            .beta = k ? 1 : (float)g->beta,
                            .mask = {first(cols), first(cols - LANES)}};
                pack_b(b_panel, b + j * g->b_col + k * g->b_row, cols, depth, g->b_row, g->b_col);
                for (int64_t i = 0; i < rows; i += MR) {
                    t.c = c + (top + i) * g->c_row + j;
                    kernels[cols > LANES][least(MR, rows - i) - 1](depth, a_block + i * depth, b_panel, &t);
                }
            }
        }
    }
}

/* How one pair's C is cut: `down` times `across` areas. */
typedef struct cut {
    const gemm *g;
    int64_t down, across, rows, cols;
} cut;

static void run_areas(void *arg, int64_t begin, int64_t end) {
    const cut *x = arg;
    const gemm *g = x->g;

    for (int64_t i = begin; i < end; i++) {
        int64_t within = i % (x->down * x->across);
        area r = {.row = within / x->across * x->rows, .col = within % x->across * x->cols};
        r.rows = least(x->rows, g->m - r.row);
        r.cols = least(x->cols, g->n - r.col);
        if (r.rows > 0 && r.cols > 0) run_area(g, gemm_batch_at(g, i / (x->down * x->across)), r);
    }
}

/* As many areas as there are threads, cut so that least is laid out twice. */
static void cut_among(cut *x, int64_t threads) {
    const gemm *g = x->g;
    double best = -1;

    for (int64_t down = 1; down <= threads; down++) {
        int64_t across = parts(threads, down);
        double twice = (double)down / (double)g->m + (double)across / (double)g->n;
        if (best >= 0 && twice >= best) continue;
        best = twice;
        x->down = down;
        x->across = across;
    }
    x->rows = parts(parts(g->m, x->down), MR) * MR;
    x->cols = parts(parts(g->n, x->across), NR) * NR;
}

/* MKL takes its way for older CPUs on those of other makers. */
static bool library_is_narrow(void) {
    __builtin_cpu_init();
    return __builtin_cpu_is("amd");
}

bool gemm_packed_pays(const gemm *g) { return g->type == F32 && g->m >= 4 && g->n >= 8 && library_is_narrow(); }

bool gemm_packed(gemm *g) {
    cut x = {.g = g, .down = 1, .across = 1, .rows = g->m, .cols = g->n};
    const int64_t threads = parallel_threads();
    int64_t pairs = 1, work = g->m * g->n * g->k;

    if (g->type != F32 || !__builtin_cpu_supports("avx512f")) return false;
    for (int i = 0; i < g->n_batch; i++) pairs *= g->batch[i];
    if (pairs < 4 * threads && work >= WORTH_CUTTING) cut_among(&x, threads);
    work /= x.down * x.across;
    parallel_for(pairs * x.down * x.across, parallel_rows(work / LANES), run_areas, &x);
    return true;
}

#else

bool gemm_packed_pays(const gemm *g) { return (void)g, false; }
bool gemm_packed(gemm *g) { return (void)g, false; }

#endif
