/* shape.h -- shapes, strides and tensors. A dimension is a number: graphs are specialised to the shapes of a plan. */
#ifndef ORT_CORE_SHAPE_H
#define ORT_CORE_SHAPE_H

#include "core/ctx.h"
#include "core/dtype.h"

enum { MAX_RANK = 8, SHAPE_TEXT = 160 };

typedef struct shape {
    int rank; /* -1: not known (models before specialisation) */
    int64_t dim[MAX_RANK];
} shape;

/* What a kernel sees of a value. `data` is NULL for an optional input that is absent (type DT_NONE). */
typedef struct tensor {
    void *data;
    dtype type;
    shape shape;
    int64_t stride[MAX_RANK]; /* in elements; 0 along a broadcast dimension */
} tensor;

#define SHAPE(...) ((shape){(int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), {__VA_ARGS__}})
#define SCALAR ((shape){0, {0}})

/* Number of elements. Shapes that have more than fit are refused where they are made (shape_check); of such a shape it is
 * the largest number (core/size.h). */
int64_t shape_count(const shape *s);
bool shape_equal(const shape *a, const shape *b);
/* Product of the dimensions in [from, to). */
int64_t shape_span(const shape *s, int from, int to);
/* "[2, 3]" into a buffer of SHAPE_TEXT bytes; returns it. */
const char *shape_text(const shape *s, char text[SHAPE_TEXT]);
/* Refuses negative dimensions, ranks over MAX_RANK and sizes over 2^47 elements. */
MUST_USE status shape_check(ctx *c, const shape *s);
/* NumPy broadcasting; `out` may be one of the operands. */
MUST_USE status shape_broadcast(ctx *c, const shape *a, const shape *b, shape *out);
/* -rank <= axis < rank into 0 <= axis < rank (a scalar accepts -1 and 0, as PyTorch does). */
MUST_USE status shape_axis(ctx *c, int64_t axis, int rank, int *out);

void stride_contiguous(const shape *s, int64_t stride[MAX_RANK]);
bool tensor_contiguous(const tensor *t);
static inline int64_t tensor_count(const tensor *t) { return shape_count(&t->shape); }
static inline bool tensor_present(const tensor *t) { return t->type != DT_NONE; }
/* `t` seen with the broadcast shape `to`: strides of 0 where it repeats. `to` must be a broadcast of t's shape. */
tensor tensor_expand(const tensor *t, const shape *to);

#endif
