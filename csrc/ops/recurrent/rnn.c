/* rnn.c -- runs RNN, GRU and LSTM.
 *
 * Everything that all steps can share is an ordinary node: the gates' inputs z = x w' + bias are one product over all
 * steps, and so is the gradient of each weight. What is left for a node of its own is the scan over the steps
 * (rnn_scan.c). A bidirectional layer is two scans side by side. */
#include "ops/recurrent/rnn.h"

#include <inttypes.h>
#include <string.h>

#include "ops/movement/move.h"
#include "ops/spatial/spatial.h"

enum { MOST_RESULTS = 6 };

/* --- scans -------------------------------------------------------------------------------------------------------- */

/* z [steps, batch, gates * hidden] and r [gates * hidden, hidden] */
static status check_scan(graph *g, const node *n, int64_t gates) {
    const shape *z = &n->in[0]->shape, *r = &n->in[1]->shape;

    if (z->rank != 3 || r->rank != 2 || z->dim[2] != r->dim[0] || r->dim[0] != gates * r->dim[1])
        return fail(g->c, E_SHAPE, "%s: %" PRId64 " gates do not fit", n->op->name, gates);
    return OK;
}

/* The first four results: kept, y, last h, previous h. */
static status infer_scan(graph *g, node *n, int64_t gates, int64_t kept) {
    const shape *z = &n->in[0]->shape;
    dtype type = n->in[0]->type;

    TRY(check_scan(g, n, gates));
    const int64_t hidden = n->in[1]->shape.dim[1];
    const shape all = SHAPE(z->dim[0], z->dim[1], hidden), last = SHAPE(z->dim[1], hidden);
    TRY(set_out(g, n, 0, type, &SHAPE(z->dim[0], z->dim[1], kept * hidden)));
    TRY(set_out(g, n, 1, type, &all));
    TRY(set_out(g, n, 2, type, &last));
    return set_out(g, n, 3, type, &all);
}

static status infer_rnn_scan(graph *g, node *n) { return infer_scan(g, n, 1, 1); }
static status infer_gru_scan(graph *g, node *n) { return infer_scan(g, n, 3, 4); }

static status infer_lstm_scan(graph *g, node *n) {
    const shape *z = &n->in[0]->shape;

    TRY(infer_scan(g, n, 4, 4));
    const int64_t hidden = n->in[1]->shape.dim[1];
    TRY(set_out(g, n, 4, n->in[0]->type, &SHAPE(z->dim[1], hidden)));
    return set_out(g, n, 5, n->in[0]->type, &SHAPE(z->dim[0], z->dim[1], hidden));
}

/* dz, a state, and something like one of the two. */
static status infer_scan_grad(graph *g, node *n) {
    const shape *kept = &n->in[0]->shape, *r = &n->in[1]->shape;
    const shape state = SHAPE(kept->dim[1], r->dim[1]), all = SHAPE(kept->dim[0], kept->dim[1], r->dim[0]);
    dtype type = n->in[0]->type;

    TRY(set_out(g, n, 0, type, &all));
    TRY(set_out(g, n, 1, type, &state));
    return set_out(g, n, 2, type, r->dim[0] == 3 * r->dim[1] ? &all : &state);
}

/* The products with r, of forward and as many of backward. */
static double flops_scan(const node *n) {
    const shape *all = &n->in[0]->shape;
    return 2 * (double)all->dim[0] * (double)all->dim[1] * (double)shape_count(&n->in[1]->shape);
}

/* dr: d(r h) [steps, batch, gates * hidden] times the h it was made of, summed over steps and batch. */
static status grad_r(graph *g, value *du, value *before, value **out) {
    const shape *u = &du->shape, *h = &before->shape;

    TRY(emit_reshape(g, du, &SHAPE(u->dim[0] * u->dim[1], u->dim[2]), &du));
    TRY(emit_reshape(g, before, &SHAPE(h->dim[0] * h->dim[1], h->dim[2]), &before));
    TRY(emit_transpose(g, du, (int[]){1, 0}, &du));
    return emit(g, out, "MatMul", du, before);
}

