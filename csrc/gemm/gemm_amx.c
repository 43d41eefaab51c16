/* gemm_amx.c -- multiplies tiles of bfloat16 with AMX-BF16, inside of a product: 32 x 32 sums in four tiles.
 *
 * A tile is 16 lines of 64 bytes. One of A holds 16 rows of 16 units, one of B 16 units of 16 columns; the sums of four
 * products of two of each stay in the tiles until the slice of K ends. Compiled with AMX_EMULATED, tiles are arrays:
 * tests check everything but the instructions on any CPU that has AVX-512-BF16.
 *
 * One kernel is for bfloat16. The other is for float32: a float is the sum of three bfloat16, exactly, and the product of
 * two the sum of nine products, which are exact in float32, and of which six matter: the others together are below 2^-24
 * of it (as in Henry, Tang and Heinecke, "Leveraging the bfloat16 Artificial Intelligence Datatype for Higher-Precision
 * Computations", 2019). Tiles multiply so much faster than vectors that this takes about half of their time. */
#if defined(__x86_64__) && defined(__GNUC__)

#ifndef AMX_EMULATED
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16,amx-tile,amx-bf16")))
#else
#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#endif
#include "gemm/gemm_avx512.h"
#include "gemm/gemm_pairs.h"

#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

enum { ROWS = 32, TILE_LINES = 16, TILE_LINE = 64 };

#ifdef AMX_EMULATED
static _Thread_local float tiles[8][TILE_LINES][LANES];

/* The first elements of all pairs, or the second ones, as floats. */
AVX512 static __m512 half_of(__m512i pairs, bool second) {
    return _mm512_castsi512_ps(second ? _mm512_and_si512(pairs, _mm512_set1_epi32(-65536))
                                      : _mm512_slli_epi32(pairs, 16));
}

/* As the instruction does it: first elements and second ones are added up apart, and then to C. */
AVX512 static void tile_multiply(float c[TILE_LINES][LANES], float a[TILE_LINES][LANES], float b[TILE_LINES][LANES]) {
    for (int i = 0; i < TILE_LINES; i++) {
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
        for (int k = 0; k < LANES; k++) {
            const __m512i pair = _mm512_castps_si512(_mm512_set1_ps(a[i][k])), pairs = _mm512_loadu_si512(b[k]);
            for (int half = 0; half < 2; half++)
                sum[half] = _mm512_fmadd_ps(half_of(pair, half), half_of(pairs, half), sum[half]);
        }
        _mm512_storeu_ps(c[i], _mm512_add_ps(_mm512_loadu_ps(c[i]), _mm512_add_ps(sum[0], sum[1])));
    }
}

static void tile_copy(void *out, int64_t out_line, const void *in, int64_t in_line) {
    for (int i = 0; i < TILE_LINES; i++) memcpy((char *)out + i * out_line, (const char *)in + i * in_line, TILE_LINE);
}

#define ZERO(t) memset(tiles[t], 0, sizeof tiles[t])
#define LOAD(t, from, line) tile_copy(tiles[t], TILE_LINE, from, line)
#define STREAM LOAD
#define STORE(t, to, line) tile_copy(to, line, tiles[t], TILE_LINE)
#define MULTIPLY(c, a, b) tile_multiply(tiles[c], tiles[a], tiles[b])
#else
#define ZERO(t) _tile_zero(t)
#define LOAD(t, from, line) _tile_loadd(t, from, line)
#define STREAM(t, from, line) _tile_stream_loadd(t, from, line)
#define STORE(t, to, line) _tile_stored(t, to, line)
#define MULTIPLY(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

/* Tiles 0 to 3 are sums, 4 and 5 rows of A, 6 and 7 columns of B. Where A's panel is not read again soon, it does not stay
 * in the first cache, which it would drive B's panel out of. */
