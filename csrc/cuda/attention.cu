/* attention.cu -- twin of ops/fused_attention.c: FusedAttention and FusedAttentionGrad, with no score in memory.
 *
 * All is made of square tiles: SIDE queries by SIDE keys, and SIDE columns of an operand at a time. A block has 16 x 16
 * threads, and a thread the elements 16 apart in both directions of a tile. Forward and the queries' gradient have a
 * block for each tile of queries and go over the keys; the gradients of keys and values have one for each tile of keys
 * and go over the queries of all heads that share them; the bias's gradient has one for each tile of its own and goes over
 * what it was broadcast to. So nothing is added by two blocks, and sums depend on shapes alone; backward makes scores
 * once for each of these. Tiles in which nothing is allowed are left out.
 *
 * A kernel is compiled for heads of up to 64, 128 and 256 columns: its sums are in registers. Those of keys and of values
 * are more than there are of the widest, which take two kernels. */
#ifndef T
#include "cuda/kernel.h"
#include "cuda/philox.h"

/* Queries, or keys: `length` a sequence; of all rows those listed, if there is a list. */
typedef struct attention_side {
    int64_t length;
    const int64_t *rows;
    int64_t count; /* of the list */
} attention_side;

/* Steps in elements. Of listed rows `row` goes from one to the next, whatever the sequence. */
typedef struct attention_operand {
    const void *data;
    int64_t sequence, row, head, col;
} attention_operand;

/* What is broadcast to [batch, heads, queries, keys]; absent: data is NULL. */
typedef struct attention_plane {
    void *data;
    int64_t step[4];
    int64_t type;
} attention_plane;

typedef struct attention_args {
    attention_operand q, k, v, dy;
    attention_side queries, keys;
    attention_plane allowed, bias, dbias;
    void *y, *stats, *delta, *dq, *dk, *dv; /* dense; stats as sums are: (most, share) of a row, delta one number */
    int64_t batch, heads, groups, width, value_width;
    double scale, factor; /* factor: of what dropout keeps */
    const uint64_t *seed_at;
    uint64_t seed;
    uint32_t key, threshold;
    int32_t drops, safe;
} attention_args;

enum { ACROSS = 16, THREADS = ACROSS * ACROSS };

#ifdef ORT_HOST
#include "ops/dropout.h"

kernel_fn fused_attention_cuda, fused_attention_grad_cuda;
size_t fused_attention_grad_cuda_workspace(const node *n);

enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, OPERANDS, Y = OPERANDS, STATS, DY };
enum { WIDTHS = 3, WIDEST = FUSED_ATTENTION_WIDTH };
_Static_assert(WIDEST == 64 << (WIDTHS - 1), "the widest kernel takes the widest heads");

/* A side of a tile. */
static int64_t side_of(dtype type) { return type == F64 ? 32 : 64; }
static dtype sum_type(dtype type) { return type == F64 ? F64 : F32; }
static bool present(const call *k, int i) { return i < k->n_in && tensor_present(&k->in[i]); }
static void *wanted(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]) ? k->out[i].data : NULL; }

static attention_operand operand_of(const tensor *t, bool listed) {
    const int64_t *s = t->stride + t->shape.rank - 3;
    return (attention_operand){t->data, listed ? 0 : t->stride[0], s[0], s[1], s[2]};
}

static attention_side rows_of(const call *k, int operand, int rows, const char *length) {
    if (!present(k, rows)) return (attention_side){.length = k->in[operand].shape.dim[1]};
    return (attention_side){node_int(k->node, length), k->in[rows].data, tensor_count(&k->in[rows])};
}

static attention_plane plane_of(const tensor *t, const shape *all) {
    const tensor seen = tensor_expand(t, all);
    attention_plane p = {.data = seen.data, .type = t->type};
    for (int d = 0; d < 4; d++) p.step[d] = seen.stride[d];
    return p;
}

