/* gemm_f32.c -- the inner kernel that multiplies floats with AVX-512; 16-bit floats are widened while they are laid
 * out, for CPUs that do not multiply them. */
#if defined(__x86_64__) && defined(__GNUC__)

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define MULTIPLY_ADD(x, b, sum) _mm512_fmadd_ps(x, b, sum)
#include "exec/gemm_avx512.h"

INLINE __m512 f32_along(const void *p, int64_t n) { return _mm512_maskz_loadu_ps(first(n), p); }
INLINE __m512 f32_across(const void *p, const void *q, int64_t n) {
    return (void)q, _mm512_maskz_loadu_ps(first(n), p);
}
INLINE uint32_t f32_one(const void *p, const void *q) { return (void)q, *(const uint32_t *)p; }

INLINE __m512 bf16_across(const void *p, const void *q, int64_t n) { return (void)q, halves(p, n); }
INLINE uint32_t bf16_one(const void *p, const void *q) { return (void)q, (uint32_t)*(const bf16 *)p << 16; }

INLINE __m512 f16_along(const void *p, int64_t n) { return _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p)); }
INLINE __m512 f16_across(const void *p, const void *q, int64_t n) { return (void)q, f16_along(p, n); }
INLINE uint32_t f16_one(const void *p, const void *q) {
    union {
        float f;
        uint32_t u;
    } x = {.f = f16_bits_to_f32(*(const uint16_t *)p)};
    return (void)q, x.u;
}

INLINE void pack(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth, int64_t line_step,
                 int64_t depth_step, int width) {
    static const source f32 = {4, f32_along, f32_across, f32_one}, bf16s = {2, halves, bf16_across, bf16_one},
                        f16s = {2, f16_along, f16_across, f16_one};
    const int64_t size = from == F32 ? 4 : 2;

    for (int64_t i = 0; i < lines; i += width, out += width * depth) {
        const char *p = (const char *)in + i * line_step * size;
        const int64_t n = least(width, lines - i);
        if (from == F32) pack_panel(out, p, n, depth, line_step, depth_step, f32, 1, width, false, 1);
        else if (from == BF16) pack_panel(out, p, n, depth, line_step, depth_step, bf16s, 1, width, false, 1);
        else pack_panel(out, p, n, depth, line_step, depth_step, f16s, 1, width, false, 1);
    }
}

AVX512 static void pack_a(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth, int64_t line_step,
                          int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, MR);
}

AVX512 static void pack_b(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth, int64_t line_step,
                          int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, PANEL_COLS);
}

static bool can(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

const gemm_kernel gemm_kernel_f32 = {
    .rows = MR,
    .per_unit = 1,
    .unit_step = 1,
    .most_units = 256,
    .one_slice = 256,
    .panels = 1,
    .room = 448 * 512,
    .room_a = 448 * 256,
    .can = can,
    .pack_a = pack_a,
    .pack_b = pack_b,
    .run = run_block,
};

#endif
