/* norm.c -- owns LayerNormalization, RMSNormalization, GroupNormalization, InstanceNormalization, LpNormalization,
 * MeanVarianceNormalization, the gradients of the first four, and FusedNorm, what passes/norm_residual.c makes of the
 * first two.
 *
 * A row of n elements is normalised, then scaled:  z = (x - m) r,  y = z scale + bias,  r = 1 / sqrt(var + epsilon),
 * where m is the mean (0 for RMS) and the rows are the last axes (Layer, RMS) or a group of channels with all that is
 * in them (Group, Instance: a group for each channel). Backward keeps x and each row's m and r, and makes in one sweep
 *     dx = r (g - mean g - z mean(g z)),  g = dy scale        (RMS: without mean g)
 *     dscale = Σ dy z,  dbias = Σ dy
 * FusedNorm makes x itself, as a sum with a residual of what may be left of another value by a dropout
 * (FusedNormRandom), and gives it back; its result may be narrowed to 16 bits. A gradient may be added to dx, and dy be
 * of 16 bits where x is float32. What the operators that this stands for would store is rounded to its type.
 *
 * Rows are summed in chunks whose number depends on the shape alone, and the chunks in order: the bits do not depend on
 * the number of threads. */
#include "ops/norms/norm.h"
#include "core/parallel.h"
#include "core/philox.h"
#include "ops/pointwise/dropout.h"

#include <math.h>

/* --- kernels ------------------------------------------------------------------------------------------------------ */

typedef struct job job;
typedef void rows_fn(const job *j, int64_t begin, int64_t end);
typedef void chunk_fn(const job *j, int64_t chunk, int64_t begin, int64_t end);
typedef void join_fn(const job *j, int64_t which, int64_t from, int64_t width, double *sums);

/* Random words that are drawn at a time. */
enum { WORDS = 1024 };

struct job {
    const void *x, *dy;
    const void *other;        /* what is added to x, or to dx; NULL: nothing */
    void *out;                /* y or dx */
    void *sum, *narrow;       /* x and the other; y in 16 bits */
    dtype from, to;           /* of x, or of dy; of `narrow` */
    const void *scale, *bias; /* as the kernel computes: float, or double for float64 */
    void *means, *inverses;   /* [rows] of the same type; means may be NULL where they are 0 */
    bool centred, drops;
    double epsilon, factor; /* of what the dropout keeps */
    uint64_t seed;
    uint32_t key, threshold;
    int64_t rows, width;            /* elements of a row */
    int64_t groups, channels, size; /* rows of a sample; channels of a row, elements of a channel */
    int64_t chunks;                 /* of the rows */
    void *partial;                  /* [chunks, 2, width] */
    double *sums;                   /* [rows, channels of a group, 2] */
    rows_fn *fn;
    chunk_fn *chunk;
};

#define TEMPLATE "ops/norms/norm_rows.h"
#include "ops/pointwise/each_float.h"

const void *norm_as_computed(const tensor *t, dtype type, void *buffer) {
    if (!tensor_present(t)) return NULL;
    if (t->type == type) return t->data;
    for (int64_t i = 0, n = tensor_count(t); i < n; i++)
        dtype_set_value(type, buffer, i, dtype_get(t->type, t->data, i));
    return buffer;
}

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    j->fn(j, begin, end);
}

static void chunks_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    for (int64_t p = begin; p < end; p++) j->chunk(j, p, j->rows * p / j->chunks, j->rows * (p + 1) / j->chunks);
}

static const tensor absent = {.type = DT_NONE};
static const tensor *operand(const call *k, int i) { return i < k->n_in ? &k->in[i] : &absent; }
static const tensor *result(const call *k, int i) { return i < k->n_out ? &k->out[i] : &absent; }

/* --- the last axes ------------------------------------------------------------------------------------------------ */

/* Rows of a chunk, chunks, and columns of theirs that are joined together. */
enum { CHUNK_ROWS = 64, MOST_CHUNKS = 32, COLUMNS = 256 };

