/* rnn_scan.c -- goes through the steps of a recurrent network one after the other, and back.
 *
 * Each step is one product of the state with r, and a loop over the hidden units. With s the logistic function:
 *
 *     RNN    h' = tanh(z + r h), or its positive part instead of tanh
 *     GRU    z = s(.)  r = s(.)  n = tanh(z_n + r (r_n h + bias_n))          h' = n + z (h - n)
 *     LSTM   i = s(.)  o = s(.)  f = s(.)  g = tanh(.)   c' = f c + i g      h' = o tanh(c')
 *
 * Backward goes the other way round with dh (and dc) as its state: dh for the step before is d(r h) r. */
#include <string.h>

#include "core/parallel.h"
#include "core/vmath.h"
#include "gemm/gemm.h"
#include "ops/recurrent/rnn.h"

typedef struct scan {
    dtype type;
    bool reverse, positive; /* positive: RNN's activation is the positive part */
    int64_t steps, batch, hidden, gates;
    const void *z, *r, *bias, *first_c, *dy, *cells_in, *before_in;
    const int32_t *lengths;
    void *gate; /* of all steps, or of one where they are not wanted: */
    bool one_gate;
    void *y, *before, *cells; /* of all steps, NULL where not wanted */
    void *h, *c;              /* the state: h and c going forward, dh and dc going back */
    void *u;                  /* r h of one step (GRU) */
    void *dz, *du;
    void *rest;           /* of the workspace (backward) */
    const void *packed_r; /* r as the products of all steps read it (gemm/gemm.h), or NULL */
    int64_t t;            /* the step */
} scan;

/* --- one step ----------------------------------------------------------------------------------------------------- */

static inline bool ended(const scan *s, int64_t b) { return s->lengths && s->t >= s->lengths[b]; }

/* A row of [steps, batch, width] at this step. */
#define ROW(T, base, width) ((T *)(base) + (s->t * s->batch + b) * (width))
#define GATE(T, width) ((T *)s->gate + ((s->one_gate ? 0 : s->t) * s->batch + b) * (width))

#define TEMPLATE "ops/recurrent/rnn_steps.h"
#include "ops/pointwise/float_and_double.h"

/* --- all steps ---------------------------------------------------------------------------------------------------- */

static void *at_step(const scan *s, const void *base, int64_t width) {
    return (char *)(uintptr_t)base + s->t * s->batch * width * (int64_t)dtype_size(s->type);
}

/* [batch, gates * hidden] += h r' */
static gemm product_with_r(const scan *s) {
    const int64_t width = s->gates * s->hidden;
    return (gemm){.type = s->type,
                  .m = s->batch,
                  .n = width,
                  .k = s->hidden,
                  .alpha = 1,
                  .a = s->h,
                  .a_row = s->hidden,
                  .a_col = 1,
                  .b = s->r,
                  .b_row = 1,
                  .b_col = s->hidden,
                  .c_row = width,
                  .packed_b = s->packed_r};
}

/* dh += d(r h) r */
static gemm product_back_through_r(const scan *s) {
    const int64_t width = s->gates * s->hidden;
    return (gemm){.type = s->type,
                  .m = s->batch,
                  .n = s->hidden,
                  .k = width,
                  .alpha = 1,
                  .beta = 1,
                  .a_row = width,
                  .a_col = 1,
                  .b = s->r,
                  .b_row = s->hidden,
                  .b_col = 1,
                  .c = s->h,
                  .c_row = s->hidden,
                  .packed_b = s->packed_r};
}

static void times_r(const scan *s, void *to, double beta) {
    gemm g = product_with_r(s);
    g.c = to;
    g.beta = beta;
    gemm_run(&g);
}

static void back_through_r(const scan *s, const void *du) {
    gemm g = product_back_through_r(s);
    g.a = at_step(s, du, s->gates * s->hidden);
    gemm_run(&g);
}

