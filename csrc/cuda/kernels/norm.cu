/* norm.cu -- twin of ops/norms/norm.c: LayerNormalization, RMSNormalization, FusedNorm and their gradients, over the last
 * axes.
 *
 * A block has a row, whose threads take eight neighbours at a time, of four places at once, and keep them where that is
 * all they have: a row of 1024 is a warp's. The gradients of scale and bias are sums over rows: a block adds up 64 columns
 * of one part of the rows, whose number depends on the shape alone, and a second kernel the parts, in order. They read
 * dy, so they come before dx, which may take its place. */
#ifndef T
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

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

enum { COLUMNS = 64, LANES = 32 };        /* of a block: columns, and rows that it reads at a time */
enum { MOST_PARTS = 64, JOIN_LANES = 8 }; /* of the rows; of a block that adds up the parts of WARP columns */

#ifdef ORT_HOST
#include "ops/pointwise/dropout.h"

kernel_fn layer_norm_cuda, rms_norm_cuda, fused_norm_cuda, layer_norm_grad_cuda, rms_norm_grad_cuda;
size_t norm_grad_cuda_workspace(const node *n);

/* Operands of both gradients, of FusedNorm, and its results. */
enum { DY, X, SCALE, INVERSES, MEANS, ADDED };
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
    static kernel alone[DTYPE_COUNT] = FLOAT_KERNELS(norm_rows), sums[DTYPE_COUNT] = FLOAT_KERNELS(norm_sum_rows);
    return cuda_launch(c, k, &(a->other ? sums : alone)[type], geometry_kept(a->rows, a->width, type), a);
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
        int64_t groups = (a.width + COLUMNS - 1) / COLUMNS;
        TRY(cuda_launch(c, k, &columns[type], geometry_over(groups * a.parts, 1, COLUMNS / ROW_PIECE * LANES), &a));
        TRY(cuda_launch(c, k, &join[type], geometry_over((a.width + WARP - 1) / WARP * 2, 1, WARP * JOIN_LANES), &a));
    }
    if (!is_wanted(k, 0)) return OK;
    return cuda_launch(c, k, &rows[type], geometry_kept(a.rows, a.width, type), &a);
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

/* x of elements [begin, end) from i, of which a dropout may have left some, and the other operand -> the sum, and it. */
DEVICE void NAME(add)(const norm_args *a, int64_t i, int64_t begin, int64_t end, A sum[PIECES_OF(TYPE)][AT_ONCE]) {
    const uint64_t seed = a->seed_at ? *a->seed_at : a->seed;
    A x[PIECES_OF(TYPE)][AT_ONCE];

    TAKE_PIECES(a->x, a->from, i, PIECE_STEP, begin, end, x);
    TAKE_PIECES(a->other, TYPE, i, PIECE_STEP, begin, end, sum);
    UNROLL for (int k = 0; k < PIECES_OF(TYPE); k++) {
        const int64_t at = i + k * PIECE_STEP;
        if (at - threadIdx.x % WARP * AT_ONCE >= end) break; /* the whole warp's is behind the row */
        if (a->drops) {
            const uint32_t kept = kept_bits(seed, a->key, a->threshold, at);
            UNROLL for (int j = 0; j < AT_ONCE; j++) x[k][j] =
                NAME(rounded)(a->from, x[k][j] * (kept >> j & 1 ? (A)a->factor : 0));
        }
        UNROLL for (int j = 0; j < AT_ONCE; j++) sum[k][j] = GET(PUT(x[k][j] + sum[k][j]));
        GIVE(a->sum, TYPE, at, begin, end, sum[k]);
    }
}

/* The sum of a piece's elements that are `inside`. In pairs where all are: so that of equal elements nothing is rounded,
 * and nothing is left of a row of them; but not where it would overflow. */
DEVICE double NAME(sum_of)(const A x[AT_ONCE], uint32_t inside) {
    const A all = ((x[0] + x[1]) + (x[2] + x[3])) + ((x[4] + x[5]) + (x[6] + x[7]));
    double total = 0;

    if (inside == ALL_INSIDE && all - all == 0) return (double)all;
    UNROLL for (int j = 0; j < AT_ONCE; j++) total += inside >> j & 1 ? (double)x[j] : 0;
    return total;
}

