/* random.c -- owns Dropout, RandomNormal(Like), RandomUniform(Like), Bernoulli, Multinomial.
 *
 * Every random node gets a key when it is lowered, in the order of the model; its numbers are functions of the run's
 * seed, this key and an element's index (core/philox.h). So nothing random is kept for backward:
 *     y = x * mask / (1 - ratio),    dx = dy * mask / (1 - ratio)
 * are one operator with one key, and its mask exists in registers only. An element is dropped when its 32 bits are
 * below ratio * 2^32: the rate is the ratio's, not that of its rounding to a few digits.
 *
 * Where only some rows of a tensor are computed, a second operand says which they are (-1 - r is row r again): every
 * element is dropped or kept as it would be among all rows. */
#include "core/parallel.h"
#include "core/philox.h"
#include "core/vmath.h"
#include "ops/pointwise/dropout.h"
#include "ops/pointwise/pointwise.h"

#include <inttypes.h>

/* --- drawing ------------------------------------------------------------------------------------------------------ */

/* Elements are drawn in chunks of so many random words. */
enum { CHUNK = 1024, CHUNK_GROUPS = CHUNK / PHILOX_GROUP };
/* Words an element takes. */
#define WORDS (DIGITS > 32 ? 2 : 1)

typedef struct draw draw;
typedef void draw_fn(const draw *d, int64_t at, int64_t n, const uint32_t *bits);

struct draw {
    draw_fn *fn;
    const void *in;
    void *out;
    dtype type; /* of the output */
    int64_t count, words;
    uint64_t seed;
    uint32_t key, threshold;
    double scale, mean;      /* dropout's factor, or a deviation */
    double low, high, below; /* `below`: the number before high */
    int64_t *bad;            /* an element that is out of range, or -1 */
    const int64_t *rows;     /* of `width` elements, where not all are there */
    int64_t width;
};

#define TEMPLATE "ops/random/random_draws.h"
#include "ops/pointwise/each_float.h"

static void draw_chunks(void *arg, int64_t begin, int64_t end) {
    const draw *d = arg;
    int64_t each = CHUNK / d->words;
    uint32_t bits[CHUNK];

    for (int64_t chunk = begin; chunk < end; chunk++) {
        int64_t at = chunk * each, n = d->count - at < each ? d->count - at : each;
        philox_fill(d->seed, d->key, chunk * CHUNK_GROUPS, CHUNK_GROUPS, bits);
        d->fn(d, at, n, bits);
    }
}

static draw draw_of(const call *k, draw_fn *fn, int64_t words) {
    const tensor *x = k->n_in ? &k->in[0] : NULL;
    return (draw){
        .fn = fn,
        .in = x ? x->data : NULL,
        .out = k->out[0].data,
        .type = k->out[0].type,
        .count = tensor_count(&k->out[0]),
        .words = words,
        .seed = k->seed,
        .key = (uint32_t)node_int(k->node, "key"),
    };
}

static void run_draw(draw *d) {
    int64_t each = CHUNK / d->words;
    parallel_for((d->count + each - 1) / each, 4, draw_chunks, d);
}

/* --- dropout ------------------------------------------------------------------------------------------------------ */

static void drop_bool(const draw *d, int64_t at, int64_t n, const uint32_t *bits) {
    uint8_t *y = (uint8_t *)d->out + at;
    for (int64_t i = 0; i < n; i++) y[i] = d->scale != 0 && bits[i] >= d->threshold;
}

/* Elements [at, at + n), with the words of those from `position` on, which need not begin where words are drawn. */
static void draw_range(const draw *d, int64_t position, int64_t at, int64_t n) {
    uint32_t bits[CHUNK];

    for (int64_t left = n, m; left > 0; left -= m, position += m, at += m) {
        const int64_t skip = position % PHILOX_GROUP;
        m = left < CHUNK - skip ? left : CHUNK - skip;
        philox_fill(d->seed, d->key, position / PHILOX_GROUP, (skip + m + PHILOX_GROUP - 1) / PHILOX_GROUP, bits);
        d->fn(d, at, m, bits + skip);
    }
}

