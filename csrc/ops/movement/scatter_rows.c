/* scatter_rows.c -- combines rows with those that indices send there: row_scatter of move.h.
 *
 * A list says which updates a row gets, so that rows are read and written once, by one thread, in the order of the
 * updates. */
#include "core/parallel.h"
#include "core/prefetch.h"
#include "core/stream.h"
#include "ops/pointwise/combining.h"

enum { COLUMNS = 1024, LEAST_COLUMNS = 64, FEW_COLUMNS = 8 };
enum { NEAR_BYTES = 1 << 14 };
/* Updates are read in no order. The one that is AHEAD is asked for piece by piece while this one is added: a CPU would wait
 * if all of it were asked for at once. */
enum { AHEAD = 4, PIECE = 128 };

/* An update, in the order in which rows take them. */
typedef struct place {
    int64_t row, k;
} place;

static inline bool next_update(const row_scatter *s, place *p) {
    if (p->k >= 0) p->k = s->next[p->k];
    while (p->k < 0 && p->row + 1 < s->rows) p->k = s->head[++p->row];
    return p->k >= 0;
}

#define TEMPLATE "ops/movement/scatter_rows_combine.h"
#include "ops/pointwise/each_combined.h"

typedef void rows_fn(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n, place *ahead);
static rows_fn *const rows_by_type[DTYPE_COUNT] = COMBINED_TABLE(rows);

/* Columns [at, at + n) of rows [from, to) before anything is added to them. */
static void begin_rows(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n) {
    size_t size = dtype_size(s->type), first = (size_t)((o * s->rows + from) * s->width + at) * size;
    size_t stride = (size_t)s->width * size, bytes = (size_t)n * size, rows = (size_t)(to - from);
    char *out = (char *)s->out + first;
    const char *base = s->base ? (const char *)s->base + first : NULL;

    if (base == out) return;
    if (n == s->width) {
        bytes *= rows;
        rows = 1;
    }
    for (size_t r = 0; r < rows; r++) {
        if (base) memcpy(out + r * stride, base + r * stride, bytes);
        else memset(out + r * stride, 0, bytes);
    }
}

/* Blocks [begin, end) of a row_scatter, straight; T is its own total, U a T whose overflow is defined. */
#define STRAIGHT(T, U)                                                                                                 \
    static void straight_##T(void *arg, int64_t begin, int64_t end) {                                                  \
        const row_scatter *s = arg;                                                                                    \
        const int64_t width = s->width;                                                                                \
        const int32_t *row = s->next;                                                                                  \
        begin_rows(s, begin, 0, (end - begin) * s->rows, 0, width);                                                    \
        for (int64_t o = begin; o < end; o++) {                                                                        \
            const T *restrict x = (const T *)s->updates + o * s->count * width;                                        \
            T *restrict out = (T *)s->out + o * s->rows * width;                                                       \
            for (int64_t k = 0; k < s->count && width == 1; k++)                                                       \
                if (row[k] >= 0) out[row[k]] = (T)((U)out[row[k]] + (U)x[k]);                                          \
            for (int64_t k = 0; k < s->count && width > 1; k++)                                                        \
                for (int64_t i = 0; i < width && row[k] >= 0; i++)                                                     \
                    out[row[k] * width + i] = (T)((U)out[row[k] * width + i] + (U)x[k * width + i]);                   \
        }                                                                                                              \
    }
STRAIGHT(float, float)
STRAIGHT(double, double)
STRAIGHT(int64_t, uint64_t)

static range_fn *const straight_by_type[DTYPE_COUNT] = {
    [F32] = straight_float, [F64] = straight_double, [I64] = straight_int64_t};

size_t row_scatter_bytes(int64_t rows, int64_t count) { return (size_t)(rows + count) * sizeof(int32_t); }

status row_scatter_begin(ctx *c, row_scatter *s, void *work) {
    if (s->count > INT32_MAX) return fail(c, E_UNSUPPORTED, "more than 2^31 indices");
    s->head = work;
    s->next = s->head + s->rows;
    s->straight = s->how == COMBINE_ADD && straight_by_type[s->type] && s->width <= FEW_COLUMNS &&
                  s->rows <= INT32_MAX && s->outer >= parallel_threads();
    if (s->straight && s->count) memset(s->next, -1, (size_t)s->count * sizeof *s->next);
    else if (s->rows) memset(s->head, -1, (size_t)s->rows * sizeof *s->head);
    return OK;
}

static void rows_last(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n) {
    size_t size = dtype_size(s->type), bytes = (size_t)n * size;

    for (int64_t r = from; r < to; r++) {
        int64_t k = s->head[r];
        if (k < 0) continue;
        while (s->next[k] >= 0) k = s->next[k];
        copy_item((char *)s->out + (size_t)((o * s->rows + r) * s->width + at) * size,
                  (const char *)s->updates + (size_t)((o * s->count + k) * s->width + at) * size, bytes);
    }
}

