/* torch_attention.cu -- FusedAttention by torch's memory-efficient attention, called through its C shim.
 *
 * Of torch's kernels with tensor cores that is the one whose backward can be told to add in one order (a single split of
 * the keys): flash attention's and cuDNN's give other bits every time. It takes no list of rows that matters here: which
 * of them hide others is data. Its results lie in memory that torch allocated, on the same stream, and are copied; what
 * it keeps of a row is the log of its sum, which becomes the two numbers that our kernels keep, and is made from them. */
#include "cuda/kernels/kernel.h"

typedef struct sums_args {
    float *sums, *stats; /* [batch, heads, room], [batch, length, heads, 2] */
    int64_t batch, length, heads, room;
} sums_args;

#ifdef ORT_HOST
#include "core/torch_lib.h"
#include "cuda/kernels/torch_attention.h"

#include <string.h>

enum { Q, K, V, OPERANDS = 7, Y = OPERANDS, STATS, DY };
/* Sums of a head are padded to a multiple of ROUND; addresses and steps are multiples of 16 bytes. */
enum { ROUND = 32, ALIGNED = 16, STEP = 8 };

bool torch_attention_is(const node *n) {
    return strncmp(n->op->name, "FusedAttention", 14) == 0 && node_int(n, "torch") != TORCH_NONE;
}

static int64_t room_of(int64_t length) { return (length + ROUND - 1) / ROUND * ROUND; }

size_t torch_attention_workspace(const node *n) {
    const shape *q = &n->in[Q]->shape;
    return torch_attention_is(n) ? (size_t)(q->dim[0] * q->dim[2] * room_of(q->dim[1])) * sizeof(float) : 0;
}

typedef struct handles {
    torch_call call;
    double scale;
    int64_t mask;
} handles;

/* As torch wants an operand: elements of a head side by side, and everything aligned. */
static bool fits(const tensor *x) {
    if ((uintptr_t)x->data % ALIGNED || x->stride[3] != 1) return false;
    for (int d = 0; d < 3; d++)
        if (x->shape.dim[d] > 1 && x->stride[d] % STEP) return false;
    return true;
}

static aten handle_of(const handles *h, const call *k, const tensor *x) {
    return torch_tensor_there(h->call.t, k->cuda->device, x->type, x->data, x->shape.rank, x->shape.dim, x->stride);
}

/* False: torch is not asked here. On other streams than its own, as when a graph is recorded, it is not either. */
static bool begin(const call *k, handles *h) {
    const torch_lib *t = torch_cuda_get();
    void *stream = NULL;

    *h = (handles){.scale = node_float(k->node, "scale"), .mask = node_int(k->node, "torch") == TORCH_CAUSAL};
    if (!torch_attention_is(k->node) || k->cuda->dry || !torch_has_attention(true)) return false;
    for (int i = Q; i <= V; i++)
        if (!fits(&k->in[i])) return false;
    if (t->aoti_torch_get_current_cuda_stream(k->cuda->device, &stream) || stream != k->cuda->stream) return false;
    if (!torch_begin(&h->call, t)) return false;
    for (int i = Q; i <= V; i++) h->call.in[i] = handle_of(h, k, &k->in[i]);
    return true;
}

static status end(handles *h, status s) {
    torch_end(&h->call);
    return s;
}

static bool wanted(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]); }

static sums_args sums_of(const call *k, void *sums, void *stats) {
    const shape *q = &k->in[Q].shape;
    return (sums_args){sums, stats, q->dim[0], q->dim[1], q->dim[2], room_of(q->dim[1])};
}

static geometry over_rows(const sums_args *a) { return geometry_over(a->batch * a->length * a->heads, 256, 256); }

/* The memory of result i, if it is dense and of this shape. */
static const void *result(const handles *h, int i, const shape *s) {
    int64_t stride[MAX_RANK];
    stride_contiguous(s, stride);
    return torch_tensor_data(h->call.t, h->call.out[i], s, stride);
}

