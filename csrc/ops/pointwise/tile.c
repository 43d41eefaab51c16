/* tile.c -- reads operands as tiles of the type in which they are computed, and writes tiles as results. */
#include "ops/pointwise/tile.h"

#include "core/half.h"
#include "core/stream.h"

#include <string.h>

/* --- element types ------------------------------------------------------------------------------------------------ */

static const tile_class class_of[DTYPE_COUNT] = {
    [F32] = TILE_F32, [BF16] = TILE_F32, [F16] = TILE_F32, [F64] = TILE_F64, [I64] = TILE_I64,
    [I32] = TILE_I32, [I16] = TILE_I32,  [I8] = TILE_I32,  [U8] = TILE_I32,  [BOOL] = TILE_BOOL,
};
static const int64_t class_size[TILE_CLASSES] = {
    [TILE_F32] = 4, [TILE_F64] = 8, [TILE_I64] = 8, [TILE_I32] = 4, [TILE_BOOL] = 1,
};

tile_class tile_class_of(dtype t) { return class_of[t]; }
int64_t tile_element(dtype t) { return class_size[class_of[t]]; }

/* Loads: `rows` runs of `n` elements, `stride` elements apart inside a run and `row_stride` between runs. */
typedef void load_fn(const void *from, int64_t rows, int64_t row_stride, int64_t n, int64_t stride, void *to);

/* Each usual stride has its own loop, so that it is vectorised. */
#define LOAD(name, T, C, widen)                                                                                        \
    SIMD static void name(const void *from, int64_t rows, int64_t row_stride, int64_t n, int64_t stride, void *to) {   \
        const T *f = from;                                                                                             \
        C *t = to;                                                                                                     \
        for (int64_t r = 0; r < rows; r++, f += row_stride, t += n) {                                                  \
            if (stride == 1) {                                                                                         \
                for (int64_t i = 0; i < n; i++) t[i] = widen(f[i]);                                                    \
            } else if (stride == 0) {                                                                                  \
                const C x = widen(f[0]);                                                                               \
                for (int64_t i = 0; i < n; i++) t[i] = x;                                                              \
            } else {                                                                                                   \
                for (int64_t i = 0; i < n; i++) t[i] = widen(f[i * stride]);                                           \
            }                                                                                                          \
        }                                                                                                              \
    }
#define SAME(x) (x)
#define AS_INT(x) ((int32_t)(x))

LOAD(load_f32, float, float, SAME)
LOAD(load_f64, double, double, SAME)
LOAD(load_bf16, bf16, float, bf16_to_f32)
LOAD(gather_f16, uint16_t, float, f16_bits_to_f32)
LOAD(load_i64, int64_t, int64_t, SAME)
LOAD(load_i32, int32_t, int32_t, SAME)
LOAD(load_i16, int16_t, int32_t, AS_INT)
LOAD(load_i8, int8_t, int32_t, AS_INT)
LOAD(load_u8, uint8_t, int32_t, AS_INT)
LOAD(load_bool, uint8_t, uint8_t, SAME)

static void load_f16(const void *from, int64_t rows, int64_t row_stride, int64_t n, int64_t stride, void *to) {
    const uint16_t *f = from;
    float *t = to;

    if (stride != 1) gather_f16(from, rows, row_stride, n, stride, to);
    for (int64_t r = 0; stride == 1 && r < rows; r++) f16_widen(f + r * row_stride, n, t + r * n);
}

static load_fn *const load_of[DTYPE_COUNT] = {
    [F32] = load_f32, [F64] = load_f64, [BF16] = load_bf16, [F16] = load_f16, [I64] = load_i64,
    [I32] = load_i32, [I16] = load_i16, [I8] = load_i8,     [U8] = load_u8,   [BOOL] = load_bool,
};

typedef void store_fn(const void *tile, int64_t n, void *to);

#define STORE(name, C, T, narrow)                                                                                      \
    SIMD static void name(const void *tile, int64_t n, void *to) {                                                     \
        const C *f = tile;                                                                                             \
        T *t = to;                                                                                                     \
        for (int64_t i = 0; i < n; i++) t[i] = (T)narrow(f[i]);                                                        \
    }

STORE(store_bf16, float, bf16, f32_to_bf16)
STORE(store_i16, int32_t, int16_t, SAME)
STORE(store_i8, int32_t, int8_t, SAME)
STORE(store_u8, int32_t, uint8_t, SAME)
static void store_f16(const void *tile, int64_t n, void *to) { f16_narrow(tile, n, to); }

static store_fn *const store_of[DTYPE_COUNT] = {
    [BF16] = store_bf16, [F16] = store_f16, [I16] = store_i16, [I8] = store_i8, [U8] = store_u8,
};

void tile_store(dtype t, const void *tile, int64_t n, void *to, bool streams) {
    const size_t size = dtype_size(t);
    _Alignas(64) char narrow[TILE * 2];

    if (tile_is_native(t)) {
        memcpy(to, tile, (size_t)n * size);
    } else if (streams) {
        store_of[t](tile, n, narrow);
        stream(to, narrow, n * (int64_t)size);
    } else {
        store_of[t](tile, n, to);
    }
}

#define ROUND(name, C, T, narrow, widen)                                                                               \
    SIMD static void name(void *tile, int64_t n) {                                                                     \
        C *t = tile;                                                                                                   \
        for (int64_t i = 0; i < n; i++) t[i] = (C)widen((T)narrow(t[i]));                                              \
    }

