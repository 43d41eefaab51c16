/* fused_attention_kernel.c -- runs FusedAttention and its gradient on the CPU, with no score in memory (Dao and others,
 * "FlashAttention", 2022; "FlashAttention-2", 2023).
 *
 * Scores are made a tile at a time, ROWS queries by KEYS keys; tiles in which nothing is allowed are left out. Forward
 * keeps the largest score m of each row and the sum s = Σ exp(x - m) so far. Backward makes a tile's weights again from
 * them, and adds up the gradients of a head's keys on one thread, over tiles in order: sums depend on shapes alone. Scores
 * and sums are float32, or float64 for float64. */
#include "core/ints.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "core/vmath.h"
#include "gemm/gemm.h"
#include "ops/attention/fused_attention.h"
#include "ops/attention/triton_attention.h"
#include "ops/pointwise/dropout.h"

#include <string.h>

/* Of a tile; random words of a row that begin anywhere among groups. */
enum { ROWS = 64, KEYS = 256, WORDS = KEYS + 2 * PHILOX_GROUP };

typedef struct dropout {
    double factor;
    uint32_t threshold;
} dropout;

#define TEMPLATE "ops/attention/fused_attention_rows.h"
#include "ops/pointwise/each_float.h"

/* fused_attention_rows.h */
typedef struct row_steps {
    void (*add_bias)(void *scores, const void *bias, int64_t step, int64_t n);
    void (*hide)(void *scores, const uint8_t *allowed, int64_t n);
    double (*weigh)(void *scores, void *weights, int64_t n, double *most, double *total, const uint32_t *bits,
                    const dropout *d);
    void (*scale)(void *sums, int64_t n, double factor);
    void (*narrow)(void *to, const void *sums, int64_t n, double factor);
    double (*dot)(const void *a, int64_t a_step, const void *b, int64_t n);
    void (*slope)(void *scores, void *dweights, void *weights, void *dscores, int64_t n, double most, double share,
                  double delta, const uint32_t *bits, const dropout *d, void *dbias);
} row_steps;

#define STEPS(t) {add_bias_##t, hide_##t, weigh_##t, scale_##t, narrow_##t, dot_##t, slope_##t}
static const row_steps steps_of[DTYPE_COUNT] = {
    [F32] = STEPS(f32), [F64] = STEPS(f64), [BF16] = STEPS(bf16), [F16] = STEPS(f16)};

/* --- what there is -------------------------------------------------------------------------------------------------- */

/* Queries, or keys: `length` a sequence; of all rows those listed, if there is a list. */
typedef struct side {
    int64_t length, count;
    const int64_t *rows;
} side;

/* The rows of one sequence that are there. */
typedef struct span {
    int64_t from, count;
} span;

typedef struct job {
    const call *k;
    const row_steps *f;
    dtype type, wide;        /* of what is multiplied, and of sums */
    int64_t size, wide_size; /* bytes */
    int64_t batch, heads, groups, width, value_width;
    side queries, keys;
    tensor allowed, bias; /* seen as [B, H, Q, K]; absent */
    double scale;
    bool safe, drops;
    dropout drop;
    uint32_t key;
    char *dk, *dv; /* sums of type `wide`, in the order of the results; NULL */
    tensor dbias;  /* of type `wide`, seen as [B, H, Q, K]; absent */
} job;

static bool present(const call *k, int i) { return i < k->n_in && tensor_present(&k->in[i]); }

static side side_of(const call *k, int operand, int rows, const char *length) {
    const tensor *t = &k->in[operand];
    const bool packed = present(k, rows);
    return (side){.length = packed ? node_int(k->node, length) : t->shape.dim[1],
                  .count = t->shape.dim[0],
                  .rows = packed ? k->in[rows].data : NULL};
}

