/* chain.h -- describes a chain of pointwise operators to kernels: a small program over one element of every operand.
 *
 * The interpreter of fused.cu walks it; generate.c writes a kernel that is it. Both do what pointwise.cu does for one
 * operator, and round every step to its type, so that the bits are those of the single operators.
 *
 * A chain may have folds: sums of what its steps make over some axes, added up as the elements are made. A block, or the
 * threads of a row, have the sum of a part; where there are several parts another kernel adds these up, in order. */
#ifndef ORT_CUDA_CHAIN_H
#define ORT_CUDA_CHAIN_H

#include "cuda/kernels/elements.h"
#include "cuda/kernels/steps.h"

enum { CHAIN_OPERANDS = 12, CHAIN_STEPS = 24, CHAIN_RESULTS = 8, STEP_OPERANDS = 4, STEP_PARAMETERS = 2 };
enum { CHAIN_FOLDS = 4, FOLD_THREADS = 256 /* of a block, at most */ };

/* Every step there is, by operator and type. */
#define FLOAT_STEP(op, name, ...) STEP_##name##_f32, STEP_##name##_f64,
#define INT_STEP(op, name, ...) STEP_##name##_i64, STEP_##name##_i32,
#define NUMBER_STEP(op, name, ...) FLOAT_STEP(op, name, ) INT_STEP(op, name, )
#define BOOL_STEP(op, name, ...) STEP_##name##_bool,
#define CAST_STEP(from, ...)                                                                                           \
    STEP_##from##_to_f32, STEP_##from##_to_f64, STEP_##from##_to_i64, STEP_##from##_to_i32, STEP_##from##_to_bool,
#define WHERE_STEP(name, ...) STEP_where_##name,
typedef enum step_kind {
#define FORMULA(op, name, ...) FLOAT_STEP(op, name, )
#include "ops/pointwise/operators.h"
    FLOAT_TESTS(FLOAT_STEP) COMPARISONS(NUMBER_STEP) INT_OPERATORS(INT_STEP) BOOL_OPERATORS(BOOL_STEP) CASTS(CAST_STEP)
        CLASSES(WHERE_STEP) STEP_drop_f32,
    STEP_drop_f64,
    STEP_KINDS
} step_kind;

/* Operands and results are places: operands first, in their order, then steps. */
typedef struct chain_step {
    uint16_t kind;
    uint8_t type, out; /* rounded to; place */
    uint8_t in[STEP_OPERANDS];
} chain_step;

/* What a compiled kernel is for: no addresses, sizes or parameters. Without padding, for memcmp. */
typedef struct chain_program {
    int32_t n_in, n_steps, n_out, draws;
    int32_t wide;             /* places of elements take 64 bits */
    int32_t n_folds, columns; /* whether folds are of columns, not of rows */
    uint8_t type[CHAIN_OPERANDS], how[CHAIN_OPERANDS];
    uint8_t result[CHAIN_RESULTS], result_type[CHAIN_RESULTS]; /* places */
    uint8_t folded[CHAIN_FOLDS], fold_type[CHAIN_FOLDS];       /* the same of folds */
    chain_step steps[CHAIN_STEPS];
} chain_program;

/* Elements seen as [outer, length, inner], of which `length` goes; rows where `inner` is 1. */
typedef struct chain_folds {
    int64_t outer, length, inner, parts;
    void *out[CHAIN_FOLDS];
    double *partial; /* [folds, parts, outer * inner]; where there is one part none */
    double divisor[CHAIN_FOLDS];
    int32_t across, joined; /* a power of two: threads of a row, or of neighbouring columns; the same of the join */
} chain_folds;

typedef struct chain_args {
    space space;
    source in[CHAIN_OPERANDS];
    void *out[CHAIN_RESULTS];
    chain_folds folds;
    double param[CHAIN_STEPS][STEP_PARAMETERS]; /* of a dropout: the factor, and (key, threshold) as two words */
    const uint64_t *seed_at;                    /* or NULL */
    uint64_t seed;
    chain_program program;
} chain_args;

enum { MOST_PLACES = CHAIN_OPERANDS + CHAIN_STEPS };

#ifdef ORT_DEVICE
#include "cuda/kernels/philox.h"

#define CHAIN_SEED (a.seed_at ? *a.seed_at : a.seed)

/* The two words that a dropout has for its second parameter. */
DEVICE uint32_t word_in(double parameter, int which) {
    union {
        double d;
        uint32_t u[2];
    } v;
    v.d = parameter;
    return v.u[which];
}

/* --- folds ------------------------------------------------------------------------------------------------------------ */

