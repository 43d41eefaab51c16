/* loss.c -- owns SoftmaxCrossEntropyLoss, also of a linear layer, and NegativeLogLikelihoodLoss, with PyTorch's meaning: a sample whose label is
 * ignore_index counts for nothing; "mean" divides by the weights of the labels that count (NaN when none does).
 *
 * For logits x [N, C, D...] and labels t [N, D...], per sample
 *     loss = w_t (lse - x_t),  lse = log Σ exp x          dx = w_t dloss (exp(x - lse) - [i = t])
 * and with smoothing e, where e_i = e w_i / C:
 *     loss = (1 - e) w_t (lse - x_t) + Σ e_i (lse - x_i)
 *     dx = dloss (((1 - e) w_t + Σ e_i) exp(x - lse) - (1 - e) w_t [i = t] - e_i)
 * Backward keeps the logits and one lse a sample, and writes dx in one sweep, over the logits where those are dead:
 * nothing else of their size ever exists. Samples that do not count are not even read. */
#include "core/parallel.h"
#include "core/vmath.h"
#include "exec/gemm.h"
#include "ops/op.h"

#include <inttypes.h>
#include <string.h>

/* --- samples ------------------------------------------------------------------------------------------------------ */

enum { COLUMNS = 256 };

typedef struct job job;
typedef void rows_fn(const job *j, int64_t begin, int64_t end);
typedef void columns_fn(const job *j, int64_t batch, int64_t from, int64_t width);
typedef void add_columns_fn(const void *rows, int64_t count, int64_t width, int64_t begin, int64_t end, double *total);

struct job {
    const void *x;
    void *dx;
    const tensor *labels, *weights, *dloss; /* weights may be absent */
    double *lse, *losses;                   /* [samples] */
    int64_t batch, classes, inner, samples; /* samples = batch * inner */
    bool ignores, each;                     /* there is an ignore_index; losses are not reduced */
    int64_t ignored;
    double divisor;    /* of the sum */
    double own;        /* 1 - smoothing: the share of the label itself */
    const void *share; /* [classes] that of every class, in the type that is computed with; NULL: no smoothing */
    double shares;     /* their sum */
    rows_fn *rows;
    columns_fn *columns;
};

/* The weight of a sample and its label; -1 where it does not count. */
static double label_at(const job *j, int64_t sample, int64_t *label) {
    *label = dtype_get_int(j->labels->type, j->labels->data, sample);
    if (j->ignores && *label == j->ignored) {
        *label = -1;
        return 0;
    }
    return tensor_present(j->weights) ? dtype_get(j->weights->type, j->weights->data, *label) : 1;
}

static double upstream_at(const job *j, int64_t sample) {
    return dtype_get(j->dloss->type, j->dloss->data, j->each ? sample : 0) / j->divisor;
}

#define TEMPLATE "ops/loss_rows.h"
#include "ops/each_float.h"

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    j->rows(j, begin, end);
}

static void columns_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    int64_t pieces = (j->inner + COLUMNS - 1) / COLUMNS;

    for (int64_t task = begin; task < end; task++) {
        int64_t from = task % pieces * COLUMNS;
        j->columns(j, task / pieces, from, j->inner - from < COLUMNS ? j->inner - from : COLUMNS);
    }
}

static void each_sample(job *j) {
    if (j->inner == 1) {
        parallel_for(j->samples, parallel_rows(8 * j->classes), rows_range, j);
    } else if (j->inner > 0) {
        int64_t width = j->inner < COLUMNS ? j->inner : COLUMNS;
        parallel_for(j->batch * ((j->inner + COLUMNS - 1) / COLUMNS), parallel_rows(8 * j->classes * width),
                     columns_range, j);
    }
}

static const tensor absent = {.type = DT_NONE};

static const tensor *operand(const call *k, int i) { return i < k->n_in ? &k->in[i] : &absent; }

static double smoothing_of(const node *n) { return node_attr(n, "smoothing") ? node_float(n, "smoothing") : 0; }

