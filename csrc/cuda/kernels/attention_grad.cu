/* attention_grad.cu -- mirrors ops/attention/fused_attention_kernel.c: FusedAttentionGrad, with no score in memory.
 *
 * The queries' gradient has a block for each tile of queries, which goes over the keys; the gradients of keys and values
 * have one for each tile of keys, which goes over the queries of all heads that share them; the bias's gradient has one
 * for each tile of its own, which goes over what it was broadcast to. So nothing is added by two blocks, and sums depend
 * on shapes alone; scores are made once for each of these. Sums of keys and of values are more than there are registers
 * for the widest heads, which take two kernels. */
#ifndef T
#include "cuda/kernels/attention_tile.h"

#ifdef ORT_HOST
#include "cuda/kernels/torch_attention.h"
#include "cuda/kernels/triton.h"

kernel_fn fused_attention_grad_cuda;
size_t fused_attention_grad_cuda_workspace(const node *n);

size_t fused_attention_grad_cuda_workspace(const node *n) {
    const shape *q = &n->in[Q]->shape;
    const size_t deltas = (size_t)shape_span(q, 0, q->rank - 1) * dtype_size(sum_type(n->in[Q]->type));
    const size_t torchs = torch_attention_workspace(n);
    return deltas > torchs ? deltas : torchs;
}

/* The bias's own dimensions, of those that it is broadcast to. */
static int64_t own(const attention_plane *p, int d, int64_t size) { return p->step[d] == 0 ? 1 : size; }

status fused_attention_grad_cuda(ctx *c, const call *k) {
    static kernel deltas[DTYPE_COUNT] = FLOAT_KERNELS(attention_delta);
    static kernel of_queries[WIDTHS][DTYPE_COUNT] = KERNELS(attention_grad_queries);
    static kernel of_keys[WIDTHS][DTYPE_COUNT] = KERNELS(attention_grad_keys);
    static kernel of_values[DTYPE_COUNT] = FLOAT_KERNELS(attention_grad_values_256);
    static kernel of_bias[DTYPE_COUNT] = FLOAT_KERNELS(attention_grad_bias);
    const dtype type = k->in[Q].type;
    const shape *q = &k->in[Q].shape;
    attention_args a = args_of(k);
    const int64_t down = tiles(a.queries.length, type), across = tiles(a.keys.length, type);
    bool done;

    TRY(triton_attention_start(c, k, &done));
    if (done) return OK;
    TRY(torch_attention_backward(c, k, &done));
    if (done) return OK;
    TRY(check_lengths(c, k, &a));
    a.dy = operand_of(&k->in[DY], a.queries.rows != NULL);
    a.y = k->in[Y].data;
    a.stats = k->in[STATS].data;
    a.delta = k->work;
    a.dq = wanted(k, 0), a.dk = wanted(k, 1), a.dv = wanted(k, 2);
    TRY(clear_listed(c, k, &a.queries, 0));
    for (int i = 1; i <= 2; i++) TRY(clear_listed(c, k, &a.keys, i));
    TRY(cuda_launch(c, k, &deltas[type], geometry_rows(shape_span(q, 0, q->rank - 1), a.value_width), &a));
    if (a.dq) TRY(run(c, k, of_queries, a.batch * a.heads * down, &a));
    if (a.dk || a.dv) TRY(run(c, k, of_keys, a.batch * a.groups * across, &a));
    if (a.dv && which_of(&a) == WIDTHS - 1)
        TRY(cuda_launch(c, k, &of_values[type], geometry_over(a.batch * a.groups * across, 1, THREADS), &a));
    if (!wanted(k, 3)) return OK;
    a.dbias = plane_of(&k->out[3], &SHAPE(a.batch, a.heads, a.queries.length, a.keys.length));
    const int64_t planes = own(&a.dbias, 0, a.batch) * own(&a.dbias, 1, a.heads);
    return cuda_launch(c, k, &of_bias[type], geometry_over(planes * down * across, 1, THREADS), &a);
}
#endif

#ifdef ORT_DEVICE
#define TEMPLATE "cuda/kernels/attention_grad.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

#include "cuda/kernels/attention_tile.h"

/* Σ dy y of every row of every head. */
KERNEL(NAME(attention_delta), attention_args) {
    const int64_t rows = a.queries.rows ? a.queries.count : a.batch * a.queries.length;

    FOR_BLOCKS(at, rows * a.heads) {
        const int64_t row = at / a.heads, h = at % a.heads, in = a.queries.rows ? row : row % a.queries.length;
        const int64_t b = a.queries.rows ? 0 : row / a.queries.length;
        const T *dy = (const T *)a.dy.data + b * a.dy.sequence + in * a.dy.row + h * a.dy.head;
        const T *y = (const T *)a.y + at * a.value_width;
        A dot = 0;

        FOR_THREADS(i, a.value_width) dot += GET(dy[i * a.dy.col]) * GET(y[i]);
        dot = SUM(dot);
        if (threadIdx.x == 0) ((A *)a.delta)[at] = dot;
    }
}

