/* gemm_avx512.h -- packs panels, stores sums and loops over K: what the AVX-512 kernels share.
 *
 * Included once a file. Before it, AVX512 is the attribute of the CPU features that the file's functions need. After
 * it, functions take constants (sources, widths, rows), and are inlined where these are given. */
#include "core/ints.h"
#include "core/prefetch.h"
#include "gemm/gemm_kernel.h"

#include <immintrin.h>

#define INLINE static inline __attribute__((always_inline)) AVX512

enum { LANES = 16 };

static inline __mmask16 first(int64_t n) { return (__mmask16)(n >= LANES ? 0xffff : n <= 0 ? 0 : (1u << n) - 1); }

/* --- packing ---------------------------------------------------------------------------------------------------------- */

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

/* What elements in memory become in units, of each of `planes`: the next one's are at out[LANES]. `along`: 16 units of
 * neighbouring elements, `n` elements from `p` on. `across`: the unit at `p` of `n` neighbouring lines; `q` is its second
 * element, NULL beyond the edge. `one`: a unit, the next plane's at out[LANES * LANES]. */
typedef struct source {
    int64_t size; /* of an element */
    int per_unit, planes;
    void (*along)(__m512 *out, const void *p, int64_t n);
    void (*across)(__m512 *out, const void *p, const void *q, int64_t n);
    void (*one)(uint32_t *out, const void *p, const void *q);
} source;

enum { MOST_PLANES = 3, PREFETCH = 512 /* bytes ahead along a line */, PREFETCH_UNITS = 4 /* across lines */ };

INLINE __m512 halves(const void *p, int64_t n) { /* 16-bit floats as the upper halves of floats */
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p)), 16));
}

INLINE void put_block(uint32_t *out, const __m512 r[LANES], int64_t rows, int64_t step, __mmask16 mask) {
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        if (i < rows) _mm512_mask_storeu_ps(out + i * step, mask, r[i]);
}

/* The largest magnitude among pairs of bfloat16: of the first of several parts, and of the last, which is NaN where the
 * number was no number. */
INLINE void keep_largest(__m512i *largest, const __m512 *parts, int planes) {
    const __m512i magnitudes = _mm512_set1_epi32(0x7fff7fff);

    *largest = _mm512_max_epu16(*largest, _mm512_and_si512(_mm512_castps_si512(parts[0]), magnitudes));
    *largest =
        _mm512_max_epu16(*largest, _mm512_and_si512(_mm512_castps_si512(parts[(planes - 1) * LANES]), magnitudes));
}

/* Sixteen units of sixteen lines from line `i` of a panel on, from r[], which holds lines or units. */
INLINE void put_planes(uint32_t *out, int i, __m512 *r, bool have_lines, int planes, int width, bool lines_first,
                       int unit_step, int64_t units, __m512i *largest) {
#pragma GCC unroll 16
    for (int j = 0; j < LANES; j++)
        if (largest) keep_largest(largest, r + j, planes);
#pragma GCC unroll 3
    for (int part = 0; part < planes; part++) {
        uint32_t *to = out + part * unit_step * width;
        __m512 *of = r + part * LANES;
        if (have_lines != lines_first) transpose(of);
        if (lines_first) put_block(to + i * LANES, of, width - i, LANES, 0xffff);
        else put_block(to + i, of, units, width, first(width - i));
    }
}

/* One unit of some lines of a panel; `whole`: of all of its lines, and none of the unit is beyond the edge. */
INLINE void pack_unit(uint32_t *out, const char *p, const char *q, int64_t lines, source s, int width, int64_t plane,
                      bool whole, __m512i *largest) {
#pragma GCC unroll 2
    for (int i = 0; i < width; i += LANES) {
        const int64_t at = i * s.size;
        __m512 x[MOST_PLANES * LANES];
        s.across(x, p + at, whole || q ? q + at : NULL, whole ? LANES : lines - i);
        if (largest) keep_largest(largest, x, s.planes);
#pragma GCC unroll 3
        for (int part = 0; part < s.planes; part++)
            _mm512_mask_storeu_ps(out + part * plane + i, first(width - i), x[part * LANES]);
    }
}

