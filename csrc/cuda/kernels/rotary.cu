/* rotary.cu -- twin of ops/attention/rotary.c: pairs of elements, one from each half of a row, turned by an angle. A thread has a
 * pair. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct rotary_args {
    const void *in[3]; /* x, cos, sin */
    void *y;
    int64_t rows, half, dim[8], stride[3][8], step[3]; /* the rows' dimensions, and strides along them; along a row */
    int32_t rank, inverse;
} rotary_args;

#ifdef ORT_HOST
kernel_fn rotary_cuda;

status rotary_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(rotary);
    const shape *s = &k->out[0].shape;
    const int last = s->rank - 1;
    rotary_args a = {.y = k->out[0].data, .rank = last, .half = s->dim[last] / 2, .rows = shape_span(s, 0, last)};

    a.inverse = node_int(k->node, "inverse") != 0;
    for (int d = 0; d < last; d++) a.dim[d] = s->dim[d];
    for (int i = 0; i < 3; i++) {
        const tensor t = tensor_expand(&k->in[i], s);
        a.in[i] = t.data;
        a.step[i] = t.stride[last];
        for (int d = 0; d < last; d++) a.stride[i][d] = t.stride[d];
    }
    return cuda_launch(c, k, &kernels[k->out[0].type], geometry_over(a.rows * a.half, 256, 256), &a);
}
#endif

#ifdef ORT_DEVICE
#define TEMPLATE "cuda/kernels/rotary.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(rotary), rotary_args) {
    FOR_EACH(pair, a.rows * a.half) {
        const int64_t row = quotient(pair, a.half), i = pair - row * a.half;
        int64_t rest = row, at[3] = {0, 0, 0};
        A low[3], high[3];
        T *y = (T *)a.y + row * 2 * a.half;

        for (int d = a.rank - 1; d >= 0; d--) {
            const int64_t next = quotient(rest, a.dim[d]), index = rest - next * a.dim[d];
            rest = next;
            for (int o = 0; o < 3; o++) at[o] += index * a.stride[o][d];
        }
        for (int o = 0; o < 3; o++) {
            const T *from = (const T *)a.in[o] + at[o];
            low[o] = GET(from[i * a.step[o]]);
            high[o] = GET(from[(i + a.half) * a.step[o]]);
        }
        y[i] = PUT(a.inverse ? low[0] * low[1] + high[0] * high[2] : low[0] * low[1] - high[0] * low[2]);
        y[i + a.half] = PUT(a.inverse ? high[0] * high[1] - low[0] * low[2] : high[0] * high[1] + low[0] * high[2]);
    }
}
#endif
