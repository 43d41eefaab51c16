/* norm.cu -- twin of ops/norms/norm.c: LayerNormalization, RMSNormalization, FusedNorm and their gradients, over the last
 * axes.
 *
 * A block has a row. The gradients of scale and bias are sums over rows: a block adds up 32 columns of one part of the
 * rows, whose number depends on the shape alone, and a second kernel the parts, in order. They read dy, so they come
 * before dx, which may take its place. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct norm_args {
    const void *x, *dy, *scale, *bias;
    const void *other;      /* what is added to x, or to dx; NULL: nothing */
    void *out;              /* y or dx; y may be absent */
    void *sum, *narrow;     /* x and the other; y in 16 bits, or NULL */
    void *means, *inverses; /* as they are computed in, float or double; either may be absent forward */
    void *partial;          /* [parts, 2, width] of that type */
    void *dscale, *dbias;   /* either may be absent */
    int64_t rows, width, parts;
    double epsilon, factor;  /* of what the dropout keeps */
    const uint64_t *seed_at; /* or NULL */
    uint64_t seed;
    uint32_t key, threshold;
    int32_t centred, drops, scale_type, bias_type, from, to; /* from: of x, or of dy; to: of `narrow` */
} norm_args;

enum { LANES = 8 }; /* rows that a block of columns reads at a time */

#ifdef ORT_HOST
#include "ops/pointwise/dropout.h"

kernel_fn layer_norm_cuda, rms_norm_cuda, fused_norm_cuda, layer_norm_grad_cuda, rms_norm_grad_cuda;
size_t norm_grad_cuda_workspace(const node *n);

/* Operands of both gradients, of FusedNorm, and its results. */
enum { DY, X, SCALE, INVERSES, MEANS, ADDED, MOST_PARTS = 64 };
enum { RESIDUAL = 3, SUM_OUT = 3, NARROW = 4 };

static norm_args args_of(const node *n, const shape *s) {
    int axis = (int)node_int(n, "axis");
    norm_args a = {.rows = 0};

    if (axis < 0) axis += s->rank;
    a.rows = shape_span(s, 0, axis);
    a.width = shape_span(s, axis, s->rank);
    a.parts = a.rows / 64 < 1 ? 1 : a.rows / 64 < MOST_PARTS ? a.rows / 64 : MOST_PARTS;
    return a;
}

static void *data_of(const tensor *t, int n, int i) { return i < n && tensor_present(&t[i]) ? t[i].data : NULL; }
static bool is_wanted(const call *k, int i) { return i < k->n_out && tensor_present(&k->out[i]); }

/* What all forms of the forward have. */
static norm_args forward_args(const call *k, bool centred) {
    norm_args a = args_of(k->node, &k->in[0].shape);

    a.x = k->in[0].data;
    a.scale = k->in[1].data;
    a.scale_type = k->in[1].type;
    a.bias = data_of(k->in, k->n_in, 2);
    if (a.bias) a.bias_type = k->in[2].type;
    a.out = data_of(k->out, k->n_out, 0);
    a.epsilon = node_float(k->node, "epsilon");
    a.centred = centred;
    return a;
}

static status run_forward(ctx *c, const call *k, dtype type, const norm_args *a) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(norm_rows);
    return cuda_launch(c, k, &kernels[type], geometry_rows(a->rows, a->width), a);
}

status layer_norm_cuda(ctx *c, const call *k) {
    norm_args a = forward_args(k, true);
    a.means = data_of(k->out, k->n_out, 1);
    a.inverses = data_of(k->out, k->n_out, 2);
    return run_forward(c, k, k->in[0].type, &a);
}

status rms_norm_cuda(ctx *c, const call *k) {
    norm_args a = forward_args(k, false);
    a.inverses = data_of(k->out, k->n_out, 1);
    return run_forward(c, k, k->in[0].type, &a);
}

status fused_norm_cuda(ctx *c, const call *k) {
    const double ratio = node_float(k->node, "ratio");
    norm_args a = forward_args(k, node_int(k->node, "centred"));

    a.other = data_of(k->in, k->n_in, RESIDUAL);
    a.from = k->in[0].type;
    a.means = data_of(k->out, k->n_out, 1);
    a.inverses = data_of(k->out, k->n_out, 2);
    if (a.other && !(a.sum = data_of(k->out, k->n_out, SUM_OUT))) a.sum = a.out ? a.out : k->work;
    a.narrow = data_of(k->out, k->n_out, NARROW);
    if (a.narrow) a.to = k->out[NARROW].type;
    a.drops = ratio > 0;
    a.factor = dropout_factor(ratio);
    a.threshold = dropout_threshold(ratio);
    a.key = (uint32_t)node_int(k->node, "key");
    a.seed = k->seed;
    a.seed_at = k->cuda->seed;
    return run_forward(c, k, k->in[a.other ? RESIDUAL : 0].type, &a);
}