/* A few rows at a time, so that they are still in the first cache when something is added to what is there. */
static void add_rows(const row_scatter *s, int64_t o, int64_t from, int64_t to, int64_t at, int64_t n) {
    const int64_t fit = NEAR_BYTES / (n * (int64_t)dtype_size(s->type)), near = fit > 0 ? fit : 1;
    place ahead = {from - 1, -1};

    for (int i = 0; i < AHEAD; i++) (void)next_update(s, &ahead);
    for (int64_t end; from < to; from = end) {
        end = to - from > near ? from + near : to;
        if (s->base) begin_rows(s, o, from, end, at, n);
        rows_by_type[s->type](s, o, from, end, at, n, &ahead);
    }
}

/* Columns worked on together where threads share those of a wide table. */
static int64_t columns_of(const row_scatter *s) {
    const int64_t size = LEAST_COLUMNS * parallel_threads();
    int64_t n = (s->width + size - 1) / size * LEAST_COLUMNS;
    n = n > COLUMNS ? COLUMNS : n;
    return n < s->width ? n : s->width;
}

/* Work is cut into (outer, block of columns, row), rows running fastest. */
static void scatter_range(void *arg, int64_t begin, int64_t end) {
    const row_scatter *s = arg;
    int64_t blocks = (s->width + s->columns - 1) / s->columns;

    while (begin < end) {
        int64_t o = begin / s->rows / blocks, at = begin / s->rows % blocks * s->columns;
        int64_t from = begin % s->rows, to = from + end - begin, n = s->width - at;
        if (to > s->rows) to = s->rows;
        if (n > s->columns) n = s->columns;
        if (s->how == COMBINE_NONE) {
            begin_rows(s, o, from, to, at, n);
            rows_last(s, o, from, to, at, n);
        } else {
            add_rows(s, o, from, to, at, n);
        }
        begin += to - from;
    }
    if (s->streams) end_streams();
}

enum { MOST_SHARES = 64 };

typedef struct shares {
    const row_scatter *s;
    int64_t first[MOST_SHARES + 1]; /* row of each */
} shares;

static void scatter_shares(void *arg, int64_t begin, int64_t end) {
    const shares *t = arg;
    for (int64_t at = 0; at < t->s->width; at += COLUMNS) {
        const int64_t n = t->s->width - at < COLUMNS ? t->s->width - at : COLUMNS;
        add_rows(t->s, 0, t->first[begin], t->first[end], at, n);
    }
    if (t->s->streams) end_streams();
}

/* Lines of a row that several threads share are theirs alone. */
static bool rows_stream(const row_scatter *s) {
    const int64_t size = (int64_t)dtype_size(s->type), row = s->width * size;
    return s->how != COMBINE_NONE && !s->base && s->outer * s->rows * row >= BEYOND_CACHES && row % CACHE_LINE == 0 &&
           (uintptr_t)s->out % STREAM_ALIGNMENT == 0;
}

/* Cuts rows into `parts` of about the same work: an update's, and a row's unless it stays as it is. False where one row is
 * too much of it. */
static bool cut_rows(shares *t, int64_t parts) {
    const row_scatter *s = t->s;
    const int64_t own = s->base == s->out ? 0 : 1, all = own * s->rows + s->count;
    int64_t work = 0, part = 0;

    for (int64_t r = 0; r < s->rows; r++) {
        const int64_t before = work;
        while (part < parts && work >= all * part / parts) t->first[part++] = r;
        work += own;
        for (int64_t k = s->head[r]; k >= 0; k = s->next[k]) work++;
        if ((work - before) * 4 * parts > all) return false;
    }
    while (part <= parts) t->first[part++] = s->rows;
    return true;
}

/* Threads share rows, which are read and written whole; those of a wide table its columns, where a few rows are hit by
 * most updates. */
void row_scatter_run(row_scatter *s) {
    const int64_t threads = parallel_threads(), parts = threads < MOST_SHARES ? threads : MOST_SHARES;
    shares t = {.s = s};

    if (s->rows == 0 || s->width == 0) return;
    if (s->straight) {
        parallel_for(s->outer, parallel_rows((s->rows + s->count) * s->width), straight_by_type[s->type], s);
        return;
    }
    s->streams = rows_stream(s);
    if (s->outer == 1 && s->how != COMBINE_NONE && s->width >= LEAST_COLUMNS && parts > 1 && cut_rows(&t, parts)) {
        parallel_for(parts, parallel_rows((s->rows + s->count) * s->width / parts), scatter_shares, &t);
        return;
    }
    s->columns = columns_of(s);
    parallel_for(s->outer * ((s->width + s->columns - 1) / s->columns) * s->rows, parallel_rows(s->columns),
                 scatter_range, s);
}