static int first_axis(const node *n, const shape *s) {
    int64_t axis = node_int(n, "axis");
    return (int)(axis < 0 ? axis + s->rank : axis);
}

static void set_rows(job *j, const node *n, const shape *s) {
    int axis = first_axis(n, s);
    j->rows = shape_span(s, 0, axis);
    j->width = shape_span(s, axis, s->rank);
    j->chunks = j->rows / CHUNK_ROWS < 1 ? 1 : j->rows / CHUNK_ROWS < MOST_CHUNKS ? j->rows / CHUNK_ROWS : MOST_CHUNKS;
}

/* Scale and bias, when they have to be converted. */
static size_t layer_workspace(const node *n) {
    return 2 * dtype_size(norm_computed_in(n->in[0]->type)) * (size_t)shape_count(&n->in[1]->shape);
}

/* For all that the last axes have, of rows in `type`. */
static job layer_job(const call *k, bool centred, dtype type, const tensor *means, const tensor *inverses) {
    const dtype computed = norm_computed_in(type);
    job j = {.x = k->in[0].data, .centred = centred, .epsilon = node_float(k->node, "epsilon")};

    set_rows(&j, k->node, &k->in[0].shape);
    j.out = tensor_present(&k->out[0]) ? k->out[0].data : NULL;
    j.scale = norm_as_computed(operand(k, 1), computed, k->work);
    j.bias = norm_as_computed(operand(k, 2), computed, (char *)k->work + (size_t)j.width * dtype_size(computed));
    j.means = tensor_present(means) ? means->data : NULL;
    j.inverses = tensor_present(inverses) ? inverses->data : NULL;
    return j;
}

static status run_layer(job *j, dtype type) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(norm_rows);
    j->fn = rows[type];
    parallel_for(j->rows, parallel_rows(4 * j->width), rows_range, j);
    return OK;
}

static status layer_norm_cpu(ctx *c, const call *k) {
    job j = layer_job(k, true, k->in[0].type, result(k, 1), result(k, 2));
    (void)c;
    return run_layer(&j, k->in[0].type);
}

static status rms_norm_cpu(ctx *c, const call *k) {
    job j = layer_job(k, false, k->in[0].type, &absent, result(k, 1));
    (void)c;
    return run_layer(&j, k->in[0].type);
}

/* FusedNorm: x, scale, bias, residual -> y, means, inverses, x + residual, y in 16 bits. */
enum { RESIDUAL = 3, Y = 0, SUM_OUT = 3, NARROW = 4 };

static bool is_unused(const node *n, int i) { return i >= n->n_out || n->out[i]->n_uses == 0; }

/* The sum, where it is neither wanted nor has y's memory. */
static size_t sum_bytes(const node *n) {
    const value *residual = node_in(n, RESIDUAL);
    if (!residual || !is_unused(n, SUM_OUT) || !is_unused(n, Y)) return 0;
    return (size_t)shape_count(&residual->shape) * dtype_size(residual->type);
}

static size_t fused_norm_scales(const node *n) { return (layer_workspace(n) + 63) & ~(size_t)63; }
static size_t fused_norm_workspace(const node *n) { return fused_norm_scales(n) + sum_bytes(n); }

static status fused_norm_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *residual = operand(k, RESIDUAL), *sum = result(k, SUM_OUT);
    const dtype type = tensor_present(residual) ? residual->type : x->type;
    const double ratio = node_float(k->node, "ratio");
    job j = layer_job(k, node_int(k->node, "centred"), type, result(k, 1), result(k, 2));

    (void)c;
    j.from = x->type;
    j.drops = ratio > 0;
    j.factor = dropout_factor(ratio);
    j.threshold = dropout_threshold(ratio);
    j.seed = k->seed;
    j.key = (uint32_t)node_int(k->node, "key");
    if (tensor_present(residual)) {
        j.other = residual->data;
        j.sum = tensor_present(sum) ? sum->data : j.out ? j.out : (char *)k->work + fused_norm_scales(k->node);
    }
    if (tensor_present(result(k, NARROW))) {
        j.narrow = k->out[NARROW].data;
        j.to = k->out[NARROW].type;
    }
    return run_layer(&j, type);
}

