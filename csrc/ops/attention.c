/* attention.c -- owns MaskedSoftmax, and MaskedSoftmaxDropout, which is to it what SoftmaxDropout is to Softmax
 * (ops/softmax.c). Along the last axis, over the elements that the mask allows:
 *     y = exp(x - m) / s, and 0 elsewhere        dx = y * (dy - Σ dy y), which is SoftmaxGrad
 * with m = max x and s = Σ exp(x - m). A row in which nothing is allowed, or nothing but -∞ is, gives zeros, and zeros
 * as its gradient. Without a mask everything is allowed. The mask is broadcast and read where it lies: it is never made
 * as large as x. Backward needs y only. */
#include "core/parallel.h"
#include "core/vmath.h"
#include "ops/dropout.h"
#include "ops/op.h"

#include <string.h>

/* --- kernel ------------------------------------------------------------------------------------------------------- */

typedef void hide_fn(const void *x, const uint8_t *allowed, void *y, int64_t n);
typedef void softmax_fn(const void *x, void *y, int64_t n);

typedef struct job {
    const char *x;
    char *y;
    tensor mask; /* seen with x's shape; absent */
    int64_t length, size;
    hide_fn *hide;
    softmax_fn *softmax;
    void *dropped; /* or NULL */
    dropout_run drop;
} job;

#define TEMPLATE "ops/attention_rows.h"
#include "ops/each_float.h"

/* Goes along the rows of a tensor that may be broadcast. */
typedef struct walk {
    const tensor *t;
    const uint8_t *at;
    int64_t index[MAX_RANK];
} walk;

static walk walk_from(const tensor *t, int64_t row) {
    walk w = {.t = t, .at = t->data};
    for (int i = t->shape.rank - 2; i >= 0; i--) {
        w.index[i] = row % t->shape.dim[i];
        w.at += w.index[i] * t->stride[i];
        row /= t->shape.dim[i];
    }
    return w;
}

static void walk_on(walk *w) {
    for (int i = w->t->shape.rank - 2; i >= 0; i--) {
        w->at += w->t->stride[i];
        if (++w->index[i] < w->t->shape.dim[i]) return;
        w->at -= w->t->stride[i] * w->t->shape.dim[i];
        w->index[i] = 0;
    }
}

/* x into y where the mask allows it, -∞ elsewhere. */
static void hide_rows(const job *j, int64_t begin, int64_t end) {
    const bool whole_rows = j->mask.stride[j->mask.shape.rank - 1] == 0;
    walk w = walk_from(&j->mask, begin);

    for (int64_t row = begin; row < end; row++, walk_on(&w)) {
        const char *x = j->x + row * j->length * j->size;
        char *y = j->y + row * j->length * j->size;
        if (!whole_rows) j->hide(x, w.at, y, j->length);
        else if (*w.at) memmove(y, x, (size_t)(j->length * j->size));
        else j->hide(x, NULL, y, j->length);
    }
}

/* Rows are hidden a block at a time: right behind the stores their loads would have to wait. */
enum { BLOCK = 16 };

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const bool masked = tensor_present(&j->mask);
    const char *x = masked ? j->y : j->x;

    for (int64_t from = begin, to; from < end; from = to) {
        to = end - from < BLOCK ? end : from + BLOCK;
        if (masked) hide_rows(j, from, to);
        for (int64_t at = from * j->length; at < to * j->length; at += j->length)
            j->softmax(x + at * j->size, j->y + at * j->size, j->length);
        if (j->dropped) dropout_part(&j->drop, j->y, j->dropped, from * j->length, to * j->length);
    }
}

static status run(const call *k, void *y, void *dropped) {
    static hide_fn *const hide[DTYPE_COUNT] = FLOAT_TABLE(hide_row);
    static softmax_fn *const softmax[DTYPE_COUNT] = FLOAT_TABLE(softmax_row);
    const tensor *x = &k->in[0];
    const shape *s = &x->shape;
    job j = {.x = x->data, .y = y, .hide = hide[x->type], .softmax = softmax[x->type], .dropped = dropped};

    if (tensor_count(x) == 0) return OK;
    j.length = s->dim[s->rank - 1];
    j.size = (int64_t)dtype_size(x->type);
    if (k->n_in > 1 && tensor_present(&k->in[1])) j.mask = tensor_expand(&k->in[1], s);
    if (dropped) j.drop = dropout_of(k);
    parallel_for(shape_span(s, 0, s->rank - 1), parallel_rows(8 * j.length), rows_range, &j);
    return OK;
}

static status masked_softmax_cpu(ctx *c, const call *k) {
    (void)c;
    return run(k, k->out[0].data, NULL);
}

static status masked_softmax_dropout_cpu(ctx *c, const call *k) {
    const bool keeps = k->n_out > 1 && tensor_present(&k->out[1]);
    (void)c;
    return run(k, k->out[keeps].data, k->out[0].data);
}

/* --- rules -------------------------------------------------------------------------------------------------------- */

static status infer_masked_softmax(graph *g, node *n) {
    char tx[SHAPE_TEXT], tm[SHAPE_TEXT];
    const value *mask = node_in(n, 1);
    shape both;

    TRY(infer_same(g, n));
    if (n->in[0]->shape.rank == 0) return fail(g->c, E_SHAPE, "%s of one number: it has no axis", n->op->name);
    if (!mask) return OK;
    if (mask->type != BOOL) return fail(g->c, E_TYPE, "%s with a mask of %s", n->op->name, dtype_name(mask->type));
    TRY(shape_broadcast(g->c, &n->in[0]->shape, &mask->shape, &both));
    if (shape_equal(&both, &n->in[0]->shape)) return OK;
    return fail(g->c, E_SHAPE, "%s of %s with a mask of shape %s", n->op->name, shape_text(&n->in[0]->shape, tx),
                shape_text(&mask->shape, tm));
}

static status grad_masked_softmax(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "SoftmaxGrad", NODE_ATTRS(INT("axis", -1)), dy[0], n->out[0]);
}

kernel_fn masked_softmax_cuda, masked_softmax_dropout_cuda; /* cuda/softmax.cu */

/* --- records ------------------------------------------------------------------------------------------------------ */

static const attr dropout_attrs[] = {NO_DEFAULT("ratio", FLOAT), NO_DEFAULT("key", INT), {.name = NULL}};

#define OURS(name_, results)                                                                                           \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 2, .max_out = results, .dtypes = FLOATS

/* clang-format off */
const op_def attention_ops[] = {
    {OURS("MaskedSoftmax", 1), .flags = INPLACE_0 | IN_MODELS, .infer = infer_masked_softmax,
     .grad = grad_masked_softmax,
     .cpu = masked_softmax_cpu, .cuda = masked_softmax_cuda},
    {OURS("MaskedSoftmaxDropout", 2), .flags = RANDOM | INPLACE_0, .attrs = dropout_attrs,
     .infer = infer_softmax_dropout, .grad = grad_softmax_dropout,
     .cpu = masked_softmax_dropout_cpu, .cuda = masked_softmax_dropout_cuda},
    {0},
};
/* clang-format on */
