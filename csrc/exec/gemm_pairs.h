/* gemm_pairs.h -- units of two bfloat16, from bfloat16 or from float32 that is rounded on the way. After
 * gemm_avx512.h. */

INLINE __m512 bf16_along(const void *p, int64_t n) {
    const __mmask32 wanted = n >= 2 * LANES ? 0xffffffffu : n <= 0 ? 0 : (1u << n) - 1;
    return _mm512_castsi512_ps(_mm512_maskz_loadu_epi16(wanted, p));
}

INLINE __m512 bf16_across(const void *p, const void *q, int64_t n) {
    const __m512i lower = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(first(n), p));
    return q ? _mm512_castsi512_ps(_mm512_or_si512(lower, _mm512_castps_si512(halves(q, n))))
             : _mm512_castsi512_ps(lower);
}

INLINE uint32_t bf16_one(const void *p, const void *q) {
    return *(const bf16 *)p | (q ? (uint32_t)*(const bf16 *)q << 16 : 0);
}

/* The instruction takes denormal numbers for zeros; so does the product. */
INLINE __m512 rounded(__m512 upper, __m512 lower) { return (__m512)_mm512_cvtne2ps_pbh(upper, lower); }

INLINE __m512 f32_along(const void *p, int64_t n) {
    return rounded(_mm512_maskz_loadu_ps(first(n - LANES), (const float *)p + LANES),
                   _mm512_maskz_loadu_ps(first(n), p));
}

INLINE __m512 f32_across(const void *p, const void *q, int64_t n) {
    const __m512i lower = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first(n), p)));
    if (!q) return _mm512_castsi512_ps(lower);
    const __m512i upper = _mm512_cvtepu16_epi32((__m256i)_mm512_cvtneps_pbh(_mm512_maskz_loadu_ps(first(n), q)));
    return _mm512_castsi512_ps(_mm512_or_si512(lower, _mm512_slli_epi32(upper, 16)));
}

INLINE uint32_t f32_one(const void *p, const void *q) {
    return f32_to_bf16(*(const float *)p) | (q ? (uint32_t)f32_to_bf16(*(const float *)q) << 16 : 0);
}

INLINE void pack(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth, int64_t line_step,
                 int64_t depth_step, int width, int64_t at_once, bool lines_first, int unit_step) {
    static const source f32 = {4, f32_along, f32_across, f32_one}, bf16s = {2, bf16_along, bf16_across, bf16_one};
    const int64_t units = ((depth + 1) / 2 + unit_step - 1) / unit_step * unit_step;
    const int64_t step = line_step == 1 && !lines_first ? at_once : width;

    for (int64_t i = 0; i < lines; i += step, out += step * units) {
        const int64_t n = least(step, lines - i);
        if (from == BF16)
            pack_panel(out, (const char *)((const bf16 *)in + i * line_step), n, depth, line_step, depth_step, bf16s, 2,
                       width, lines_first, unit_step);
        else
            pack_panel(out, (const char *)((const float *)in + i * line_step), n, depth, line_step, depth_step, f32, 2,
                       width, lines_first, unit_step);
    }
}

static bool can_pairs(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512bf16");
}
