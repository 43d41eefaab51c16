/* batchnorm.c -- owns BatchNormalization, as PyTorch has it. For every channel, over its `count` elements in the batch,
 *     y = z scale + bias,  z = (x - mean) r,  r = 1 / sqrt(var + epsilon)
 * with the batch's mean and (biased) variance in training, the running ones otherwise. Training also moves the running
 * mean and variance towards the batch's, the variance unbiased (which ONNX does not say, but PyTorch does), and writes
 * them back where they came from. Backward keeps x and the moments:
 *     dscale = Σ dy z,  dbias = Σ dy,  dx = r scale (dy - dbias / count - z dscale / count)
 * without the last two terms where the moments were given. */
#include "core/parallel.h"
#include "ops/op.h"

#include <math.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

/* Channels worked on together when they are columns, and rows of them summed before they are added up. */
enum { COLUMNS = 256, ROWS = 64 };

typedef struct job job;
/* Channels [begin, end); or from `from` on, `width` of them. */
typedef void channels_fn(const job *j, int64_t begin, int64_t end);
typedef void columns_fn(const job *j, int64_t from, int64_t width);

struct job {
    const void *x, *dy;
    void *out;                       /* y or dx */
    int64_t samples, channels, size; /* size: elements of a channel in a sample */
    double count;
    bool training;
    double *mean, *inverse, *scale, *bias, *a, *b; /* [channels] */
    channels_fn *fn;
    columns_fn *columns;
};

enum { VECTORS = 6 }; /* of those in the workspace */

#define TEMPLATE "ops/norms/batchnorm_channels.h"
#include "ops/pointwise/each_float.h"

static void channels_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    j->fn(j, begin, end);
}

static void columns_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    for (int64_t piece = begin; piece < end; piece++) {
        int64_t from = piece * COLUMNS;
        j->columns(j, from, j->channels - from < COLUMNS ? j->channels - from : COLUMNS);
    }
}

static void each_channel(job *j, channels_fn *fn, columns_fn *columns) {
    j->fn = fn;
    j->columns = columns;
    if (j->size != 1) parallel_for(j->channels, parallel_rows((int64_t)j->count), channels_range, j);
    else
        parallel_for((j->channels + COLUMNS - 1) / COLUMNS, parallel_rows((int64_t)j->count * COLUMNS), columns_range,
                     j);
}

