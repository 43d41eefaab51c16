/* philox.c -- mixes the halves of two 32 x 32 -> 64 bit products, which change places: that is a round.
 *
 * The vector forms keep one 32-bit word in each 64-bit lane: that is what the widening multiplication reads (it ignores
 * the upper half, so nothing is masked) and makes. Two lanes are put side by side only when a word is stored; hence
 * the order within a group, the same for every form:
 *     position 16 w + 2 i + h holds word w of counter 8 h + i        (w < 4, i < 8, h < 2) */
#include "core/philox.h"

static const uint32_t multiply_a = 0xD2511F53u, multiply_c = 0xCD9E8D57u, step_0 = 0x9E3779B9u, step_1 = 0xBB67AE85u;
enum { ROUNDS = 10, COUNTERS = 16 };

static void fill_portable(uint64_t seed, uint32_t key, uint64_t first, int64_t groups, uint32_t *out) {
    for (int64_t g = 0; g < groups; g++, out += PHILOX_GROUP) {
        for (uint32_t n = 0; n < COUNTERS; n++) {
            uint64_t counter = (first + (uint64_t)g) * COUNTERS + n;
            uint32_t a = (uint32_t)counter, b = (uint32_t)(counter >> 32), c = key, d = 0;
            uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32), *to = out + 2 * (n % 8) + n / 8;
            for (int r = 0; r < ROUNDS; r++, k0 += step_0, k1 += step_1) {
                uint64_t x = (uint64_t)a * multiply_a, y = (uint64_t)c * multiply_c;
                a = (uint32_t)(y >> 32) ^ b ^ k0;
                b = (uint32_t)y;
                c = (uint32_t)(x >> 32) ^ d ^ k1;
                d = (uint32_t)x;
            }
            to[0] = a, to[16] = b, to[32] = c, to[48] = d;
        }
    }
}

#if defined(__x86_64__) && defined(__GNUC__)
#include <immintrin.h>

#define FILL fill_512
#define ISA "avx512f"
#define V __m512i
#define LANES 8
#define SET(x) _mm512_set1_epi64((long long)(uint64_t)(x))
#define INDEX(x) _mm512_add_epi64(SET(x), _mm512_set_epi64(7, 6, 5, 4, 3, 2, 1, 0))
#define MUL _mm512_mul_epu32
#define SHIFT_RIGHT _mm512_srli_epi64
#define XOR _mm512_xor_si512
#define STORE_PAIR(to, low, high)                                                                                      \
    _mm512_storeu_si512((to), _mm512_mask_blend_epi32(0xAAAA, (low), _mm512_slli_epi64((high), 32)))
#include "core/philox_fill.h"

#define FILL fill_256
#define ISA "avx2"
#define V __m256i
#define LANES 4
#define SET(x) _mm256_set1_epi64x((long long)(uint64_t)(x))
#define INDEX(x) _mm256_add_epi64(SET(x), _mm256_set_epi64x(3, 2, 1, 0))
#define MUL _mm256_mul_epu32
#define SHIFT_RIGHT _mm256_srli_epi64
#define XOR _mm256_xor_si256
#define STORE_PAIR(to, low, high)                                                                                      \
    _mm256_storeu_si256((__m256i *)(to), _mm256_blend_epi32((low), _mm256_slli_epi64((high), 32), 0xAA))
#include "core/philox_fill.h"

void philox_fill(uint64_t seed, uint32_t key, int64_t first, int64_t groups, uint32_t *out) {
    if (__builtin_cpu_supports("avx512f")) fill_512(seed, key, (uint64_t)first, groups, out);
    else if (__builtin_cpu_supports("avx2")) fill_256(seed, key, (uint64_t)first, groups, out);
    else fill_portable(seed, key, (uint64_t)first, groups, out);
}
#else
void philox_fill(uint64_t seed, uint32_t key, int64_t first, int64_t groups, uint32_t *out) {
    fill_portable(seed, key, (uint64_t)first, groups, out);
}
#endif
