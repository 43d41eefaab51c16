/* norm.cu -- mirrors ops/norms/norm.c: LayerNormalization, RMSNormalization, FusedNorm, their gradients, over the last
 * axes.
 *
 * A block has a row, whose threads take eight neighbours at a time, of four places at once, and keep them where that is
 * all they have: a row of 1024 is a warp's. Where rows are whole pieces of memory, kept, and of types known when this is
 * compiled, kernels have nothing but that (`even`), with the same bits. The gradients of scale and bias are sums over
 * rows: a thread adds up eight columns of a part of the rows, and a second kernel the parts, in order. How many parts
 * there are depends on the shape alone. Where rows are even and all gradients are wanted, the kernel of dx adds up, too,
 * so that dy and x are read once: a block has a part's rows. Elsewhere a kernel before it does; dx may take dy's place. */
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

enum { LEAST_ROWS = 16, MOST_PARTS = 512 }; /* of a part; of the rows */
enum {
    JOIN_LANES = 8,
    JOIN_AT_ONCE = 8,
    ADDING = 256
}; /* of a block that adds up the parts of WARP columns; threads */

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
    a.parts = a.rows / LEAST_ROWS;
    a.parts = a.parts < 1 ? 1 : a.parts < MOST_PARTS ? a.parts : MOST_PARTS;
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

/* Whether kernels that know of even rows alone may run: of one type, but for `from` and `to`. */
static bool are_even(const norm_args *a, dtype type, geometry g) {
    enum { ROUND = 64, ALIGNED = 16 };
    const void *const p[] = {a->x, a->dy, a->scale, a->bias, a->other, a->out, a->sum, a->narrow};

    if (a->width % ROUND || a->width > g.threads * PIECES_OF(type) * ROW_PIECE) return false;
    if (a->scale_type != (int32_t)type || (a->bias && a->bias_type != (int32_t)type)) return false;
    for (size_t i = 0; i < sizeof p / sizeof *p; i++)
        if ((uintptr_t)p[i] % ALIGNED) return false;
    return true;
}

static status run_forward(ctx *c, const call *k, dtype type, const norm_args *a) {
    static kernel kernels[2][2][DTYPE_COUNT] = {
        {FLOAT_KERNELS(norm_rows), FLOAT_KERNELS(norm_even_rows)},
        {FLOAT_KERNELS(norm_sum_rows), FLOAT_KERNELS(norm_sum_even_rows)}}; /* [adds][even] */
    const geometry g = geometry_kept(a->rows, a->width, type);
    return cuda_launch(c, k, &kernels[a->other != NULL][are_even(a, type, g)][type], g, a);
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
    static kernel rows[2][DTYPE_COUNT] = {FLOAT_KERNELS(norm_grad_rows), FLOAT_KERNELS(norm_grad_even_rows)};
    static kernel columns[2][DTYPE_COUNT] = {FLOAT_KERNELS(norm_grad_columns), FLOAT_KERNELS(norm_grad_even_columns)};
    static kernel all[DTYPE_COUNT] = FLOAT_KERNELS(norm_grad_even_all),
                  join[DTYPE_COUNT] = FLOAT_KERNELS(norm_grad_join);
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
    const geometry of_rows = geometry_kept(a.rows, a.width, type);
    const geometry of_join = geometry_over((a.width + WARP - 1) / WARP * 2, 1, WARP * JOIN_LANES);
    const bool even = are_even(&a, type, of_rows), sums = is_wanted(k, 1) || is_wanted(k, 2);
    if (even && sums && is_wanted(k, 0)) {
        TRY(cuda_launch(c, k, &all[type], geometry_kept(a.parts, a.width, type), &a));
        return cuda_launch(c, k, &join[type], of_join, &a);
    }
    if (sums) {
        const int64_t threads = a.parts * ((a.width + ROW_PIECE - 1) / ROW_PIECE);
        TRY(cuda_launch(c, k, &columns[even][type], geometry_over(threads, 1, ADDING), &a));
        TRY(cuda_launch(c, k, &join[type], of_join, &a));
    }
    if (!is_wanted(k, 0)) return OK;
    return cuda_launch(c, k, &rows[even][type], of_rows, &a);
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

/* What storing a piece as `type` leaves of it: T's own, or 16 bits where T is float. */
DEVICE void NAME(round_piece)(int type, A x[AT_ONCE]) {
    if (type == BF16) ROUND_TO_BF16(x);
    else if (type == F16) UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] = (A)f16_to_f32(f32_to_f16((float)x[j]));
}

