/* fused_attention.c -- owns FusedAttention and FusedAttentionGrad: softmax(scale q k' + bias, where allowed) v, with
 * dropout between softmax and v, as one operator whose scores are never in memory (fused_attention_kernel.c).
 *
 *     q [B, Q, H, D]  k [B, K, G, D]  v [B, K, G, W]  ->  y [B, Q, H, W]  and, of each row, [B, Q, H, 2]
 *
 * G divides H: heads h share the keys h / (H / G). `allowed` (bool) and `bias` are broadcast to [B, H, Q, K] and read
 * where they lie. The second result is (m, 1 / s), with m the largest score of a row and s = Σ exp(x - m): backward makes
 * the weights again from it. (Their log would lose s where a mask adds a huge number.) With `safe` a row in which nothing
 * is allowed gives zeros, otherwise NaN.
 *
 * Where only some rows of q, or of k and v, are there (ops/movement/rows.c), these are [T, H, D] and a last operand lists the
 * rows: a sequence's rows are neighbours, and are attended to by their own places. Repetitions get zeros. Dropout keeps
 * the elements that it would keep in softmax's [B, H, Q, K]; where a kernel of torch's draws them on a GPU, it draws from
 * torch's generator, and a third result [2] has the state for backward. */
#include "ops/attention/fused_attention.h"

/* --- rules ---------------------------------------------------------------------------------------------------------- */

static status infer_attention(graph *g, node *n) {
    shape y = n->in[Q]->shape, stats = y;
    const shape *v = &n->in[V]->shape;

    y.dim[y.rank - 1] = v->dim[v->rank - 1];
    stats.dim[stats.rank - 1] = 2;
    TRY(set_out(g, n, 0, n->in[Q]->type, &y));
    if (n->n_out > 2) TRY(set_out(g, n, 2, I64, &SHAPE(2)));
    return set_out(g, n, 1, fused_attention_sums(n->in[Q]->type), &stats);
}

static status infer_attention_grad(graph *g, node *n) {
    static const int of[] = {Q, K, V, BIAS};
    for (int i = 0; i < n->n_out; i++) TRY(set_out(g, n, i, n->in[of[i]]->type, &n->in[of[i]]->shape));
    return OK;
}

static status grad_attention(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[DRAWN + 1], *d[4];
    const bool bias = need(n, BIAS);

    if (dy[1]) return fail(g->c, E_UNSUPPORTED, "the second result of %s has no gradient", n->op->name);
    for (int i = 0; i < OPERANDS; i++) in[i] = node_in(n, i);
    in[Y] = n->out[0];
    in[STATS] = n->out[1];
    in[DY] = dy[0];
    in[DRAWN] = n->n_out > 2 ? n->out[2] : NULL;
    TRY(graph_emit(g, "FusedAttentionGrad", n->attrs, DY + 1 + (n->n_out > 2), in, bias ? 4 : 3, d));
    for (int i = 0; i < 3; i++) dx[i] = d[i];
    if (bias) dx[BIAS] = d[3];
    return OK;
}

/* Of the scores and of the weighted values. */
static double flops_attention(const node *n) {
    const shape *k = &n->in[K]->shape;
    const int64_t keys = node_int(n, "keys"), listed = k->rank > 1 ? k->dim[k->rank - 2] : 1;

    return 4 * (double)shape_count(&n->in[Q]->shape) * (double)(keys ? keys : listed);
}

/* The scores again, and four products of gradients. */
static double flops_attention_grad(const node *n) { return 2.5 * flops_attention(n); }

kernel_fn fused_attention_cuda,
    fused_attention_grad_cuda; /* cuda/kernels/attention.cu, cuda/kernels/attention_grad.cu */
size_t fused_attention_cuda_workspace(const node *n);
size_t fused_attention_grad_cuda_workspace(const node *n);

/* --- records -------------------------------------------------------------------------------------------------------- */

/* `batch`, `queries`, `keys`: sizes that lists of rows do not show. `torch`: which keys a kernel of torch's is asked for,
 * and `lists`: which it is to be asked for where attention_lengths finds the lists of rows that match the mask. */
static const attr attrs[] = {
    FLOAT("scale", 1),        FLOAT("ratio", 0),         INT("key", 0),  INT("safe", 1),
    INT("batch", 0),          INT("queries", 0),         INT("keys", 0), INT("torch", TORCH_NONE),
    INT("lists", TORCH_NONE), INT("triton", TORCH_NONE), {.name = NULL}};

#define OURS(name_, most_in, most_out)                                                                                 \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 3, .max_in = most_in, .max_out = most_out,              \
    .dtypes = FLOATS, .owned = OPERAND(Q_ROWS) | OPERAND(K_ROWS) | OPERAND(DRAWN), .flags = STRIDED | RANDOM,          \
    .attrs = attrs

/* clang-format off */
const op_def fused_attention_ops[] = {
    {OURS("FusedAttention", OPERANDS, 2), .infer = infer_attention, .grad = grad_attention, .cpu = fused_attention_cpu,
     .flops = flops_attention, .cuda = fused_attention_cuda, .cuda_workspace = fused_attention_cuda_workspace},
    {OURS("FusedAttentionGrad", DRAWN + 1, VARIADIC), .infer = infer_attention_grad, .plain = OPERAND(DY), .workspace = fused_attention_grad_workspace,
     .cpu = fused_attention_grad_cpu, .flops = flops_attention_grad, .cuda = fused_attention_grad_cuda,
     .cuda_workspace = fused_attention_grad_cuda_workspace},
    {0},
};
/* clang-format on */
