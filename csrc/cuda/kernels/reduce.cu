/* reduce.cu -- mirrors ops/reductions/reduce_kernel.c: ReduceSum and ReduceMean of floats over any axes.
 *
 * Where the last axis is reduced a block has a result. Otherwise neighbouring results are neighbouring columns. Of few
 * rows a thread adds up eight of them, in order. Of more a block adds up to 256 over one part of the rows, whose number
 * depends on the shape alone, and a second kernel the parts, in order. A thread reads eight neighbours of four rows at a
 * time in pieces of 16 bytes. Totals are float, and double for float64 and
 * between parts. */
#ifndef T
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct reduce_args {
    const void *x;
    void *out;
    double *partial;                                      /* [parts, outputs] */
    int64_t outputs, length, inner, parts;                /* results; elements in each; neighbouring results */
    int64_t kept[8], kept_step[8], gone[8], gone_step[8]; /* the dimensions but `inner`, and their strides */
    int32_t n_kept, n_gone;
    int32_t wide,
        whole; /* `out` is float32; whether every ROW_PIECE neighbours of x are one piece, but for its address */
    double divisor;
} reduce_args;

enum { LANES = 8 }; /* of rows, in a block */

#ifdef ORT_HOST
#include "cuda/kernels/reduce.h"
#include "ops/reductions/reduce_kernel.h"

kernel_fn reduce_sum_cuda, reduce_mean_cuda, fold_sum_cuda; /* the last in fold.cu */
size_t reduce_cuda_workspace(const node *n);

/* Rows that one thread adds up, however few results there are, and as many as keep a GPU busy without lanes of rows. */
enum { FEW_ROWS = 32, MANY_OUTPUTS = 1 << 18 };
static bool are_few(const reduce_args *a) {
    return a->inner > 1 && a->parts == 1 && (a->length <= FEW_ROWS || a->outputs >= MANY_OUTPUTS);
}

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

/* Memory for totals of parts. */
static size_t workspace_of(const reduce_args *a) {
    return a->inner > 1 && !are_few(a) ? (size_t)(a->parts * a->outputs) * sizeof(double) : 0;
}

size_t reduce_cuda_workspace(const node *n) {
    reduce_args a = args_of(n);
    return workspace_of(&a);
}

/* What `a` says, of elements of `type`. */
static status start(ctx *c, const call *k, dtype type, reduce_args *a) {
    static kernel rows[DTYPE_COUNT] = FLOAT_KERNELS(reduce_rows), columns[DTYPE_COUNT] = FLOAT_KERNELS(reduce_columns),
                  join[DTYPE_COUNT] = FLOAT_KERNELS(reduce_join), few[DTYPE_COUNT] = FLOAT_KERNELS(reduce_few);

    a->partial = k->work;
    if (a->inner == 1) return cuda_launch(c, k, &rows[type], geometry_rows(a->outputs, a->length), a);
    a->whole = a->inner % ROW_PIECE == 0;
    for (int d = 0; d < a->n_kept; d++) a->whole = a->whole && a->kept_step[d] % ROW_PIECE == 0;
    for (int d = 0; d < a->n_gone; d++) a->whole = a->whole && a->gone_step[d] % ROW_PIECE == 0;
    if (are_few(a)) {
        int64_t tasks = a->outputs / a->inner * ((a->inner + ROW_PIECE - 1) / ROW_PIECE);
        return cuda_launch(c, k, &few[type], geometry_over(tasks, 128, 128), a);
    }
    int across = WARP / LANES; /* threads for neighbouring columns: no more than have some, of whole warps */
    while (across < WARP && across * ROW_PIECE < a->inner) across *= 2;
    const int64_t wide = across * ROW_PIECE, tasks = a->outputs / a->inner * ((a->inner + wide - 1) / wide) * a->parts;
    TRY(cuda_launch(c, k, &columns[type], geometry_over(tasks, 1, across * LANES), a));
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
/* Where row i of what is added up begins. */
DEVICE int64_t row_of(const reduce_args *a, int64_t i) {
    return a->n_gone == 1 ? i * a->gone_step[0] : place_along(i, a->n_gone, a->gone, a->gone_step);
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
        const T *x = (const T *)a.x + place_along(o, a.n_kept, a.kept, a.kept_step);
        A total = 0;
        if (a.n_gone == 1) {
            FOR_THREADS(i, a.length) total += GET(x[i * a.gone_step[0]]);
        } else {
            FOR_THREADS(i, a.length) total += GET(x[place_along(i, a.n_gone, a.gone, a.gone_step)]);
        }
        total = SUM(total);
        if (threadIdx.x == 0) STORE_TOTAL(o, (double)total / a.divisor);
    }
}