static status emit_scan_grad(graph *g, const char *op, const node *n, int n_in, value *const *in, int n_out,
                             value **out) {
    return graph_emit(g, op,
                      NODE_ATTRS(INT("reverse", node_int(n, "reverse")), INT("positive", node_int(n, "positive"))),
                      n_in, in, n_out, out);
}

static status grad_rnn_scan(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[] = {n->out[0], n->in[1], n->in[3], dy[1], dy[2]}, *d[2];

    TRY(emit_scan_grad(g, "RnnScanGrad", n, 5, in, 2, d));
    dx[0] = d[0];
    dx[2] = d[1];
    return need(n, 1) ? grad_r(g, d[0], n->out[3], &dx[1]) : OK;
}

static status grad_gru_scan(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[] = {n->out[0], n->in[1], n->in[3], dy[1], dy[2], n->out[3]}, *d[3];

    TRY(emit_scan_grad(g, "GruScanGrad", n, 6, in, 3, d));
    dx[0] = d[0];
    dx[2] = d[1];
    if (need(n, 4)) TRY(emit_reduce(g, "ReduceSum", d[2], 2, (int64_t[]){0, 1}, false, &dx[4]));
    return need(n, 1) ? grad_r(g, d[2], n->out[3], &dx[1]) : OK;
}

static status grad_lstm_scan(graph *g, const node *n, value *const dy[], value *dx[]) {
    value *in[] = {n->out[0], n->in[1], n->in[3], dy[1], dy[2], dy[4], n->out[5], n->in[4]}, *d[3];

    TRY(emit_scan_grad(g, "LstmScanGrad", n, 8, in, 3, d));
    dx[0] = d[0];
    dx[2] = d[1];
    dx[4] = d[2];
    return need(n, 1) ? grad_r(g, d[0], n->out[3], &dx[1]) : OK;
}

/* --- layers ------------------------------------------------------------------------------------------------------- */

typedef struct layer {
    const char *scan;
    int64_t gates, directions, hidden, batch;
    int results;                               /* of the scan */
    value *x, *w, *r, *bias, *lengths, *h, *c; /* h, c and bias may be NULL */
    const char *activations;                   /* of all directions, between spaces */
} layer;

/* Part `d` of a tensor with a leading axis of directions, or zeros. */
static status part(graph *g, value *v, int64_t d, const shape *s, dtype type, value **out) {
    if (!v) return graph_full(g, type, s, 0, out);
    TRY(emit_slice_axis(g, v, 0, d, 1, &v));
    return emit_reshape(g, v, s, out);
}

/* The two biases of direction d: of z, and of r h. */
static status biases(graph *g, const layer *l, int64_t d, value **of_z, value **of_r) {
    const int64_t width = l->gates * l->hidden;
    value *both;

    TRY(part(g, l->bias, d, &SHAPE(2 * width), l->x->type, &both));
    TRY(emit_slice_axis(g, both, 0, 0, width, of_z));
    return emit_slice_axis(g, both, 0, width, width, of_r);
}

/* Word d of the layer's activations, if there are any: is it `word`? */
static bool activated_by(const layer *l, int64_t d, const char *word) {
    const char *at = l->activations;
    for (; d > 0 && at; d--) at = strchr(at, ' ') ? strchr(at, ' ') + 1 : NULL;
    return at && strncmp(at, word, strlen(word)) == 0;
}

