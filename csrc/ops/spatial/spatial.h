/* spatial.h -- declares what operators on images share: sliding windows' geometry, and a way out of 16-bit floats.
 *
 * A tensor is [images, channels, axes...] with one to three spatial axes. Inside, there are always three: axes that a
 * tensor does not have come first, with size 1. */
#ifndef ORT_OPS_SPATIAL_H
#define ORT_OPS_SPATIAL_H

#include "core/size.h"
#include "ops/op.h"

enum { SPATIAL = 3 };

/* Output o of an axis sees inputs o * stride - before + i * dilation, 0 <= i < kernel, where they exist. Padding behind
 * the last input only decides how many outputs there are; it may be negative. */
typedef struct window {
    int rank; /* spatial axes of the tensor */
    int64_t in[SPATIAL], out[SPATIAL], kernel[SPATIAL], stride[SPATIAL], dilation[SPATIAL];
    int64_t before[SPATIAL], after[SPATIAL];
} window;

/* From the attributes strides, dilations, pads, auto_pad and, where there is one, ceil_mode of `n`, for an input of
 * shape `x`. `kernel` has a size for each spatial axis; NULL: it is the attribute kernel_shape. */
MUST_USE status window_of(ctx *c, const node *n, const shape *x, const int64_t *kernel, window *out);
/* Only what is written: neither auto_pad nor the number of outputs. */
MUST_USE status window_numbers(ctx *c, const node *n, const shape *x, const int64_t *kernel, window *out);
/* The same window as an attribute list of its own, in `ints`: for gradient nodes. */
enum { WINDOW_ATTRS = 5 };
typedef struct window_attrs {
    int64_t strides[SPATIAL], dilations[SPATIAL], pads[2 * SPATIAL], kernel[SPATIAL];
    attr list[WINDOW_ATTRS]; /* strides, dilations, pads, kernel_shape, and the end of the list */
} window_attrs;
void window_to_attrs(const window *w, window_attrs *out);

/* A shape held by an attribute: of results that cannot be told from the operands. */
MUST_USE status shape_attr(ctx *c, const node *n, const char *name, shape *out);

/* Elements that a window covers along axis i, those between its own included. */
int64_t window_span(const window *w, int i);
static inline int64_t volume(const int64_t size[SPATIAL]) { return size_mul(size_mul(size[0], size[1]), size[2]); }
/* [images, channels, size...] */
shape spatial_shape(int64_t images, int64_t channels, int rank, const int64_t size[SPATIAL]);
/* The spatial axes of a shape, right-aligned among three. */
void spatial_axes(const shape *x, int64_t size[SPATIAL]);

/* Outputs [*first, *last) of an axis see, through kernel element i, an input that exists. */
void window_reach(const window *w, int axis, int64_t i, int64_t *first, int64_t *last);

/* For op->lower: a node on 16-bit floats becomes casts around the same node on float32, so that kernels know two types
 * of floats and every sum is kept in one of them. Declines other types. */
MUST_USE status lower_to_f32(graph *g, const node *n, value **out);

#endif