/* Labels are operand `labels`, weights operand `weights`, `s` the shape of the logits. */
static job job_of(const call *k, const shape *s, int labels, int weights) {
    job j = {
        .labels = &k->in[labels],
        .weights = operand(k, weights),
        .batch = s->rank > 1 ? s->dim[0] : 1,
        .classes = s->dim[s->rank > 1],
        .inner = s->rank > 1 ? shape_span(s, 2, s->rank) : 1,
        .ignores = node_has(k->node, "ignore_index"),
        .ignored = node_int(k->node, "ignore_index"),
        .each = strcmp(node_string(k->node, "reduction"), "none") == 0,
        .divisor = 1,
        .own = 1 - smoothing_of(k->node),
    };
    j.samples = j.batch * j.inner;
    return j;
}

/* Bytes of the shares of so many classes. */
static size_t smoothing_bytes(const node *n, int64_t classes) {
    return smoothing_of(n) > 0 ? sizeof(double) * (size_t)classes : 0;
}

/* Computes with `type`; `memory` has smoothing_bytes. */
static void smooth(job *j, dtype type, void *memory) {
    if (!(j->own < 1)) return;
    j->share = memory;
    for (int64_t i = 0; i < j->classes; i++) {
        double weight = tensor_present(j->weights) ? dtype_get(j->weights->type, j->weights->data, i) : 1;
        double share = (1 - j->own) / (double)j->classes * weight;
        j->shares += share;
        if (type == F64) ((double *)memory)[i] = share;
        else ((float *)memory)[i] = (float)share;
    }
}

/* Every label that counts must be a class: checked before anything is computed. Adds up their weights. */
static status check_labels(ctx *c, const job *j, double *weight) {
    *weight = 0;
    for (int64_t i = 0; i < j->samples; i++) {
        int64_t label = dtype_get_int(j->labels->type, j->labels->data, i);
        if (j->ignores && label == j->ignored) continue;
        if (label < 0 || label >= j->classes)
            return fail(c, E_RUNTIME,
                        "label %" PRId64 " of sample %" PRId64 " is out of range: there are %" PRId64 " classes", label,
                        i, j->classes);
        *weight += label_at(j, i, &label);
    }
    return OK;
}

/* The samples' losses into out[0], reduced in their order; what they are divided by into `divisor`. */
static void deliver(const call *k, const job *j, double weight, const tensor *divisor) {
    bool mean = strcmp(node_string(k->node, "reduction"), "mean") == 0;
    const tensor *out = &k->out[0];
    const double nothing = j->own < 1 && j->classes == 0 ? NAN : 0; /* a share of no classes */
    double sum = nothing;

    if (tensor_present(divisor)) *(double *)divisor->data = mean ? weight : 1;
    for (int64_t i = 0; i < j->samples; i++)
        if (j->each) dtype_set_value(out->type, out->data, i, j->losses[i] + nothing);
        else sum += j->losses[i];
    if (!j->each) dtype_set_value(out->type, out->data, 0, mean ? sum / weight : sum);
}

/* --- cross entropy: logits, labels, weights -> loss, lse, divisor ------------------------------------------------- */

static status cross_entropy_cpu(ctx *c, const call *k) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_rows);
    static columns_fn *const columns[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_columns);
    job j = job_of(k, &k->in[0].shape, 1, 2);
    double weight;

    TRY(check_labels(c, &j, &weight));
    j.x = k->in[0].data;
    j.losses = k->work;
    j.lse = tensor_present(&k->out[1]) ? k->out[1].data : j.losses + j.samples;
    j.rows = rows[k->in[0].type];
    j.columns = columns[k->in[0].type];
    smooth(&j, k->in[0].type, j.losses + 2 * j.samples);
    each_sample(&j);
    deliver(k, &j, weight, &k->out[2]);
    return OK;
}

/* The axis of the classes: 1, or 0 for a single sample. */
static int class_axis(const shape *s) { return s->rank > 1; }