/* At the beginning of the workspace r is packed for the products of all steps, where they are so many that it pays. */
static size_t packed_bytes(const scan *s, gemm (*product)(const scan *s)) {
    enum { LEAST = 4 };
    const gemm g = product(s);
    return s->steps < LEAST ? 0 : gemm_prepack_bytes(&g);
}

/* Returns what is behind it. */
static void *pack_r(scan *s, gemm (*product)(const scan *s), void *work) {
    const size_t bytes = packed_bytes(s, product);
    const gemm g = product(s);

    if (bytes == 0) return work;
    gemm_prepack(&g, work);
    s->packed_r = work;
    return (char *)work + bytes;
}

static void each_row(const scan *s, range_fn *body) {
    parallel_for(s->batch, parallel_rows(s->hidden * 16), body, (void *)(uintptr_t)s);
}

static void run_forward(scan *s, range_fn *body) {
    const size_t step = (size_t)(s->batch * s->gates * s->hidden) * dtype_size(s->type);

    if (step == 0) return;
    for (int64_t i = 0; i < s->steps; i++) {
        s->t = s->reverse ? s->steps - 1 - i : i;
        if (s->u) {
            times_r(s, s->u, 0);
        } else { /* the gates' inputs are summed where the gates will be kept, which may be where z is */
            const int64_t width = s->gates * s->hidden;
            void *gate = s->one_gate ? s->gate : at_step(s, s->gate, width), *z = at_step(s, s->z, width);
            if (gate != z) memcpy(gate, z, step);
            times_r(s, gate, 1);
        }
        each_row(s, body);
    }
}

