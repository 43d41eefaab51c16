/* spatial.c -- computes the geometry of sliding windows; see spatial.h. */
#include "ops/spatial/spatial.h"

#include <inttypes.h>
#include <string.h>

shape spatial_shape(int64_t images, int64_t channels, int rank, const int64_t size[SPATIAL]) {
    shape s = {.rank = 2 + rank, .dim = {images, channels}};
    for (int i = 0; i < rank; i++) s.dim[2 + i] = size[SPATIAL - rank + i];
    return s;
}

void spatial_axes(const shape *x, int64_t size[SPATIAL]) {
    int rank = x->rank - 2;
    for (int i = 0; i < SPATIAL; i++) size[i] = i < SPATIAL - rank ? 1 : x->dim[2 + i - (SPATIAL - rank)];
}

status shape_attr(ctx *c, const node *n, const char *name, shape *out) {
    const int64_t *dims;
    int rank = node_ints(n, name, &dims);

    if (rank < 0 || rank > MAX_RANK) return fail(c, E_INVALID, "%s without the attribute %s", n->op->name, name);
    *out = (shape){.rank = rank};
    if (rank) memcpy(out->dim, dims, sizeof(int64_t) * (size_t)rank);
    return shape_check(c, out);
}

/* An attribute with one positive number an axis, right-aligned; 1 where there is none. */
static status read_axes(ctx *c, const node *n, const char *name, int rank, int64_t out[SPATIAL]) {
    const int64_t *given;
    int count = node_ints(n, name, &given);

    for (int i = 0; i < SPATIAL; i++) out[i] = 1;
    if (count <= 0) return OK;
    if (count != rank) return fail(c, E_INVALID, "%s has %d %s for %d spatial axes", n->op->name, count, name, rank);
    for (int i = 0; i < rank; i++) {
        if (given[i] < 1 || given[i] > INT32_MAX)
            return fail(c, E_INVALID, "%s: %s cannot be %" PRId64, n->op->name, name, given[i]);
        out[SPATIAL - rank + i] = given[i];
    }
    return OK;
}

static status read_pads(ctx *c, const node *n, int rank, window *w) {
    const int64_t *pads;
    int count = node_ints(n, "pads", &pads);

    if (count <= 0) return OK;
    if (count != 2 * rank) return fail(c, E_INVALID, "%s has %d pads for %d spatial axes", n->op->name, count, rank);
    for (int i = 0; i < rank; i++) {
        w->before[SPATIAL - rank + i] = pads[i];
        w->after[SPATIAL - rank + i] = pads[rank + i];
        if (pads[i] < 0 || pads[i] > INT32_MAX || pads[rank + i] < INT32_MIN || pads[rank + i] > INT32_MAX)
            return fail(c, E_INVALID, "%s: pads cannot be %" PRId64 " and %" PRId64, n->op->name, pads[i],
                        pads[rank + i]);
    }
    return OK;
}

int64_t window_span(const window *w, int i) { return size_add(size_mul(w->dilation[i], w->kernel[i] - 1), 1); }

/* Number of outputs along axis i, by PyTorch's rule: with `ceil` the last window may hang over the end, but must begin
 * within the input or the padding before it. */
static int64_t count_outputs(const window *w, int i, bool ceil) {
    const int64_t from = size_add(w->in[i], w->before[i]);
    int64_t room = size_add(size_add(from, w->after[i]), -window_span(w, i)), out;

    if (ceil) room = size_add(room, w->stride[i] - 1);
    if (room < 0) return 0;
    out = room / w->stride[i] + 1;
    if (ceil && (out - 1) * w->stride[i] >= from) out--;
    return out;
}

/* SAME_UPPER and SAME_LOWER: as many outputs as strides fit into the input. */
static void pad_to_same(window *w, int i, bool upper) {
    const int64_t out = (w->in[i] + w->stride[i] - 1) / w->stride[i];
    int64_t total = size_add(size_mul(out - 1, w->stride[i]), window_span(w, i) - w->in[i]);

    if (total < 0) total = 0;
    w->before[i] = upper ? total / 2 : total - total / 2;
    w->after[i] = total - w->before[i];
}

/* Pools look at each element of a window: one that is huge, and nearly all of it over padding, would not end. */
static status check_kernel(ctx *c, const node *n, const window *w) {
    enum { SMALL = 1 << 16 };
    double elements = (double)w->kernel[0] * (double)w->kernel[1] * (double)w->kernel[2];

    if (elements <= SMALL || elements <= 8 * (double)volume(w->in)) return OK;
    return fail(c, E_UNSUPPORTED, "%s: a window of %.0f elements over %" PRId64 " pixels", n->op->name, elements,
                volume(w->in));
}

