/* linear_loss.c -- owns LinearCrossEntropy, the cross entropy of a linear layer, and its gradient.
 *
 * The logits h W' + bias of a chunk of rows are computed, and while they are at hand turned into their gradient and that into
 * what the rows add to the gradients of hidden, weight and bias. Nothing as large as all logits ever exists. The chunks
 * are added up in their order. Logits, their gradient and all three results are float32 where hidden and weight are
 * 16-bit floats: the products' sums as they are.
 *
 * Forward does all of this for an upstream gradient of 1, by which backward multiplies. Losses that are not reduced have
 * one upstream gradient a row: where forward can know these up to a factor, it gets them as an operand
 * (passes/loss_gradient.c); otherwise forward computes the losses alone, and backward, LinearCrossEntropyGrad, the logits
 * once more. */
#include "ops/losses/linear_loss.h"
#include "core/parallel.h"
#include "gemm/gemm.h"
#include "ops/losses/loss.h"
#include "ops/queries.h"

#include <string.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* So many that reading and writing the weight's gradient once a chunk does not count. */
enum { CHUNK_ROWS = 512 };
/* Fewer rows, or fewer bytes of logits, are better computed at once. */
enum { LEAST_ROWS = 1024, LEAST_BYTES = 1 << 22 };
/* With more bytes of logits, their memory is worth computing them twice. */
#define LEAST_BYTES_TWICE (INT64_C(1) << 30)

/* The type of the logits and of the gradients. */
static dtype sum_type(dtype type) { return type == F64 ? F64 : F32; }

bool linear_loss_pays(const graph *g, dtype type, int64_t rows, int64_t width, int64_t classes, bool twice) {
    const int64_t bytes = rows * classes * (int64_t)dtype_size(sum_type(type));
    if (type == F16 || (type == BF16 && !g->cuda && !gemm_rounds(BF16))) return false;
    return rows >= LEAST_ROWS && rows >= 2 * width && bytes >= (twice ? LEAST_BYTES_TWICE : LEAST_BYTES);
}

static int64_t chunk_rows(int64_t samples) { return samples < CHUNK_ROWS ? samples : CHUNK_ROWS; }

typedef struct linear {
    const tensor *hidden, *weight, *bias; /* bias may be absent */
    const tensor *to;                     /* the gradients of these three; any may be absent */
    dtype type, sums;
    size_t size, sum_size; /* of an element */
    int64_t samples, width, classes;
    double *dbias;
    void *logits; /* [chunk_rows, classes] */
} linear;

static linear linear_of(const call *k, int hidden, int bias, const tensor *to) {
    const tensor *h = &k->in[hidden], *w = &k->in[hidden + 1];
    return (linear){.hidden = h,
                    .weight = w,
                    .bias = loss_operand(k, bias),
                    .to = to,
                    .type = h->type,
                    .sums = sum_type(h->type),
                    .size = dtype_size(h->type),
                    .sum_size = dtype_size(sum_type(h->type)),
                    .samples = h->shape.dim[0],
                    .width = h->shape.dim[1],
                    .classes = w->shape.dim[0]};
}

static gemm product_of(const linear *l, int64_t m, int64_t n, int64_t k, const void *a, const void *b, void *c) {
    return (gemm){.type = l->type,
                  .wide_c = l->sums != l->type,
                  .m = m,
                  .n = n,
                  .k = k,
                  .alpha = 1,
                  .a = a,
                  .b = b,
                  .c = c,
                  .a_row = k,
                  .a_col = 1,
                  .b_row = n,
                  .b_col = 1,
                  .c_row = n};
}

static const void *hidden_row(const linear *l, int64_t row) {
    return (const char *)l->hidden->data + (size_t)(row * l->width) * l->size;
}

