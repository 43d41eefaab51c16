/* reduce_kernel.c -- the kernels behind the Reduce operators: Y[kept] = finish(fold over the other axes of X).
 *
 * Neighbouring axes that are kept, or folded, together are one axis here, and axes of size 1 are none. What is left is
 * a row (the innermost axis is folded) or a line of columns (it is kept) inside two odometers, one over the kept axes
 * and one over the folded ones. Long folds are cut into parts by size alone, joined in order: a result does not depend
 * on the number of threads. */
#include "ops/reduce_kernel.h"

#include "core/half.h"
#include "core/parallel.h"
#include "core/vmath.h"

#include <string.h>

/* --- folds -------------------------------------------------------------------------------------------------------- */

#define PRAGMA(text) _Pragma(#text)
#define NO_SHIFT(A, i) 0
#define SHIFT(A, i) (((const A *)shift)[i])

/* One fold in one class: elements of type C, totals of type A. `step` makes the new total from the old one `t`, the
 * element `x` and the shift `s`; `op` puts two totals together, of which `unit` is the neutral one. A row's tile is
 * folded in type L before it joins the total. */
#define FOLD(name, C, L, A, op, unit, SHIFT_OR_NOT, step)                                                              \
    SIMD static void name##_rows(void *acc, const void *from, int64_t n, const void *shift) {                          \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        L t = unit;                                                                                                    \
        const A s = SHIFT_OR_NOT(A, 0);                                                                                \
        (void)shift, (void)s;                                                                                          \
        PRAGMA(omp simd reduction(op : t))                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            L x = (L)p[i];                                                                                             \
            t = step;                                                                                                  \
        }                                                                                                              \
        A tile = (A)t;                                                                                                 \
        *total = *total op tile;                                                                                       \
    }                                                                                                                  \
    SIMD static void name##_columns(void *acc, const void *from, int64_t n, const void *shift) {                       \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A x = (A)p[i], t = total[i];                                                                               \
            const A s = SHIFT_OR_NOT(A, i);                                                                            \
            (void)s;                                                                                                   \
            total[i] = step;                                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void name##_lines(void *acc, const void *from, int64_t n, int64_t stride, const void *shift) {         \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A x = (A)p[i], t = total[i];                                                                               \
            const A s = SHIFT_OR_NOT(A, i);                                                                            \
            (void)s;                                                                                                   \
            t = step, x = (A)p[i + stride];                                                                            \
            t = step, x = (A)p[i + 2 * stride];                                                                        \
            t = step, x = (A)p[i + 3 * stride];                                                                        \
            total[i] = step;                                                                                           \
        }                                                                                                              \
    }

/* Maximum and minimum: a NaN wins, and stays. NaNs of a tile are counted in an N, an integer as wide as C. */
#define FOLD_EXTREME(name, C, N, A, op, beats)                                                                         \
    SIMD static void name##_rows(void *acc, const void *from, int64_t n, const void *shift) {                          \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        C t = p[0];                                                                                                    \
        N nans = 0;                                                                                                    \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd reduction(op : t) reduction(+ : nans))                                                         \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            nans += p[i] != p[i];                                                                                      \
            t = p[i] beats t ? p[i] : t;                                                                               \
        }                                                                                                              \
        const A tile = nans ? (A)NAN : (A)t, old = *total;                                                             \
        *total = tile beats old || tile != tile ? tile : old;                                                          \
    }                                                                                                                  \
    SIMD static void name##_columns(void *acc, const void *from, int64_t n, const void *shift) {                       \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A x = (A)p[i], t = total[i];                                                                               \
            total[i] = x beats t || x != x ? x : t;                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void name##_lines(void *acc, const void *from, int64_t n, int64_t stride, const void *shift) {         \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const C x = p[i], y = p[i + stride], z = p[i + 2 * stride], w = p[i + 3 * stride];                         \
            const C first = x beats y ? x : y, second = z beats w ? z : w;                                             \
            const int nans = (x != x) | (y != y) | (z != z) | (w != w);                                                \
            const A four = nans ? (A)NAN : (A)(first beats second ? first : second), t = total[i];                     \
            total[i] = (four beats t) | (four != four) ? four : t;                                                     \
        }                                                                                                              \
    }

