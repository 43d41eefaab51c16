/* gemm_pairs.h -- units of two bfloat16, from bfloat16 or from float32 that is rounded on the way, or that is split into
 * three of them. After gemm_avx512.h. */

INLINE void bf16_along(__m512 *out, const void *p, int64_t n) {
    const __mmask32 wanted = n >= 2 * LANES ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
    *out = _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(wanted, p));
}

INLINE void bf16_across(__m512 *out, const void *p, const void *q, int64_t n) {
    const __m512i lower = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    *out = _mm512_castsi512_ps(q ? _mm512_or_si512(lower, _mm512_castps_si512(halves(q, n))) : lower);
}

INLINE void bf16_one(uint32_t *out, const void *p, const void *q) {
    *out = *(const bf16 *)p | (q ? (uint32_t)*(const bf16 *)q << 16 : 0);
}

/* The instruction takes denormal numbers for zeros; so does the product. */
INLINE __m512 rounded(__m512 upper, __m512 lower) { return (__m512)_mm512_cvtne2ps_pbh(upper, lower); }

INLINE void f32_along(__m512 *out, const void *p, int64_t n) {
    *out =
        rounded(_mm512_maskz_loadu_ps(first(n - LANES), (const float *)p + LANES), _mm512_maskz_loadu_ps(first(n), p));
}

INLINE void f32_across(__m512 *out, const void *p, const void *q, int64_t n) {
    __m512i both = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first(n), p)));
    if (q) {
        const __m512i upper = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first(n), q)));
        both = _mm512_or_si512(both, _mm512_slli_epi32(upper, 16));
    }
    *out = _mm512_castsi512_ps(both);
}

INLINE void f32_one(uint32_t *out, const void *p, const void *q) {
    *out = f32_to_bf16(*(const float *)p) | (q ? (uint32_t)f32_to_bf16(*(const float *)q) << 16 : 0);
}

INLINE void pack(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth, int64_t line_step,
                 int64_t depth_step, int width, int64_t at_once, bool lines_first, int unit_step) {
    static const source f32 = {4, 2, 1, f32_along, f32_across, f32_one},
                        bf16s = {2, 2, 1, bf16_along, bf16_across, bf16_one};
    const int64_t units = ((depth + 1) / 2 + unit_step - 1) / unit_step * unit_step;

    for (int64_t i = 0; i < lines; i += at_once, out += at_once * units) {
        const int64_t n = least(at_once, lines - i);
        if (from == BF16)
            pack_panels(out, (const char *)((const bf16 *)in + i * line_step), n, depth, line_step, depth_step, bf16s,
                        width, lines_first, unit_step, NULL);
        else
            pack_panels(out, (const char *)((const float *)in + i * line_step), n, depth, line_step, depth_step, f32,
                        width, lines_first, unit_step, NULL);
    }
}

/* --- three for one ---------------------------------------------------------------------------------------------------- */

/* A float has 24 bits, a bfloat16 eight: it is the sum of the one that is nearest, of the one that is nearest to what is
 * left, and of what is left then. Of infinity and NaN the last is NaN. */
enum { PARTS = 3 };

INLINE __m512 nearest(__m512 x) { /* ties away from zero */
    const __m512i up = _mm512_add_epi32(_mm512_castps_si512(x), _mm512_set1_epi32(0x8000));
    return _mm512_castsi512_ps(_mm512_and_si512(up, _mm512_set1_epi32((int)0xffff0000)));
}

INLINE void split(__m512 *out, __m512 x) {
    out[0] = nearest(x);
    const __m512 left = _mm512_sub_ps(x, out[0]);
    out[1] = nearest(left);
    out[2] = _mm512_sub_ps(left, out[1]);
}

INLINE void split_along(__m512 *out, const void *p, int64_t n) {
    __m512 lower[PARTS], upper[PARTS];

    split(lower, _mm512_maskz_loadu_ps(first(n), p));
    split(upper, _mm512_maskz_loadu_ps(first(n - LANES), (const float *)p + LANES));
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++) out[part * LANES] = rounded(upper[part], lower[part]);
}

INLINE void split_across(__m512 *out, const void *p, const void *q, int64_t n) {
    const __mmask32 lower_halves = 0x55555555;
    __m512 lower[PARTS], upper[PARTS];

    split(lower, _mm512_maskz_loadu_ps(first(n), p));
    split(upper, q ? _mm512_maskz_loadu_ps(first(n), q) : _mm512_setzero_ps());
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++)
        out[part * LANES] = _mm512_castsi512_ps(_mm512_mask_blend_epi16(
            lower_halves, _mm512_castps_si512(upper[part]), _mm512_srli_epi32(_mm512_castps_si512(lower[part]), 16)));
}

INLINE void split_one(uint32_t *out, const void *p, const void *q) {
    __m512 x[PARTS * LANES];

    split_across(x, p, q, 1);
#pragma GCC unroll 3
    for (int part = 0; part < PARTS; part++)
        out[part * LANES * LANES] =
            (uint32_t)_mm_cvtsi128_si32(_mm512_castsi512_si128(_mm512_castps_si512(x[part * LANES])));
}

INLINE bool all_zero(const float *in, int64_t lines, int64_t depth, int64_t line_step, int64_t depth_step) {
    const bool along = depth_step <= line_step;
    const int64_t outer = along ? lines : depth, inner = along ? depth : lines;
    const int64_t outer_step = along ? line_step : depth_step, inner_step = along ? depth_step : line_step;

    for (int64_t i = 0; i < outer; i++, in += outer_step) {
        int some = 0;
        for (int64_t j = 0; j < inner; j++) some |= in[j * inner_step] != 0;
        if (some) return false;
    }
    return true;
}

/* Panels of three planes; returns the largest magnitude among their bfloat16: the least one for denormal numbers that
 * are less, or that rounding took for zeros. */
INLINE uint32_t pack_split(uint32_t *out, const void *in, int64_t lines, int64_t depth, int64_t line_step,
                           int64_t depth_step, int width, bool lines_first) {
    static const source floats = {4, 2, PARTS, split_along, split_across, split_one};
    __m512i magnitudes = _mm512_setzero_si512();

    pack_panels(out, in, lines, depth, line_step, depth_step, floats, width, lines_first, LANES, &magnitudes);
    magnitudes = _mm512_max_epu16(magnitudes, _mm512_srli_epi32(magnitudes, 16));
    const uint32_t largest = _mm512_reduce_max_epu32(_mm512_and_si512(magnitudes, _mm512_set1_epi32(0xffff)));
    return largest || all_zero(in, lines, depth, line_step, depth_step) ? largest : 1;
}

static bool can_pairs(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}
