/* gather.c -- runs Gather and Embedding (index.c): rows of elements, or single ones, read where an index says.
 *
 * An index that is used for many blocks of single elements, and has long runs in it (of a padded image, say), is read
 * once: what is left is a copy of each run. */
#include "core/parallel.h"
#include "core/stream.h"
#include "ops/movement/move.h"

enum { LEAST_STREAMED = 512, PIECE = 256, AHEAD = 4 }; /* bytes of a row, and of its pieces; rows */

/* Single elements that are neighbours on both sides. */
typedef struct run {
    int32_t to, from, length;
} run;
enum { LEAST_RUN = 8, LEAST_BLOCKS = 4 }; /* what runs are worth looking for: so long on average, used so often */

typedef struct gather {
    char *to;
    const char *from;
    const tensor *index;
    int64_t size, count; /* of the axis, of the indices */
    size_t bytes;        /* of the elements behind the axis */
    const run *runs;     /* NULL, or all that is to be read of one block of elements */
    int64_t n_runs;
    bool streams;
} gather;

/* The k-th row to memory that is not read soon, while the row that is AHEAD is asked for piece by piece: rows lie in no order that
 * a CPU would find, and the last ones of a block ask for what comes first. */
static void stream_row(const gather *p, int64_t k, int64_t row, char *to, const char *from) {
    const int64_t bytes = (int64_t)p->bytes, ahead = wrap_index(index_at(p->index, (k + AHEAD) % p->count), p->size);
    const char *later = from + (ahead - row) * bytes;

    for (int64_t i = 0, n; i < bytes; i += n) {
        n = bytes - i < PIECE ? bytes - i : PIECE;
        prefetch(later + i, n);
        stream(to + i, from + i, n);
    }
}

static void gather_range(void *arg, int64_t begin, int64_t end) {
    const gather *p = arg;
    int64_t outer = begin / p->count, k = begin % p->count;

    for (int64_t i = begin; i < end; i++) {
        const int64_t row = wrap_index(index_at(p->index, k), p->size);
        char *to = p->to + (size_t)i * p->bytes;
        const char *from = p->from + (size_t)(row + outer * p->size) * p->bytes;
        if (p->streams) stream_row(p, k, row, to, from);
        else copy_item(to, from, p->bytes);
        if (++k == p->count) {
            k = 0;
            outer++;
        }
    }
    if (p->streams) end_streams();
}

/* The same of single elements, or of a few that take no more room: T is as large, I the type of the indices. */
typedef uint8_t __attribute__((may_alias)) word1;
typedef uint16_t __attribute__((may_alias, aligned(1))) word2;
typedef uint32_t __attribute__((may_alias, aligned(1))) word4;
typedef uint64_t __attribute__((may_alias, aligned(1))) word8;
#define GATHER_ELEMENTS(T, I)                                                                                          \
    SIMD static void gather_##T##_##I(void *arg, int64_t begin, int64_t end) {                                         \
        const gather *p = arg;                                                                                         \
        const I size = (I)p->size;                                                                                     \
        for (int64_t i = begin, n; i < end; i += n) {                                                                  \
            const int64_t k = i % p->count;                                                                            \
            const I *restrict index = (const I *)p->index->data + k;                                                   \
            const T *restrict from = (const T *)(const void *)p->from + i / p->count * p->size;                        \
            T *restrict to = (T *)(void *)p->to + i;                                                                   \
            n = p->count - k < end - i ? p->count - k : end - i;                                                       \
            for (int64_t j = 0; j < n; j++) to[j] = from[index[j] + (index[j] < 0 ? size : 0)];                        \
        }                                                                                                              \
    }
