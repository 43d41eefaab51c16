/* torch_attention.cu -- runs FusedAttention by torch's kernels (cuda/libraries/attention.h).
 *
 * Of rows that matter, sequences of different lengths are made: where each begins among the listed rows is counted on
 * the GPU. Results lie in memory that torch allocated, on the same stream, and are copied; of listed rows zeros where
 * torch writes nothing: repetitions, and sequences without a partner. What is kept of a row is the log of its sum, which
 * becomes the two numbers that our kernels keep, and is made from them. Where they drop elements, they draw them from torch's generator,
 * and backward gets its state: forward and backward go the same way then, or end with an error. */
#include "cuda/kernels/kernel.h"
#include "cuda/kernels/pieces.h"

/* Queries and keys: `length` a sequence, of which those listed are there, if there is a list. */
typedef struct starts_args {
    const int64_t *rows[2];
    int64_t count[2], length[2], batch;
    int32_t *starts[2]; /* [batch + 1] */
} starts_args;

typedef struct sums_args {
    float *sums, *stats; /* [batch, heads, room], or if it is `flat` [heads, rows]; [rows, heads, 2] */
    int64_t batch, length, heads, room, rows;
    const int32_t *starts, *others; /* of listed queries, and of their keys; or NULL, rows are batch * length */
    int32_t flat;
} sums_args;

/* Rows of `width` pieces. */
typedef struct listed_args {
    const void *from;
    void *to;
    const int32_t *starts, *others;
    int64_t rows, width, batch;
} listed_args;

/* Of [size] elements, each the sum of [times] of what it was broadcast to. */
typedef struct bias_sum_args {
    const void *from;
    void *to;
    int64_t count, step[4], size[4], times[4];
    int32_t type;
} bias_sum_args;

#ifdef ORT_HOST
#include "cuda/kernels/torch_attention.h"
#include "cuda/libraries/attention.h"
#include "cuda/libraries/attention_drawn.h"
#include "ops/attention/fused_attention.h"

#include <string.h>

/* Sums of a head are padded to a multiple of MOST_ROUND at most; addresses and steps are multiples of 16 bytes. */
enum { MOST_ROUND = 32, ALIGNED = 16, BLOCK = 256 };

bool torch_attention_is(const node *n) {
    return strncmp(n->op->name, "FusedAttention", 14) == 0 && node_int(n, "torch") != TORCH_NONE;
}

static int64_t room_of(int64_t length, int64_t round) { return (length + round - 1) / round * round; }

static bool is_listed(const node *n) { return node_in(n, Q_ROWS) || node_in(n, K_ROWS); }

static int64_t batch_of(const node *n) { return is_listed(n) ? node_int(n, "batch") : n->in[Q]->shape.dim[0]; }
static int64_t queries_of(const node *n) {
    return node_in(n, Q_ROWS) ? node_int(n, "queries") : n->in[Q]->shape.dim[1];
}
static int64_t keys_of(const node *n) { return node_in(n, K_ROWS) ? node_int(n, "keys") : n->in[K]->shape.dim[1]; }

/* Of the starts of queries, or of keys. */
static size_t starts_bytes(const node *n) {
    return (size_t)room_of((batch_of(n) + 1) * (int64_t)sizeof(int32_t), BLOCK);
}

size_t torch_attention_starts(const node *n) { return torch_attention_is(n) && is_listed(n) ? 2 * starts_bytes(n) : 0; }

/* The starts, and sums. */
size_t torch_attention_workspace(const node *n) {
    const shape *q = &n->in[Q]->shape;
    const int64_t heads = q->rank > 1 ? q->dim[q->rank - 2] : 0;
    if (!torch_attention_is(n)) return 0;
    const int64_t each = batch_of(n) * room_of(queries_of(n), MOST_ROUND), rows = shape_span(q, 0, q->rank - 2);
    return torch_attention_starts(n) + (size_t)(heads * (each > rows ? each : rows)) * sizeof(float);
}

/* As torch wants an operand: elements of a head side by side, and everything aligned. */
static bool fits(const tensor *x) {
    const int64_t step = ALIGNED / (int64_t)dtype_size(x->type);
    const int last = x->shape.rank - 1;
    if ((uintptr_t)x->data % ALIGNED || x->stride[last] != 1) return false;
    for (int d = 0; d < last; d++)
        if (x->shape.dim[d] > 1 && x->stride[d] % step) return false;
    return true;
}

