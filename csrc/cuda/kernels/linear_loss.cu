/* linear_loss.cu -- mirrors ops/losses/linear_loss.c: LinearCrossEntropy and its gradient.
 *
 * Chunks of the rows, one after the other, are three products and the kernels of losses (loss.cu) between them. What all
 * losses are divided by is computed first, from the labels alone. The logits of a chunk are sums of the product as they
 * are; their gradient takes their place, and for 16-bit operands a rounded copy is what is multiplied. Lines of both are
 * a multiple of 16 bytes long, and classes beyond such a multiple are products of their own: cuBLASLt reads 16 bytes at a
 * time only of operands whose extents are multiples of it, too. */
#include "cuda/kernels/loss.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct bias_args {
    const void *bias;
    void *logits, *out; /* [rows, line]; the bias's gradient */
    double *total;      /* [classes] */
    int64_t rows, classes, line;
    int32_t type, sums, first, last;
} bias_args;

enum { COLUMNS = 64, LANES = 32 }; /* of a block that adds up columns: of them, and rows that it reads at a time */

#ifdef ORT_HOST
#include "cuda/kernels/product.h"
#include "cuda/libraries/blas.h"
#include "ops/losses/linear_loss.h"

#include <string.h>

kernel_fn linear_cross_entropy_cuda, linear_cross_entropy_grad_cuda;
size_t linear_cross_entropy_cuda_workspace(const node *n);
size_t linear_cross_entropy_grad_cuda_workspace(const node *n);

/* MANY_CLASSES: from which on three products more are the smaller cost. */
enum { PLACE = 256, LINE = LINEAR_LOSS_LINE, MANY_CLASSES = 512 };

/* What the workspace is made of, in this order. */
typedef enum place { AT_BLAS, AT_DIVISOR, AT_LOSSES, AT_LSE, AT_DBIAS, AT_LOGITS, AT_NARROW, PLACES } place;

typedef struct linear {
    const tensor *hidden, *weight, *bias; /* bias: NULL where there is none */
    const tensor *to;                     /* the gradients of these three; any may be absent */
    dtype type, sums;
    int64_t samples, width, classes, line, chunk; /* chunk: rows */
    void *at[PLACES];                             /* NULL when nothing runs */
} linear;

static dtype sum_type(dtype type) { return type == F64 ? F64 : F32; }
static const tensor *operand(const call *k, int i) {
    return i < k->n_in && tensor_present(&k->in[i]) ? &k->in[i] : NULL;
}

static void *moved(const void *data, int64_t elements, dtype type) {
    return data ? (char *)(uintptr_t)data + elements * (int64_t)dtype_size(type) : NULL;
}

/* Bytes of the places; returns all of them. */
static size_t measure(dtype type, int64_t samples, int64_t width, int64_t classes, size_t bytes[PLACES]) {
    const int64_t rows = linear_loss_chunk(type, samples, classes), line = linear_loss_line(classes);
    const int64_t most = rows > width ? rows : width; /* results have classes x this, or rows x width elements */
    size_t all = 0;

    bytes[AT_BLAS] = blas_workspace(most * (classes > width ? classes : width));
    bytes[AT_DIVISOR] = 2 * sizeof(double);
    bytes[AT_LOSSES] = bytes[AT_LSE] = (size_t)samples * sizeof(double);
    bytes[AT_DBIAS] = (size_t)classes * sizeof(double);
    bytes[AT_LOGITS] = (size_t)(rows * line) * dtype_size(sum_type(type));
    bytes[AT_NARROW] = sum_type(type) == type ? 0 : (size_t)(rows * line) * dtype_size(type);
    for (int i = 0; i < PLACES; i++) {
        bytes[i] = (bytes[i] + PLACE - 1) / PLACE * PLACE;
        all += bytes[i];
    }
    return all;
}

static size_t workspace_of(const value *hidden, const value *weight) {
    size_t bytes[PLACES];
    return measure(hidden->type, hidden->shape.dim[0], hidden->shape.dim[1], weight->shape.dim[0], bytes);
}

size_t linear_cross_entropy_cuda_workspace(const node *n) { return workspace_of(n->in[HIDDEN], n->in[WEIGHT]); }
size_t linear_cross_entropy_grad_cuda_workspace(const node *n) {
    return workspace_of(n->in[G_HIDDEN], n->in[G_WEIGHT]);
}

