/* move.c -- strided copies and fills.
 *
 * Axes are sorted by the destination's strides and merged where both sides allow it; what is left is a stack of
 * planes. A plane is copied row by row (memcpy), as a fill (the source repeats), as a transpose in tiles that stay in
 * the first cache (the source runs along the other axis), or element by element. Planes are cut into blocks, so
 * that a single large one still occupies every thread. Only the size of an element matters. */
#include "ops/movement/move.h"

#include "core/ints.h"
#include "core/parallel.h"
#include "core/prefetch.h"
#include "core/stream.h"

#include <string.h>

/* One plane or a block of one; strides in elements. */
typedef struct plane {
    char *to;
    const char *from;
    int64_t rows, cols;
    int64_t to_row, to_col, from_row, from_col;
    bool streams; /* past the caches, which would not hold it until it is read */
} plane;

typedef void plane_fn(const plane *p);

/* Elements as plain words, whatever type they are seen as elsewhere. */
typedef uint8_t __attribute__((may_alias)) word1;
typedef uint16_t __attribute__((may_alias)) word2;
typedef uint32_t __attribute__((may_alias)) word4;
typedef uint64_t __attribute__((may_alias)) word8;

/* --- planes ------------------------------------------------------------------------------------------------------- */

/* Vectors of 16 bytes, which every x86-64 CPU has, and two of them element by element in turns: the first halves, the
 * second halves. */
typedef word1 vector1 __attribute__((vector_size(16)));
typedef word2 vector2 __attribute__((vector_size(16)));
typedef word4 vector4 __attribute__((vector_size(16)));
typedef word8 vector8 __attribute__((vector_size(16)));

#ifdef __clang__
#define IN_TURNS(V, a, b, ...) __builtin_shufflevector(a, b, __VA_ARGS__)
#else
#define IN_TURNS(V, a, b, ...) __builtin_shuffle(a, b, (V){__VA_ARGS__})
#endif
#define FIRST_1(a, b) IN_TURNS(vector1, a, b, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23)
#define SECOND_1(a, b) IN_TURNS(vector1, a, b, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31)
#define FIRST_2(a, b) IN_TURNS(vector2, a, b, 0, 8, 1, 9, 2, 10, 3, 11)
#define SECOND_2(a, b) IN_TURNS(vector2, a, b, 4, 12, 5, 13, 6, 14, 7, 15)
#define FIRST_4(a, b) IN_TURNS(vector4, a, b, 0, 4, 1, 5)
#define SECOND_4(a, b) IN_TURNS(vector4, a, b, 2, 6, 3, 7)
#define FIRST_8(a, b) IN_TURNS(vector8, a, b, 0, 2)
#define SECOND_8(a, b) IN_TURNS(vector8, a, b, 1, 3)