/* Elements of a row stand together among all rows. */
static void draw_rows(void *arg, int64_t begin, int64_t end) {
    const draw *d = arg;

    for (int64_t i = begin; i < end; i++) {
        int64_t row = d->rows[i] < 0 ? -1 - d->rows[i] : d->rows[i];
        draw_range(d, row * d->width, i * d->width, d->width);
    }
}

static status run_dropout(const call *k, draw_fn *fn) {
    double ratio = node_float(k->node, "ratio");
    draw d = draw_of(k, fn, 1);
    int64_t rows;

    d.threshold = dropout_threshold(ratio);
    d.scale = dropout_factor(ratio);
    if (k->n_in < 2 || !tensor_present(&k->in[1])) {
        run_draw(&d);
        return OK;
    }
    rows = tensor_count(&k->in[1]);
    if (d.count == 0) return OK;
    d.rows = k->in[1].data;
    d.width = d.count / rows;
    parallel_for(rows, parallel_rows(2 * d.width), draw_rows, &d);
    return OK;
}

static draw_fn *const drop[DTYPE_COUNT] = FLOAT_TABLE(drop);

dropout_run dropout_of(const call *k) {
    const double ratio = node_float(k->node, "ratio");
    return (dropout_run){.factor = dropout_factor(ratio),
                         .seed = k->seed,
                         .key = (uint32_t)node_int(k->node, "key"),
                         .threshold = dropout_threshold(ratio),
                         .type = k->in[0].type};
}

void dropout_part(const dropout_run *r, const void *x, void *y, int64_t position, int64_t n) {
    const draw d = {.fn = drop[r->type],
                    .in = x,
                    .out = y,
                    .seed = r->seed,
                    .key = r->key,
                    .threshold = r->threshold,
                    .scale = r->factor};
    draw_range(&d, position, 0, n);
}

/* As a step of a fused chain: `in[1]` holds the random bits. */
_Static_assert((int)TILE == (int)CHUNK, "a tile takes one chunk of random words");
#define DROP_TILE(name, T)                                                                                             \
    SIMD static void name(int64_t n, void *out, const void *const *in, const double *param) {                          \
        const T *x = in[0], scale = (T)dropout_factor(param[0]);                                                       \
        const uint32_t *bits = in[1], threshold = dropout_threshold(param[0]);                                         \
        T *o = out;                                                                                                    \
        _Pragma("GCC ivdep") for (int64_t i = 0; i < n; i++) o[i] = x[i] * (bits[i] >= threshold ? scale : 0);         \
    }

DROP_TILE(drop_tile_f32, float)
DROP_TILE(drop_tile_f64, double)

static status dropout_train_cpu(ctx *c, const call *k) {
    (void)c;
    return run_dropout(k, drop[k->in[0].type]);
}

static status dropout_mask_cpu(ctx *c, const call *k) {
    (void)c;
    return run_dropout(k, drop_bool);
}

/* The ratio is a constant number, so is the mode: training or not is part of what was captured. */
static status constant_operand(graph *g, const node *n, int i, const char *what, double *x) {
    if (!node_in(n, i) || value_is_filled(n->in[i], x)) return OK;
    return fail(g->c, E_UNSUPPORTED, "%s of Dropout is computed while running", what);
}

