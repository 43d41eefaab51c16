/* attention_tile.h -- declares what attention.cu and attention_grad.cu share: their argument, and tiles of scores.
 *
 * All is made of square tiles: SIDE queries by SIDE keys, and SIDE columns of an operand at a time. A block has 16 x 16
 * threads, and a thread the elements 16 apart in both directions of a tile. Tiles in which nothing is allowed are left
 * out. A kernel is compiled for heads of up to 64, 128 and 256 columns: its sums are in registers. The second part, where
 * T is a type, is of their templates. */
#ifndef T
#ifndef ORT_CUDA_ATTENTION_TILE_H
#define ORT_CUDA_ATTENTION_TILE_H

#include "cuda/kernels/kernel.h"
#include "cuda/kernels/philox.h"

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
#include "ops/pointwise/dropout.h"
#include "ops/queries.h"

enum { Q, K, V, ALLOWED, BIAS, Q_ROWS, K_ROWS, OPERANDS, Y = OPERANDS, STATS, DY };
enum { WIDTHS = 3, WIDEST = FUSED_ATTENTION_WIDTH };
_Static_assert(WIDEST == 64 << (WIDTHS - 1), "the widest kernel takes the widest heads");

/* A side of a tile. */
static inline int64_t side_of(dtype type) { return type == F64 ? 32 : 64; }
static inline dtype sum_type(dtype type) { return type == F64 ? F64 : F32; }
static inline bool present(const call *k, int i) { return i < k->n_in && tensor_present(&k->in[i]); }
static inline void *wanted(const call *k, int i) {
    return i < k->n_out && tensor_present(&k->out[i]) ? k->out[i].data : NULL;
}

static inline attention_operand operand_of(const tensor *t, bool listed) {
    const int64_t *s = t->stride + t->shape.rank - 3;
    return (attention_operand){t->data, listed ? 0 : t->stride[0], s[0], s[1], s[2]};
}

static inline attention_side rows_of(const call *k, int operand, int rows, const char *length) {
    if (!present(k, rows)) return (attention_side){.length = k->in[operand].shape.dim[1]};
    return (attention_side){node_int(k->node, length), k->in[rows].data, tensor_count(&k->in[rows])};
}

static inline attention_plane plane_of(const tensor *t, const shape *all) {
    const tensor seen = tensor_expand(t, all);
    attention_plane p = {.data = seen.data, .type = t->type};
    for (int d = 0; d < 4; d++) p.step[d] = seen.stride[d];
    return p;
}

static inline attention_args args_of(const call *k) {
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

static inline int64_t tiles(int64_t length, dtype type) { return (length + side_of(type) - 1) / side_of(type); }

/* Which kernel takes heads of these widths. */
static inline int which_of(const attention_args *a) {
    const int64_t width = a->width > a->value_width ? a->width : a->value_width;
    return width <= 64 ? 0 : width <= 128 ? 1 : 2;
}

/* A block for each of `blocks` tiles. */
static inline status run(ctx *c, const call *k, kernel kernels[WIDTHS][DTYPE_COUNT], int64_t blocks,
                         const attention_args *a) {
    return cuda_launch(c, k, &kernels[which_of(a)][k->in[Q].type], geometry_over(blocks, 1, THREADS), a);
}

#define KERNELS(f) {FLOAT_KERNELS(f##_64), FLOAT_KERNELS(f##_128), FLOAT_KERNELS(f##_256)}

/* Rows that repeat are in no sequence, and get zeros. */
static inline status clear_listed(ctx *c, const call *k, const attention_side *s, int out) {
    if (!s->rows || !wanted(k, out)) return OK;
    const tensor *t = &k->out[out];
    return cuda_clear(c, k, t->data, (size_t)tensor_count(t) * dtype_size(t->type));
}

/* Places are 32-bit numbers in kernels. */
static inline status check_lengths(ctx *c, const call *k, const attention_args *a) {
    if (a->queries.length <= INT32_MAX && a->keys.length <= INT32_MAX) return OK;
    return fail(c, E_UNSUPPORTED, "%s of so long a sequence has no CUDA kernel", k->node->op->name);
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

/* The tile of block `block`, of which each of `heads` heads, `each` apart, has `blocks`; its rows or keys are the
 * caller's. */
DEVICE attention_tile tile_of_block(const attention_args *a, int64_t block, int64_t blocks, int64_t heads,
                                    int64_t each) {
    return tile_of(a, block / (heads * blocks), block / blocks % heads * each);
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
#endif

#endif
#else /* the templates */

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
#endif
