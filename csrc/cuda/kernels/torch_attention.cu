/* torch_attention.cu -- FusedAttention by torch's kernels (cuda/libraries/attention.h).
 *
 * They take no list of rows that matters here: which of them hide others is data. Their results lie in memory that torch
 * allocated, on the same stream, and are copied; what they keep of a row is the log of its sum, which becomes the two
 * numbers that our kernels keep, and is made from them. Where they drop elements, they draw them from torch's generator,
 * and backward gets its state: forward and backward go the same way then, or end with an error. */
#include "cuda/kernels/kernel.h"

typedef struct sums_args {
    float *sums, *stats; /* [batch, heads, room], [batch, length, heads, 2] */
    int64_t batch, length, heads, room;
} sums_args;

#ifdef ORT_HOST
#include "cuda/kernels/torch_attention.h"
#include "cuda/libraries/attention.h"
#include "ops/attention/fused_attention.h"

#include <string.h>

/* Sums of a head are padded to a multiple of MOST_ROUND at most; addresses and steps are multiples of 16 bytes. */
enum { MOST_ROUND = 32, ALIGNED = 16 };

bool torch_attention_is(const node *n) {
    return strncmp(n->op->name, "FusedAttention", 14) == 0 && node_int(n, "torch") != TORCH_NONE;
}

static int64_t room_of(int64_t length, int64_t round) { return (length + round - 1) / round * round; }

size_t torch_attention_workspace(const node *n) {
    const shape *q = &n->in[Q]->shape;
    return torch_attention_is(n) ? (size_t)(q->dim[0] * q->dim[2] * room_of(q->dim[1], MOST_ROUND)) * sizeof(float) : 0;
}

/* As torch wants an operand: elements of a head side by side, and everything aligned. */
static bool fits(const tensor *x) {
    const int64_t step = ALIGNED / (int64_t)dtype_size(x->type);
    if ((uintptr_t)x->data % ALIGNED || x->stride[3] != 1) return false;
    for (int d = 0; d < 3; d++)
        if (x->shape.dim[d] > 1 && x->stride[d] % step) return false;
    return true;
}

/* Sizes and strides of [B, S, H, D] as a kernel has them: with heads first, or as they are. */
static void turn_heads(bool heads_first, const shape *s, const int64_t *stride, shape *to, int64_t to_stride[4]) {
    const int from[] = {0, heads_first ? 2 : 1, heads_first ? 1 : 2, 3};
    *to = *s;
    for (int d = 0; d < 4; d++) to->dim[d] = s->dim[from[d]], to_stride[d] = stride[from[d]];
}

static aten handle_of(const attention_call *a, const call *k, const tensor *x, bool heads_first) {
    int64_t stride[4];
    shape s;
    turn_heads(heads_first, &x->shape, x->stride, &s, stride);
    return torch_tensor_there(a->call.t, k->cuda->device, x->type, x->data, 4, s.dim, stride);
}

static bool wanted(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]); }

/* False: torch is not asked here. On other streams than its own, as when a graph is recorded, it is not either. Says the
 * same to backward as it said to forward. */
static bool is_asked(const call *k) {
    const torch_lib *t = torch_cuda_get();
    void *stream = NULL;

    if (!torch_attention_is(k->node) || !torch_has_attention(true)) return false;
    for (int i = Q; i <= V; i++)
        if (!fits(&k->in[i])) return false;
    return !t->aoti_torch_get_current_cuda_stream(k->cuda->device, &stream) && stream == k->cuda->stream;
}