/* Panels of lines that lie side by side, packed as [unit][width]: a line of memory after the other, through all
 * panels, because neighbouring lines may be pages apart. */
INLINE void pack_across(uint32_t *out, const char *in, int64_t lines, int64_t depth, int64_t deep, source s, int width,
                        int unit_step, __m512i *largest) {
    const int64_t units = (depth + s.per_unit - 1) / s.per_unit;
    const int64_t padded = (units + unit_step - 1) / unit_step * unit_step, plane = unit_step * width;

    for (int64_t u = 0; u < padded; u++, out += width, in += s.per_unit * deep) {
        const char *next = (u + 1) * s.per_unit <= depth ? in + deep : NULL; /* the second element */
        if (s.planes > 1 && u > 0 && u % unit_step == 0) out += (s.planes - 1) * plane;
        for (int64_t j = 0; j < lines; j += width) {
            uint32_t *to = out + j * s.planes * padded;
            const char *p = in + j * s.size, *q = next ? next + j * s.size : NULL;
            if (q && lines - j >= width && width % LANES == 0) {
                prefetch(p + PREFETCH_UNITS * s.per_unit * deep, width * s.size);
                if (s.per_unit > 1) prefetch(q + PREFETCH_UNITS * s.per_unit * deep, width * s.size);
                pack_unit(to, p, q, width, s, width, plane, true, largest);
            } else if (u < units) pack_unit(to, p, q, lines - j, s, width, plane, false, largest);
            else
                for (int part = 0; part < s.planes; part++)
                    for (int i = 0; i < width; i += LANES)
                        _mm512_mask_storeu_ps(to + part * plane + i, first(width - i), _mm512_setzero_ps());
        }
    }
}

/* How panels are packed: as [unit][width] or, `lines_first`, as [unit / 16][width][16]; of several planes, unit_step
 * units of each in turn. */
typedef struct panels {
    source s;
    int width;
    bool lines_first;
    int unit_step;
    int64_t depth, padded; /* along K: elements, units with the zeros */
    int64_t line, deep;    /* bytes from one to the next */
    __m512i *largest;
} panels;

/* Sixteen units from `u` on of a panel's lines from `i` on, of which there are `here`; the first of them is at `in`. What
 * lies `ahead` bytes behind is asked for. */
INLINE void pack_square(uint32_t *out, const char *in, int i, int64_t here, int64_t u, const panels *x, int64_t ahead) {
    const source s = x->s;
    const int64_t line = x->line, deep = x->deep, left = x->depth - u * s.per_unit;
    const bool side_by_side = line == s.size;
    bool have_lines = deep == s.size; /* r[] holds lines, not units */
    __m512 r[MOST_PLANES * LANES];

    if (here >= LANES && left >= LANES * s.per_unit && have_lines) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            _mm_prefetch(in + j * line + ahead, _MM_HINT_T0);
            s.along(r + j, in + j * line, LANES * s.per_unit);
        }
    } else if (here >= LANES && left >= LANES * s.per_unit && side_by_side) {
#pragma GCC unroll 16
        for (int j = 0; j < LANES; j++) {
            const char *p = in + j * s.per_unit * deep;
            _mm_prefetch(p + ahead, _MM_HINT_T1);
            if (s.per_unit > 1) _mm_prefetch(p + deep + ahead, _MM_HINT_T1);
            s.across(r + j, p, p + deep, LANES);
        }
    } else {
#pragma GCC unroll 48
        for (int j = 0; j < s.planes * LANES; j++) r[j] = _mm512_setzero_ps();
        if (have_lines) {
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++)
                if (j < here) s.along(r + j, in + j * line, left);
        } else if (side_by_side) {
#pragma GCC unroll 16
            for (int j = 0; j < LANES; j++) {
                const char *p = in + j * s.per_unit * deep;
                const int64_t rest = left - j * s.per_unit;
                if (rest > 0) s.across(r + j, p, rest > 1 ? p + deep : NULL, here);
            }
        } else {
            uint32_t each[MOST_PLANES * LANES][LANES] = {{0}};
            for (int64_t j = 0; j < least(here, LANES); j++)
                for (int64_t k = 0; k < LANES && k * s.per_unit < left; k++) {
                    const char *p = in + j * line + k * s.per_unit * deep;
                    s.one(&each[j][k], p, k * s.per_unit + 1 < left ? p + deep : NULL);
                }
#pragma GCC unroll 48
            for (int j = 0; j < s.planes * LANES; j++) r[j] = _mm512_loadu_ps(each[j]);
            have_lines = true;
        }
    }
    put_planes(out + s.planes * u * x->width, i, r, have_lines, s.planes, x->width, x->lines_first, x->unit_step,
               x->padded - u, x->largest);
}

