/* softmax.cu -- twin of ops/reductions/softmax.c and ops/attention/attention.c: Softmax, LogSoftmax, MaskedSoftmax and their gradients, the
 * first and the third with dropout, too.
 *
 * A block has a row: `length` elements, `inner` apart. It is read once for its maximum, once for the sum, and once more
 * for the result, which may take its place. Dropout comes with the result: there a thread has the elements of a row that
 * its counters have words for (cuda/kernels/philox.h). */
#ifndef T
#include "cuda/kernels/kernel.h"
#include "cuda/kernels/philox.h"

typedef struct softmax_args {
    const void *a, *b; /* x; or dy and y */
    void *out;
    int64_t rows, length, inner;
    const uint8_t *mask;             /* NULL: everything is allowed */
    int64_t dim[8], step[8], column; /* of the mask: the rows' dimensions and its strides along them; along a row */
    int32_t rank;
    /* Of dropout. */
    uint32_t key, threshold;
    int32_t safe;            /* a row of nothing but -inf is zeros */
    void *dropped;           /* or NULL; then `out` may be */
    const uint64_t *seed_at; /* or NULL */
    uint64_t seed;
    double factor;
} softmax_args;

#ifdef ORT_HOST
#include "ops/pointwise/dropout.h"

kernel_fn softmax_cuda, log_softmax_cuda, softmax_grad_cuda, log_softmax_grad_cuda, masked_softmax_cuda,
    softmax_dropout_cuda, softmax_dropout_grad_cuda, masked_softmax_dropout_cuda;

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

/* Along the last axis of an operand that has elements. */
static softmax_args along_last(const call *k) {
    const tensor *x = &k->in[0];
    const int64_t length = x->shape.dim[x->shape.rank - 1];
    return (softmax_args){
        .a = x->data, .out = k->out[0].data, .inner = 1, .length = length, .rows = tensor_count(x) / length};
}

static void add_mask(const call *k, softmax_args *a) {
    const shape *s = &k->in[0].shape;

    if (k->n_in < 2 || !tensor_present(&k->in[1])) return;
    const tensor mask = tensor_expand(&k->in[1], s);
    a->rank = s->rank - 1;
    a->mask = mask.data;
    a->column = mask.stride[a->rank];
    for (int d = 0; d < a->rank; d++) {
        a->dim[d] = s->dim[d];
        a->step[d] = mask.stride[d];
    }
}

static void add_dropout(const call *k, softmax_args *a) {
    const dropout_run d = dropout_of(k);

    a->key = d.key;
    a->threshold = d.threshold;
    a->factor = d.factor;
    a->seed = k->seed;
    a->seed_at = k->cuda->seed;
}

static status start(ctx *c, const call *k, kernel kernels[DTYPE_COUNT], const softmax_args *a) {
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_rows(a->rows, a->length), a);
}

status masked_softmax_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(masked_softmax);

    if (tensor_count(&k->in[0]) == 0) return OK;
    softmax_args a = along_last(k);
    add_mask(k, &a);
    return start(c, k, kernels, &a);
}

static status softmax_dropout(ctx *c, const call *k, bool safe) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(softmax_dropout);

    if (tensor_count(&k->in[0]) == 0) return OK;
    softmax_args a = along_last(k);
    add_mask(k, &a);
    add_dropout(k, &a);
    a.dropped = a.out;
    a.out = k->n_out > 1 ? k->out[1].data : NULL;
    a.safe = safe;
    return start(c, k, kernels, &a);
}

status softmax_dropout_cuda(ctx *c, const call *k) { return softmax_dropout(c, k, false); }
status masked_softmax_dropout_cuda(ctx *c, const call *k) { return softmax_dropout(c, k, true); }

status softmax_dropout_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(softmax_dropout_grad);

    if (tensor_count(&k->in[0]) == 0) return OK;
    softmax_args a = along_last(k);
    add_dropout(k, &a);
    a.b = k->in[1].data;
    return start(c, k, kernels, &a);
}
#endif

#ifdef ORT_DEVICE
/* Where a row begins. */
DEVICE int64_t start_of(const softmax_args *a, int64_t row) {
    return quotient(row, a->inner) * a->length * a->inner + remainder_of(row, a->inner);
}

