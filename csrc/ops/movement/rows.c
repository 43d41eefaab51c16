/* rows.c -- owns RowCount, RowIndex, PackRows, UnpackRows, CheckedIndex: computing only those rows of a tensor that matter.
 *
 * `live` says of each of N rows whether it matters. RowCount rounds their number up, so that few plans serve all
 * batches; a plan is for one such number T. With `any` it says only whether there is one, 1 or 0. RowIndex lists the live rows in order. What is left of its T places repeats
 * the last live row r, and is written -1 - r:
 *     PackRows    y[i] = x[row i]; at a repetition the same row, or a filler
 *     UnpackRows  y[row i] = x[i], 0 in all other rows; repetitions are dropped
 * Each is the gradient of the other. Nothing that is computed for a repetition reaches a result or a gradient.
 *
 * CheckedIndex is the indices that it is given, checked as Gather checks them: where look-ups are left out, PyTorch still
 * refuses their indices. */
#include "ops/movement/rows.h"
#include "ops/movement/move.h"

#include "core/parallel.h"

#include <inttypes.h>
#include <string.h>

static inline int64_t row_of(int64_t index) { return index < 0 ? -1 - index : index; }

/* --- RowCount, RowIndex --------------------------------------------------------------------------------------------- */

static int64_t count_live(const tensor *live) {
    const uint8_t *x = live->data;
    int64_t count = 0, total = tensor_count(live);
    for (int64_t i = 0; i < total; i++) count += x[i] != 0;
    return count;
}

static status row_count_cpu(ctx *c, const call *k) {
    int64_t rows = tensor_count(&k->in[0]), count = count_live(&k->in[0]), step = row_step(rows), rounded;

    (void)c;
    if (node_int(k->node, "any")) return *(int64_t *)k->out[0].data = count > 0, OK;
    rounded = step ? (count + step - 1) / step * step : 0;
    if (rounded == 0) rounded = step;
    *(int64_t *)k->out[0].data = rounded < rows ? rounded : rows;
    return OK;
}

static status row_index_cpu(ctx *c, const call *k) {
    const uint8_t *live = k->in[0].data;
    int64_t *rows = k->out[0].data, total = tensor_count(&k->in[0]), room = tensor_count(&k->out[0]), count = 0;

    for (int64_t i = 0; i < total; i++) {
        if (!live[i]) continue;
        if (count < room) rows[count] = i;
        count++;
    }
    if (count > room) return fail(c, E_RUNTIME, "%" PRId64 " rows matter; the plan is for %" PRId64, count, room);
    for (int64_t last = count ? rows[count - 1] : 0; count < room; count++) rows[count] = -1 - last;
    return OK;
}

static status require_live(graph *g, const node *n) {
    TRY(require(g, n, 0));
    if (n->in[0]->shape.rank == 1) return OK;
    return fail(g->c, E_SHAPE, "%s takes one boolean for each row", n->op->name);
}

static status infer_row_count(graph *g, node *n) {
    TRY(require_live(g, n));
    return set_out(g, n, 0, I64, &SCALAR);
}

static status infer_row_index(graph *g, node *n) {
    TRY(require_live(g, n));
    return set_out(g, n, 0, I64, &SHAPE(node_int(n, "count")));
}

/* --- PackRows, UnpackRows ------------------------------------------------------------------------------------------- */

typedef struct packing {
    const int64_t *rows;
    int64_t count; /* of places */
    const char *from;
    char *to;
    size_t bytes; /* of a row */
    bool repeat;
    const char *filler; /* one element, of `size` bytes */
    size_t size;
} packing;

static void fill(char *to, const packing *p) {
    for (size_t at = 0; at < p->bytes; at += p->size) memcpy(to + at, p->filler, p->size);
}

static void pack_range(void *arg, int64_t begin, int64_t end) {
    const packing *p = arg;
    for (int64_t i = begin; i < end; i++) {
        char *to = p->to + (size_t)i * p->bytes;
        if (p->rows[i] < 0 && !p->repeat) fill(to, p);
        else memcpy(to, p->from + (size_t)row_of(p->rows[i]) * p->bytes, p->bytes);
    }
}

static packing packing_of(const call *k) {
    const tensor *x = &k->in[0], *rows = &k->in[1];
    return (packing){.rows = rows->data,
                     .count = tensor_count(rows),
                     .from = x->data,
                     .to = k->out[0].data,
                     .bytes = (size_t)shape_span(&x->shape, 1, x->shape.rank) * dtype_size(x->type)};
}

static status pack_rows_cpu(ctx *c, const call *k) {
    char filler[8];
    packing p = packing_of(k);

    (void)c;
    if (!p.bytes) return OK;
    p.size = dtype_size(k->in[0].type);
    p.repeat = node_int(k->node, "repeat") != 0;
    dtype_set_value(k->in[0].type, filler, 0, node_float(k->node, "filler"));
    p.filler = filler;
    parallel_for(p.count, parallel_rows((int64_t)p.bytes / 4), pack_range, &p);
    return OK;
}