/* [B, S, H, D] or [T, H, D] as rows of all sequences, [T, H, D] or [1, T, H, D]; false: they are not equally far apart. */
static bool as_rows(bool flat, const shape *s, const int64_t *stride, shape *to, int64_t to_stride[4]) {
    const int own = s->rank - 3; /* the axis of rows */
    const bool one = own == 1 && s->dim[1] == 1;
    if (own == 1 && s->dim[0] > 1 && !one && stride[0] != s->dim[1] * stride[1]) return false;
    *to = SHAPE(1, shape_span(s, 0, own + 1), s->dim[own + 1], s->dim[own + 2]);
    to_stride[1] = one ? stride[0] : stride[own];
    to_stride[0] = to->dim[1] * to_stride[1], to_stride[2] = stride[own + 1], to_stride[3] = stride[own + 2];
    if (!flat) return true;
    to->rank = 3;
    for (int d = 0; d < 3; d++) to->dim[d] = to->dim[d + 1], to_stride[d] = to_stride[d + 1];
    return true;
}

/* Sizes and strides of [B, S, H, D] as a kernel has them: with heads first, or as they are. */
static void turn_heads(bool heads_first, const shape *s, const int64_t *stride, shape *to, int64_t to_stride[4]) {
    const int from[] = {0, heads_first ? 2 : 1, heads_first ? 1 : 2, 3};
    *to = *s;
    for (int d = 0; d < 4; d++) to->dim[d] = s->dim[from[d]], to_stride[d] = stride[from[d]];
}

/* Of an operand or result as the kernel has it. */
static bool seen_by(const attention_call *a, const attention_kernel *f, const shape *s, const int64_t *stride,
                    shape *to, int64_t to_stride[4]) {
    if (a->listed) return as_rows(f->flat, s, stride, to, to_stride);
    turn_heads(f->heads_first, s, stride, to, to_stride);
    return true;
}

/* Whether it can be seen as rows of all sequences. */
static bool has_rows(const tensor *x) {
    int64_t stride[4];
    shape s;
    return as_rows(true, &x->shape, x->stride, &s, stride);
}

static aten handle_of(const attention_call *a, const call *k, const tensor *x, const attention_kernel *f) {
    int64_t stride[4];
    shape s;
    if (!seen_by(a, f, &x->shape, x->stride, &s, stride)) return NULL;
    return torch_tensor_there(a->call.t, k->cuda->device, x->type, x->data, s.rank, s.dim, stride);
}

/* The bias as it is added to the scores. */
static tensor bias_of(const call *k) {
    const shape *q = &k->in[Q].shape;
    return tensor_expand(&k->in[BIAS], &SHAPE(q->dim[0], q->dim[2], q->dim[1], k->in[K].shape.dim[1]));
}

static bool is_biased(const node *n) { return node_int(n, "torch") == TORCH_BIASED; }

static bool bias_fits(const call *k) {
    const tensor b = bias_of(k);
    return b.type == k->in[Q].type && fits(&b);
}

static bool wanted(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]); }

/* False: torch is not asked here. On other streams than its own, as when a graph is recorded, it is not either. Says the
 * same to backward as it said to forward. */
static bool is_asked(const call *k) {
    const torch_lib *t = torch_cuda_get();
    void *stream = NULL;

    if (!torch_attention_is(k->node) || !torch_has_attention(true)) return false;
    for (int i = Q; i <= V; i++)
        if (!fits(&k->in[i]) || (is_listed(k->node) && !has_rows(&k->in[i]))) return false;
    if (is_biased(k->node) && !bias_fits(k)) return false;
    return !t->aoti_torch_get_current_cuda_stream(k->cuda->device, &stream) && stream == k->cuda->stream;
}

