/* gemm_f32.c -- multiplies floats with AVX-512, inside of a product; 16-bit floats are widened while they are packed,
 * for CPUs that do not multiply them. */
#if defined(__x86_64__) && defined(__GNUC__)

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl")))
#define MULTIPLY_ADD(x, b, sum) _mm512_fmadd_ps(x, b, sum)
#include "gemm/gemm_avx512.h"

#include <string.h>

INLINE void f32_along(__m512 *out, const void *p, int64_t n) { *out = _mm512_maskz_loadu_ps(first(n), p); }
INLINE void f32_across(__m512 *out, const void *p, const void *q, int64_t n) {
    (void)q;
    *out = _mm512_maskz_loadu_ps(first(n), p);
}
INLINE void f32_one(uint32_t *out, const void *p, const void *q) {
    (void)q;
    *out = *(const uint32_t *)p;
}

INLINE void bf16_along(__m512 *out, const void *p, int64_t n) { *out = halves(p, n); }
INLINE void bf16_across(__m512 *out, const void *p, const void *q, int64_t n) {
    (void)q;
    *out = halves(p, n);
}
INLINE void bf16_one(uint32_t *out, const void *p, const void *q) {
    (void)q;
    *out = (uint32_t)*(const bf16 *)p << 16;
}

INLINE void f16_along(__m512 *out, const void *p, int64_t n) {
    *out = _mm512_cvtph_ps(_mm256_maskz_loadu_epi16(first(n), p));
}
INLINE void f16_across(__m512 *out, const void *p, const void *q, int64_t n) {
    (void)q;
    f16_along(out, p, n);
}
INLINE void f16_one(uint32_t *out, const void *p, const void *q) {
    const float x = f16_bits_to_f32(*(const uint16_t *)p);
    (void)q;
    memcpy(out, &x, sizeof x);
}

INLINE void pack(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth, int64_t line_step,
                 int64_t depth_step, int width) {
    static const source f32 = {4, 1, 1, f32_along, f32_across, f32_one},
                        bf16s = {2, 1, 1, bf16_along, bf16_across, bf16_one},
                        f16s = {2, 1, 1, f16_along, f16_across, f16_one};
    const int64_t size = from == F32 ? 4 : 2;

    for (int64_t i = 0; i < lines; i += width, out += width * depth) {
        const char *p = (const char *)in + i * line_step * size;
        const int64_t n = least(width, lines - i);
        if (from == F32) pack_panels(out, p, n, depth, line_step, depth_step, f32, width, false, 1, NULL);
        else if (from == BF16) pack_panels(out, p, n, depth, line_step, depth_step, bf16s, width, false, 1, NULL);
        else pack_panels(out, p, n, depth, line_step, depth_step, f16s, width, false, 1, NULL);
    }
}

AVX512 static uint32_t pack_a(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, MR);
    return 0;
}

AVX512 static uint32_t pack_b(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, PANEL_COLS);
    return 0;
}

static bool can(void) {
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
           __builtin_cpu_supports("avx512vl");
}

const gemm_kernel gemm_kernel_f32 = {
    .rows = MR,
    .step_units = 1,
    .step_depth = 1,
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
