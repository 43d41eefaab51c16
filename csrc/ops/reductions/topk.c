/* topk.c -- finds the k largest or smallest elements along an axis, in order, and where they were: TopK.
 *
 * Elements are compared by a 64-bit key that orders every type as PyTorch does: NaN above everything, -0 equal to 0.
 * Of equal elements the first comes first, which makes a TopK of everything a stable sort. A few of many are found with
 * a heap of the best so far, the worst of them on top; for many of all, all are sorted by the bytes of their keys, from
 * the last to the first, without those that are the same everywhere. Backward needs the indices: dx is zero but where they point. */
#include "core/parallel.h"
#include "ops/movement/move.h"

#include <inttypes.h>

/* Parts of the lanes; from so many results on sorting all may pay. */
enum { PARTS = 32, SORTED = 128 };

typedef struct candidate {
    uint64_t key;
    int64_t index;
} candidate;

uint64_t order_key(dtype t, const void *data, int64_t i) {
    const uint64_t sign = UINT64_C(1) << 63;
    union {
        double f;
        uint64_t u;
    } v;

    if (!dtype_is_float(t)) return (uint64_t)dtype_get_int(t, data, i) ^ sign;
    v.f = dtype_get(t, data, i) + 0.0; /* -0 becomes 0 */
    if (v.f != v.f) return UINT64_MAX;
    return v.u & sign ? ~v.u : v.u | sign;
}

static bool worse(candidate a, candidate b) { return a.key != b.key ? a.key < b.key : a.index > b.index; }

/* Moves the top of a heap of n down to where it belongs. */
static void settle(candidate *heap, int64_t n) {
    candidate x = heap[0];
    int64_t at = 0;

    for (int64_t child = 1; child < n; child = 2 * at + 1) {
        if (child + 1 < n && worse(heap[child + 1], heap[child])) child++;
        if (!worse(heap[child], x)) break;
        heap[at] = heap[child];
        at = child;
    }
    heap[at] = x;
}

static void lift(candidate *heap, int64_t at) {
    candidate x = heap[at];
    while (at > 0 && worse(x, heap[(at - 1) / 2])) {
        heap[at] = heap[(at - 1) / 2];
        at = (at - 1) / 2;
    }
    heap[at] = x;
}

typedef struct top_k {
    const tensor *x, *values, *indices;
    int64_t k, size, inner, lanes, parts;
    bool smallest, sorts;
    int64_t held;    /* candidates of a part: a heap of k, or all of a lane twice */
    candidate *work; /* [parts, held] */
} top_k;

/* Element i of a lane is the one at place `nth` of its results. */
static inline void deliver(const top_k *p, int64_t from, int64_t to, int64_t i, int64_t nth) {
    const size_t bytes = dtype_size(p->x->type), at = (size_t)(to + nth * p->inner);
    if (tensor_present(p->values))
        copy_item((char *)p->values->data + at * bytes,
                  (const char *)p->x->data + (size_t)(from + i * p->inner) * bytes, bytes);
    if (tensor_present(p->indices)) ((int64_t *)p->indices->data)[at] = i;
}

enum { KEY_BYTES = 8, DIGITS = 256 };

/* The best first: by keys turned round, unless the smallest are the best. */
static void sort_lane(const top_k *p, int64_t from, int64_t to, candidate *a) {
    candidate *b = a + p->size;
    int64_t count[KEY_BYTES][DIGITS] = {{0}};

    for (int64_t i = 0; i < p->size; i++) {
        const uint64_t key = order_key(p->x->type, p->x->data, from + i * p->inner);
        a[i] = (candidate){p->smallest ? key : ~key, i};
        for (int d = 0; d < KEY_BYTES; d++) count[d][a[i].key >> 8 * d & 255]++;
    }
    for (int d = 0; d < KEY_BYTES; d++) {
        if (count[d][a[0].key >> 8 * d & 255] == p->size) continue;
        for (int64_t digit = 0, before = 0; digit < DIGITS; digit++) {
            const int64_t here = count[d][digit];
            count[d][digit] = before;
            before += here;
        }
        for (int64_t i = 0; i < p->size; i++) b[count[d][a[i].key >> 8 * d & 255]++] = a[i];
        candidate *sorted = b;
        b = a;
        a = sorted;
    }
    for (int64_t i = 0; i < p->k; i++) deliver(p, from, to, a[i].index, i);
}