static status run_direction(graph *g, const layer *l, int64_t d, bool reverse, value *results[MOST_RESULTS]) {
    const int64_t width = l->gates * l->hidden, inputs = l->x->shape.dim[2];
    const shape state = SHAPE(l->batch, l->hidden);
    const dtype type = l->x->type;
    value *w, *of_z, *of_r, *in[5] = {NULL, NULL, NULL, l->lengths, NULL};
    bool gru = l->gates == 3, lstm = l->gates == 4;

    TRY(part(g, l->w, d, &SHAPE(width, inputs), type, &w));
    TRY(part(g, l->r, d, &SHAPE(width, l->hidden), type, &in[1]));
    TRY(part(g, l->h, d, &state, type, &in[2]));
    TRY(biases(g, l, d, &of_z, &of_r));
    if (gru) in[4] = of_r;
    else TRY(emit(g, &of_z, "Add", of_z, of_r));
    if (lstm) TRY(part(g, l->c, d, &state, type, &in[4]));
    TRY(emit_transpose(g, w, (int[]){1, 0}, &w));
    TRY(emit(g, &in[0], "MatMulBias", l->x, w, of_z));
    return graph_emit(g, l->scan, NODE_ATTRS(INT("reverse", reverse), INT("positive", activated_by(l, d, "Relu"))),
                      gru || lstm ? 5 : 4, in, l->results, results);
}

/* Results of all directions along a new axis. */
static status stack(graph *g, value *const *parts, int64_t count, int axis, value **out) {
    value *in[2] = {NULL, NULL};

    for (int64_t d = 0; d < count; d++) {
        shape s = parts[d]->shape;
        for (int i = s.rank++; i > axis; i--) s.dim[i] = s.dim[i - 1];
        s.dim[axis] = 1;
        TRY(emit_reshape(g, parts[d], &s, &in[d]));
    }
    *out = in[0];
    return count == 1 ? OK : graph_emit(g, "Concat", NODE_ATTRS(INT("axis", axis)), 2, in, 1, out);
}

static status swap_batch(graph *g, value **v) { return *v ? emit_transpose(g, *v, (int[]){1, 0, 2}, v) : OK; }

static status run_layer(graph *g, const node *n, layer *l, value **out) {
    const char *direction = node_string(n, "direction");
    const bool batch_first = node_int(n, "layout") != 0, backwards = strcmp(direction, "reverse") == 0;
    value *y[2], *h[2], *c[2];

    for (int64_t d = 0; d < l->directions; d++) {
        value *results[MOST_RESULTS];
        TRY(run_direction(g, l, d, backwards || d > 0, results));
        y[d] = results[1];
        h[d] = results[2];
        c[d] = l->gates == 4 ? results[4] : NULL;
    }
    TRY(stack(g, y, l->directions, 1, &out[0]));
    if (batch_first) TRY(emit_transpose(g, out[0], (int[]){2, 0, 1, 3}, &out[0]));
    if (n->n_out > 1) TRY(stack(g, h, l->directions, 0, &out[1]));
    if (n->n_out > 2) TRY(stack(g, c, l->directions, 0, &out[2]));
    for (int i = 1; batch_first && i < n->n_out; i++) TRY(swap_batch(g, &out[i]));
    return OK;
}

static status check_operand(graph *g, const node *n, const value *v, const shape *s, const char *what) {
    char expected[SHAPE_TEXT], found[SHAPE_TEXT];

    if (v && v != node_in(n, 4) && v->type != n->in[0]->type) /* the lengths are cast to int32 */
        return fail(g->c, E_TYPE, "%s: %s are %s; its operand is %s", n->op->name, what, dtype_name(v->type),
                    dtype_name(n->in[0]->type));
    if (!v || shape_equal(&v->shape, s)) return OK;
    return fail(g->c, E_SHAPE, "%s: %s have shape %s instead of %s", n->op->name, what, shape_text(&v->shape, found),
                shape_text(s, expected));
}