static bool begin(const call *k, bool kept, attention_call *a) {
    const torch_lib *t = torch_cuda_get();
    const shape *q = &k->in[Q].shape, *key = &k->in[K].shape;

    *a = (attention_call){.queries = queries_of(k->node),
                          .keys = keys_of(k->node),
                          .heads = q->dim[q->rank - 2],
                          .groups = key->dim[key->rank - 2],
                          .width = q->dim[q->rank - 1],
                          .value_width = k->in[V].shape.dim[key->rank - 1],
                          .listed = is_listed(k->node),
                          .type = k->in[Q].type,
                          .scale = node_float(k->node, "scale"),
                          .ratio = node_float(k->node, "ratio"),
                          .causal = node_int(k->node, "torch") == TORCH_CAUSAL,
                          .kept = kept,
                          .biased = is_biased(k->node),
                          .same_bits = (k->cuda->math & SAME_BITS) != 0,
                          .architecture = cuda_architecture(k->cuda->device)};
    if (a->listed && key->rank == 3 && a->keys > key->dim[0])
        a->keys = key->dim[0]; /* none is as long as all of them */
    if (a->listed && q->rank == 3 && a->queries > q->dim[0]) a->queries = q->dim[0];
    if (!torch_begin(&a->call, t)) return false;
    if (t->aoti_torch_new_uninitialized_tensor && t->aoti_torch_new_uninitialized_tensor(&a->nothing))
        a->nothing = NULL;
    return true;
}

/* Frees what a kernel was given and gave. */
static void clear(attention_call *a) {
    for (size_t i = 0; i < sizeof a->call.in / sizeof *a->call.in; i++) torch_tensor_free(a->call.t, a->call.in[i]);
    for (size_t i = 0; i < sizeof a->call.out / sizeof *a->call.out; i++) torch_tensor_free(a->call.t, a->call.out[i]);
    memset(a->call.in, 0, sizeof a->call.in);
    memset(a->call.out, 0, sizeof a->call.out);
}

/* torch writes the reason of an error to the standard error stream, and its shim does not give it. */
static status end(ctx *c, const call *k, attention_call *a, status s, bool done) {
    torch_tensor_free(a->call.t, a->nothing);
    torch_end(&a->call);
    if (s != OK || done || !fused_attention_torch_draws(k->node)) return s;
    return fail(c, E_RUNTIME,
                "attention with dropout failed in torch's kernel; ORTMODULE_DISABLED_PASSES="
                "flash_dropout has it computed without");
}

/* Where the sequences of queries begin, or of keys, among the rows. */
static int32_t *starts_at(const call *k, bool of_keys) {
    return (int32_t *)(void *)((char *)k->work + (of_keys ? starts_bytes(k->node) : 0));
}

static status find_starts(ctx *c, const call *k, const attention_call *a) {
    static kernel starts = {.name = "attention_starts"};
    const bool queries = k->in[Q].shape.rank == 3, keys = k->in[K].shape.rank == 3;
    const starts_args s = {.rows = {queries ? k->in[Q_ROWS].data : NULL, keys ? k->in[K_ROWS].data : NULL},
                           .count = {k->in[Q].shape.dim[0], k->in[K].shape.dim[0]},
                           .length = {queries_of(k->node), keys_of(k->node)},
                           .batch = batch_of(k->node),
                           .starts = {starts_at(k, false), starts_at(k, true)}};
    return a->listed ? cuda_launch(c, k, &starts, geometry_over(2 * (s.batch + 1), 256, 256), &s) : OK;
}

/* The operands, as the kernel takes them. */
static bool give(attention_call *a, const call *k, const attention_kernel *f) {
    const int64_t one = 1, count = batch_of(k->node) + 1;

    clear(a);
    for (int i = Q; i <= V; i++)
        if (!(a->call.in[ATTENTION_Q + i] = handle_of(a, k, &k->in[i], f))) return false;
    if (a->biased) {
        const tensor b = bias_of(k);
        a->call.in[ATTENTION_BIAS] =
            torch_tensor_there(a->call.t, k->cuda->device, b.type, b.data, 4, b.shape.dim, b.stride);
        if (!a->call.in[ATTENTION_BIAS]) return false;
    }
    for (int i = 0; a->listed && i < 2; i++) {
        aten *to = &a->call.in[ATTENTION_STARTS_Q + i];
        if (!(*to = torch_tensor_there(a->call.t, k->cuda->device, I32, starts_at(k, i), 1, &count, &one)))
            return false;
    }
    return true;
}