static void top_of_lane(const top_k *p, int64_t lane, candidate *heap) {
    const int64_t outer = lane / p->inner, column = lane % p->inner;
    const int64_t from = outer * p->size * p->inner + column, to = outer * p->k * p->inner + column;

    if (p->sorts) {
        sort_lane(p, from, to, heap);
        return;
    }
    for (int64_t i = 0; i < p->size; i++) {
        uint64_t key = order_key(p->x->type, p->x->data, from + i * p->inner);
        candidate x = {p->smallest ? ~key : key, i};
        if (i < p->k) {
            heap[i] = x;
            lift(heap, i);
        } else if (worse(heap[0], x)) {
            heap[0] = x;
            settle(heap, p->k);
        }
    }
    for (int64_t n = p->k; n > 0; n--) { /* the worst of those left goes last */
        deliver(p, from, to, heap[0].index, n - 1);
        heap[0] = heap[n - 1];
        settle(heap, n - 1);
    }
}

static void top_of_parts(void *arg, int64_t begin, int64_t end) {
    const top_k *p = arg;
    for (int64_t part = begin; part < end; part++)
        for (int64_t lane = p->lanes * part / p->parts; lane < p->lanes * (part + 1) / p->parts; lane++)
            top_of_lane(p, lane, p->work + part * p->held);
}

/* --- the operator ------------------------------------------------------------------------------------------------- */

static status infer_top_k(graph *g, node *n) {
    const int64_t *k;
    int64_t size;
    int axis, count;
    shape s;

    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    s = n->in[0]->shape;
    TRY(value_ints(g, n->in[1], "the k of TopK", &count, &k));
    TRY(shape_axis(g->c, node_int(n, "axis"), s.rank, &axis));
    size = s.rank ? s.dim[axis] : 1;
    if (count != 1 || k[0] < 0 || k[0] > size)
        return fail(g->c, E_SHAPE, "TopK of %" PRId64 " among %" PRId64 " elements", count == 1 ? k[0] : -1, size);
    if (s.rank) s.dim[axis] = k[0];
    else if (k[0] != 1) return fail(g->c, E_SHAPE, "TopK of 0 elements of a scalar");
    TRY(set_out(g, n, 0, n->in[0]->type, &s));
    return set_out(g, n, 1, I64, &s);
}

static status grad_top_k(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *base;
    if (!dy[0]) return OK;
    TRY(zeros_like(g, n->in[0], &base));
    return emit_with(g, &dx[0], "ScatterElements", NODE_ATTRS(INT("axis", node_int(n, "axis"))), base, n->out[1],
                     dy[0]);
}

/* Sizes along the axis: k, all, and what is inside it. */
static top_k read_top_k(const node *n) {
    const shape *x = &n->in[0]->shape, *y = &n->out[0]->shape;
    int64_t axis = node_int(n, "axis");
    top_k p = {.k = 1, .size = 1, .inner = 1, .smallest = node_int(n, "largest") == 0};

    if (x->rank) {
        if (axis < 0) axis += x->rank;
        p.k = y->dim[axis];
        p.size = x->dim[axis];
        p.inner = shape_span(x, (int)axis + 1, x->rank);
    }
    p.lanes = p.k ? shape_count(y) / p.k : 0;
    p.parts = p.lanes < PARTS ? p.lanes : PARTS;
    p.sorts = p.k >= SORTED && p.k >= p.size / 8;
    p.held = p.sorts ? 2 * p.size : p.k;
    return p;
}

static size_t top_k_bytes(const node *n) {
    top_k p = read_top_k(n);
    return (size_t)(p.parts * p.held + 1) * sizeof(candidate);
}

static status top_k_cpu(ctx *c, const call *k) {
    top_k p = read_top_k(k->node);

    (void)c;
    p.x = &k->in[0];
    p.values = &k->out[0];
    p.indices = &k->out[1];
    p.work = k->work;
    if (p.lanes) parallel_for(p.parts, p.parts * GRAIN / (4 * p.lanes * p.size) + 1, top_of_parts, &p);
    return OK;
}

/* clang-format off */
kernel_fn top_k_cuda; /* cuda/kernels/topk.cu */
size_t top_k_cuda_workspace(const node *n);

const op_def topk_ops[] = {
    {ONNX("TopK", 10, 2, 2, 2, NUMBERS), .plain = ALL_OPERANDS,
     .attrs = NODE_ATTRS(INT("axis", -1), INT("largest", 1), INT("sorted", 1)),
     .infer = infer_top_k, .grad = grad_top_k, .workspace = top_k_bytes, .cpu = top_k_cpu,
     .cuda_workspace = top_k_cuda_workspace, .cuda = top_k_cuda},
    {0},
};
/* clang-format on */