static linear linear_of(const call *k, int hidden, int bias, const tensor *to) {
    const tensor *h = &k->in[hidden], *w = &k->in[hidden + 1];
    linear l = {.hidden = h,
                .weight = w,
                .bias = operand(k, bias),
                .to = to,
                .type = h->type,
                .sums = sum_type(h->type),
                .samples = h->shape.dim[0],
                .width = h->shape.dim[1],
                .classes = w->shape.dim[0],
                .line = linear_loss_line(w->shape.dim[0])};
    size_t bytes[PLACES], at = 0;

    l.chunk = linear_loss_chunk(l.type, l.samples, l.classes);
    (void)measure(l.type, l.samples, l.width, l.classes, bytes);
    for (int i = 0; i < PLACES; at += bytes[i++]) l.at[i] = k->work ? (char *)k->work + at : NULL;
    return l;
}

/* --- a chunk ------------------------------------------------------------------------------------------------------ */

static gemm product_of(const linear *l, int64_t m, int64_t n, int64_t k) {
    return (gemm){.type = l->type, .wide_c = l->sums != l->type, .m = m, .n = n, .k = k, .alpha = 1};
}

/* Which extent of a product the classes are. */
typedef enum classes_at { CLASSES_M, CLASSES_N, CLASSES_K } classes_at;

static int64_t *extent_of(gemm *g, classes_at at) { return at == CLASSES_M ? &g->m : at == CLASSES_N ? &g->n : &g->k; }

/* What is left of a product after its first `classes`, to be run after these. */
static gemm rest_of(const linear *l, const gemm *g, classes_at at, int64_t classes) {
    gemm rest = *g;

    *extent_of(&rest, at) = l->classes - classes;
    if (at != CLASSES_N) rest.a = moved(g->a, classes * (at == CLASSES_M ? g->a_row : g->a_col), l->type);
    if (at != CLASSES_M) rest.b = moved(g->b, classes * (at == CLASSES_K ? g->b_row : g->b_col), l->type);
    if (at != CLASSES_K) rest.c = moved(g->c, classes * (at == CLASSES_M ? g->c_row : 1), l->sums);
    else rest.beta = 1;
    return rest;
}

/* A product with all classes: of 16-bit floats, a multiple of LINE and the few that are left. */
static status run_product(ctx *c, const call *k, const linear *l, gemm *g, classes_at at) {
    const int64_t left = l->classes % LINE, even = l->classes - left;

    if (left == 0 || l->classes < MANY_CLASSES || dtype_size(l->type) != 2) return cuda_product(c, k, g);
    const gemm rest = rest_of(l, g, at, even);
    *extent_of(g, at) = even;
    TRY(cuda_product(c, k, g));
    return cuda_product(c, k, &rest);
}

static bias_args bias_of(const linear *l, int64_t from, int64_t rows) {
    return (bias_args){.logits = l->at[AT_LOGITS],
                       .total = l->at[AT_DBIAS],
                       .rows = rows,
                       .classes = l->classes,
                       .line = l->line,
                       .type = l->type,
                       .sums = l->sums,
                       .first = from == 0,
                       .last = from + rows == l->samples};
}

static status compute_logits(ctx *c, const call *k, const linear *l, int64_t from, int64_t rows) {
    static kernel fill[DTYPE_COUNT] = {[F32] = {"linear_loss_fill_f32"}, [F64] = {"linear_loss_fill_f64"}};
    gemm g = product_of(l, rows, l->classes, l->width);

    g.a = moved(l->hidden->data, from * l->width, l->type), g.a_row = l->width, g.a_col = 1;
    g.b = l->weight->data, g.b_row = 1, g.b_col = l->width; /* the weight is [classes, width] */
    g.c = l->at[AT_LOGITS], g.c_row = l->line;
    if (l->bias) {
        bias_args a = bias_of(l, from, rows);
        a.bias = l->bias->data;
        g.beta = 1;
        TRY(cuda_launch(c, k, &fill[l->sums], geometry_over(rows * (l->line / ROW_PIECE), 256 * 2, 256), &a));
    }
    return run_product(c, k, l, &g, CLASSES_N);
}

