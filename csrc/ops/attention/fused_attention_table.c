/* fused_attention_table.c -- says where attention as one operator is faster than its products and softmax one by one.
 *
 * Milliseconds of forward and backward of 4096 tokens in sequences of S, 12 heads of 64, on a Xeon with AMX, two
 * threads: one by one, as one operator, and ATen's kernel for CPUs, which has no dropout (with it ATen takes 1.2 to
 * 8 times as long as the slower of ours, 3 to 8 from 256 on) and in bfloat16 no fast backward.
 *
 *              float32                                   bfloat16
 *     S        all keys          causal                  all keys         causal
 *     48        20   32   25      20   34   25            10   23   83     12   24   85
 *     128       36   48   43      37   45   46            13   27   71     15   28   73
 *     256       57   66   59      58   57   62            22   34   51     23   32   52
 *     512      102  109   99     105   84  105            38   49   70     41   47   70
 *     1024     217  207  182     223  142  145            88   89  120     93   75   91
 *     2048     432  378  362     448  265  235           182  168  219    197  137  148
 *     with dropout
 *     256       65   72           66   60                 31   40          32   35
 *     512      114  118          118   90                 56   62          59   53
 *     1024     238  223          250  150                119  111         127   88
 *
 * On a CPU with AVX-512-BF16 (Zen 5), one thread, with dropout, the operator's gain in float32 and bfloat16:
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
 * On a Zen 5 without AMX, float32, two threads, with ATen's inside an eager step and ours inside the engine's, all keys and
 * causal: 512 69 and 50, ATen's 136 and 129; 1024 128 and 90, 242 and 189; 2048 250 and 172, 479 and 308; 4096 488 and
 * 352, 942 and 548. So ATen's is not asked there.
 *
 * ATen's is taken where it was the fastest: float32 on a CPU with AMX, without dropout, all keys from 1024 on, causal from
 * 2048 on. Called from here (ops/attention/fused_attention_shim.c), with its results copied, it took in another hour, beside our
 * operator, each twice: all keys 512 112 and 118 (ours 106, 102), 1024 204, 203 (208, 209), 2048 394, 403 (394, 425);
 * causal 2048 250, 254 (299, 299).
 *
 * On a Xeon with AMX, float32, two threads, whole steps (forward and backward) with the operator over those without, medians of
 * 8 to 12 pairs: ViT-small at 197 keys 0.96; at 128 keys BERT-base with dropout 0.98, GPT-2 causal with dropout 0.96, a Llama
 * causal 0.97; at 64 keys nn.Transformer 0.98, T5 with a bias 1.02. In bfloat16: BERT-base 0.99, ViT-small 1.12.
 *
 * On a Zen 4, float32, two threads, whole steps of ViT-small at 197 keys without dropout: 5.19 and 5.55 s with the operator,
 * 5.27 s without; a step keeps 0.56 of what eager keeps, and 0.72 without.
 *
 * On a GPU our kernel has no tensor cores, which products of 16-bit floats have: with those it is for scores that take
 * much memory. torch's kernels have them; calling them ends a CUDA graph, so they are for scores that take a GPU longer
 * than that takes the host. On an H100, forward and backward of 8 sequences of 1024 tokens, 16 heads of 64, causal: ours
 * in float32 11.1 milliseconds, torch's memory-efficient kernels 2.6; in bfloat16 these 0.91, cuDNN's 0.26. Beside
 * products and softmax, 16 bits, all keys and causal, in a plan of its own: 1 million scores 0.8 times as fast, 4 million
 * 0.8 to 4.3 times, 16 million 2.7 to 6.8 times, from 64 million on 3.4 to 6.4 times. */
#include "core/torch_lib.h"
#include "gemm/gemm.h"
#include "ops/queries.h"

enum { MUCH = 4096, EIGHT = 8, MANY = 1 << 22, FEW = 64 };

/* The fewest keys: [masked][dropout]. */
typedef int fewest[2][2];
static const fewest amx = {{128, 128}, {128, 128}}, amx_narrow = {{1024, 1024}, {1024, 512}},
                    others = {{192, 384}, {256, 256}}, others_narrow = {{512, 512}, {256, 256}},
                    gpu_narrow = {{MUCH, MUCH}, {MUCH, MUCH}};

/* The fewest keys for which torch's kernel is the best on a CPU with AMX, in float32. */
static const int torch_from[] = {[TORCH_ALL] = 1024, [TORCH_CAUSAL] = 2048};

static bool has_amx(void) { return gemm_packed_way(&(gemm){.type = BF16}) == GEMM_PACKED_AMX; }

bool fused_attention_pays(const graph *g, dtype type, int64_t queries, int64_t keys, bool masked, bool dropout) {
    const bool narrow = dtype_is_narrow(type);
    const fewest *from = g->cuda && narrow                      ? &gpu_narrow
                         : !g->cuda && type != F64 && has_amx() ? (narrow ? &amx_narrow : &amx)
                                                                : (narrow ? &others_narrow : &others);

    if (!g->cuda && narrow && !gemm_sums_wide(type)) return false;
    return keys >= (*from)[masked][dropout] && queries >= FEW;
}

bool fused_attention_flash(const graph *g, dtype type, int64_t width, int64_t value_width) {
    return g->cuda && dtype_is_narrow(type) && width == value_width && torch_has_flash_attention();
}

/* With dropout flash attention is asked where it can be, else the memory-efficient kernel (cuda/libraries/attention.c). */
static bool by_torch_there(dtype type, torch_attention keys, const shape *scores, int64_t width, int64_t value_width,
                           bool dropout, bool paying) {
    if (type == F64 || (paying && shape_count(scores) < MANY)) return false;
    if (width % EIGHT || value_width % EIGHT || width > FUSED_ATTENTION_WIDTH || value_width > FUSED_ATTENTION_WIDTH)
        return false; /* a row of a head is not aligned */
    if (dropout && keys != TORCH_BIASED && dtype_is_narrow(type) && width == value_width)
        return torch_has_flash_attention();
    return torch_has_attention(true);
}

bool fused_attention_by_torch(const graph *g, dtype type, torch_attention keys, const shape *scores, int64_t width,
                              int64_t value_width, bool dropout, bool paying) {
    if (g->cuda) return by_torch_there(type, keys, scores, width, value_width, dropout, paying);
    if (dropout || keys == TORCH_BIASED || type != F32 || !has_amx() || width != value_width) return false;
    return scores->dim[3] >= torch_from[keys] && scores->dim[2] >= FEW && torch_has_attention(false);
}