/* Panels of `lines` lines, one behind the other. Memory is read as it lies: along lines, or through all of them. */
INLINE void pack_panels(uint32_t *out, const char *in, int64_t lines, int64_t depth, int64_t line_step,
                        int64_t depth_step, source s, int width, bool lines_first, int unit_step, __m512i *largest) {
    const int64_t units = (depth + s.per_unit - 1) / s.per_unit;
    const panels x = {.s = s,
                      .width = width,
                      .lines_first = lines_first,
                      .unit_step = unit_step,
                      .depth = depth,
                      .padded = (units + unit_step - 1) / unit_step * unit_step,
                      .line = line_step * s.size,
                      .deep = depth_step * s.size,
                      .largest = largest};
    const int64_t panel = s.planes * x.padded * width, square = LANES * s.per_unit;

    if (line_step == 1 && !lines_first) {
        pack_across(out, in, lines, depth, x.deep, s, width, unit_step, largest);
        return;
    }
    if (line_step == 1) {
        for (int64_t u = 0; u < x.padded; u += LANES, in += square * x.deep)
            for (int64_t first = 0; first < lines; first += width)
                for (int i = 0; i < width; i += LANES)
                    pack_square(out + first / width * panel, in + (first + i) * x.line, i,
                                least(width, lines - first) - i, u, &x, square * x.deep);
        return;
    }
    for (int64_t first = 0; first < lines; first += width, out += panel)
        for (int i = 0; i < width; i += LANES)
            for (int64_t u = 0; u < x.padded; u += LANES) {
                const int64_t at = u * s.per_unit * s.size + PREFETCH, end = depth * s.size; /* then come next lines */
                pack_square(out, in + (first + i) * x.line + u * s.per_unit * x.deep, i,
                            least(width, lines - first) - i, u, &x,
                            at < end ? PREFETCH : LANES * x.line + PREFETCH - end);
            }
}

/* --- the block of sums ------------------------------------------------------------------------------------------------ */

/* To the nearest, ties to even; a NaN stays one. */
INLINE __m256i to_bf16(__m512 x) {
    const __m512i u = _mm512_castps_si512(x), odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), _mm512_set1_epi32(1));
    const __m512i up = _mm512_add_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(0x7fff)), odd);
    const __mmask16 nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(_mm512_mask_or_epi32(up, nan, u, _mm512_set1_epi32(0x400000)), 16));
}

INLINE __m512 load_c(const void *c, dtype type, __mmask16 mask) {
    if (type == F32) return _mm512_maskz_loadu_ps(mask, c);
    const __m256i x = _mm256_maskz_loadu_epi16(mask, c);
    if (type == F16) return _mm512_cvtph_ps(x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(x), 16));
}

/* `type`, and whether there are sums from before, are constants where this is inlined. */
INLINE void store_as(dtype type, bool more, const gemm_target *t, int64_t i, int64_t j, __mmask16 mask, __m512 sum) {
    char *c = (char *)t->c + (i * t->row + j) * (type == F32 ? 4 : 2);

    if (more) sum = _mm512_add_ps(sum, _mm512_maskz_loadu_ps(mask, t->more + i * t->more_row + j));
    sum = _mm512_mul_ps(_mm512_set1_ps(t->alpha), sum);
    if (t->beta != 0) sum = _mm512_fmadd_ps(_mm512_set1_ps(t->beta), load_c(c, type, mask), sum);
    if (type == F32) _mm512_mask_storeu_ps(c, mask, sum);
    else if (type == F16) _mm256_mask_storeu_epi16(c, mask, _mm512_cvtps_ph(sum, _MM_FROUND_TO_NEAREST_INT));
    else _mm256_mask_storeu_epi16(c, mask, to_bf16(sum));
}