size_t norm_grad_cuda_workspace(const node *n) {
    norm_args a = args_of(n, &n->in[X]->shape);
    return (size_t)(2 * a.parts * a.width) * (n->in[X]->type == F64 ? 8 : 4);
}

static status run_backward(ctx *c, const call *k, bool centred) {
    static kernel rows[DTYPE_COUNT] = FLOAT_KERNELS(norm_grad_rows);
    static kernel columns[DTYPE_COUNT] = FLOAT_KERNELS(norm_grad_columns);
    static kernel join[DTYPE_COUNT] = FLOAT_KERNELS(norm_grad_join);
    const dtype type = k->in[X].type;
    norm_args a = args_of(k->node, &k->in[X].shape);

    a.dy = k->in[DY].data;
    a.from = k->in[DY].type;
    a.other = data_of(k->in, k->n_in, ADDED);
    a.x = k->in[X].data;
    a.scale = k->in[SCALE].data;
    a.scale_type = k->in[SCALE].type;
    a.inverses = k->in[INVERSES].data;
    a.means = centred ? k->in[MEANS].data : NULL;
    a.out = data_of(k->out, k->n_out, 0);
    a.dscale = data_of(k->out, k->n_out, 1);
    a.dbias = data_of(k->out, k->n_out, 2);
    a.centred = centred;
    a.partial = k->work;
    if (is_wanted(k, 1) || is_wanted(k, 2)) {
        int64_t groups = (a.width + WARP - 1) / WARP;
        TRY(cuda_launch(c, k, &columns[type], geometry_over(groups * a.parts, 1, WARP * LANES), &a));
        TRY(cuda_launch(c, k, &join[type], geometry_over(a.width, 128, 128), &a));
    }
    if (!is_wanted(k, 0)) return OK;
    return cuda_launch(c, k, &rows[type], geometry_rows(a.rows, a.width), &a);
}

status layer_norm_grad_cuda(ctx *c, const call *k) { return run_backward(c, k, true); }
status rms_norm_grad_cuda(ctx *c, const call *k) { return run_backward(c, k, false); }
#endif

#ifdef ORT_DEVICE
#include "cuda/kernels/philox.h"

#define TEMPLATE "cuda/kernels/norm.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

/* What storing a number as `type` leaves of it: T's own, or 16 bits where T is float. */
DEVICE A NAME(rounded)(int type, A x) {
    if (type == BF16) return (A)bf16_to_f32(f32_to_bf16((float)x));
    if (type == F16) return (A)f16_to_f32(f32_to_f16((float)x));
    return x;
}

/* A row of x, of which a dropout may have left some, and the other operand. With dropout a thread takes the elements of
 * one counter's random words, which are 16 apart. */
DEVICE void NAME(add_row)(const norm_args *a, int64_t row) {
    const T *other = (const T *)a->other;
    T *sum = (T *)a->sum;
    const int64_t begin = row * a->width, end = begin + a->width, first = begin / 64;

    if (!a->drops) {
        FOR_THREADS(i, a->width) {
            const int64_t at = begin + i;
            sum[at] = PUT(NUMBER_AT(a->x, a->from, at) + GET(other[at]));
        }
        return;
    }
    const uint64_t seed = a->seed_at ? *a->seed_at : a->seed;
    FOR_THREADS(i, ((end + 63) / 64 - first) * 16) {
        const int64_t place = (first + i / 16) * 64 + i % 16;
        uint32_t word[4];
        draw(seed, a->key, counter_of(place), word);
        for (int j = 0; j < 4; j++) {
            const int64_t at = place + 16 * j;
            if (at < begin || at >= end) continue;
            const A kept = NUMBER_AT(a->x, a->from, at) * (word[j] >= a->threshold ? (A)a->factor : 0);
            sum[at] = PUT(NAME(rounded)(a->from, kept) + GET(other[at]));
        }
    }
}