static status lower_dropout(graph *g, const node *n, value **out) {
    double ratio = 0.5, training = 0;
    bool masked = n->n_out > 1;
    value *x = n->in[0];

    TRY(constant_operand(g, n, 1, "the ratio", &ratio));
    TRY(constant_operand(g, n, 2, "the training mode", &training));
    if (!(ratio >= 0 && ratio <= 1))
        return fail(g->c, E_INVALID, "a Dropout ratio of %g is not between 0 and 1", ratio);
    if (!training || ratio == 0) {
        out[0] = x;
        return masked ? graph_full(g, BOOL, &x->shape, 1, &out[1]) : OK;
    }
    int key = g->n_random++;
    if (masked)
        TRY(emit_with(g, &out[1], "DropoutMask",
                      NODE_ATTRS(FLOAT("ratio", ratio), INT("key", key), INTS("shape", x->shape.rank, x->shape.dim)),
                      NULL));
    return emit_with(g, &out[0], "DropoutTrain", NODE_ATTRS(FLOAT("ratio", ratio), INT("key", key)), x);
}

static status grad_dropout(graph *g, const node *n, value *const dy[], value *dx[]) {
    return emit_with(g, &dx[0], "DropoutTrain",
                     NODE_ATTRS(FLOAT("ratio", node_float(n, "ratio")), INT("key", node_int(n, "key"))), dy[0],
                     node_in(n, 1));
}

static status infer_dropout(graph *g, node *n) {
    const value *rows = node_in(n, 1);
    char tx[SHAPE_TEXT], tr[SHAPE_TEXT];

    TRY(infer_same(g, n));
    if (!rows) return OK;
    if (rows->type == I64 && rows->shape.rank == 1 && n->in[0]->shape.rank > 0 &&
        rows->shape.dim[0] == n->in[0]->shape.dim[0])
        return OK;
    return fail(g->c, E_SHAPE, "%s of %s with row numbers %s", n->op->name, shape_text(&n->in[0]->shape, tx),
                shape_text(&rows->shape, tr));
}

/* --- tensors of random numbers ------------------------------------------------------------------------------------ */

static status shape_attr(graph *g, const node *n, shape *s) {
    const int64_t *dims;
    int rank = node_ints(n, "shape", &dims);

    if (rank < 0) return fail(g->c, E_INVALID, "%s needs the attribute shape", n->op->name);
    if (rank > MAX_RANK) return fail(g->c, E_UNSUPPORTED, "%s makes a tensor of rank %d", n->op->name, rank);
    s->rank = rank;
    for (int i = 0; i < rank; i++) s->dim[i] = dims[i];
    return shape_check(g->c, s);
}

/* The type is the attribute's, else the operand's if that is a float, else float32. */
static status dtype_attr(graph *g, const node *n, dtype_set allowed, dtype *type) {
    *type = node_has(n, "dtype") ? dtype_from_onnx((int)node_int(n, "dtype")) : node_in(n, 0) ? n->in[0]->type : F32;
    if (!node_has(n, "dtype") && !(allowed & SET(*type))) *type = F32;
    if (*type == DT_NONE || !(allowed & SET(*type)))
        return fail(g->c, E_TYPE, "%s cannot make elements of type %" PRId64, n->op->name, node_int(n, "dtype"));
    return OK;
}

static status infer_fill(graph *g, node *n) {
    shape s;
    dtype type;
    TRY(shape_attr(g, n, &s));
    TRY(dtype_attr(g, n, ANY_TYPE, &type));
    return set_out(g, n, 0, type, &s);
}

static status infer_mask(graph *g, node *n) {
    shape s;
    TRY(shape_attr(g, n, &s));
    return set_out(g, n, 0, BOOL, &s);
}

/* `a` and `b` name the distribution's parameters. */
static status lower_fill(graph *g, const node *n, const char *op, const char *a, const char *b, value **out) {
    shape s;
    dtype type;

    if (n->n_in) s = n->in[0]->shape;
    else TRY(shape_attr(g, n, &s));
    TRY(dtype_attr(g, n, FLOATS, &type));
    return emit_with(g, out, op,
                     NODE_ATTRS(INTS("shape", s.rank, s.dim), INT("dtype", dtype_table[type].onnx),
                                FLOAT(a, node_float(n, a)), FLOAT(b, node_float(n, b)), INT("key", g->n_random++)),
                     NULL);
}