/* Operands of both gradients: dy, x, scale, inverses, means, and what dx is added to. */
enum { DY, X, SCALE, INVERSES, MEANS, ADDED };

typedef struct join {
    const job *j;
    const tensor *to[2]; /* the gradients of scale and bias; either may be absent */
    join_fn *fn;
} join;

static void join_chunks(void *arg, int64_t begin, int64_t end) {
    const join *p = arg;
    double sums[COLUMNS];

    for (int64_t from = begin * COLUMNS; from < end * COLUMNS && from < p->j->width; from += COLUMNS) {
        int64_t width = p->j->width - from < COLUMNS ? p->j->width - from : COLUMNS;
        for (int which = 0; which < 2; which++) {
            if (!tensor_present(p->to[which])) continue;
            p->fn(p->j, which, from, width, sums);
            for (int64_t k = 0; k < width; k++)
                dtype_set_value(p->to[which]->type, p->to[which]->data, from + k, sums[k]);
        }
    }
}

/* The converted scale, then the chunks. */
static size_t layer_grad_workspace(const node *n) {
    job j = {.rows = 0};
    set_rows(&j, n, &n->in[X]->shape);
    return (size_t)((1 + 2 * j.chunks) * j.width) * dtype_size(norm_computed_in(n->in[X]->type));
}

static status run_layer_grad(const call *k, bool centred) {
    static chunk_fn *const chunks[DTYPE_COUNT] = FLOAT_TABLE(norm_grad_rows);
    static join_fn *const joins[DTYPE_COUNT] = FLOAT_TABLE(join_columns);
    const tensor *x = &k->in[X], *dscale = result(k, 1), *dbias = result(k, 2);
    dtype type = norm_computed_in(x->type);
    job j = {.x = x->data, .dy = k->in[DY].data, .from = k->in[DY].type, .centred = centred};

    if (tensor_present(&k->out[0])) j.out = k->out[0].data;
    if (tensor_present(operand(k, ADDED))) j.other = k->in[ADDED].data;
    set_rows(&j, k->node, &x->shape);
    j.scale = norm_as_computed(&k->in[SCALE], type, k->work);
    j.inverses = k->in[INVERSES].data;
    j.means = centred ? k->in[MEANS].data : NULL;
    if (tensor_present(dscale) || tensor_present(dbias))
        j.partial = (char *)k->work + (size_t)j.width * dtype_size(type);
    j.chunk = chunks[x->type];
    parallel_for(j.chunks, 1 + parallel_rows(4 * j.width) / CHUNK_ROWS, chunks_range, &j);
    if (j.partial) {
        join p = {&j, {dscale, dbias}, joins[x->type]};
        parallel_for((j.width + COLUMNS - 1) / COLUMNS, parallel_rows(j.chunks * COLUMNS), join_chunks, &p);
    }
    return OK;
}

static status layer_norm_grad_cpu(ctx *c, const call *k) {
    (void)c;
    return run_layer_grad(k, true);
}

static status rms_norm_grad_cpu(ctx *c, const call *k) {
    (void)c;
    return run_layer_grad(k, false);
}

/* --- groups of channels ------------------------------------------------------------------------------------------- */

static void set_groups(job *j, const node *n, const shape *s) {
    j->groups = node_int(n, "groups");
    j->channels = j->groups ? s->dim[1] / j->groups : 0;
    j->size = shape_span(s, 2, s->rank);
    j->rows = s->dim[0] * j->groups;
    j->width = j->channels * j->size;
}

