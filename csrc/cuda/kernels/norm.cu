/* norm.cu -- twin of ops/norms/norm.c: LayerNormalization, RMSNormalization, FusedNorm and their gradients, over the last
 * axes.
 *
 * A block has a row, whose threads take eight neighbours at a time, and keep them where that is all they have. The
 * gradients of scale and bias are sums over rows: a block adds up 64 columns of one part of the rows, whose number
 * depends on the shape alone, and a second kernel the parts, in order. They read dy, so they come before dx, which may
 * take its place. */
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

enum { COLUMNS = 64, LANES = 32 }; /* of a block: columns, and rows that it reads at a time */

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
    return cuda_launch(c, k, &kernels[type], geometry_pieces(a->rows, a->width), a);
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
        TRY(cuda_launch(c, k, &join[type], geometry_over(a.width, 128, 128), &a));
    }
    if (!is_wanted(k, 0)) return OK;
    return cuda_launch(c, k, &rows[type], geometry_pieces(a.rows, a.width), &a);
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
DEVICE void NAME(add)(const norm_args *a, uint64_t seed, int64_t i, int64_t begin, int64_t end, A sum[AT_ONCE]) {
    A x[AT_ONCE], other[AT_ONCE];

    TAKE(a->x, a->from, i, begin, end, x);
    TAKE(a->other, TYPE, i, begin, end, other);
    if (a->drops) {
        const uint32_t kept = kept_bits(seed, a->key, a->threshold, i);
        UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] =
            NAME(rounded)(a->from, x[j] * (kept >> j & 1 ? (A)a->factor : 0));
    }
    UNROLL for (int j = 0; j < AT_ONCE; j++) sum[j] = GET(PUT(x[j] + other[j]));
    GIVE(a->sum, TYPE, i, begin, end, sum);
}

/* y may lie where x or the sum does. */
KERNEL(NAME(norm_rows), norm_args) {
    const uint64_t seed = a.seed_at ? *a.seed_at : a.seed;
    const void *from = a.other ? a.sum : a.x;

    FOR_BLOCKS(row, a.rows) {
        const int64_t begin = row * a.width, end = begin + a.width;
        const int many = ARE_MANY(begin, end);
        A m = 0, r = 0, x[AT_ONCE] = {0}, y[AT_ONCE];
        double total = 0; /* so that nothing is left of a row whose elements are the same */

        NOT_UNROLLED for (int pass = 0; pass < 3; pass++) {
            FOR_PIECES(i, begin, end) {
                if (pass == 0 && a.other) NAME(add)(&a, seed, i, begin, end, x);
                else if (pass == 0 || many) TAKE(from, TYPE, i, begin, end, x);
                if (pass == 0) {
                    EACH_OF(j, i, begin, end) total += (double)x[j];
                    continue;
                }
                if (pass == 1) {
                    EACH_OF(j, i, begin, end) r += (x[j] - m) * (x[j] - m);
                    continue;
                }
                TAKE(a.scale, a.scale_type, i - begin, 0, a.width, y);
                UNROLL for (int j = 0; j < AT_ONCE; j++) y[j] = (x[j] - m) * r * y[j];
                if (a.bias) {
                    A bias[AT_ONCE];
                    TAKE(a.bias, a.bias_type, i - begin, 0, a.width, bias);
                    UNROLL for (int j = 0; j < AT_ONCE; j++) y[j] += bias[j];
                }
                if (a.narrow) GIVE(a.narrow, a.to == BF16 ? BF16 : F16, i, begin, end, y);
                if (a.out) GIVE(a.out, TYPE, i, begin, end, y);
            }
            if (pass == 0 && a.centred) m = (A)(block_sum_f64(total) / (double)a.width);
            if (pass != 1) continue;
            r = 1 / SQRT(SUM(r) / (A)a.width + (A)a.epsilon);
            if (threadIdx.x == 0) {
                if (a.means) ((A *)a.means)[row] = m;
                if (a.inverses) ((A *)a.inverses)[row] = r;
            }
        }
    }
}

KERNEL(NAME(norm_grad_rows), norm_args) {
    FOR_BLOCKS(row, a.rows) {
        const int64_t begin = row * a.width, end = begin + a.width;
        const int many = ARE_MANY(begin, end);
        const A m = a.means ? ((const A *)a.means)[row] : 0, r = ((const A *)a.inverses)[row];
        A sum = 0, dot = 0, x[AT_ONCE] = {0}, g[AT_ONCE] = {0}, other[AT_ONCE];

        NOT_UNROLLED for (int pass = 0; pass < 2; pass++) {
            FOR_PIECES(i, begin, end) {
                if (pass == 0 || many) {
                    TAKE(a.scale, a.scale_type, i - begin, 0, a.width, other);
                    TAKE(a.dy, a.from, i, begin, end, g);
                    TAKE(a.x, TYPE, i, begin, end, x);
                    UNROLL for (int j = 0; j < AT_ONCE; j++) {
                        g[j] *= other[j];
                        x[j] = (x[j] - m) * r;
                    }
                }
                if (pass == 0) {
                    EACH_OF(j, i, begin, end) {
                        sum += g[j];
                        dot += g[j] * x[j];
                    }
                } else {
                    UNROLL for (int j = 0; j < AT_ONCE; j++) g[j] = r * (g[j] - sum - x[j] * dot);
                    if (a.other) {
                        TAKE(a.other, TYPE, i, begin, end, other);
                        UNROLL for (int j = 0; j < AT_ONCE; j++) g[j] = GET(PUT(g[j])) + other[j];
                    }
                    GIVE(a.out, TYPE, i, begin, end, g);
                }
            }
            if (pass == 1) break;
            dot = SUM(dot) / (A)a.width;
            sum = SUM(sum) / (A)a.width;
            if (!a.centred) sum = 0;
        }
    }
}

/* Columns of a part of the rows: a thread for eight neighbours in each of LANES lanes of rows. */
KERNEL(NAME(norm_grad_columns), norm_args) {
    SHARED(A, scales, COLUMNS * LANES);
    SHARED(A, biases, COLUMNS * LANES);
    const int64_t groups = (a.width + COLUMNS - 1) / COLUMNS;
    const int lane = threadIdx.x / (COLUMNS / AT_ONCE), first = threadIdx.x % (COLUMNS / AT_ONCE) * AT_ONCE;

    FOR_BLOCKS(task, groups * a.parts) {
        const int64_t part = quotient(task, groups), column = (task - part * groups) * COLUMNS;
        const int64_t begin = quotient(a.rows * part, a.parts), end = quotient(a.rows * (part + 1), a.parts);
        A dscale[AT_ONCE] = {0}, dbias[AT_ONCE] = {0};

        for (int64_t row = begin + lane; row < end; row += LANES) {
            const A m = a.means ? ((const A *)a.means)[row] : 0, r = ((const A *)a.inverses)[row];
            const int64_t start = row * a.width, at = start + column + first;
            A x[AT_ONCE], d[AT_ONCE];
            TAKE(a.dy, a.from, at, start, start + a.width, d);
            TAKE(a.x, TYPE, at, start, start + a.width, x);
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                dscale[j] += d[j] * ((x[j] - m) * r);
                dbias[j] += d[j];
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