/* y may lie where x or the sum does. `adds`: there is something to add to x. */
DEVICE void NAME(norm_row)(const norm_args *a, int64_t row, int adds) {
    enum { EACH = PIECES_OF(TYPE) };
    const void *from = adds ? a->sum : a->x;
    const int64_t begin = row * a->width, end = begin + a->width;
    const int many = ARE_ROUNDS(TYPE, begin, end);
    A m = 0, r = 0, x[EACH][AT_ONCE] = {{0}}, y[AT_ONCE];
    double total = 0;

    NOT_UNROLLED for (int pass = 0; pass < 3; pass++) {
        FOR_ROUNDS(TYPE, i, begin, end) {
            if (pass == 0 && adds) NAME(add)(a, i, begin, end, x);
            else if (pass == 0 || many) TAKE_PIECES(from, TYPE, i, PIECE_STEP, begin, end, x);
            UNROLL for (int k = 0; k < EACH; k++) {
                const int64_t at = i + k * PIECE_STEP;
                const uint32_t inside = inside_of(at, begin, end);
                if (!inside) continue;
                if (pass == 0) {
                    total += NAME(sum_of)(x[k], inside);
                    continue;
                }
                if (pass == 1) {
                    UNROLL for (int j = 0; j < AT_ONCE; j++) r += inside >> j & 1 ? (x[k][j] - m) * (x[k][j] - m) : 0;
                    continue;
                }
                TAKE(a->scale, a->scale_type, at - begin, 0, a->width, y);
                UNROLL for (int j = 0; j < AT_ONCE; j++) y[j] = (x[k][j] - m) * r * y[j];
                if (a->bias) {
                    A bias[AT_ONCE];
                    TAKE(a->bias, a->bias_type, at - begin, 0, a->width, bias);
                    UNROLL for (int j = 0; j < AT_ONCE; j++) y[j] += bias[j];
                }
                if (a->narrow) GIVE(a->narrow, a->to == BF16 ? BF16 : F16, at, begin, end, y);
                if (a->out) GIVE(a->out, TYPE, at, begin, end, y);
            }
        }
        if (pass == 0 && a->centred) m = (A)(block_sum_f64(total) / (double)a->width);
        if (pass != 1) continue;
        r = 1 / SQRT(SUM(r) / (A)a->width + (A)a->epsilon);
        if (threadIdx.x == 0) {
            if (a->means) ((A *)a->means)[row] = m;
            if (a->inverses) ((A *)a->inverses)[row] = r;
        }
    }
}

KERNEL(NAME(norm_rows), norm_args) { FOR_BLOCKS(row, a.rows) NAME(norm_row)(&a, row, 0); }
KERNEL(NAME(norm_sum_rows), norm_args) { FOR_BLOCKS(row, a.rows) NAME(norm_row)(&a, row, 1); }

KERNEL(NAME(norm_grad_rows), norm_args) {
    enum { EACH = PIECES_OF(TYPE) };

    FOR_BLOCKS(row, a.rows) {
        const int64_t begin = row * a.width, end = begin + a.width;
        const int many = ARE_ROUNDS(TYPE, begin, end);
        const A m = a.means ? ((const A *)a.means)[row] : 0, r = ((const A *)a.inverses)[row];
        A sum = 0, dot = 0, x[EACH][AT_ONCE] = {{0}}, g[EACH][AT_ONCE] = {{0}}, other[EACH][AT_ONCE] = {{0}};

        NOT_UNROLLED for (int pass = 0; pass < 2; pass++) {
            FOR_ROUNDS(TYPE, i, begin, end) {
                if (pass == 0 || many) {
                    TAKE_PIECES(a.dy, a.from, i, PIECE_STEP, begin, end, g);
                    TAKE_PIECES(a.x, TYPE, i, PIECE_STEP, begin, end, x);
                    UNROLL for (int k = 0; k < EACH; k++) {
                        A scale[AT_ONCE];
                        TAKE(a.scale, a.scale_type, i + k * PIECE_STEP - begin, 0, a.width, scale);
                        UNROLL for (int j = 0; j < AT_ONCE; j++) {
                            g[k][j] *= scale[j];
                            x[k][j] = (x[k][j] - m) * r;
                        }
                    }
                }
                if (pass == 0) { /* what is outside has a g of 0 */
                    UNROLL for (int k = 0; k < EACH; k++) {
                        UNROLL for (int j = 0; j < AT_ONCE; j++) {
                            sum += g[k][j];
                            dot += g[k][j] * x[k][j];
                        }
                    }
                    continue;
                }
                if (a.other) TAKE_PIECES(a.other, TYPE, i, PIECE_STEP, begin, end, other);
                UNROLL for (int k = 0; k < EACH; k++) {
                    UNROLL for (int j = 0; j < AT_ONCE; j++) g[k][j] = r * (g[k][j] - sum - x[k][j] * dot);
                    if (a.other) {
                        UNROLL for (int j = 0; j < AT_ONCE; j++) g[k][j] = GET(PUT(g[k][j])) + other[k][j];
                    }
                    GIVE(a.out, TYPE, i + k * PIECE_STEP, begin, end, g[k]);
                }
            }
            if (pass == 1) break;
            dot = SUM(dot) / (A)a.width;
            sum = SUM(sum) / (A)a.width;
            if (!a.centred) sum = 0;
        }
    }
}