/* Columns [first, first + AT_ONCE) of rows [begin, end), every step-th, in order. */
DEVICE void NAME(add_rows)(const reduce_args *a, const T *x, int64_t first, int64_t begin, int64_t end, int step,
                           A total[AT_ONCE]) {
    enum { EACH = PIECES_OF(TYPE) };

    if (!a->whole || !IS_ALIGNED(a->x, TYPE)) {
        for (int64_t i = begin; i < end; i += step) {
            A v[AT_ONCE];
            TAKE(x + row_of(a, i), TYPE, first, 0, a->inner, v);
            UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] += v[j];
        }
        return;
    }
    for (int64_t i = begin; i < end; i += EACH * step) {
        int64_t at[EACH];
        uint32_t there = 0;
        A v[EACH][AT_ONCE];
        UNROLL for (int k = 0; k < EACH; k++) {
            const int is = i + k * step < end;
            at[k] = is ? row_of(a, i + k * step) + first : 0;
            there |= (uint32_t)is << k;
        }
        READ_PIECES(x, TYPE, at, there, v);
        UNROLL for (int k = 0; k < EACH; k++) {
            UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] = there >> k & 1 ? total[j] + v[k][j] : total[j];
        }
    }
}

/* Columns of a part of the rows: a thread for eight neighbours in each of LANES lanes of rows. */
KERNEL(NAME(reduce_columns), reduce_args) {
    SHARED(A, totals, WARP * ROW_PIECE * LANES);
    const int across = blockDim.x / LANES, wide = across * AT_ONCE, lane = threadIdx.x / across;
    const int own = threadIdx.x % across * AT_ONCE;
    const int64_t groups = (a.inner + wide - 1) / wide, outer = a.outputs / a.inner;

    FOR_BLOCKS(task, outer * groups * a.parts) {
        const int64_t group = quotient(task, groups), o = quotient(group, a.parts), part = group - o * a.parts;
        const int64_t column = (task - group * groups) * wide;
        const int64_t begin = quotient(a.length * part, a.parts), end = quotient(a.length * (part + 1), a.parts);
        const T *x = (const T *)a.x + place_along(o, a.n_kept, a.kept, a.kept_step);
        A total[AT_ONCE] = {0};

        if (column + own < a.inner) NAME(add_rows)(&a, x, column + own, begin + lane, end, LANES, total);
        UNROLL for (int j = 0; j < AT_ONCE; j++) totals[lane * wide + own + j] = total[j];
        __syncthreads();
        FOR_THREADS(i, wide) {
            double sum = totals[i];
            if (column + i >= a.inner) continue;
            for (int other = 1; other < LANES; other++) sum += totals[other * wide + i];
            a.partial[part * a.outputs + o * a.inner + column + i] = sum;
        }
        __syncthreads();
    }
}

KERNEL(NAME(reduce_few), reduce_args) {
    const int64_t groups = (a.inner + AT_ONCE - 1) / AT_ONCE;

    FOR_EACH(task, a.outputs / a.inner * groups) {
        const int64_t o = quotient(task, groups), first = (task - o * groups) * AT_ONCE, out = o * a.inner;
        A total[AT_ONCE] = {0};

        const T *x = (const T *)a.x + place_along(o, a.n_kept, a.kept, a.kept_step);
        NAME(add_rows)(&a, x, first, 0, a.length, 1, total);
        if (a.divisor != 1) {
            UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] = (A)((double)total[j] / a.divisor);
        }
        GIVE(a.out, a.wide ? F32 : TYPE, out + first, out, out + a.inner, total);
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