static sums_args sums_of(const call *k, const attention_call *a, const attention_kernel *f, void *sums, void *stats) {
    const shape *q = &k->in[Q].shape;
    return (sums_args){.sums = sums,
                       .stats = stats,
                       .batch = batch_of(k->node),
                       .length = a->queries,
                       .heads = a->heads,
                       .room = room_of(a->queries, f->round),
                       .rows = shape_span(q, 0, q->rank - 2),
                       .starts = a->listed ? starts_at(k, false) : NULL,
                       .others = a->listed ? starts_at(k, true) : NULL,
                       .flat = a->listed && f->flat};
}

/* Of the sums that torch makes and takes; `rank`: if no rows are listed. */
static shape sums_shape(const sums_args *a, int rank) {
    if (a->flat) return SHAPE(a->heads, a->rows);
    shape s = SHAPE(a->batch, a->heads, a->room, 1);
    s.rank = a->starts ? 3 : rank;
    return s;
}

static geometry over_rows(const sums_args *a) { return geometry_over(a->rows * a->heads, 256, 256); }
static geometry over_sums(const sums_args *a) {
    return geometry_over(a->heads * (a->flat ? a->rows : a->batch * a->room), 256, 256);
}

/* The memory of result i, if it lies as it does dense as ours. */
static const void *result(const attention_call *a, int i, const shape *s, const attention_kernel *f) {
    int64_t dense[MAX_RANK], stride[4];
    shape seen;

    stride_contiguous(s, dense);
    return seen_by(a, f, s, dense, &seen, stride) ? torch_tensor_data(a->call.t, a->call.out[i], &seen, stride) : NULL;
}

/* Result i; `of_keys`: a row for each of these. */
static status copy_result(ctx *c, const call *k, const attention_call *a, int i, const attention_kernel *f,
                          bool of_keys, tensor *to) {
    static kernel narrow = {.name = "attention_listed_2"}, wide = {.name = "attention_listed_16"};
    const size_t bytes = (size_t)tensor_count(to) * dtype_size(to->type);
    const void *from = result(a, i, &to->shape, f);

    if (!a->listed) return cuda_copy_bytes(c, k, to->data, from, bytes);
    const bool aligned = ((uintptr_t)from | (uintptr_t)to->data) % ALIGNED == 0;
    listed_args l = {.from = from,
                     .to = to->data,
                     .starts = starts_at(k, of_keys),
                     .others = starts_at(k, !of_keys),
                     .rows = shape_span(&to->shape, 0, to->shape.rank - 2),
                     .batch = batch_of(k->node)};
    l.width = (int64_t)bytes / l.rows / (aligned ? ALIGNED : (int64_t)sizeof(uint16_t));
    return cuda_launch(c, k, aligned ? &wide : &narrow, geometry_rows(l.rows, l.width), &l);
}

static attention_drawn drawn_by(const call *k, const void *place) {
    return (attention_drawn){place, k->seed, node_int(k->node, "key")};
}

static status keep_drawn(ctx *c, const call *k, const attention_call *a, const attention_drawn_at *d) {
    const attention_drawn of = drawn_by(k, k->out[2].data);
    uint64_t words[2], *to = k->out[2].data;

    if (!d->there) {
        for (int i = 0; i < 2; i++) memcpy(&words[i], d->number[i], sizeof words[i]);
        attention_drawn_keep(&of, words);
        for (int i = 0; i < 2; i++) TRY(cuda_set_u64(c, k->cuda, &to[i], words[i]));
        return OK;
    }
    if (!attention_draws_numbers(a)) return cuda_copy_bytes(c, k, to, d->number[0], 2 * sizeof *to);
    attention_drawn_forget(&of);
    for (int i = 0; i < 2; i++) TRY(cuda_copy_bytes(c, k, &to[i], d->number[i], sizeof *to));
    return OK;
}

/* What it keeps of the rows; and of the numbers that it drew, if `d` is not NULL. */
static status keep(ctx *c, const call *k, const attention_call *a, sums_args *sums, const attention_drawn_at *d) {
    static kernel stats = {.name = "attention_stats"};
    if (d) TRY(keep_drawn(c, k, a, d));
    return a->kept ? cuda_launch(c, k, &stats, over_rows(sums), sums) : OK;
}

