/* tiles.c -- tiles among threads, their elements' types, and sums of squares. */
#include "optim/tiles.h"

#include "core/parallel.h"

/* --- types ------------------------------------------------------------------------------------------------------------ */

#define CONVERT(name, TO, FROM, EXPR)                                                                                  \
    SIMD static void name(void *to, const void *from, int64_t n) {                                                     \
        TO *restrict y = to;                                                                                           \
        const FROM *restrict in = from;                                                                                \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            FROM x = in[i];                                                                                            \
            y[i] = EXPR;                                                                                               \
        }                                                                                                              \
    }

CONVERT(f64_to_float, float, double, (float)x)
CONVERT(bf16_to_float, float, bf16, bf16_to_f32(x))
CONVERT(f16_to_float, float, uint16_t, f16_bits_to_f32(x))
CONVERT(float_to_f64, double, float, x)
CONVERT(float_to_bf16, bf16, float, f32_to_bf16(x))
CONVERT(float_to_f16, uint16_t, float, f32_to_f16_bits(x))
CONVERT(f32_to_double, double, float, x)
CONVERT(bf16_to_double, double, bf16, bf16_to_f32(x))
CONVERT(f16_to_double, double, uint16_t, f16_bits_to_f32(x))
CONVERT(double_to_f32, float, double, (float)x)
CONVERT(double_to_bf16, bf16, double, f32_to_bf16((float)x))
CONVERT(double_to_f16, uint16_t, double, f32_to_f16_bits((float)x))

const converters for_float = {.in = {[F64] = f64_to_float, [BF16] = bf16_to_float, [F16] = f16_to_float},
                              .out = {[F64] = float_to_f64, [BF16] = float_to_bf16, [F16] = float_to_f16}};
const converters for_double = {.in = {[F32] = f32_to_double, [BF16] = bf16_to_double, [F16] = f16_to_double},
                               .out = {[F32] = double_to_f32, [BF16] = double_to_bf16, [F16] = double_to_f16}};

/* --- threads ---------------------------------------------------------------------------------------------------------- */

/* A group of tiles is added up by one thread, in order. The tiles of a thing that began in an earlier group go into
 * the group's head; no other thread writes the sums of the others. */
enum { GROUP = 64, GROUPS = 1024 };

typedef struct job {
    tiled *things;
    int count;
    size_t size;
    tile_fn *body;
    const void *arg;
    int64_t tiles, from; /* of all things; the first tile of these groups */
    double heads[GROUPS][2];
    int owners[GROUPS]; /* whose head it is; -1: there is none */
} job;

static int64_t tiles_of(const tiled *thing) { return (thing->count + TILE - 1) / TILE; }
static tiled *thing_of(const job *j, int i) { return (tiled *)(void *)((char *)j->things + (size_t)i * j->size); }

/* Runs what follows for the tiles [begin, end) of all: elements [first, first + n) of thing i. */
#define FOR_TILES(begin, end, j, ...)                                                                                  \
    do {                                                                                                               \
        int64_t base_ = 0;                                                                                             \
        for (int i = 0; i < (j)->count && base_ < (end); i++) {                                                        \
            tiled *thing = thing_of(j, i);                                                                             \
            const int64_t tiles_ = tiles_of(thing);                                                                    \
            const int64_t from_ = (begin) > base_ ? (begin) - base_ : 0;                                               \
            const int64_t to_ = (end) < base_ + tiles_ ? (end) - base_ : tiles_;                                       \
            for (int64_t tile = from_; tile < to_; tile++) {                                                           \
                const int64_t first = tile * TILE, n = thing->count - first < TILE ? thing->count - first : TILE;      \
                __VA_ARGS__;                                                                                           \
            }                                                                                                          \
            base_ += tiles_;                                                                                           \
        }                                                                                                              \
    } while (0)

static void run_tiles(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;

    FOR_TILES(begin, end, j, {
        double lost[2] = {0, 0};
        j->body(j->arg, thing, first, n, lost);
    });
}

static void run_groups(void *arg, int64_t begin, int64_t end) {
    job *j = arg;

    for (int64_t s = begin; s < end; s++) {
        const int64_t from = j->from + s * GROUP, to = from + GROUP < j->tiles ? from + GROUP : j->tiles;
        j->heads[s][0] = j->heads[s][1] = 0;
        j->owners[s] = -1;
        FOR_TILES(from, to, j, {
            const bool head = base_ < from;
            double sums[2] = {0, 0}, *total = head ? j->heads[s] : thing->sums;
            j->body(j->arg, thing, first, n, sums);
            total[0] += sums[0];
            total[1] += sums[1];
            if (head) j->owners[s] = i;
        });
    }
}

void for_tiles(tiled *things, int count, size_t size, tile_fn *body, const void *arg) {
    job j = {.things = things, .count = count, .size = size, .body = body, .arg = arg};

    for (int i = 0; i < count; i++) j.tiles += tiles_of(thing_of(&j, i));
    parallel_for(j.tiles, 4, run_tiles, &j);
}

void sum_tiles(tiled *things, int count, size_t size, tile_fn *body, const void *arg) {
    job j = {.things = things, .count = count, .size = size, .body = body, .arg = arg};

    for (int i = 0; i < count; i++) {
        tiled *thing = thing_of(&j, i);
        thing->sums[0] = thing->sums[1] = 0;
        j.tiles += tiles_of(thing);
    }
    for (; j.from < j.tiles; j.from += GROUP * GROUPS) {
        int64_t groups = (j.tiles - j.from + GROUP - 1) / GROUP;
        if (groups > GROUPS) groups = GROUPS;
        parallel_for(groups, 1, run_groups, &j);
        for (int64_t s = 0; s < groups; s++)
            for (int k = 0; k < 2 && j.owners[s] >= 0; k++) thing_of(&j, j.owners[s])->sums[k] += j.heads[s][k];
    }
}

/* --- sums of squares -------------------------------------------------------------------------------------------------- */

/* In double: no square of a float32 overflows, so a sum is infinite or NaN only when an element is. */
#define SQUARES(name, A)                                                                                               \
    SIMD static double name(const void *data, int64_t n) {                                                             \
        const A *x = data;                                                                                             \
        double sum = 0;                                                                                                \
        _Pragma("omp simd reduction(+ : sum)") for (int64_t i = 0; i < n; i++) sum += (double)x[i] * x[i];             \
        return sum;                                                                                                    \
    }

SQUARES(squares_float, float)
SQUARES(squares_double, double)

static void squares_of_tile(const void *arg, const tiled *thing, int64_t first, int64_t n, double sums[2]) {
    _Alignas(64) float room[TILE];
    const dense *t = (const dense *)(const void *)thing;
    void *x = element_at((void *)(uintptr_t)t->data, t->type, first);

    (void)arg;
    if (for_float.in[t->type] && t->type != F64) for_float.in[t->type](room, x, n);
    sums[0] = t->type == F64 ? squares_double(x, n) : squares_float(for_float.in[t->type] ? room : x, n);
}

void sums_of_squares(dense *tensors, int count) {
    sum_tiles(&tensors->tiles, count, sizeof *tensors, squares_of_tile, NULL);
}
