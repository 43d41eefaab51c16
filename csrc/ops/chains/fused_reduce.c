/* fused_reduce.c -- runs FusedReduce: a chain of pointwise operators whose values are folded as they are made, and
 * FusedReduceRandom, the same with a dropout among its steps.
 *
 * To the program of a Fused (ops/chains/fused.c) it adds what becomes of some of its steps, all along the same axes:
 *     FusedReduce(x, y, steps="Sub Mul", operands=[0, 1, 2, 2], results=[], folds="ReduceMean", folded=[1], axes=[0, 1])
 * is the mean of (x - y)^2. The results come first, then the totals, which keep the folded axes with size 1. The kernel
 * of the reductions asks for tiles (ops/reductions/reduce_kernel.h), the chain makes them: so parts, order and bits are those of the
 * operators one by one, and what is only folded is never in memory. */
#include "ops/chains/fused.h"
#include "ops/reductions/reduce_kernel.h"

_Static_assert((int)TILE == (int)FOLD_TILE, "a tile of a chain is a tile of a fold");
_Static_assert((int)FUSED_FOLDS <= (int)FOLD_ENDS, "each total is an end");

enum { SHORT_RUN = 256 }; /* elements: what a tile costs by itself is as much as they do */
/* Elements that lie together and are computed by one thread of a GPU, or by a warp of a dropout. */
enum { PIECE = 8, DRAWN = 64 };

kernel_fn reduce_sum_cuda, reduce_mean_cuda; /* cuda/kernels/reduce.cu */

bool fused_fold_space(const shape *s, unsigned axes, fold_space *to) {
    int64_t size[] = {1, 1, 1};
    int at = 0; /* which of the three an axis belongs to */

    for (int d = 0; d < s->rank; d++) {
        const bool is_gone = axes >> d & 1;
        if (s->dim[d] == 1) continue;
        if (is_gone && at == 2) return false;
        if (is_gone != (at == 1)) at++;
        size[at] *= s->dim[d];
    }
    *to = (fold_space){size[0], size[1], size[2]};
    return true;
}

/* Sums and means of neighbouring axes, whose elements are whole pieces in every row. */
static bool folds_on_gpu(const node *n, unsigned axes, bool random) {
    fold_space s;

    if (n->op->cuda != reduce_sum_cuda && n->op->cuda != reduce_mean_cuda) return false;
    if (!fused_fold_space(&n->in[0]->shape, axes, &s) || s.length == 1) return false;
    return (s.inner == 1 ? s.length : s.inner) % (random ? DRAWN : PIECE) == 0;
}

bool fused_folds(const graph *g, const node *n, bool random, unsigned *axes) {
    if (!n->op || !reduction_of(n->op) || !dtype_is_float(n->in[0]->type)) return false;
    const shape *s = &n->in[0]->shape;
    *axes = reduced_axes(n);
    if (shape_count(s) == 0) return false; /* no tile would ever be the last */
    if (g->cuda) return folds_on_gpu(n, *axes, random);
    return fold_run(s, *axes) >= SHORT_RUN || shape_count(s) <= SHORT_RUN;
}

unsigned fused_reduce_axes(const node *n) {
    const attr *axes = node_attr(n, "axes");
    unsigned bits = 0;

    for (int i = 0; i < axes->count; i++) bits |= 1u << axes->ints[i];
    return bits;
}

static int results_of(const node *n) { return node_attr(n, "results")->count; }

/* Of all its elements: that of its results, or where there are none of its first operand. */
const shape *fused_reduce_shape(const node *n) { return results_of(n) ? &n->out[0]->shape : &n->in[0]->shape; }

status infer_fused_reduce(graph *g, node *n) {
    const attr *types = node_attr(n, "types"), *results = node_attr(n, "results"), *folded = node_attr(n, "folded");
    const unsigned axes = fused_reduce_axes(n);
    shape s = SCALAR, total;

    for (int i = 0; i < n->n_in; i++) {
        TRY(require(g, n, i));
        TRY(shape_broadcast(g->c, &s, &n->in[i]->shape, &s));
    }
    if (!results->count && !shape_equal(&n->in[0]->shape, &s))
        return fail(g->c, E_SHAPE, "the first operand of %s is not of the shape of its elements", n->op->name);
    total = s;
    for (int i = 0; i < s.rank; i++)
        if (axes >> i & 1) total.dim[i] = 1;
    for (int i = 0; i < n->n_out; i++) {
        const bool folds = i >= results->count;
        const int64_t step = folds ? folded->ints[i - results->count] : results->ints[i];
        TRY(set_out(g, n, i, (dtype)types->ints[step], folds ? &total : &s));
    }
    return OK;
}

static size_t partial_bytes(const node *n) {
    return (fold_source_workspace(fused_reduce_shape(n), fused_reduce_axes(n), node_attr(n, "folded")->count) + 63) &
           ~(size_t)63;
}

size_t fused_reduce_workspace(const node *n) { return partial_bytes(n) + fused_table_bytes(n, fused_reduce_shape(n)); }

/* --- folding what a chain makes ------------------------------------------------------------------------------------- */

status fused_ends_of(ctx *c, const call *k, int n_results, fused_ends *e) {
    const attr *folded = node_attr(k->node, "folded");
    const char *names = node_string(k->node, "folds");

    *e = (fused_ends){.n = 0};
    for (int i = 0; i < folded->count; i++) {
        const op_def *op = fused_operator(&names);
        if (!op || !reduction_of(op)) return fail(c, E_INVALID, "total %d of a fused chain has no operator", i);
        if (!tensor_present(&k->out[n_results + i])) continue;
        e->r[e->n] = reduction_of(op);
        e->out[e->n] = &k->out[n_results + i];
        e->index[e->n] = i;
        e->step[e->n++] = (int)folded->ints[i];
    }
    return OK;
}

typedef struct job {
    const fused_run *run;
    const fused_ends *ends;
    int64_t first;
} job;

static void begin(const void *arg, void *scratch) { fused_begin(((const job *)arg)->run, scratch); }

static void make(const void *arg, void *scratch, int64_t at, int64_t n, const char **tiles) {
    const job *j = arg;
    fused_tile(j->run, j->first + at, n, scratch);
    for (int i = 0; i < j->ends->n; i++) tiles[i] = fused_made(j->run, scratch, j->ends->step[i]);
}

static fold_source source_of(const job *j) {
    return (fold_source){.arg = j, .bytes = fused_scratch_bytes(j->run), .begin = begin, .make = make};
}

void fused_fold(const fused_run *r, const fused_ends *e, const shape *s, unsigned axes, int64_t first, void *work,
                void *scratch) {
    const job j = {r, e, first};
    const fold_source source = source_of(&j);
    fold_from_here(&source, s, axes, e->n, e->r, e->out, work, scratch);
}

status fused_reduce_cpu(ctx *c, const call *k) {
    fused_run r;
    fused_ends ends;

    TRY(fused_prepare(c, k, fused_reduce_shape(k->node), (char *)k->work + partial_bytes(k->node), &r));
    TRY(fused_ends_of(c, k, results_of(k->node), &ends));
    const job j = {&r, &ends, 0};
    const fold_source source = source_of(&j);
    return fold_from(c, &source, fused_reduce_shape(k->node), fused_reduce_axes(k->node), ends.n, ends.r, ends.out,
                     k->work);
}
