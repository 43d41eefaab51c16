/* random.cu -- mirrors ops/random/random.c: dropout and draws, with the very bits of core/philox.c.
 *
 * A thread has a counter, whose four words belong to four elements 16 apart (the order within a group of 64); of a dropout
 * eight neighbours, read and written as pieces, for which its warp draws together. Where only some rows are there, each
 * element is dropped or kept as it would be among all rows: of rows that are no multiple of 64 long a thread has one. */
#ifndef T
#include "cuda/kernels/kernel.h"

#define AT_ONCE ROW_PIECE
#include "cuda/kernels/pieces.h"

typedef struct dropout_args {
    const void *in;
    void *out;
    const int64_t *rows; /* of `width` elements, where not all are there; or NULL */
    int64_t count, width;
    const uint64_t *seed_at; /* or NULL */
    uint64_t seed;
    double scale;
    uint32_t key, threshold;
} dropout_args;

typedef struct draw_args {
    const void *in; /* probabilities, or rows of log probabilities */
    void *out;
    int64_t count, rows, classes;
    const uint64_t *seed_at; /* or NULL */
    uint64_t seed;
    double low, high, below, mean, scale;
    uint32_t key;
    int32_t type, out_type, digits, node; /* digits: of out's mantissa */
    cuda_fault *fault;
} draw_args;

/* Threads that have eight neighbours of so many elements: whole warps, which draw together. */
#define PIECES_FOR(count) (((count) + WARP * ROW_PIECE - 1) / (WARP * ROW_PIECE) * WARP)

/* Whether no counter is of two rows. */
#define HAS_PIECES(a) (!(a)->rows || (a)->width % 64 == 0)

/* Elements of a chunk of ops/random/random.c, and threads that choose from a row. */
enum { NARROW_CHUNK = 1024, WIDE_CHUNK = 512, CHOOSERS = 128 };

#ifdef ORT_HOST
#include <math.h>

kernel_fn dropout_train_cuda, dropout_mask_cuda, uniform_fill_cuda, normal_fill_cuda, bernoulli_draw_cuda,
    multinomial_draw_cuda;

static status run(ctx *c, const call *k, kernel *f) {
    const double ratio = node_float(k->node, "ratio");
    dropout_args a = {.out = k->out[0].data,
                      .count = tensor_count(&k->out[0]),
                      .seed_at = k->cuda->seed,
                      .seed = k->seed,
                      .key = (uint32_t)node_int(k->node, "key")};

    if (k->n_in) a.in = k->in[0].data;
    if (k->n_in > 1 && tensor_present(&k->in[1])) {
        a.rows = k->in[1].data;
        a.width = shape_span(&k->in[0].shape, 1, k->in[0].shape.rank);
    }
    a.threshold = ratio < 1 ? (uint32_t)fmin(nearbyint(ratio * 0x1p32), 0xFFFFFFFFp0) : 0;
    a.scale = ratio < 1 ? 1 / (1 - ratio) : 0;
    return cuda_launch(c, k, f, geometry_over(HAS_PIECES(&a) ? PIECES_FOR(a.count) : a.count, 128, 128), &a);
}

status dropout_train_cuda(ctx *c, const call *k) {
    static kernel kernels[DTYPE_COUNT] = FLOAT_KERNELS(dropout);
    return run(c, k, &kernels[k->in[0].type]);
}

status dropout_mask_cuda(ctx *c, const call *k) {
    static kernel mask = {.name = "dropout_mask"};
    return run(c, k, &mask);
}

static draw_args draw_of(const call *k) {
    static const int32_t digits[DTYPE_COUNT] = {[F32] = 24, [F64] = 53, [BF16] = 8, [F16] = 11};
    draw_args a = {.out = k->out[0].data,
                   .count = tensor_count(&k->out[0]),
                   .seed_at = k->cuda->seed,
                   .seed = k->seed,
                   .key = (uint32_t)node_int(k->node, "key"),
                   .out_type = k->out[0].type,
                   .digits = digits[k->out[0].type],
                   .node = cuda_named(k->node),
                   .fault = k->cuda->fault};

    if (k->n_in) a.in = k->in[0].data, a.type = k->in[0].type;
    return a;
}

