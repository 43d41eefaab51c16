/* attention.cu -- mirrors ops/attention/fused_attention_kernel.c: FusedAttention, with no score in memory.
 *
 * A block has a tile of queries and goes over the keys, so nothing is added by two blocks, and sums depend on shapes
 * alone. */
#ifndef T
#include "cuda/kernels/attention_tile.h"

#ifdef ORT_HOST
#include "cuda/kernels/torch_attention.h"
#include "cuda/kernels/triton.h"

kernel_fn fused_attention_cuda;
size_t fused_attention_cuda_workspace(const node *n);

size_t fused_attention_cuda_workspace(const node *n) { return torch_attention_starts(n); }

status fused_attention_cuda(ctx *c, const call *k) {
    static kernel kernels[WIDTHS][DTYPE_COUNT] = KERNELS(attention);
    attention_args a = args_of(k);
    bool done;

    if (tensor_count(&k->out[0]) == 0) return OK;
    TRY(triton_attention_start(c, k, &done));
    if (done) return OK;
    TRY(torch_attention_forward(c, k, &done));
    if (done) return OK;
    TRY(check_lengths(c, k, &a));
    for (int i = 0; i < 2; i++) TRY(clear_listed(c, k, &a.queries, i));
    a.y = k->out[0].data;
    a.stats = wanted(k, 1);
    return run(c, k, kernels, a.batch * a.heads * tiles(a.queries.length, k->in[Q].type), &a);
}
#endif

#ifdef ORT_DEVICE
#define TEMPLATE "cuda/kernels/attention.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

#include "cuda/kernels/attention_tile.h"

/* The tile's exponentials, with dropout, into `weights`; factor: what sums with the largest before are multiplied by. */
DEVICE void NAME(attention_weigh)(const attention_args *a, const attention_tile *t, A x[][EACH], A *weights, A most[],
                                  A total[], A factor[]) {
    FOR_MINE(i) {
        A top = most[i], sum = 0, kept[EACH];
        FOR_MINE(j) top = x[i][j] > top ? x[i][j] : top;
        for (int step = ACROSS / 2; step > 0; step /= 2) { /* a row is in 16 neighbouring threads */
            const A other = __shfl_xor_sync(0xffffffffu, top, step);
            top = other > top ? other : top;
        }
        const A base = top == -(A)INFINITY ? 0 : top;
        factor[i] = EXP(most[i] - base);
        NAME(attention_kept)(a, t, t->row_place[i], kept);
        FOR_MINE(j) {
            const A e = EXP(x[i][j] - base);
            sum += e;
            x[i][j] = e * kept[j];
        }
        for (int step = ACROSS / 2; step > 0; step /= 2) sum += __shfl_xor_sync(0xffffffffu, sum, step);
        total[i] = total[i] * factor[i] + sum;
        most[i] = top;
    }
    NAME(attention_keep)(weights, x);
}

DEVICE void NAME(attend)(const attention_args *a, const int chunks) {
    SHARED(A, weights, SIDE * LINE);
    SHARED(A, room, SIDE * LINE);
    const int64_t blocks = (a->queries.length + SIDE - 1) / SIDE;

    FOR_BLOCKS(block, a->batch * a->heads * blocks) {
        attention_tile t = tile_of_block(a, block, blocks, a->heads, 1);
        const T *v = (const T *)a->v.data + head_at(&a->v, &a->keys, t.k, t.b, t.group);
        A sum[256 / SIDE][EACH][EACH], x[EACH][EACH], most[EACH], total[EACH], factor[EACH];

        t.row = block % blocks * SIDE;
        if (t.row >= t.q.count) continue;
        FOR_MINE(i) most[i] = -(A)INFINITY, total[i] = 0;
        FOR_CHUNKS(c) FOR_MINE(i) FOR_MINE(j) sum[c][i][j] = 0;
        for (t.key = 0; t.key < t.k.count; t.key += SIDE) {
            if (!NAME(attention_scores)(a, &t, x, room)) continue;
            NAME(attention_weigh)(a, &t, x, weights, most, total, factor);
            FOR_CHUNKS(c) {
                FOR_MINE(i) FOR_MINE(j) sum[c][i][j] *= factor[i];
                if (c * (int)SIDE >= a->value_width) continue;
                NAME(attention_stage)(room, v + t.key * a->v.row, a->v.row, a->v.col, t.k.count - t.key, c * SIDE,
                                      a->value_width);
                NAME(attention_add)(sum[c], weights, LINE, 1, room);
            }
        }
        FOR_MINE(i) {
            const int64_t row = t.row + DOWN + 16 * i, at = (t.q.from + row) * a->heads + t.h;
            const A share = total[i] == 0 && a->safe ? 0 : 1 / total[i];
            if (row >= t.q.count) continue;
            FOR_CHUNKS(c) FOR_MINE(j) {
                const int64_t col = c * SIDE + RIGHT + 16 * j;
                if (col < a->value_width) ((T *)a->y)[at * a->value_width + col] = PUT(sum[c][i][j] * share);
            }
            if (!a->stats || RIGHT != 0) continue;
            ((A *)a->stats)[2 * at] = most[i] == -(A)INFINITY ? 0 : most[i];
            ((A *)a->stats)[2 * at + 1] = share;
        }
    }
}

KERNEL(NAME(attention_64), attention_args) { NAME(attend)(&a, 64 / SIDE); }
KERNEL(NAME(attention_128), attention_args) { NAME(attend)(&a, 128 / SIDE); }
KERNEL(NAME(attention_256), attention_args) { NAME(attend)(&a, 256 / SIDE); }
#endif