/* Reads the operands that the three have in common, and checks them. */
static status read_layer(graph *g, const node *n, layer *l) {
    const char *direction = node_string(n, "direction");
    const bool batch_first = node_int(n, "layout") != 0;

    for (int i = 0; i < 3; i++) TRY(require(g, n, i));
    l->x = n->in[0];
    l->w = n->in[1];
    l->r = n->in[2];
    l->bias = node_in(n, 3);
    l->lengths = node_in(n, 4);
    l->h = node_in(n, 5);
    l->activations = node_string(n, "activations");
    l->directions = strcmp(direction, "bidirectional") == 0 ? 2 : 1;
    if (node_has(n, "clip")) return fail(g->c, E_UNSUPPORTED, "%s with clipped gates", n->op->name);
    if (l->x->shape.rank != 3 || l->r->shape.rank != 3)
        return fail(g->c, E_SHAPE, "%s of tensors of rank %d and %d", n->op->name, l->x->shape.rank, l->r->shape.rank);
    for (int i = 0; i < 2; i++) {
        const value *state = i ? l->c : l->h;
        if (state && state->shape.rank != 3)
            return fail(g->c, E_SHAPE, "%s: its first states have rank %d instead of 3", n->op->name,
                        state->shape.rank);
    }
    if (batch_first) {
        TRY(swap_batch(g, &l->x));
        TRY(swap_batch(g, &l->h));
        TRY(swap_batch(g, &l->c));
    }
    l->hidden = l->r->shape.dim[2];
    l->batch = l->x->shape.dim[1];
    const int64_t width = l->gates * l->hidden, many = l->directions;
    TRY(check_operand(g, n, l->w, &SHAPE(many, width, l->x->shape.dim[2]), "its weights"));
    TRY(check_operand(g, n, l->r, &SHAPE(many, width, l->hidden), "its recurrent weights"));
    TRY(check_operand(g, n, l->bias, &SHAPE(many, 2 * width), "its biases"));
    TRY(check_operand(g, n, l->lengths, &SHAPE(l->batch), "its lengths"));
    TRY(check_operand(g, n, l->h, &SHAPE(many, l->batch, l->hidden), "its first states"));
    TRY(check_operand(g, n, l->c, &SHAPE(many, l->batch, l->hidden), "its first cells"));
    return l->lengths ? emit_cast(g, l->lengths, I32, &l->lengths) : OK;
}

/* Only the usual activations, for each direction, are known. */
static status check_activations(graph *g, const node *n, const layer *l, const char *usual) {
    const char *given = l->activations;

    for (int64_t d = 0; *given && d < l->directions; d++) {
        if (strncmp(given, usual, strlen(usual)) != 0)
            return fail(g->c, E_UNSUPPORTED, "%s with the activations %s", n->op->name, l->activations);
        given += strlen(usual);
        given += *given == ' ';
    }
    return OK;
}

static status lower_rnn(graph *g, const node *n, value **out) {
    layer l = {.scan = "RnnScan", .gates = 1, .results = 4};

    TRY(lower_to_f32(g, n, out));
    if (out[0]) return OK;
    TRY(read_layer(g, n, &l));
    for (int64_t d = 0; *l.activations && d < l.directions; d++)
        if (!activated_by(&l, d, "Relu") && !activated_by(&l, d, "Tanh"))
            return fail(g->c, E_UNSUPPORTED, "RNN with the activations %s", l.activations);
    return run_layer(g, n, &l, out);
}

static status lower_gru(graph *g, const node *n, value **out) {
    layer l = {.scan = "GruScan", .gates = 3, .results = 4};

    TRY(lower_to_f32(g, n, out));
    if (out[0]) return OK;
    if (!node_int(n, "linear_before_reset"))
        return fail(g->c, E_UNSUPPORTED, "GRU that resets the state before the product with it");
    TRY(read_layer(g, n, &l));
    TRY(check_activations(g, n, &l, "Sigmoid Tanh"));
    return run_layer(g, n, &l, out);
}

static status lower_lstm(graph *g, const node *n, value **out) {
    layer l = {.scan = "LstmScan", .gates = 4, .results = 6, .c = node_in(n, 6)};

    TRY(lower_to_f32(g, n, out));
    if (out[0]) return OK;
    if (node_in(n, 7)) return fail(g->c, E_UNSUPPORTED, "LSTM whose gates look at the cells");
    if (node_int(n, "input_forget")) return fail(g->c, E_UNSUPPORTED, "LSTM with coupled gates");
    TRY(read_layer(g, n, &l));
    TRY(check_activations(g, n, &l, "Sigmoid Tanh Tanh"));
    return run_layer(g, n, &l, out);
}