static job job_of(const call *k) {
    const tensor *q = &k->in[Q], *v = &k->in[V];
    const int rank = q->shape.rank, v_rank = v->shape.rank;
    const double ratio = node_float(k->node, "ratio");
    job j = {.k = k,
             .f = &steps_of[q->type],
             .type = q->type,
             .wide = fused_attention_sums(q->type),
             .scale = node_float(k->node, "scale")};

    j.size = (int64_t)dtype_size(j.type);
    j.wide_size = (int64_t)dtype_size(j.wide);
    j.queries = side_of(k, Q, Q_ROWS, "queries");
    j.keys = side_of(k, K, K_ROWS, "keys");
    j.batch = j.queries.rows ? node_int(k->node, "batch") : q->shape.dim[0];
    j.heads = q->shape.dim[rank - 2];
    j.width = q->shape.dim[rank - 1];
    j.groups = v->shape.dim[v_rank - 2];
    j.value_width = v->shape.dim[v_rank - 1];
    const shape all = SHAPE(j.batch, j.heads, j.queries.length, j.keys.length);
    if (present(k, ALLOWED)) j.allowed = tensor_expand(&k->in[ALLOWED], &all);
    if (present(k, BIAS)) j.bias = tensor_expand(&k->in[BIAS], &all);
    j.safe = node_int(k->node, "safe") != 0;
    j.drops = ratio > 0;
    j.drop = (dropout){dropout_factor(ratio), dropout_threshold(ratio)};
    j.key = (uint32_t)node_int(k->node, "key");
    return j;
}