static status lower_uniform(graph *g, const node *n, value **out) {
    return lower_fill(g, n, "UniformFill", "low", "high", out);
}

static status lower_normal(graph *g, const node *n, value **out) {
    return lower_fill(g, n, "NormalFill", "mean", "scale", out);
}

static status uniform_fill_cpu(ctx *c, const call *k) {
    static draw_fn *const uniform[DTYPE_COUNT] = FLOAT_TABLE(uniform);
    dtype type = k->out[0].type;
    draw d = draw_of(k, uniform[type], type == F64 ? 2 : 1);

    (void)c;
    d.low = node_float(k->node, "low");
    d.high = node_float(k->node, "high");
    d.below = type == F64 ? nextafter(d.high, d.low) : (double)nextafterf((float)d.high, (float)d.low);
    run_draw(&d);
    return OK;
}

static status normal_fill_cpu(ctx *c, const call *k) {
    static draw_fn *const normal[DTYPE_COUNT] = FLOAT_TABLE(normal);
    draw d = draw_of(k, normal[k->out[0].type], k->out[0].type == F64 ? 2 : 1);

    (void)c;
    d.mean = node_float(k->node, "mean");
    d.scale = node_float(k->node, "scale");
    run_draw(&d);
    return OK;
}

/* --- draws from given probabilities ------------------------------------------------------------------------------- */

static status lower_bernoulli(graph *g, const node *n, value **out) {
    dtype type;
    TRY(dtype_attr(g, n, ANY_TYPE, &type));
    return emit_with(g, out, "BernoulliDraw",
                     NODE_ATTRS(INT("dtype", dtype_table[type].onnx), INT("key", g->n_random++)), n->in[0]);
}

static status infer_bernoulli(graph *g, node *n) {
    dtype type;
    TRY(require(g, n, 0));
    TRY(dtype_attr(g, n, ANY_TYPE, &type));
    return set_out(g, n, 0, type, &n->in[0]->shape);
}

static status bernoulli_draw_cpu(ctx *c, const call *k) {
    static draw_fn *const bernoulli[DTYPE_COUNT] = FLOAT_TABLE(bernoulli);
    int64_t bad = -1;
    draw d = draw_of(k, bernoulli[k->in[0].type], 1);

    d.bad = &bad;
    run_draw(&d);
    if (bad < 0) return OK;
    return fail(c, E_RUNTIME, "element %" PRId64 " of Bernoulli's operand is %g, which is no probability", bad,
                dtype_get(k->in[0].type, k->in[0].data, bad));
}

static status lower_multinomial(graph *g, const node *n, value **out) {
    return emit_with(g, out, "MultinomialDraw",
                     NODE_ATTRS(INT("dtype", node_int(n, "dtype")), INT("sample_size", node_int(n, "sample_size")),
                                INT("key", g->n_random++)),
                     n->in[0]);
}

static status infer_multinomial(graph *g, node *n) {
    const shape *s;
    dtype type = dtype_from_onnx((int)node_int(n, "dtype"));
    int64_t samples = node_int(n, "sample_size");
    char text[SHAPE_TEXT];

    TRY(require(g, n, 0));
    s = &n->in[0]->shape;
    if (s->rank != 2) return fail(g->c, E_SHAPE, "Multinomial draws from rows, not from %s", shape_text(s, text));
    if (s->dim[0] && !s->dim[1]) return fail(g->c, E_SHAPE, "Multinomial draws from rows without elements");
    if (type != I32 && type != I64) return fail(g->c, E_TYPE, "Multinomial makes int32 or int64 indices");
    if (samples < 0) return fail(g->c, E_INVALID, "a sample size of %" PRId64, samples);
    return set_out(g, n, 0, type, &SHAPE(s->dim[0], samples));
}