/* Losses, lse when nobody asks for it, shares. */
static size_t cross_entropy_workspace(const node *n) {
    const shape *s = &n->in[0]->shape;
    return 16 * (size_t)shape_count(&n->in[1]->shape) + smoothing_bytes(n, s->dim[class_axis(s)]);
}

static size_t cross_entropy_grad_workspace(const node *n) {
    const shape *s = &n->in[1]->shape;
    return smoothing_bytes(n, s->dim[class_axis(s)]);
}

/* Operands: dloss, logits, labels, lse, divisor, weights. */
static status cross_entropy_grad_cpu(ctx *c, const call *k) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_grad_rows);
    static columns_fn *const columns[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_grad_columns);
    job j = job_of(k, &k->in[1].shape, 2, 5);

    (void)c;
    j.dloss = &k->in[0];
    j.x = k->in[1].data;
    j.lse = k->in[3].data;
    j.divisor = *(const double *)k->in[4].data;
    j.dx = k->out[0].data;
    j.rows = rows[k->in[1].type];
    j.columns = columns[k->in[1].type];
    smooth(&j, k->in[1].type, k->work);
    each_sample(&j);
    return OK;
}

/* --- cross entropy of a linear layer: hidden, weight, labels, bias, class weights -> loss, and its gradients ---------
 *
 * The logits h W' + bias of some rows are computed, and while they are at hand turned into their gradient and that into
 * what the rows add to the gradients of hidden, weight and bias: all for an upstream gradient of 1, by which backward
 * multiplies. Nothing as large as all logits ever exists. The parts are added up in their order. Logits, their gradient
 * and all three results are float32 where hidden and weight are 16-bit floats: the products' sums as they are. */

enum { HIDDEN, WEIGHT, LABELS, BIAS, CLASS_WEIGHTS, LINEAR_OPERANDS };
/* So many that reading and writing the weight's gradient once a part does not count. */
enum { PART_ROWS = 512 };
/* Fewer rows, or fewer bytes of logits, are better computed at once. */
enum { LEAST_ROWS = 1024, LEAST_BYTES = 1 << 22 };

/* The type of the logits and of the gradients. */
static dtype sum_type(dtype type) { return type == F64 ? F64 : F32; }

bool linear_loss_pays(dtype type, int64_t rows, int64_t width, int64_t classes) {
    if (type == F16 || (type == BF16 && !gemm_rounds(BF16))) return false;
    return rows >= LEAST_ROWS && rows >= 2 * width &&
           rows * classes * (int64_t)dtype_size(sum_type(type)) >= LEAST_BYTES;
}

static int64_t part_rows(int64_t samples) { return samples < PART_ROWS ? samples : PART_ROWS; }

typedef struct linear {
    const call *k;
    dtype type, sums;
    size_t size, sum_size; /* of an element */
    int64_t samples, width, classes;
    void *logits; /* [part_rows, classes] */
    double *dbias;
} linear;