#define EACH_CHANNEL(j, type, name)                                                                                    \
    do {                                                                                                               \
        static channels_fn *const channels_[DTYPE_COUNT] = FLOAT_TABLE(name##_channels);                               \
        static columns_fn *const columns_[DTYPE_COUNT] = FLOAT_TABLE(name##_columns);                                  \
        each_channel((j), channels_[type], columns_[type]);                                                            \
    } while (0)

static size_t vectors_workspace(const node *n) { return VECTORS * sizeof(double) * (size_t)n->in[0]->shape.dim[1]; }

static job job_of(const call *k) {
    const shape *s = &k->in[0].shape;
    job j = {.samples = s->dim[0], .channels = s->dim[1], .size = shape_span(s, 2, s->rank)};
    double **vectors[VECTORS] = {&j.mean, &j.inverse, &j.scale, &j.bias, &j.a, &j.b};

    j.count = fmax((double)(j.samples * j.size), 1); /* an empty batch has moments 0 and gradients 0 */
    for (int i = 0; i < VECTORS; i++) *vectors[i] = (double *)k->work + i * j.channels;
    if (tensor_present(&k->out[0])) j.out = k->out[0].data;
    return j;
}

static void load(double *to, const tensor *from) {
    for (int64_t i = 0, n = tensor_count(from); i < n; i++) to[i] = dtype_get(from->type, from->data, i);
}

static void store(const tensor *to, const double *from) {
    if (!tensor_present(to)) return;
    for (int64_t i = 0, n = tensor_count(to); i < n; i++) dtype_set_value(to->type, to->data, i, from[i]);
}

static void invert(const job *j, const double *variance, double epsilon) {
    for (int64_t c = 0; c < j->channels; c++) j->inverse[c] = 1 / sqrt(variance[c] + epsilon);
}

static status batch_norm_train_cpu(ctx *c, const call *k) {
    job j = job_of(k);

    (void)c;
    j.x = k->in[0].data;
    load(j.scale, &k->in[1]);
    load(j.bias, &k->in[2]);
    EACH_CHANNEL(&j, k->in[0].type, moments);
    j.mean = j.a;
    invert(&j, j.b, node_float(k->node, "epsilon"));
    /* Statistics may be all that is wanted. */
    if (tensor_present(&k->out[0])) EACH_CHANNEL(&j, k->in[0].type, apply);
    store(&k->out[1], j.a);
    store(&k->out[2], j.b);
    return OK;
}

static status batch_norm_infer_cpu(ctx *c, const call *k) {
    job j = job_of(k);

    (void)c;
    j.x = k->in[0].data;
    load(j.scale, &k->in[1]);
    load(j.bias, &k->in[2]);
    load(j.mean, &k->in[3]);
    load(j.b, &k->in[4]);
    invert(&j, j.b, node_float(k->node, "epsilon"));
    EACH_CHANNEL(&j, k->in[0].type, apply);
    return OK;
}

static status batch_norm_grad_cpu(ctx *c, const call *k) {
    bool parameters = tensor_present(&k->out[1]) || tensor_present(&k->out[2]);
    job j = job_of(k);

    (void)c;
    j.dy = k->in[0].data;
    j.x = k->in[1].data;
    j.training = node_int(k->node, "training") != 0;
    load(j.scale, &k->in[2]);
    load(j.mean, &k->in[3]);
    load(j.b, &k->in[4]);
    invert(&j, j.b, node_float(k->node, "epsilon"));
    if (j.training || parameters) EACH_CHANNEL(&j, k->in[1].type, sums);
    if (j.out) EACH_CHANNEL(&j, k->in[1].type, dx);
    store(&k->out[1], j.a);
    store(&k->out[2], j.b);
    return OK;
}

/* Operands: the batch's mean and variance, the running ones; results: the new running ones. */
static status batch_norm_update_cpu(ctx *c, const call *k) {
    double count = (double)node_int(k->node, "count"), keep = node_float(k->node, "momentum");
    double unbias = count / (count - 1);

    (void)c;
    if (count == 0) keep = 1; /* nothing was seen */
    for (int which = 0; which < 2; which++) {
        const tensor *batch = &k->in[which], *running = &k->in[2 + which], *out = &k->out[which];
        if (!tensor_present(out)) continue;
        for (int64_t i = 0, n = tensor_count(out); i < n; i++) {
            double seen = dtype_get(batch->type, batch->data, i) * (which ? unbias : 1);
            double old = dtype_get(running->type, running->data, i);
            dtype_set_value(out->type, out->data, i, keep == 1 ? old : keep * old + (1 - keep) * seen);
        }
    }
    return OK;
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static status infer_batch_norm(graph *g, node *n) {
    const shape *s;
    char text[SHAPE_TEXT];

    for (int i = 0; i < n->op->min_in; i++) TRY(require(g, n, i));
    s = &n->in[0]->shape;
    if (s->rank < 2)
        return fail(g->c, E_SHAPE, "BatchNormalization needs an axis of channels, which %s does not have",
                    shape_text(s, text));
    for (int i = 1; i < n->n_in; i++)
        if (n->in[i]->shape.rank != 1 || n->in[i]->shape.dim[0] != s->dim[1] || !dtype_is_float(n->in[i]->type))
            return fail(g->c, E_SHAPE, "operand %d of BatchNormalization must hold a number for each channel of %s", i,
                        shape_text(s, text));
    return set_out(g, n, 0, n->in[0]->type, s);
}

static status infer_train(graph *g, node *n) {
    const shape *s;
    char text[SHAPE_TEXT];

    TRY(infer_batch_norm(g, n));
    s = &n->in[0]->shape;
    if (s->dim[0] * shape_span(s, 2, s->rank) == 1)
        return fail(g->c, E_SHAPE, "BatchNormalization in training needs more than one element a channel, unlike %s",
                    shape_text(s, text));
    TRY(set_out(g, n, 1, F64, &SHAPE(s->dim[1])));
    return set_out(g, n, 2, F64, &SHAPE(s->dim[1]));
}

static status infer_grad(graph *g, node *n) {
    for (int i = 0; i < n->op->min_in; i++) TRY(require(g, n, i));
    TRY(set_out(g, n, 0, n->in[1]->type, &n->in[1]->shape));
    TRY(set_out(g, n, 1, n->in[2]->type, &n->in[2]->shape));
    return set_out(g, n, 2, n->in[2]->type, &n->in[2]->shape);
}

static status infer_update(graph *g, node *n) {
    for (int i = 0; i < n->op->min_in; i++) TRY(require(g, n, i));
    for (int i = 0; i < 2; i++) {
        if (!shape_equal(&n->in[i]->shape, &n->in[2 + i]->shape))
            return fail(g->c, E_SHAPE, "the running moments of BatchNormalization must hold a number for each channel");
        TRY(set_out(g, n, i, n->in[2 + i]->type, &n->in[2 + i]->shape));
    }
    return OK;
}

static status emit_grad(graph *g, const node *n, value *dy, value *mean, value *variance, bool training, value *dx[]) {
    value *in[] = {dy, n->in[0], n->in[1], mean, variance};
    return graph_emit(g, "BatchNormGrad",
                      NODE_ATTRS(FLOAT("epsilon", node_float(n, "epsilon")), INT("training", training)), 5, in, 3, dx);
}

static status grad_train(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_grad(g, n, dy[0], n->out[1], n->out[2], true, dx);
}

static status grad_infer(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_grad(g, n, dy[0], n->in[3], n->in[4], false, dx);
}

/* The write that is already planned for an input, or NULL. */
static state_write *write_of(graph *g, const value *input) {
    for (state_write *w = g->writes; w; w = w->next)
        if (w->input == input) return w;
    return NULL;
}

/* The new running moments go back to the graph inputs they came from. A module that runs several times in one forward
 * moves them several times: what one run wrote is what the next one reads. */
static status update_running(graph *g, const node *n, value *mean, value *variance, value *moved[2]) {
    value *in[] = {mean, variance, n->in[3], n->in[4]};
    state_write *writes[2];
    const shape *s = &n->in[0]->shape;

    for (int i = 0; i < 2; i++) {
        writes[i] = write_of(g, n->in[3 + i]);
        if (writes[i]) in[2 + i] = writes[i]->value;
    }
    TRY(graph_emit(
        g, "BatchNormUpdate",
        NODE_ATTRS(FLOAT("momentum", node_float(n, "momentum")), INT("count", s->dim[0] * shape_span(s, 2, s->rank))),
        4, in, 2, moved));
    for (int i = 0; i < 2; i++) {
        if (writes[i]) writes[i]->value = moved[i];
        else if (n->in[3 + i]->input >= 0) TRY(graph_add_write(g, n->in[3 + i], moved[i]));
    }
    return OK;
}

static status lower_batch_norm(graph *g, const node *n, value **out) {
    const attr *epsilon = NODE_ATTRS(FLOAT("epsilon", node_float(n, "epsilon")));
    value *train[3], *moved[2];

    for (int i = 0; i < 5; i++) TRY(require(g, n, i));
    if (n->n_out > 3)
        return fail(g->c, E_UNSUPPORTED, "BatchNormalization with %d results, a form before opset 14", n->n_out);
    if (!node_int(n, "training_mode")) {
        if (n->n_out > 1) return fail(g->c, E_UNSUPPORTED, "BatchNormalization with running moments outside training");
        return graph_emit(g, "BatchNormInfer", epsilon, 5, n->in, 1, out);
    }
    TRY(graph_emit(g, "BatchNormTrain", epsilon, 3, n->in, 3, train));
    TRY(update_running(g, n, train[1], train[2], moved));
    out[0] = train[0];
    for (int i = 1; i < n->n_out; i++) out[i] = moved[i - 1];
    return OK;
}

/* cuda/kernels/batchnorm.cu */
kernel_fn batch_norm_train_cuda, batch_norm_infer_cuda, batch_norm_grad_cuda, batch_norm_update_cuda;
size_t batch_norm_train_cuda_workspace(const node *n), batch_norm_grad_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr attrs_9[] = {FLOAT("epsilon", 1e-5), FLOAT("momentum", 0.9), {.name = NULL}};
static const attr attrs_14[] = {
    FLOAT("epsilon", 1e-5), FLOAT("momentum", 0.9), INT("training_mode", 0), {.name = NULL}};
static const attr epsilon_attrs[] = {NO_DEFAULT("epsilon", FLOAT), {.name = NULL}};
static const attr grad_attrs[] = {NO_DEFAULT("epsilon", FLOAT), NO_DEFAULT("training", INT), {.name = NULL}};
static const attr update_attrs[] = {NO_DEFAULT("momentum", FLOAT), NO_DEFAULT("count", INT), {.name = NULL}};

/* As many outputs as are asked for: five are a form that is not understood. */
#define ONNX(since_, attrs_)                                                                                           \
    .name = "BatchNormalization", .domain = "", .since = since_, .min_in = 5, .max_in = 5, .max_out = VARIADIC,        \
    .dtypes = FLOATS, .attrs = attrs_, .lower = lower_batch_norm
#define OURS(name_, operands, outputs, attrs_)                                                                         \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = operands, .max_in = operands, .max_out = outputs,       \
    .dtypes = FLOATS, .attrs = attrs_

/* clang-format off */
const op_def batchnorm_ops[] = {
    {ONNX(9, attrs_9)},
    {ONNX(14, attrs_14)},
    {OURS("BatchNormTrain", 3, 3, epsilon_attrs), .flags = INPLACE_0 | INPLACE_ON_CPU, .infer = infer_train,
     .grad = grad_train, .workspace = vectors_workspace, .cpu = batch_norm_train_cpu, .again = "BatchNormInfer",
     .cuda_workspace = batch_norm_train_cuda_workspace, .cuda = batch_norm_train_cuda},
    {OURS("BatchNormInfer", 5, 1, epsilon_attrs), .flags = INPLACE_0 | INPLACE_ON_CPU, .infer = infer_batch_norm,
     .grad = grad_infer, .workspace = vectors_workspace, .cpu = batch_norm_infer_cpu, .cuda = batch_norm_infer_cuda},
    {OURS("BatchNormGrad", 5, 3, grad_attrs), .flags = INPLACE_0 | INPLACE_ON_CPU, .infer = infer_grad,
     .workspace = vectors_workspace, .cpu = batch_norm_grad_cpu, .cuda_workspace = batch_norm_grad_cuda_workspace,
     .cuda = batch_norm_grad_cuda},
    {OURS("BatchNormUpdate", 4, 2, update_attrs), .flags = NO_GRAD, .infer = infer_update,
     .cpu = batch_norm_update_cpu, .cuda = batch_norm_update_cuda},
    {0},
};
/* clang-format on */
