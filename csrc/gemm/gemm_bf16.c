/* gemm_bf16.c -- multiplies pairs of bfloat16 with AVX-512-BF16, inside of a product. */
#if defined(__x86_64__) && defined(__GNUC__)

#define AVX512 __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define MULTIPLY_ADD(x, b, sum) _mm512_dpbf16_ps(sum, (__m512bh)(x), (__m512bh)(b))
#include "gemm/gemm_avx512.h"
#include "gemm/gemm_pairs.h"

AVX512 static uint32_t pack_a(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, MR, MR, false, 1);
    return 0;
}

AVX512 static uint32_t pack_b(uint32_t *out, const void *in, dtype from, int64_t lines, int64_t depth,
                              int64_t line_step, int64_t depth_step) {
    pack(out, in, from, lines, depth, line_step, depth_step, PANEL_COLS, PANEL_COLS, false, 1);
    return 0;
}

const gemm_kernel gemm_kernel_bf16 = {
    .rows = MR,
    .step_units = 1,
    .step_depth = 2,
    .most_units = 512,
    .one_slice = 512,
    .panels = 1,
    .room = 448 * 512,
    .room_a = 448 * 256,
    .can = can_pairs,
    .pack_a = pack_a,
    .pack_b = pack_b,
    .run = run_block,
};

#endif