/* The first place at or behind `row`; live rows stand in order before the repetitions. */
static int64_t place_of(const packing *p, int64_t row) {
    int64_t low = 0, high = p->count;
    while (low < high) {
        int64_t middle = (low + high) / 2;
        if (p->rows[middle] >= 0 && p->rows[middle] < row) low = middle + 1;
        else high = middle;
    }
    return low;
}

static void unpack_range(void *arg, int64_t begin, int64_t end) {
    const packing *p = arg;
    int64_t at = place_of(p, begin);

    for (int64_t row = begin; row < end; row++) {
        char *to = p->to + (size_t)row * p->bytes;
        if (at < p->count && p->rows[at] == row) memcpy(to, p->from + (size_t)at++ * p->bytes, p->bytes);
        else memset(to, 0, p->bytes);
    }
}

static status unpack_rows_cpu(ctx *c, const call *k) {
    packing p = packing_of(k);

    (void)c;
    if (p.bytes) parallel_for(k->out[0].shape.dim[0], parallel_rows((int64_t)p.bytes / 4), unpack_range, &p);
    return OK;
}

/* Out: x with `rows` rows. */
static status infer_rows(graph *g, node *n, int64_t rows) {
    shape s;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    s = n->in[0]->shape;
    if (s.rank < 1 || n->in[1]->shape.rank != 1 || n->in[1]->type != I64)
        return fail(g->c, E_SHAPE, "%s takes rows, and a list of their numbers", n->op->name);
    s.dim[0] = rows;
    return set_out(g, n, 0, n->in[0]->type, &s);
}

static status infer_pack(graph *g, node *n) {
    TRY(require(g, n, 1));
    return infer_rows(g, n, n->in[1]->shape.dim[0]);
}

static status infer_unpack(graph *g, node *n) { return infer_rows(g, n, node_int(n, "size")); }

static status grad_pack(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "UnpackRows", NODE_ATTRS(INT("size", n->in[0]->shape.dim[0])), dy[0], n->in[1]);
}

static status grad_unpack(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "PackRows", NODE_ATTRS(INT("repeat", 0), FLOAT("filler", 0)), dy[0], n->in[1]);
}

/* --- CheckedIndex --------------------------------------------------------------------------------------------------- */

static status infer_checked_index(graph *g, node *n) {
    TRY(require_index(g, n, 0));
    return infer_same(g, n);
}

static status checked_index_cpu(ctx *c, const call *k) {
    const tensor *index = &k->in[0];
    const int64_t size = node_int(k->node, "size");

    TRY(check_indices(c, index, least_index(k->node, size), size));
    memcpy(k->out[0].data, index->data, (size_t)tensor_count(index) * dtype_size(index->type));
    return OK;
}

kernel_fn row_count_cuda, row_index_cuda, pack_rows_cuda, unpack_rows_cuda,
    checked_index_cuda; /* cuda/kernels/rows.cu */

/* --- records -------------------------------------------------------------------------------------------------------- */

/* clang-format off */
const op_def rows_ops[] = {
    {OURS("RowCount", 1, 1, 1, SET(BOOL)), .flags = NO_GRAD, .attrs = NODE_ATTRS(INT("any", 0)),
     .infer = infer_row_count, .cpu = row_count_cpu, .cuda = row_count_cuda},
    {OURS("RowIndex", 1, 1, 1, SET(BOOL)), .flags = NO_GRAD, .attrs = NODE_ATTRS(NO_DEFAULT("count", INT)),
     .infer = infer_row_index, .cpu = row_index_cpu, .cuda = row_index_cuda},
    {OURS("PackRows", 2, 2, 1, ANY_TYPE), .owned = OPERAND(1), .plain = OPERAND(0),
     .attrs = NODE_ATTRS(INT("repeat", 1), FLOAT("filler", 0)), .infer = infer_pack,
     .grad = grad_pack, .cpu = pack_rows_cpu, .cuda = pack_rows_cuda},
    {OURS("UnpackRows", 2, 2, 1, ANY_TYPE), .owned = OPERAND(1), .plain = OPERAND(0),
     .attrs = NODE_ATTRS(NO_DEFAULT("size", INT)), .infer = infer_unpack,
     .grad = grad_unpack, .cpu = unpack_rows_cpu, .cuda = unpack_rows_cuda},
    {OURS("CheckedIndex", 1, 1, 1, SET(I64) | SET(I32)), .checked = OPERAND(0), .flags = NO_GRAD,
     .attrs = NODE_ATTRS(NO_DEFAULT("size", INT), INT("from_end", 1)), .infer = infer_checked_index,
     .cpu = checked_index_cpu, .cuda = checked_index_cuda},
    {0},
};
/* clang-format on */
