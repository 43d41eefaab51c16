/* fused_attention_shim.c -- runs FusedAttention by torch's flash attention for CPUs, called through its C shim.
 *
 * It takes [B, H, S, D], which are [B, S, H, D] turned, and its results lie as ours do. What it keeps of a row is the log
 * of its sum: exp(x - log of the sum) are the weights, as if that was the largest score and the sum 1. Its results are in
 * memory of torch's, and are copied. Their last bits depend on the number of threads, as everywhere in torch; those of our
 * kernel do not. */
#include "core/torch_lib.h"
#include "ops/attention/fused_attention.h"

#include <math.h>
#include <string.h>

enum { RANK = 4, FROM_SUMS = 3, FROM_Y, FROM_DY };

static bool asks_torch(const node *n) { return node_int(n, "torch") != TORCH_NONE; }

/* [B, S, H, ...] as [B, H, S, ...]. */
typedef struct view {
    shape s;
    int64_t stride[MAX_RANK];
} view;

static view turned(const shape *s, const int64_t *stride) {
    view v = {.s = *s};
    memcpy(v.stride, stride, (size_t)s->rank * sizeof *stride);
    v.s.dim[1] = s->dim[2];
    v.s.dim[2] = s->dim[1];
    v.stride[1] = stride[2];
    v.stride[2] = stride[1];
    return v;
}

static view dense(const shape *s) {
    int64_t stride[MAX_RANK];
    stride_contiguous(s, stride);
    return turned(s, stride);
}

static aten handle_of(const torch_call *t, dtype type, const void *data, const view *v) {
    return torch_tensor(t->t, type, data, v->s.rank, v->s.dim, v->stride);
}

/* NULL unless elements of a head are side by side. */
static aten operand(const torch_call *t, const tensor *x) {
    const view v = turned(&x->shape, x->stride);
    if (x->shape.dim[3] > 1 && x->stride[3] != 1) return NULL;
    return handle_of(t, x->type, x->data, &v);
}

static bool begin(const call *k, torch_call *t) {
    if (!asks_torch(k->node) || tensor_count(&k->in[Q]) == 0 || !torch_has_attention(false)) return false;
    if (!torch_begin(t, torch_lib_get())) return false;
    for (int i = Q; i <= V; i++) t->in[i] = operand(t, &k->in[i]);
    return true;
}

static bool take(const torch_call *t, int i, const tensor *to) {
    const view v = dense(&to->shape);
    return torch_take(t, i, to->type, &v.s, v.stride, to->data);
}

static shape sums_shape(const shape *q) { return SHAPE(q->dim[0], q->dim[1], q->dim[2]); }

/* The pairs that our kernels keep. */
static bool keep_sums(const torch_call *t, const tensor *stats) {
    const shape s = sums_shape(&stats->shape);
    const view v = dense(&s);
    const void *sums = torch_tensor_data(t->t, t->out[1], &v.s, v.stride);

    for (int64_t i = 0, n = shape_count(&s); sums && i < n; i++) {
        dtype_set_value(stats->type, stats->data, 2 * i, dtype_get(stats->type, sums, i));
        dtype_set_value(stats->type, stats->data, 2 * i + 1, 1);
    }
    return sums;
}

bool fused_attention_shim(const call *k) {
    const double scale = node_float(k->node, "scale");
    const bool kept = k->n_out > 1 && tensor_present(&k->out[1]);
    torch_call t;
    bool done;

    if (!begin(k, &t)) return false;
    done = t.in[Q] && t.in[K] && t.in[V] &&
           !t.t->aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu(t.in[Q], t.in[K], t.in[V], 0,
                                                                            node_int(k->node, "torch") == TORCH_CAUSAL,
                                                                            NULL, &scale, &t.out[0], &t.out[1]) &&
           take(&t, 0, &k->out[0]) && (!kept || keep_sums(&t, &k->out[1]));
    torch_end(&t);
    return done;
}

size_t fused_attention_shim_workspace(const node *n) {
    const shape s = sums_shape(&n->in[Q]->shape);
    return asks_torch(n) ? (size_t)shape_count(&s) * dtype_size(n->in[STATS]->type) : 0;
}

bool fused_attention_grad_shim(const call *k) {
    const double scale = node_float(k->node, "scale");
    const tensor *stats = &k->in[STATS];
    const shape s = sums_shape(&stats->shape);
    const view sums = dense(&s), y = turned(&k->in[Y].shape, k->in[Y].stride);
    torch_call t;
    bool done;

    if (!begin(k, &t)) return false;
    for (int64_t i = 0, n = shape_count(&s); i < n; i++)
        dtype_set_value(stats->type, k->work, i,
                        dtype_get(stats->type, stats->data, 2 * i) -
                            log(dtype_get(stats->type, stats->data, 2 * i + 1)));
    t.in[FROM_SUMS] = handle_of(&t, stats->type, k->work, &sums);
    t.in[FROM_Y] = handle_of(&t, k->in[Y].type, k->in[Y].data, &y);
    t.in[FROM_DY] = operand(&t, &k->in[DY]);
    done = t.in[Q] && t.in[K] && t.in[V] && t.in[FROM_SUMS] && t.in[FROM_Y] && t.in[FROM_DY] &&
           !t.t->aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward(
               t.in[FROM_DY], t.in[Q], t.in[K], t.in[V], t.in[FROM_Y], t.in[FROM_SUMS], 0,
               node_int(k->node, "torch") == TORCH_CAUSAL, NULL, &scale, &t.out[0], &t.out[1], &t.out[2]);
    for (int i = 0; done && i < k->n_out && i <= V; i++)
        if (tensor_present(&k->out[i])) done = take(&t, i, &k->out[i]);
    torch_end(&t);
    return done;
}
