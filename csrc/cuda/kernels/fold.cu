/* fold.cu -- mirrors the rest of reduce_kernel.c and argreduce.c: maxima, products, norms, sums of integers, and where
 * extremes are.
 *
 * A block has a result; its threads fold elements in steps, then one folds what they have, in order. Where results are
 * neighbours, of few elements each or so many that all threads have work, a thread has one. Floats are folded as double,
 * integers as 64 bits. */
#ifndef A
#include "cuda/kernels/kernel.h"

typedef enum fold_kind {
    FOLD_SUM,
    FOLD_MAX,
    FOLD_MIN,
    FOLD_PROD,
    FOLD_L1,
    FOLD_SQUARE,
    FOLD_EQUAL,   /* elements that equal the result's place in a second operand */
    FOLD_NONZERO, /* product of those that are not 0 */
    FOLD_EXP      /* log of the sum of exponentials */
} fold_kind;

typedef enum fold_finish { FINISH_NOTHING, FINISH_SQRT, FINISH_LOG } fold_finish;

typedef struct fold_args {
    const void *x, *second;
    void *out;
    int64_t outputs, length, kept[8], kept_step[8], gone[8], gone_step[8]; /* innermost dimensions first */
    int32_t n_kept, n_gone, type, out_type, kind, finish;
} fold_args;

typedef struct arg_args {
    const void *x;
    int64_t *out;
    int64_t lanes, length, inner;
    int32_t type, largest, last;
} arg_args;

#ifdef ORT_HOST
#include "ops/reductions/reduce_kernel.h"

kernel_fn fold_sum_cuda, reduce_max_cuda, reduce_min_cuda, reduce_prod_cuda, reduce_l1_cuda, reduce_l2_cuda,
    reduce_sum_square_cuda, reduce_log_sum_cuda, reduce_log_sum_exp_cuda, reduce_count_equal_cuda,
    reduce_prod_nonzero_cuda, arg_max_cuda, arg_min_cuda;

enum { FEW_FOLDED = 32, MANY_RESULTS = 1 << 18 };

static status run(ctx *c, const call *k, fold_kind kind, fold_finish finish) {
    static kernel of_floats = {.name = "fold_floats"}, of_integers = {.name = "fold_integers"};
    static kernel few_floats = {.name = "fold_few_floats"}, few_integers = {.name = "fold_few_integers"};
    const bool are_floats = dtype_is_float(k->in[0].type);
    const shape *s = &k->in[0].shape;
    int64_t inner = 0; /* the size of the last dimension with several elements where it stays, else 1 */
    const unsigned axes = reduced_axes(k->node);
    fold_args a = {.x = k->in[0].data, .out = k->out[0].data, .outputs = 1, .length = 1};
    int64_t stride = 1;

    for (int d = s->rank - 1; d >= 0; stride *= s->dim[d--]) {
        const int64_t size = s->dim[d];
        if (inner == 0 && size != 1) inner = axes >> d & 1 ? 1 : size;
        if (axes >> d & 1) {
            a.length *= a.gone[a.n_gone] = size;
            a.gone_step[a.n_gone++] = stride;
        } else {
            a.outputs *= a.kept[a.n_kept] = size;
            a.kept_step[a.n_kept++] = stride;
        }
    }
    a.second = k->n_in > 1 ? k->in[1].data : NULL;
    a.type = k->in[0].type;
    a.out_type = k->out[0].type;
    a.kind = kind;
    a.finish = finish;
    if (inner > 1 && (a.length <= FEW_FOLDED || a.outputs >= MANY_RESULTS))
        return cuda_launch(c, k, are_floats ? &few_floats : &few_integers, geometry_over(a.outputs, 128, 128), &a);
    return cuda_launch(c, k, are_floats ? &of_floats : &of_integers, geometry_rows(a.outputs, a.length), &a);
}

#define FOLD(name, kind, finish)                                                                                       \
    status name(ctx *c, const call *k) { return run(c, k, kind, finish); }