/* Logits, and the gradients of hidden and weight from that of the logits, of some rows. */
static gemm logits_product(const linear *l, int64_t from, int64_t rows) {
    gemm g = product_of(l, rows, l->classes, l->width, hidden_row(l, from), l->weight->data, l->logits);

    g.b_row = 1; /* the weight is [classes, width] */
    g.b_col = l->width;
    g.beta = tensor_present(l->bias);
    return g;
}

static gemm hidden_product(const linear *l, int64_t from, int64_t rows) {
    void *to = (char *)l->to[0].data + (size_t)(from * l->width) * l->sum_size;
    gemm g = product_of(l, rows, l->width, l->classes, l->logits, l->weight->data, to);

    g.wide_a = g.wide_c;
    return g;
}

static gemm weight_product(const linear *l, int64_t from, int64_t rows) {
    gemm g = product_of(l, l->classes, l->width, rows, l->logits, hidden_row(l, from), l->to[1].data);

    g.wide_a = g.wide_c;
    g.a_row = 1;
    g.a_col = l->classes;
    g.beta = from > 0;
    return g;
}

static void tell_products(const linear *l, product_fn *each, void *arg) {
    const int64_t most = chunk_rows(l->samples), rest = most ? l->samples % most : 0;

    for (int64_t rows = most; rows > 0; rows = rows == most ? rest : 0) {
        const gemm all[] = {logits_product(l, 0, rows), hidden_product(l, 0, rows), weight_product(l, 0, rows)};
        for (int i = 0; i < 3; i++)
            if (i == 0 || tensor_present(&l->to[i - 1])) each(arg, &all[i]);
    }
}

static void repeat_first_row(void *arg, int64_t begin, int64_t end) {
    const linear *l = arg;
    const size_t bytes = (size_t)l->classes * l->sum_size;
    for (int64_t i = begin + 1; i <= end; i++) memcpy((char *)l->logits + (size_t)i * bytes, l->logits, bytes);
}

static void compute_logits(const linear *l, int64_t from, int64_t rows) {
    const gemm g = logits_product(l, from, rows);

    if (tensor_present(l->bias)) {
        for (int64_t i = 0; i < l->classes; i++)
            dtype_set_value(l->sums, l->logits, i, dtype_get(l->bias->type, l->bias->data, i));
        parallel_for(rows - 1, parallel_rows(l->classes), repeat_first_row, (void *)(uintptr_t)l);
    }
    gemm_run(&g);
}

typedef struct columns_job {
    const linear *l;
    int64_t rows;
} columns_job;

static void add_bias_columns(void *arg, int64_t begin, int64_t end) {
    const columns_job *j = arg;
    loss_add_columns[j->l->sums](j->l->logits, j->rows, j->l->classes, begin, end, j->l->dbias);
}

/* What the gradient of a chunk's logits adds to those of the operands. */
static void spread_gradient(const linear *l, int64_t from, int64_t rows) {
    if (tensor_present(&l->to[0])) {
        const gemm g = hidden_product(l, from, rows);
        gemm_run(&g);
    }
    if (tensor_present(&l->to[1])) {
        const gemm g = weight_product(l, from, rows);
        gemm_run(&g);
    }
    if (tensor_present(&l->to[2]))
        parallel_for(l->classes, parallel_rows(rows), add_bias_columns, &(columns_job){l, rows});
}

static bool wants_gradients(const linear *l) {
    return tensor_present(&l->to[0]) || tensor_present(&l->to[1]) || tensor_present(&l->to[2]);
}

/* `t` from an element on. */
static tensor from_element(const tensor *t, int64_t first) {
    tensor chunk = *t;
    chunk.data = (char *)chunk.data + (size_t)first * dtype_size(chunk.type);
    return chunk;
}