static void run_backward(scan *s, range_fn *body) {
    for (int64_t i = 0; i < s->steps; i++) {
        s->t = s->reverse ? i : s->steps - 1 - i;
        each_row(s, body);
        back_through_r(s, s->du ? s->du : s->dz);
    }
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

static scan sizes_of(dtype type, const shape *z, const shape *r) {
    return (scan){.type = type,
                  .steps = z->dim[0],
                  .batch = z->dim[1],
                  .hidden = r->dim[1],
                  .gates = r->dim[1] ? r->dim[0] / r->dim[1] : 0};
}

/* Forward: h, c, and of one step r h and the gates. Where the last h or c is wanted, that is the state itself. */
size_t workspace_scan(const node *n) {
    const shape *z = &n->in[0]->shape, *r = &n->in[1]->shape;
    return (size_t)(z->dim[1] * (2 * r->dim[1] + 2 * r->dim[0] + r->dim[1])) * dtype_size(n->in[0]->type);
}

size_t scan_cpu_workspace(const node *n) {
    const scan s = sizes_of(n->in[0]->type, &n->in[0]->shape, &n->in[1]->shape);
    return packed_bytes(&s, product_with_r) + workspace_scan(n);
}

static void *data_of(const tensor *t, int n, int i) { return i < n && tensor_present(&t[i]) ? t[i].data : NULL; }

static scan scan_of(const call *k) {
    scan s = sizes_of(k->in[0].type, &k->in[0].shape, &k->in[1].shape);
    s.reverse = node_int(k->node, "reverse") != 0;
    s.positive = node_int(k->node, "positive") != 0;
    s.r = k->in[1].data;
    return s;
}

/* The state begins as a copy of `first`, or as zeros. */
static void *state(const scan *s, void *memory, const void *first) {
    const size_t bytes = (size_t)(s->batch * s->hidden) * dtype_size(s->type);
    if (first && bytes) memcpy(memory, first, bytes);
    else if (bytes) memset(memory, 0, bytes);
    return memory;
}

static status run_scan(const call *k, range_fn *narrow, range_fn *wide, bool apart) {
    scan s = scan_of(k);
    const int64_t bytes = s.batch * s.hidden * (int64_t)dtype_size(s.type);
    char *work = pack_r(&s, product_with_r, k->work);
    void *last_h = data_of(k->out, k->n_out, 2), *last_c = data_of(k->out, k->n_out, 4);

    s.z = k->in[0].data;
    s.lengths = data_of(k->in, k->n_in, 3);
    s.gate = data_of(k->out, k->n_out, 0);
    s.y = data_of(k->out, k->n_out, 1);
    s.before = data_of(k->out, k->n_out, 3);
    s.cells = data_of(k->out, k->n_out, 5);
    s.h = state(&s, last_h ? last_h : work, k->in[2].data);
    s.c = s.h;
    if (!s.gate) {
        s.one_gate = true;
        s.gate = work + (2 + s.gates) * bytes;
    }
    if (apart) {
        s.bias = k->in[4].data;
        s.u = work + 2 * bytes;
    } else if (k->n_in > 4) {
        s.c = state(&s, last_c ? last_c : work + bytes, k->in[4].data);
    }
    run_forward(&s, s.type == F64 ? wide : narrow);
    return OK;
}

status rnn_scan_cpu(ctx *c, const call *k) { return (void)c, run_scan(k, rnn_float, rnn_double, false); }
status gru_scan_cpu(ctx *c, const call *k) { return (void)c, run_scan(k, gru_float, gru_double, true); }
status lstm_scan_cpu(ctx *c, const call *k) { return (void)c, run_scan(k, lstm_float, lstm_double, false); }

/* Backward: it computes its results also where they are not wanted. The first and the third of GRU hold all
 * steps, the others are a state. */
static size_t bytes_of_grad(const node *n, int i) {
    const value *v = n->out[i];
    return v && v->n_uses == 0 ? (size_t)shape_count(&v->shape) * dtype_size(n->in[0]->type) : 0;
}

size_t workspace_scan_grad(const node *n) {
    size_t bytes = 0;
    for (int i = 0; i < n->n_out; i++) bytes += bytes_of_grad(n, i);
    return bytes;
}

size_t scan_grad_cpu_workspace(const node *n) {
    const scan s = sizes_of(n->in[0]->type, &n->in[0]->shape, &n->in[1]->shape);
    return packed_bytes(&s, product_back_through_r) + workspace_scan_grad(n);
}

void *scan_grad_memory(const call *k, void *work, int i) {
    size_t at = 0;

    if (tensor_present(&k->out[i])) return k->out[i].data;
    for (int before = 0; before < i; before++) at += bytes_of_grad(k->node, before);
    return work ? (char *)work + at : NULL;
}

static scan scan_back_of(const call *k) {
    scan s = scan_of(k);

    s.rest = pack_r(&s, product_back_through_r, k->work);
    s.gate = k->in[0].data;
    s.lengths = k->in[2].data;
    s.dy = k->in[3].data;
    s.dz = scan_grad_memory(k, s.rest, 0);
    s.h = state(&s, scan_grad_memory(k, s.rest, 1), k->in[4].data);
    return s;
}

status rnn_scan_grad_cpu(ctx *c, const call *k) {
    scan s = scan_back_of(k);

    (void)c;
    run_backward(&s, s.type == F64 ? rnn_back_double : rnn_back_float);
    return OK;
}

status gru_scan_grad_cpu(ctx *c, const call *k) {
    scan s = scan_back_of(k);

    (void)c;
    s.before_in = k->in[5].data;
    s.du = scan_grad_memory(k, s.rest, 2);
    run_backward(&s, s.type == F64 ? gru_back_double : gru_back_float);
    return OK;
}

status lstm_scan_grad_cpu(ctx *c, const call *k) {
    scan s = scan_back_of(k);

    (void)c;
    s.c = state(&s, scan_grad_memory(k, s.rest, 2), k->in[5].data);
    s.cells_in = k->in[6].data;
    s.first_c = k->in[7].data;
    run_backward(&s, s.type == F64 ? lstm_back_double : lstm_back_float);
    return OK;
}