FOLD(fold_sum_cuda, FOLD_SUM, FINISH_NOTHING)
FOLD(reduce_max_cuda, FOLD_MAX, FINISH_NOTHING)
FOLD(reduce_min_cuda, FOLD_MIN, FINISH_NOTHING)
FOLD(reduce_prod_cuda, FOLD_PROD, FINISH_NOTHING)
FOLD(reduce_l1_cuda, FOLD_L1, FINISH_NOTHING)
FOLD(reduce_l2_cuda, FOLD_SQUARE, FINISH_SQRT)
FOLD(reduce_sum_square_cuda, FOLD_SQUARE, FINISH_NOTHING)
FOLD(reduce_log_sum_cuda, FOLD_SUM, FINISH_LOG)
FOLD(reduce_log_sum_exp_cuda, FOLD_EXP, FINISH_LOG)
FOLD(reduce_count_equal_cuda, FOLD_EQUAL, FINISH_NOTHING)
FOLD(reduce_prod_nonzero_cuda, FOLD_NONZERO, FINISH_NOTHING)

static status run_arg(ctx *c, const call *k, bool largest) {
    static kernel of_floats = {.name = "arg_floats"}, of_integers = {.name = "arg_integers"};
    const shape *s = &k->in[0].shape;
    arg_args a = {.x = k->in[0].data, .out = k->out[0].data, .type = k->in[0].type, .largest = largest};
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), s->rank, &axis));
    a.length = s->rank ? s->dim[axis] : 1;
    a.inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    a.lanes = tensor_count(&k->out[0]);
    a.last = node_int(k->node, "select_last_index") != 0;
    return cuda_launch(c, k, dtype_is_float(k->in[0].type) ? &of_floats : &of_integers,
                       geometry_rows(a.lanes, a.length), &a);
}

status arg_max_cuda(ctx *c, const call *k) { return run_arg(c, k, true); }
status arg_min_cuda(ctx *c, const call *k) { return run_arg(c, k, false); }
#endif

#ifdef ORT_DEVICE
enum { MOST_FOLDED = 512 }; /* threads of geometry_rows */

DEVICE double start_floats(int kind) {
    return kind == FOLD_MAX                            ? -INFINITY
           : kind == FOLD_MIN                          ? INFINITY
           : kind == FOLD_PROD || kind == FOLD_NONZERO ? 1
                                                       : 0;
}

/* Of an element; `shift` is what it is compared with, or less. */
DEVICE double term_floats(int kind, double x, double shift) {
    switch (kind) {
    case FOLD_L1: return fabs(x);
    case FOLD_SQUARE: return x * x;
    case FOLD_EQUAL: return x == shift;
    case FOLD_NONZERO: return x == 0 ? 1 : x;
    case FOLD_EXP: return exp(x - shift);
    default: return x;
    }
}

/* NaN wins. */
DEVICE double join_floats(int kind, double t, double x) {
    switch (kind) {
    case FOLD_MAX: return x > t || x != x ? x : t;
    case FOLD_MIN: return x < t || x != x ? x : t;
    case FOLD_PROD:
    case FOLD_NONZERO: return t * x;
    default: return t + x;
    }
}

DEVICE int64_t start_integers(int kind) {
    return kind == FOLD_MAX ? INT64_MIN : kind == FOLD_MIN ? INT64_MAX : kind == FOLD_PROD;
}

DEVICE int64_t term_integers(int kind, int64_t x, int64_t shift) {
    (void)shift;
    return kind == FOLD_L1       ? (int64_t)(x < 0 ? 0 - (uint64_t)x : (uint64_t)x)
           : kind == FOLD_SQUARE ? (int64_t)((uint64_t)x * (uint64_t)x)
                                 : x;
}

DEVICE int64_t join_integers(int kind, int64_t t, int64_t x) {
    return kind == FOLD_MAX    ? (x > t ? x : t)
           : kind == FOLD_MIN  ? (x < t ? x : t)
           : kind == FOLD_PROD ? (int64_t)((uint64_t)t * (uint64_t)x)
                               : (int64_t)((uint64_t)t + (uint64_t)x);
}

#define A double
#define NAME(f) f##_floats
#define READ number_f64
#include "cuda/kernels/fold.cu"
#undef A
#undef NAME
#undef READ

#define A int64_t
#define NAME(f) f##_integers
#define READ integer_at
#include "cuda/kernels/fold.cu"
#undef A
#undef NAME
#undef READ

DEVICE double finished(const fold_args *a, double total, double shift) {
    if (a->finish == FINISH_SQRT) return sqrt(total);
    if (a->finish == FINISH_LOG) return log(total) + (a->kind == FOLD_EXP ? shift : 0);
    return total;
}

/* What elements of result `o` are compared with. */
DEVICE double second_of(const fold_args *a, int64_t o) {
    return a->kind == FOLD_EQUAL ? number_f64(a->second, a->type, o) : 0;
}

