/* reduce_kernel.h -- folds any set of axes of a contiguous tensor into one number each.
 *
 * A fold takes many numbers and leaves one: a sum, a product, a maximum. Elements are folded into totals, float64 for
 * floats and int64 for integers, so a float32 sum has no rounding to speak of and bfloat16 needs no thought. Folding
 * is the same two loops whatever the axes: along a row into one total, or row after row into a line of totals. */
#ifndef ORT_OPS_REDUCE_KERNEL_H
#define ORT_OPS_REDUCE_KERNEL_H

#include "ops/op.h"

/* What elements are folded as: narrow types are widened a tile at a time. */
typedef enum fold_class { FOLD_F32, FOLD_F64, FOLD_I64, FOLD_CLASSES } fold_class;

/* rows: one total, acc[0], takes x[0..n). columns: n totals, acc[i] takes x[i]. Totals are double or int64_t.
 * `shift`, one total in the first form and n in the second, is a second operand of some folds. */
typedef void fold_fn(void *acc, const void *x, int64_t n, const void *shift);
/* columns of FOLD_LINES lines, one after the other, that begin `stride` elements apart. */
enum { FOLD_LINES = 4 };
typedef void fold_lines_fn(void *acc, const void *x, int64_t n, int64_t stride, const void *shift);
/* rows of n totals: acc[i] takes x[i * length .. (i + 1) * length). */
typedef void fold_short_fn(void *acc, const void *x, int64_t n, int64_t length, const void *shift);

typedef struct fold {
    fold_fn *rows[FOLD_CLASSES], *columns[FOLD_CLASSES];
    fold_lines_fn *lines[FOLD_CLASSES];
    fold_short_fn *short_rows[FOLD_CLASSES];
    double start;
    int64_t start_int;
} fold;

extern const fold fold_sum, fold_square, fold_l1, fold_prod, fold_count_equal, fold_prod_nonzero, fold_sum_exp,
    fold_max, fold_min; /* reduce_fold.c */

/* Elements [at, at + n) of a contiguous tensor in their fold class, at most FOLD_TILE of them. */
enum { FOLD_TILE = 1024 };
typedef union fold_tile {
    float f32[FOLD_TILE];
    double f64[FOLD_TILE];
    int64_t i64[FOLD_TILE];
} fold_tile;
fold_class fold_class_of(dtype t);
bool fold_is_stored(dtype t); /* in its class, so that loading makes no copy */
const void *fold_load(dtype t, const void *x, int64_t at, int64_t n, void *buffer);
void fold_store(dtype t, void *to, int64_t at, const void *totals, int64_t n);

typedef struct reduction {
    const fold *each; /* folds elements */
    const fold *join; /* folds the totals of parts */
    /* Totals into results, floats only; `count` elements went into each. NULL: they are the results. */
    void (*finish)(double *total, int64_t n, double count, const double *shift);
} reduction;

/* The axes a node reduces: its "axes" attribute, else operand 1, a constant. As written, one after the other; and, once
 * infer has checked them, as a bit set. */
bool written_axis(const node *n, int64_t i, int64_t *axis);
unsigned reduced_axes(const node *n);

size_t reduce_workspace(const node *n);
kernel_fn reduce_sum_cpu, reduce_mean_cpu, reduce_max_cpu, reduce_min_cpu, reduce_prod_cpu, reduce_l1_cpu,
    reduce_l2_cpu, reduce_sum_square_cpu, reduce_log_sum_cpu;
/* Σ [x == y] and Π of the elements that are not 0, for gradients; and log Σ exp x. */
size_t reduce_shift_workspace(const node *n);
kernel_fn reduce_count_equal_cpu, reduce_prod_nonzero_cpu, reduce_log_sum_exp_cpu;

/* --- folding what is not in memory ---------------------------------------------------------------------------------- */

enum { FOLD_ENDS = 4 };

/* Elements of a contiguous tensor that are not stored. Each is asked for once. */
typedef struct fold_source {
    const void *arg;
    size_t bytes; /* of scratch memory for each thread, 64-byte aligned; begin is called once with it */
    void (*begin)(const void *arg, void *scratch);
    /* tiles[i]: elements [at, at + n) for the i-th end in the class of its type, until the next call; n <= FOLD_TILE */
    void (*make)(const void *arg, void *scratch, int64_t at, int64_t n, const char **tiles);
} fold_source;

/* What a Reduce operator does to its elements; NULL if it needs more than one look at them. */
const reduction *reduction_of(const op_def *op);
/* How many elements of a tensor of this shape a source is asked for at a time when these axes are folded; 0 where that
 * would not be in the order of their places. */
int64_t fold_run(const shape *s, unsigned axes);
size_t fold_source_workspace(const shape *s, unsigned axes, int n_ends);
/* Folds a source of floats of shape `s` into out[i], by r[i], for up to FOLD_ENDS ends, which is what the operators would
 * make of the stored elements, bit for bit (but for the order of float64 sums in columns of lines longer than a tile). */
MUST_USE status fold_from(ctx *c, const fold_source *source, const shape *s, unsigned axes, int n_ends,
                          const reduction *const *r, const tensor *const *out, void *work);
/* The same by the calling thread alone, in scratch memory that it has. */
void fold_from_here(const fold_source *source, const shape *s, unsigned axes, int n_ends, const reduction *const *r,
                    const tensor *const *out, void *work, void *scratch);

/* argreduce.c */
kernel_fn arg_max_cpu, arg_min_cpu;

#endif
