/* softmax.cu -- twin of ops/softmax.c and ops/attention.c: Softmax, LogSoftmax, MaskedSoftmax and their gradients.
 *
 * A block has a row: `length` elements, `inner` apart. It is read once for its maximum, once for the sum, and once more
 * for the result, which may take its place. */
#ifndef T
#include "cuda/kernel.h"

typedef struct softmax_args {
    const void *a, *b; /* x; or dy and y */
    void *out;
    int64_t rows, length, inner;
    const uint8_t *mask;             /* NULL: everything is allowed */
    int64_t dim[8], step[8], column; /* of the mask: the rows' dimensions and its strides along them; along a row */
    int32_t rank;
} softmax_args;

#ifdef ORT_HOST
kernel_fn softmax_cuda, log_softmax_cuda, softmax_grad_cuda, log_softmax_grad_cuda, masked_softmax_cuda;

static status run(ctx *c, const call *k, kernel kernels[DTYPE_COUNT]) {
    const shape *s = &k->in[0].shape;
    softmax_args a = {.a = k->in[0].data, .b = k->n_in > 1 ? k->in[1].data : NULL, .out = k->out[0].data};
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), s->rank, &axis));
    if (shape_count(s) == 0) return OK;
    a.length = s->rank ? s->dim[axis] : 1;
    a.inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    a.rows = shape_count(s) / a.length;
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_rows(a.rows, a.length), &a);
}

#define ALONG_AXIS(name)                                                                                               \
    status name##_cuda(ctx *c, const call *k) {                                                                        \
        static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(name);                                                      \
        return run(c, k, kernels);                                                                                     \
    }
ALONG_AXIS(softmax)
ALONG_AXIS(log_softmax)
ALONG_AXIS(softmax_grad)
ALONG_AXIS(log_softmax_grad)

status masked_softmax_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(masked_softmax);
    const tensor *x = &k->in[0];
    const int last = x->shape.rank - 1;
    softmax_args a = {.a = x->data, .out = k->out[0].data, .inner = 1, .length = x->shape.dim[last], .rank = last};

    if (tensor_count(x) == 0) return OK;
    a.rows = tensor_count(x) / a.length;
    if (k->n_in > 1 && tensor_present(&k->in[1])) {
        tensor mask = tensor_expand(&k->in[1], &x->shape);
        a.mask = mask.data;
        a.column = mask.stride[last];
        for (int d = 0; d < last; d++) {
            a.dim[d] = x->shape.dim[d];
            a.step[d] = mask.stride[d];
        }
    }
    return cuda_launch(c, k, &kernels[x->type], geometry_rows(a.rows, a.length), &a);
}
#endif

#ifdef ORT_DEVICE
/* Where a row begins. */
DEVICE int64_t start_of(const softmax_args *a, int64_t row) {
    return row / a->inner * a->length * a->inner + row % a->inner;
}

DEVICE int64_t mask_of(const softmax_args *a, int64_t row) {
    int64_t offset = 0;
    for (int d = a->rank - 1; d >= 0; d--) {
        offset += row % a->dim[d] * a->step[d];
        row /= a->dim[d];
    }
    return offset;
}

#define TEMPLATE "cuda/softmax.cu"
#include "cuda/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(softmax), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const T *x = (const T *)a.a + start_of(&a, row);
        T *y = (T *)a.out + start_of(&a, row);
        A most = -(A)INFINITY, total = 0;

        FOR_THREADS(i, a.length) {
            const A v = GET(x[i * a.inner]);
            most = v > most ? v : most;
        }
        most = MOST(most);
        FOR_THREADS(i, a.length) total += EXP(GET(x[i * a.inner]) - most);
        total = SUM(total);
        FOR_THREADS(i, a.length) y[i * a.inner] = PUT(EXP(GET(x[i * a.inner]) - most) / total);
    }
}

KERNEL(NAME(log_softmax), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const T *x = (const T *)a.a + start_of(&a, row);
        T *y = (T *)a.out + start_of(&a, row);
        A most = -(A)INFINITY, total = 0;

        FOR_THREADS(i, a.length) {
            const A v = GET(x[i * a.inner]);
            most = v > most ? v : most;
        }
        most = MOST(most);
        FOR_THREADS(i, a.length) total += EXP(GET(x[i * a.inner]) - most);
        total = LOG(SUM(total));
        FOR_THREADS(i, a.length) y[i * a.inner] = PUT(GET(x[i * a.inner]) - most - total);
    }
}

/* Nothing allowed, or nothing but -inf: zeros. */
KERNEL(NAME(masked_softmax), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const T *x = (const T *)a.a + row * a.length;
        T *y = (T *)a.out + row * a.length;
        const uint8_t *mask = a.mask ? a.mask + mask_of(&a, row) : 0;
        A most = -(A)INFINITY, total = 0;

        FOR_THREADS(i, a.length) {
            const A v = !mask || mask[i * a.column] ? GET(x[i]) : -(A)INFINITY;
            most = v > most ? v : most;
        }
        most = MOST(most);
        if (most == -(A)INFINITY) most = 0;
        FOR_THREADS(i, a.length) total += !mask || mask[i * a.column] ? EXP(GET(x[i]) - most) : 0;
        total = SUM(total);
        if (total == 0) total = 1;
        FOR_THREADS(i, a.length) y[i] = PUT((!mask || mask[i * a.column] ? EXP(GET(x[i]) - most) : 0) / total);
    }
}

KERNEL(NAME(softmax_grad), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const T *dy = (const T *)a.a + start_of(&a, row), *y = (const T *)a.b + start_of(&a, row);
        T *dx = (T *)a.out + start_of(&a, row);
        A dot = 0;

        FOR_THREADS(i, a.length) dot += GET(dy[i * a.inner]) * GET(y[i * a.inner]);
        dot = SUM(dot);
        FOR_THREADS(i, a.length) dx[i * a.inner] = PUT(GET(y[i * a.inner]) * (GET(dy[i * a.inner]) - dot));
    }
}

KERNEL(NAME(log_softmax_grad), softmax_args) {
    FOR_BLOCKS(row, a.rows) {
        const T *dy = (const T *)a.a + start_of(&a, row), *y = (const T *)a.b + start_of(&a, row);
        T *dx = (T *)a.out + start_of(&a, row);
        A total = 0;

        FOR_THREADS(i, a.length) total += GET(dy[i * a.inner]);
        total = SUM(total);
        FOR_THREADS(i, a.length) dx[i * a.inner] = PUT(GET(dy[i * a.inner]) - EXP(GET(y[i * a.inner])) * total);
    }
}
#endif