KERNEL(fold_floats, fold_args) {
    FOR_BLOCKS(o, a.outputs) {
        const int64_t base = place_along(o, a.n_kept, a.kept, a.kept_step);
        double shift = second_of(&a, o);

        if (a.kind == FOLD_EXP) {
            shift = fold_some_floats(&a, FOLD_MAX, base, 0, threadIdx.x, blockDim.x);
            shift = join_all_floats(FOLD_MAX, shift, start_floats(FOLD_MAX));
            if (isinf(shift)) shift = 0;
        }
        double total = fold_some_floats(&a, a.kind, base, shift, threadIdx.x, blockDim.x);
        total = finished(&a, join_all_floats(a.kind, total, start_floats(a.kind)), shift);
        if (threadIdx.x == 0) set_number(a.out, a.out_type, o, total);
    }
}

KERNEL(fold_few_floats, fold_args) {
    FOR_EACH(o, a.outputs) {
        const int64_t base = place_along(o, a.n_kept, a.kept, a.kept_step);
        double shift = second_of(&a, o);

        if (a.kind == FOLD_EXP) {
            shift = fold_some_floats(&a, FOLD_MAX, base, 0, 0, 1);
            if (isinf(shift)) shift = 0;
        }
        set_number(a.out, a.out_type, o, finished(&a, fold_some_floats(&a, a.kind, base, shift, 0, 1), shift));
    }
}

KERNEL(fold_integers, fold_args) {
    FOR_BLOCKS(o, a.outputs) {
        const int64_t mine =
            fold_some_integers(&a, a.kind, place_along(o, a.n_kept, a.kept, a.kept_step), 0, threadIdx.x, blockDim.x);
        const int64_t total = join_all_integers(a.kind, mine, start_integers(a.kind));
        if (threadIdx.x == 0) set_integer(a.out, a.out_type, o, total);
    }
}

KERNEL(fold_few_integers, fold_args) {
    FOR_EACH(o, a.outputs)
    set_integer(a.out, a.out_type, o,
                fold_some_integers(&a, a.kind, place_along(o, a.n_kept, a.kept, a.kept_step), 0, 0, 1));
}
#endif

#else /* the template */

/* Of a result's elements every `step`-th, from `first` on. */
DEVICE A NAME(fold_some)(const fold_args *a, int kind, int64_t base, A shift, int64_t first, int64_t step) {
    A total = NAME(start)(kind);
    for (int64_t i = first; i < a->length; i += step) {
        const A x = READ(a->x, a->type, base + place_along(i, a->n_gone, a->gone, a->gone_step));
        total = NAME(join)(kind, total, NAME(term)(kind, x, shift));
    }
    return total;
}

/* Joins what the threads of a block have, in order; every thread gets it. */
DEVICE A NAME(join_all)(int kind, A mine, A start) {
    SHARED(A, parts, MOST_FOLDED);
    __syncthreads();
    parts[threadIdx.x] = mine;
    __syncthreads();
    for (unsigned t = 0; t < blockDim.x; t++) start = NAME(join)(kind, start, parts[t]);
    return start;
}

/* Does (x, at) come before (best, where)? NaN is beyond every number; of equals the first, or the last. */
DEVICE int NAME(wins)(const arg_args *a, A x, int64_t at, A best, int64_t where) {
    if (at < 0 || where < 0) return where < 0;
    if (IS_NAN(x) || IS_NAN(best)) return IS_NAN(x) && (!IS_NAN(best) || (a->last ? at > where : at < where));
    if (x == best) return a->last ? at > where : at < where;
    return a->largest ? x > best : x < best;
}

KERNEL(NAME(arg), arg_args) {
    SHARED(A, bests, MOST_FOLDED);
    SHARED(int64_t, places, MOST_FOLDED);
    FOR_BLOCKS(lane, a.lanes) {
        const int64_t base = LANE_START(lane, a.length, a.inner);
        A best = 0;
        int64_t where = -1;
        FOR_THREADS(i, a.length) {
            const A x = (A)READ(a.x, a.type, base + i * a.inner);
            if (!NAME(wins)(&a, x, i, best, where)) continue;
            best = x;
            where = i;
        }
        __syncthreads();
        bests[threadIdx.x] = best;
        places[threadIdx.x] = where;
        __syncthreads();
        if (threadIdx.x != 0) continue;
        for (unsigned t = 1; t < blockDim.x; t++) {
            if (!NAME(wins)(&a, bests[t], places[t], best, where)) continue;
            best = bests[t];
            where = places[t];
        }
        a.out[lane] = where;
    }
}
#endif