/* What the gradient of a chunk's logits adds to those of the operands. */
static status spread_gradient(ctx *c, const call *k, const linear *l, int64_t from, int64_t rows) {
    static kernel columns[DTYPE_COUNT] = {[F32] = {"linear_loss_columns_f32"}, [F64] = {"linear_loss_columns_f64"}};
    const void *gradient = l->at[l->sums == l->type ? AT_LOGITS : AT_NARROW];

    if (tensor_present(&l->to[0])) {
        gemm g = product_of(l, rows, l->width, l->classes);
        g.a = gradient, g.a_row = l->line, g.a_col = 1;
        g.b = l->weight->data, g.b_row = l->width, g.b_col = 1;
        g.c = moved(l->to[0].data, from * l->width, l->sums), g.c_row = l->width;
        TRY(run_product(c, k, l, &g, CLASSES_K));
    }
    if (tensor_present(&l->to[1])) {
        gemm g = product_of(l, l->classes, l->width, rows);
        g.a = gradient, g.a_row = 1, g.a_col = l->line;
        g.b = moved(l->hidden->data, from * l->width, l->type), g.b_row = l->width, g.b_col = 1;
        g.c = l->to[1].data, g.c_row = l->width;
        g.beta = from > 0;
        TRY(run_product(c, k, l, &g, CLASSES_M));
    }
    if (tensor_present(&l->to[2])) {
        bias_args a = bias_of(l, from, rows);
        a.out = l->to[2].data;
        const geometry g = geometry_over((l->classes + COLUMNS - 1) / COLUMNS, 1, COLUMNS / ROW_PIECE * LANES);
        TRY(cuda_launch(c, k, &columns[l->sums], g, &a));
    }
    return OK;
}

/* Goes through all rows; `losses`: theirs and their lse, else lse is known. all->each: an upstream gradient a row. */
static status each_chunk(ctx *c, const call *k, const linear *l, const loss_args *all, bool losses) {
    const bool gradients = tensor_present(&l->to[0]) || tensor_present(&l->to[1]) || tensor_present(&l->to[2]);
    const bool narrow = l->sums != l->type;

    for (int64_t from = 0; from < l->samples; from += l->chunk) {
        loss_args chunk = *all;
        chunk.samples = l->samples - from < l->chunk ? l->samples - from : l->chunk;
        chunk.x = l->at[AT_LOGITS];
        chunk.line = l->line;
        chunk.labels = moved(all->labels, from, (dtype)all->label_type);
        chunk.lse = moved(all->lse, from, F64);
        chunk.losses = moved(all->losses, from, F64);
        if (all->each) chunk.dloss = moved(all->dloss, from, (dtype)all->dloss_type);
        TRY(compute_logits(c, k, l, from, chunk.samples));
        if (losses) TRY(loss_run(c, k, l->sums, &chunk));
        if (!gradients) continue;
        chunk.out = !narrow || tensor_present(&l->to[2]) ? l->at[AT_LOGITS] : NULL;
        chunk.narrow = narrow ? l->at[AT_NARROW] : NULL;
        chunk.narrow_type = l->type;
        TRY(loss_grad_run(c, k, l->sums, &chunk));
        TRY(spread_gradient(c, k, l, from, chunk.samples));
    }
    return OK;
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

static loss_args args_of(const call *k, const linear *l, int labels, int weights) {
    loss_args a = loss_args_of(k, &SHAPE(l->samples, l->classes), labels, weights);
    a.divisor = l->at[AT_DIVISOR];
    return a;
}

status linear_cross_entropy_cuda(ctx *c, const call *k) {
    const linear l = linear_of(k, HIDDEN, BIAS, &k->out[DHIDDEN]);
    const tensor *up = operand(k, UPSTREAM);
    loss_args all = args_of(k, &l, LABELS, CLASS_WEIGHTS), join = all;

    all.losses = join.losses = l.at[AT_LOSSES];
    all.lse = k->n_out > LSE && tensor_present(&k->out[LSE]) ? k->out[LSE].data : l.at[AT_LSE];
    all.dloss = up ? up->data : moved(l.at[AT_DIVISOR], 1, F64);
    all.dloss_type = up ? up->type : F64;
    all.each = up != NULL;
    join.out = k->out[LOSS].data;
    join.divisor = NULL;
    TRY(loss_divisor_run(c, k, &all));
    TRY(each_chunk(c, k, &l, &all, true));
    return loss_join_run(c, k, k->out[LOSS].type, &join);
}

status linear_cross_entropy_grad_cuda(ctx *c, const call *k) {
    const linear l = linear_of(k, G_HIDDEN, G_BIAS, k->out);
    loss_args all = args_of(k, &l, G_LABELS, G_CLASS_WEIGHTS);

    all.lse = k->in[G_LSE].data;
    all.dloss = k->in[DLOSS].data;
    all.dloss_type = k->in[DLOSS].type;
    TRY(loss_divisor_run(c, k, &all));
    return each_chunk(c, k, &l, &all, false);
}
#endif

#ifdef ORT_DEVICE
/* A piece of a line from `first` on becomes the bias; behind the last class zeros, which nothing reads. Then the columns
 * of a gradient: a block adds up COLUMNS of all rows in float64, each of its lanes every LANES-th row, and chunks add up in
 * their order. Lines begin on 16 bytes. */
#define FILL_KERNEL(A, suffix, TYPE, TAKE, WRITE)                                                                      \
    KERNEL(linear_loss_fill_##suffix, bias_args) {                                                                     \
        const int64_t pieces = a.line / AT_ONCE;                                                                       \
        FOR_EACH(i, a.rows * pieces) {                                                                                 \
            const int64_t first = (i - quotient(i, pieces) * pieces) * AT_ONCE;                                        \
            A x[AT_ONCE];                                                                                              \
            TAKE(a.bias, a.type, first, 0, a.classes, x);                                                              \
            WRITE(a.logits, TYPE, i * AT_ONCE, x);                                                                     \
        }                                                                                                              \
    }

/* The sums of this lane's rows, of the classes from `first` on. */
#define ADD_ROWS(A, suffix, TYPE, READ_PIECES)                                                                         \
    DEVICE void add_rows_##suffix(const bias_args *a, int64_t row, int64_t first, double total[AT_ONCE]) {             \
        for (; row < a->rows; row += LANES * PIECES_OF(TYPE)) {                                                        \
            A x[PIECES_OF(TYPE)][AT_ONCE];                                                                             \
            int64_t at[PIECES_OF(TYPE)];                                                                               \
            uint32_t there = 0;                                                                                        \
            UNROLL for (int k = 0; k < PIECES_OF(TYPE); k++) {                                                         \
                at[k] = (row + k * LANES) * a->line + first;                                                           \
                there |= (uint32_t)(row + k * LANES < a->rows && first < a->line) << k;                                \
            }                                                                                                          \
            READ_PIECES(a->logits, TYPE, at, there, x);                                                                \
            UNROLL for (int k = 0; k < PIECES_OF(TYPE); k++) {                                                         \
                UNROLL for (int j = 0; j < AT_ONCE; j++) total[j] += (double)x[k][j];                                  \
            }                                                                                                          \
        }                                                                                                              \
    }