static linear linear_of(const call *k) {
    const tensor *h = &k->in[HIDDEN], *w = &k->in[WEIGHT];
    return (linear){.k = k,
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
    return (const char *)l->k->in[HIDDEN].data + (size_t)(row * l->width) * l->size;
}

static void repeat_first_row(void *arg, int64_t begin, int64_t end) {
    const linear *l = arg;
    const size_t bytes = (size_t)l->classes * l->sum_size;
    for (int64_t i = begin + 1; i <= end; i++) memcpy((char *)l->logits + (size_t)i * bytes, l->logits, bytes);
}

static gemm logits_product(const linear *l, int64_t from, int64_t rows) {
    gemm g = product_of(l, rows, l->classes, l->width, hidden_row(l, from), l->k->in[WEIGHT].data, l->logits);

    g.b_row = 1; /* the weight is [classes, width] */
    g.b_col = l->width;
    g.beta = tensor_present(operand(l->k, BIAS));
    return g;
}

/* The gradients of hidden and weight from that of the logits. */
static gemm hidden_product(const linear *l, int64_t from, int64_t rows) {
    void *to = (char *)l->k->out[1].data + (size_t)(from * l->width) * l->sum_size;
    gemm g = product_of(l, rows, l->width, l->classes, l->logits, l->k->in[WEIGHT].data, to);

    g.wide_a = g.wide_c;
    return g;
}

static gemm weight_product(const linear *l, int64_t from, int64_t rows) {
    gemm g = product_of(l, l->classes, l->width, rows, l->logits, hidden_row(l, from), l->k->out[2].data);

    g.wide_a = g.wide_c;
    g.a_row = 1;
    g.a_col = l->classes;
    g.beta = from > 0;
    return g;
}

static void compute_logits(const linear *l, int64_t from, int64_t rows) {
    const tensor *bias = operand(l->k, BIAS);
    const gemm g = logits_product(l, from, rows);

    if (tensor_present(bias)) {
        for (int64_t i = 0; i < l->classes; i++)
            dtype_set_value(l->sums, l->logits, i, dtype_get(bias->type, bias->data, i));
        parallel_for(rows - 1, parallel_rows(l->classes), repeat_first_row, (void *)(uintptr_t)l);
    }
    gemm_run(&g);
}

typedef struct columns_job {
    const linear *l;
    int64_t rows;
} columns_job;

static void add_bias_columns(void *arg, int64_t begin, int64_t end) {
    static add_columns_fn *const add[DTYPE_COUNT] = FLOAT_TABLE(add_columns);
    const columns_job *j = arg;

    add[j->l->sums](j->l->logits, j->rows, j->l->classes, begin, end, j->l->dbias);
}

/* What the gradient of a part's logits adds to those of the operands. */
static void spread_gradient(const linear *l, int64_t from, int64_t rows) {
    const tensor *dhidden = &l->k->out[1], *dweight = &l->k->out[2], *dbias = &l->k->out[3];

    if (tensor_present(dhidden)) {
        const gemm g = hidden_product(l, from, rows);
        gemm_run(&g);
    }
    if (tensor_present(dweight)) {
        const gemm g = weight_product(l, from, rows);
        gemm_run(&g);
    }
    if (tensor_present(dbias)) parallel_for(l->classes, parallel_rows(rows), add_bias_columns, &(columns_job){l, rows});
}

static bool wants_gradients(const call *k) {
    return tensor_present(&k->out[1]) || tensor_present(&k->out[2]) || tensor_present(&k->out[3]);
}

/* Losses, lse, the bias's gradient, shares, the logits of a part. */
static size_t linear_cross_entropy_workspace(const node *n) {
    int64_t samples = n->in[HIDDEN]->shape.dim[0], classes = n->in[WEIGHT]->shape.dim[0];
    return 8 * (size_t)(2 * samples + classes) + smoothing_bytes(n, classes) +
           (size_t)(part_rows(samples) * classes) * dtype_size(sum_type(n->in[HIDDEN]->type));
}

static status linear_cross_entropy_cpu(ctx *c, const call *k) {
    static rows_fn *const forward[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_rows);
    static rows_fn *const backward[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_grad_rows);
    static const double one = 1;
    const tensor upstream = {.data = (void *)(uintptr_t)&one, .type = F64, .shape = SCALAR};
    linear l = linear_of(k);
    const shape logits = SHAPE(l.samples, l.classes);
    job all = job_of(k, &logits, LABELS, CLASS_WEIGHTS);
    double weight;

    TRY(check_labels(c, &all, &weight));
    all.losses = k->work;
    all.lse = all.losses + l.samples;
    l.dbias = all.lse + l.samples;
    smooth(&all, l.sums, l.dbias + l.classes);
    l.logits = (char *)(l.dbias + l.classes) + smoothing_bytes(k->node, l.classes);
    memset(l.dbias, 0, (size_t)l.classes * sizeof *l.dbias);
    for (int64_t from = 0; from < l.samples; from += PART_ROWS) {
        tensor labels = k->in[LABELS];
        job part = all;

        part.samples = l.samples - from < PART_ROWS ? l.samples - from : PART_ROWS;
        part.batch = part.samples;
        labels.data = (char *)labels.data + (size_t)from * dtype_size(labels.type);
        part.labels = &labels;
        part.losses = all.losses + from;
        part.lse = all.lse + from;
        part.x = part.dx = l.logits;
        part.rows = forward[l.sums];
        compute_logits(&l, from, part.samples);
        each_sample(&part);
        if (!wants_gradients(k)) continue;
        part.dloss = &upstream;
        part.divisor = strcmp(node_string(k->node, "reduction"), "mean") == 0 ? weight : 1;
        part.rows = backward[l.sums];
        each_sample(&part);
        spread_gradient(&l, from, part.samples);
    }
    for (int64_t i = 0; tensor_present(&k->out[3]) && i < l.classes; i++)
        dtype_set_value(l.sums, k->out[3].data, i, l.dbias[i]);
    deliver(k, &all, weight, &absent);
    return OK;
}

static void linear_cross_entropy_products(const call *k, product_fn *each, void *arg) {
    const linear l = linear_of(k);
    const int64_t most = part_rows(l.samples), rest = most ? l.samples % most : 0;

    for (int64_t rows = most; rows > 0; rows = rows == most ? rest : 0) {
        const gemm all[] = {logits_product(&l, 0, rows), hidden_product(&l, 0, rows), weight_product(&l, 0, rows)};
        for (int i = 0; i < 3; i++)
            if (i == 0 || tensor_present(&k->out[i])) each(arg, &all[i]);
    }
}

/* --- negative log likelihood: log probabilities, labels, weights -> loss, divisor --------------------------------- */

/* Where the element of a sample and its label is. */
static int64_t element_of(const job *j, int64_t sample, int64_t label) {
    return (sample / j->inner * j->classes + label) * j->inner + sample % j->inner;
}

static status nll_cpu(ctx *c, const call *k) {
    job j = job_of(k, &k->in[0].shape, 1, 2);
    double weight;

    TRY(check_labels(c, &j, &weight));
    j.losses = k->work;
    for (int64_t i = 0; i < j.samples; i++) {
        int64_t label;
        double w = label_at(&j, i, &label);
        j.losses[i] = label < 0 ? 0 : -w * dtype_get(k->in[0].type, k->in[0].data, element_of(&j, i, label));
    }
    deliver(k, &j, weight, &k->out[1]);
    return OK;
}

static size_t nll_workspace(const node *n) { return 8 * (size_t)shape_count(&n->in[1]->shape); }

static void clear(void *arg, int64_t begin, int64_t end) { memset((char *)arg + begin, 0, (size_t)(end - begin)); }

/* Operands: dloss, labels, divisor, weights. */
static status nll_grad_cpu(ctx *c, const call *k) {
    const tensor *dx = &k->out[0];
    job j = job_of(k, &dx->shape, 1, 3);

    (void)c;
    j.dloss = &k->in[0];
    j.divisor = *(const double *)k->in[2].data;
    parallel_for(tensor_count(dx) * (int64_t)dtype_size(dx->type), 1 << 18, clear, dx->data);
    for (int64_t i = 0; i < j.samples; i++) {
        int64_t label;
        double w = label_at(&j, i, &label);
        if (label >= 0) dtype_set_value(dx->type, dx->data, element_of(&j, i, label), -w * upstream_at(&j, i));
    }
    return OK;
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static status check_shapes(graph *g, const node *n, shape *samples) {
    const shape *x, *t, *w;
    char tx[SHAPE_TEXT], tt[SHAPE_TEXT];

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    x = &n->in[0]->shape;
    t = &n->in[1]->shape;
    w = node_in(n, 2) ? &n->in[2]->shape : NULL;
    if (x->rank < 1) return fail(g->c, E_SHAPE, "%s needs an axis of classes", n->op->name);
    *samples = (shape){.rank = x->rank - 1};
    for (int i = 0; i < x->rank; i++)
        if (i != class_axis(x)) samples->dim[i > class_axis(x) ? i - 1 : i] = x->dim[i];
    if (!shape_equal(samples, t))
        return fail(g->c, E_SHAPE, "labels of shape %s do not go with scores of shape %s", shape_text(t, tt),
                    shape_text(x, tx));
    if (w && (w->rank != 1 || w->dim[0] != x->dim[class_axis(x)]))
        return fail(g->c, E_SHAPE, "weights of shape %s do not go with scores of shape %s", shape_text(w, tt),
                    shape_text(x, tx));
    if (!dtype_is_int(n->in[1]->type))
        return fail(g->c, E_TYPE, "labels must be integers, not %s", dtype_name(n->in[1]->type));
    return OK;
}

static status check_reduction(graph *g, const node *n) {
    const char *r = node_string(n, "reduction");
    if (strcmp(r, "none") == 0 || strcmp(r, "mean") == 0 || strcmp(r, "sum") == 0) return OK;
    return fail(g->c, E_INVALID, "%s knows no reduction \"%s\"", n->op->name, r);
}

static status infer_loss(graph *g, node *n, shape *samples) {
    TRY(check_reduction(g, n));
    TRY(check_shapes(g, n, samples));
    return set_out(g, n, 0, n->in[0]->type, strcmp(node_string(n, "reduction"), "none") == 0 ? samples : &SCALAR);
}

static status infer_cross_entropy(graph *g, node *n) {
    shape samples;
    TRY(infer_loss(g, n, &samples));
    TRY(set_out(g, n, 1, F64, &samples));
    return set_out(g, n, 2, F64, &SCALAR);
}

static status infer_cross_entropy_grad(graph *g, node *n) {
    TRY(require(g, n, 1));
    return set_out(g, n, 0, n->in[1]->type, &n->in[1]->shape);
}

static status infer_nll(graph *g, node *n) {
    shape samples;
    TRY(infer_loss(g, n, &samples));
    return set_out(g, n, 1, F64, &SCALAR);
}

static status infer_nll_grad(graph *g, node *n) {
    const int64_t *dims;
    shape s = {.rank = node_ints(n, "shape", &dims)};
    for (int i = 0; i < s.rank; i++) s.dim[i] = dims[i];
    return set_out(g, n, 0, n->in[0]->type, &s);
}

/* The attributes both losses and their gradients have; room for one more. */
static void loss_attrs(const node *n, attr attrs[5]) {
    int count = 0;
    attrs[count++] = (attr)STRING("reduction", node_string(n, "reduction"));
    if (node_has(n, "ignore_index")) attrs[count++] = (attr)INT("ignore_index", node_int(n, "ignore_index"));
    if (smoothing_of(n) > 0) attrs[count++] = (attr)FLOAT("smoothing", smoothing_of(n));
    attrs[count] = attrs[count + 1] = (attr){.name = NULL};
}

static status grad_cross_entropy(graph *g, const node *n, value *const dy[], value *dx[]) {
    attr attrs[5];
    loss_attrs(n, attrs);
    return emit_with(g, &dx[0], "CrossEntropyGrad", attrs, dy[0], n->in[0], n->in[1], n->out[1], n->out[2],
                     node_in(n, 2));
}

static status grad_nll(graph *g, const node *n, value *const dy[], value *dx[]) {
    const shape *s = &n->in[0]->shape;
    attr attrs[5];
    int last = 0;

    loss_attrs(n, attrs);
    while (attrs[last].name) last++;
    attrs[last] = (attr)INTS("shape", s->rank, s->dim);
    return emit_with(g, &dx[0], "NllGrad", attrs, dy[0], n->in[1], n->out[1], node_in(n, 2));
}

static status infer_linear_cross_entropy(graph *g, node *n) {
    const value *bias = node_in(n, BIAS);
    const shape *h, *w;
    dtype sums;

    for (int i = 0; i <= LABELS; i++) TRY(require(g, n, i));
    h = &n->in[HIDDEN]->shape;
    w = &n->in[WEIGHT]->shape;
    if (h->rank != 2 || w->rank != 2 || h->dim[1] != w->dim[1] || n->in[LABELS]->shape.rank != 1 ||
        n->in[LABELS]->shape.dim[0] != h->dim[0])
        return fail(g->c, E_SHAPE, "%s of operands that do not go together", n->op->name);
    sums = sum_type(n->in[HIDDEN]->type);
    TRY(set_out(g, n, 0, node_int(n, "wide") ? sums : n->in[HIDDEN]->type, &SCALAR));
    TRY(set_out(g, n, 1, sums, h));
    TRY(set_out(g, n, 2, sums, w));
    return bias ? set_out(g, n, 3, sums, &bias->shape) : OK;
}

static status grad_linear_cross_entropy(graph *g, const node *n, value *const dy[], value *dx[]) {
    static const int operands[] = {HIDDEN, WEIGHT, BIAS}; /* of out[1], out[2], out[3] */
    value *up;

    TRY(emit_cast(g, dy[0], n->out[1]->type, &up));
    for (int i = 0; i < 3; i++)
        if (need(n, operands[i])) TRY(emit(g, &dx[operands[i]], "Mul", up, n->out[i + 1]));
    return OK;
}

/* Labels that are probabilities, as F.cross_entropy takes them: -Σ w t log softmax x, the mean over samples. */
static status lower_soft_labels(graph *g, const node *n, value *log_prob, value **out) {
    const shape *s = &n->in[0]->shape;
    const char *reduction = node_string(n, "reduction");
    int64_t axis = class_axis(s), all[MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    value *x;

    if (!shape_equal(s, &n->in[1]->shape))
        return fail(g->c, E_SHAPE, "probabilities for labels need the shape of the scores");
    TRY(emit(g, &x, "Mul", log_prob, n->in[1]));
    if (node_in(n, 2)) {
        shape line = {.rank = s->rank};
        value *w;
        for (int i = 0; i < s->rank; i++) line.dim[i] = i == axis ? s->dim[i] : 1;
        TRY(emit_reshape(g, n->in[2], &line, &w));
        TRY(emit(g, &x, "Mul", x, w));
    }
    TRY(emit(g, &x, "Neg", x));
    if (strcmp(reduction, "none") == 0) return emit_reduce(g, "ReduceSum", x, 1, &axis, false, out);
    TRY(emit_reduce(g, "ReduceSum", x, s->rank, all, false, out));
    if (strcmp(reduction, "sum") == 0) return OK;
    return emit_scaled(g, *out, (double)s->dim[axis] / (double)shape_count(s), out);
}

static status lower_cross_entropy(graph *g, const node *n, value **out) {
    attr attrs[5];
    value *log_prob = NULL;
    bool soft = node_in(n, 1) && dtype_is_float(n->in[1]->type);

    TRY(check_reduction(g, n));
    if (soft || n->n_out > 1)
        TRY(emit_with(g, &log_prob, "LogSoftmax", NODE_ATTRS(INT("axis", class_axis(&n->in[0]->shape))), n->in[0]));
    if (soft) {
        TRY(lower_soft_labels(g, n, log_prob, out));
    } else {
        loss_attrs(n, attrs);
        TRY(graph_emit(g, "CrossEntropy", attrs, n->n_in, n->in, 1, out));
    }
    if (n->n_out > 1) out[1] = log_prob;
    return OK;
}

/* F.cross_entropy with label_smoothing, for labels that are classes. */
static status lower_smoothed(graph *g, const node *n, value **out) {
    const double smoothing = smoothing_of(n);

    TRY(check_reduction(g, n));
    if (!(smoothing >= 0 && smoothing <= 1))
        return fail(g->c, E_INVALID, "%s smooths labels by a number from 0 to 1, not %g", n->op->name, smoothing);
    if (node_in(n, 2) && n->in[2]->needs_grad)
        return fail(g->c, E_UNSUPPORTED, "%s has no gradient for the weights of classes", n->op->name);
    return lower_cross_entropy(g, n, out);
}

static status lower_nll(graph *g, const node *n, value **out) {
    attr attrs[5];
    loss_attrs(n, attrs);
    return graph_emit(g, "Nll", attrs, n->n_in, n->in, 1, out);
}

kernel_fn cross_entropy_cuda, cross_entropy_grad_cuda; /* cuda/loss.cu */
size_t cross_entropy_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr onnx_attrs[] = {NO_DEFAULT("ignore_index", INT), STRING("reduction", "mean"), {.name = NULL}};
static const attr our_attrs[] = {NO_DEFAULT("ignore_index", INT),
                                 NO_DEFAULT("reduction", STRING),
                                 NO_DEFAULT("shape", INTS),
                                 NO_DEFAULT("smoothing", FLOAT),
                                 {.name = NULL}};
static const attr smoothed_attrs[] = {
    NO_DEFAULT("ignore_index", INT), STRING("reduction", "mean"), FLOAT("smoothing", 0), {.name = NULL}};
/* wide: the loss is float32, of 16-bit hidden states. */
static const attr linear_attrs[] = {NO_DEFAULT("ignore_index", INT),
                                    NO_DEFAULT("reduction", STRING),
                                    NO_DEFAULT("smoothing", FLOAT),
                                    INT("wide", 0),
                                    {.name = NULL}};

#define ONNX(name_, since_, outputs)                                                                                   \
    .name = name_, .domain = "", .since = since_, .min_in = 2, .max_in = 3, .max_out = outputs, .dtypes = FLOATS,      \
    .attrs = onnx_attrs
#define OURS(name_, least, most, outputs)                                                                              \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = least, .max_in = most, .max_out = outputs,              \
    .dtypes = FLOATS, .attrs = our_attrs

/* clang-format off */
const op_def loss_ops[] = {
    /* As many outputs as are asked for: log_prob is as large as the logits. */
    {ONNX("SoftmaxCrossEntropyLoss", 12, VARIADIC), .lower = lower_cross_entropy},
    {ONNX("NegativeLogLikelihoodLoss", 12, 1), .lower = lower_nll},
    {.name = "SmoothedCrossEntropy", .domain = ORT_DOMAIN, .since = 1, .min_in = 2, .max_in = 3, .max_out = 1,
     .dtypes = FLOATS, .flags = IN_MODELS, .attrs = smoothed_attrs, .lower = lower_smoothed},
    {OURS("CrossEntropy", 2, 3, 3), .infer = infer_cross_entropy, .grad = grad_cross_entropy,
     .workspace = cross_entropy_workspace, .cpu = cross_entropy_cpu,
     .cuda_workspace = cross_entropy_cuda_workspace, .cuda = cross_entropy_cuda},
    {OURS("CrossEntropyGrad", 5, 6, 1), .flags = INPLACE_1, .infer = infer_cross_entropy_grad,
     .workspace = cross_entropy_grad_workspace,
     .cpu = cross_entropy_grad_cpu, .cuda = cross_entropy_grad_cuda},
    {.name = "LinearCrossEntropy", .domain = ORT_DOMAIN, .since = 1, .min_in = 3, .max_in = LINEAR_OPERANDS,
     .max_out = 4, .dtypes = FLOATS, .attrs = linear_attrs, .infer = infer_linear_cross_entropy,
     .grad = grad_linear_cross_entropy, .workspace = linear_cross_entropy_workspace, .cpu = linear_cross_entropy_cpu,
     .products = linear_cross_entropy_products},
    {OURS("Nll", 2, 3, 2), .infer = infer_nll, .grad = grad_nll, .workspace = nll_workspace, .cpu = nll_cpu},
    {OURS("NllGrad", 3, 4, 1), .infer = infer_nll_grad, .cpu = nll_grad_cpu},
    {0},
};
/* clang-format on */
