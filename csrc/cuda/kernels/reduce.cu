/* reduce.cu -- twin of ops/reductions/reduce_kernel.c: ReduceSum and ReduceMean of floats over any axes.
 *
 * Where the last axis is reduced a block has a result. Otherwise neighbouring results are neighbouring columns: a block
 * adds up 32 of them over one part of the rows, whose number depends on the shape alone, and a second kernel the parts,
 * in order. Totals are float, and double for float64 and between parts. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct reduce_args {
    const void *x;
    void *out;
    double *partial;                                      /* [parts, outputs] */
    int64_t outputs, length, inner, parts;                /* results; elements in each; neighbouring results */
    int64_t kept[8], kept_step[8], gone[8], gone_step[8]; /* the dimensions but `inner`, and their strides */
    int32_t n_kept, n_gone;
    int32_t wide, unused; /* wide: `out` is float32 */
    double divisor;
} reduce_args;

enum { LANES = 8 };

#ifdef ORT_HOST
#include "cuda/kernels/reduce.h"
#include "ops/reductions/reduce_kernel.h"

kernel_fn reduce_sum_cuda, reduce_mean_cuda, fold_sum_cuda; /* the last in fold.cu */
size_t reduce_cuda_workspace(const node *n);

static int64_t parts_of(int64_t length) { return length / 64 < 1 ? 1 : length / 64 < 64 ? length / 64 : 64; }

static reduce_args args_of(const node *n) {
    const shape *s = &n->in[0]->shape;
    const unsigned axes = reduced_axes(n);
    reduce_args a = {.outputs = 1, .length = 1, .inner = 1, .parts = 1};
    int64_t stride = 1;
    bool innermost = true;

    for (int d = s->rank - 1; d >= 0; d--) {
        const int64_t size = s->dim[d];
        const bool is_gone = axes >> d & 1;
        if (is_gone) a.length *= size;
        else a.outputs *= size;
        if (size != 1) {
            if (is_gone) {
                a.gone[a.n_gone] = size;
                a.gone_step[a.n_gone++] = stride;
            } else if (innermost) {
                a.inner *= size;
            } else {
                a.kept[a.n_kept] = size;
                a.kept_step[a.n_kept++] = stride;
            }
            innermost = innermost && !is_gone;
        }
        stride *= size;
    }
    if (a.inner > 1) a.parts = parts_of(a.length);
    return a;
}

size_t reduce_cuda_workspace(const node *n) {
    reduce_args a = args_of(n);
    return a.inner > 1 ? (size_t)(a.parts * a.outputs) * sizeof(double) : 0;
}

/* What `a` says, of elements of `type`. */
static status start(ctx *c, const call *k, dtype type, reduce_args *a) {
    static kernel rows[DTYPE_COUNT] = FLOAT_KERNELS(reduce_rows), columns[DTYPE_COUNT] = FLOAT_KERNELS(reduce_columns),
                  join[DTYPE_COUNT] = FLOAT_KERNELS(reduce_join);

    a->partial = k->work;
    if (a->inner == 1) return cuda_launch(c, k, &rows[type], geometry_rows(a->outputs, a->length), a);
    int64_t tasks = a->outputs / a->inner * ((a->inner + WARP - 1) / WARP) * a->parts;
    TRY(cuda_launch(c, k, &columns[type], geometry_over(tasks, 1, WARP * LANES), a));
    return cuda_launch(c, k, &join[type], geometry_over(a->outputs, 128, 128), a);
}

static status run(ctx *c, const call *k, bool mean) {
    reduce_args a = args_of(k->node);

    if (!dtype_is_float(k->in[0].type)) return fold_sum_cuda(c, k); /* means are of floats */
    a.x = k->in[0].data;
    a.out = k->out[0].data;
    a.divisor = mean ? (double)a.length : 1;
    return start(c, k, k->in[0].type, &a);
}

size_t cuda_totals_workspace(int64_t lines, int64_t length) {
    return (size_t)(parts_of(length) * lines) * sizeof(double);
}