#define LOAD_A(at)                                                                                                     \
    if (ahead.keeps_a) {                                                                                               \
        LOAD(4, at, TILE_LINE);                                                                                        \
        if (tall) LOAD(5, (at) + TILE_LINES * LANES, TILE_LINE);                                                       \
    } else {                                                                                                           \
        STREAM(4, at, TILE_LINE);                                                                                      \
        if (tall) STREAM(5, (at) + TILE_LINES * LANES, TILE_LINE);                                                     \
    }
#define LOAD_B(at)                                                                                                     \
    LOAD(6, at, PANEL_COLS * sizeof(float));                                                                           \
    if (wide) LOAD(7, (at) + LANES, PANEL_COLS * sizeof(float))
#define MULTIPLY_ALL                                                                                                   \
    MULTIPLY(0, 4, 6);                                                                                                 \
    if (wide) MULTIPLY(1, 4, 7);                                                                                       \
    if (tall) MULTIPLY(2, 5, 6);                                                                                       \
    if (tall && wide) MULTIPLY(3, 5, 7)

/* What lies ahead of one step, into the first cache or the second; `near` is a constant where this is inlined. */
INLINE void ask_ahead(gemm_ahead *x, bool near) {
    for (int64_t i = 0; i < x->lines; i++)
        for (int64_t j = 0; j < x->bytes; j += TILE_LINE)
            if (near) _mm_prefetch(x->at + i * x->line + j, _MM_HINT_T0);
            else _mm_prefetch(x->at + i * x->line + j, _MM_HINT_T1);
    x->at += x->step;
}

/* What is asked for meanwhile: B, and C. */
typedef struct asked {
    gemm_ahead b, c;
    bool keeps_a;
} asked;

/* One tile of K after the other. */
INLINE void add_products(bool tall, bool wide, int64_t steps, const uint32_t *a, int64_t a_step, const uint32_t *b,
                         int64_t b_step, asked ahead) {
    for (int64_t i = 0; i < steps; i++, a += a_step, b += b_step) {
        ask_ahead(&ahead.b, false);
        ask_ahead(&ahead.c, true);
        LOAD_A(a);
        LOAD_B(b);
        MULTIPLY_ALL;
    }
}

/* The same of all parts but the first of one number with the first of the other, of those that count in float32: the
 * sum of numbers is below 2^-24 of the product. */
INLINE void add_lesser_products(bool tall, bool wide, int64_t steps, const uint32_t *a, const uint32_t *b,
                                asked ahead) {
    enum { A = ROWS * LANES, B = LANES * PANEL_COLS };

    for (int64_t i = 0; i < steps; i++, a += PARTS * A, b += PARTS * B) {
        ask_ahead(&ahead.b, false);
        ask_ahead(&ahead.c, true);
        LOAD_A(a);
        LOAD_B(b + 2 * B);
        MULTIPLY_ALL;
        LOAD_B(b + B);
        MULTIPLY_ALL;
        LOAD_A(a + A);
        MULTIPLY_ALL;
        LOAD_B(b);
        MULTIPLY_ALL;
        LOAD_A(a + 2 * A);
        MULTIPLY_ALL;
    }
}

/* Sums begin at `from`, NULL: at zero; unless `parts` is 1, small numbers are added up before large ones. */
INLINE void multiply(int parts, bool tall, bool wide, int64_t units, const uint32_t *a, const uint32_t *b,
                     const float *from, int64_t from_row, float *to, int64_t to_row, asked ahead) {
    const int64_t from_line = from_row * (int64_t)sizeof(float), to_line = to_row * (int64_t)sizeof(float);
    const int64_t steps = units / LANES / parts;

    if (from) {
        LOAD(0, from, from_line);
        if (wide) LOAD(1, from + LANES, from_line);
        if (tall) LOAD(2, from + TILE_LINES * from_row, from_line);
        if (tall && wide) LOAD(3, from + TILE_LINES * from_row + LANES, from_line);
    } else {
        ZERO(0);
        if (wide) ZERO(1);
        if (tall) ZERO(2);
        if (tall && wide) ZERO(3);
    }
    if (parts > 1) {
        add_lesser_products(tall, wide, steps, a, b, ahead);
        ahead.b.lines = ahead.c.lines = 0;
    }
    add_products(tall, wide, steps, a, parts * ROWS * LANES, b, parts * LANES * PANEL_COLS, ahead);
    STORE(0, to, to_line);
    if (wide) STORE(1, to + LANES, to_line);
    if (tall) STORE(2, to + TILE_LINES * to_row, to_line);
    if (tall && wide) STORE(3, to + TILE_LINES * to_row + LANES, to_line);
}