/* Goes through all rows; `losses`: theirs and their lse, else lse is known. The upstream gradient is all->dloss. */
static void each_part(const linear *l, const loss_job *all, bool losses) {
    for (int64_t from = 0; from < l->samples; from += CHUNK_ROWS) {
        loss_job chunk = *all;
        const tensor labels = from_element(all->labels, from);
        const tensor dloss = from_element(all->dloss, all->each ? from : 0);

        chunk.samples = chunk.batch = l->samples - from < CHUNK_ROWS ? l->samples - from : CHUNK_ROWS;
        chunk.labels = &labels;
        chunk.dloss = &dloss;
        chunk.lse = all->lse + from;
        chunk.x = chunk.dx = l->logits;
        compute_logits(l, from, chunk.samples);
        if (losses) {
            chunk.losses = all->losses + from;
            chunk.rows = loss_rows[l->sums];
            loss_each_sample(&chunk);
        }
        if (!wants_gradients(l)) continue;
        chunk.rows = loss_grad_rows[l->sums];
        loss_each_sample(&chunk);
        spread_gradient(l, from, chunk.samples);
    }
    for (int64_t i = 0; tensor_present(&l->to[2]) && i < l->classes; i++)
        dtype_set_value(l->sums, l->to[2].data, i, l->dbias[i]);
}

/* The bias's gradient, shares, the logits of a chunk. */
static size_t part_bytes(const node *n, const value *hidden, const value *weight) {
    const int64_t classes = weight->shape.dim[0];
    return 8 * (size_t)classes + loss_smoothing_bytes(n, classes) +
           (size_t)(chunk_rows(hidden->shape.dim[0]) * classes) * dtype_size(sum_type(hidden->type));
}

static void use_part_bytes(linear *l, loss_job *all, const node *n, void *memory) {
    l->dbias = memory;
    memset(l->dbias, 0, (size_t)l->classes * sizeof *l->dbias);
    loss_smooth(all, l->sums, l->dbias + l->classes);
    l->logits = (char *)(l->dbias + l->classes) + loss_smoothing_bytes(n, l->classes);
}

/* Losses and lse first. */
static size_t linear_cross_entropy_workspace(const node *n) {
    return 16 * (size_t)n->in[HIDDEN]->shape.dim[0] + part_bytes(n, n->in[HIDDEN], n->in[WEIGHT]);
}

static status linear_cross_entropy_cpu(ctx *c, const call *k) {
    static const double one = 1;
    static const tensor absent = {.type = DT_NONE};
    const tensor unit = {.data = (void *)(uintptr_t)&one, .type = F64, .shape = SCALAR};
    linear l = linear_of(k, HIDDEN, BIAS, &k->out[DHIDDEN]);
    const shape logits = SHAPE(l.samples, l.classes);
    loss_job all = loss_job_of(k, &logits, LABELS, CLASS_WEIGHTS);
    double *losses = k->work, weight;

    TRY(loss_check_labels(c, &all, &weight));
    use_part_bytes(&l, &all, k->node, losses + 2 * l.samples);
    all.losses = losses;
    all.lse = tensor_present(&k->out[LSE]) ? k->out[LSE].data : losses + l.samples;
    all.dloss = tensor_present(loss_operand(k, UPSTREAM)) ? &k->in[UPSTREAM] : &unit;
    all.divisor = strcmp(node_string(k->node, "reduction"), "mean") == 0 ? weight : 1;
    const bool none = all.each;
    all.each = all.dloss != &unit;
    each_part(&l, &all, true);
    all.each = none;
    loss_deliver(k, &all, weight, &absent);
    return OK;
}

static void linear_cross_entropy_products(const call *k, product_fn *each, void *arg) {
    const linear l = linear_of(k, HIDDEN, BIAS, &k->out[DHIDDEN]);
    tell_products(&l, each, arg);
}

static size_t linear_cross_entropy_grad_workspace(const node *n) {
    return part_bytes(n, n->in[G_HIDDEN], n->in[G_WEIGHT]);
}

