/* rotary.c -- owns Rotary: pairs of elements, one from each half of a row, turned by an angle (rotary position embedding:
 * Su et al., 2021). With x = (x1, x2), c = (c1, c2) and s = (s1, s2) the halves of the last axis,
 *     forward  y1 = x1 c1 - x2 s1    y2 = x2 c2 + x1 s2
 *     inverse  y1 = x1 c1 + x2 s2    y2 = x2 c2 - x1 s1      which is forward's gradient, and forward the inverse's
 * c and s are broadcast, and constants to the gradient. Backward needs them only. Of 16-bit x they may be float32, as under
 * autocast; the result is then of 16 bits, or (wide) float32. */
#include "core/parallel.h"
#include "ops/op.h"

/* --- kernel ------------------------------------------------------------------------------------------------------- */

enum { OPERANDS = 3 };

typedef struct job {
    const void *in[OPERANDS];
    void *y;
    dtype type;
    int rank; /* of the rows */
    int64_t dim[MAX_RANK], stride[OPERANDS][MAX_RANK], step[OPERANDS], half;
    bool inverse, dense;      /* dense: every step is 1 */
    bool wide_angles, wide_y; /* of the type that is computed with */
} job;

/* A row's place in each operand. */
typedef struct walk {
    int64_t index[MAX_RANK], at[OPERANDS];
} walk;

static inline walk walk_from(const job *j, int64_t row) {
    walk w = {.at = {0}};
    for (int d = j->rank - 1; d >= 0; d--) {
        w.index[d] = row % j->dim[d];
        row /= j->dim[d];
        for (int i = 0; i < OPERANDS; i++) w.at[i] += w.index[d] * j->stride[i][d];
    }
    return w;
}

static inline void walk_on(const job *j, walk *w) {
    for (int d = j->rank - 1; d >= 0; d--) {
        const bool more = ++w->index[d] < j->dim[d];
        for (int i = 0; i < OPERANDS; i++) w->at[i] += j->stride[i][d] * (more ? 1 : 1 - j->dim[d]);
        if (more) return;
        w->index[d] = 0;
    }
}

typedef void rows_fn(const job *j, int64_t begin, int64_t end);

#define TEMPLATE "ops/attention/rotary_rows.h"
#include "ops/pointwise/each_float.h"

static rows_fn *const rotate_rows[DTYPE_COUNT] = FLOAT_TABLE(rotate_rows);

static void rows_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    rotate_rows[j->type](j, begin, end);
}

static status rotary_cpu(ctx *c, const call *k) {
    const shape *s = &k->out[0].shape;
    const int last = s->rank - 1;
    job j = {.y = k->out[0].data, .type = k->in[0].type, .rank = last, .half = s->dim[last] / 2, .dense = true};

    (void)c;
    j.wide_angles = k->in[1].type != j.type;
    j.wide_y = k->out[0].type != j.type;
    if (shape_count(s) == 0) return OK;
    j.inverse = node_int(k->node, "inverse") != 0;
    for (int d = 0; d < last; d++) j.dim[d] = s->dim[d];
    for (int i = 0; i < OPERANDS; i++) {
        const tensor t = tensor_expand(&k->in[i], s);
        j.in[i] = t.data;
        j.step[i] = t.stride[last];
        j.dense = j.dense && j.step[i] == 1;
        for (int d = 0; d < last; d++) j.stride[i][d] = t.stride[d];
    }
    parallel_for(shape_span(s, 0, last), parallel_rows(4 * j.half), rows_range, &j);
    return OK;
}

kernel_fn rotary_cuda; /* cuda/kernels/rotary.cu */

/* --- rules -------------------------------------------------------------------------------------------------------- */

static bool has_wide_angles(const node *n) {
    const dtype x = n->in[0]->type;
    return dtype_is_narrow(x) && n->in[1]->type == F32;
}

static status infer_rotary(graph *g, node *n) {
    const shape *s = &n->in[0]->shape;
    shape all = *s;

    TRY(same_types(g, n, has_wide_angles(n) ? 1 : 0));
    for (int i = 1; i < OPERANDS; i++) TRY(shape_broadcast(g->c, &all, &n->in[i]->shape, &all));
    if (s->rank == 0 || s->dim[s->rank - 1] % 2 || !shape_equal(&all, s))
        return fail(g->c, E_SHAPE, "rotary embedding wants rows of an even size, and angles that broadcast to them");
    if (node_int(n, "wide") && !has_wide_angles(n))
        return fail(g->c, E_TYPE, "rotary embedding of %s by angles in %s has no other result",
                    dtype_name(n->in[0]->type), dtype_name(n->in[1]->type));
    return set_out(g, n, 0, node_int(n, "wide") ? F32 : n->in[0]->type, s);
}

static status grad_rotary(graph *g, const node *n, value *const dy[], value *dx[]) {
    if (need(n, 1) || need(n, 2))
        return fail(g->c, E_UNSUPPORTED, "the angles of a rotary embedding have no gradient here");
    TRY(emit_with(g, &dx[0], "Rotary", NODE_ATTRS(INT("inverse", !node_int(n, "inverse"))), dy[0], n->in[1], n->in[2]));
    return emit_cast(g, dx[0], n->in[0]->type, &dx[0]);
}

/* --- records ------------------------------------------------------------------------------------------------------ */

/* clang-format off */
const op_def rotary_ops[] = {
    {.name = "Rotary", .domain = ORT_DOMAIN, .since = 1, .min_in = 3, .max_in = 3, .max_out = 1, .dtypes = FLOATS,
     .flags = STRIDED | IN_MODELS, .attrs = NODE_ATTRS(INT("inverse", 0), INT("wide", 0)), .infer = infer_rotary, .grad = grad_rotary,
     .cpu = rotary_cpu, .cuda = rotary_cuda},
    {0},
};
/* clang-format on */