/* What only adds to floats, or puts them somewhere, goes from tile to memory; all else through `sums`, and so do slices
 * of split floats after the first: one long sum would be less precise than a sum of sums, as libraries make it. */
INLINE void run_block(int parts, int64_t units, const uint32_t *a, const uint32_t *b, int64_t rows, int64_t cols,
                      const gemm_target *t) {
    _Alignas(64) float sums[ROWS][PANEL_COLS];
    const bool tall = rows > TILE_LINES, wide = cols > LANES, whole = rows == ROWS && cols == PANEL_COLS;
    gemm_target rest = *t;

    const int64_t size = (int64_t)dtype_size(t->type), line = t->row * size, steps = units / LANES / parts;
    const int64_t share = (rows + steps - 1) / steps;
    const asked ahead = {t->ahead,
                         {.at = t->c, .lines = share, .line = line, .bytes = PANEL_COLS * size, .step = share * line},
                         t->keeps_a};
    if (whole && (parts == 1 || !(t->more || t->beta != 0))) {
        const bool plain = t->type == F32 && t->alpha == 1, adds = plain && t->beta == 1 && !t->more;
        const float *from = adds ? t->c : t->more;
        const int64_t from_row = adds ? t->row : t->more_row;
        if (adds || (plain && t->beta == 0)) {
            if (from) multiply(parts, true, true, units, a, b, from, from_row, t->c, t->row, ahead);
            else multiply(parts, true, true, units, a, b, NULL, 0, t->c, t->row, ahead);
            return;
        }
        if (from) multiply(parts, true, true, units, a, b, from, from_row, sums[0], PANEL_COLS, ahead);
        else multiply(parts, true, true, units, a, b, NULL, 0, sums[0], PANEL_COLS, ahead);
        if (t->type == BF16 && t->alpha == 1 && t->beta == 0) { /* tiles have no denormal numbers, which this flushes */
            for (int i = 0; i < ROWS; i++)
                _mm512_storeu_si512(
                    (bf16 *)t->c + i * t->row,
                    (__m512i)_mm512_cvtne2ps_pbh(_mm512_load_ps(sums[i] + LANES), _mm512_load_ps(sums[i])));
            return;
        }
        rest.more = NULL;
    } else if (tall && wide) {
        multiply(parts, true, true, units, a, b, NULL, 0, sums[0], PANEL_COLS, ahead);
    } else if (tall) {
        multiply(parts, true, false, units, a, b, NULL, 0, sums[0], PANEL_COLS, ahead);
    } else if (wide) {
        multiply(parts, false, true, units, a, b, NULL, 0, sums[0], PANEL_COLS, ahead);
    } else {
        multiply(parts, false, false, units, a, b, NULL, 0, sums[0], PANEL_COLS, ahead);
    }
    for (int64_t i = 0; i < rows; i++) {
        store_sums(&rest, i, 0, first(cols), _mm512_load_ps(sums[i]));
        if (wide) store_sums(&rest, i, LANES, first(cols - LANES), _mm512_load_ps(sums[i] + LANES));
    }
}

AVX512 static void run_pairs(int64_t units, const uint32_t *a, const uint32_t *b, int64_t rows, int64_t cols,
                             const gemm_target *t) {
    run_block(1, units, a, b, rows, cols, t);
}

