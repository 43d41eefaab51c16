/* groupnorm.cu -- mirrors the part of ops/norms/norm.c on groups of channels: GroupNorm and its gradient.
 *
 * A block has a row: the channels of one group of one sample. What a row adds to the gradients of scale and bias is
 * kept for each of its channels, and a second kernel adds up the samples, in order. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct group_args {
    const void *x, *dy, *scale, *bias;
    void *out;              /* y or dx; the latter may be absent */
    void *means, *inverses; /* as they are computed in, float or double; absent forward if not asked for */
    void *dscale, *dbias;   /* either may be absent */
    double *sums;           /* [samples, groups, channels, 2] */
    int64_t samples, groups, channels, size; /* channels of a group, elements of a channel */
    double epsilon;
    int32_t scale_type, bias_type;
} group_args;

#ifdef ORT_HOST
kernel_fn group_norm_cuda, group_norm_grad_cuda;
size_t group_norm_grad_cuda_workspace(const node *n);

/* Operands of the gradient. */
enum { DY, X, SCALE, INVERSES, MEANS };

static group_args args_of(const call *k, const tensor *x) {
    group_args a = {.x = x->data, .samples = x->shape.dim[0], .groups = node_int(k->node, "groups")};
    a.channels = a.groups ? x->shape.dim[1] / a.groups : 0;
    a.size = shape_span(&x->shape, 2, x->shape.rank);
    a.epsilon = node_has(k->node, "epsilon") ? node_float(k->node, "epsilon") : 0;
    return a;
}

static void *data_of(const tensor *t, int n, int i) { return i < n && tensor_present(&t[i]) ? t[i].data : NULL; }

status group_norm_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(group_rows);
    group_args a = args_of(k, &k->in[0]);

    a.scale = k->in[1].data;
    a.scale_type = k->in[1].type;
    a.bias = k->in[2].data;
    a.bias_type = k->in[2].type;
    a.out = k->out[0].data;
    a.means = data_of(k->out, k->n_out, 1);
    a.inverses = data_of(k->out, k->n_out, 2);
    return cuda_launch(c, k, &kernels[k->in[0].type], geometry_rows(a.samples * a.groups, a.channels * a.size), &a);
}

size_t group_norm_grad_cuda_workspace(const node *n) {
    const shape *s = &n->in[X]->shape;
    return (size_t)(2 * s->dim[0] * s->dim[1]) * sizeof(double);
}

status group_norm_grad_cuda(ctx *c, const call *k) {
    static kernel rows[DTYPE_COUNT] = FLOAT_KERNELS(group_grad_rows);
    static kernel join = {.name = "group_grad_join"};
    group_args a = args_of(k, &k->in[X]);

    a.dy = k->in[DY].data;
    a.scale = k->in[SCALE].data;
    a.scale_type = k->in[SCALE].type;
    a.inverses = k->in[INVERSES].data;
    a.means = k->in[MEANS].data;
    a.out = data_of(k->out, k->n_out, 0);
    a.dscale = data_of(k->out, k->n_out, 1);
    a.dbias = data_of(k->out, k->n_out, 2);
    a.bias_type = a.dbias ? k->out[2].type : DT_NONE;
    a.sums = k->work;
    TRY(cuda_launch(c, k, &rows[k->in[X].type], geometry_rows(a.samples * a.groups, a.channels * a.size), &a));
    return cuda_launch(c, k, &join, geometry_over(a.groups * a.channels, 128, 128), &a);
}
#endif

#ifdef ORT_DEVICE
KERNEL(group_grad_join, group_args) {
    const int64_t channels = a.groups * a.channels;
    FOR_EACH(i, channels) {
        double dscale = 0, dbias = 0;
        for (int64_t sample = 0; sample < a.samples; sample++) {
            dscale += a.sums[2 * (sample * channels + i)];
            dbias += a.sums[2 * (sample * channels + i) + 1];
        }
        if (a.dscale) set_number(a.dscale, a.scale_type, i, dscale);
        if (a.dbias) set_number(a.dbias, a.bias_type, i, dbias);
    }
}

#define TEMPLATE "cuda/kernels/groupnorm.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(group_rows), group_args) {
    const int64_t width = a.channels * a.size;

    FOR_BLOCKS(row, a.samples * a.groups) {
        const T *x = (const T *)a.x + row * width;
        T *y = (T *)a.out + row * width;
        const int64_t first = row % a.groups * a.channels;
        double total = 0; /* so that nothing is left where all elements are the same */
        A r = 0;

        FOR_THREADS(i, width) total += (double)GET(x[i]);
        const A m = (A)(block_sum_f64(total) / (double)width);
        FOR_THREADS(i, width) r += (GET(x[i]) - m) * (GET(x[i]) - m);
        r = 1 / SQRT(SUM(r) / (A)width + (A)a.epsilon);
        if (threadIdx.x == 0) {
            if (a.means) ((A *)a.means)[row] = m;
            if (a.inverses) ((A *)a.inverses)[row] = r;
        }
        FOR_THREADS(i, width) {
            const int64_t channel = first + i / a.size;
            const A scale = r * NUMBER_AT(a.scale, a.scale_type, channel);
            y[i] = PUT((GET(x[i]) - m) * scale + NUMBER_AT(a.bias, a.bias_type, channel));
        }
    }
}

KERNEL(NAME(group_grad_rows), group_args) {
    const int64_t width = a.channels * a.size;

    FOR_BLOCKS(row, a.samples * a.groups) {
        const T *x = (const T *)a.x + row * width, *dy = (const T *)a.dy + row * width;
        const int64_t first = row % a.groups * a.channels;
        const A m = ((const A *)a.means)[row], r = ((const A *)a.inverses)[row];
        double all = 0, all_dot = 0;

        for (int64_t channel = 0; channel < a.channels; channel++) {
            const double scale = number_f64(a.scale, a.scale_type, first + channel);
            double sum = 0, dot = 0;
            FOR_THREADS(i, a.size) {
                const A d = GET(dy[channel * a.size + i]);
                sum += (double)d;
                dot += (double)(d * ((GET(x[channel * a.size + i]) - m) * r));
            }
            sum = block_sum_f64(sum);
            dot = block_sum_f64(dot);
            if (threadIdx.x == 0) {
                a.sums[2 * (row * a.channels + channel)] = dot;
                a.sums[2 * (row * a.channels + channel) + 1] = sum;
            }
            all += sum * scale;
            all_dot += dot * scale;
        }
        if (a.out) {
            T *dx = (T *)a.out + row * width;
            const A mean = (A)(all / (double)width), mean_dot = (A)(all_dot / (double)width);
            FOR_THREADS(i, width) {
                const A scale = NUMBER_AT(a.scale, a.scale_type, first + i / a.size);
                dx[i] = PUT(r * (GET(dy[i]) * scale - mean - (GET(x[i]) - m) * r * mean_dot));
            }
        }
    }
}
#endif