/* The tile's weights, with dropout, and the gradient of its scores; 0 where nothing is allowed in all of it. */
DEVICE int NAME(attention_slopes)(const attention_args *a, attention_tile *t, A x[][EACH], A dx[][EACH], A *room) {
    const T *dy = (const T *)a->dy.data + head_at(&a->dy, &a->queries, t->q, t->b, t->h) + t->row * a->dy.row;
    const T *v = (const T *)a->v.data + head_at(&a->v, &a->keys, t->k, t->b, t->group) + t->key * a->v.row;

    if (!NAME(attention_scores)(a, t, x, room)) return 0;
    NAME(attention_dots)(dx, dy, a->dy.row, a->dy.col, t->q.count - t->row, v, a->v.row, a->v.col, t->k.count - t->key,
                         a->value_width, room);
    FOR_MINE(i) {
        const int64_t row = t->row + DOWN + 16 * i, at = (t->q.from + row) * a->heads + t->h;
        const A most = row < t->q.count ? ((const A *)a->stats)[2 * at] : 0;
        const A share = row < t->q.count ? ((const A *)a->stats)[2 * at + 1] : 0;
        const A delta = row < t->q.count ? ((const A *)a->delta)[at] : 0;
        A kept[EACH];

        NAME(attention_kept)(a, t, t->row_place[i], kept);
        FOR_MINE(j) {
            const A e = EXP(x[i][j] - most) * share;
            x[i][j] = e * kept[j];
            dx[i][j] = e * (dx[i][j] * kept[j] - delta);
        }
    }
    return 1;
}

/* A tile of sums, times `scale`, becomes rows of a result whose heads are neighbours. */
DEVICE void NAME(attention_deliver)(T *to, A sum[][EACH][EACH], const int chunks, int64_t row_step, int64_t rows,
                                    int64_t width, A scale) {
    FOR_MINE(i) {
        const int64_t row = DOWN + 16 * i;
        if (row >= rows) continue;
        FOR_CHUNKS(c) FOR_MINE(j) {
            const int64_t col = c * SIDE + RIGHT + 16 * j;
            if (col < width) to[row * row_step + col] = PUT(sum[c][i][j] * scale);
        }
    }
}

DEVICE void NAME(attend_grad_queries)(const attention_args *a, const int chunks) {
    SHARED(A, weights, SIDE * LINE);
    SHARED(A, room, SIDE * LINE);
    const int64_t blocks = (a->queries.length + SIDE - 1) / SIDE;

    FOR_BLOCKS(block, a->batch * a->heads * blocks) {
        attention_tile t = tile_of_block(a, block, blocks, a->heads, 1);
        const T *k = (const T *)a->k.data + head_at(&a->k, &a->keys, t.k, t.b, t.group);
        A sum[256 / SIDE][EACH][EACH], x[EACH][EACH], dx[EACH][EACH];

        t.row = block % blocks * SIDE;
        if (t.row >= t.q.count) continue;
        FOR_CHUNKS(c) FOR_MINE(i) FOR_MINE(j) sum[c][i][j] = 0;
        for (t.key = 0; t.key < t.k.count; t.key += SIDE) {
            if (!NAME(attention_slopes)(a, &t, x, dx, room)) continue;
            NAME(attention_keep)(weights, dx);
            FOR_CHUNKS(c) {
                if (c * (int)SIDE >= a->width) continue;
                NAME(attention_stage)(room, k + t.key * a->k.row, a->k.row, a->k.col, t.k.count - t.key, c * SIDE,
                                      a->width);
                NAME(attention_add)(sum[c], weights, LINE, 1, room);
            }
        }
        NAME(attention_deliver)((T *)a->dq + ((t.q.from + t.row) * a->heads + t.h) * a->width, sum, chunks,
                                a->heads * a->width, t.q.count - t.row, a->width, (A)a->scale);
    }
}

KERNEL(NAME(attention_grad_queries_64), attention_args) { NAME(attend_grad_queries)(&a, 64 / SIDE); }
KERNEL(NAME(attention_grad_queries_128), attention_args) { NAME(attend_grad_queries)(&a, 128 / SIDE); }
KERNEL(NAME(attention_grad_queries_256), attention_args) { NAME(attend_grad_queries)(&a, 256 / SIDE); }