status window_numbers(ctx *c, const node *n, const shape *x, const int64_t *kernel, window *out) {
    int rank = x->rank - 2;
    window w = {.rank = rank};

    if (rank < 1 || rank > SPATIAL)
        return fail(c, rank < 1 ? E_SHAPE : E_UNSUPPORTED,
                    "%s has one to three spatial axes; a tensor of rank %d has %d", n->op->name, x->rank, rank);
    spatial_axes(x, w.in);
    for (int i = 0; i < SPATIAL; i++)
        if (w.in[i] > INT32_MAX) return fail(c, E_UNSUPPORTED, "%s of more than 2^31 pixels in a row", n->op->name);
    TRY(read_axes(c, n, "strides", rank, w.stride));
    TRY(read_axes(c, n, "dilations", rank, w.dilation));
    TRY(read_axes(c, n, "kernel_shape", rank, w.kernel));
    TRY(read_pads(c, n, rank, &w));
    for (int i = 0; kernel && i < rank; i++) {
        int64_t *written = &w.kernel[SPATIAL - rank + i];
        if (node_has(n, "kernel_shape") && *written != kernel[i])
            return fail(c, E_SHAPE, "%s: kernel_shape says %" PRId64 " where the weights have %" PRId64, n->op->name,
                        *written, kernel[i]);
        if (kernel[i] < 1 || kernel[i] > INT32_MAX)
            return fail(c, E_SHAPE, "%s: a window of %" PRId64 " elements", n->op->name, kernel[i]);
        *written = kernel[i];
    }
    if (!kernel) TRY(check_kernel(c, n, &w));
    *out = w;
    return OK;
}

status window_of(ctx *c, const node *n, const shape *x, const int64_t *kernel, window *out) {
    const char *auto_pad = node_string(n, "auto_pad");
    bool ceil = node_int(n, "ceil_mode") != 0, same = strncmp(auto_pad, "SAME_", 5) == 0;
    window w;

    TRY(window_numbers(c, n, x, kernel, &w));
    for (int i = SPATIAL - w.rank; i < SPATIAL; i++) {
        if (same) pad_to_same(&w, i, strcmp(auto_pad, "SAME_UPPER") == 0);
        else if (strcmp(auto_pad, "VALID") == 0) w.before[i] = w.after[i] = 0;
    }
    for (int i = 0; i < SPATIAL; i++) {
        w.out[i] = count_outputs(&w, i, ceil);
        if (w.out[i] <= 0 && w.in[i] > 0)
            return fail(c, E_SHAPE, "%s: a window of %" PRId64 " elements is larger than the %" PRId64 " of axis %d",
                        n->op->name, window_span(&w, i), w.in[i], i + w.rank - SPATIAL + 2);
    }
    *out = w;
    return OK;
}

void window_to_attrs(const window *w, window_attrs *out) {
    int rank = w->rank;
    const attr *list = NODE_ATTRS(INTS("strides", rank, out->strides), INTS("dilations", rank, out->dilations),
                                  INTS("pads", 2 * rank, out->pads), INTS("kernel_shape", rank, out->kernel));

    for (int i = 0; i < rank; i++) {
        int from = SPATIAL - rank + i;
        out->strides[i] = w->stride[from];
        out->dilations[i] = w->dilation[from];
        out->pads[i] = w->before[from];
        out->pads[rank + i] =
            size_add(size_mul(w->out[from] - 1, w->stride[from]), window_span(w, from) - w->in[from] - w->before[from]);
        out->kernel[i] = w->kernel[from];
    }
    memcpy(out->list, list, sizeof out->list);
}

static int64_t ceil_div(int64_t a, int64_t b) { return a <= 0 ? -(-a / b) : (a + b - 1) / b; }

void window_reach(const window *w, int axis, int64_t i, int64_t *first, int64_t *last) {
    int64_t shift = i * w->dilation[axis] - w->before[axis]; /* input = output * stride + shift */

    *first = ceil_div(-shift, w->stride[axis]);
    *last = ceil_div(w->in[axis] - shift, w->stride[axis]);
    if (*first < 0) *first = 0;
    if (*last > w->out[axis]) *last = w->out[axis];
    if (*last < *first) *last = *first;
}

status lower_to_f32(graph *g, const node *n, value **out) {
    value **in;
    dtype type = n->n_in && n->in[0] ? n->in[0]->type : DT_NONE;

    if (!dtype_is_narrow(type)) return OK;
    TRY(NEW(g->c, in, n->n_in));
    for (int i = 0; i < n->n_in; i++) {
        in[i] = n->in[i];
        if (in[i] && in[i]->type == type) TRY(emit_cast(g, in[i], F32, &in[i]));
    }
    TRY(graph_emit_op(g, n->op, n->attrs, n->n_in, in, n->n_out, out));
    for (int i = 0; i < n->n_out; i++)
        if (out[i] && out[i]->type == F32) TRY(emit_cast(g, out[i], type, &out[i]));
    return OK;
}