/* Sums have error enough to spare for float in a tile; squares and products need the range of double. */
#define FOLD_FLOATS(name, L, op, unit, SHIFT_OR_NOT, step)                                                             \
    FOLD(name##_f32, float, L, double, op, unit, SHIFT_OR_NOT, step)                                                   \
    FOLD(name##_f64, double, double, double, op, unit, SHIFT_OR_NOT, step)
/* Integers wrap around as they do in PyTorch: their sums are made of unsigned numbers, where that is defined. */
#define FOLD_NUMBERS(name, L, op, unit, step)                                                                          \
    FOLD_FLOATS(name, L, op, unit, NO_SHIFT, step)                                                                     \
    FOLD(name##_i64, int64_t, uint64_t, uint64_t, op, unit, NO_SHIFT, step)

/* clang-format off */
FOLD_NUMBERS(sum,         float,  +, 0, t + x)
FOLD_NUMBERS(square,      double, +, 0, t + x * x)
FOLD_NUMBERS(prod,        double, *, 1, t * x)
FOLD_FLOATS(count_equal,  double, +, 0, SHIFT, t + (x == s ? 1 : 0))
FOLD_FLOATS(prod_nonzero, double, *, 1, NO_SHIFT, t * (x == 0 ? 1 : x))
FOLD(l1_f32,      float,   float,    double,   +, 0, NO_SHIFT, t + (x < 0 ? -x : x))
FOLD(l1_f64,      double,  double,   double,   +, 0, NO_SHIFT, t + (x < 0 ? -x : x))
FOLD(l1_i64,      int64_t, uint64_t, uint64_t, +, 0, NO_SHIFT, t + ((int64_t)x < 0 ? -x : x))
FOLD(sum_exp_f32, float,   double,   double,   +, 0, SHIFT, t + v_exp((float)(x - s)))
FOLD(sum_exp_f64, double,  double,   double,   +, 0, SHIFT, t + v_exp(x - s))
FOLD_EXTREME(max_f32, float,   int32_t, double,  max, >)
FOLD_EXTREME(max_f64, double,  int64_t, double,  max, >)
FOLD_EXTREME(max_i64, int64_t, int64_t, int64_t, max, >)
FOLD_EXTREME(min_f32, float,   int32_t, double,  min, <)
FOLD_EXTREME(min_f64, double,  int64_t, double,  min, <)
FOLD_EXTREME(min_i64, int64_t, int64_t, int64_t, min, <)
/* clang-format on */

#define FORMS_FLOAT(name, form) [FOLD_F32] = name##_f32_##form, [FOLD_F64] = name##_f64_##form
#define FORMS(name, form) {FORMS_FLOAT(name, form), [FOLD_I64] = name##_i64_##form}
#define NUMBER_FOLD(name) .rows = FORMS(name, rows), .columns = FORMS(name, columns), .lines = FORMS(name, lines)
#define FLOAT_FOLD(name)                                                                                               \
    .rows = {FORMS_FLOAT(name, rows)}, .columns = {FORMS_FLOAT(name, columns)}, .lines = {FORMS_FLOAT(name, lines)}

static const fold fold_sum = {NUMBER_FOLD(sum), .start = 0, .start_int = 0};
static const fold fold_square = {NUMBER_FOLD(square), .start = 0, .start_int = 0};
static const fold fold_l1 = {NUMBER_FOLD(l1), .start = 0, .start_int = 0};
static const fold fold_prod = {NUMBER_FOLD(prod), .start = 1, .start_int = 1};
static const fold fold_count_equal = {FLOAT_FOLD(count_equal), .start = 0};
static const fold fold_prod_nonzero = {FLOAT_FOLD(prod_nonzero), .start = 1};
static const fold fold_sum_exp = {FLOAT_FOLD(sum_exp), .start = 0};
const fold fold_max = {NUMBER_FOLD(max), .start = -INFINITY, .start_int = INT64_MIN};
const fold fold_min = {NUMBER_FOLD(min), .start = INFINITY, .start_int = INT64_MAX};

/* --- narrow types ------------------------------------------------------------------------------------------------- */

typedef void convert_fn(void *to, const void *from, int64_t n);

#define CONVERT(name, From, To, expr)                                                                                  \
    SIMD static void name(void *to, const void *from, int64_t n) {                                                     \
        const From *p = from;                                                                                          \
        To *q = to;                                                                                                    \
        for (int64_t i = 0; i < n; i++) q[i] = (To)(expr);                                                             \
    }
CONVERT(widen_bf16, bf16, float, bf16_to_f32(p[i]))
CONVERT(widen_i32, int32_t, int64_t, p[i])
CONVERT(widen_i16, int16_t, int64_t, p[i])
CONVERT(widen_i8, int8_t, int64_t, p[i])
CONVERT(widen_u8, uint8_t, int64_t, p[i])
CONVERT(narrow_f32, double, float, p[i])
CONVERT(narrow_f64, double, double, p[i])
CONVERT(narrow_bf16, double, bf16, f32_to_bf16((float)p[i]))
CONVERT(narrow_f16, double, f16, (float)p[i])
CONVERT(narrow_i64, int64_t, int64_t, p[i])
CONVERT(narrow_i32, int64_t, int32_t, p[i])
CONVERT(narrow_i16, int64_t, int16_t, p[i])
CONVERT(narrow_i8, int64_t, int8_t, p[i])
CONVERT(narrow_u8, int64_t, uint8_t, p[i])
static void widen_f16(void *to, const void *from, int64_t n) { f16_widen(from, n, to); }

static const struct {
    fold_class as;
    convert_fn *widen;  /* elements to their class; NULL: they are of it */
    convert_fn *narrow; /* totals to elements */
} conversions[DTYPE_COUNT] = {
    [F32] = {FOLD_F32, NULL, narrow_f32},         [F64] = {FOLD_F64, NULL, narrow_f64},
    [BF16] = {FOLD_F32, widen_bf16, narrow_bf16}, [F16] = {FOLD_F32, widen_f16, narrow_f16},
    [I64] = {FOLD_I64, NULL, narrow_i64},         [I32] = {FOLD_I64, widen_i32, narrow_i32},
    [I16] = {FOLD_I64, widen_i16, narrow_i16},    [I8] = {FOLD_I64, widen_i8, narrow_i8},
    [U8] = {FOLD_I64, widen_u8, narrow_u8},       [BOOL] = {FOLD_I64, widen_u8, narrow_u8},
};

fold_class fold_class_of(dtype t) { return conversions[t].as; }

const void *fold_load(dtype t, const void *x, int64_t at, int64_t n, fold_tile *buffer) {
    const void *from = (const char *)x + at * (int64_t)dtype_size(t);
    if (!conversions[t].widen) return from;
    conversions[t].widen(buffer, from, n);
    return buffer;
}

/* --- layout ------------------------------------------------------------------------------------------------------- */

/* Some of a tensor's axes, counted through in order. */
typedef struct odometer {
    int rank;
    int64_t count, dim[MAX_RANK], stride[MAX_RANK];
} odometer;

static int64_t offset_at(const odometer *o, int64_t index) {
    int64_t offset = 0;
    for (int i = o->rank - 1; i > 0; i--) {
        offset += index % o->dim[i] * o->stride[i];
        index /= o->dim[i];
    }
    return o->rank ? offset + index * o->stride[0] : 0;
}

typedef struct layout {
    odometer kept, folded; /* without the innermost axis */
    int64_t inner;         /* the innermost axis' size */
    bool inner_folded;
    int64_t width;         /* totals made together: of some rows, or of a piece of the innermost axis */
    int64_t tasks, pieces; /* of up to `width` totals; pieces are those of all rows, or of one innermost axis */
    int64_t length, parts; /* elements folded into a total, and in how many parts */
    int64_t outputs;       /* numbers made */
} layout;

enum { PART = 32768, MOST_PARTS = 32 };

static void add_axis(odometer *o, int64_t dim, int64_t stride) {
    o->dim[o->rank] = dim;
    o->stride[o->rank++] = stride;
    o->count *= dim;
}

static int64_t clamp(int64_t x, int64_t least, int64_t most) { return x < least ? least : x > most ? most : x; }

static layout layout_of(const shape *s, unsigned axes) {
    layout l = {.kept = {.count = 1}, .folded = {.count = 1}, .inner = 1, .inner_folded = true};
    struct {
        int64_t dim, stride;
        bool folded;
    } run[MAX_RANK];
    int64_t stride[MAX_RANK];
    int n = 0;

    stride_contiguous(s, stride);
    for (int i = 0; i < s->rank; i++) {
        bool folded = axes >> i & 1;
        if (s->dim[i] == 1) continue;
        if (n && run[n - 1].folded == folded) {
            run[n - 1].dim *= s->dim[i];
            run[n - 1].stride = stride[i];
        } else {
            run[n].dim = s->dim[i], run[n].stride = stride[i], run[n++].folded = folded;
        }
    }
    if (n) {
        l.inner = run[n - 1].dim;
        l.inner_folded = run[n - 1].folded;
    }
    for (int i = 0; i + 1 < n; i++) add_axis(run[i].folded ? &l.folded : &l.kept, run[i].dim, run[i].stride);

    l.length = l.folded.count * (l.inner_folded ? l.inner : 1);
    if (l.inner_folded) {
        l.outputs = l.kept.count;
        l.width = clamp(PART / 4 / clamp(l.length, 1, PART), 1, FOLD_TILE);
        l.pieces = (l.outputs + l.width - 1) / l.width;
        l.tasks = l.pieces;
    } else {
        l.outputs = l.kept.count * l.inner;
        l.width = clamp(l.inner, 1, FOLD_TILE);
        l.pieces = (l.inner + l.width - 1) / l.width;
        l.tasks = l.kept.count * l.pieces;
    }
    l.parts = clamp(l.length * l.width / PART, 1, clamp(MOST_PARTS / clamp(l.tasks, 1, MOST_PARTS), 1, MOST_PARTS));
    return l;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

typedef struct job {
    layout l;
    const reduction *r;
    const tensor *x;
    fold_class as, totals; /* classes of the elements and of totals */
    const char *shift;     /* [outputs] totals, or NULL */
    char *partial;         /* [tasks, parts, width] totals, when there are several parts */
    char *raw;             /* [outputs] where totals go unfinished; NULL: finished, to `out` */
    const tensor *out;
} job;

enum { TOTAL = 8, SHORT_LINE = 64 }; /* bytes; elements */

SIMD static void start(const job *j, const fold *f, void *acc, int64_t n) {
    double *floats = acc;
    int64_t *ints = acc;

    if (j->totals == FOLD_I64)
        for (int64_t i = 0; i < n; i++) ints[i] = f->start_int;
    else
        for (int64_t i = 0; i < n; i++) floats[i] = f->start;
}

/* Where in the results a task's totals belong, and how many there are. */
static int64_t place(const layout *l, int64_t task, int64_t *n) {
    int64_t from = task % l->pieces * l->width, end = l->inner_folded ? l->outputs : l->inner;
    *n = clamp(end - from, 0, l->width);
    return l->inner_folded ? from : task / l->pieces * l->inner + from;
}

static void deliver(const job *j, int64_t at, void *acc, int64_t n) {
    const char *shift = j->shift ? j->shift + at * TOTAL : NULL;
    if (j->raw) {
        memcpy(j->raw + at * TOTAL, acc, (size_t)n * TOTAL);
        return;
    }
    if (j->r->finish) j->r->finish(acc, n, (double)j->l.length, (const double *)(const void *)shift);
    conversions[j->out->type].narrow((char *)j->out->data + at * (int64_t)dtype_size(j->out->type), acc, n);
}

/* Elements [from, to) of the folded axes, flattened, into one total. */
static void fold_row(const job *j, int64_t base, int64_t from, int64_t to, void *acc, const void *shift) {
    const layout *l = &j->l;
    fold_fn *f = j->r->each->rows[j->as];
    fold_tile buffer;

    while (from < to) {
        int64_t row = l->folded.rank ? from / l->inner : 0, end = (row + 1) * l->inner < to ? (row + 1) * l->inner : to;
        int64_t at = base + offset_at(&l->folded, row) + from - row * l->inner;
        for (int64_t n; from < end; from += n, at += n) {
            n = end - from < FOLD_TILE ? end - from : FOLD_TILE;
            f(acc, fold_load(j->x->type, j->x->data, at, n, &buffer), n, shift);
        }
    }
}

/* How many lines of n elements are folded as one: short ones, where all lie one after the other. */
static int64_t lines_together(const layout *l, int64_t n, int64_t lines) {
    int64_t together = 1;

    if (n > SHORT_LINE || l->folded.rank != 1 || l->folded.stride[0] != n || n != l->inner) return 1;
    while (together * together < lines && (together + 1) * n <= FOLD_TILE) together++;
    return together;
}

/* Into as many lines of totals, which are joined. */
static void fold_lines(const job *j, int64_t base, int64_t from, int64_t to, char *acc, int64_t n, int64_t together) {
    fold_fn *f = j->r->each->columns[j->as];
    fold_tile buffer, totals;

    start(j, j->r->each, &totals, together * n);
    for (int64_t line = from; line < to; line += together) {
        const int64_t count = (to - line < together ? to - line : together) * n;
        f(&totals, fold_load(j->x->type, j->x->data, base + line * n, count, &buffer), count, NULL);
    }
    for (int64_t i = 0; i < together; i++)
        j->r->join->columns[j->totals](acc, (const char *)&totals + i * n * TOTAL, n, NULL);
}

static void fold_columns(const job *j, int64_t base, int64_t from, int64_t to, void *acc, int64_t n,
                         const void *shift) {
    fold_fn *f = j->r->each->columns[j->as];
    const int64_t together = shift ? 1 : lines_together(&j->l, n, to - from);
    fold_tile buffer;

    if (together > 1) {
        fold_lines(j, base, from, to, acc, n, together);
        return;
    }
    if (j->l.folded.rank == 1 && !conversions[j->x->type].widen)
        for (const int64_t stride = j->l.folded.stride[0]; from + FOLD_LINES <= to; from += FOLD_LINES)
            j->r->each->lines[j->as](acc, fold_load(j->x->type, j->x->data, base + from * stride, n, &buffer), n,
                                     stride, shift);
    for (int64_t row = from; row < to; row++) {
        int64_t at = base + offset_at(&j->l.folded, row);
        f(acc, fold_load(j->x->type, j->x->data, at, n, &buffer), n, shift);
    }
}

static void fold_parts(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const layout *l = &j->l;
    fold_tile local;

    for (int64_t i = begin; i < end; i++) {
        int64_t part = i % l->parts, task = i / l->parts, n, at = place(l, task, &n);
        int64_t from = l->length * part / l->parts, to = l->length * (part + 1) / l->parts;
        char *acc = l->parts > 1 ? j->partial + i * l->width * TOTAL : (char *)&local;
        const char *shift = j->shift ? j->shift + at * TOTAL : NULL;

        start(j, j->r->each, acc, n);
        if (l->inner_folded)
            for (int64_t k = 0; k < n; k++)
                fold_row(j, offset_at(&l->kept, at + k), from, to, acc + k * TOTAL, shift ? shift + k * TOTAL : NULL);
        else
            fold_columns(j, offset_at(&l->kept, task / l->pieces) + task % l->pieces * l->width, from, to, acc, n,
                         shift);
        if (l->parts == 1) deliver(j, at, acc, n);
    }
}

static void join_parts(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const layout *l = &j->l;
    fold_tile acc;

    for (int64_t task = begin; task < end; task++) {
        int64_t n, at = place(l, task, &n);
        start(j, j->r->join, &acc, n);
        for (int64_t part = 0; part < l->parts; part++)
            j->r->join->columns[j->totals](&acc, j->partial + (task * l->parts + part) * l->width * TOTAL, n, NULL);
        deliver(j, at, &acc, n);
    }
}

static void run_job(job *j) {
    const layout *l = &j->l;
    parallel_for(l->tasks * l->parts, parallel_rows(l->length / l->parts * l->width), fold_parts, j);
    if (l->parts > 1) parallel_for(l->tasks, parallel_rows(l->parts * l->width), join_parts, j);
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

bool written_axis(const node *n, int64_t i, int64_t *axis) {
    const value *operand = node_in(n, 1);
    const int64_t *list;
    int count = node_ints(n, "axes", &list);

    if (count >= 0) {
        if (i < count) *axis = list[i];
        return i < count;
    }
    if (!operand || i >= shape_count(&operand->shape)) return false;
    *axis = dtype_get_int(operand->type, operand->data, i);
    return true;
}

unsigned reduced_axes(const node *n) {
    int rank = n->in[0]->shape.rank;
    unsigned axes = 0;
    int64_t axis;

    for (int64_t i = 0; written_axis(n, i, &axis); i++) axes |= 1u << (axis < 0 ? axis + (rank ? rank : 1) : axis);
    return axes || node_int(n, "noop_with_empty_axes") ? axes : (1u << rank) - 1;
}

static size_t partial_bytes(const layout *l) {
    return l->parts > 1 ? (size_t)(l->tasks * l->parts * l->width) * TOTAL : 0;
}

static layout layout_of_node(const node *n) { return layout_of(&n->in[0]->shape, reduced_axes(n)); }

size_t reduce_workspace(const node *n) {
    layout l = layout_of_node(n);
    return partial_bytes(&l);
}

/* The shift lies behind the partial totals. */
size_t reduce_shift_workspace(const node *n) {
    layout l = layout_of_node(n);
    return partial_bytes(&l) + (size_t)l.outputs * TOTAL;
}

static job job_of(const call *k, const reduction *r) {
    job j = {.l = layout_of_node(k->node), .r = r, .x = &k->in[0], .out = &k->out[0], .partial = k->work};
    j.as = fold_class_of(j.x->type);
    j.totals = j.as == FOLD_I64 ? FOLD_I64 : FOLD_F64;
    return j;
}

static status reduce(const call *k, const reduction *r) {
    job j = job_of(k, r);
    run_job(&j);
    return OK;
}

static double *shift_of(const call *k, job *j) {
    char *shift = (char *)k->work + partial_bytes(&j->l);
    j->shift = shift;
    return (double *)(void *)shift;
}

SIMD static void finish_mean(double *t, int64_t n, double count, const double *shift) {
    (void)shift;
    for (int64_t i = 0; i < n; i++) t[i] /= count;
}

SIMD static void finish_sqrt(double *t, int64_t n, double count, const double *shift) {
    (void)shift, (void)count;
    for (int64_t i = 0; i < n; i++) t[i] = sqrt(t[i]);
}

static void finish_log(double *t, int64_t n, double count, const double *shift) {
    (void)count;
    for (int64_t i = 0; i < n; i++) t[i] = log(t[i]) + (shift ? shift[i] : 0);
}

#define REDUCTION(name, each_, join_, finish_)                                                                         \
    status name(ctx *c, const call *k) {                                                                               \
        static const reduction r = {&fold_##each_, &fold_##join_, finish_};                                            \
        (void)c;                                                                                                       \
        return reduce(k, &r);                                                                                          \
    }
REDUCTION(reduce_sum_cpu, sum, sum, NULL)
REDUCTION(reduce_mean_cpu, sum, sum, finish_mean)
REDUCTION(reduce_max_cpu, max, max, NULL)
REDUCTION(reduce_min_cpu, min, min, NULL)
REDUCTION(reduce_prod_cpu, prod, prod, NULL)
REDUCTION(reduce_prod_nonzero_cpu, prod_nonzero, prod, NULL)
REDUCTION(reduce_l1_cpu, l1, sum, NULL)
REDUCTION(reduce_l2_cpu, square, sum, finish_sqrt)
REDUCTION(reduce_sum_square_cpu, square, sum, NULL)
REDUCTION(reduce_log_sum_cpu, sum, sum, finish_log)

status reduce_count_equal_cpu(ctx *c, const call *k) {
    static const reduction r = {&fold_count_equal, &fold_sum, NULL};
    job j = job_of(k, &r);
    double *shift = shift_of(k, &j);

    (void)c;
    for (int64_t i = 0; i < j.l.outputs; i++) shift[i] = dtype_get(k->in[1].type, k->in[1].data, i);
    run_job(&j);
    return OK;
}

/* log Σ exp x = m + log Σ exp(x - m) for the largest element m; as PyTorch, with m = 0 where that is infinite. */
status reduce_log_sum_exp_cpu(ctx *c, const call *k) {
    static const reduction largest = {&fold_max, &fold_max, NULL}, sum = {&fold_sum_exp, &fold_sum, finish_log};
    job j = job_of(k, &largest);
    double *shift = shift_of(k, &j);

    (void)c;
    j.shift = NULL;
    j.raw = (char *)shift;
    run_job(&j);
    for (int64_t i = 0; i < j.l.outputs; i++)
        if (isinf(shift[i])) shift[i] = 0;
    j.r = &sum;
    j.shift = (const char *)shift;
    j.raw = NULL;
    run_job(&j);
    return OK;
}