static attention_args args_of(const call *k) {
    const shape *q = &k->in[Q].shape, *v = &k->in[V].shape;
    const double ratio = node_float(k->node, "ratio");
    attention_args a = {.queries = rows_of(k, Q, Q_ROWS, "queries"), .keys = rows_of(k, K, K_ROWS, "keys")};
    const bool listed = a.queries.rows != NULL;

    a.q = operand_of(&k->in[Q], listed);
    a.k = operand_of(&k->in[K], a.keys.rows != NULL);
    a.v = operand_of(&k->in[V], a.keys.rows != NULL);
    a.batch = listed ? node_int(k->node, "batch") : q->dim[0];
    a.heads = q->dim[q->rank - 2], a.width = q->dim[q->rank - 1];
    a.groups = v->dim[v->rank - 2], a.value_width = v->dim[v->rank - 1];
    const shape all = SHAPE(a.batch, a.heads, a.queries.length, a.keys.length);
    if (present(k, ALLOWED)) a.allowed = plane_of(&k->in[ALLOWED], &all);
    if (present(k, BIAS)) a.bias = plane_of(&k->in[BIAS], &all);
    a.scale = node_float(k->node, "scale");
    a.safe = node_int(k->node, "safe") != 0;
    a.drops = ratio > 0;
    a.threshold = dropout_threshold(ratio);
    a.factor = dropout_factor(ratio);
    a.key = (uint32_t)node_int(k->node, "key");
    a.seed = k->seed;
    a.seed_at = k->cuda->seed;
    return a;
}

static int64_t tiles(int64_t length, dtype type) { return (length + side_of(type) - 1) / side_of(type); }

/* Which kernel takes heads of these widths. */
static int which_of(const attention_args *a) {
    const int64_t width = a->width > a->value_width ? a->width : a->value_width;
    return width <= 64 ? 0 : width <= 128 ? 1 : 2;
}

/* A block for each of `blocks` tiles. */
static status run(ctx *c, const call *k, kernel kernels[WIDTHS][DTYPE_COUNT], int64_t blocks, const attention_args *a) {
    return cuda_launch(c, k, &kernels[which_of(a)][k->in[Q].type], geometry_over(blocks, 1, THREADS), a);
}

#define KERNELS(f) {FLOAT_KERNELS(f##_64), FLOAT_KERNELS(f##_128), FLOAT_KERNELS(f##_256)}

/* Rows that repeat are in no sequence, and get zeros. */
static status clear_listed(ctx *c, const call *k, const attention_side *s, int out) {
    if (!s->rows || !wanted(k, out)) return OK;
    const tensor *t = &k->out[out];
    return cuda_clear(c, k, t->data, (size_t)tensor_count(t) * dtype_size(t->type));
}

/* Places are 32-bit numbers in kernels. */
static status check_lengths(ctx *c, const call *k, const attention_args *a) {
    if (a->queries.length <= INT32_MAX && a->keys.length <= INT32_MAX) return OK;
    return fail(c, E_UNSUPPORTED, "%s of so long a sequence has no CUDA kernel", k->node->op->name);
}

status fused_attention_cuda(ctx *c, const call *k) {
    static kernel kernels[WIDTHS][DTYPE_COUNT] = KERNELS(attention);
    attention_args a = args_of(k);

    if (tensor_count(&k->out[0]) == 0) return OK;
    TRY(check_lengths(c, k, &a));
    for (int i = 0; i < 2; i++) TRY(clear_listed(c, k, &a.queries, i));
    a.y = k->out[0].data;
    a.stats = wanted(k, 1);
    return run(c, k, kernels, a.batch * a.heads * tiles(a.queries.length, k->in[Q].type), &a);
}

