/* resize.cu -- mirrors ops/spatial/resize.c: interpolation along one axis, by tables. */
#ifndef T
#include "cuda/kernels/kernel.h"

/* x is [outer, inputs, inner], y [outer, outputs, inner]; the tables are [taps, outputs]. */
typedef struct interpolate_args {
    const void *x, *weight;
    void *y;
    const int32_t *index; /* -1: no input */
    int64_t count, inputs, outputs, inner, taps;
} interpolate_args;

#ifdef ORT_HOST
kernel_fn interpolate_cuda;

status interpolate_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(interpolate);
    const shape *x = &k->in[0].shape;
    const int axis = (int)node_int(k->node, "axis");
    interpolate_args a = {.x = k->in[0].data,
                          .weight = k->in[2].data,
                          .y = k->out[0].data,
                          .index = k->in[1].data,
                          .count = tensor_count(&k->out[0]),
                          .inputs = x->dim[axis],
                          .outputs = k->out[0].shape.dim[axis],
                          .inner = shape_span(x, axis + 1, x->rank),
                          .taps = k->in[1].shape.dim[0]};
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_over(a.count, 256, 256), &a);
}
#endif

#ifdef ORT_DEVICE
#define TEMPLATE "cuda/kernels/resize.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(interpolate), interpolate_args) {
    FOR_EACH(e, a.count) {
        const int64_t j = e % a.inner, i = e / a.inner % a.outputs, outer = e / a.inner / a.outputs;
        const T *x = (const T *)a.x + outer * a.inputs * a.inner + j;
        A sum = 0;
        for (int64_t k = 0; k < a.taps; k++) {
            const int64_t at = a.index[k * a.outputs + i];
            if (at >= 0) sum += GET(((const T *)a.weight)[k * a.outputs + i]) * GET(x[at * a.inner]);
        }
        ((T *)a.y)[e] = PUT(sum);
    }
}
#endif
