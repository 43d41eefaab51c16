/* conv_products.h -- declares a convolution's three products, in three ways. All is float32 or float64 (through
 * torch and of 1x1: bfloat16 too, on a GPU any float), contiguous, and in ONNX's order:
 *
 *     x  [images, groups * in, w.in...]      w  [groups * out, in, kernel...]      y  [images, groups * out, w.out...]
 */
#ifndef ORT_OPS_CONV_PRODUCTS_H
#define ORT_OPS_CONV_PRODUCTS_H

#include "ops/spatial/spatial.h"

typedef enum conv_product { CONV_FORWARD, CONV_GRAD_INPUT, CONV_GRAD_WEIGHT } conv_product;

typedef struct conv {
    dtype type;
    window w;
    int64_t images, groups, in, out; /* in, out: channels of a group */
} conv;

/* The convolution that node `n` is this product of, by the shapes of its operands and its attributes. */
MUST_USE status conv_of_node(ctx *c, const node *n, conv_product which, conv *out);

static inline int64_t conv_taps(const conv *v) { return volume(v->w.kernel); }
static inline int64_t conv_depth(const conv *v) { return size_mul(v->in, conv_taps(v)); }
static inline double conv_work(const conv *v) { /* multiplications */
    return (double)v->images * (double)(v->groups * v->out) * (double)volume(v->w.out) * (double)conv_depth(v);
}

/* Does each output pixel see one input pixel, the one at its place? */
static inline bool conv_is_pointwise(const conv *v) {
    for (int i = 0; i < SPATIAL; i++)
        if (v->w.kernel[i] != 1 || v->w.stride[i] != 1 || v->w.before[i] != 0 || v->w.in[i] != v->w.out[i])
            return false;
    return true;
}

/* --- ours (conv_kernel.c) ----------------------------------------------------------------------------------------- */

size_t conv_scratch(const conv *v); /* bytes of `work`, for each of the three */
/* y = w * x, added to what y holds if `add`. */
void conv_forward(const conv *v, const void *x, const void *w, void *y, bool add, void *work);
void conv_grad_input(const conv *v, const void *dy, const void *w, void *dx, void *work);
void conv_grad_weight(const conv *v, const void *x, const void *dy, void *dw, void *work);

/* --- ours, of one input channel a group (conv_depthwise.c) --------------------------------------------------------- */

/* Whether the three can compute this convolution. The same answer on every call. */
bool conv_is_depthwise(const conv *v);
/* False: they have not, and have written nothing: it is none, or weights are not finite. */
bool conv_forward_depthwise(const conv *v, const void *x, const void *w, void *y, bool add);
bool conv_grad_input_depthwise(const conv *v, const void *dy, const void *w, void *dx);
bool conv_grad_weight_depthwise(const conv *v, const void *x, const void *dy, void *dw);

/* --- ours, of 1x1 in bfloat16 (conv_narrow.c) --------------------------------------------------------------------- */

/* Whether the three can compute this convolution. The same answer on every call. */
bool conv_by_product(const conv *v);
size_t conv_product_scratch(const conv *v, conv_product product); /* bytes of `work` */
void conv_forward_product(const conv *v, const void *x, const void *w, void *y, bool add, void *work);
void conv_grad_input_product(const conv *v, const void *dy, const void *w, void *dx, void *work);
void conv_grad_weight_product(const conv *v, const void *x, const void *dy, void *dw, void *work);

/* --- torch's (conv_shim.c) ---------------------------------------------------------------------------------------- */

/* Is this product of a convolution better left to torch? The same answer on every call. */
bool conv_by_torch(const conv *v, conv_product product);
/* Bytes that torch then takes for itself, the result that is copied among them; about, as it depends on its kernels. */
int64_t conv_torch_bytes(const conv *v, conv_product product);
/* False: torch did not do it, and nothing was written. `bias` may be NULL. */
bool conv_forward_shim(const conv *v, const void *x, const void *w, const void *bias, void *y);
bool conv_grad_input_shim(const conv *v, const void *dy, const void *w, void *dx);
bool conv_grad_weight_shim(const conv *v, const void *x, const void *dy, void *dw);

#endif