static status group_norm_cpu(ctx *c, const call *k) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(group_rows);
    const tensor *x = &k->in[0];
    dtype type = norm_computed_in(x->type);
    job j = {.x = x->data, .out = k->out[0].data, .epsilon = node_float(k->node, "epsilon")};

    (void)c;
    set_groups(&j, k->node, &x->shape);
    j.scale = norm_as_computed(&k->in[1], type, k->work);
    j.bias = norm_as_computed(&k->in[2], type, (char *)k->work + (size_t)x->shape.dim[1] * dtype_size(type));
    j.means = tensor_present(&k->out[1]) ? k->out[1].data : NULL;
    j.inverses = tensor_present(&k->out[2]) ? k->out[2].data : NULL;
    j.fn = rows[x->type];
    parallel_for(j.rows, parallel_rows(4 * j.width), rows_range, &j);
    return OK;
}

/* The sums of every sample's channels, then the converted scale. */
static size_t group_grad_workspace(const node *n) {
    const shape *s = &n->in[X]->shape;
    return (size_t)(2 * s->dim[0] * s->dim[1] + s->dim[1]) * sizeof(double);
}

static status group_norm_grad_cpu(ctx *c, const call *k) {
    static rows_fn *const rows[DTYPE_COUNT] = FLOAT_TABLE(group_grad_rows);
    const tensor *x = &k->in[X], *dscale = &k->out[1], *dbias = &k->out[2];
    const int64_t samples = x->shape.dim[0], channels = x->shape.dim[1];
    job j = {.x = x->data, .dy = k->in[DY].data, .sums = k->work};

    (void)c;
    if (tensor_present(&k->out[0])) j.out = k->out[0].data;
    set_groups(&j, k->node, &x->shape);
    j.scale = norm_as_computed(&k->in[SCALE], norm_computed_in(x->type), j.sums + 2 * samples * channels);
    j.inverses = k->in[INVERSES].data;
    j.means = k->in[MEANS].data;
    j.fn = rows[x->type];
    parallel_for(j.rows, parallel_rows(4 * j.width), rows_range, &j);
    for (int64_t s = 1; s < samples; s++) /* sample by sample, as they lie */
        for (int64_t i = 0; i < 2 * channels; i++) j.sums[i] += j.sums[2 * s * channels + i];
    for (int64_t i = 0; samples && i < channels; i++) {
        if (tensor_present(dscale)) dtype_set_value(dscale->type, dscale->data, i, j.sums[2 * i]);
        if (tensor_present(dbias)) dtype_set_value(dbias->type, dbias->data, i, j.sums[2 * i + 1]);
    }
    return OK;
}

/* --- rules of the last axes --------------------------------------------------------------------------------------- */

/* A scale or bias that repeats along some of the normalised axes is made as large as they are. */
static status fit_operand(graph *g, const node *n, const shape *normalised, int i, value **v) {
    char tn[SHAPE_TEXT], tv[SHAPE_TEXT];
    value *sizes;

    *v = node_in(n, i);
    if (!*v) return OK;
    if ((*v)->shape.rank <= n->in[0]->shape.rank) {
        if (shape_count(&(*v)->shape) == shape_count(normalised)) return OK;
        TRY(graph_ints(g, normalised->rank, normalised->dim, &sizes));
        TRY(emit(g, v, "Expand", *v, sizes));
        if (shape_count(&(*v)->shape) == shape_count(normalised)) return OK;
    }
    return fail(g->c, E_SHAPE, "%s over axes of shape %s cannot use a scale or bias of shape %s", n->op->name,
                shape_text(normalised, tn), shape_text(&n->in[i]->shape, tv));
}

static shape normalised_shape(const node *n) {
    const shape *s = &n->in[0]->shape;
    int axis = first_axis(n, s);
    shape r = {.rank = s->rank - axis};
    for (int i = axis; i < s->rank; i++) r.dim[i - axis] = s->dim[i];
    return r;
}