static status forward_by(ctx *c, const call *k, attention_call *a, const attention_kernel *f, bool *done) {
    const bool draws = wanted(k, 2);
    int64_t stride[MAX_RANK];
    attention_drawn_at d;

    if (!give(a, k, f) || f->forward(a)) return OK;
    sums_args sums = sums_of(k, a, f, NULL, a->kept ? k->out[1].data : NULL);
    const shape of_sums = sums_shape(&sums, 3);
    stride_contiguous(&of_sums, stride);
    sums.sums = a->kept ? (float *)(uintptr_t)torch_tensor_data(a->call.t, a->call.out[1], &of_sums, stride) : NULL;
    if (!result(a, 0, &k->out[0].shape, f) || (a->kept && !sums.sums) || (draws && !attention_drawn_where(a, &d)))
        return OK;
    TRY(copy_result(c, k, a, 0, f, false, &k->out[0]));
    TRY(keep(c, k, a, &sums, draws ? &d : NULL));
    *done = true;
    return OK;
}

/* Without a GPU: can its kernels run here? */
static status try_out(ctx *c, const call *k, kernel *f) {
    static kernel listed[] = {
        {.name = "attention_starts"}, {.name = "attention_listed_2"}, {.name = "attention_listed_16"}};
    const union {
        starts_args starts;
        sums_args sums;
        listed_args listed;
    } none = {0};

    if (!torch_attention_is(k->node)) return OK;
    for (int i = 0; is_listed(k->node) && i < 3; i++) TRY(cuda_launch(c, k, &listed[i], (geometry){0, WARP}, &none));
    return cuda_launch(c, k, f, (geometry){0, WARP}, &none);
}

status torch_attention_forward(ctx *c, const call *k, bool *done) {
    static kernel stats = {.name = "attention_stats"};
    const attention_kernel *f = NULL;
    attention_call a;
    status s = OK;

    *done = false;
    if (k->cuda->dry) return try_out(c, k, &stats);
    if (!is_asked(k) || !begin(k, wanted(k, 1), &a)) return OK;
    s = find_starts(c, k, &a);
    while (s == OK && !*done && (f = attention_kernel_next(&a, f)))
        if ((s = forward_by(c, k, &a, f, done)) == OK && !*done) attention_kernel_failed(&a, f);
    return end(c, k, &a, s, *done);
}

/* The state that forward drew elements by. The memory-efficient kernel wants it on the CPU: where it is not known there any
 * more, the host waits for the GPU. While a graph is captured it wants it on the GPU, where forward has left it, too. */
static status give_drawn(ctx *c, const call *k, attention_call *a, uint64_t words[2], bool *given) {
    const int64_t one = 1;
    uint64_t *there = k->in[DRAWN].data;
    aten *in = a->call.in;
    bool captured;

    *given = true;
    if (a->ratio == 0) return OK;
    if (!attention_draws_numbers(a)) {
        in[ATTENTION_DRAWN] = torch_words_there(a->call.t, k->cuda->device, k->in[DRAWN].data, 2);
        *given = in[ATTENTION_DRAWN];
        return OK;
    }
    const attention_drawn of = drawn_by(k, there);
    TRY(cuda_is_captured(c, k->cuda, &captured));
    if (!captured && !attention_drawn_find(&of, words)) TRY(cuda_download(c, k->cuda, words, there, 2 * sizeof *words));
    for (int i = 0; i < 2; i++)
        in[ATTENTION_SEED + i] = captured
                                     ? torch_tensor_there(a->call.t, k->cuda->device, I64, &there[i], 1, &one, &one)
                                     : torch_tensor(a->call.t, I64, &words[i], 1, &one, &one);
    *given = in[ATTENTION_SEED] && in[ATTENTION_OFFSET];
    return OK;
}

/* The bias's gradient: what torch made, of all scores, added up over what the bias was broadcast to. */
static status sum_bias(ctx *c, const call *k, const void *from, const int64_t *stride, tensor *to) {
    static kernel sums = {.name = "attention_bias_sum"};
    const tensor scores = bias_of(k);
    bias_sum_args a = {.from = from, .to = to->data, .count = tensor_count(to), .type = (int32_t)to->type};

    for (int d = 0; d < 4; d++) a.step[d] = stride[d];
    const int more = 4 - to->shape.rank;
    for (int d = 0; d < 4; d++) a.size[d] = d < more ? 1 : to->shape.dim[d - more];
    for (int d = 0; d < 4; d++) a.times[d] = scores.shape.dim[d] / a.size[d];
    return cuda_launch(c, k, &sums, geometry_over(a.count, 256, 256), &a);
}

