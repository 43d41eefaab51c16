/* move.h -- moves elements without looking at them: what the view, movement, index and scatter families share. */
#ifndef ORT_OPS_MOVE_H
#define ORT_OPS_MOVE_H

#include "ops/op.h"

#include <string.h>

/* --- records ------------------------------------------------------------------------------------------------------ */

/* How a record begins: name, opset, fewest and most operands, most results, element types. */
#define ONNX(name_, since_, least_, most_, results_, types_)                                                           \
    .name = (name_), .domain = "", .since = (since_), .min_in = (least_), .max_in = (most_), .max_out = (results_),    \
    .dtypes = (types_)
#define OURS(name_, least_, most_, results_, types_)                                                                   \
    .name = (name_), .domain = ORT_DOMAIN, .since = 1, .min_in = (least_), .max_in = (most_), .max_out = (results_),   \
    .dtypes = (types_)

/* --- elements (ops/movement/move.c) ---------------------------------------------------------------------------------------- */

/* to[i] = from[i]: one shape and element size, any strides; no two elements of `to` share memory. */
void copy_elements(const tensor *to, const tensor *from);
/* Every element of `to` becomes the one at `element`. */
void fill_elements(const tensor *to, const void *element);
/* Elements start, start + step, ... of `t` along `axis`, `count` of them. */
tensor tensor_slice(const tensor *t, int axis, int64_t start, int64_t count, int64_t step);

/* --- views (ops/movement/view.c) ------------------------------------------------------------------------------------------- */

/* The kernel of every operator with a view rule: copies what the rule describes or, where there is no view, the
 * elements in order. */
kernel_fn view_cpu, view_cuda; /* cuda/kernels/move.cu */

/* --- indices (ops/movement/index.c) ---------------------------------------------------------------------------------------- */

/* Element `at` (of the memory) of an int32 or int64 tensor. */
static inline int64_t index_at(const tensor *t, int64_t at) {
    return t->type == I32 ? ((const int32_t *)t->data)[at] : ((const int64_t *)t->data)[at];
}
static inline int64_t wrap_index(int64_t i, int64_t size) { return i < 0 ? i + size : i; }
/* Where lane `r` of the lanes along `axis` of shape `s` begins, in a tensor of these strides. */
static inline int64_t lane_offset(const shape *s, int axis, const int64_t *stride, int64_t r) {
    int64_t offset = 0;
    for (int i = s->rank - 1; i >= 0; i--) {
        if (i == axis) continue;
        offset += r % s->dim[i] * stride[i];
        r /= s->dim[i];
    }
    return offset;
}
static inline void copy_item(char *to, const char *from, size_t size) {
    switch (size) { /* by size, so that the compiler knows it */
    case 1: *to = *from; break;
    case 2: memcpy(to, from, 2); break;
    case 4: memcpy(to, from, 4); break;
    case 8: memcpy(to, from, 8); break;
    default: memcpy(to, from, size);
    }
}

/* E_TYPE unless operand i is int32 or int64. */
MUST_USE status require_index(graph *g, const node *n, int i);
/* The lowest index along an axis of this size: of a node whose attribute from_end says that they may count from the end,
 * or may not. */
int64_t least_index(const node *n, int64_t size);
/* E_RUNTIME naming the first index outside [least, size). */
MUST_USE status check_indices(ctx *c, const tensor *indices, int64_t least, int64_t size);
/* The row of data that index tuple k selects, for GatherND and ScatterND: data is seen as rows over its first
 * `batch` + `depth` axes, and tuples of one batch select in that batch. */
typedef struct tuples {
    const tensor *indices;
    shape data;
    int batch, depth;
    int64_t count, per_batch; /* tuples in all, and in a batch */
} tuples;
tuples tuples_of(const tensor *indices, const shape *data, int batch);
int64_t tuple_row(const tuples *t, int64_t k);
MUST_USE status check_tuples(ctx *c, const node *n, const tuples *t);

/* An unsigned number that orders elements of any type as PyTorch sorts them, NaN last (ops/reductions/topk.c). */
uint64_t order_key(dtype t, const void *data, int64_t i);
/* ops/movement/index.c: an index with a place for every element of a tensor that is the same in every lane along `axis`, as a
 * list; NULL where it is not known to be. */
MUST_USE status index_of_lanes(graph *g, value *index, int axis, value **out);

/* --- accumulating rows (ops/movement/scatter_rows.c) ----------------------------------------------------------------------- */

typedef enum combining { COMBINE_NONE, COMBINE_ADD, COMBINE_MUL, COMBINE_MAX, COMBINE_MIN } combining;

/* What the attribute "reduction" says. */
combining scatter_combining(const node *n);

/* out[o][r] = base[o][r] (zeros without a base), combined with updates[o][k] for every k with row(k) = r in order of
 * k: so results do not depend on the number of threads. Sums and products of 16-bit floats are kept in float32. */
typedef struct row_scatter {
    combining how; /* NONE: the last one stays */
    dtype type;
    void *out;
    const void *base, *updates;        /* base may be out */
    int64_t outer, rows, count, width; /* out is [outer, rows, width], updates [outer, count, width] */
    bool straight;                     /* few columns, many blocks: update by update, without lists */
    int32_t *head, *next;              /* [rows] first k of a row, [count] the next k of the same row; -1 ends.
                                          straight: no head, and next is the row of k, -1 without one */
    int64_t columns;                   /* worked on together */
    bool streams;                      /* out is new, larger than caches, and of whole lines */
} row_scatter;

size_t row_scatter_bytes(int64_t rows, int64_t count);
/* Puts head and next into `work` with no row selected. */
MUST_USE status row_scatter_begin(ctx *c, row_scatter *s, void *work);
/* To be called with k falling from count - 1 to 0. */
static inline void row_scatter_select(row_scatter *s, int64_t k, int64_t row) {
    if (s->straight) {
        s->next[k] = (int32_t)row;
        return;
    }
    s->next[k] = s->head[row];
    s->head[row] = (int32_t)k;
}
void row_scatter_run(row_scatter *s);

#endif
