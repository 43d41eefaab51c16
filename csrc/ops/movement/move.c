/* move.c -- copies and fills strided memory.
 *
 * Axes are sorted by the destination's strides and merged where both sides allow it; what is left is a stack of
 * planes. A plane is copied row by row (memcpy), as a fill (the source repeats), as a transpose in tiles that stay in
 * the first cache (the source runs along the other axis), or element by element. Planes are cut into blocks, so
 * that a single large one still occupies every thread. Only the size of an element matters. */
#include "ops/movement/move.h"

#include "core/ints.h"
#include "core/names.h"
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

#define NAME(f) JOIN_NAMES(f, T)

#define T word1
#define N 1
#include "ops/movement/move_planes.h"
#undef T
#undef N

#define T word2
#define N 2
#include "ops/movement/move_planes.h"
#undef T
#undef N

#define T word4
#define N 4
#include "ops/movement/move_planes.h"
#undef T
#undef N

#define T word8
#define N 8
#include "ops/movement/move_planes.h"
#undef T
#undef N

#undef NAME

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