size_t fused_attention_grad_cuda_workspace(const node *n) {
    const shape *q = &n->in[Q]->shape;
    return (size_t)shape_span(q, 0, q->rank - 1) * dtype_size(sum_type(n->in[Q]->type));
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
/* Of a tile of sums of type A, and how many elements of it a thread has in each direction. */
#define SIDE (sizeof(A) == 8 ? 32 : 64)
#define EACH (SIDE / ACROSS)
#define LINE (SIDE + 1) /* of a tile in shared memory */
#define DOWN (threadIdx.x / ACROSS)
#define RIGHT (threadIdx.x % ACROSS)
#define FOR_CHUNKS(c) UNROLL for (int c = 0; c < chunks; c++)
#define FOR_MINE(i) UNROLL for (int i = 0; i < (int)EACH; i++)

/* The first listed row at or behind `row`; rows stand in order before the repetitions, which are negative. */
DEVICE int64_t first_at(const attention_side *s, int64_t row) {
    int64_t low = 0, high = s->count;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (s->rows[middle] >= 0 && s->rows[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

/* The rows of a sequence that are there. */
typedef struct attention_span {
    int64_t from, count;
} attention_span;

DEVICE attention_span span_of(const attention_side *s, int64_t b) {
    attention_span p = {b * s->length, s->length};
    if (!s->rows) return p;
    p.from = first_at(s, b * s->length);
    p.count = first_at(s, (b + 1) * s->length) - p.from;
    return p;
}

/* Where row i of a sequence stands among all its tokens. */
DEVICE int64_t place_among(const attention_side *s, attention_span p, int64_t b, int64_t i) {
    return s->rows ? s->rows[p.from + i] - b * s->length : i;
}

/* Elements before those of a head in a sequence. */
DEVICE int64_t head_at(const attention_operand *o, const attention_side *s, attention_span p, int64_t b, int64_t h) {
    return (s->rows ? p.from * o->row : b * o->sequence) + h * o->head;
}

DEVICE int64_t plane_at(const attention_plane *p, int64_t b, int64_t h, int64_t q, int64_t k) {
    return b * p->step[0] + h * p->step[1] + q * p->step[2] + k * p->step[3];
}

/* The tile of a block: where, and the places of this thread's rows and columns among all tokens. */
typedef struct attention_tile {
    int64_t b, h, group, row, key;
    attention_span q, k;
    int32_t row_place[4], key_place[4];
    uint64_t seed;
} attention_tile;

DEVICE attention_tile tile_of(const attention_args *a, int64_t b, int64_t h) {
    attention_tile t;
    t.b = b, t.h = h, t.group = h / (a->heads / a->groups);
    t.row = t.key = 0;
    t.q = span_of(&a->queries, b);
    t.k = span_of(&a->keys, b);
    t.seed = a->seed_at ? *a->seed_at : a->seed;
    return t;
}

/* Random words of a counter, drawn when another is asked for: neighbouring elements of a thread often share one. */
typedef struct attention_draw {
    uint64_t counter;
    uint32_t word[4];
} attention_draw;

DEVICE int keeps(const attention_args *a, const attention_tile *t, int64_t q, int64_t k, attention_draw *d) {
    const int64_t position = ((t->b * a->heads + t->h) * a->queries.length + q) * a->keys.length + k;
    const uint64_t counter = counter_of(position);
    const int which = (int)(position % 64 / 16);

    if (counter != d->counter) {
        draw(t->seed, a->key, counter, d->word);
        d->counter = counter;
    }
    return (which == 0 ? d->word[0] : which == 1 ? d->word[1] : which == 2 ? d->word[2] : d->word[3]) >= a->threshold;
}

#define TEMPLATE "cuda/attention.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

/* --- tiles in shared memory ----------------------------------------------------------------------------------------- */

/* Rows [0, rows) and columns [col, cols) of a matrix, as many as a tile has; zeros behind them. What was there before has
 * been read, and all threads may read this, when it returns. */
DEVICE void NAME(attention_stage)(A *to, const T *x, int64_t row, int64_t step, int64_t rows, int64_t col,
                                  int64_t cols) {
    __syncthreads();
    for (int e = threadIdx.x; e < (int)(SIDE * SIDE); e += THREADS) {
        const int i = step == 1 ? e / SIDE : e % SIDE, j = step == 1 ? e % SIDE : e / SIDE;
        to[i * LINE + j] = i < rows && col + j < cols ? GET(x[i * row + (col + j) * step]) : 0;
    }
    __syncthreads();
}

/* sum[i][j] = Σ x[i] y[j], of rows of two matrices. */
DEVICE void NAME(attention_dots)(A sum[][EACH], const T *x, int64_t x_row, int64_t x_step, int64_t x_rows, const T *y,
                                 int64_t y_row, int64_t y_step, int64_t y_rows, int64_t width, A *room) {
    enum { DEPTH = SIDE / 2 };
    A *left = room, *right = room + DEPTH * LINE;

    FOR_MINE(i) FOR_MINE(j) sum[i][j] = 0;
    for (int64_t at = 0; at < width; at += DEPTH) {
        __syncthreads();
        for (int e = threadIdx.x; e < (int)(DEPTH * SIDE); e += THREADS) {
            const int ix = x_step == 1 ? e / DEPTH : e % SIDE, dx = x_step == 1 ? e % DEPTH : e / SIDE;
            const int iy = y_step == 1 ? e / DEPTH : e % SIDE, dy = y_step == 1 ? e % DEPTH : e / SIDE;
            left[dx * LINE + ix] = ix < x_rows && at + dx < width ? GET(x[ix * x_row + (at + dx) * x_step]) : 0;
            right[dy * LINE + iy] = iy < y_rows && at + dy < width ? GET(y[iy * y_row + (at + dy) * y_step]) : 0;
        }
        __syncthreads();
        for (int d = 0; d < DEPTH; d++)
            FOR_MINE(i) FOR_MINE(j) sum[i][j] += left[d * LINE + DOWN + 16 * i] * right[d * LINE + RIGHT + 16 * j];
    }
}

/* sum[i][j] += Σ weights[i, d] of[d, j], where the steps of weights say what i and d are. */
DEVICE void NAME(attention_add)(A sum[][EACH], const A *weights, int i_step, int d_step, const A *of) {
    for (int d = 0; d < (int)SIDE; d++) FOR_MINE(i)
    FOR_MINE(j) sum[i][j] += weights[(DOWN + 16 * i) * i_step + d * d_step] * of[d * LINE + RIGHT + 16 * j];
}

DEVICE void NAME(attention_keep)(A *to, A x[][EACH]) {
    FOR_MINE(i) FOR_MINE(j) to[(DOWN + 16 * i) * LINE + RIGHT + 16 * j] = x[i][j];
}

/* --- scores --------------------------------------------------------------------------------------------------------- */

/* Of the tile at t->row and t->key; -∞ where nothing is allowed. Returns 0 where nothing is in all of the tile, and then
 * leaves x as it was. */
DEVICE int NAME(attention_scores)(const attention_args *a, attention_tile *t, A x[][EACH], A *room) {
    const T *q = (const T *)a->q.data + head_at(&a->q, &a->queries, t->q, t->b, t->h) + t->row * a->q.row;
    const T *k = (const T *)a->k.data + head_at(&a->k, &a->keys, t->k, t->b, t->group) + t->key * a->k.row;
    uint32_t seen = 0;

    FOR_MINE(i) {
        const int64_t row = t->row + DOWN + 16 * i, key = t->key + RIGHT + 16 * i;
        t->row_place[i] = row < t->q.count ? (int32_t)place_among(&a->queries, t->q, t->b, row) : -1;
        t->key_place[i] = key < t->k.count ? (int32_t)place_among(&a->keys, t->k, t->b, key) : -1;
    }
    FOR_MINE(i) FOR_MINE(j) {
        const int64_t row = t->row_place[i], key = t->key_place[j];
        if (row >= 0 && key >= 0 &&
            (!a->allowed.data || ((const uint8_t *)a->allowed.data)[plane_at(&a->allowed, t->b, t->h, row, key)]))
            seen |= 1u << (i * EACH + j);
    }
    if (a->allowed.data && MOST(seen != 0) == 0) return 0;
    NAME(attention_dots)(x, q, a->q.row, a->q.col, t->q.count - t->row, k, a->k.row, a->k.col, t->k.count - t->key,
                         a->width, room);
    FOR_MINE(i) FOR_MINE(j) {
        if (seen >> (i * EACH + j) & 1) {
            x[i][j] *= (A)a->scale;
            if (a->bias.data)
                x[i][j] += NUMBER_AT(a->bias.data, (int)a->bias.type,
                                     plane_at(&a->bias, t->b, t->h, t->row_place[i], t->key_place[j]));
        } else {
            x[i][j] = -(A)INFINITY;
        }
    }
    return 1;
}

/* What dropout multiplies the thread's row i by. */
DEVICE void NAME(attention_kept)(const attention_args *a, const attention_tile *t, int64_t row_place, A factor[EACH]) {
    attention_draw d = {~(uint64_t)0, {0, 0, 0, 0}};
    FOR_MINE(j)
    factor[j] = !a->drops ? 1 : keeps(a, t, row_place, t->key_place[j], &d) ? (A)a->factor : 0;
}

/* --- forward -------------------------------------------------------------------------------------------------------- */

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
        attention_tile t = tile_of(a, block / (a->heads * blocks), block / blocks % a->heads);
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

/* --- backward ------------------------------------------------------------------------------------------------------- */

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
        attention_tile t = tile_of(a, block / (a->heads * blocks), block / blocks % a->heads);
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
        attention_tile t = tile_of(a, block / (a->groups * blocks), group * each);
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