/* A thread's pieces of a row from i on; what is not in [begin, end) is 0. */
DEVICE void NAME(take_row)(const void *p, int type, int64_t i, int64_t begin, int64_t end, int even,
                           A x[PIECES_OF(TYPE)][AT_ONCE]) {
    if (even) READ_EVEN(p, type, i, PIECE_STEP, begin, end, x);
    else TAKE_PIECES(p, type, i, PIECE_STEP, begin, end, x);
}

/* One piece of a row, or of a vector as long; outside of it an even one stays as it is. */
DEVICE void NAME(take_piece)(const void *p, int type, int64_t i, int64_t begin, int64_t end, int even, A x[AT_ONCE]) {
    if (!even) TAKE(p, type, i, begin, end, x);
    else if (i < end) READ_PIECE(p, type, i, x);
}
DEVICE void NAME(give_piece)(void *p, int type, int64_t i, int64_t begin, int64_t end, int even, const A x[AT_ONCE]) {
    if (!even) GIVE(p, type, i, begin, end, x);
    else if (i < end) WRITE_PIECE(p, type, i, x);
}

/* x of elements [begin, end) from i, of which a dropout may have left some, and the other operand -> the sum, and it. */
DEVICE void NAME(add)(const norm_args *a, int from, int64_t i, int64_t begin, int64_t end, int even,
                      A sum[PIECES_OF(TYPE)][AT_ONCE]) {
    const uint64_t seed = a->seed_at ? *a->seed_at : a->seed;
    A x[PIECES_OF(TYPE)][AT_ONCE];

    NAME(take_row)(a->x, from, i, begin, end, even, x);
    NAME(take_row)(a->other, TYPE, i, begin, end, even, sum);
    UNROLL for (int k = 0; k < PIECES_OF(TYPE); k++) {
        const int64_t at = i + k * PIECE_STEP;
        if (at - threadIdx.x % WARP * AT_ONCE >= end) break; /* the whole warp's is behind the row */
        if (a->drops) {
            const uint32_t kept = kept_bits(seed, a->key, a->threshold, at);
            UNROLL for (int j = 0; j < AT_ONCE; j++) x[k][j] =
                ROUNDED_PRODUCT(x[k][j], kept >> j & 1 ? (A)a->factor : 0);
            NAME(round_piece)(from, x[k]);
        }
        UNROLL for (int j = 0; j < AT_ONCE; j++) sum[k][j] = GET(PUT(x[k][j] + sum[k][j]));
        NAME(give_piece)(a->sum, TYPE, at, begin, end, even, sum[k]);
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

/* What is stored of a piece of y, in 16 bits, too. */
DEVICE void NAME(give_norm)(const norm_args *a, int64_t at, int64_t begin, int64_t end, int even, const A y[AT_ONCE]) {
    if (a->narrow && a->to == BF16) NAME(give_piece)(a->narrow, BF16, at, begin, end, even, y);
    else if (a->narrow) NAME(give_piece)(a->narrow, F16, at, begin, end, even, y);
    if (a->out) NAME(give_piece)(a->out, TYPE, at, begin, end, even, y);
}

/* y may lie where x or the sum does. `adds`: there is something to add to x, which is of type `from`. */
DEVICE void NAME(norm_row)(const norm_args *a, int64_t row, int adds, int from, int even) {
    enum { EACH = PIECES_OF(TYPE) };
    const void *source = adds ? a->sum : a->x;
    const int64_t begin = row * a->width, end = begin + a->width;
    const int many = !even && ARE_ROUNDS(TYPE, begin, end);
    const int scale_type = even ? TYPE : a->scale_type, bias_type = even ? TYPE : a->bias_type;
    A m = 0, r = 0, x[EACH][AT_ONCE] = {{0}}, y[AT_ONCE];
    double total = 0;

    NOT_UNROLLED for (int pass = 0; pass < 3; pass++) {
        FOR_ROUNDS(TYPE, i, begin, end) {
            if (pass == 0 && adds) NAME(add)(a, from, i, begin, end, even, x);
            else if (pass == 0 || many) NAME(take_row)(source, TYPE, i, begin, end, even, x);
            UNROLL for (int k = 0; k < EACH; k++) {
                const int64_t at = i + k * PIECE_STEP;
                const uint32_t inside = !even ? inside_of(at, begin, end) : at < end ? ALL_INSIDE : 0;
                if (!inside) continue;
                if (pass == 0) {
                    total += NAME(sum_of)(x[k], inside);
                    continue;
                }
                if (pass == 1) {
                    UNROLL for (int j = 0; j < AT_ONCE; j++) r = inside >> j & 1 ? FMA(x[k][j] - m, x[k][j] - m, r) : r;
                    continue;
                }
                NAME(take_piece)(a->scale, scale_type, at - begin, 0, a->width, even, y);
                UNROLL for (int j = 0; j < AT_ONCE; j++) y[j] = ROUNDED_PRODUCT(ROUNDED_PRODUCT(x[k][j] - m, r), y[j]);
                if (a->bias) {
                    A bias[AT_ONCE] = {0};
                    NAME(take_piece)(a->bias, bias_type, at - begin, 0, a->width, even, bias);
                    UNROLL for (int j = 0; j < AT_ONCE; j++) y[j] += bias[j];
                }
                NAME(give_norm)(a, at, begin, end, even, y);
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

/* `from`, where it is no more than three types, as a number that is known. */
#define OF_TYPE(from, call)                                                                                            \
    do {                                                                                                               \
        if (TYPE != F32 || (from) == TYPE) call(TYPE);                                                                 \
        else if ((from) == BF16) call(BF16);                                                                           \
        else call(F16);                                                                                                \
    } while (0)

KERNEL(NAME(norm_rows), norm_args) { FOR_BLOCKS(row, a.rows) NAME(norm_row)(&a, row, 0, TYPE, 0); }
KERNEL(NAME(norm_even_rows), norm_args) { FOR_BLOCKS(row, a.rows) NAME(norm_row)(&a, row, 0, TYPE, 1); }
KERNEL(NAME(norm_sum_rows), norm_args) { FOR_BLOCKS(row, a.rows) NAME(norm_row)(&a, row, 1, a.from, 0); }
KERNEL(NAME(norm_sum_even_rows), norm_args) {
#define ROWS(type) FOR_BLOCKS(row, a.rows) NAME(norm_row)(&a, row, 1, type, 1)
    OF_TYPE(a.from, ROWS);
#undef ROWS
}

DEVICE void NAME(norm_grad_row)(const norm_args *a, int64_t row, int from, int even) {
    enum { EACH = PIECES_OF(TYPE) };
    const int64_t begin = row * a->width, end = begin + a->width;
    const int many = !even && ARE_ROUNDS(TYPE, begin, end), scale_type = even ? TYPE : a->scale_type;
    const A m = a->means ? ((const A *)a->means)[row] : 0, r = ((const A *)a->inverses)[row];
    A sum = 0, dot = 0, x[EACH][AT_ONCE] = {{0}}, g[EACH][AT_ONCE] = {{0}}, other[EACH][AT_ONCE] = {{0}};

    NOT_UNROLLED for (int pass = 0; pass < 2; pass++) {
        FOR_ROUNDS(TYPE, i, begin, end) {
            if (pass == 0 || many) {
                NAME(take_row)(a->dy, from, i, begin, end, even, g);
                NAME(take_row)(a->x, TYPE, i, begin, end, even, x);
                UNROLL for (int k = 0; k < EACH; k++) {
                    A scale[AT_ONCE] = {0};
                    NAME(take_piece)(a->scale, scale_type, i + k * PIECE_STEP - begin, 0, a->width, even, scale);
                    UNROLL for (int j = 0; j < AT_ONCE; j++) {
                        g[k][j] = ROUNDED_PRODUCT(g[k][j], scale[j]);
                        x[k][j] = ROUNDED_PRODUCT(x[k][j] - m, r);
                    }
                }
            }
            if (pass == 0) { /* what is outside has a g of 0 */
                UNROLL for (int k = 0; k < EACH; k++) {
                    UNROLL for (int j = 0; j < AT_ONCE; j++) {
                        sum += g[k][j];
                        dot = FMA(g[k][j], x[k][j], dot);
                    }
                }
                continue;
            }
            if (a->other) NAME(take_row)(a->other, TYPE, i, begin, end, even, other);
            UNROLL for (int k = 0; k < EACH; k++) {
                UNROLL for (int j = 0; j < AT_ONCE; j++) g[k][j] =
                    ROUNDED_PRODUCT(r, FMA(-x[k][j], dot, g[k][j] - sum));
                if (a->other) {
                    UNROLL for (int j = 0; j < AT_ONCE; j++) g[k][j] = GET(PUT(g[k][j])) + other[k][j];
                }
                NAME(give_piece)(a->out, TYPE, i + k * PIECE_STEP, begin, end, even, g[k]);
            }
        }
        if (pass == 1) break;
        dot = SUM(dot) / (A)a->width;
        sum = SUM(sum) / (A)a->width;
        if (!a->centred) sum = 0;
    }
}

KERNEL(NAME(norm_grad_rows), norm_args) { FOR_BLOCKS(row, a.rows) NAME(norm_grad_row)(&a, row, a.from, 0); }
KERNEL(NAME(norm_grad_even_rows), norm_args) {
#define ROWS(type) FOR_BLOCKS(row, a.rows) NAME(norm_grad_row)(&a, row, type, 1)
    OF_TYPE(a.from, ROWS);
#undef ROWS
}

/* dx of even rows [begin, end), and a part's sums of what belongs to scale and bias, as the block's threads keep them. */
DEVICE void NAME(norm_grad_part)(const norm_args *a, int64_t part, int from) {
    enum { EACH = PIECES_OF(TYPE), SUMS = TYPE == F64 ? F64 : F32 };
    const int64_t first = (int64_t)threadIdx.x * AT_ONCE;
    const int64_t last = quotient(a->rows * (part + 1), a->parts);
    A dscale[EACH][AT_ONCE] = {{0}}, dbias[EACH][AT_ONCE] = {{0}};
    A x[EACH][AT_ONCE] = {{0}}, g[EACH][AT_ONCE] = {{0}}, other[AT_ONCE] = {0};

    NOT_UNROLLED for (int64_t row = quotient(a->rows * part, a->parts); row < last; row++) {
        const int64_t begin = row * a->width, end = begin + a->width;
        const A m = a->means ? ((const A *)a->means)[row] : 0, r = ((const A *)a->inverses)[row];
        A sum = 0, dot = 0;

        READ_EVEN(a->dy, from, begin + first, PIECE_STEP, begin, end, g);
        READ_EVEN(a->x, TYPE, begin + first, PIECE_STEP, begin, end, x);
        UNROLL for (int k = 0; k < EACH; k++) {
            A scale[AT_ONCE] = {0};
            NAME(take_piece)(a->scale, TYPE, first + k * PIECE_STEP, 0, a->width, 1, scale);
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                x[k][j] = ROUNDED_PRODUCT(x[k][j] - m, r);
                dscale[k][j] = FMA(g[k][j], x[k][j], dscale[k][j]);
                dbias[k][j] += g[k][j];
                g[k][j] = ROUNDED_PRODUCT(g[k][j], scale[j]);
                sum += g[k][j];
                dot = FMA(g[k][j], x[k][j], dot);
            }
        }
        dot = SUM(dot) / (A)a->width;
        sum = SUM(sum) / (A)a->width;
        if (!a->centred) sum = 0;
        UNROLL for (int k = 0; k < EACH; k++) {
            const int64_t at = begin + first + k * PIECE_STEP;
            UNROLL for (int j = 0; j < AT_ONCE; j++) g[k][j] = ROUNDED_PRODUCT(r, FMA(-x[k][j], dot, g[k][j] - sum));
            if (a->other) {
                NAME(take_piece)(a->other, TYPE, at, begin, end, 1, other);
                UNROLL for (int j = 0; j < AT_ONCE; j++) g[k][j] = GET(PUT(g[k][j])) + other[j];
            }
            NAME(give_piece)(a->out, TYPE, at, begin, end, 1, g[k]);
        }
    }
    UNROLL for (int k = 0; k < EACH; k++) {
        A *sums = (A *)a->partial + 2 * part * a->width;
        NAME(give_piece)(sums, SUMS, first + k * PIECE_STEP, 0, a->width, 1, dscale[k]);
        NAME(give_piece)(sums + a->width, SUMS, first + k * PIECE_STEP, 0, a->width, 1, dbias[k]);
    }
}

KERNEL(NAME(norm_grad_even_all), norm_args) {
#define PARTS(type) FOR_BLOCKS(part, a.parts) NAME(norm_grad_part)(&a, part, type)
    OF_TYPE(a.from, PARTS);
#undef PARTS
}

/* Columns from `first` on of neighbouring rows, from `row` to `end`. */
DEVICE void NAME(take_rows)(const norm_args *a, const void *p, int type, int64_t row, int64_t end, int64_t first,
                            int even, A x[PIECES_OF(TYPE)][AT_ONCE]) {
    if (even) {
        READ_EVEN(p, type, row * a->width + first, a->width, 0, end * a->width, x);
        return;
    }
    if (a->width % AT_ONCE == 0) {
        TAKE_PIECES(p, type, row * a->width + first, a->width, 0, end * a->width, x);
        return;
    }
    UNROLL for (int k = 0; k < PIECES_OF(TYPE); k++) {
        const int64_t start = (row + k) * a->width;
        TAKE(p, type, start + first, start, row + k < end ? start + a->width : 0, x[k]);
    }
}

/* Of eight columns, from `first` on, of rows [begin, end): what belongs to scale and bias, as norm_grad_part adds it. */
DEVICE void NAME(add_columns)(const norm_args *a, int from, int64_t begin, int64_t end, int64_t first, int even,
                              A dscale[AT_ONCE], A dbias[AT_ONCE]) {
    enum { EACH = PIECES_OF(TYPE) };

    for (int64_t row = begin; row < end; row += EACH) {
        A x[EACH][AT_ONCE], d[EACH][AT_ONCE];
        NAME(take_rows)(a, a->dy, from, row, end, first, even, d);
        NAME(take_rows)(a, a->x, TYPE, row, end, first, even, x);
        UNROLL for (int k = 0; k < EACH; k++) {
            if (row + k >= end) break;
            const A m = a->means ? ((const A *)a->means)[row + k] : 0, r = ((const A *)a->inverses)[row + k];
            UNROLL for (int j = 0; j < AT_ONCE; j++) {
                dscale[j] = FMA(d[k][j], ROUNDED_PRODUCT(x[k][j] - m, r), dscale[j]);
                dbias[j] += d[k][j];
            }
        }
    }
}

/* Sums of parts: a thread has eight neighbouring columns of one. */
DEVICE void NAME(columns_of)(const norm_args *a, int from, int even) {
    enum { SUMS = TYPE == F64 ? F64 : F32 };
    const int64_t pieces = (a->width + AT_ONCE - 1) / AT_ONCE;

    FOR_EACH(task, pieces * a->parts) {
        const int64_t part = quotient(task, pieces), first = (task - part * pieces) * AT_ONCE;
        const int64_t begin = quotient(a->rows * part, a->parts), end = quotient(a->rows * (part + 1), a->parts);
        A dscale[AT_ONCE] = {0}, dbias[AT_ONCE] = {0}, *sums = (A *)a->partial + 2 * part * a->width;

        NAME(add_columns)(a, from, begin, end, first, even, dscale, dbias);
        NAME(give_piece)(sums, SUMS, first, 0, a->width, even, dscale);
        NAME(give_piece)(sums + a->width, SUMS, first, 0, a->width, even, dbias);
    }
}

KERNEL(NAME(norm_grad_columns), norm_args) { NAME(columns_of)(&a, a.from, 0); }
KERNEL(NAME(norm_grad_even_columns), norm_args) {
#define COLUMNS_OF(type) NAME(columns_of)(&a, type, 1)
    OF_TYPE(a.from, COLUMNS_OF);
#undef COLUMNS_OF
}
#undef OF_TYPE

/* A block has the parts' totals of WARP columns, of the scale or of the bias; a lane of it every JOIN_LANES-th. */
KERNEL(NAME(norm_grad_join), norm_args) {
    SHARED(double, totals, WARP *JOIN_LANES);
    const int64_t groups = (a.width + WARP - 1) / WARP;
    const int lane = threadIdx.x / WARP;

    FOR_BLOCKS(task, groups * 2) {
        const int64_t which = task >= groups, column = (task - which * groups) * WARP + threadIdx.x % WARP;
        const A *from = (const A *)a.partial + which * a.width + column;
        void *to = which ? a.dbias : a.dscale;
        double total = 0;

        if (!to) continue;
        NOT_UNROLLED for (int64_t first = lane; first < a.parts; first += JOIN_LANES * JOIN_AT_ONCE) {
            A parts[JOIN_AT_ONCE];
            UNROLL for (int k = 0; k < JOIN_AT_ONCE; k++) {
                const int64_t part = first + k * JOIN_LANES;
                parts[k] = part < a.parts && column < a.width ? from[2 * part * a.width] : 0;
            }
            UNROLL for (int k = 0; k < JOIN_AT_ONCE; k++) total += (double)parts[k];
        }
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