/* Of keys, values or both. */
DEVICE void NAME(attend_grad_keys)(const attention_args *a, const int chunks, const int keys, const int values) {
    SHARED(A, weights, SIDE * LINE);
    SHARED(A, room, SIDE * LINE);
    const int64_t blocks = (a->keys.length + SIDE - 1) / SIDE, each = a->heads / a->groups;

    FOR_BLOCKS(block, a->batch * a->groups * blocks) {
        const int64_t group = block / blocks % a->groups;
        attention_tile t = tile_of_block(a, block, blocks, a->groups, each);
        A dk[256 / SIDE][EACH][EACH], dv[256 / SIDE][EACH][EACH], x[EACH][EACH], dx[EACH][EACH];

        t.key = block % blocks * SIDE;
        if (t.key >= t.k.count) continue;
        FOR_CHUNKS(c) FOR_MINE(i) FOR_MINE(j) dk[c][i][j] = dv[c][i][j] = 0;
        for (t.h = group * each; t.h < (group + 1) * each; t.h++) {
            const T *q = (const T *)a->q.data + head_at(&a->q, &a->queries, t.q, t.b, t.h);
            const T *dy = (const T *)a->dy.data + head_at(&a->dy, &a->queries, t.q, t.b, t.h);
            for (t.row = 0; t.row < t.q.count; t.row += SIDE) {
                const int64_t rows = t.q.count - t.row;
                if (!NAME(attention_slopes)(a, &t, x, dx, room)) continue;
                NAME(attention_keep)(weights, x);
                FOR_CHUNKS(c) {
                    if (c * (int)SIDE >= a->value_width || !values || !a->dv) continue;
                    NAME(attention_stage)(room, dy + t.row * a->dy.row, a->dy.row, a->dy.col, rows, c * SIDE,
                                          a->value_width);
                    NAME(attention_add)(dv[c], weights, 1, LINE, room);
                }
                __syncthreads(); /* the weights have been read */
                NAME(attention_keep)(weights, dx);
                FOR_CHUNKS(c) {
                    if (c * (int)SIDE >= a->width || !keys || !a->dk) continue;
                    NAME(attention_stage)(room, q + t.row * a->q.row, a->q.row, a->q.col, rows, c * SIDE, a->width);
                    NAME(attention_add)(dk[c], weights, 1, LINE, room);
                }
            }
        }
        const int64_t row = (t.k.from + t.key) * a->groups + group, rows = t.k.count - t.key;
        if (keys && a->dk)
            NAME(attention_deliver)((T *)a->dk + row * a->width, dk, chunks, a->groups * a->width, rows, a->width,
                                    (A)a->scale);
        if (values && a->dv)
            NAME(attention_deliver)((T *)a->dv + row * a->value_width, dv, chunks, a->groups * a->value_width, rows,
                                    a->value_width, (A)1);
    }
}

KERNEL(NAME(attention_grad_keys_64), attention_args) { NAME(attend_grad_keys)(&a, 64 / SIDE, 1, 1); }
KERNEL(NAME(attention_grad_keys_128), attention_args) { NAME(attend_grad_keys)(&a, 128 / SIDE, 1, 1); }
KERNEL(NAME(attention_grad_keys_256), attention_args) { NAME(attend_grad_keys)(&a, 256 / SIDE, 1, 0); }
KERNEL(NAME(attention_grad_values_256), attention_args) { NAME(attend_grad_keys)(&a, 256 / SIDE, 0, 1); }

/* All queries and keys are there: attention over lists has no bias with a gradient. */
KERNEL(NAME(attention_grad_bias), attention_args) {
    SHARED(A, room, SIDE * LINE);
    const int64_t down = (a.queries.length + SIDE - 1) / SIDE, across = (a.keys.length + SIDE - 1) / SIDE;
    const int64_t sequences = a.dbias.step[0] == 0 ? a.batch : 1, heads = a.dbias.step[1] == 0 ? a.heads : 1;
    const int64_t planes = a.batch / sequences * (a.heads / heads);

    FOR_BLOCKS(block, planes * down * across) {
        const int64_t plane = block / (down * across), first_b = plane / (a.heads / heads) * sequences;
        const int64_t first_h = plane % (a.heads / heads) * heads;
        A sum[EACH][EACH], x[EACH][EACH], dx[EACH][EACH];

        FOR_MINE(i) FOR_MINE(j) sum[i][j] = 0;
        for (int64_t b = first_b; b < first_b + sequences; b++)
            for (int64_t h = first_h; h < first_h + heads; h++) {
                attention_tile t = tile_of(&a, b, h);
                t.row = block / across % down * SIDE;
                t.key = block % across * SIDE;
                if (!NAME(attention_slopes)(&a, &t, x, dx, room)) continue;
                FOR_MINE(i) FOR_MINE(j) sum[i][j] += dx[i][j];
            }
        FOR_MINE(i) FOR_MINE(j) {
            const int64_t q = block / across % down * SIDE + DOWN + 16 * i, k = block % across * SIDE + RIGHT + 16 * j;
            if (q < a.queries.length && k < a.keys.length)
                set_number(a.dbias.data, (int)a.dbias.type, plane_at(&a.dbias, first_b, first_h, q, k),
                           (double)sum[i][j]);
        }
    }
}
#endif
