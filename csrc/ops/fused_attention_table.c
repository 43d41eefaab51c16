/* fused_attention_table.c -- where attention as one operator is faster than its products and softmax one by one.
 *
 * Measured, forward and backward with dropout, on a CPU with AVX-512-BF16 (Zen 5), one thread. Of S tokens, 12 heads of
 * 64; the operator's gain in float32 and bfloat16:
 *
 *     S      causal     without a mask
 *     48                0.9   0.85
 *     128    1.1  1.0   1.05  0.9
 *     256    1.3  1.2
 *     384               1.05  0.95
 *     512    1.4  1.25  1.05  1.0
 *     1024   1.5  1.4
 *
 * and it keeps nothing of size S x S. With 16-bit floats it needs sums that stay float32, which only our kernels give.
 *
 * On a GPU nothing has been measured. There our kernel has no tensor cores, which products of 16-bit floats have: with
 * those it is for scores that take much memory. torch's kernels have them; calling them ends a CUDA graph, so they are
 * for scores that take a GPU longer than that takes the host. */
#include "exec/gemm.h"
#include "exec/torch_lib.h"
#include "ops/op.h"

enum { MUCH = 4096, EIGHT = 8, MANY = 1 << 23 };

bool fused_attention_pays(const graph *g, dtype type, int64_t queries, int64_t keys, bool masked) {
    const bool narrow = type == BF16 || type == F16;
    const int64_t from = g->cuda && narrow ? MUCH : masked ? 256 : narrow ? 512 : 384;

    if (!g->cuda && narrow && !gemm_sums_wide(type)) return false;
    return keys >= from && queries >= 64;
}

bool fused_attention_by_torch(const graph *g, dtype type, const shape *scores, int64_t width, int64_t value_width,
                              bool paying) {
    if (!g->cuda || (type != BF16 && type != F16) || (paying && shape_count(scores) < MANY)) return false;
    if (width % EIGHT || value_width % EIGHT || width > FUSED_ATTENTION_WIDTH || value_width > FUSED_ATTENTION_WIDTH)
        return false; /* a row of a head is not aligned */
    return torch_has_attention();
}
