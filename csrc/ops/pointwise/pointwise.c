/* pointwise.c -- runs the loop behind every pointwise operator.
 *
 * The output is cut into ranges, one a thread, and ranges into tiles. For each tile every operand becomes a pointer to
 * elements of its class: the operand's own memory when it lies there as needed; a buffer filled once a range when the
 * operand repeats after at most a tile (scalars, a bias over the last axis); else a buffer into which the tile is
 * gathered and widened. The result goes where it belongs, through a buffer when its type is narrow.
 *
 * The output may be the memory of operand 0 or 1 of the same type and shape: then that operand is read at the places
 * that are written, and before they are written. */
#include "ops/pointwise/pointwise.h"

#include "core/stream.h"
#include "ops/pointwise/lookup.h"

#include <stdio.h>
#include <string.h>

/* --- the operator ------------------------------------------------------------------------------------------------- */

tile_fn *tile_function(const op_def *op, dtype last_operand, dtype output) {
    const pointwise_def *def = op->pointwise;
    if (def->choose) return def->choose(tile_class_of(last_operand), tile_class_of(output));
    return def->fn[tile_class_of(last_operand)];
}

void tile_parameters(const node *n, double param[TILE_PARAMS]) {
    const char *const *names = n->op->pointwise->params;
    for (int i = 0; i < TILE_PARAMS; i++) param[i] = names[i] ? node_float(n, names[i]) : 0;
}

typedef struct job {
    tile_fn *fn;
    int n_in;
    tile_source in[TILE_OPERANDS];
    double param[TILE_PARAMS];
    dtype type;
    char *out;
    bool streams;
} job;

static void run_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    const bool direct = tile_is_native(j->type);
    int64_t size = (int64_t)dtype_size(j->type);
    tile_buffer in[TILE_OPERANDS], out;

    for (int i = 0; i < j->n_in; i++) tile_begin(&j->in[i], end - begin < TILE ? end - begin : TILE, &in[i]);
    for (int64_t start = begin; start < end; start += TILE) {
        int64_t n = end - start < TILE ? end - start : TILE;
        const void *tiles[TILE_OPERANDS];
        char *to = j->out + start * size;

        for (int i = 0; i < j->n_in; i++) tiles[i] = tile_read(&j->in[i], start, n, &in[i]);
        j->fn(n, direct ? (void *)to : out.bytes, tiles, j->param);
        if (!direct) tile_store(j->type, out.bytes, n, to, j->streams);
    }
    if (j->streams) end_streams();
}

/* --- costly functions of bfloat16, looked up -------------------------------------------------------------------------- */

size_t pointwise_workspace(const node *n) {
    const value *last = n->in[n->n_in - 1], *out = n->out[0];

    if (!last || shape_count(&out->shape) < LOOKUP_LEAST) return 0;
    return lookup_of(n->op, last->type, out->type) == NO_LOOKUP ? 0 : LOOKUP_BYTES;
}

typedef struct lookup_job {
    const float *table;
    const bf16 *x, *y;
    bf16 *out;
} lookup_job;

static void look_up(void *arg, int64_t begin, int64_t end) {
    const lookup_job *l = arg;
    lookup_elements(l->table, end - begin, l->x ? l->x + begin : NULL, l->y + begin, l->out + begin);
}

/* False where an operand is not elements in a row, one for each of the result's. */
static bool runs_as_lookup(const job *j, const call *k) {
    const tensor *out = &k->out[0];
    const lookup_kind kind = lookup_of(k->node->op, k->in[k->n_in - 1].type, out->type);
    lookup_job l = {.table = k->work, .out = out->data};

    if (kind == NO_LOOKUP || tensor_count(out) < LOOKUP_LEAST) return false;
    for (int i = 0; i < j->n_in; i++)
        if (j->in[i].rank != 1 || j->in[i].stride[0] != 1) return false;
    l.y = k->in[k->n_in - 1].data;
    if (kind == LOOKUP_SLOPE) l.x = k->in[0].data;
    lookup_make(kind, j->fn, j->param, k->work);
    parallel_for(tensor_count(out), GRAIN, look_up, &l);
    return true;
}

status pointwise_cpu(ctx *c, const call *k) {
    const tensor *out = &k->out[0];
    const tensor *last = &k->in[k->n_in - 1];
    job j = {.n_in = k->n_in, .type = out->type, .out = out->data};

    j.fn = tile_function(k->node->op, last->type, out->type);
    if (!j.fn) return fail(c, E_UNSUPPORTED, "%s does not compute %s", k->node->op->name, dtype_name(last->type));
    for (int i = 0; i < k->n_in; i++) j.in[i] = tile_source_of(&k->in[i], &out->shape);
    tile_parameters(k->node, j.param);
    j.streams = tile_streams(out, k->in, k->n_in);
    if (k->work && runs_as_lookup(&j, k)) return OK;
    parallel_for(tensor_count(out), GRAIN, run_range, &j);
    return OK;
}

/* --- inference ---------------------------------------------------------------------------------------------------- */

status infer_pointwise(graph *g, node *n) {
    for (int i = 0; i < n->n_in; i++) TRY(require(g, n, i));
    return infer_broadcast(g, n);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

static status grad_with(graph *g, const node *n, value *dy, value *v, value **dx) {
    char name[64];
    snprintf(name, sizeof name, "%sGrad", n->op->name);
    return emit_with(g, dx, name, n->attrs, dy, v);
}

status pointwise_grad_x(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_with(g, n, dy[0], n->in[0], &dx[0]);
}

status pointwise_grad_y(graph *g, const node *n, value *const dy[], value *dx[]) {
    return grad_with(g, n, dy[0], n->out[0], &dx[0]);
}