/* y may lie where x or the sum does. */
KERNEL(NAME(norm_rows), norm_args) {
    FOR_BLOCKS(row, a.rows) {
        const T *x = (const T *)(a.other ? a.sum : a.x) + row * a.width;
        A m = 0, r = 0;

        if (a.other) {
            NAME(add_row)(&a, row);
            __syncthreads();
        }
        if (a.centred) {
            double total = 0; /* so that nothing is left of a row whose elements are the same */
            FOR_THREADS(i, a.width) total += (double)GET(x[i]);
            m = (A)(block_sum_f64(total) / (double)a.width);
        }
        FOR_THREADS(i, a.width) r += (GET(x[i]) - m) * (GET(x[i]) - m);
        r = 1 / SQRT(SUM(r) / (A)a.width + (A)a.epsilon);
        if (threadIdx.x == 0) {
            if (a.means) ((A *)a.means)[row] = m;
            if (a.inverses) ((A *)a.inverses)[row] = r;
        }
        FOR_THREADS(i, a.width) {
            const int64_t at = row * a.width + i;
            A v = (GET(x[i]) - m) * r * NUMBER_AT(a.scale, a.scale_type, i);
            if (a.bias) v += NUMBER_AT(a.bias, a.bias_type, i);
            if (a.narrow && a.to == BF16) ((bf16 *)a.narrow)[at] = f32_to_bf16((float)v);
            else if (a.narrow) ((f16 *)a.narrow)[at] = f32_to_f16((float)v);
            if (a.out) ((T *)a.out)[at] = PUT(v);
        }
    }
}

KERNEL(NAME(norm_grad_rows), norm_args) {
    FOR_BLOCKS(row, a.rows) {
        const int64_t first = row * a.width;
        const T *x = (const T *)a.x + first, *other = (const T *)a.other;
        T *dx = (T *)a.out;
        const A m = a.means ? ((const A *)a.means)[row] : 0, r = ((const A *)a.inverses)[row];
        A sum = 0, dot = 0;

        FOR_THREADS(i, a.width) {
            const A g = NUMBER_AT(a.dy, a.from, first + i) * NUMBER_AT(a.scale, a.scale_type, i);
            sum += g;
            dot += g * ((GET(x[i]) - m) * r);
        }
        dot = SUM(dot) / (A)a.width;
        sum = SUM(sum) / (A)a.width;
        if (!a.centred) sum = 0;
        FOR_THREADS(i, a.width) {
            const A g = NUMBER_AT(a.dy, a.from, first + i) * NUMBER_AT(a.scale, a.scale_type, i);
            const A d = r * (g - sum - (GET(x[i]) - m) * r * dot);
            dx[first + i] = other ? PUT(GET(PUT(d)) + GET(other[first + i])) : PUT(d);
        }
    }
}

/* Columns of a part of the rows: a thread for each column in each of LANES lanes of rows. */
KERNEL(NAME(norm_grad_columns), norm_args) {
    SHARED(A, scales, WARP * LANES);
    SHARED(A, biases, WARP * LANES);
    const int64_t groups = (a.width + WARP - 1) / WARP;
    const int lane = threadIdx.x / WARP;

    FOR_BLOCKS(task, groups * a.parts) {
        const int64_t part = quotient(task, groups), i = (task - part * groups) * WARP + threadIdx.x % WARP;
        const int64_t begin = quotient(a.rows * part, a.parts), end = quotient(a.rows * (part + 1), a.parts);
        A dscale = 0, dbias = 0;

        for (int64_t row = begin + lane; row < end && i < a.width; row += LANES) {
            const A m = a.means ? ((const A *)a.means)[row] : 0, r = ((const A *)a.inverses)[row];
            const A d = NUMBER_AT(a.dy, a.from, row * a.width + i);
            dscale += d * ((GET(((const T *)a.x)[row * a.width + i]) - m) * r);
            dbias += d;
        }
        scales[threadIdx.x] = dscale;
        biases[threadIdx.x] = dbias;
        __syncthreads();
        if (lane == 0 && i < a.width) {
            for (int other = 1; other < LANES; other++) {
                dscale += scales[threadIdx.x + WARP * other];
                dbias += biases[threadIdx.x + WARP * other];
            }
            ((A *)a.partial)[2 * part * a.width + i] = dscale;
            ((A *)a.partial)[(2 * part + 1) * a.width + i] = dbias;
        }
        __syncthreads();
    }
}

KERNEL(NAME(norm_grad_join), norm_args) {
    FOR_EACH(i, a.width) {
        double dscale = 0, dbias = 0;
        for (int64_t part = 0; part < a.parts; part++) {
            dscale += ((const A *)a.partial)[2 * part * a.width + i];
            dbias += ((const A *)a.partial)[(2 * part + 1) * a.width + i];
        }
        if (a.dscale) set_number(a.dscale, a.scale_type, i, dscale);
        if (a.dbias) set_number(a.dbias, a.scale_type, i, dbias);
    }
}
#endif