/* Columns from `first` on of rows LANES apart, from `row` to `end`. */
DEVICE void NAME(take_rows)(const norm_args *a, const void *p, int type, int64_t row, int64_t end, int64_t first,
                            A x[PIECES_OF(TYPE)][AT_ONCE]) {
    if (a->width % AT_ONCE == 0) {
        const int64_t last = first < a->width ? end * a->width : 0; /* none are behind the last column */
        TAKE_PIECES(p, type, row * a->width + first, LANES * a->width, 0, last, x);
        return;
    }
    UNROLL for (int k = 0; k < PIECES_OF(TYPE); k++) {
        const int64_t start = (row + k * LANES) * a->width;
        TAKE(p, type, start + first, start, row + k * LANES < end ? start + a->width : 0, x[k]);
    }
}

/* Columns of a part of the rows: a thread for eight neighbours in each of LANES lanes of rows. */
KERNEL(NAME(norm_grad_columns), norm_args) {
    SHARED(A, scales, COLUMNS * LANES);
    SHARED(A, biases, COLUMNS * LANES);
    enum { EACH = PIECES_OF(TYPE) };
    const int64_t groups = (a.width + COLUMNS - 1) / COLUMNS;
    const int lane = threadIdx.x / (COLUMNS / AT_ONCE), first = threadIdx.x % (COLUMNS / AT_ONCE) * AT_ONCE;

    FOR_BLOCKS(task, groups * a.parts) {
        const int64_t part = quotient(task, groups), column = (task - part * groups) * COLUMNS;
        const int64_t begin = quotient(a.rows * part, a.parts), end = quotient(a.rows * (part + 1), a.parts);
        A dscale[AT_ONCE] = {0}, dbias[AT_ONCE] = {0};

        for (int64_t row = begin + lane; row < end; row += LANES * EACH) {
            A x[EACH][AT_ONCE], d[EACH][AT_ONCE];
            NAME(take_rows)(&a, a.dy, a.from, row, end, column + first, d);
            NAME(take_rows)(&a, a.x, TYPE, row, end, column + first, x);
            UNROLL for (int k = 0; k < EACH; k++) {
                const int64_t own = row + k * LANES;
                if (own >= end) break;
                const A m = a.means ? ((const A *)a.means)[own] : 0, r = ((const A *)a.inverses)[own];
                UNROLL for (int j = 0; j < AT_ONCE; j++) {
                    dscale[j] += d[k][j] * ((x[k][j] - m) * r);
                    dbias[j] += d[k][j];
                }
            }
        }
        UNROLL for (int j = 0; j < AT_ONCE; j++) {
            scales[lane * COLUMNS + first + j] = dscale[j];
            biases[lane * COLUMNS + first + j] = dbias[j];
        }
        __syncthreads();
        FOR_THREADS(i, 2 * COLUMNS) {
            const int64_t which = i / COLUMNS, own = i % COLUMNS;
            const A *parts = which ? biases : scales;
            A total = 0;
            for (int other = 0; other < LANES; other++) total += parts[other * COLUMNS + own];
            if (column + own < a.width) ((A *)a.partial)[(2 * part + which) * a.width + column + own] = total;
        }
        __syncthreads();
    }
}

/* A block has the parts' totals of WARP columns, of the scale or of the bias; a lane of it every JOIN_LANES-th. */
KERNEL(NAME(norm_grad_join), norm_args) {
    SHARED(double, totals, WARP *JOIN_LANES);
    const int64_t groups = (a.width + WARP - 1) / WARP;
    const int lane = threadIdx.x / WARP;

    FOR_BLOCKS(task, groups * 2) {
        const int64_t which = task >= groups, column = (task - which * groups) * WARP + threadIdx.x % WARP;
        const A *from = (const A *)a.partial + which * a.width + column;
        void *to = which ? a.dbias : a.dscale;
        A parts[MOST_PARTS / JOIN_LANES];
        double total = 0;

        if (!to) continue;
        UNROLL for (int k = 0; k < MOST_PARTS / JOIN_LANES; k++) {
            const int64_t part = lane + k * JOIN_LANES;
            parts[k] = part < a.parts && column < a.width ? from[2 * part * a.width] : 0;
        }
        UNROLL for (int k = 0; k < MOST_PARTS / JOIN_LANES; k++) total += (double)parts[k];
        totals[threadIdx.x] = total;
        __syncthreads();
        if (lane == 0 && column < a.width) {
            for (int other = 1; other < JOIN_LANES; other++) total += totals[threadIdx.x + WARP * other];
            set_number(to, a.scale_type, column, total);
        }
        __syncthreads();
    }
}
#endif
