/* reduce_kernel.c -- runs the Reduce operators: Y[kept] = finish(fold over the other axes of X).
 *
 * Neighbouring axes that are kept, or folded, together are one axis here, and axes of size 1 are none. What is left is
 * a row (the innermost axis is folded) or a line of columns (it is kept) inside two odometers, one over the kept axes
 * and one over the folded ones. Long folds are cut into parts by size alone, joined in order: a result does not depend
 * on the number of threads. */
#include "ops/reductions/reduce_kernel.h"

#include "core/ints.h"
#include "core/parallel.h"
#include "core/prefetch.h"
#include "core/scratch.h"

#include <math.h>
#include <string.h>

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

/* Elements; a number; lines whose totals are written once; elements of them worked on together. */
enum { PART = 32768, MOST_PARTS = 32, LINES_A_PART = 64, ROWS_TOGETHER = 32, LINE_PIECE = FOLD_TILE / FOLD_LINES };

static void add_axis(odometer *o, int64_t dim, int64_t stride) {
    o->dim[o->rank] = dim;
    o->stride[o->rank++] = stride;
    o->count *= dim;
}

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
        l.width = clamp(PART / 4 / clamp(l.length, 1, PART), l.folded.rank ? ROWS_TOGETHER : 1, FOLD_TILE);
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

/* The totals of tasks are made in memory of their own first. */
static bool is_joined(const layout *l) { return l->parts > 1 || l->width > FOLD_TILE; }

/* A source is asked for elements in the order of their places, or memory would be slow where it reads and writes: a line
 * of columns is not cut, however long it is. */
