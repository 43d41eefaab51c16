/* attention.c -- owns MaskedSoftmax. Along the last axis, over the elements that the mask allows:
 *     y = exp(x - m) / s, and 0 elsewhere        dx = y * (dy - Σ dy y), which is SoftmaxGrad
 * with m = max x and s = Σ exp(x - m). A row in which nothing is allowed, or nothing but -∞ is, gives zeros, and zeros
 * as its gradient. Without a mask everything is allowed. The mask is broadcast and read where it lies: it is never made
 * as large as x. Backward needs y only. */
#include "core/parallel.h"
#include "core/vmath.h"
#include "ops/op.h"

#include <string.h>

/* --- kernel ------------------------------------------------------------------------------------------------------- */

typedef struct job job;
typedef void row_fn(const void *x, const uint8_t *allowed, void *y, int64_t n);

struct job {
    const char *x;
    char *y;
    tensor mask; /* seen with x's shape; absent */
    int64_t length, size;
    row_fn *open, *masked;
};

#define TEMPLATE "ops/attention_rows.h"
#include "ops/each_float.h"

/* Where the mask of row `row` begins. */
static const uint8_t *mask_row(const tensor *mask, int64_t row) {
    const uint8_t *m = mask->data;
    for (int i = mask->shape.rank - 2; i >= 0; i--) {
        m += row % mask->shape.dim[i] * mask->stride[i];
        row /= mask->shape.dim[i];
    }
    return m;
}

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const bool masked = tensor_present(&j->mask), whole_rows = masked && j->mask.stride[j->mask.shape.rank - 1] == 0;

    for (int64_t row = begin; row < end; row++) {
        const char *x = j->x + row * j->length * j->size;
        char *y = j->y + row * j->length * j->size;
        const uint8_t *m = masked ? mask_row(&j->mask, row) : NULL;
        if (whole_rows && !*m) memset(y, 0, (size_t)(j->length * j->size));
        else if (masked && !whole_rows) j->masked(x, m, y, j->length);
        else j->open(x, NULL, y, j->length);
    }
}

static status masked_softmax_cpu(ctx *c, const call *k) {
    static row_fn *const open[DTYPE_COUNT] = FLOAT_TABLE(open_row);
    static row_fn *const masked[DTYPE_COUNT] = FLOAT_TABLE(masked_row);
    const tensor *x = &k->in[0];
    const shape *s = &x->shape;
    job j = {.x = x->data, .y = k->out[0].data, .open = open[x->type], .masked = masked[x->type]};

    (void)c;
    if (tensor_count(x) == 0) return OK;
    j.length = s->dim[s->rank - 1];
    j.size = (int64_t)dtype_size(x->type);
    if (k->n_in > 1 && tensor_present(&k->in[1])) j.mask = tensor_expand(&k->in[1], s);
    parallel_for(shape_span(s, 0, s->rank - 1), parallel_rows(8 * j.length), rows_range, &j);
    return OK;
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

/* --- records ------------------------------------------------------------------------------------------------------ */

#define OURS(name_, least, most)                                                                                       \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = least, .max_in = most, .max_out = 1, .dtypes = FLOATS

/* clang-format off */
const op_def attention_ops[] = {
    {OURS("MaskedSoftmax", 1, 2), .flags = INPLACE_0, .infer = infer_masked_softmax, .grad = grad_masked_softmax,
     .cpu = masked_softmax_cpu},
    {0},
};
/* clang-format on */