#define COLUMNS_KERNEL(suffix)                                                                                         \
    KERNEL(linear_loss_columns_##suffix, bias_args) {                                                                  \
        SHARED(double, totals, COLUMNS *LANES);                                                                        \
        const int lane = threadIdx.x / (COLUMNS / AT_ONCE), own = threadIdx.x % (COLUMNS / AT_ONCE) * AT_ONCE;         \
        FOR_BLOCKS(task, (a.classes + COLUMNS - 1) / COLUMNS) {                                                        \
            double total[AT_ONCE] = {0};                                                                               \
            add_rows_##suffix(&a, lane, task * COLUMNS + own, total);                                                  \
            UNROLL for (int j = 0; j < AT_ONCE; j++) totals[lane * COLUMNS + own + j] = total[j];                      \
            __syncthreads();                                                                                           \
            give_columns(&a, task, totals);                                                                            \
            __syncthreads();                                                                                           \
        }                                                                                                              \
    }

/* What the lanes have added up, behind what the chunks before have. */
DEVICE void give_columns(const bias_args *a, int64_t task, const double *totals) {
    FOR_THREADS(i, COLUMNS) {
        const int64_t column = task * COLUMNS + i;
        if (column >= a->classes) continue;
        double total = a->first ? 0 : a->total[column];
        for (int lane = 0; lane < LANES; lane++) total += totals[lane * COLUMNS + i];
        a->total[column] = total;
        if (a->last) set_number(a->out, a->sums, column, total);
    }
}

FILL_KERNEL(float, f32, F32, take_float, write_as_float)
FILL_KERNEL(double, f64, F64, take_double, write_double)
ADD_ROWS(float, f32, F32, read_pieces_float)
ADD_ROWS(double, f64, F64, read_pieces_double)
COLUMNS_KERNEL(f32)
COLUMNS_KERNEL(f64)
#endif
