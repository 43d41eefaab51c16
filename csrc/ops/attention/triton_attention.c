/* triton_attention.c -- describes FusedAttention to the kernels of ortmodule/triton_kernels/attention_kernels.py.
 *
 * They draw what our own draw, and keep of a row what our own keep, so forward and backward may go different ways. */
#include "ops/attention/triton_attention.h"

#include "ops/attention/fused_attention.h"
#include "ops/pointwise/dropout.h"

#include <stdio.h>
#include <string.h>

static const tensor absent = {.type = DT_NONE};
static const tensor *operand(const call *k, int i) { return i < k->n_in ? &k->in[i] : &absent; }
static const tensor *result(const call *k, int i) { return i < k->n_out ? &k->out[i] : &absent; }

static void add(triton_launch *l, int64_t given, dtype type, int64_t count) {
    l->arguments[l->n_arguments++] = (triton_argument){given, type, count};
}

static int64_t span_of(const tensor *t) {
    int64_t last = 0;
    for (int d = 0; d < t->shape.rank; d++) last += (t->shape.dim[d] - 1) * t->stride[d];
    return last + 1;
}

/* An operand that is not there is null, of a type that it would have. */
static void add_pointer(triton_launch *l, const tensor *t, dtype type) {
    add(l, (int64_t)(intptr_t)t->data, type, tensor_present(t) ? span_of(t) : 0);
}

static void add_steps(triton_launch *l, const tensor *t) {
    for (int d = 0; d < 3; d++) add(l, tensor_present(t) ? t->stride[d] : 0, DT_NONE, 0);
}

static void add_scores(triton_launch *l, const tensor *t, const shape *scores) {
    const tensor e = tensor_present(t) ? tensor_expand(t, scores) : absent;
    for (int d = 0; d < 4; d++) add(l, e.stride[d], DT_NONE, 0);
}

static void add_bits(triton_launch *l, double x) {
    int64_t bits;
    memcpy(&bits, &x, sizeof bits);
    add(l, bits, DT_NONE, 0);
}

static bool fits(const tensor *t) { return !tensor_present(t) || t->shape.dim[3] <= 1 || t->stride[3] == 1; }

/* What of the bias's gradient they can make: one of the scores' shape. */
static bool bias_fits(const call *k, const shape *scores) {
    return k->n_out < 4 || !tensor_present(&k->out[3]) || shape_equal(&k->out[3].shape, scores);
}

static tensor dense(const tensor *t) {
    tensor d = *t;
    if (tensor_present(t)) stride_contiguous(&t->shape, d.stride);
    return d;
}

/* Of a kernel over `length` queries or keys, `times` times. */
static void describe(const call *k, const char *kernel, int64_t length, int64_t times, bool keeps, const uint64_t *seed,
                     triton_launch *l) {
    const bool backward = strcmp(kernel, "forward") != 0;
    const node *n = k->node;
    const shape *q = &k->in[Q].shape, *key = &k->in[K].shape;
    const shape scores = SHAPE(q->dim[0], q->dim[2], q->dim[1], key->dim[1]);
    const dtype type = k->in[Q].type;
    const double ratio = node_float(k->node, "ratio");
    const tensor y = backward ? *operand(k, Y) : dense(&k->out[0]),
                 *stats = backward ? operand(k, STATS) : result(k, 1);
    const tensor nothing = absent, *dy = backward ? operand(k, DY) : &nothing;

    *l = (triton_launch){.rows = 1, .width = length, .times = times, .how = "||"};
    (void)snprintf(l->text, sizeof l->text, "attention %s %s %lld %lld %s%s%s%s%s%s%s\n", kernel, dtype_name(type),
                   (long long)q->dim[3], (long long)k->in[V].shape.dim[3],
                   tensor_present(operand(k, ALLOWED)) ? "a" : "", tensor_present(operand(k, BIAS)) ? "b" : "",
                   ratio > 0 ? "d" : "", node_int(n, "safe") ? "s" : "",
                   node_int(n, "triton") == TORCH_CAUSAL ? "c" : "", keeps ? "k" : "", seed ? "t" : "");
    l->program = l->text;
    for (int i = Q; i <= V; i++) add_pointer(l, &k->in[i], type);
    add_pointer(l, operand(k, ALLOWED), BOOL);
    add_pointer(l, operand(k, BIAS), type);
    add_pointer(l, &y, type);
    add_pointer(l, stats, F32);
    add_pointer(l, dy, type);
    for (int i = 0; i < 4; i++) {
        const tensor out = backward ? dense(result(k, i)) : nothing;
        add_pointer(l, &out, type);
    }
    const int64_t sizes[] = {q->dim[2], key->dim[2], q->dim[1], key->dim[1]};
    for (int i = 0; i < 4; i++) add(l, sizes[i], DT_NONE, 0);
    for (int i = Q; i <= V; i++) add_steps(l, &k->in[i]);
    add_steps(l, &y);
    add_steps(l, dy);
    add_scores(l, operand(k, ALLOWED), &scores);
    add_scores(l, operand(k, BIAS), &scores);
    add_bits(l, node_float(k->node, "scale"));
    add_bits(l, dropout_factor(ratio));
    add(l, (int64_t)((uint64_t)dropout_threshold(ratio) << 32 | (uint32_t)node_int(k->node, "key")), DT_NONE, 0);
    add(l, (int64_t)(k->seed & 0xffffffffu), DT_NONE, 0);
    add(l, (int64_t)(k->seed >> 32), DT_NONE, 0);
    add(l, (int64_t)(intptr_t)seed, I64, seed ? 1 : 0);
}

static bool takes(const call *k, bool backward) {
    const shape *q = &k->in[Q].shape, *key = &k->in[K].shape;

    if (!node_int(k->node, "triton") || q->rank != 4 || key->rank != 4) return false;
    if (tensor_present(operand(k, Q_ROWS)) || tensor_present(operand(k, K_ROWS))) return false;
    const shape scores = SHAPE(q->dim[0], q->dim[2], q->dim[1], key->dim[1]);
    for (int i = Q; i <= V; i++)
        if (!fits(&k->in[i]) || (backward && !tensor_present(result(k, i)))) return false;
    return !backward || (fits(operand(k, Y)) && fits(operand(k, DY)) && bias_fits(k, &scores));
}

status triton_attention_of(ctx *c, const call *k, const uint64_t *seed, triton_launch *launches, int *count) {
    const bool backward = strcmp(k->node->op->name, "FusedAttentionGrad") == 0;
    const shape *q = &k->in[Q].shape, *key = &k->in[K].shape;

    (void)c;
    *count = 0;
    if (!takes(k, backward)) return OK;
    const bool keeps = tensor_present(result(k, backward ? 3 : 1));
    describe(k, backward ? "backward_queries" : "forward", q->dim[1], q->dim[0] * q->dim[2], keeps, seed, &launches[0]);
    *count = 1;
    if (!backward) return OK;
    describe(k, "backward_keys", key->dim[1], key->dim[0] * key->dim[2], false, seed, &launches[1]);
    *count = 2;
    return OK;
}

status triton_attention_cpu(ctx *c, const call *k, bool *done) {
    triton_launch launches[TRITON_ATTENTION_KERNELS];
    const triton_maker *maker;
    int count;

    TRY(triton_attention_of(c, k, NULL, launches, &count));
    *done = count > 0;
    if (!count) return OK;
    TRY(triton_get_maker(c, &maker));
    for (int i = 0; i < count; i++) TRY(maker->interpret(c, &launches[i]));
    return OK;
}