static status check_axis(graph *g, const node *n) {
    int axis;
    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    if (n->in[0]->shape.rank == 0) return fail(g->c, E_SHAPE, "%s of a scalar: there is no axis", n->op->name);
    return shape_axis(g->c, node_int(n, "axis"), n->in[0]->shape.rank, &axis);
}

/* The form the kernels know: scale and bias with one number for each normalised element. */
static status lower_layer(graph *g, const node *n, value **out) {
    value *in[3] = {n->in[0], NULL, NULL};
    shape normalised;

    TRY(check_axis(g, n));
    normalised = normalised_shape(n);
    for (int i = 1; i < 3; i++) TRY(fit_operand(g, n, &normalised, i, &in[i]));
    if (in[1] == node_in(n, 1) && in[2] == node_in(n, 2)) return OK;
    return graph_emit_op(g, n->op, n->attrs, n->n_in, in, n->n_out, out);
}

/* Y has the type of the scale; computed in the wider of the two. */
static status lower_rms(graph *g, const node *n, value **out) {
    value *x = n->in[0], *scale = node_in(n, 1);
    dtype wide;

    TRY(lower_layer(g, n, out));
    if (out[0] || x->type == scale->type) return OK;
    wide = x->type == F64 || scale->type == F64 ? F64 : F32;
    TRY(emit_cast(g, x, wide, &x));
    TRY(emit_cast(g, scale, wide, &scale));
    TRY(emit_with(g, &x, "RMSNormalization",
                  NODE_ATTRS(INT("axis", node_int(n, "axis")), FLOAT("epsilon", node_float(n, "epsilon"))), x, scale));
    return emit_cast(g, x, n->in[1]->type, out);
}

static status infer_rows(graph *g, node *n, dtype type, shape *per_row) {
    char tx[SHAPE_TEXT], ts[SHAPE_TEXT];
    int axis;

    TRY(check_axis(g, n));
    *per_row = n->in[0]->shape;
    axis = first_axis(n, per_row);
    for (int i = 1; i < n->n_in && i < RESIDUAL; i++) {
        if (!n->in[i]) continue;
        if (!dtype_is_float(n->in[i]->type))
            return fail(g->c, E_TYPE, "%s scales with %s", n->op->name, dtype_name(n->in[i]->type));
        if (shape_count(&n->in[i]->shape) != shape_span(per_row, axis, per_row->rank))
            return fail(g->c, E_SHAPE, "%s over the axes from %d on of %s cannot use a scale or bias of shape %s",
                        n->op->name, axis, shape_text(per_row, tx), shape_text(&n->in[i]->shape, ts));
    }
    for (int i = axis; i < per_row->rank; i++) per_row->dim[i] = 1;
    return set_out(g, n, 0, type, &n->in[0]->shape);
}

static status infer_layer(graph *g, node *n) {
    shape per_row;
    TRY(infer_rows(g, n, n->in[0]->type, &per_row));
    TRY(set_out(g, n, 1, norm_computed_in(n->in[0]->type), &per_row));
    return set_out(g, n, 2, norm_computed_in(n->in[0]->type), &per_row);
}

static status infer_rms(graph *g, node *n) {
    shape per_row;
    TRY(infer_rows(g, n, n->in[0]->type, &per_row));
    return set_out(g, n, 1, norm_computed_in(n->in[0]->type), &per_row);
}

/* Only of what the kernels have: a type, or 16 bits where that is float32. */
static status check_narrow(graph *g, const node *n, dtype type, dtype other) {
    if (other == type || (type == F32 && dtype_is_narrow(other))) return OK;
    return fail(g->c, E_TYPE, "%s of %s does not take or make %s", n->op->name, dtype_name(type), dtype_name(other));
}

