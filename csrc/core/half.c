/* half.c -- loops over float16 numbers, and their forms for CPUs that convert them by an instruction. */
#include "core/half.h"

#include "core/dtype.h"
#include "core/parallel.h"

SIMD static void widen_bits(const uint16_t *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i++) to[i] = f16_bits_to_f32(from[i]);
}

SIMD static void narrow_bits(const float *from, int64_t n, uint16_t *to) {
    for (int64_t i = 0; i < n; i++) to[i] = f32_to_f16_bits(from[i]);
}

SIMD static void round_bits(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i++) x[i] = f16_bits_to_f32(f32_to_f16_bits(x[i]));
}

#if defined(__x86_64__)
#include <immintrin.h>

#define F16C __attribute__((target("avx,f16c")))
enum { WIDE = 8 };

static bool can_convert(void) { return __builtin_cpu_supports("avx") && __builtin_cpu_supports("f16c"); }

F16C static inline __m256 widened(const uint16_t *p) { return _mm256_cvtph_ps(_mm_loadu_si128((const void *)p)); }
F16C static inline __m128i narrowed(const float *p) {
    return _mm256_cvtps_ph(_mm256_loadu_ps(p), _MM_FROUND_TO_NEAREST_INT);
}

F16C static void widen_wide(const uint16_t *from, int64_t n, float *to) {
    for (int64_t i = 0; i < n; i += WIDE) _mm256_storeu_ps(to + i, widened(from + i));
}

F16C static void narrow_wide(const float *from, int64_t n, uint16_t *to) {
    for (int64_t i = 0; i < n; i += WIDE) _mm_storeu_si128((void *)(to + i), narrowed(from + i));
}

F16C static void round_wide(float *x, int64_t n) {
    for (int64_t i = 0; i < n; i += WIDE) _mm256_storeu_ps(x + i, _mm256_cvtph_ps(narrowed(x + i)));
}
#else
enum { WIDE = 8 };
static bool can_convert(void) { return false; }
#define widen_wide widen_bits
#define narrow_wide narrow_bits
#define round_wide round_bits
#endif

/* Elements of whole vectors; the rest goes through its bits, to the same result. */
static int64_t whole(int64_t n) { return can_convert() ? n / WIDE * WIDE : 0; }

void f16_widen(const uint16_t *from, int64_t n, float *to) {
    const int64_t fast = whole(n);
    if (fast) widen_wide(from, fast, to);
    if (fast < n) widen_bits(from + fast, n - fast, to + fast);
}

void f16_narrow(const float *from, int64_t n, uint16_t *to) {
    const int64_t fast = whole(n);
    if (fast) narrow_wide(from, fast, to);
    if (fast < n) narrow_bits(from + fast, n - fast, to + fast);
}

void f16_round(float *x, int64_t n) {
    const int64_t fast = whole(n);
    if (fast) round_wide(x, fast);
    if (fast < n) round_bits(x + fast, n - fast);
}