INLINE void store_sums(const gemm_target *t, int64_t i, int64_t j, __mmask16 mask, __m512 sum) {
    if (t->more) store_as(t->type, true, t, i, j, mask, sum);
    else store_as(t->type, false, t, i, j, mask, sum);
}

/* --- sums in registers ------------------------------------------------------------------------------------------------ */

#ifdef MULTIPLY_ADD /* (vector of A's units, vector of B's, sums) */

enum { MR = 14 }; /* 28 registers of sums, 2 of B, 1 of A */

/* `rows` and `wide`, whether there are more columns than lanes, are constants where this is inlined. */
INLINE void block(int rows, bool wide, int64_t units, const uint32_t *a, const uint32_t *b, int64_t cols,
                  const gemm_target *t) {
    const __mmask16 left = first(cols), right = first(cols - LANES);
    const int64_t size = t->type == F32 ? 4 : 2;
    __m512 s[MR][2];

#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) s[i][0] = s[i][1] = _mm512_setzero_ps();
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) { /* C is far away: on its way while the sums are made */
        const char *c = (const char *)t->c + i * t->row * size;
        _mm_prefetch(c, _MM_HINT_T0);
        if (wide && size == 4) _mm_prefetch(c + LANES * size, _MM_HINT_T0);
    }
    for (int64_t k = 0; k < units; k++, a += MR, b += PANEL_COLS) {
        const __m512 b0 = _mm512_load_ps(b), b1 = _mm512_load_ps(b + LANES);
#pragma GCC unroll 14
        for (int i = 0; i < rows; i++) {
            const __m512 x = _mm512_castsi512_ps(_mm512_set1_epi32((int)a[i]));
            s[i][0] = MULTIPLY_ADD(x, b0, s[i][0]);
            if (wide) s[i][1] = MULTIPLY_ADD(x, b1, s[i][1]);
        }
    }
    if (t->type == F32 && !t->more) { /* the usual case without its branches */
#pragma GCC unroll 14
        for (int i = 0; i < rows; i++) {
            store_as(F32, false, t, i, 0, left, s[i][0]);
            if (wide) store_as(F32, false, t, i, LANES, right, s[i][1]);
        }
        return;
    }
#pragma GCC unroll 14
    for (int i = 0; i < rows; i++) {
        store_sums(t, i, 0, left, s[i][0]);
        if (wide) store_sums(t, i, LANES, right, s[i][1]);
    }
}

typedef void block_fn(int64_t units, const uint32_t *a, const uint32_t *b, int64_t cols, const gemm_target *t);

#define BLOCK_FN(rows, wide)                                                                                           \
    AVX512 static void block_##rows##_##wide(int64_t units, const uint32_t *a, const uint32_t *b, int64_t cols,        \
                                             const gemm_target *t) {                                                   \
        block(rows, wide, units, a, b, cols, t);                                                                       \
    }
/* clang-format off */
#define BLOCKS(X, wide)                                                                                                \
    X(1, wide) X(2, wide) X(3, wide) X(4, wide) X(5, wide) X(6, wide) X(7, wide) X(8, wide)                            \
    X(9, wide) X(10, wide) X(11, wide) X(12, wide) X(13, wide) X(14, wide)
/* clang-format on */
#define NAME(rows, wide) block_##rows##_##wide,
BLOCKS(BLOCK_FN, 0)
BLOCKS(BLOCK_FN, 1)
static block_fn *const blocks[2][MR] = {{BLOCKS(NAME, 0)}, {BLOCKS(NAME, 1)}};

static void run_block(int64_t units, const uint32_t *a, const uint32_t *b, int64_t rows, int64_t cols,
                      const gemm_target *t) {
    blocks[cols > LANES][rows - 1](units, a, b, cols, t);
}

#endif