/* A thread has one counter of so many elements, `each` of which one of its draws makes. */
static status fill(ctx *c, const call *k, kernel kernels[2], const int each[2], const draw_args *a) {
    const bool wide = a->out_type == F64;
    const int64_t chunk = wide ? WIDE_CHUNK : NARROW_CHUNK, chunks = (a->count + chunk - 1) / chunk;
    return cuda_launch(c, k, &kernels[wide], geometry_over(chunks * each[wide], 128, 128), a);
}

status uniform_fill_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "uniform_narrow"}, {.name = "uniform_f64"}};
    draw_args a = draw_of(k);

    a.low = node_float(k->node, "low");
    a.high = node_float(k->node, "high");
    a.below = a.out_type == F64 ? nextafter(a.high, a.low) : (double)nextafterf((float)a.high, (float)a.low);
    return fill(c, k, kernels, (const int[]){256, 128}, &a);
}

status normal_fill_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "normal_narrow"}, {.name = "normal_f64"}};
    draw_args a = draw_of(k);

    a.mean = node_float(k->node, "mean");
    a.scale = node_float(k->node, "scale");
    return fill(c, k, kernels, (const int[]){128, 64}, &a);
}

status bernoulli_draw_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "bernoulli"};
    const draw_args a = draw_of(k);
    return cuda_launch(c, k, &f, geometry_over((a.count + 63) / 64 * 16, 256, 256), &a);
}

status multinomial_draw_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "multinomial"};
    draw_args a = draw_of(k);

    a.rows = k->in[0].shape.dim[0];
    a.classes = k->in[0].shape.dim[1];
    return cuda_launch(c, k, &f, geometry_over(a.rows, 1, CHOOSERS), &a);
}
#endif

#ifdef ORT_DEVICE
#include "cuda/kernels/philox.h"

#define SEED (a.seed_at ? *a.seed_at : a.seed)

/* Where element i would be if all rows were there. */
DEVICE int64_t place_among_all(const dropout_args *a, int64_t i) {
    const int64_t at = quotient(i, a->width), listed = a->rows[at];
    return (listed < 0 ? -1 - listed : listed) * a->width + i - at * a->width;
}

/* As kept_bits, of rows that are multiples of 64 long. */
DEVICE uint32_t kept_of_rows(const dropout_args *a, uint64_t seed, int64_t first) {
    const int lane = threadIdx.x % WARP;
    uint64_t counter[AT_ONCE / 4];

    UNROLL for (int turn = 0; turn < AT_ONCE / 4; turn++) {
        const int64_t group = first - lane * AT_ONCE + (turn * WARP + lane) / 16 * 64;
        counter[turn] = group < a->count ? (uint64_t)place_among_all(a, group) / 4 + lane % 16 : 0;
    }
    return kept_of_counters(seed, a->key, a->threshold, counter);
}

KERNEL(dropout_mask, dropout_args) {
    const uint64_t seed = SEED;
    FOR_EACH(piece, PIECES_FOR(a.count)) {
        const int64_t first = piece * AT_ONCE;
        const uint32_t kept = kept_bits(seed, a.key, a.threshold, first);
        uint8_t flags[AT_ONCE];
        UNROLL for (int j = 0; j < AT_ONCE; j++) flags[j] = a.scale != 0 && kept >> j & 1;
        if (is_piece(a.out, U8, first, 0, a.count)) write_uint8_t(a.out, U8, first, flags);
        else EACH_OF(j, first, 0, a.count)((uint8_t *)a.out)[first + j] = flags[j];
    }
}

/* --- draws: words as ops/random/random_draws.h takes them, chunk by chunk ------------------------------------------------ */

/* The first of four elements, 16 apart, of counter n of a chunk. */
DEVICE int64_t element_of(int64_t chunk, int size, int n) { return chunk * size + n / 16 * 64 + place_of(n % 16); }

KERNEL(uniform_narrow, draw_args) {
    const uint64_t seed = SEED;
    const float low = (float)a.low, range = (float)a.high - low, high = (float)a.high, below = (float)a.below;

    FOR_EACH(counter, (a.count + 63) / 64 * 16) {
        const int64_t first = counter / 16 * 64 + place_of((int)(counter % 16));
        uint32_t word[4];
        draw(seed, a.key, (uint64_t)counter, word);
        for (int j = 0; j < 4; j++) {
            const float u = (float)(word[j] >> (32 - a.digits)) / (float)(1 << a.digits), v = low + u * range;
            if (first + 16 * j < a.count) set_number(a.out, a.out_type, first + 16 * j, v < high ? v : below);
        }
    }
}