#define GATHER_RUNS(T)                                                                                                 \
    SIMD static void gather_runs_##T(void *arg, int64_t begin, int64_t end) {                                          \
        const gather *p = arg;                                                                                         \
        for (int64_t o = begin; o < end; o++)                                                                          \
            for (int64_t r = 0; r < p->n_runs; r++) {                                                                  \
                const run one = p->runs[r];                                                                            \
                const T *restrict from = (const T *)(const void *)p->from + o * p->size + one.from;                    \
                T *restrict to = (T *)(void *)p->to + o * p->count + one.to;                                           \
                to[0] = from[0];                                                                                       \
                for (int32_t i = 1; i < one.length; i++) to[i] = from[i];                                              \
            }                                                                                                          \
    }
#define GATHER_INDICES(T) GATHER_ELEMENTS(T, int32_t) GATHER_ELEMENTS(T, int64_t) GATHER_RUNS(T)
GATHER_INDICES(word1)
GATHER_INDICES(word2)
GATHER_INDICES(word4)
GATHER_INDICES(word8)

kernel_fn gather_cpu; /* index.c has the records */
size_t gather_workspace(const node *n);

/* Room for as many runs as are worth it. */
size_t gather_workspace(const node *n) {
    const int64_t count = shape_count(&n->in[1]->shape), size = shape_count(&n->out[0]->shape);
    return count && size / count >= LEAST_BLOCKS ? (size_t)(count / LEAST_RUN) * sizeof(run) : 0;
}

/* Writes the runs of the index to `runs`; false: there are more than `most`. */
static bool find_runs(gather *p, run *runs, int64_t most) {
    int64_t n = 0;

    for (int64_t k = 0; k < p->count; k++) {
        const int64_t at = wrap_index(index_at(p->index, k), p->size);
        if (n && at == (int64_t)runs[n - 1].from + runs[n - 1].length) {
            runs[n - 1].length++;
            continue;
        }
        if (n == most) return false;
        runs[n++] = (run){(int32_t)k, (int32_t)at, 1};
    }
    p->runs = runs;
    p->n_runs = n;
    return true;
}

static range_fn *gather_fn(const gather *p) {
    static range_fn *const functions[4][3] = {{gather_word1_int32_t, gather_word1_int64_t, gather_runs_word1},
                                              {gather_word2_int32_t, gather_word2_int64_t, gather_runs_word2},
                                              {gather_word4_int32_t, gather_word4_int64_t, gather_runs_word4},
                                              {gather_word8_int32_t, gather_word8_int64_t, gather_runs_word8}};
    const bool wide = p->index->type == I64;

    if (!wide && p->size > INT32_MAX) return gather_range;
    for (int i = 0; i < 4; i++)
        if (p->bytes == (size_t)1 << i) return functions[i][p->runs ? 2 : wide];
    return gather_range;
}

status gather_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *y = &k->out[0];
    int axis;

    TRY(shape_axis(c, node_int(k->node, "axis"), x->shape.rank, &axis));
    TRY(check_indices(c, &k->in[1], least_index(k->node, x->shape.dim[axis]), x->shape.dim[axis]));
    const int64_t outer = shape_span(&x->shape, 0, axis), inner = shape_span(&x->shape, axis + 1, x->shape.rank);
    gather p = {.to = y->data,
                .from = x->data,
                .index = &k->in[1],
                .size = x->shape.dim[axis],
                .count = tensor_count(&k->in[1]),
                .bytes = (size_t)inner * dtype_size(x->type)};
    if (tensor_count(y) == 0) return OK; /* rows may be empty, and are then not worth walking over */
    p.streams = p.bytes >= LEAST_STREAMED && outer * p.count * (int64_t)p.bytes >= BEYOND_CACHES;
    if (inner == 1 && outer >= LEAST_BLOCKS && p.size <= INT32_MAX && p.count <= INT32_MAX &&
        find_runs(&p, k->work, p.count / LEAST_RUN))
        parallel_for(outer, parallel_rows(p.count), gather_fn(&p), &p);
    else parallel_for(outer * p.count, parallel_rows(inner), gather_fn(&p), &p);
    return OK;
}