static bool begin(const call *k, bool kept, attention_call *a) {
    const torch_lib *t = torch_cuda_get();
    const shape *q = &k->in[Q].shape, *key = &k->in[K].shape;

    *a = (attention_call){.queries = q->dim[1],
                          .keys = key->dim[1],
                          .heads = q->dim[2],
                          .groups = key->dim[2],
                          .width = q->dim[3],
                          .value_width = k->in[V].shape.dim[3],
                          .type = k->in[Q].type,
                          .scale = node_float(k->node, "scale"),
                          .ratio = node_float(k->node, "ratio"),
                          .causal = node_int(k->node, "torch") == TORCH_CAUSAL,
                          .kept = kept,
                          .same_bits = (k->cuda->math & SAME_BITS) != 0,
                          .architecture = cuda_architecture(k->cuda->device)};
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

/* The operands, as the kernel takes them. */
static bool give(attention_call *a, const call *k, const attention_kernel *f) {
    clear(a);
    for (int i = Q; i <= V; i++)
        if (!(a->call.in[ATTENTION_Q + i] = handle_of(a, k, &k->in[i], f->heads_first))) return false;
    return true;
}

static sums_args sums_of(const call *k, int round, void *sums, void *stats) {
    const shape *q = &k->in[Q].shape;
    return (sums_args){sums, stats, q->dim[0], q->dim[1], q->dim[2], room_of(q->dim[1], round)};
}

static geometry over_rows(const sums_args *a) { return geometry_over(a->batch * a->length * a->heads, 256, 256); }

/* The memory of result i, if it lies as [B, S, H, D] of these sizes does that is dense. */
static const void *result(const attention_call *a, int i, const shape *s, bool heads_first) {
    int64_t dense[MAX_RANK], stride[4];
    shape turned;

    stride_contiguous(s, dense);
    turn_heads(heads_first, s, dense, &turned, stride);
    return torch_tensor_data(a->call.t, a->call.out[i], &turned, stride);
}

static status copy_result(ctx *c, const call *k, const attention_call *a, int i, bool heads_first, tensor *to) {
    const size_t bytes = (size_t)tensor_count(to) * dtype_size(to->type);
    return cuda_copy_bytes(c, k, to->data, result(a, i, &to->shape, heads_first), bytes);
}

/* What it keeps of the rows; and of the numbers that it drew. */
static status keep(ctx *c, const call *k, const attention_call *a, sums_args *sums, const void *drawn) {
    static kernel stats = {.name = "attention_stats"};
    if (drawn) TRY(cuda_copy_bytes(c, k, k->out[2].data, drawn, 2 * sizeof(uint64_t)));
    return a->kept ? cuda_launch(c, k, &stats, over_rows(sums), sums) : OK;
}

static status forward_by(ctx *c, const call *k, attention_call *a, const attention_kernel *f, bool *done) {
    const shape two = SHAPE(2);
    const int64_t one = 1;
    int64_t stride[MAX_RANK];

    if (!give(a, k, f) || f->forward(a)) return OK;
    sums_args sums = sums_of(k, f->round, NULL, a->kept ? k->out[1].data : NULL);
    const shape of_sums = SHAPE(sums.batch, sums.heads, sums.room);
    stride_contiguous(&of_sums, stride);
    sums.sums = a->kept ? (float *)(uintptr_t)torch_tensor_data(a->call.t, a->call.out[1], &of_sums, stride) : NULL;
    const void *drawn = wanted(k, 2) ? torch_tensor_data(a->call.t, a->call.out[2], &two, &one) : NULL;
    if (!result(a, 0, &k->out[0].shape, f->heads_first) || (a->kept && !sums.sums) || (wanted(k, 2) && !drawn))
        return OK;
    TRY(copy_result(c, k, a, 0, f->heads_first, &k->out[0]));
    TRY(keep(c, k, a, &sums, drawn));
    *done = true;
    return OK;
}

/* Without a GPU: can its kernels run here? */
static status try_out(ctx *c, const call *k, kernel *f) {
    const sums_args none = {0};
    return torch_attention_is(k->node) ? cuda_launch(c, k, f, (geometry){0, WARP}, &none) : OK;
}

status torch_attention_forward(ctx *c, const call *k, bool *done) {
    static kernel stats = {.name = "attention_stats"};
    const attention_kernel *f = NULL;
    attention_call a;
    status s = OK;

    *done = false;
    if (k->cuda->dry) return try_out(c, k, &stats);
    if (!is_asked(k) || !begin(k, wanted(k, 1), &a)) return OK;
    while (s == OK && !*done && (f = attention_kernel_next(&a, f)))
        if ((s = forward_by(c, k, &a, f, done)) == OK && !*done) attention_kernel_failed(&a, f);
    return end(c, k, &a, s, *done);
}

static status backward_by(ctx *c, const call *k, attention_call *a, const attention_kernel *f, bool *done) {
    static kernel to_sums = {.name = "attention_sums"};
    const sums_args sums = sums_of(k, f->round, k->work, k->in[STATS].data);
    const int64_t dims[] = {sums.batch, sums.heads, sums.room, 1}, steps[] = {sums.heads * sums.room, sums.room, 1, 1};
    const torch_lib *t = a->call.t;
    aten *in = a->call.in;

    const int rank = attention_kernel_rank(f);

    if (rank == 0 || !give(a, k, f)) return OK;
    in[ATTENTION_Y] = handle_of(a, k, &k->in[Y], f->heads_first);
    in[ATTENTION_DY] = handle_of(a, k, &k->in[DY], f->heads_first);
    in[ATTENTION_SUMS] = torch_tensor_there(t, k->cuda->device, F32, sums.sums, rank, dims, steps);
    if (a->ratio > 0) in[ATTENTION_DRAWN] = torch_words_there(t, k->cuda->device, k->in[DRAWN].data, 2);
    for (int i = ATTENTION_Y; i <= ATTENTION_SUMS + (a->ratio > 0); i++)
        if (!in[i]) return OK;
    TRY(cuda_launch(c, k, &to_sums, over_rows(&sums), &sums));
    if (f->backward(a)) return OK;
    for (int i = Q; i <= V; i++)
        if (!result(a, i, &k->in[i].shape, f->heads_first)) return OK;
    for (int i = Q; i <= V; i++)
        if (wanted(k, i)) TRY(copy_result(c, k, a, i, f->heads_first, &k->out[i]));
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
    while (s == OK && !*done && tensor_contiguous(&k->in[Y]) && (f = attention_kernel_next(&a, f)))
        if ((s = backward_by(c, k, &a, f, done)) == OK && !*done && attention_kernel_rank(f))
            attention_kernel_failed(&a, f);
    return end(c, k, &a, s, *done);
}
#endif

#ifdef ORT_DEVICE
/* Of row i of [batch, length, heads]: where its sum is. */
DEVICE int64_t sum_at(const sums_args *a, int64_t i) {
    const int64_t head = i % a->heads, place = i / a->heads % a->length, sequence = i / a->heads / a->length;
    return (sequence * a->heads + head) * a->room + place;
}

/* exp(x - log of the sum) are the weights: as if that was the largest score, and the sum 1. */
KERNEL(attention_stats, sums_args) {
    FOR_EACH(i, a.batch * a.length * a.heads) {
        a.stats[2 * i] = a.sums[sum_at(&a, i)];
        a.stats[2 * i + 1] = 1;
    }
}

KERNEL(attention_sums, sums_args) {
    FOR_EACH(i, a.batch * a.length * a.heads) a.sums[sum_at(&a, i)] = a.stats[2 * i] - logf(a.stats[2 * i + 1]);
}
#endif