static status infer_fused_norm(graph *g, node *n) {
    const value *residual = node_in(n, RESIDUAL);
    const dtype type = (residual ? residual : n->in[0])->type, narrow = (dtype)node_int(n, "narrow");
    shape per_row;

    TRY(infer_rows(g, n, type, &per_row));
    TRY(check_narrow(g, n, type, n->in[0]->type));
    TRY(set_out(g, n, 1, norm_computed_in(type), &per_row));
    TRY(set_out(g, n, 2, norm_computed_in(type), &per_row));
    if (residual) TRY(set_out(g, n, SUM_OUT, type, &residual->shape));
    if (narrow == DT_NONE) return OK;
    TRY(check_narrow(g, n, type, narrow));
    return set_out(g, n, NARROW, narrow, &n->in[0]->shape);
}

static status infer_grad(graph *g, node *n) {
    for (int i = 0; i <= INVERSES; i++) TRY(require(g, n, i));
    TRY(check_narrow(g, n, n->in[X]->type, n->in[DY]->type));
    TRY(set_out(g, n, 0, n->in[X]->type, &n->in[X]->shape));
    TRY(set_out(g, n, 1, n->in[SCALE]->type, &n->in[SCALE]->shape));
    return set_out(g, n, 2, n->in[SCALE]->type, &n->in[SCALE]->shape);
}

static status no_gradient_of_moments(graph *g, const node *n, value *const dy[]) {
    for (int i = 1; i < n->n_out; i++)
        if (dy[i]) return fail(g->c, E_UNSUPPORTED, "%s has no gradient for its output %d", n->op->name, i);
    return OK;
}

static status grad_layer(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[] = {dy[0], n->in[0], n->in[1], n->out[2], n->out[1]}, *d[3];
    TRY(no_gradient_of_moments(g, n, dy));
    TRY(graph_emit(g, "LayerNormGrad", NODE_ATTRS(INT("axis", node_int(n, "axis"))), 5, in, 3, d));
    for (int i = 0; i < n->n_in; i++) dx[i] = d[i];
    return OK;
}

static status grad_rms(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[] = {dy[0], n->in[0], n->in[1], n->out[1]};
    TRY(no_gradient_of_moments(g, n, dy));
    return graph_emit(g, "RMSNormGrad", NODE_ATTRS(INT("axis", node_int(n, "axis"))), 4, in, 2, dx);
}

/* --- rules of groups ---------------------------------------------------------------------------------------------- */

static status emit_group_norm(graph *g, const node *n, int64_t groups, value *scale, value *bias, value **out) {
    return emit_with(g, out, "GroupNorm", NODE_ATTRS(INT("groups", groups), FLOAT("epsilon", node_float(n, "epsilon"))),
                     n->in[0], scale, bias);
}

static status check_channels(graph *g, const node *n) {
    char text[SHAPE_TEXT];
    for (int i = 0; i < 3; i++) TRY(require(g, n, i));
    if (n->in[0]->shape.rank >= 2) return OK;
    return fail(g->c, E_SHAPE, "%s needs an axis of channels, which %s does not have", n->op->name,
                shape_text(&n->in[0]->shape, text));
}

static status lower_instance(graph *g, const node *n, value **out) {
    TRY(check_channels(g, n));
    return emit_group_norm(g, n, n->in[0]->shape.dim[1], n->in[1], n->in[2], out);
}

static status lower_group(graph *g, const node *n, value **out) {
    TRY(check_channels(g, n));
    return emit_group_norm(g, n, node_int(n, "num_groups"), n->in[1], n->in[2], out);
}

static status infer_group(graph *g, node *n) {
    int64_t groups = node_int(n, "groups");
    const shape *s;
    shape rows;

    TRY(check_channels(g, n));
    s = &n->in[0]->shape;
    if (groups < 0 || (groups == 0 && s->dim[1]) || (groups && s->dim[1] % groups))
        return fail(g->c, E_SHAPE, "%lld channels cannot be in %lld groups of one size", (long long)s->dim[1],
                    (long long)groups);
    for (int i = 1; i < 3; i++)
        if (n->in[i]->shape.rank != 1 || n->in[i]->shape.dim[0] != s->dim[1] || !dtype_is_float(n->in[i]->type))
            return fail(g->c, E_SHAPE, "%s needs a number for each of %lld channels", n->op->name,
                        (long long)s->dim[1]);
    rows = SHAPE(s->dim[0], groups);
    TRY(set_out(g, n, 0, n->in[0]->type, s));
    TRY(set_out(g, n, 1, norm_computed_in(n->in[0]->type), &rows));
    return set_out(g, n, 2, norm_computed_in(n->in[0]->type), &rows);
}