ROUND(round_bf16, float, bf16, f32_to_bf16, bf16_to_f32)
ROUND(round_i16, int32_t, int16_t, SAME, SAME)
ROUND(round_i8, int32_t, int8_t, SAME, SAME)
ROUND(round_u8, int32_t, uint8_t, SAME, SAME)
static void round_f16(void *tile, int64_t n) { f16_round(tile, n); }

void tile_round(dtype t, void *tile, int64_t n) {
    static void (*const rounds[DTYPE_COUNT])(void *, int64_t) = {
        [BF16] = round_bf16, [F16] = round_f16, [I16] = round_i16, [I8] = round_i8, [U8] = round_u8,
    };
    if (rounds[t]) rounds[t](tile, n);
}

/* --- operands ----------------------------------------------------------------------------------------------------- */

/* The number of elements after which a source repeats: what follows leading dimensions of stride 0. */
static int64_t period_of(const tile_source *s) {
    int64_t period = 1;
    bool repeats = s->stride[0] == 0;

    for (int d = s->rank - 1; d >= 0; d--)
        if (d > 0 || !repeats) period *= s->dim[d];
    return repeats && period <= TILE ? period : 0;
}

tile_source tile_source_of(const tensor *t, const shape *to) {
    tensor e = tensor_expand(t, to);
    tile_source s = {.data = t->data, .type = t->type, .rank = 0};

    for (int d = 0; d < to->rank; d++) {
        int last = s.rank - 1;
        if (to->dim[d] == 1) continue;
        if (last >= 0 && s.stride[last] == e.stride[d] * to->dim[d]) { /* one dimension with the one before */
            s.dim[last] *= to->dim[d];
            s.stride[last] = e.stride[d];
        } else {
            s.dim[s.rank] = to->dim[d];
            s.stride[s.rank++] = e.stride[d];
        }
    }
    if (s.rank == 0) s.dim[s.rank++] = 1; /* one element: stride 0 */
    s.period = period_of(&s);
    return s;
}

/* Where element `start` is, in elements from the data; `index` receives its place in each dimension. */
static int64_t locate(const tile_source *s, int64_t start, int64_t index[MAX_RANK]) {
    int64_t at = 0;
    for (int d = s->rank - 1; d > 0; d--) {
        index[d] = start % s->dim[d];
        at += index[d] * s->stride[d];
        start /= s->dim[d];
    }
    index[0] = start;
    return at + start * s->stride[0];
}

/* Carries into the dimensions before the last after it has run full, or `rows` times; returns the way to go. */
static int64_t advance(const tile_source *s, int64_t index[MAX_RANK], int64_t rows) {
    int d = s->rank - 2;
    int64_t way;

    if (d < 0) return 0;
    way = rows * s->stride[d];
    index[d] += rows;
    for (; d > 0 && index[d] == s->dim[d]; d--) {
        index[d] = 0;
        index[d - 1]++;
        way += s->stride[d - 1] - s->dim[d] * s->stride[d];
    }
    return way;
}

/* Gathers elements [start, start + n). */
static void load(const tile_source *s, int64_t start, int64_t n, char *to) {
    load_fn *fn = load_of[s->type];
    int64_t size = (int64_t)dtype_size(s->type), wide = class_size[class_of[s->type]];
    int64_t index[MAX_RANK], at = locate(s, start, index);
    int last = s->rank - 1;
    int64_t run = s->dim[last], stride = s->stride[last], row_stride = last ? s->stride[last - 1] : 0;

    while (n > 0) {
        /* The rest of a run that was entered inside, or as many whole runs as follow one another, or a last part. */
        int64_t from = index[last], part = run - from < n ? run - from : n, rows = 1;
        if (from == 0 && part == run && last > 0) {
            int64_t left = s->dim[last - 1] - index[last - 1];
            rows = n / run < left ? n / run : left;
        }
        fn(s->data + at * size, rows, row_stride, part, stride, to);
        to += rows * part * wide;
        n -= rows * part;
        if (n == 0) break;
        at += advance(s, index, rows) - from * stride;
        index[last] = 0;
    }
}

void tile_begin(const tile_source *s, int64_t n, tile_buffer *b) {
    size_t size = (size_t)class_size[class_of[s->type]], filled = (size_t)s->period * size;
    size_t whole = filled + (size_t)n * size;

    if (!s->period) return;
    load(s, 0, s->period, b->bytes);
    for (; filled < whole; filled *= 2)
        memcpy(b->bytes + filled, b->bytes, filled < whole - filled ? filled : whole - filled);
}

const void *tile_read(const tile_source *s, int64_t start, int64_t n, tile_buffer *b) {
    int last = s->rank - 1;
    int64_t size = (int64_t)dtype_size(s->type);

    if (s->period) return b->bytes + start % s->period * class_size[class_of[s->type]];
    if (s->stride[last] == 1 && tile_is_native(s->type)) {
        int64_t index[MAX_RANK], at = locate(s, start, index);
        if (index[last] + n <= s->dim[last]) return s->data + at * size;
    }
    if (s->rank == 1 && s->stride[0] == 1) prefetch_ahead(s->data + start * size, n * size);
    load(s, start, n, b->bytes);
    return b->bytes;
}

bool tile_streams(const tensor *out, const tensor *in, int n_in) {
    if (tile_is_native(out->type)) return false; /* what costs time to compute is better written as it is made */
    for (int i = 0; i < n_in; i++)
        if (in[i].data == out->data) return false; /* its lines are in the caches when they are written */
    return tensor_count(out) * (int64_t)dtype_size(out->type) >= BEYOND_CACHES;
}
