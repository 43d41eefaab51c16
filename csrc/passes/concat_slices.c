/* concat_slices.c -- StridedSlice(Concat(a, b, ...))  ->  StridedSlice(b)        where it lies in b alone
 *                    Concat(StridedSlice(x), StridedSlice(x), ...)  ->  Concat(StridedSlice(x), ...)
 *
 * where neighbours in the result were neighbours in x. Nothing is joined to be taken apart again, nor the other way
 * round. It runs before there is a gradient, so that this has neither, and behind concat_gradient, whose pieces are
 * often cut out again. */
#include "passes/pipeline.h"

#include "ops/op.h"

#include <string.h>

/* Of a StridedSlice: a number for each axis. */
typedef struct box {
    const int64_t *start, *step;
    const shape *counts;
} box;

static box box_of(const node *n) {
    box b = {.counts = &n->out[0]->shape};
    node_ints(n, "starts", &b.start);
    node_ints(n, "steps", &b.step);
    return b;
}

static status axis_of(graph *g, const node *concat, int *axis) {
    return shape_axis(g->c, node_int(concat, "axis"), concat->out[0]->shape.rank, axis);
}

/* Where the operands of a Concat begin in it: of the one that was asked for last, since its slices follow one another. */
typedef struct places {
    const node *concat;
    int64_t *at; /* [n_in + 1] */
    int room;
} places;

static status find_places(graph *g, const node *concat, int axis, places *p) {
    if (p->concat == concat) return OK;
    if (concat->n_in >= p->room) {
        p->room = 2 * concat->n_in + 1;
        TRY(NEW(g->scratch, p->at, p->room));
    }
    p->concat = concat;
    for (int i = 0; i < concat->n_in; i++) {
        const shape *s = &concat->in[i]->shape;
        p->at[i + 1] = p->at[i] + (shape_count(s) ? s->dim[axis] : 0); /* a vector of nothing has any rank */
    }
    return OK;
}

/* The operand that all of the slice lies in, and where in it the slice begins. */
static value *find_operand(const places *p, int axis, const box *b, int64_t *start) {
    const int64_t first = b->start[axis], last = first + (b->counts->dim[axis] - 1) * b->step[axis];
    int low = 0, high = p->concat->n_in;

    if (!shape_count(b->counts)) return NULL;
    while (high - low > 1) { /* the last one that begins at or before `first` */
        const int middle = (low + high) / 2;
        *(p->at[middle] <= first ? &low : &high) = middle;
    }
    *start = first - p->at[low];
    return last >= p->at[low] && last < p->at[low + 1] ? p->concat->in[low] : NULL;
}

static status slice_operand(graph *g, const node *n, places *p, value **out) {
    const box b = box_of(n);
    int64_t start[MAX_RANK], first;
    value *x = n->in[0];
    int axis;

    memcpy(start, b.start, (size_t)b.counts->rank * sizeof *start);
    while (value_is(x, "Concat")) {
        TRY(axis_of(g, x->def, &axis));
        TRY(find_places(g, x->def, axis, p));
        value *operand = find_operand(p, axis, &(box){start, b.step, b.counts}, &first);
        if (!operand) break;
        x = operand;
        start[axis] = first;
    }
    return x == n->in[0] ? OK : emit_slice(g, x, start, b.counts, b.step, out);
}

/* Does `next` go on along `axis` where `first` ends, in the same value? */
static bool goes_on(const value *first, const value *next, int axis) {
    if (!value_is(first, "StridedSlice") || !value_is(next, "StridedSlice")) return false;
    if (first->def->in[0] != next->def->in[0]) return false;
    const box a = box_of(first->def), b = box_of(next->def);
    if (a.step[axis] != 1 || b.step[axis] != 1 || b.start[axis] != a.start[axis] + a.counts->dim[axis]) return false;
    for (int i = 0; i < a.counts->rank; i++)
        if (i != axis && (a.start[i] != b.start[i] || a.step[i] != b.step[i] || a.counts->dim[i] != b.counts->dim[i]))
            return false;
    return true;
}

/* The operands of a Concat with neighbours together; how many are left. */
static status join_neighbours(graph *g, const node *n, int axis, value **kept, int *left) {
    *left = 0;
    for (int i = 0, end; i < n->n_in; i = end) {
        value *joined = n->in[i];
        end = i + 1;
        while (end < n->n_in && goes_on(n->in[end - 1], n->in[end], axis)) end++;
        if (end > i + 1) {
            const box b = box_of(joined->def);
            shape counts = *b.counts;
            for (int k = i + 1; k < end; k++) counts.dim[axis] += n->in[k]->shape.dim[axis];
            TRY(emit_slice(g, joined->def->in[0], b.start, &counts, b.step, &joined));
        }
        kept[(*left)++] = joined;
    }
    return OK;
}

static status concat_fewer(graph *g, const node *n, value **out) {
    value **kept;
    int axis, left;

    TRY(axis_of(g, n, &axis));
    TRY(NEW(g->scratch, kept, n->n_in));
    TRY(join_neighbours(g, n, axis, kept, &left));
    if (left == n->n_in) return OK;
    return graph_emit(g, "Concat", n->attrs, left, kept, 1, out);
}

static status run_all(graph *g, int *fired) {
    places p = {0};

    for (node *n = g->first; n; n = n->next) {
        value *out = NULL;
        pass_emits(g, n, n);
        if (node_is(n, "Concat")) TRY(concat_fewer(g, n, &out));
        else if (node_is(n, "StridedSlice")) TRY(slice_operand(g, n, &p, &out));
        if (!out) continue;
        TRY(graph_replace(g, n->out[0], out));
        ++*fired;
    }
    return OK;
}

static status run(graph *g, int *fired) { return pass_end(g, run_all(g, fired)); }

const pass_def concat_slices = {.name = "concat_slices", .stage = BEFORE_GRADIENT | AFTER_GRADIENT, .run = run};