static status linear_cross_entropy_grad_cpu(ctx *c, const call *k) {
    linear l = linear_of(k, G_HIDDEN, G_BIAS, k->out);
    const shape logits = SHAPE(l.samples, l.classes);
    loss_job all = loss_job_of(k, &logits, G_LABELS, G_CLASS_WEIGHTS);

    TRY(loss_check_labels(c, &all, NULL));
    use_part_bytes(&l, &all, k->node, k->work);
    all.lse = k->in[G_LSE].data;
    all.dloss = &k->in[DLOSS];
    each_part(&l, &all, false);
    return OK;
}

static void linear_cross_entropy_grad_products(const call *k, product_fn *each, void *arg) {
    const linear l = linear_of(k, G_HIDDEN, G_BIAS, k->out);
    tell_products(&l, each, arg);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static bool reduces(const node *n) { return strcmp(node_string(n, "reduction"), "none") != 0; }

static status set_gradients(graph *g, node *n, int first, const value *h, const value *w, const value *bias) {
    const dtype sums = sum_type(h->type);
    TRY(set_out(g, n, first, sums, &h->shape));
    TRY(set_out(g, n, first + 1, sums, &w->shape));
    return bias ? set_out(g, n, first + 2, sums, &bias->shape) : OK;
}

static status infer_linear_cross_entropy(graph *g, node *n) {
    const shape *h, *w, *labels;

    for (int i = 0; i <= LABELS; i++) TRY(require(g, n, i));
    h = &n->in[HIDDEN]->shape;
    w = &n->in[WEIGHT]->shape;
    labels = &n->in[LABELS]->shape;
    if (h->rank != 2 || w->rank != 2 || h->dim[1] != w->dim[1] || labels->rank != 1 || labels->dim[0] != h->dim[0] ||
        (node_in(n, UPSTREAM) && (reduces(n) || !shape_equal(&n->in[UPSTREAM]->shape, labels))))
        return fail(g->c, E_SHAPE, "%s of operands that do not go together", n->op->name);
    TRY(set_out(g, n, LOSS, node_int(n, "wide") ? sum_type(n->in[HIDDEN]->type) : n->in[HIDDEN]->type,
                reduces(n) ? &SCALAR : labels));
    TRY(set_gradients(g, n, DHIDDEN, n->in[HIDDEN], n->in[WEIGHT], node_in(n, BIAS)));
    return reduces(n) ? OK : set_out(g, n, LSE, F64, labels);
}

static status infer_linear_cross_entropy_grad(graph *g, node *n) {
    for (int i = 0; i <= G_LSE; i++) TRY(require(g, n, i));
    return set_gradients(g, n, 0, n->in[G_HIDDEN], n->in[G_WEIGHT], node_in(n, G_BIAS));
}

/* Of losses that are not reduced. What one row adds to the gradient of its hidden states is that for 1 times its
 * upstream gradient; a weight's gradient is a sum over rows. */
static status grad_each(graph *g, const node *n, value *dy, value *dx[]) {
    static const int operands[] = {HIDDEN, WEIGHT, BIAS};
    value *d[3],
        *in[] = {
            dy, n->in[HIDDEN], n->in[WEIGHT], n->in[LABELS], n->out[LSE], node_in(n, BIAS), node_in(n, CLASS_WEIGHTS)};
    attr attrs[5];

    if (!need(n, WEIGHT) && !need(n, BIAS)) {
        TRY(emit_cast(g, dy, n->out[DHIDDEN]->type, &dy));
        TRY(emit_reshape(g, dy, &SHAPE(dy->shape.dim[0], 1), &dy));
        return emit(g, &dx[HIDDEN], "Mul", n->out[DHIDDEN], dy);
    }
    loss_attrs(n, attrs);
    TRY(graph_emit(g, "LinearCrossEntropyGrad", attrs, GRAD_OPERANDS, in, 3, d));
    for (int i = 0; i < 3; i++)
        if (need(n, operands[i])) dx[operands[i]] = d[i];
    return OK;
}

static status grad_linear_cross_entropy(graph *g, const node *n, value *const dy[], value *dx[]) {
    static const int operands[] = {HIDDEN, WEIGHT, BIAS}; /* of out[DHIDDEN], out[DWEIGHT], out[DBIAS] */
    value *up;

    if (!reduces(n)) return grad_each(g, n, dy[LOSS], dx);
    TRY(emit_cast(g, dy[LOSS], n->out[DHIDDEN]->type, &up));
    for (int i = 0; i < 3; i++)
        if (need(n, operands[i])) TRY(emit(g, &dx[operands[i]], "Mul", up, n->out[DHIDDEN + i]));
    return OK;
}

/* --- on a GPU ----------------------------------------------------------------------------------------------------- */

/* A chunk reads and writes the weight's gradient once more, in float32: 8 bytes for each of its elements, which take a
 * GPU as long as the product of 1024 rows. So 4096 rows are enough that it does not count. The limit holds 1024 rows of
 * 262,144 classes in 16 bits; PyTorch's own loss holds more for them, the logits in 16 bits and twice in float32. */
enum { MOST_ROWS = 4096, TILE = 128 };
static const int64_t most_bytes = (int64_t)3 << 29;

int64_t linear_loss_line(int64_t classes) {
    return (classes + LINEAR_LOSS_LINE - 1) / LINEAR_LOSS_LINE * LINEAR_LOSS_LINE;
}

int64_t linear_loss_chunk(dtype type, int64_t samples, int64_t classes) {
    const int64_t sums = (int64_t)dtype_size(sum_type(type)), own = (int64_t)dtype_size(type);
    const int64_t each = linear_loss_line(classes > 0 ? classes : 1) * (sums == own ? sums : sums + own);
    int64_t most = most_bytes / each / TILE * TILE;

    if (most > MOST_ROWS) most = MOST_ROWS;
    if (most < TILE) most = TILE;
    if (samples <= most) return samples;
    const int64_t chunks = (samples + most - 1) / most, rows = (samples + chunks - 1) / chunks;
    return (rows + TILE - 1) / TILE * TILE;
}

kernel_fn linear_cross_entropy_cuda, linear_cross_entropy_grad_cuda; /* cuda/kernels/linear_loss.cu */
size_t linear_cross_entropy_cuda_workspace(const node *n);
size_t linear_cross_entropy_grad_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

/* wide: the loss is float32, of 16-bit hidden states. */
static const attr linear_attrs[] = {NO_DEFAULT("ignore_index", INT),
                                    NO_DEFAULT("reduction", STRING),
                                    NO_DEFAULT("smoothing", FLOAT),
                                    INT("wide", 0),
                                    {.name = NULL}};

/* clang-format off */
const op_def linear_loss_ops[] = {
    {.name = "LinearCrossEntropy", .domain = ORT_DOMAIN, .since = 1, .min_in = 3, .max_in = LINEAR_OPERANDS,
     .max_out = LINEAR_RESULTS, .dtypes = FLOATS, .checked = OPERAND(LABELS), .attrs = linear_attrs, .infer = infer_linear_cross_entropy,
     .grad = grad_linear_cross_entropy, .workspace = linear_cross_entropy_workspace, .cpu = linear_cross_entropy_cpu,
     .products = linear_cross_entropy_products, .cuda_workspace = linear_cross_entropy_cuda_workspace,
     .cuda = linear_cross_entropy_cuda},
    {.name = "LinearCrossEntropyGrad", .domain = ORT_DOMAIN, .since = 1, .min_in = 5, .max_in = GRAD_OPERANDS,
     .max_out = 3, .dtypes = FLOATS, .checked = OPERAND(G_LABELS), .attrs = linear_attrs, .infer = infer_linear_cross_entropy_grad,
     .workspace = linear_cross_entropy_grad_workspace, .cpu = linear_cross_entropy_grad_cpu,
     .products = linear_cross_entropy_grad_products,
     .cuda_workspace = linear_cross_entropy_grad_cuda_workspace, .cuda = linear_cross_entropy_grad_cuda},
    {0},
};
/* clang-format on */