/* Strides of columns: fill 1 and 0; transpose 1 and any, with the source's rows adjacent; scatter any and any. */
#define PLANES(T, N)                                                                                                         \
    SIMD static void fill_##T(const plane *p) {                                                                              \
        const plane q = *p;                                                                                                  \
        for (int64_t i = 0; i < q.rows; i++) {                                                                               \
            T *restrict to = (T *)(void *)q.to + i * q.to_row;                                                               \
            const T x = *((const T *)(const void *)q.from + i * q.from_row);                                                 \
            int64_t begin = 0;                                                                                               \
            if (q.streams) {                                                                                                 \
                _Alignas(CACHE_LINE) T line[CACHE_LINE / N];                                                                 \
                for (int j = 0; j < CACHE_LINE / N; j++) line[j] = x;                                                        \
                for (; begin + CACHE_LINE / N <= q.cols; begin += CACHE_LINE / N) stream_line(to + begin, line);             \
            }                                                                                                                \
            for (int64_t j = begin; j < q.cols; j++) to[j] = x;                                                              \
        }                                                                                                                    \
    }                                                                                                                        \
    SIMD static void scatter_##T(const plane *p) {                                                                           \
        const plane q = *p;                                                                                                  \
        for (int64_t i = 0; i < q.rows; i++) {                                                                               \
            T *restrict to = (T *)(void *)q.to + i * q.to_row;                                                               \
            const T *restrict from = (const T *)(const void *)q.from + i * q.from_row;                                       \
            for (int64_t j = 0; j < q.cols; j++) to[j * q.to_col] = from[j * q.from_col];                                    \
        }                                                                                                                    \
    }                                                                                                                        \
    /* The square that fits vectors. Rows i and i + half in turns, log2(side) times, are its columns. */                     \
    SIMD_PART void square_##T(T *to, const T *from, int64_t to_row, int64_t from_col) {                                      \
        enum { SIDE = 16 / N };                                                                                              \
        vector##N v[SIDE], w[SIDE];                                                                                          \
        for (int j = 0; j < SIDE; j++) memcpy(&v[j], from + j * from_col, 16);                                               \
        for (int step = 1; step < SIDE; step *= 2) {                                                                         \
            for (int j = 0; j < SIDE / 2; j++) {                                                                             \
                w[2 * j] = FIRST_##N(v[j], v[j + SIDE / 2]);                                                                 \
                w[2 * j + 1] = SECOND_##N(v[j], v[j + SIDE / 2]);                                                            \
            }                                                                                                                \
            for (int j = 0; j < SIDE; j++) v[j] = w[j];                                                                      \
        }                                                                                                                    \
        for (int i = 0; i < SIDE; i++) memcpy(to + i * to_row, &v[i], 16);                                                   \
    }                                                                                                                        \
    /* The square of whole lines, made of those. A cache keeps few lines that lie a power of two apart: where a square has \
     * more than that, or streams, it is made elsewhere, so that each line is read once and written once. */ \
    SIMD_PART void lines_##T(T *to, const T *from, int64_t to_row, int64_t from_col, bool streams) {                         \
        enum { SIDE = 16 / N, SQUARE = CACHE_LINE / N, FEW = 16 };                                                           \
        _Alignas(CACHE_LINE) T lines[SQUARE * SQUARE];                                                                       \
        if (SQUARE <= FEW && !streams) {                                                                                     \
            for (int i = 0; i < SQUARE; i += SIDE)                                                                           \
                for (int j = 0; j < SQUARE; j += SIDE)                                                                       \
                    square_##T(to + i * to_row + j, from + j * from_col + i, to_row, from_col);                              \
            return;                                                                                                          \
        }                                                                                                                    \
        for (int j = 0; j < SQUARE; j += SIDE)                                                                               \
            for (int i = 0; i < SQUARE; i += SIDE)                                                                           \
                square_##T(lines + i * SQUARE + j, from + j * from_col + i, SQUARE, from_col);                               \
        for (int i = 0; i < SQUARE; i++)                                                                                     \
            if (streams) stream_line(to + i * to_row, lines + i * SQUARE);                                                   \
            else memcpy(to + i * to_row, lines + i * SQUARE, CACHE_LINE);                                                    \
    }                                                                                                                        \
    /* Squares one after the other along the source's rows where they stream, whose next lines then share no set of a cache\
     * with these; else along the destination's, whose lines are in a cache. Lines of the next square are far apart, so that\
     * no CPU guesses them; the last one has none, which is asked for all the same. */ \
    SIMD_PART void squares_##T(const plane *p, bool streams) {                                                               \
        enum { SIDE = 16 / N, SQUARE = CACHE_LINE / N };                                                                     \
        const plane q = *p;                                                                                                  \
        T *to = (T *)(void *)q.to;                                                                                           \
        const T *from = (const T *)(const void *)q.from;                                                                     \
        const int64_t rows = q.rows & -SIDE, cols = q.cols & -SIDE;                                                          \
        const int64_t down = (rows + SQUARE - 1) / SQUARE, across = (cols + SQUARE - 1) / SQUARE;                            \
        int64_t top = 0, left = 0, next_top, next_left;                                                                      \
        for (int64_t square = 1; square <= down * across; square++, top = next_top, left = next_left) {                      \
            next_top = SQUARE * (streams ? square % down : square / across);                                                 \
            next_left = SQUARE * (streams ? square / down : square % across);                                                \
            for (int i = 0; i < SQUARE; i++) __builtin_prefetch(from + (next_left + i) * q.from_col + next_top);             \
            for (int i = 0; i < SQUARE && !streams; i++)                                                                     \
                __builtin_prefetch(to + (next_top + i) * q.to_row + next_left, 1);                                           \
            if (top + SQUARE <= rows && left + SQUARE <= cols) {                                                             \
                lines_##T(to + top * q.to_row + left, from + left * q.from_col + top, q.to_row, q.from_col, streams);        \
                continue;                                                                                                    \
            }                                                                                                                \
            for (int64_t i = top; i < rows && i < top + SQUARE; i += SIDE)                                                   \
                for (int64_t j = left; j < cols && j < left + SQUARE; j += SIDE)                                             \
                    square_##T(to + i * q.to_row + j, from + j * q.from_col + i, q.to_row, q.from_col);                      \
        }                                                                                                                    \
        for (int64_t i = 0; i < q.rows; i++)                                                                                 \
            for (int64_t j = i < rows ? cols : 0; j < q.cols; j++) to[i * q.to_row + j] = from[j * q.from_col + i];          \
    }                                                                                                                        \
    SIMD static void transpose_##T(const plane *p) {                                                                         \
        if (p->streams) squares_##T(p, true);                                                                                \
        else squares_##T(p, false);                                                                                          \
    }