static layout layout_of_source(const shape *s, unsigned axes) {
    layout l = layout_of(s, axes);
    int64_t most;

    if (l.inner_folded || l.inner <= FOLD_TILE) return l;
    most = clamp(l.length / LINES_A_PART, 1, clamp(MOST_PARTS / clamp(l.kept.count, 1, MOST_PARTS), 1, MOST_PARTS));
    l.width = l.inner;
    l.pieces = 1;
    l.tasks = l.kept.count;
    l.parts = clamp(l.length * l.width / PART, 1, most);
    return l;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

/* One number for each place that is kept. */
typedef struct end {
    const reduction *r;
    const tensor *out;
    fold_class as, totals; /* classes of the elements and of totals */
    char *partial;         /* [tasks, parts, width] totals, when there are several parts */
} end;

typedef struct job {
    layout l;
    const tensor *x;           /* elements in memory */
    const fold_source *source; /* NULL, or what makes them */
    int n_ends;
    end ends[FOLD_ENDS];
    const char *shift; /* [outputs] totals, or NULL */
    char *raw;         /* [outputs] where totals go unfinished; NULL: finished, to the ends' outputs */
} job;

/* The elements a thread has at hand, for each end; made by a source: those of [from, to). */
typedef struct window {
    fold_tile buffer;
    const char *at[FOLD_ENDS], *made[FOLD_ENDS];
    int64_t from, to;
    void *scratch;
} window;

typedef struct totals {
    char *of[FOLD_ENDS];
} totals;

enum { TOTAL = 8, SHORT_LINE = 64, SHORT_ROW = 32 }; /* bytes; elements */

SIMD static void start(const end *e, const fold *f, void *acc, int64_t n) {
    double *floats = acc;
    int64_t *ints = acc;

    if (e->totals == FOLD_I64)
        for (int64_t i = 0; i < n; i++) ints[i] = f->start_int;
    else
        for (int64_t i = 0; i < n; i++) floats[i] = f->start;
}

/* Where in the results a task's totals belong, and how many there are. */
static int64_t place(const layout *l, int64_t task, int64_t *n) {
    int64_t from = task % l->pieces * l->width, last = l->inner_folded ? l->outputs : l->inner;
    *n = clamp(last - from, 0, l->width);
    return l->inner_folded ? from : task / l->pieces * l->inner + from;
}

static void deliver(const job *j, const end *e, int64_t at, void *acc, int64_t n) {
    const char *shift = j->shift ? j->shift + at * TOTAL : NULL;
    if (j->raw) {
        memcpy(j->raw + at * TOTAL, acc, (size_t)n * TOTAL);
        return;
    }
    if (e->r->finish) e->r->finish(acc, n, (double)j->l.length, (const double *)(const void *)shift);
    fold_store(e->out->type, e->out->data, at, acc, n);
}

/* Elements [at, at + n). A source makes all that follow before `limit`, as many as fit into a tile. */
static const char *const *elements(const job *j, window *w, int64_t at, int64_t n, int64_t limit) {
    if (!j->source) {
        w->at[0] = fold_load(j->x->type, j->x->data, at, n, &w->buffer);
        return w->at;
    }
    if (at < w->from || at + n > w->to) {
        const int64_t count = limit - at <= FOLD_TILE ? limit - at : FOLD_TILE / n * n;
        j->source->make(j->source->arg, w->scratch, at, count, w->made);
        w->from = at;
        w->to = at + count;
    }
    for (int i = 0; i < j->n_ends; i++) w->at[i] = w->made[i] + (at - w->from) * (j->ends[i].as == FOLD_F32 ? 4 : 8);
    return w->at;
}

/* Rows that lie one after the other, each no more than a tile. */
static bool rows_are_adjacent(const layout *l) {
    return l->parts == 1 && l->inner <= FOLD_TILE && l->folded.rank == 0 &&
           (l->kept.rank == 0 || (l->kept.rank == 1 && l->kept.stride[0] == l->inner));
}

/* Elements [from, to) of the folded axes, flattened, into n totals from `at` on. Where there is a piece of a row for all
 * of them the next one comes after: memory is read as it lies. */
static void fold_rows(const job *j, window *w, int64_t at, int64_t n, int64_t from, int64_t to, const totals *acc,
                      const char *shift) {
    const layout *l = &j->l;
    const end *first = &j->ends[0];
    const char *whole = j->source || !fold_is_stored(j->x->type) ? NULL : j->x->data;
    const int64_t size = whole ? (int64_t)dtype_size(j->x->type) : 0;
    const bool adjacent = rows_are_adjacent(l);
    int64_t base[FOLD_TILE];

    for (int64_t k = 0; k < n; k++) base[k] = offset_at(&l->kept, at + k);
    for (int64_t last; from < to; from = last) {
        const int64_t row = l->folded.rank ? from / l->inner : 0,
                      start_of = offset_at(&l->folded, row) - row * l->inner;
        last = (row + 1) * l->inner < to ? (row + 1) * l->inner : to;
        if (whole && last - from <= FOLD_TILE) {
            const char *x = whole + (start_of + from) * size;
            for (int64_t k = 0; k < n; k++)
                first->r->each->rows[first->as](acc->of[0] + k * TOTAL, x + base[k] * size, last - from,
                                                shift ? shift + k * TOTAL : NULL);
            continue;
        }
        for (int64_t k = 0; k < n; k++)
            for (int64_t i = from, count; i < last; i += count) {
                const int64_t limit = base[k] + (adjacent ? (n - k) * l->inner : start_of + last);
                count = last - i < FOLD_TILE ? last - i : FOLD_TILE;
                const char *const *x = elements(j, w, base[k] + start_of + i, count, limit);
                for (int e = 0; e < j->n_ends; e++)
                    j->ends[e].r->each->rows[j->ends[e].as](acc->of[e] + k * TOTAL, x[e], count,
                                                            shift ? shift + k * TOTAL : NULL);
            }
    }
}

/* The same of short rows that lie one after the other: an element of each at a time. */
static void fold_short_rows(const job *j, window *w, int64_t at, int64_t n, const totals *acc, const char *shift) {
    const int64_t length = j->l.inner, most = FOLD_TILE / length;

    for (int64_t k = 0, count; k < n; k += count) {
        count = n - k < most ? n - k : most;
        const char *const *x = elements(j, w, (at + k) * length, count * length, (at + n) * length);
        for (int e = 0; e < j->n_ends; e++)
            j->ends[e].r->each->short_rows[j->ends[e].as](acc->of[e] + k * TOTAL, x[e], count, length,
                                                          shift ? shift + k * TOTAL : NULL);
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
static void fold_lines(const job *j, window *w, int64_t base, int64_t from, int64_t to, const totals *acc, int64_t n,
                       int64_t together) {
    fold_tile lines[FOLD_ENDS];

    for (int i = 0; i < j->n_ends; i++) start(&j->ends[i], j->ends[i].r->each, &lines[i], together * n);
    for (int64_t line = from; line < to; line += together) {
        const int64_t count = (to - line < together ? to - line : together) * n;
        const char *const *x = elements(j, w, base + line * n, count, base + to * n);
        for (int i = 0; i < j->n_ends; i++) j->ends[i].r->each->columns[j->ends[i].as](&lines[i], x[i], count, NULL);
    }
    for (int i = 0; i < j->n_ends; i++)
        for (int64_t k = 0; k < together; k++)
            j->ends[i].r->join->columns[j->ends[i].totals](acc->of[i], (const char *)&lines[i] + k * n * TOTAL, n,
                                                           NULL);
}

/* FOLD_LINES lines of n elements, `stride` apart, whose totals are read and written once. */
static void fold_lines_at_once(const job *j, window *w, int64_t at, int64_t stride, char *acc, int64_t n,
                               const char *shift) {
    const dtype t = j->x->type;
    const bool stored = fold_is_stored(t);
    const int64_t size = (int64_t)dtype_size(t), wide = fold_class_of(t) == FOLD_F32 ? 4 : 8;

    for (int64_t k = 0, some; k < n; k += some) {
        const char *from = (const char *)j->x->data + (at + k) * size;
        some = n - k < LINE_PIECE ? n - k : LINE_PIECE;
        for (int i = 0; i < FOLD_LINES; i++) {
            if (stored) prefetch_later(from + (FOLD_LINES + i) * stride * size, some * size);
            else (void)fold_load(t, from, i * stride, some, (char *)&w->buffer + i * LINE_PIECE * wide);
        }
        j->ends[0].r->each->lines[j->ends[0].as](acc + k * TOTAL, stored ? from : (const char *)&w->buffer, some,
                                                 stored ? stride : LINE_PIECE, shift ? shift + k * TOTAL : NULL);
    }
}

static void fold_columns(const job *j, window *w, int64_t base, int64_t from, int64_t to, const totals *acc, int64_t n,
                         const void *shift) {
    const layout *l = &j->l;
    const int64_t together = shift ? 1 : lines_together(l, n, to - from);
    const bool adjacent = n == l->inner && l->folded.rank == 1 && l->folded.stride[0] == n;

    if (together > 1) {
        fold_lines(j, w, base, from, to, acc, n, together);
        return;
    }
    if (l->folded.rank == 1 && !j->source)
        for (; from + FOLD_LINES <= to; from += FOLD_LINES)
            fold_lines_at_once(j, w, base + from * l->folded.stride[0], l->folded.stride[0], acc->of[0], n, shift);
    for (int64_t row = from; row < to; row++) {
        const int64_t at = base + offset_at(&l->folded, row);
        for (int64_t k = 0, some; k < n; k += some) {
            some = n - k < FOLD_TILE ? n - k : FOLD_TILE;
            const char *const *x = elements(j, w, at + k, some, adjacent && some == n ? base + to * n : at + k + some);
            for (int i = 0; i < j->n_ends; i++)
                j->ends[i].r->each->columns[j->ends[i].as](acc->of[i] + k * TOTAL, x[i], some, shift);
        }
    }
}

static void fold_parts_with(void *arg, int64_t begin, int64_t stop, void *scratch) {
    const job *j = arg;
    const layout *l = &j->l;
    fold_tile local[FOLD_ENDS];
    window w = {.to = 0, .scratch = scratch};

    if (j->source) j->source->begin(j->source->arg, scratch);
    for (int64_t i = begin; i < stop; i++) {
        int64_t part = i % l->parts, task = i / l->parts, n, at = place(l, task, &n);
        int64_t from = l->length * part / l->parts, to = l->length * (part + 1) / l->parts;
        const char *shift = j->shift ? j->shift + at * TOTAL : NULL;
        totals acc;

        for (int e = 0; e < j->n_ends; e++) {
            acc.of[e] = is_joined(l) ? j->ends[e].partial + i * l->width * TOTAL : (char *)&local[e];
            start(&j->ends[e], j->ends[e].r->each, acc.of[e], n);
        }
        if (l->inner_folded && !l->folded.rank && l->inner && l->inner <= SHORT_ROW)
            fold_short_rows(j, &w, at, n, &acc, shift);
        else if (l->inner_folded) fold_rows(j, &w, at, n, from, to, &acc, shift);
        else
            fold_columns(j, &w, offset_at(&l->kept, task / l->pieces) + task % l->pieces * l->width, from, to, &acc, n,
                         shift);
        for (int e = 0; e < j->n_ends && !is_joined(l); e++) deliver(j, &j->ends[e], at, acc.of[e], n);
    }
}

static void fold_parts(void *arg, int64_t begin, int64_t stop) { fold_parts_with(arg, begin, stop, NULL); }

static void join_parts(void *arg, int64_t begin, int64_t stop) {
    const job *j = arg;
    const layout *l = &j->l;
    fold_tile acc;

    for (int64_t task = begin; task < stop; task++)
        for (int i = 0; i < j->n_ends; i++) {
            const end *e = &j->ends[i];
            int64_t n, at = place(l, task, &n);
            for (int64_t k = 0, some; k < n; k += some) {
                some = n - k < FOLD_TILE ? n - k : FOLD_TILE;
                start(e, e->r->join, &acc, some);
                for (int64_t part = 0; part < l->parts; part++)
                    e->r->join->columns[e->totals](&acc, e->partial + ((task * l->parts + part) * l->width + k) * TOTAL,
                                                   some, NULL);
                deliver(j, e, at + k, &acc, some);
            }
        }
}

static int64_t grain_of(const layout *l) { return parallel_rows(l->length / l->parts * l->width); }

static void join(job *j) {
    const layout *l = &j->l;
    if (is_joined(l)) parallel_for(l->tasks, parallel_rows(l->parts * l->width), join_parts, j);
}

static void run_job(job *j) {
    parallel_for(j->l.tasks * j->l.parts, grain_of(&j->l), fold_parts, j);
    join(j);
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
    return is_joined(l) ? (size_t)(l->tasks * l->parts * l->width) * TOTAL : 0;
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

static end end_of(const reduction *r, dtype type, const tensor *out, char *partial) {
    end e = {.r = r, .out = out, .as = fold_class_of(type), .partial = partial};
    e.totals = e.as == FOLD_I64 ? FOLD_I64 : FOLD_F64;
    return e;
}

static job job_of(const call *k, const reduction *r) {
    return (job){.l = layout_of_node(k->node),
                 .x = &k->in[0],
                 .n_ends = 1,
                 .ends = {end_of(r, k->in[0].type, &k->out[0], k->work)}};
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
    static const reduction name##_reduction = {&fold_##each_, &fold_##join_, finish_};                                 \
    status name(ctx *c, const call *k) {                                                                               \
        (void)c;                                                                                                       \
        return reduce(k, &name##_reduction);                                                                           \
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

/* --- of what is not in memory --------------------------------------------------------------------------------------- */

const reduction *reduction_of(const op_def *op) {
#define OF(name)                                                                                                       \
    {                                                                                                                  \
        name, &name##_reduction                                                                                        \
    }
    static const struct {
        kernel_fn *kernel;
        const reduction *r;
    } known[] = {OF(reduce_sum_cpu), OF(reduce_mean_cpu),       OF(reduce_max_cpu),
                 OF(reduce_min_cpu), OF(reduce_prod_cpu),       OF(reduce_l1_cpu),
                 OF(reduce_l2_cpu),  OF(reduce_sum_square_cpu), OF(reduce_log_sum_cpu)};
#undef OF
    for (size_t i = 0; i < sizeof known / sizeof *known; i++)
        if (op->cpu == known[i].kernel) return known[i].r;
    return NULL;
}

int64_t fold_run(const shape *s, unsigned axes) {
    const layout l = layout_of_source(s, axes);
    const int last = l.kept.rank - 1;

    /* What is kept is outside of all that is folded, or inside. */
    if (l.inner_folded ? l.folded.rank > 0 : l.folded.rank != 1) return 0;
    if (!l.inner_folded && last >= 0 && l.kept.stride[last] < l.folded.stride[0]) return 0;
    if (l.inner > FOLD_TILE) return FOLD_TILE;
    return clamp(FOLD_TILE / clamp(l.inner, 1, FOLD_TILE), 1, l.inner_folded ? l.width : l.length) * l.inner;
}

size_t fold_source_workspace(const shape *s, unsigned axes, int n_ends) {
    layout l = layout_of_source(s, axes);
    return partial_bytes(&l) * (size_t)n_ends;
}

static job job_from(const fold_source *source, const shape *s, unsigned axes, int n_ends, const reduction *const *r,
                    const tensor *const *out, void *work) {
    job j = {.l = layout_of_source(s, axes), .source = source, .n_ends = n_ends};

    for (int i = 0; i < n_ends; i++)
        j.ends[i] = end_of(r[i], out[i]->type, out[i], (char *)work + (size_t)i * partial_bytes(&j.l));
    return j;
}

status fold_from(ctx *c, const fold_source *source, const shape *s, unsigned axes, int n_ends,
                 const reduction *const *r, const tensor *const *out, void *work) {
    job j = job_from(source, s, axes, n_ends, r, out, work);

    TRY(parallel_for_with(c, j.l.tasks * j.l.parts, grain_of(&j.l), source->bytes, fold_parts_with, &j));
    join(&j);
    return OK;
}

void fold_from_here(const fold_source *source, const shape *s, unsigned axes, int n_ends, const reduction *const *r,
                    const tensor *const *out, void *work, void *scratch) {
    job j = job_from(source, s, axes, n_ends, r, out, work);

    if (j.l.tasks * j.l.parts > 0) fold_parts_with(&j, 0, j.l.tasks * j.l.parts, scratch);
    if (is_joined(&j.l)) join_parts(&j, 0, j.l.tasks);
}

/* --- with a shift --------------------------------------------------------------------------------------------------- */

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
    j.ends[0].r = &sum;
    j.shift = (const char *)shift;
    j.raw = NULL;
    run_job(&j);
    return OK;
}