/* The first listed row at or behind `row`; rows stand in order before the repetitions, which are negative. */
static int64_t first_at(const side *s, int64_t row) {
    int64_t low = 0, high = s->count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (s->rows[middle] >= 0 && s->rows[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

static span span_of(const side *s, int64_t b) {
    if (!s->rows) return (span){b * s->length, s->length};
    const int64_t from = first_at(s, b * s->length);
    return (span){from, first_at(s, (b + 1) * s->length) - from};
}

/* Where row i of a sequence stands among all its tokens. */
static int64_t place(const side *s, span p, int64_t b, int64_t i) {
    return s->rows ? s->rows[p.from + i] - b * s->length : i;
}

/* --- products ------------------------------------------------------------------------------------------------------- */

typedef struct matrix {
    const char *data;
    int64_t row, col;
} matrix;

/* A sequence's rows in one head of an operand. */
static matrix head_of(const job *j, const tensor *t, int64_t b, span p, int64_t h) {
    const int last = t->shape.rank - 1;
    const int64_t from = (last == 2 ? p.from * t->stride[0] : b * t->stride[0]) + h * t->stride[last - 1];
    return (matrix){(const char *)t->data + from * j->size, t->stride[last - 2], t->stride[last]};
}

static matrix from_row(const job *j, matrix m, int64_t row) {
    m.data += row * m.row * j->size;
    return m;
}

static matrix transposed(matrix m) { return (matrix){m.data, m.col, m.row}; }

/* c = scale a b + beta c */
static void multiply(const job *j, matrix a, matrix b, void *c, int64_t c_row, int64_t m, int64_t n, int64_t k,
                     double scale, double beta) {
    const gemm g = {.type = j->type,
                    .wide_c = j->wide != j->type,
                    .m = m,
                    .n = n,
                    .k = k,
                    .alpha = scale,
                    .beta = beta,
                    .a = a.data,
                    .b = b.data,
                    .c = c,
                    .a_row = a.row,
                    .a_col = a.col,
                    .b_row = b.row,
                    .b_col = b.col,
                    .c_row = c_row};
    gemm_run(&g);
}

/* --- tiles ---------------------------------------------------------------------------------------------------------- */

typedef struct tile {
    const job *j;
    int64_t b, h;
    span q, k; /* the sequence */
    int64_t row, rows, key, keys;
    int64_t first, places; /* of the keys among all of the sequence: as many as keys if none is missing between them */
} tile;

/* The next keys, from `key` on: their places lie within KEYS. Returns how many. */
static int64_t tile_keys(tile *t, int64_t key) {
    const side *s = &t->j->keys;
    const int64_t first = place(s, t->k, t->b, key);

    t->key = key;
    t->keys = least(KEYS, t->k.count - key);
    while (place(s, t->k, t->b, key + t->keys - 1) - first >= KEYS) t->keys--;
    t->first = first;
    t->places = place(s, t->k, t->b, key + t->keys - 1) - first + 1;
    return t->keys;
}

/* Row i of what is seen as [B, H, Q, K], at the tile's first key. */
static const char *tile_row(const tile *t, const tensor *of, int64_t i) {
    const int64_t q = place(&t->j->queries, t->q, t->b, t->row + i);
    const int64_t at = t->b * of->stride[0] + t->h * of->stride[1] + q * of->stride[2] + t->first * of->stride[3];
    return (const char *)of->data + at * (int64_t)dtype_size(of->type);
}

/* The elements of the tile's keys among those of all places, where some are missing. */
static void gather(const tile *t, const char *from, int64_t step, int64_t size, char *to) {
    for (int64_t i = 0; i < t->keys; i++) {
        const int64_t at = place(&t->j->keys, t->k, t->b, t->key + i) - t->first;
        memcpy(to + i * size, from + at * step * size, (size_t)size);
    }
}

static int64_t first_nonzero(const uint8_t *x, int64_t n) {
    int64_t i = 0;
    while (i < n && !x[i]) i++;
    return i;
}

static int64_t behind_last_nonzero(const uint8_t *x, int64_t from, int64_t n) {
    while (n > from && !x[n - 1]) n--;
    return n;
}

/* Leaves out keys at both ends that no row of the tile may look at; false: all. */
static bool trim(tile *t) {
    const tensor *allowed = &t->j->allowed;
    int64_t low = t->keys, high = 0;

    if (!tensor_present(allowed) || t->places != t->keys || allowed->stride[3] != 1) return true;
    for (int64_t i = 0; i < t->rows && (low > 0 || high < t->keys); i++) {
        const uint8_t *row = (const uint8_t *)tile_row(t, allowed, i);
        low = first_nonzero(row, low);
        high = behind_last_nonzero(row, high, t->keys);
        if (allowed->stride[2] == 0) break;
    }
    if (high <= low) return false;
    t->key += low;
    t->first += low;
    t->keys = t->places = high - low;
    return true;
}

/* Bias and mask of a row of scores. */
static void finish_scores(const tile *t, int64_t i, void *scores) {
    const job *j = t->j;
    const bool gaps = t->places != t->keys;
    _Alignas(64) char buffer[KEYS * 8];

    if (tensor_present(&j->bias)) {
        const char *bias = tile_row(t, &j->bias, i);
        int64_t step = j->bias.stride[3];
        if (gaps) {
            gather(t, bias, step, (int64_t)dtype_size(j->bias.type), buffer);
            bias = buffer;
            step = 1;
        }
        steps_of[j->bias.type].add_bias(scores, bias, step, t->keys);
    }
    if (tensor_present(&j->allowed)) {
        const char *allowed = tile_row(t, &j->allowed, i);
        if (gaps || j->allowed.stride[3] != 1) {
            gather(t, allowed, j->allowed.stride[3], 1, buffer);
            allowed = buffer;
        }
        j->f->hide(scores, (const uint8_t *)allowed, t->keys);
    }
}

/* The random bits of a row; NULL: nothing is dropped. */
static const uint32_t *draw(const tile *t, int64_t i, uint32_t words[WORDS]) {
    const job *j = t->j;

    if (!j->drops) return NULL;
    const int64_t q = place(&j->queries, t->q, t->b, t->row + i);
    const int64_t at = ((t->b * j->heads + t->h) * j->queries.length + q) * j->keys.length + t->first;
    const int64_t skip = at % PHILOX_GROUP;
    philox_fill(j->k->seed, j->key, at / PHILOX_GROUP, (skip + t->places + PHILOX_GROUP - 1) / PHILOX_GROUP, words);
    if (t->places != t->keys) gather(t, (const char *)(words + skip), 1, sizeof *words, (char *)(words + skip));
    return words + skip;
}

/* Scores of the tile, [rows, KEYS]. */
static void tile_scores(const tile *t, matrix q, matrix k, char *scores) {
    const job *j = t->j;
    multiply(j, from_row(j, q, t->row), transposed(from_row(j, k, t->key)), scores, KEYS, t->rows, t->keys, j->width,
             j->scale, 0);
    for (int64_t i = 0; i < t->rows; i++) finish_scores(t, i, scores + i * KEYS * j->wide_size);
}

/* --- forward -------------------------------------------------------------------------------------------------------- */

/* The tile's part of the sums over values; `more`: it is not the first. */
static void attend_tile(const tile *t, matrix q, matrix k, matrix v, char *sums, double *most, double *total,
                        bool more) {
    const job *j = t->j;
    const bool narrow = j->type != j->wide;
    _Alignas(64) char scores[ROWS * KEYS * 8], narrowed[ROWS * KEYS * 2];
    char *weights = narrow ? narrowed : scores;
    uint32_t words[WORDS];

    tile_scores(t, q, k, scores);
    for (int64_t i = 0; i < t->rows; i++) {
        const double factor = j->f->weigh(scores + i * KEYS * j->wide_size, weights + i * KEYS * j->size, t->keys,
                                          &most[i], &total[i], draw(t, i, words), &j->drop);
        if (more && factor != 1) j->f->scale(sums + i * j->value_width * j->wide_size, j->value_width, factor);
    }
    multiply(j, (matrix){weights, KEYS, 1}, from_row(j, v, t->key), sums, j->value_width, t->rows, j->value_width,
             t->keys, 1, more);
}

/* Rows of one head from `row` on. */
static void attend_rows(const job *j, int64_t b, int64_t h, int64_t row) {
    tile t = {.j = j, .b = b, .h = h, .q = span_of(&j->queries, b), .k = span_of(&j->keys, b), .row = row};
    const matrix q = head_of(j, &j->k->in[Q], b, t.q, h),
                 k = head_of(j, &j->k->in[K], b, t.k, h / (j->heads / j->groups)),
                 v = head_of(j, &j->k->in[V], b, t.k, h / (j->heads / j->groups));
    _Alignas(64) char sums[ROWS * FUSED_ATTENTION_WIDTH * 8];
    double most[ROWS], total[ROWS] = {0};
    bool more = false;

    if (row >= t.q.count) return;
    t.rows = least(ROWS, t.q.count - row);
    for (int64_t i = 0; i < t.rows; i++) most[i] = -INFINITY;
    for (int64_t key = 0; key < t.k.count;) {
        key += tile_keys(&t, key);
        if (!trim(&t)) continue;
        attend_tile(&t, q, k, v, sums, most, total, more);
        more = true;
    }
    if (!more) memset(sums, 0, (size_t)(t.rows * j->value_width * j->wide_size));
    for (int64_t i = 0; i < t.rows; i++) {
        const int64_t at = (t.q.from + row + i) * j->heads + h;
        const double share = total[i] == 0 && j->safe ? 0 : 1 / total[i];
        j->f->narrow((char *)j->k->out[0].data + at * j->value_width * j->size,
                     sums + i * j->value_width * j->wide_size, j->value_width, share);
        if (!tensor_present(&j->k->out[1])) continue;
        dtype_set_value(j->wide, j->k->out[1].data, 2 * at, most[i] == -INFINITY ? 0 : most[i]);
        dtype_set_value(j->wide, j->k->out[1].data, 2 * at + 1, share);
    }
}

static void attend_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const int64_t blocks = (j->queries.length + ROWS - 1) / ROWS;
    for (int64_t i = begin; i < end; i++)
        attend_rows(j, i / (j->heads * blocks), i / blocks % j->heads, i % blocks * ROWS);
}

/* Zeros in the rows that repeat. */
static void clear_repetitions(const side *s, void *rows, int64_t bytes) {
    int64_t live = s->rows ? s->count : 0;
    if (!s->rows) return;
    while (live > 0 && s->rows[live - 1] < 0) live--;
    memset((char *)rows + live * bytes, 0, (size_t)((s->count - live) * bytes));
}

status fused_attention_cpu(ctx *c, const call *k) {
    const job j = job_of(k);
    const int64_t blocks = (j.queries.length + ROWS - 1) / ROWS;
    bool done;

    if (tensor_count(&k->out[0]) == 0) return OK;
    TRY(triton_attention_cpu(c, k, &done));
    if (done || fused_attention_shim(k)) return OK;
    clear_repetitions(&j.queries, k->out[0].data, j.heads * j.value_width * j.size);
    if (tensor_present(&k->out[1])) clear_repetitions(&j.queries, k->out[1].data, 2 * j.heads * j.wide_size);
    parallel_for(j.batch * j.heads * blocks,
                 parallel_rows(least(ROWS, j.queries.length) * j.keys.length * j.width / 16), attend_range,
                 (void *)(uintptr_t)&j);
    return OK;
}

/* --- backward ------------------------------------------------------------------------------------------------------- */

/* One head's operands, and where its sums are. */
typedef struct head {
    matrix q, k, v, dy;
    char *dk, *dv;
    int64_t dk_row, dv_row;
} head;

/* Of a tile's rows: what their weights are made from, and Σ dy y. */
typedef struct row_facts {
    double most[ROWS], share[ROWS], delta[ROWS];
} row_facts;

/* What a tile adds to the gradients; `dq`: sums of its rows. */
static void differentiate_tile(const tile *t, const head *x, char *dq, const row_facts *rows, bool more) {
    const job *j = t->j;
    const bool narrow = j->type != j->wide;
    _Alignas(64) char scores[ROWS * KEYS * 8], dweights[ROWS * KEYS * 8];
    _Alignas(64) char narrowed[2][ROWS * KEYS * 2];
    char *weights = narrow ? narrowed[0] : scores, *dscores = narrow ? narrowed[1] : dweights;
    const matrix w = {weights, KEYS, 1}, ds = {dscores, KEYS, 1};
    const matrix q = from_row(j, x->q, t->row), dy = from_row(j, x->dy, t->row), k = from_row(j, x->k, t->key);
    uint32_t words[WORDS];

    tile_scores(t, x->q, x->k, scores);
    multiply(j, dy, transposed(from_row(j, x->v, t->key)), dweights, KEYS, t->rows, t->keys, j->value_width, 1, 0);
    for (int64_t i = 0; i < t->rows; i++) {
        void *dbias = tensor_present(&j->dbias) ? (void *)(uintptr_t)tile_row(t, &j->dbias, i) : NULL;
        j->f->slope(scores + i * KEYS * j->wide_size, dweights + i * KEYS * j->wide_size, weights + i * KEYS * j->size,
                    dscores + i * KEYS * j->size, t->keys, rows->most[i], rows->share[i], rows->delta[i],
                    draw(t, i, words), &j->drop, dbias);
    }
    if (x->dv)
        multiply(j, transposed(w), dy, x->dv + t->key * x->dv_row * j->wide_size, x->dv_row, t->keys, j->value_width,
                 t->rows, 1, 1);
    if (x->dk)
        multiply(j, transposed(ds), q, x->dk + t->key * x->dk_row * j->wide_size, x->dk_row, t->keys, j->width, t->rows,
                 j->scale, 1);
    if (dq) multiply(j, ds, k, dq, j->width, t->rows, j->width, t->keys, j->scale, more);
}

static void differentiate_rows(const job *j, tile *t, const head *x) {
    const tensor *y = &j->k->in[Y], *dq = &j->k->out[0];
    _Alignas(64) char sums[ROWS * FUSED_ATTENTION_WIDTH * 8];
    row_facts rows;
    bool more = false;

    for (int64_t i = 0; i < t->rows; i++) {
        const int64_t at = (t->q.from + t->row + i) * j->heads + t->h;
        rows.most[i] = dtype_get(j->wide, j->k->in[STATS].data, 2 * at);
        rows.share[i] = dtype_get(j->wide, j->k->in[STATS].data, 2 * at + 1);
        rows.delta[i] = j->f->dot(from_row(j, x->dy, t->row + i).data, x->dy.col,
                                  (const char *)y->data + at * j->value_width * j->size, j->value_width);
    }
    for (int64_t key = 0; key < t->k.count;) {
        key += tile_keys(t, key);
        if (!trim(t)) continue;
        differentiate_tile(t, x, tensor_present(dq) ? sums : NULL, &rows, more);
        more = true;
    }
    if (!tensor_present(dq)) return;
    if (!more) memset(sums, 0, sizeof sums);
    for (int64_t i = 0; i < t->rows; i++) {
        const int64_t at = ((t->q.from + t->row + i) * j->heads + t->h) * j->width;
        j->f->narrow((char *)dq->data + at * j->size, sums + i * j->width * j->wide_size, j->width, 1);
    }
}

/* Sums of a head's keys: set to 0, or made a result. */
static void clear_sums(const job *j, char *sums, span p, int64_t group, int64_t width) {
    for (int64_t i = 0; sums && i < p.count; i++)
        memset(sums + ((p.from + i) * j->groups + group) * width * j->wide_size, 0, (size_t)(width * j->wide_size));
}

static void deliver_sums(const job *j, const char *sums, const tensor *to, span p, int64_t group, int64_t width) {
    for (int64_t i = 0; sums && sums != to->data && i < p.count; i++) {
        const int64_t at = ((p.from + i) * j->groups + group) * width;
        j->f->narrow((char *)to->data + at * j->size, sums + at * j->wide_size, width, 1);
    }
}

/* All heads that share keys. */
static void differentiate_group(const job *j, int64_t b, int64_t group) {
    const span q = span_of(&j->queries, b), k = span_of(&j->keys, b);
    const int64_t each = j->heads / j->groups;
    head x = {.k = head_of(j, &j->k->in[K], b, k, group),
              .v = head_of(j, &j->k->in[V], b, k, group),
              .dk = j->dk ? j->dk + (k.from * j->groups + group) * j->width * j->wide_size : NULL,
              .dv = j->dv ? j->dv + (k.from * j->groups + group) * j->value_width * j->wide_size : NULL,
              .dk_row = j->groups * j->width,
              .dv_row = j->groups * j->value_width};

    clear_sums(j, j->dk, k, group, j->width);
    clear_sums(j, j->dv, k, group, j->value_width);
    for (int64_t h = group * each; h < (group + 1) * each; h++) {
        x.q = head_of(j, &j->k->in[Q], b, q, h);
        x.dy = head_of(j, &j->k->in[DY], b, q, h);
        for (int64_t row = 0; row < q.count; row += ROWS) {
            tile t = {.j = j, .b = b, .h = h, .q = q, .k = k, .row = row, .rows = least(ROWS, q.count - row)};
            differentiate_rows(j, &t, &x);
        }
    }
    deliver_sums(j, j->dk, &j->k->out[1], k, group, j->width);
    deliver_sums(j, j->dv, &j->k->out[2], k, group, j->value_width);
}

/* What adds to one part of the bias's gradient belongs together: sequences, groups, or all of them. */
static bool shares_bias(const job *j, int axis) {
    return tensor_present(&j->dbias) && j->dbias.shape.dim[axis] > 1 && j->dbias.stride[axis] == 0;
}

static void differentiate_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const int64_t sequences = shares_bias(j, 0) ? j->batch : 1, groups = shares_bias(j, 1) ? j->groups : 1;
    const int64_t across = j->groups / groups;

    for (int64_t i = begin; i < end; i++)
        for (int64_t b = i / across * sequences; b < (i / across + 1) * sequences; b++)
            for (int64_t g = i % across * groups; g < (i % across + 1) * groups; g++) differentiate_group(j, b, g);
}

/* Sums of 16-bit results, or what torch needs. */
size_t fused_attention_grad_workspace(const node *n) {
    const value *k = n->in[K], *v = n->in[V], *bias = node_in(n, BIAS);
    const size_t by_torch = fused_attention_shim_workspace(n);
    size_t elements = 0, bytes;

    if (fused_attention_sums(k->type) == k->type) return by_torch;
    elements += (size_t)(shape_count(&k->shape) + shape_count(&v->shape));
    if (n->n_out > 3 && bias) elements += (size_t)shape_count(&bias->shape);
    bytes = elements * dtype_size(fused_attention_sums(k->type));
    return by_torch > bytes ? by_torch : bytes;
}

status fused_attention_grad_cpu(ctx *c, const call *k) {
    const tensor *dbias = k->n_out > 3 ? &k->out[3] : NULL;
    job j = job_of(k);
    char *work = k->work;
    int64_t units;
    bool done;

    TRY(triton_attention_cpu(c, k, &done));
    if (done || fused_attention_grad_shim(k)) return OK;
    for (int i = 1; i <= 2; i++) {
        char **sums = i == 1 ? &j.dk : &j.dv;
        if (!tensor_present(&k->out[i])) continue;
        *sums = j.type == j.wide ? k->out[i].data : work;
        if (j.type != j.wide) work += tensor_count(&k->out[i]) * j.wide_size;
        clear_repetitions(&j.keys, k->out[i].data,
                          shape_span(&k->out[i].shape, j.keys.rows ? 1 : 2, k->out[i].shape.rank) * j.size);
    }
    if (tensor_present(&k->out[0])) clear_repetitions(&j.queries, k->out[0].data, j.heads * j.width * j.size);
    if (dbias && tensor_present(dbias)) {
        tensor sums = *dbias;
        sums.data = dbias->type == j.wide ? dbias->data : work;
        sums.type = j.wide;
        memset(sums.data, 0, (size_t)(tensor_count(dbias) * j.wide_size));
        j.dbias = tensor_expand(&sums, &j.bias.shape);
    }
    if (tensor_count(&k->in[DY]) == 0 || tensor_count(&k->in[K]) == 0) units = 0;
    else units = j.batch * j.groups / (shares_bias(&j, 0) ? j.batch : 1) / (shares_bias(&j, 1) ? j.groups : 1);
    parallel_for(units, parallel_rows(j.queries.length * j.keys.length * j.width / 16), differentiate_range, &j);
    if (tensor_present(&j.dbias) && dbias->type != j.wide)
        steps_of[dbias->type].narrow(dbias->data, work, tensor_count(dbias), 1);
    return OK;
}