/* cuda/kernels/rnn_scan.cu */
kernel_fn rnn_scan_cuda, gru_scan_cuda, lstm_scan_cuda, rnn_scan_grad_cuda, gru_scan_grad_cuda, lstm_scan_grad_cuda;
size_t scan_cuda_workspace(const node *n), scan_grad_cuda_workspace(const node *n);

/* --- records ------------------------------------------------------------------------------------------------------ */

#define LAYER(name_, most_, results_, ...)                                                                             \
    .name = name_, .domain = "", .since = 7, .min_in = 3, .max_in = most_, .max_out = results_, .dtypes = FLOATS,      \
    .attrs = NODE_ATTRS(NO_DEFAULT("activations", STRING), NO_DEFAULT("activation_alpha", FLOATS),                     \
                        NO_DEFAULT("activation_beta", FLOATS), NO_DEFAULT("clip", FLOAT),                              \
                        STRING("direction", "forward"), NO_DEFAULT("hidden_size", INT), INT("layout", 0), __VA_ARGS__)
#define SCAN(name_, operands_, results_)                                                                               \
    .name = name_, .domain = ORT_DOMAIN, .since = 1, .min_in = operands_, .max_in = operands_, .max_out = results_,    \
    .dtypes = SET(F32) | SET(F64), .attrs = NODE_ATTRS(INT("reverse", 0), INT("positive", 0)), .flops = flops_scan
#define SCAN_GRAD                                                                                                      \
    .owned = OPERAND(2), .infer = infer_scan_grad, .workspace = scan_grad_cpu_workspace,                               \
    .cuda_workspace = scan_grad_cuda_workspace

/* clang-format off */
const op_def rnn_ops[] = {
    {LAYER("RNN", 6, 2, {.name = NULL}), .lower = lower_rnn},
    {LAYER("GRU", 6, 2, INT("linear_before_reset", 0)), .lower = lower_gru},
    {LAYER("LSTM", 8, 3, INT("input_forget", 0)), .lower = lower_lstm},
    {SCAN("RnnScan", 4, 4), .owned = OPERAND(3), .flags = INPLACE_0, .infer = infer_rnn_scan, .grad = grad_rnn_scan,
     .workspace = scan_cpu_workspace, .cpu = rnn_scan_cpu, .cuda = rnn_scan_cuda, .cuda_workspace = scan_cuda_workspace},
    {SCAN("GruScan", 5, 4), .owned = OPERAND(3), .infer = infer_gru_scan, .grad = grad_gru_scan, .workspace = scan_cpu_workspace,
     .cpu = gru_scan_cpu, .cuda = gru_scan_cuda, .cuda_workspace = scan_cuda_workspace},
    {SCAN("LstmScan", 5, 6), .owned = OPERAND(3), .flags = INPLACE_0, .infer = infer_lstm_scan, .grad = grad_lstm_scan,
     .workspace = scan_cpu_workspace, .cpu = lstm_scan_cpu, .cuda = lstm_scan_cuda,
     .cuda_workspace = scan_cuda_workspace},
    {SCAN("RnnScanGrad", 5, 2), SCAN_GRAD, .cpu = rnn_scan_grad_cpu, .cuda = rnn_scan_grad_cuda},
    {SCAN("GruScanGrad", 6, 3), SCAN_GRAD, .cpu = gru_scan_grad_cpu, .cuda = gru_scan_grad_cuda},
    {SCAN("LstmScanGrad", 8, 3), SCAN_GRAD, .cpu = lstm_scan_grad_cpu, .cuda = lstm_scan_grad_cuda},
    {0},
};
/* clang-format on */