status cuda_totals(ctx *c, const call *k, const matrix *x, dtype out_type, void *out) {
    reduce_args a = {.x = x->data, .out = out, .outputs = x->lines, .length = x->length, .inner = 1, .parts = 1};

    a.wide = out_type != x->type;
    a.divisor = 1;
    a.n_gone = 1, a.gone[0] = x->length, a.gone_step[0] = x->step;
    if (x->line == 1 && x->lines > 1) {
        a.inner = x->lines;
        a.parts = parts_of(x->length);
    } else {
        a.n_kept = 1, a.kept[0] = x->lines, a.kept_step[0] = x->line;
    }
    return start(c, k, x->type, &a);
}

status reduce_sum_cuda(ctx *c, const call *k) { return run(c, k, false); }
status reduce_mean_cuda(ctx *c, const call *k) { return run(c, k, true); }
#endif

#ifdef ORT_DEVICE
/* The dimensions are in rising order of their strides. */
DEVICE int64_t walk(int64_t i, int n, const int64_t *dim, const int64_t *step) {
    int64_t offset = 0;
    for (int d = 0; d < n; d++) {
        const int64_t next = quotient(i, dim[d]);
        offset += (i - next * dim[d]) * step[d];
        i = next;
    }
    return offset;
}

#define STORE_TOTAL(o, total)                                                                                          \
    do {                                                                                                               \
        const A x_ = (A)(total);                                                                                       \
        if (a.wide) ((float *)a.out)[o] = (float)x_;                                                                   \
        else ((T *)a.out)[o] = PUT(x_);                                                                                \
    } while (0)

#define TEMPLATE "cuda/kernels/reduce.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(reduce_rows), reduce_args) {
    FOR_BLOCKS(o, a.outputs) {
        const T *x = (const T *)a.x + walk(o, a.n_kept, a.kept, a.kept_step);
        A total = 0;
        if (a.n_gone == 1) {
            FOR_THREADS(i, a.length) total += GET(x[i * a.gone_step[0]]);
        } else {
            FOR_THREADS(i, a.length) total += GET(x[walk(i, a.n_gone, a.gone, a.gone_step)]);
        }
        total = SUM(total);
        if (threadIdx.x == 0) STORE_TOTAL(o, (double)total / a.divisor);
    }
}

KERNEL(NAME(reduce_columns), reduce_args) {
    SHARED(A, totals, WARP * LANES);
    const int64_t groups = (a.inner + WARP - 1) / WARP, outer = a.outputs / a.inner;
    const int lane = threadIdx.x / WARP;

    FOR_BLOCKS(task, outer * groups * a.parts) {
        const int64_t group = quotient(task, groups), o = quotient(group, a.parts), part = group - o * a.parts;
        const int64_t column = (task - group * groups) * WARP + threadIdx.x % WARP;
        const int64_t begin = quotient(a.length * part, a.parts), end = quotient(a.length * (part + 1), a.parts);
        const T *x = (const T *)a.x + walk(o, a.n_kept, a.kept, a.kept_step) + column;
        A total = 0;

        for (int64_t i = begin + lane; i < end && column < a.inner; i += LANES)
            total += GET(x[a.n_gone == 1 ? i * a.gone_step[0] : walk(i, a.n_gone, a.gone, a.gone_step)]);
        totals[threadIdx.x] = total;
        __syncthreads();
        if (lane == 0 && column < a.inner) {
            double sum = total;
            for (int other = 1; other < LANES; other++) sum += totals[threadIdx.x + WARP * other];
            a.partial[part * a.outputs + o * a.inner + column] = sum;
        }
        __syncthreads();
    }
}

KERNEL(NAME(reduce_join), reduce_args) {
    FOR_EACH(o, a.outputs) {
        double total = 0;
        for (int64_t part = 0; part < a.parts; part++) total += a.partial[part * a.outputs + o];
        STORE_TOTAL(o, total / a.divisor);
    }
}
#endif