static status grad_group(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[] = {dy[0], n->in[0], n->in[1], n->out[2], n->out[1]};
    return graph_emit(g, "GroupNormGrad", NODE_ATTRS(INT("groups", node_int(n, "groups"))), 5, in, 3, dx);
}

/* --- compositions ------------------------------------------------------------------------------------------------- */

/* x / norm, and x where the norm is 0. */
static status lower_lp(graph *g, const node *n, value **out) {
    int64_t p = node_int(n, "p"), axis = node_int(n, "axis");
    value *x = n->in[0], *norm, *zero, *one, *none;

    if (p != 1 && p != 2) return fail(g->c, E_INVALID, "LpNormalization with p = %lld: it is 1 or 2", (long long)p);
    TRY(emit_reduce(g, p == 1 ? "ReduceL1" : "ReduceL2", x, 1, &axis, true, &norm));
    TRY(graph_scalar(g, x->type, 0, &zero));
    TRY(graph_scalar(g, x->type, 1, &one));
    TRY(emit(g, &none, "Equal", norm, zero));
    TRY(emit(g, &norm, "Where", none, one, norm));
    return emit_with(g, out, "NormQuotient", NODE_ATTRS(INT("axis", axis), INT("p", p)), x, norm);
}

static status lower_mean_variance(graph *g, const node *n, value **out) {
    const int64_t *axes;
    int count = node_ints(n, "axes", &axes);
    value *x = n->in[0], *mean, *centred, *square, *deviation, *tiny;

    TRY(emit_reduce(g, "ReduceMean", x, count, axes, true, &mean));
    TRY(emit(g, &centred, "Sub", x, mean));
    TRY(emit(g, &square, "Mul", centred, centred));
    TRY(emit_reduce(g, "ReduceMean", square, count, axes, true, &square));
    TRY(emit(g, &deviation, "Sqrt", square));
    TRY(graph_scalar(g, x->type, 1e-9, &tiny));
    TRY(emit(g, &deviation, "Add", deviation, tiny));
    return emit(g, out, "Div", centred, deviation);
}

kernel_fn layer_norm_cuda, rms_norm_cuda, fused_norm_cuda, layer_norm_grad_cuda,
    rms_norm_grad_cuda; /* cuda/kernels/norm.cu */
size_t norm_grad_cuda_workspace(const node *n);
kernel_fn group_norm_cuda, group_norm_grad_cuda; /* cuda/kernels/groupnorm.cu */
size_t group_norm_grad_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

static const int64_t images[] = {0, 2, 3};
static const attr layer_attrs[] = {INT("axis", -1), FLOAT("epsilon", 1e-5), INT("stash_type", 1), {.name = NULL}};
/* `narrow` is a type of 16 bits, or 0. */
static const attr fused_attrs[] = {NO_DEFAULT("axis", INT),
                                   NO_DEFAULT("epsilon", FLOAT),
                                   NO_DEFAULT("centred", INT),
                                   INT("narrow", DT_NONE),
                                   FLOAT("ratio", 0),
                                   INT("key", 0),
                                   {.name = NULL}};
static const attr axis_attrs[] = {INT("axis", -1), {.name = NULL}};
static const attr group_attrs[] = {
    FLOAT("epsilon", 1e-5), NO_DEFAULT("num_groups", INT), INT("stash_type", 1), {.name = NULL}};