DEVICE int64_t mask_of(const softmax_args *a, int64_t row) {
    int64_t offset = 0;
    for (int d = a->rank - 1; d >= 0; d--) {
        const int64_t next = quotient(row, a->dim[d]);
        offset += (row - next * a->dim[d]) * a->step[d];
        row = next;
    }
    return offset;
}

/* Counter n of a row: of the first that has words for it, how many there are, and its first element, which may be before
 * the row. */
DEVICE int64_t first_counter(const softmax_args *a, int64_t row) { return row * a->length / 64 * 16; }
DEVICE int64_t counters_of(const softmax_args *a, int64_t row) {
    return ((row + 1) * a->length + 63) / 64 * 16 - first_counter(a, row);
}
DEVICE int64_t element_of(const softmax_args *a, int64_t row, int64_t counter) {
    return counter / 16 * 64 + place_of((int)(counter % 16)) - row * a->length;
}

#define TEMPLATE "cuda/kernels/softmax.cu"
#include "cuda/kernels/each_float.h"
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

/* The result before dropout is written where backward wants it. Results of narrow types are dropped as they are stored. */
KERNEL(NAME(softmax_dropout), softmax_args) {
    const uint64_t seed = a.seed_at ? *a.seed_at : a.seed;
    const A factor = (A)a.factor;

    FOR_BLOCKS(row, a.rows) {
        const T *x = (const T *)a.a + row * a.length;
        T *y = a.out ? (T *)a.out + row * a.length : 0, *dropped = (T *)a.dropped + row * a.length;
        const uint8_t *mask = a.mask ? a.mask + mask_of(&a, row) : 0;
        A most = -(A)INFINITY, total = 0;

        FOR_THREADS(i, a.length) {
            const A v = !mask || mask[i * a.column] ? GET(x[i]) : -(A)INFINITY;
            most = v > most ? v : most;
        }
        most = MOST(most);
        if (a.safe && most == -(A)INFINITY) most = 0;
        FOR_THREADS(i, a.length) total += !mask || mask[i * a.column] ? EXP(GET(x[i]) - most) : 0;
        total = SUM(total);
        if (a.safe && total == 0) total = 1;
        FOR_THREADS(n, counters_of(&a, row)) {
            const int64_t counter = first_counter(&a, row) + n, first = element_of(&a, row, counter);
            uint32_t word[4];
            draw(seed, a.key, (uint64_t)counter, word);
            for (int j = 0; j < 4; j++) {
                const int64_t i = first + 16 * j;
                if (i < 0 || i >= a.length) continue;
                const T weight = PUT((!mask || mask[i * a.column] ? EXP(GET(x[i]) - most) : 0) / total);
                if (y) y[i] = weight;
                dropped[i] = PUT(GET(weight) * (word[j] >= a.threshold ? factor : 0));
            }
        }
    }
}

/* What arrives before dropout waits in the result's place, written and read by one thread. */
KERNEL(NAME(softmax_dropout_grad), softmax_args) {
    const uint64_t seed = a.seed_at ? *a.seed_at : a.seed;
    const A factor = (A)a.factor;

    FOR_BLOCKS(row, a.rows) {
        const T *dy = (const T *)a.a + row * a.length, *y = (const T *)a.b + row * a.length;
        T *dx = (T *)a.out + row * a.length;
        const int64_t counters = counters_of(&a, row);
        A dot = 0;

        FOR_THREADS(n, counters) {
            const int64_t counter = first_counter(&a, row) + n, first = element_of(&a, row, counter);
            uint32_t word[4];
            draw(seed, a.key, (uint64_t)counter, word);
            for (int j = 0; j < 4; j++) {
                const int64_t i = first + 16 * j;
                if (i < 0 || i >= a.length) continue;
                dx[i] = PUT(GET(dy[i]) * (word[j] >= a.threshold ? factor : 0));
                dot += GET(dx[i]) * GET(y[i]);
            }
        }
        dot = SUM(dot);
        FOR_THREADS(n, counters) {
            const int64_t first = element_of(&a, row, first_counter(&a, row) + n);
            for (int j = 0; j < 4; j++) {
                const int64_t i = first + 16 * j;
                if (i >= 0 && i < a.length) dx[i] = PUT(GET(y[i]) * (GET(dx[i]) - dot));
            }
        }
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