/* The memory of what torch made of the bias's gradient, and how it lies; NULL: it is none. */
static const void *bias_slope(const attention_call *a, const call *k, int64_t stride[4]) {
    const tensor scores = bias_of(k);
    for (int d = 0; d < 4; d++)
        if (a->call.t->aoti_torch_get_stride(a->call.out[3], d, &stride[d])) return NULL;
    return torch_tensor_data(a->call.t, a->call.out[3], &scores.shape, stride);
}

static status backward_by(ctx *c, const call *k, attention_call *a, const attention_kernel *f, bool *done) {
    static kernel to_sums = {.name = "attention_sums"};
    const sums_args sums = sums_of(k, a, f, (char *)k->work + torch_attention_starts(k->node), k->in[STATS].data);
    const torch_lib *t = a->call.t;
    aten *in = a->call.in;

    const int rank = attention_kernel_rank(f);
    const shape of_sums = sums_shape(&sums, rank);
    int64_t stride[MAX_RANK], slope_stride[4];
    uint64_t words[2];
    const void *slope = NULL;
    bool given;

    if (rank == 0 || !give(a, k, f)) return OK;
    stride_contiguous(&of_sums, stride);
    in[ATTENTION_Y] = handle_of(a, k, &k->in[Y], f);
    in[ATTENTION_DY] = handle_of(a, k, &k->in[DY], f);
    in[ATTENTION_SUMS] = torch_tensor_there(t, k->cuda->device, F32, sums.sums, of_sums.rank, of_sums.dim, stride);
    for (int i = ATTENTION_Y; i <= ATTENTION_SUMS; i++)
        if (!in[i]) return OK;
    TRY(give_drawn(c, k, a, words, &given));
    if (!given) return OK;
    TRY(cuda_launch(c, k, &to_sums, over_sums(&sums), &sums));
    if (f->backward(a)) return OK;
    for (int i = Q; i <= V; i++)
        if (!result(a, i, &k->in[i].shape, f)) return OK;
    if (a->bias_slope && !(slope = bias_slope(a, k, slope_stride))) return OK;
    if (slope) TRY(sum_bias(c, k, slope, slope_stride, &k->out[3]));
    for (int i = Q; i <= V; i++)
        if (wanted(k, i)) TRY(copy_result(c, k, a, i, f, i != Q, &k->out[i]));
    *done = true;
    return OK;
}

status torch_attention_backward(ctx *c, const call *k, bool *done) {
    static kernel to_sums = {.name = "attention_sums"};
    const attention_kernel *f = NULL;
    attention_call a;
    status s = OK;

    *done = false;
    if (k->cuda->dry) return try_out(c, k, &to_sums);
    if (!is_asked(k) || !begin(k, true, &a)) return OK;
    a.bias_slope = wanted(k, 3);
    s = find_starts(c, k, &a);
    while (s == OK && !*done && tensor_contiguous(&k->in[Y]) && (f = attention_kernel_next(&a, f)))
        if ((s = backward_by(c, k, &a, f, done)) == OK && !*done && attention_kernel_rank(f))
            attention_kernel_failed(&a, f);
    return end(c, k, &a, s, *done);
}
#endif

#ifdef ORT_DEVICE
/* Places before those of sequence b: listed rows stand in order before the repetitions, which are negative. */
KERNEL(attention_starts, starts_args) {
    FOR_EACH(i, 2 * (a.batch + 1)) {
        const int side = i > a.batch;
        const int64_t b = side ? i - a.batch - 1 : i, row = b * a.length[side], *rows = a.rows[side];
        int64_t low = rows ? 0 : row, high = rows ? a.count[side] : row;
        while (low < high) {
            const int64_t middle = (low + high) / 2;
            if (rows[middle] >= 0 && rows[middle] < row) low = middle + 1;
            else high = middle;
        }
        a.starts[side][b] = (int32_t)low;
    }
}