static const attr instance_attrs[] = {FLOAT("epsilon", 1e-5), {.name = NULL}};
static const attr groups_attrs[] = {NO_DEFAULT("groups", INT), NO_DEFAULT("epsilon", FLOAT), {.name = NULL}};
static const attr lp_attrs[] = {INT("axis", -1), INT("p", 2), {.name = NULL}};
static const attr mean_variance_attrs[] = {INTS("axes", 3, images), {.name = NULL}};

#define OP(name_, domain_, since_, least, most, outputs, attrs_)                                                       \
    .name = name_, .domain = domain_, .since = since_, .min_in = least, .max_in = most, .max_out = outputs,            \
    .dtypes = FLOATS, .attrs = attrs_
#define FUSED(name_, flags_)                                                                                           \
    OP(name_, ORT_DOMAIN, 1, 2, 4, 5, fused_attrs), .flags = INPLACE_0 | (flags_), .infer = infer_fused_norm,          \
        .workspace = fused_norm_workspace, .cpu = fused_norm_cpu, .cuda_workspace = sum_bytes, .cuda = fused_norm_cuda

/* clang-format off */
const op_def norm_ops[] = {
    {OP("LayerNormalization", "", 17, 2, 3, 3, layer_attrs), .flags = INPLACE_0, .lower = lower_layer,
     .infer = infer_layer, .grad = grad_layer, .workspace = layer_workspace, .cpu = layer_norm_cpu,
     .cuda = layer_norm_cuda},
    {OP("LayerNormGrad", ORT_DOMAIN, 1, 5, 6, 3, axis_attrs), .flags = INPLACE_0, .infer = infer_grad,
     .workspace = layer_grad_workspace, .cpu = layer_norm_grad_cpu,
     .cuda_workspace = norm_grad_cuda_workspace, .cuda = layer_norm_grad_cuda},
    /* The second output, each row's r, is ours. */
    {OP("RMSNormalization", "", 23, 2, 2, 2, layer_attrs), .flags = INPLACE_0, .lower = lower_rms, .infer = infer_rms,
     .grad = grad_rms, .workspace = layer_workspace, .cpu = rms_norm_cpu, .cuda = rms_norm_cuda},
    {OP("RMSNormGrad", ORT_DOMAIN, 1, 4, 6, 2, axis_attrs), .flags = INPLACE_0, .infer = infer_grad,
     .workspace = layer_grad_workspace, .cpu = rms_norm_grad_cpu,
     .cuda_workspace = norm_grad_cuda_workspace, .cuda = rms_norm_grad_cuda},
    {FUSED("FusedNorm", 0)},
    {FUSED("FusedNormRandom", RANDOM)},

    {OP("InstanceNormalization", "", 6, 3, 3, 1, instance_attrs), .lower = lower_instance},
    /* The form of opset 18, with a scale for each group, was withdrawn. */
    {OP("GroupNormalization", "", 21, 3, 3, 1, group_attrs), .lower = lower_group},
    {OP("GroupNorm", ORT_DOMAIN, 1, 3, 3, 3, groups_attrs), .flags = INPLACE_0 | IN_MODELS, .infer = infer_group,
     .grad = grad_group, .workspace = layer_workspace, .cpu = group_norm_cpu,
     .cuda = group_norm_cuda},
    {OP("GroupNormGrad", ORT_DOMAIN, 1, 5, 5, 3, groups_attrs), .flags = INPLACE_0, .infer = infer_grad,
     .workspace = group_grad_workspace, .cpu = group_norm_grad_cpu,
     .cuda_workspace = group_norm_grad_cuda_workspace, .cuda = group_norm_grad_cuda},

    {OP("LpNormalization", "", 1, 1, 1, 1, lp_attrs), .lower = lower_lp},
    {OP("MeanVarianceNormalization", "", 9, 1, 1, 1, mean_variance_attrs), .lower = lower_mean_variance},
    {0},
};
/* clang-format on */