PLANES(word1, 1)
PLANES(word2, 2)
PLANES(word4, 4)
PLANES(word8, 8)

typedef enum way { FILL, SCATTER, TRANSPOSE } way;

static plane_fn *const plane_functions[4][3] = {
    {fill_word1, scatter_word1, transpose_word1},
    {fill_word2, scatter_word2, transpose_word2},
    {fill_word4, scatter_word4, transpose_word4},
    {fill_word8, scatter_word8, transpose_word8},
};

static int log2_size(int size) { return size == 8 ? 3 : size == 4 ? 2 : size == 2 ? 1 : 0; }

/* --- the stack of planes ------------------------------------------------------------------------------------------ */

typedef struct axis {
    int64_t size, to, from; /* strides in elements */
} axis;

typedef struct mover {
    char *to;
    const char *from;
    int size;
    int n_outer;
    axis outer[MAX_RANK], row, col;
    int64_t row_block, col_block, row_blocks, col_blocks;
    plane_fn *fn; /* NULL: rows are copied as bytes */
    bool streams;
} mover;

static void copy_rows(const plane *p, size_t size) {
    size_t bytes = (size_t)p->cols * size;
    for (int64_t i = 0; i < p->rows; i++)
        memcpy(p->to + i * p->to_row * (int64_t)size, p->from + i * p->from_row * (int64_t)size, bytes);
}

static void move_blocks(void *arg, int64_t begin, int64_t end) {
    const mover *m = arg;

    for (int64_t block = begin; block < end; block++) {
        int64_t rest = block, to = 0, from = 0;
        int64_t j = rest % m->col_blocks * m->col_block;
        rest /= m->col_blocks;
        int64_t i = rest % m->row_blocks * m->row_block;
        rest /= m->row_blocks;
        for (int a = m->n_outer - 1; a >= 0; a--) {
            to += rest % m->outer[a].size * m->outer[a].to;
            from += rest % m->outer[a].size * m->outer[a].from;
            rest /= m->outer[a].size;
        }
        to += i * m->row.to + j * m->col.to;
        from += i * m->row.from + j * m->col.from;
        plane p = {m->to + to * m->size,
                   m->from + from * m->size,
                   least(m->row_block, m->row.size - i),
                   least(m->col_block, m->col.size - j),
                   m->row.to,
                   m->col.to,
                   m->row.from,
                   m->col.from,
                   m->streams};
        if (m->fn) m->fn(&p);
        else copy_rows(&p, (size_t)m->size);
    }
    if (m->streams) end_streams();
}

static int64_t magnitude(int64_t x) { return x < 0 ? -x : x; }

/* The axes longer than one, by falling stride of the destination, neighbours merged where they run on. */
static int merged_axes(const tensor *to, const tensor *from, axis axes[MAX_RANK]) {
    int n = 0, merged = 0;

    for (int i = 0; i < to->shape.rank; i++) {
        axis a = {to->shape.dim[i], to->stride[i], from->stride[i]};
        int at = n;
        if (a.size == 1) continue;
        for (; at > 0 && magnitude(axes[at - 1].to) < magnitude(a.to); at--) axes[at] = axes[at - 1];
        axes[at] = a;
        n++;
    }
    for (int i = 0; i < n; i++) {
        axis *last = &axes[merged - 1], a = axes[i];
        if (merged && last->to == a.to * a.size && last->from == a.from * a.size) {
            last->size *= a.size;
            last->to = a.to;
            last->from = a.from;
        } else {
            axes[merged++] = a;
        }
    }
    return merged;
}