static status copy_result(ctx *c, const call *k, const handles *h, int i, tensor *to) {
    return cuda_copy_bytes(c, k, to->data, result(h, i, &to->shape), (size_t)tensor_count(to) * dtype_size(to->type));
}

static status forward(ctx *c, const call *k, handles *h, kernel *stats, bool *done) {
    aten *in = h->call.in, *out = h->call.out;
    int64_t longest[2];
    const bool kept = wanted(k, 1);

    if (!in[Q] || !in[K] || !in[V]) return OK;
    if (h->call.t->aoti_torch_cuda__efficient_attention_forward(in[Q], in[K], in[V], NULL, NULL, NULL, NULL, NULL, 0,
                                                                h->mask, kept, &h->scale, NULL, NULL, &out[0], &out[1],
                                                                &out[2], &out[3], &longest[0], &longest[1]))
        return OK;
    sums_args a = sums_of(k, NULL, kept ? k->out[1].data : NULL);
    const shape sums_shape = SHAPE(a.batch, a.heads, a.room);
    const void *sums = kept ? result(h, 1, &sums_shape) : NULL;
    if (!result(h, 0, &k->out[0].shape) || (kept && !sums)) return OK;
    TRY(copy_result(c, k, h, 0, &k->out[0]));
    a.sums = (float *)(uintptr_t)sums;
    if (kept) TRY(cuda_launch(c, k, stats, over_rows(&a), &a));
    *done = true;
    return OK;
}

status torch_attention_forward(ctx *c, const call *k, bool *done) {
    static kernel stats = {.name = "attention_stats"};
    handles h;

    *done = false;
    if (k->cuda->dry && torch_attention_is(k->node)) return cuda_launch(c, k, &stats, (geometry){0, WARP}, &h);
    return begin(k, &h) ? end(&h, forward(c, k, &h, &stats, done)) : OK;
}

enum { IN_Y = 3, IN_DY, IN_SUMS };

static status backward(ctx *c, const call *k, handles *h, kernel *sums, bool *done) {
    const sums_args a = sums_of(k, k->work, k->in[STATS].data);
    const int64_t one = 1, dims[] = {a.batch, a.heads, a.room}, steps[] = {a.heads * a.room, a.room, 1};
    const int64_t queries = k->in[Q].shape.dim[1], keys = k->in[K].shape.dim[1];
    aten *in = h->call.in, *out = h->call.out;

    in[IN_Y] = handle_of(h, k, &k->in[Y]);
    in[IN_DY] = handle_of(h, k, &k->in[DY]);
    in[IN_SUMS] = torch_tensor_there(h->call.t, k->cuda->device, F32, a.sums, 3, dims, steps);
    for (int i = 0; i <= IN_SUMS; i++)
        if (!in[i]) return OK;
    TRY(cuda_launch(c, k, sums, over_rows(&a), &a));
    /* Without dropout seed and offset are not read. */
    if (h->call.t->aoti_torch_cuda__efficient_attention_backward(
            in[IN_DY], in[Q], in[K], in[V], NULL, in[IN_Y], NULL, NULL, queries, keys, in[IN_SUMS], 0, in[IN_SUMS],
            in[IN_SUMS], h->mask, 0, &h->scale, &one, NULL, 0, &out[0], &out[1], &out[2], &out[3]))
        return OK;
    for (int i = Q; i <= V; i++)
        if (!result(h, i, &k->in[i].shape)) return OK;
    for (int i = Q; i <= V; i++)
        if (wanted(k, i)) TRY(copy_result(c, k, h, i, &k->out[i]));
    *done = true;
    return OK;
}

status torch_attention_backward(ctx *c, const call *k, bool *done) {
    static kernel sums = {.name = "attention_sums"};
    handles h;

    *done = false;
    if (k->cuda->dry && torch_attention_is(k->node)) return cuda_launch(c, k, &sums, (geometry){0, WARP}, &h);
    if (!tensor_contiguous(&k->in[Y])) return OK;
    return begin(k, &h) ? end(&h, backward(c, k, &h, &sums, done)) : OK;
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