/* Uniform in [0, 1) at a position of its own. */
static double uniform_at(const draw *d, int64_t position) {
    uint32_t bits[PHILOX_GROUP];
    int64_t at = 2 * position;
    philox_fill(d->seed, d->key, at / PHILOX_GROUP, 1, bits);
    return (double)bits[at % PHILOX_GROUP] * 0x1p-32 + (double)(bits[at % PHILOX_GROUP + 1] >> 11) * 0x1p-53;
}

/* Rows of unnormalised log probabilities: the first index at which their running sum exceeds a random part of the
 * whole. One of probability 0 leaves the sum as it is, so it is never the first. */
static void choose_rows(void *arg, int64_t begin, int64_t end) {
    const draw *d = arg;
    const call *k = d->in;
    const tensor *x = &k->in[0], *y = &k->out[0];
    int64_t classes = x->shape.dim[1], samples = y->shape.dim[1];

    for (int64_t row = begin; row < end; row++) {
        double most = -INFINITY, total = 0;
        for (int64_t i = 0; i < classes; i++) most = fmax(most, dtype_get(x->type, x->data, row * classes + i));
        for (int64_t i = 0; i < classes; i++) total += exp(dtype_get(x->type, x->data, row * classes + i) - most);
        if (!(total > 0) || isinf(total)) {
            __atomic_store_n(d->bad, row, __ATOMIC_RELAXED);
            continue;
        }
        for (int64_t s = 0; s < samples; s++) {
            double part = total * uniform_at(d, row * samples + s), sum = 0;
            int64_t chosen = 0;
            for (int64_t i = 0; i < classes && sum <= part; i++) {
                double p = exp(dtype_get(x->type, x->data, row * classes + i) - most);
                if (p > 0) chosen = i;
                sum += p;
            }
            dtype_set_int(y->type, y->data, row * samples + s, chosen);
        }
    }
}

static status multinomial_draw_cpu(ctx *c, const call *k) {
    int64_t bad = -1;
    draw d = draw_of(k, NULL, 1);

    d.in = k;
    d.bad = &bad;
    parallel_for(k->in[0].shape.dim[0], 1, choose_rows, &d);
    if (bad < 0) return OK;
    return fail(c, E_RUNTIME,
                "row %" PRId64 " of Multinomial's operand holds no log probabilities: it has NaN, infinity, "
                "or nothing that is possible",
                bad);
}

/* cuda/kernels/random.cu */
kernel_fn dropout_train_cuda, dropout_mask_cuda, uniform_fill_cuda, normal_fill_cuda, bernoulli_draw_cuda,
    multinomial_draw_cuda;

/* --- records ------------------------------------------------------------------------------------------------------ */

#define ATTRS(...)                                                                                                     \
    .attrs = (const attr[]) {                                                                                          \
        __VA_ARGS__, { .name = NULL }                                                                                  \
    }
#define ONNX(name_, since_, least, most, outputs, types)                                                               \
    .name = name_, .domain = "", .since = since_, .min_in = least, .max_in = most, .max_out = outputs,                 \
    .dtypes = types, .flags = RANDOM
#define SOME(name_, least, most, types)                                                                                \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = least, .max_in = most, .max_out = 1, .dtypes = types
#define OURS(name_, operands, types) SOME(name_, operands, operands, types)

