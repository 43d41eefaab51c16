/* argreduce.c -- runs ArgMax and ArgMin: the index of the extreme element along one axis, the first of
 * equals, or the last where the attribute says so. A NaN beats every number, as in PyTorch. */
#include "core/parallel.h"
#include "ops/reductions/reduce_kernel.h"

typedef struct arg_job {
    const tensor *x;
    int64_t *out;
    const fold *extreme;
    bool largest, last;
    int64_t length, inner; /* of the axis; elements behind it */
} arg_job;

/* Index of the first (or last) of n elements that equals `best` or is NaN: -1 when there is none. `best` is a NaN
 * exactly when some element is. */
#define FIND(name, C, A)                                                                                               \
    static int64_t name(const void *from, int64_t n, const void *best, bool last) {                                    \
        const C *p = from;                                                                                             \
        const A b = *(const A *)best;                                                                                  \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            int64_t at = last ? n - 1 - i : i;                                                                         \
            if ((A)p[at] == b || p[at] != p[at]) return at;                                                            \
        }                                                                                                              \
        return -1;                                                                                                     \
    }
FIND(find_f32, float, double)
FIND(find_f64, double, double)
FIND(find_i64, int64_t, int64_t)

typedef int64_t find_fn(const void *from, int64_t n, const void *best, bool last);
static find_fn *const find[FOLD_CLASSES] = {find_f32, find_f64, find_i64};

/* The innermost axis: its extreme first, which is a vector loop, then where that is. */
static void arg_rows(void *arg, int64_t begin, int64_t end) {
    const arg_job *j = arg;
    fold_class as = fold_class_of(j->x->type);
    int64_t tiles = (j->length + FOLD_TILE - 1) / FOLD_TILE;
    fold_tile buffer;

    for (int64_t row = begin; row < end; row++) {
        union {
            double d;
            int64_t i;
        } best;
        int64_t base = row * j->length, found = -1;

        if (as == FOLD_I64) best.i = j->extreme->start_int;
        else best.d = j->extreme->start;
        for (int64_t t = 0; t < tiles; t++) {
            int64_t at = t * FOLD_TILE, n = j->length - at < FOLD_TILE ? j->length - at : FOLD_TILE;
            j->extreme->rows[as](&best, fold_load(j->x->type, j->x->data, base + at, n, &buffer), n, NULL);
        }
        for (int64_t t = 0; t < tiles && found < 0; t++) {
            int64_t at = (j->last ? tiles - 1 - t : t) * FOLD_TILE;
            int64_t n = j->length - at < FOLD_TILE ? j->length - at : FOLD_TILE;
            found = find[as](fold_load(j->x->type, j->x->data, base + at, n, &buffer), n, &best, j->last);
            if (found >= 0) found += at;
        }
        j->out[row] = found;
    }
}

/* One more row against the best so far, column by column. */
#define CHALLENGE(name, C)                                                                                             \
    SIMD static void name(const void *from, int64_t n, int64_t index, bool largest, bool last, void *bests,            \
                          int64_t *where) {                                                                            \
        const C *p = from;                                                                                             \
        C *best = bests;                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            C x = p[i], b = best[i];                                                                                   \
            bool wins = (largest ? x > b : x < b) || (last && x == b);                                                 \
            wins = x != x ? b == b || last : b == b && wins;                                                           \
            best[i] = wins || index == 0 ? x : b;                                                                      \
            where[i] = wins || index == 0 ? index : where[i];                                                          \
        }                                                                                                              \
    }
CHALLENGE(challenge_f32, float)
CHALLENGE(challenge_f64, double)
CHALLENGE(challenge_i64, int64_t)

typedef void challenge_fn(const void *from, int64_t n, int64_t index, bool largest, bool last, void *bests,
                          int64_t *where);
static challenge_fn *const challenge[FOLD_CLASSES] = {challenge_f32, challenge_f64, challenge_i64};

/* An axis with `inner` elements behind it: pieces of those side by side. */
static void arg_columns(void *arg, int64_t begin, int64_t end) {
    const arg_job *j = arg;
    fold_class as = fold_class_of(j->x->type);
    int64_t pieces = (j->inner + FOLD_TILE - 1) / FOLD_TILE;
    fold_tile buffer, best;

    for (int64_t task = begin; task < end; task++) {
        int64_t outer = task / pieces, from = task % pieces * FOLD_TILE;
        int64_t n = j->inner - from < FOLD_TILE ? j->inner - from : FOLD_TILE;
        for (int64_t i = 0; i < j->length; i++) {
            const void *row = fold_load(j->x->type, j->x->data, (outer * j->length + i) * j->inner + from, n, &buffer);
            challenge[as](row, n, i, j->largest, j->last, &best, j->out + outer * j->inner + from);
        }
    }
}

static status arg_reduce(ctx *c, const call *k, bool largest) {
    const shape *s = &k->in[0].shape;
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), s->rank, &axis));
    arg_job j = {
        .x = &k->in[0],
        .out = k->out[0].data,
        .extreme = largest ? &fold_max : &fold_min,
        .largest = largest,
        .last = node_int(k->node, "select_last_index") != 0,
        .length = s->rank ? s->dim[axis] : 1,
        .inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1,
    };
    int64_t outer = s->rank ? shape_span(s, 0, axis) : 1;

    if (j.inner == 1) {
        parallel_for(outer, parallel_rows(j.length), arg_rows, &j);
    } else if (j.inner > 0) {
        int64_t pieces = (j.inner + FOLD_TILE - 1) / FOLD_TILE;
        parallel_for(outer * pieces, parallel_rows(j.length * (j.inner < FOLD_TILE ? j.inner : FOLD_TILE)), arg_columns,
                     &j);
    }
    return OK;
}

status arg_max_cpu(ctx *c, const call *k) { return arg_reduce(c, k, true); }
status arg_min_cpu(ctx *c, const call *k) { return arg_reduce(c, k, false); }