KERNEL(uniform_f64, draw_args) {
    const uint64_t seed = SEED;
    const double range = a.high - a.low;

    FOR_EACH(i, (a.count + WIDE_CHUNK - 1) / WIDE_CHUNK * 128) {
        const int64_t counter = i / 128 * 256 + i % 128, first = element_of(i / 128, WIDE_CHUNK, (int)(i % 128));
        uint32_t low[4], high[4];
        draw(seed, a.key, (uint64_t)counter, low);
        draw(seed, a.key, (uint64_t)counter + 128, high);
        for (int j = 0; j < 4; j++) {
            const double u = (double)(low[j] >> 11) * 0x1p-53 + (double)high[j] * 0x1p-32, v = a.low + u * range;
            if (first + 16 * j < a.count) ((double *)a.out)[first + 16 * j] = v < a.high ? v : a.below;
        }
    }
}

/* Box and Muller: two uniform numbers, the first never 0, make two independent normal ones, half a chunk apart. */
KERNEL(normal_narrow, draw_args) {
    const uint64_t seed = SEED;
    const float mean = (float)a.mean, deviation = (float)a.scale, turn = 6.283185307179586f;

    FOR_EACH(i, (a.count + NARROW_CHUNK - 1) / NARROW_CHUNK * 128) {
        const int64_t counter = i / 128 * 256 + i % 128, first = element_of(i / 128, NARROW_CHUNK, (int)(i % 128));
        uint32_t far[4], round[4];
        draw(seed, a.key, (uint64_t)counter, far);
        draw(seed, a.key, (uint64_t)counter + 128, round);
        for (int j = 0; j < 4; j++) {
            const int64_t at = first + 16 * j, pair = at + NARROW_CHUNK / 2;
            const float u = (float)far[j] * 0x1p-32f + 0x1p-33f, angle = turn * ((float)round[j] * 0x1p-32f);
            const float radius = deviation * sqrtf(-2 * logf(u));
            if (at < a.count) set_number(a.out, a.out_type, at, mean + radius * cosf(angle));
            if (pair < a.count) set_number(a.out, a.out_type, pair, mean + radius * sinf(angle));
        }
    }
}

KERNEL(normal_f64, draw_args) {
    const uint64_t seed = SEED;

    FOR_EACH(i, (a.count + WIDE_CHUNK - 1) / WIDE_CHUNK * 64) {
        const uint64_t counter = (uint64_t)(i / 64 * 256 + i % 64);
        const int64_t first = element_of(i / 64, WIDE_CHUNK, (int)(i % 64));
        uint32_t far[2][4], round[2][4];
        for (int part = 0; part < 2; part++) {
            draw(seed, a.key, counter + 128 * (uint64_t)part, far[part]);
            draw(seed, a.key, counter + 128 * (uint64_t)part + 64, round[part]);
        }
        for (int j = 0; j < 4; j++) {
            const int64_t at = first + 16 * j, pair = at + WIDE_CHUNK / 2;
            const double u = (double)far[0][j] * 0x1p-32 + (double)far[1][j] * 0x1p-64 + 0x1p-65;
            const double v = (double)round[0][j] * 0x1p-32 + (double)round[1][j] * 0x1p-64;
            const double radius = a.scale * sqrt(-2 * log(u)), angle = 6.283185307179586 * v;
            if (at < a.count) ((double *)a.out)[at] = a.mean + radius * cos(angle);
            if (pair < a.count) ((double *)a.out)[pair] = a.mean + radius * sin(angle);
        }
    }
}

/* 0 or 1 of any type. */
DEVICE void set_flag(void *p, int type, int64_t i, int x) {
    if (type <= F16) set_number(p, type, i, x);
    else if (type == I64) ((int64_t *)p)[i] = x;
    else if (type == I32) ((int32_t *)p)[i] = x;
    else if (type == I16) ((int16_t *)p)[i] = (int16_t)x;
    else ((uint8_t *)p)[i] = (uint8_t)x;
}