AVX512 static void run_split(int64_t units, const uint32_t *a, const uint32_t *b, int64_t rows, int64_t cols,
                             const gemm_target *t) {
    run_block(PARTS, units, a, b, rows, cols, t);
}

AVX512 static uint32_t pack_a(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, ROWS, lines, true, LANES);
    return 0;
}

AVX512 static uint32_t pack_b(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, PANEL_COLS, lines, false, LANES);
    return 0;
}

AVX512 static uint32_t split_a(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                               int64_t line_step, int64_t depth_step) {
    return (void)from, pack_split(out, in, lines, depth, line_step, depth_step, ROWS, true);
}

AVX512 static uint32_t split_b(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                               int64_t line_step, int64_t depth_step) {
    return (void)from, pack_split(out, in, lines, depth, line_step, depth_step, PANEL_COLS, false);
}

/* Tiles have no denormal numbers: of a product they lose what is below 2^-126. So neither operand may be all small; nor so
 * large that products of parts overflow where the numbers' do not; and the parts of infinity and NaN mean nothing. */
static bool split_holds(uint32_t a, uint32_t b, int64_t k) {
    enum { BIAS = 127, INFINITE = 255, LEAST = -64, MOST = 124 };
    const int ea = (int)(a >> 7), eb = (int)(b >> 7), both = ea + eb - 2 * BIAS;
    int terms = 0;

    while (INT64_C(1) << terms < k) terms++;
    if (ea == INFINITE || eb == INFINITE || both + terms > MOST) return false;
    if (a == 0 || b == 0) return true; /* all zeros: denormal numbers have an exponent of 0, too */
    return ea - BIAS >= LEAST && eb - BIAS >= LEAST && both >= LEAST;
}

/* --- the tiles of a thread -------------------------------------------------------------------------------------------- */

#ifdef AMX_EMULATED
static bool can(void) { return can_pairs(); }
static void enter(void) {}
static void leave(void) {}
#else
/* The system keeps room for tiles only for processes that have asked; it answers the same to all threads. */
static bool can(void) {
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18 };

    if (!can_pairs() || !__builtin_cpu_supports("amx-tile") || !__builtin_cpu_supports("amx-bf16")) return false;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
}

AVX512 static void enter(void) {
    struct {
        uint8_t palette, start_row, reserved[14];
        uint16_t line[16]; /* bytes */
        uint8_t lines[16];
    } config = {.palette = 1};

    _Static_assert(sizeof config == 64, "as the instruction reads it");
    for (int i = 0; i < 8; i++) {
        config.line[i] = TILE_LINE;
        config.lines[i] = TILE_LINES;
    }
    /* gcc says of _tile_loadconfig that it reads a pointer's bytes only */
    __asm__ volatile("" : : "r"(&config) : "memory");
    _tile_loadconfig(&config);
}

AVX512 static void leave(void) { _tile_release(); }
#endif

const gemm_kernel gemm_kernel_amx = {
    .rows = ROWS,
    .step_units = LANES,
    .step_depth = 2 * LANES,
    .most_units = 128,
    .one_slice = 256,
    .panels = 2,
    .asks = 8,
    .apart = true,
    .room = 320 << 10,
    .room_a = 200 << 10,
    .can = can,
    .pack_a = pack_a,
    .pack_b = pack_b,
    .run = run_pairs,
    .enter = enter,
    .leave = leave,
};

const gemm_kernel gemm_kernel_amx_f32 = {
    .rows = ROWS,
    .step_units = PARTS * LANES,
    .step_depth = 2 * LANES,
    .most_units = 192,
    .one_slice = 768,
    .panels = 2,
    .asks = 64,
    .apart = true,
    .room = 320 << 10,
    .room_a = 200 << 10,
    .can = can,
    .pack_a = split_a,
    .pack_b = split_b,
    .holds = split_holds,
    .other = &gemm_kernel_f32,
    .run = run_split,
    .enter = enter,
    .leave = leave,
};

#endif