/* The sequence that a row is of; -1: it repeats one. */
DEVICE int64_t sequence_of(const int32_t *starts, int64_t batch, int64_t row) {
    int64_t low = 1, high = batch;
    if (row >= starts[batch]) return -1;
    while (low < high) {
        const int64_t middle = (low + high) / 2;
        if (starts[middle] > row) high = middle;
        else low = middle + 1;
    }
    return low - 1;
}

/* Is there nothing for it to look at, or to be looked at by? */
DEVICE int has_no_partner(const int32_t *others, int64_t sequence) {
    return sequence < 0 || others[sequence] == others[sequence + 1];
}

/* Of element i of [rows, heads]: where its sum is; -1: it has none. */
DEVICE int64_t sum_at(const sums_args *a, int64_t i) {
    const int64_t head = i % a->heads, row = i / a->heads;
    int64_t place = a->starts ? row : row % a->length, sequence = row / a->length;

    if (a->starts) {
        sequence = sequence_of(a->starts, a->batch, row);
        if (a->flat) return sequence < 0 ? -1 : head * a->rows + row;
        if (sequence < 0) return -1;
        place -= a->starts[sequence];
    }
    return (sequence * a->heads + head) * a->room + place;
}

/* exp(x - log of the sum) are the weights: as if that was the largest score, and the sum 1. */
KERNEL(attention_stats, sums_args) {
    FOR_EACH(i, a.rows * a.heads) {
        const int64_t at = sum_at(&a, i);
        const int none = at < 0 || a.sums[at] == -INFINITY ||
                         (a.starts && has_no_partner(a.others, sequence_of(a.starts, a.batch, i / a.heads)));
        a.stats[2 * i] = none ? 0 : a.sums[at];
        a.stats[2 * i + 1] = none ? 0 : 1;
    }
}

/* Of place i of the sums: the element of [rows, heads] whose sum it is; -1: there is none. */
DEVICE int64_t element_at(const sums_args *a, int64_t i) {
    if (a->flat) return i % a->rows < a->starts[a->batch] ? i % a->rows * a->heads + i / a->rows : -1;
    const int64_t place = i % a->room, head = i / a->room % a->heads, sequence = i / a->room / a->heads;
    const int64_t from = a->starts ? a->starts[sequence] : sequence * a->length;
    const int64_t count = a->starts ? a->starts[sequence + 1] - from : a->length;
    return place < count ? (from + place) * a->heads + head : -1;
}

/* torch reads the places behind a sequence's last row, too, and multiplies with what it makes of them: it must be 0. */
KERNEL(attention_sums, sums_args) {
    FOR_EACH(i, a.heads * (a.flat ? a.rows : a.batch * a.room)) {
        const int64_t from = element_at(&a, i);
        a.sums[i] = from < 0 ? INFINITY : a.stats[2 * from] - logf(a.stats[2 * from + 1]);
    }
}

/* Rows that torch has written, zeros in the others. */
KERNEL(attention_listed_16, listed_args) {
    FOR_BLOCKS(row, a.rows) {
        const int none = has_no_partner(a.others, sequence_of(a.starts, a.batch, row));
        FOR_THREADS(j, a.width) {
            uint32_t w[4] = {0, 0, 0, 0};
            const int64_t at = 16 * (row * a.width + j);
            if (!none) read_16((const char *)a.from + at, w);
            write_16((char *)a.to + at, w);
        }
    }
}

KERNEL(attention_listed_2, listed_args) {
    FOR_BLOCKS(row, a.rows) {
        const int none = has_no_partner(a.others, sequence_of(a.starts, a.batch, row));
        FOR_THREADS(j, a.width) {
            const int64_t at = row * a.width + j;
            ((uint16_t *)a.to)[at] = none ? 0 : ((const uint16_t *)a.from)[at];
        }
    }
}

/* Added in float32 in one order: heads before sequences. */
KERNEL(attention_bias_sum, bias_sum_args) {
    FOR_EACH(i, a.count) {
        int64_t rest = i, at = 0;
        float sum = 0;
        for (int d = 3; d >= 0; rest /= a.size[d--]) at += rest % a.size[d] * a.step[d];
        for (int64_t b = 0; b < a.times[0]; b++)
            for (int64_t h = 0; h < a.times[1]; h++)
                sum += get_float(a.from, a.type, at + b * a.step[0] + h * a.step[1]);
        set_float(a.to, a.type, i, sum);
    }
}
#endif