KERNEL(bernoulli, draw_args) {
    const uint64_t seed = SEED;

    FOR_EACH(counter, (a.count + 63) / 64 * 16) {
        const int64_t first = counter / 16 * 64 + place_of((int)(counter % 16));
        uint32_t word[4];
        draw(seed, a.key, (uint64_t)counter, word);
        for (int j = 0; j < 4; j++) {
            const int64_t i = first + 16 * j;
            if (i >= a.count) continue;
            const double probability = number_f64(a.in, a.type, i);
            if (!(probability >= 0 && probability <= 1)) {
                union {
                    double x;
                    int64_t bits;
                } v;
                v.x = probability;
                report(a.fault, FAULT_PROBABILITY, a.node, i, v.bits);
            }
            set_flag(a.out, a.out_type, i, (double)word[j] * 0x1p-32 < probability);
        }
    }
}

/* A block has a row, each thread a chunk of its classes: first[t] is the sum of what is before chunk t. One of
 * probability 0 leaves the sum as it is, so it is never chosen. */
KERNEL(multinomial, draw_args) {
    SHARED(double, first, CHOOSERS + 1);
    const uint64_t seed = SEED;
    const int64_t samples = a.rows ? a.count / a.rows : 0;
    const int64_t begin = a.classes * threadIdx.x / CHOOSERS, end = a.classes * (threadIdx.x + 1) / CHOOSERS;

    FOR_BLOCKS(row, a.rows) {
        double most = -INFINITY, sum = 0;
        for (int64_t i = begin; i < end; i++) most = fmax(most, number_f64(a.in, a.type, row * a.classes + i));
        most = block_max_f64(most);
        for (int64_t i = begin; i < end; i++) sum += exp(number_f64(a.in, a.type, row * a.classes + i) - most);
        __syncthreads(); /* those of the row before have been read */
        first[threadIdx.x + 1] = sum;
        __syncthreads();
        if (threadIdx.x == 0) {
            first[0] = 0;
            for (int t = 0; t < CHOOSERS; t++) first[t + 1] += first[t];
        }
        __syncthreads();
        const double total = first[CHOOSERS];
        const int is_bad = !(total > 0) || isinf(total);
        if (is_bad && threadIdx.x == 0) report(a.fault, FAULT_LOG_PROBABILITIES, a.node, row, 0);
        for (int64_t s = 0; s < samples; s++) {
            const int64_t at = row * samples + s;
            const double u = (double)word_of(seed, a.key, 2 * at) * 0x1p-32 +
                             (double)(word_of(seed, a.key, 2 * at + 1) >> 11) * 0x1p-53;
            const double part = total * u;
            int64_t chosen = begin;
            if (is_bad ? threadIdx.x != 0 : part < first[threadIdx.x] || part >= first[threadIdx.x + 1]) continue;
            sum = first[threadIdx.x];
            for (int64_t i = begin; i < end && sum <= part && !is_bad; i++) {
                const double p = exp(number_f64(a.in, a.type, row * a.classes + i) - most);
                if (p > 0) chosen = i;
                sum += p;
            }
            if (a.out_type == I64) ((int64_t *)a.out)[at] = chosen;
            else ((int32_t *)a.out)[at] = (int32_t)chosen;
        }
    }
}

#define TEMPLATE "cuda/kernels/random.cu"
#include "cuda/kernels/each_float.h"
#endif

#else /* the template */

KERNEL(NAME(dropout), dropout_args) {
    const A scale = (A)a.scale;
    const uint64_t seed = SEED;

    if (!HAS_PIECES(&a)) {
        FOR_EACH(i, a.count) {
            const int keeps = word_of(seed, a.key, place_among_all(&a, i)) >= a.threshold;
            ((T *)a.out)[i] = PUT(GET(((const T *)a.in)[i]) * (keeps ? scale : 0));
        }
        return;
    }
    FOR_EACH(piece, PIECES_FOR(a.count)) {
        const int64_t first = piece * AT_ONCE;
        A x[AT_ONCE];
        TAKE(a.in, TYPE, first, 0, a.count, x);
        const uint32_t kept = a.rows ? kept_of_rows(&a, seed, first) : kept_bits(seed, a.key, a.threshold, first);
        UNROLL for (int j = 0; j < AT_ONCE; j++) x[j] *= kept >> j & 1 ? scale : 0;
        GIVE(a.out, TYPE, first, 0, a.count, x);
    }
}
#endif