/* clang-format off */
const op_def random_ops[] = {
    /* As many outputs as are asked for, so that no mask is made that is not read. */
    {ONNX("Dropout", 12, 1, 3, VARIADIC, FLOATS), ATTRS(NO_DEFAULT("seed", FLOAT)), .lower = lower_dropout},
    {SOME("DropoutTrain", 1, 2, FLOATS), .owned = OPERAND(1), .flags = RANDOM | INPLACE_0,
     ATTRS(NO_DEFAULT("ratio", FLOAT), NO_DEFAULT("key", INT)),
     .infer = infer_dropout, .grad = grad_dropout, .cpu = dropout_train_cpu,
     .cuda = dropout_train_cuda,
     .pointwise = &(const pointwise_def){.params = {"ratio", "key"}, .fn = {FLOAT_TILES(drop_tile)}, .draws = true}},
    {OURS("DropoutMask", 0, 0), .flags = RANDOM | NO_GRAD,
     ATTRS(NO_DEFAULT("ratio", FLOAT), NO_DEFAULT("key", INT), NO_DEFAULT("shape", INTS)),
     .infer = infer_mask, .cpu = dropout_mask_cpu, .cuda = dropout_mask_cuda},

    {ONNX("RandomUniform", 1, 0, 0, 1, 0), .lower = lower_uniform,
     ATTRS(NO_DEFAULT("dtype", INT), FLOAT("low", 0), FLOAT("high", 1), NO_DEFAULT("seed", FLOAT),
           NO_DEFAULT("shape", INTS))},
    {ONNX("RandomUniformLike", 1, 1, 1, 1, 0), .lower = lower_uniform,
     ATTRS(NO_DEFAULT("dtype", INT), FLOAT("low", 0), FLOAT("high", 1), NO_DEFAULT("seed", FLOAT))},
    {ONNX("RandomNormal", 1, 0, 0, 1, 0), .lower = lower_normal,
     ATTRS(NO_DEFAULT("dtype", INT), FLOAT("mean", 0), FLOAT("scale", 1), NO_DEFAULT("seed", FLOAT),
           NO_DEFAULT("shape", INTS))},
    {ONNX("RandomNormalLike", 1, 1, 1, 1, 0), .lower = lower_normal,
     ATTRS(NO_DEFAULT("dtype", INT), FLOAT("mean", 0), FLOAT("scale", 1), NO_DEFAULT("seed", FLOAT))},
    {OURS("UniformFill", 0, 0), .flags = RANDOM | NO_GRAD, .infer = infer_fill, .cpu = uniform_fill_cpu,
     .cuda = uniform_fill_cuda,
     ATTRS(NO_DEFAULT("shape", INTS), NO_DEFAULT("dtype", INT), NO_DEFAULT("low", FLOAT), NO_DEFAULT("high", FLOAT),
           NO_DEFAULT("key", INT))},
    {OURS("NormalFill", 0, 0), .flags = RANDOM | NO_GRAD, .infer = infer_fill, .cpu = normal_fill_cpu,
     .cuda = normal_fill_cuda,
     ATTRS(NO_DEFAULT("shape", INTS), NO_DEFAULT("dtype", INT), NO_DEFAULT("mean", FLOAT), NO_DEFAULT("scale", FLOAT),
           NO_DEFAULT("key", INT))},

    {ONNX("Bernoulli", 15, 1, 1, 1, FLOATS), .lower = lower_bernoulli,
     ATTRS(NO_DEFAULT("dtype", INT), NO_DEFAULT("seed", FLOAT))},
    {OURS("BernoulliDraw", 1, FLOATS), .flags = RANDOM | NO_GRAD,
     ATTRS(NO_DEFAULT("dtype", INT), NO_DEFAULT("key", INT)),
     .infer = infer_bernoulli, .cpu = bernoulli_draw_cpu, .cuda = bernoulli_draw_cuda},
    {ONNX("Multinomial", 7, 1, 1, 1, FLOATS), .lower = lower_multinomial,
     ATTRS(INT("dtype", 6), INT("sample_size", 1), NO_DEFAULT("seed", FLOAT))},
    {OURS("MultinomialDraw", 1, FLOATS), .flags = RANDOM | NO_GRAD, .infer = infer_multinomial,
     ATTRS(NO_DEFAULT("dtype", INT), NO_DEFAULT("sample_size", INT), NO_DEFAULT("key", INT)),
     .cpu = multinomial_draw_cpu, .cuda = multinomial_draw_cuda},
    {0},
};
/* clang-format on */