/* Where a part begins along `length`: of rows at a multiple of 64, as a dropout wants it. */
DEVICE int64_t part_begin(const chain_folds *f, int64_t part) {
    if (f->inner != 1) return quotient(f->length * part, f->parts);
    const int64_t at = quotient((f->length + 63) / 64 * part, f->parts) * 64;
    return at < f->length ? at : f->length;
}

DEVICE void store_total(const chain_folds *f, int fold, int type, int64_t result, double total) {
    set_number(f->out[fold], type, result, f->divisor[fold] == 1 ? total : total / f->divisor[fold]);
}

/* What a part has of a result. */
DEVICE void give_total(const chain_folds *f, int fold, int type, int64_t result, int64_t part, double total) {
    if (f->parts == 1) store_total(f, fold, type, result, total);
    else f->partial[(fold * f->parts + part) * f->outer * f->inner + result] = total;
}

/* Over the threads of a row, in an order that depends on their number alone; in the first of them. */
#define ROW_TOTAL(T)                                                                                                   \
    DEVICE T row_total_##T(T x, int across) {                                                                          \
        SHARED(T, of_warps, WARP);                                                                                     \
        const int warp = threadIdx.x / WARP, first = threadIdx.x / across * across / WARP;                             \
        for (int step = WARP / 2; step > 0; step /= 2) {                                                               \
            const T y = __shfl_xor_sync(0xffffffffu, x, step);                                                         \
            if (step < across) x += y;                                                                                 \
        }                                                                                                              \
        if (across <= WARP) return x;                                                                                  \
        __syncthreads(); /* what an earlier total left has been read */                                                \
        if (threadIdx.x % WARP == 0) of_warps[warp] = x;                                                               \
        __syncthreads();                                                                                               \
        x = of_warps[first];                                                                                           \
        for (int other = 1; other < across / WARP; other++) x += of_warps[first + other];                              \
        return x;                                                                                                      \
    }
ROW_TOTAL(float)
ROW_TOTAL(double)

/* Over the lanes of a block, each of which has AT_ONCE columns a thread from result number `first` on, of so many. A line
 * of the sums is four places longer than threads, for the banks of shared memory. */
enum { FOLD_LINE = FOLD_THREADS + 4 };
#define COLUMN_TOTALS(T)                                                                                               \
    DEVICE void column_totals_##T(const chain_folds *f, int fold, int type, int64_t first, int64_t columns,            \
                                  int64_t part, T x[AT_ONCE]) {                                                        \
        SHARED(double, sums, FOLD_LINE *AT_ONCE);                                                                      \
        const int across = f->across, lanes = blockDim.x / across;                                                     \
        if (lanes == 1) {                                                                                              \
            give_columns_##T(f, fold, type, first + threadIdx.x * AT_ONCE, columns - threadIdx.x * AT_ONCE, part, x);  \
            return;                                                                                                    \
        }                                                                                                              \
        __syncthreads(); /* what earlier totals left has been read */                                                  \
        UNROLL for (int j = 0; j < AT_ONCE; j++) sums[j * FOLD_LINE + threadIdx.x] = x[j];                             \
        __syncthreads();                                                                                               \
        for (int i = threadIdx.x; i < across * AT_ONCE && i < columns; i += blockDim.x) {                              \
            const double *own = sums + i % AT_ONCE * FOLD_LINE + i / AT_ONCE;                                          \
            double total = own[0];                                                                                     \
            for (int lane = 1; lane < lanes; lane++) total += own[lane * across];                                      \
            give_total(f, fold, type, first + i, part, total);                                                         \
        }                                                                                                              \
    }
/* A thread's own, all of which are there or none. */
#define GIVE_COLUMNS(T)                                                                                                \
    DEVICE void give_columns_##T(const chain_folds *f, int fold, int type, int64_t first, int64_t columns,             \
                                 int64_t part, T x[AT_ONCE]) {                                                         \
        if (columns <= 0) return;                                                                                      \
        if (f->parts == 1 && IS_ALIGNED(f->out[fold], type)) {                                                         \
            if (f->divisor[fold] != 1) UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] = (T)(x[j] / f->divisor[fold]);   \
            write_##T(f->out[fold], type, first, x);                                                                   \
            return;                                                                                                    \
        }                                                                                                              \
        UNROLL for (int j = 0; j < AT_ONCE; j++) give_total(f, fold, type, first + j, part, x[j]);                     \
    }
GIVE_COLUMNS(float)
GIVE_COLUMNS(double)
COLUMN_TOTALS(float)
COLUMN_TOTALS(double)

#endif

#endif