/* Of a transpose: pieces of the source, along its rows, and of the destination, wide ones where threads have enough. What
 * streams goes on along a source's rows: few pages are open at a time, and each of their lines is the next. */
enum { TILE_ROWS = 256, TILE_COLS = 64, WIDE_TILE_COLS = 256, STREAMED_ROWS = 2048, LEAST_FOR_WIDE = 1 << 21 };
enum { BLOCK_ELEMENTS = 1 << 14 };

static void choose_blocks(mover *m, bool tiles) {
    const bool wide = m->col.size * m->row.size >= LEAST_FOR_WIDE && !m->streams;
    m->col_block = least(m->col.size, !tiles ? BLOCK_ELEMENTS : wide ? WIDE_TILE_COLS : TILE_COLS);
    m->row_block = !tiles ? BLOCK_ELEMENTS / m->col_block : m->streams ? STREAMED_ROWS : TILE_ROWS;
    m->row_block = least(m->row.size, m->row_block);
    m->col_blocks = (m->col.size + m->col_block - 1) / m->col_block;
    m->row_blocks = (m->row.size + m->row_block - 1) / m->row_block;
}

/* Is the destination larger than what caches keep, and does each of its rows begin where vectors may? Those of a transpose
 * begin with a line, since none would be filled by what is written next. */
static bool streams(const mover *m, way how, int64_t count) {
    const uintptr_t unit = how == TRANSPOSE ? CACHE_LINE : STREAM_ALIGNMENT;
    uintptr_t starts = (uintptr_t)m->to | (uintptr_t)(m->row.to * m->size);
    for (int a = 0; a < m->n_outer; a++) starts |= (uintptr_t)(m->outer[a].to * m->size);
    return count * m->size >= BEYOND_CACHES && starts % unit == 0 && how != SCATTER;
}

void copy_elements(const tensor *to, const tensor *from) {
    mover m = {.to = to->data, .from = from->data, .size = (int)dtype_size(to->type)};
    axis axes[MAX_RANK];
    int64_t blocks = 1;
    int n, row;
    way how;

    if (tensor_count(to) == 0) return;
    n = merged_axes(to, from, axes);
    m.col = n ? axes[--n] : (axis){1, 1, 1};
    row = n - 1;
    for (int i = 0; i < n; i++)
        if (axes[i].from == 1 && m.col.from != 1 && m.col.from != 0) row = i;
    m.row = n ? axes[row] : (axis){1, 0, 0};
    for (int i = 0; i < n; i++)
        if (i != row) m.outer[m.n_outer++] = axes[i];

    how = m.col.to != 1 ? SCATTER : m.col.from == 0 ? FILL : m.row.from == 1 ? TRANSPOSE : SCATTER;
    if (m.col.to != 1 || m.col.from != 1) m.fn = plane_functions[log2_size(m.size)][how];
    m.streams = streams(&m, how, tensor_count(to));
    choose_blocks(&m, how == TRANSPOSE);
    for (int i = 0; i < m.n_outer; i++) blocks *= m.outer[i].size;
    blocks *= m.row_blocks * m.col_blocks;
    parallel_for(blocks, parallel_rows(m.row_block * m.col_block), move_blocks, &m);
}

void fill_elements(const tensor *to, const void *element) {
    tensor from = {.data = (void *)(uintptr_t)element, .type = to->type, .shape = to->shape};
    copy_elements(to, &from);
}

tensor tensor_slice(const tensor *t, int axis_, int64_t start, int64_t count, int64_t step) {
    tensor r = *t;
    if (count > 0) r.data = (char *)t->data + start * t->stride[axis_] * (int64_t)dtype_size(t->type);
    r.shape.dim[axis_] = count;
    r.stride[axis_] = t->stride[axis_] * step;
    return r;
}
