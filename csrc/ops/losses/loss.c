/* loss.c -- owns SoftmaxCrossEntropyLoss and NegativeLogLikelihoodLoss, with PyTorch's meaning: a sample whose label is
 * ignore_index counts for nothing; "mean" divides by the weights of the labels that count (NaN when none does). That of a
 * linear layer is in linear_loss.c.
 *
 * For logits x [N, C, D...] and labels t [N, D...], per sample
 *     loss = w_t (lse - x_t),  lse = log Σ exp x          dx = w_t dloss (exp(x - lse) - [i = t])
 * and with smoothing e, where e_i = e w_i / C:
 *     loss = (1 - e) w_t (lse - x_t) + Σ e_i (lse - x_i)
 *     dx = dloss (((1 - e) w_t + Σ e_i) exp(x - lse) - (1 - e) w_t [i = t] - e_i)
 * Backward keeps the logits and one lse a sample, and writes dx in one sweep, over the logits where those are dead:
 * nothing else of their size ever exists. Samples that do not count are not even read. */
#include "ops/losses/loss.h"
#include "core/parallel.h"
#include "core/vmath.h"

#include <inttypes.h>
#include <string.h>

/* --- samples ------------------------------------------------------------------------------------------------------ */

enum { COLUMNS = 256 };

/* The weight of a sample and its label; -1 where it does not count. */
static double label_at(const loss_job *j, int64_t sample, int64_t *label) {
    *label = dtype_get_int(j->labels->type, j->labels->data, sample);
    if (j->ignores && *label == j->ignored) {
        *label = -1;
        return 0;
    }
    return tensor_present(j->weights) ? dtype_get(j->weights->type, j->weights->data, *label) : 1;
}

/* Labels of `count` samples as they are, at most COLUMNS. */
static void read_labels(const loss_job *j, int64_t first, int64_t count, int64_t *labels) {
    if (j->labels->type == I64) memcpy(labels, (const int64_t *)j->labels->data + first, (size_t)count * 8);
    else
        for (int64_t k = 0; k < count; k++) labels[k] = dtype_get_int(j->labels->type, j->labels->data, first + k);
}

/* label_at of `count` neighbours, at most COLUMNS. */
static void labels_at(const loss_job *j, int64_t first, int64_t count, int64_t *labels, double *weights) {
    read_labels(j, first, count, labels);
    for (int64_t k = 0; k < count; k++) {
        if (j->ignores && labels[k] == j->ignored) labels[k] = -1;
        weights[k] = labels[k] < 0 ? 0 : 1;
    }
    if (!tensor_present(j->weights)) return;
    const float *given = j->weights->type == F32 ? j->weights->data : NULL;
    for (int64_t k = 0; given && k < count; k++) weights[k] = labels[k] < 0 ? 0 : (double)given[labels[k]];
    for (int64_t k = 0; !given && k < count; k++)
        if (labels[k] >= 0) weights[k] = dtype_get(j->weights->type, j->weights->data, labels[k]);
}

static double upstream_at(const loss_job *j, int64_t sample) {
    return dtype_get(j->dloss->type, j->dloss->data, j->each ? sample : 0) / j->divisor;
}

#define TEMPLATE "ops/losses/loss_rows.h"
#include "ops/pointwise/each_float.h"

rows_fn *const loss_rows[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_rows);
rows_fn *const loss_grad_rows[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_grad_rows);
add_columns_fn *const loss_add_columns[DTYPE_COUNT] = FLOAT_TABLE(add_columns);
static columns_fn *const loss_columns[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_columns);
static columns_fn *const loss_grad_columns[DTYPE_COUNT] = FLOAT_TABLE(cross_entropy_grad_columns);

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const loss_job *j = arg;
    j->rows(j, begin, end);
}

static void columns_range(void *arg, int64_t begin, int64_t end) {
    const loss_job *j = arg;
    int64_t pieces = (j->inner + COLUMNS - 1) / COLUMNS;

    for (int64_t task = begin; task < end; task++) {
        int64_t from = task % pieces * COLUMNS;
        j->columns(j, task / pieces, from, j->inner - from < COLUMNS ? j->inner - from : COLUMNS);
    }
}

void loss_each_sample(loss_job *j) {
    if (j->inner == 1) {
        parallel_for(j->samples, parallel_rows(8 * j->classes), rows_range, j);
    } else if (j->inner > 0) {
        int64_t width = j->inner < COLUMNS ? j->inner : COLUMNS;
        parallel_for(j->batch * ((j->inner + COLUMNS - 1) / COLUMNS), parallel_rows(8 * j->classes * width),
                     columns_range, j);
    }
}

static double smoothing_of(const node *n) { return node_attr(n, "smoothing") ? node_float(n, "smoothing") : 0; }

loss_job loss_job_of(const call *k, const shape *s, int labels, int weights) {
    loss_job j = {
        .labels = &k->in[labels],
        .weights = loss_operand(k, weights),
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

size_t loss_smoothing_bytes(const node *n, int64_t classes) {
    return smoothing_of(n) > 0 ? sizeof(double) * (size_t)classes : 0;
}

void loss_smooth(loss_job *j, dtype type, void *memory) {
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

status loss_check_labels(ctx *c, const loss_job *j, double *weight) {
    int64_t labels[COLUMNS];
    double weights[COLUMNS];

    if (weight) *weight = 0;
    for (int64_t first = 0; first < j->samples; first += COLUMNS) {
        const int64_t n = j->samples - first < COLUMNS ? j->samples - first : COLUMNS;
        int outside = 0;
        read_labels(j, first, n, labels);
        for (int64_t k = 0; k < n; k++) outside |= (labels[k] < 0) | (labels[k] >= j->classes);
        for (int64_t k = 0; outside && k < n; k++)
            if (((labels[k] < 0) | (labels[k] >= j->classes)) && !(j->ignores && labels[k] == j->ignored))
                return fail(c, E_RUNTIME,
                            "label %" PRId64 " of sample %" PRId64 " is out of range: there are %" PRId64 " classes",
                            labels[k], first + k, j->classes);
        if (!weight) continue;
        labels_at(j, first, n, labels, weights);
        for (int64_t k = 0; k < n; k++) *weight += weights[k];
    }
    return OK;
}

void loss_deliver(const call *k, const loss_job *j, double weight, const tensor *divisor) {
    bool mean = strcmp(node_string(k->node, "reduction"), "mean") == 0;
    const tensor *out = &k->out[0];
    const double nothing = j->own < 1 && j->classes == 0 ? NAN : 0; /* a share of no classes */
    double sum = nothing;

    if (tensor_present(divisor)) *(double *)divisor->data = mean ? weight : 1;
    if (j->each && out->type == F32)
        for (int64_t i = 0; i < j->samples; i++) ((float *)out->data)[i] = (float)(j->losses[i] + nothing);
    else if (j->each)
        for (int64_t i = 0; i < j->samples; i++) dtype_set_value(out->type, out->data, i, j->losses[i] + nothing);
    else
        for (int64_t i = 0; i < j->samples; i++) sum += j->losses[i];
    if (!j->each) dtype_set_value(out->type, out->data, 0, mean ? sum / weight : sum);
}

/* --- cross entropy: logits, labels, weights -> loss, lse, divisor ------------------------------------------------- */

static status cross_entropy_cpu(ctx *c, const call *k) {
    loss_job j = loss_job_of(k, &k->in[0].shape, 1, 2);
    double weight;

    TRY(loss_check_labels(c, &j, &weight));
    j.x = k->in[0].data;
    j.losses = k->work;
    j.lse = tensor_present(&k->out[1]) ? k->out[1].data : j.losses + j.samples;
    j.rows = loss_rows[k->in[0].type];
    j.columns = loss_columns[k->in[0].type];
    loss_smooth(&j, k->in[0].type, j.losses + 2 * j.samples);
    loss_each_sample(&j);
    loss_deliver(k, &j, weight, &k->out[2]);
    return OK;
}

/* The axis of the classes: 1, or 0 for a single sample. */
static int class_axis(const shape *s) { return s->rank > 1; }

/* Losses, lse where it is not asked for, shares. */
static size_t cross_entropy_workspace(const node *n) {
    const shape *s = &n->in[0]->shape;
    return 16 * (size_t)shape_count(&n->in[1]->shape) + loss_smoothing_bytes(n, s->dim[class_axis(s)]);
}

static size_t cross_entropy_grad_workspace(const node *n) {
    const shape *s = &n->in[1]->shape;
    return loss_smoothing_bytes(n, s->dim[class_axis(s)]);
}

/* Operands: dloss, logits, labels, lse, divisor, weights. */
static status cross_entropy_grad_cpu(ctx *c, const call *k) {
    loss_job j = loss_job_of(k, &k->in[1].shape, 2, 5);

    TRY(loss_check_labels(c, &j, NULL));
    j.dloss = &k->in[0];
    j.x = k->in[1].data;
    j.lse = k->in[3].data;
    j.divisor = *(const double *)k->in[4].data;
    j.dx = k->out[0].data;
    j.rows = loss_grad_rows[k->in[1].type];
    j.columns = loss_grad_columns[k->in[1].type];
    loss_smooth(&j, k->in[1].type, k->work);
    loss_each_sample(&j);
    return OK;
}

/* --- negative log likelihood: log probabilities, labels, weights -> loss, divisor --------------------------------- */

/* Where the element of a sample and its label is. */
static int64_t element_of(const loss_job *j, int64_t sample, int64_t label) {
    return (sample / j->inner * j->classes + label) * j->inner + sample % j->inner;
}

/* The losses of neighbours, at most COLUMNS, of one line of samples; the sum of their weights. */
static double nll_samples(const loss_job *j, const tensor *x, int64_t first, int64_t count) {
    const int64_t start = element_of(j, first, 0), step = j->inner == 1 ? j->classes : 1;
    const float *floats = x->type == F32 ? x->data : NULL;
    int64_t labels[COLUMNS];
    double weights[COLUMNS], weight = 0;

    labels_at(j, first, count, labels, weights);
    for (int64_t k = 0; k < count; k++) {
        weight += weights[k];
        const int64_t at = start + k * step + labels[k] * j->inner;
        if (labels[k] < 0) j->losses[first + k] = 0;
        else j->losses[first + k] = -weights[k] * (floats ? (double)floats[at] : dtype_get(x->type, x->data, at));
    }
    return weight;
}

static status nll_cpu(ctx *c, const call *k) {
    loss_job j = loss_job_of(k, &k->in[0].shape, 1, 2);
    double weight = 0;

    TRY(loss_check_labels(c, &j, NULL));
    j.losses = k->work;
    for (int64_t i = 0, n; i < j.samples; i += n) {
        const int64_t rest = j.inner - i % j.inner;
        n = j.inner == 1 ? j.samples - i : rest;
        n = n < COLUMNS ? n : COLUMNS;
        weight += nll_samples(&j, &k->in[0], i, n);
    }
    loss_deliver(k, &j, weight, &k->out[1]);
    return OK;
}

static size_t nll_workspace(const node *n) { return 8 * (size_t)shape_count(&n->in[1]->shape); }

static void clear(void *arg, int64_t begin, int64_t end) { memset((char *)arg + begin, 0, (size_t)(end - begin)); }

/* Operands: dloss, labels, divisor, weights. */
static status nll_grad_cpu(ctx *c, const call *k) {
    const tensor *dx = &k->out[0];
    loss_job j = loss_job_of(k, &dx->shape, 1, 3);

    TRY(loss_check_labels(c, &j, NULL));
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
        return fail(g->c, E_SHAPE, "labels of shape %s do not go with logits of shape %s", shape_text(t, tt),
                    shape_text(x, tx));
    if (w && (w->rank != 1 || w->dim[0] != x->dim[class_axis(x)]))
        return fail(g->c, E_SHAPE, "weights of shape %s do not go with logits of shape %s", shape_text(w, tt),
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
    if (node_int(n, "wide")) TRY(set_out(g, n, 0, F32, &n->out[0]->shape)); /* of logits of 16 bits */
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

void loss_attrs(const node *n, attr attrs[5]) {
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

/* Labels that are probabilities, as F.cross_entropy takes them: -Σ w t log softmax x, the mean over samples. */
static status lower_soft_labels(graph *g, const node *n, value *log_prob, value **out) {
    const shape *s = &n->in[0]->shape;
    const char *reduction = node_string(n, "reduction");
    int64_t axis = class_axis(s), all[MAX_RANK] = {0, 1, 2, 3, 4, 5, 6, 7};
    value *x;

    if (!shape_equal(s, &n->in[1]->shape))
        return fail(g->c, E_SHAPE, "probabilities for labels need the shape of the logits");
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

kernel_fn cross_entropy_cuda, cross_entropy_grad_cuda; /* cuda/kernels/loss.cu */
kernel_fn nll_cuda, nll_grad_cuda;
size_t cross_entropy_cuda_workspace(const node *n);
size_t nll_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr onnx_attrs[] = {NO_DEFAULT("ignore_index", INT), STRING("reduction", "mean"), {.name = NULL}};
static const attr our_attrs[] = {NO_DEFAULT("ignore_index", INT), NO_DEFAULT("reduction", STRING),
                                 NO_DEFAULT("shape", INTS),       NO_DEFAULT("smoothing", FLOAT),
                                 NO_DEFAULT("wide", INT),         {.name = NULL}};
static const attr smoothed_attrs[] = {
    NO_DEFAULT("ignore_index", INT), STRING("reduction", "mean"), FLOAT("smoothing", 0), {.name = NULL}};

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
    {OURS("CrossEntropy", 2, 3, 3), .checked = OPERAND(1), .infer = infer_cross_entropy, .grad = grad_cross_entropy,
     .workspace = cross_entropy_workspace, .cpu = cross_entropy_cpu,
     .cuda_workspace = cross_entropy_cuda_workspace, .cuda = cross_entropy_cuda},
    {OURS("CrossEntropyGrad", 5, 6, 1), .checked = OPERAND(2), .flags = INPLACE_1, .infer = infer_cross_entropy_grad,
     .workspace = cross_entropy_grad_workspace,
     .cpu = cross_entropy_grad_cpu, .cuda = cross_entropy_grad_cuda},
    {OURS("Nll", 2, 3, 2), .checked = OPERAND(1), .infer = infer_nll, .grad = grad_nll,
     .workspace = nll_workspace, .cpu = nll_cpu,
     .cuda_workspace = nll_cuda_workspace, .cuda = nll_cuda},
    {OURS("NllGrad", 3, 4, 1), .checked = OPERAND(1), .infer = infer_nll_grad, .cpu = nll_grad_cpu, .cuda = nll_grad_cuda},
    {0},
};
/* clang-format on */
