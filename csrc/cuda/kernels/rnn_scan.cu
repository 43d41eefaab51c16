/* rnn_scan.cu -- mirrors ops/recurrent/rnn_scan.c, where the formulas are: step after step of a network, and back.
 *
 * Each step is one product of the state with r (cuBLASLt, or the kernel of matmul.cu) and one kernel over the hidden
 * units of the batch, a thread a unit. No unit sees another's state within a step, so each step is in place. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct scan_step_args {
    const void *z, *u, *bias, *first_c, *dy, *cells_in, *before_in;
    const int32_t *lengths;
    void *gate, *y, *before, *cells, *h, *c, *dz, *du; /* those of all steps: at this one */
    int64_t batch, hidden, t, steps;
    int32_t reverse, positive;
} scan_step_args;

#ifdef ORT_HOST
#include "cuda/kernels/product.h"
#include "cuda/libraries/blas.h"
#include "ops/recurrent/rnn.h"

kernel_fn rnn_scan_cuda, gru_scan_cuda, lstm_scan_cuda, rnn_scan_grad_cuda, gru_scan_grad_cuda, lstm_scan_grad_cuda;
size_t scan_cuda_workspace(const node *n), scan_grad_cuda_workspace(const node *n);

enum { PLACE = 256 };

/* A scan: what a step's kernel gets, with pointers to step 0, and the product around it. */
typedef struct scan {
    scan_step_args a;
    dtype type;
    int64_t gates;
    const void *r;
    bool one_gate; /* there is room for the gates of one step */
} scan;

/* The workspace is the products' first, then as on the CPU. */
static size_t products_bytes(const node *n) {
    return (blas_workspace(n->in[0]->shape.dim[1] * n->in[1]->shape.dim[0]) + PLACE - 1) / PLACE * PLACE;
}
static void *rest(const call *k) { return k->work ? (char *)k->work + products_bytes(k->node) : NULL; }

size_t scan_cuda_workspace(const node *n) { return products_bytes(n) + workspace_scan(n); }
size_t scan_grad_cuda_workspace(const node *n) { return products_bytes(n) + workspace_scan_grad(n); }

/* NULL stays: nothing is started then. */
static void *moved(const void *data, int64_t elements, dtype type) {
    return data ? (char *)(uintptr_t)data + elements * (int64_t)dtype_size(type) : NULL;
}

static const tensor *present(const tensor *t, int n, int i) { return i < n && tensor_present(&t[i]) ? &t[i] : NULL; }
static void *data_of(const tensor *t, int n, int i) { return present(t, n, i) ? t[i].data : NULL; }

static scan scan_of(const call *k) {
    const shape *r = &k->in[1].shape;
    scan s = {.type = k->in[0].type, .r = k->in[1].data};

    s.a.reverse = node_int(k->node, "reverse") != 0;
    s.a.positive = node_int(k->node, "positive") != 0;
    s.a.steps = k->in[0].shape.dim[0];
    s.a.batch = k->in[0].shape.dim[1];
    s.a.hidden = r->dim[1];
    s.gates = s.a.hidden ? r->dim[0] / s.a.hidden : 0;
    return s;
}

static int64_t units(const scan *s) { return s->a.batch * s->a.hidden; }

/* What a step starts from: a copy of `first`, or zeros. */
static status begin_state(ctx *c, const call *k, const scan *s, void *memory, const tensor *first) {
    const size_t bytes = (size_t)units(s) * dtype_size(s->type);
    return first ? cuda_copy_bytes(c, k, memory, first->data, bytes) : cuda_clear(c, k, memory, bytes);
}

/* The arguments at step t. */
static scan_step_args at_step(const scan *s, int64_t t) {
    const int64_t one = t * units(s), all = one * s->gates, kept = s->gates == 1 ? one : 4 * one;
    scan_step_args a = s->a;

    a.t = t;
    a.z = moved(a.z, all, s->type);
    a.dy = moved(a.dy, one, s->type);
    a.cells_in = moved(a.cells_in, one, s->type);
    a.before_in = moved(a.before_in, one, s->type);
    if (!s->one_gate) a.gate = moved(a.gate, kept, s->type);
    a.y = moved(a.y, one, s->type);
    a.before = moved(a.before, one, s->type);
    a.cells = moved(a.cells, one, s->type);
    a.dz = moved(a.dz, all, s->type);
    a.du = moved(a.du, all, s->type);
    return a;
}

static status launch_step(ctx *c, const call *k, kernel kernels[2], const scan *s, const scan_step_args *a) {
    return cuda_launch(c, k, &kernels[s->type == F64], geometry_over(units(s), 128, 128), a);
}

/* to [batch, gates * hidden] = h r', and + to where beta is 1 */
static status times_r(ctx *c, const call *k, const scan *s, void *to, double beta) {
    const int64_t width = s->gates * s->a.hidden;
    const gemm g = {.type = s->type,
                    .m = s->a.batch,
                    .n = width,
                    .k = s->a.hidden,
                    .alpha = 1,
                    .beta = beta,
                    .a = s->a.h,
                    .a_row = s->a.hidden,
                    .a_col = 1,
                    .b = s->r,
                    .b_row = 1,
                    .b_col = s->a.hidden,
                    .c = to,
                    .c_row = width};
    return cuda_product(c, k, &g);
}

/* dh += d(r h) r */
static status back_through_r(ctx *c, const call *k, const scan *s, const void *du) {
    const int64_t width = s->gates * s->a.hidden;
    const gemm g = {.type = s->type,
                    .m = s->a.batch,
                    .n = s->a.hidden,
                    .k = width,
                    .alpha = 1,
                    .beta = 1,
                    .a = du,
                    .a_row = width,
                    .a_col = 1,
                    .b = s->r,
                    .b_row = s->a.hidden,
                    .b_col = 1,
                    .c = s->a.h,
                    .c_row = s->a.hidden};
    return cuda_product(c, k, &g);
}

/* GRU's products stay apart, in `u`; those of the others are added to z where the gates will be kept, which may be
 * where z is. */
static status run_forward(ctx *c, const call *k, scan *s, kernel kernels[2], bool apart) {
    const size_t step = (size_t)(units(s) * s->gates) * dtype_size(s->type);
    const bool elsewhere = !apart && s->a.gate != s->a.z;

    if (step == 0) return OK;
    if (elsewhere && !s->one_gate) TRY(cuda_copy_bytes(c, k, s->a.gate, s->a.z, step * (size_t)s->a.steps));
    for (int64_t i = 0; i < s->a.steps; i++) {
        const scan_step_args a = at_step(s, s->a.reverse ? s->a.steps - 1 - i : i);
        if (elsewhere && s->one_gate) TRY(cuda_copy_bytes(c, k, a.gate, a.z, step));
        TRY(times_r(c, k, s, apart ? (void *)(uintptr_t)a.u : a.gate, apart ? 0 : 1));
        TRY(launch_step(c, k, kernels, s, &a));
    }
    return OK;
}

static status run_backward(ctx *c, const call *k, scan *s, kernel kernels[2]) {
    if (units(s) == 0) return OK;
    for (int64_t i = 0; i < s->a.steps; i++) {
        const scan_step_args a = at_step(s, s->a.reverse ? i : s->a.steps - 1 - i);
        TRY(launch_step(c, k, kernels, s, &a));
        TRY(back_through_r(c, k, s, s->gates == 3 ? a.du : a.dz));
    }
    return OK;
}

/* As run_scan of ops/recurrent/rnn_scan.c: where the last h or c is wanted, that is the state itself. */
static status run_scan(ctx *c, const call *k, kernel kernels[2], bool apart) {
    scan s = scan_of(k);
    void *work = rest(k);
    const tensor *last_h = present(k->out, k->n_out, 2), *last_c = present(k->out, k->n_out, 4);

    s.a.z = k->in[0].data;
    s.a.lengths = data_of(k->in, k->n_in, 3);
    s.a.y = data_of(k->out, k->n_out, 1);
    s.a.before = data_of(k->out, k->n_out, 3);
    s.a.cells = data_of(k->out, k->n_out, 5);
    s.one_gate = !present(k->out, k->n_out, 0);
    s.a.gate = s.one_gate ? moved(work, (2 + s.gates) * units(&s), s.type) : k->out[0].data;
    s.a.h = last_h ? last_h->data : work;
    TRY(begin_state(c, k, &s, s.a.h, &k->in[2]));
    if (apart) {
        s.a.bias = k->in[4].data;
        s.a.u = moved(work, 2 * units(&s), s.type);
    } else if (k->n_in > 4) {
        s.a.c = last_c ? last_c->data : moved(work, units(&s), s.type);
        TRY(begin_state(c, k, &s, s.a.c, &k->in[4]));
    }
    return run_forward(c, k, &s, kernels, apart);
}

static status scan_back_of(ctx *c, const call *k, scan *out) {
    *out = scan_of(k);
    out->a.gate = k->in[0].data;
    out->a.lengths = data_of(k->in, k->n_in, 2);
    out->a.dy = data_of(k->in, k->n_in, 3);
    out->a.dz = scan_grad_memory(k, rest(k), 0);
    out->a.h = scan_grad_memory(k, rest(k), 1);
    return begin_state(c, k, out, out->a.h, present(k->in, k->n_in, 4));
}

status rnn_scan_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "rnn_step_f32"}, {.name = "rnn_step_f64"}};
    return run_scan(c, k, kernels, false);
}
status gru_scan_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "gru_step_f32"}, {.name = "gru_step_f64"}};
    return run_scan(c, k, kernels, true);
}
status lstm_scan_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "lstm_step_f32"}, {.name = "lstm_step_f64"}};
    return run_scan(c, k, kernels, false);
}

status rnn_scan_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "rnn_back_f32"}, {.name = "rnn_back_f64"}};
    scan s;

    TRY(scan_back_of(c, k, &s));
    return run_backward(c, k, &s, kernels);
}

status gru_scan_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "gru_back_f32"}, {.name = "gru_back_f64"}};
    scan s;

    TRY(scan_back_of(c, k, &s));
    s.a.before_in = k->in[5].data;
    s.a.du = scan_grad_memory(k, rest(k), 2);
    return run_backward(c, k, &s, kernels);
}

status lstm_scan_grad_cuda(ctx *c, const call *k) {
    static kernel kernels[] = {{.name = "lstm_back_f32"}, {.name = "lstm_back_f64"}};
    scan s;

    TRY(scan_back_of(c, k, &s));
    s.a.c = scan_grad_memory(k, rest(k), 2);
    TRY(begin_state(c, k, &s, s.a.c, present(k->in, k->n_in, 5)));
    s.a.cells_in = k->in[6].data;
    s.a.first_c = k->in[7].data;
    return run_backward(c, k, &s, kernels);
}
#endif

#ifdef ORT_DEVICE
/* Unit i of the batch, in sequence b at place j of a row. */
#define FOR_UNITS(i, b, j)                                                                                             \
    FOR_EACH(i, a.batch *a.hidden)                                                                                     \
    for (int64_t b = i / a.hidden, j = i % a.hidden, once_ = 1; once_; once_ = 0)

DEVICE int has_ended(const scan_step_args *a, int64_t b) { return a->lengths && a->t >= a->lengths[b]; }

#define TEMPLATE "cuda/kernels/rnn_scan.cu"
#include "cuda/kernels/each_f32_f64.h"
#endif

#else /* the template */

DEVICE T NAME(logistic)(T x) { return 1 / (1 + EXP(-x)); }

/* What a unit starts from, and what an ended sequence shows. False: that is all. */
DEVICE int NAME(begin_unit)(const scan_step_args *a, int64_t b, int64_t j) {
    const int64_t i = b * a->hidden + j;
    if (a->before) ((T *)a->before)[i] = ((const T *)a->h)[i];
    if (!has_ended(a, b)) return 1;
    if (a->y) ((T *)a->y)[i] = 0;
    if (a->cells) ((T *)a->cells)[i] = ((const T *)a->c)[i];
    return 0;
}

/* An ended sequence passes dh and dc on as they are. */
DEVICE int NAME(begin_unit_back)(const scan_step_args *a, int64_t b, int64_t j, int gates) {
    const int64_t i = b * a->hidden + j;
    if (!has_ended(a, b)) {
        if (a->dy) ((T *)a->h)[i] += ((const T *)a->dy)[i];
        return 1;
    }
    for (int g = 0; g < gates; g++) {
        ((T *)a->dz)[(b * gates + g) * a->hidden + j] = 0;
        if (a->du) ((T *)a->du)[(b * gates + g) * a->hidden + j] = 0;
    }
    return 0;
}

KERNEL(NAME(rnn_step), scan_step_args) {
    FOR_UNITS(i, b, j) {
        T *gate = (T *)a.gate;
        if (!NAME(begin_unit)(&a, b, j)) continue;
        const T h = !a.positive ? TANH(gate[i]) : gate[i] <= 0 ? 0 : gate[i];
        gate[i] = ((T *)a.h)[i] = h;
        if (a.y) ((T *)a.y)[i] = h;
    }
}

KERNEL(NAME(gru_step), scan_step_args) {
    const int64_t n = a.hidden;
    const T *bias = (const T *)a.bias;
    FOR_UNITS(i, b, j) {
        const T *z = (const T *)a.z + b * 3 * n + j, *u = (const T *)a.u + b * 3 * n + j;
        T *gate = (T *)a.gate + b * 4 * n + j;
        if (!NAME(begin_unit)(&a, b, j)) continue;
        const T update = NAME(logistic)(z[0] + u[0] + bias[j]);
        const T reset = NAME(logistic)(z[n] + u[n] + bias[n + j]);
        const T inner = u[2 * n] + bias[2 * n + j], fresh = TANH(z[2 * n] + reset * inner);
        const T h = fresh + update * (((const T *)a.h)[i] - fresh);
        gate[0] = update;
        gate[n] = reset;
        gate[2 * n] = fresh;
        gate[3 * n] = inner;
        ((T *)a.h)[i] = h;
        if (a.y) ((T *)a.y)[i] = h;
    }
}

KERNEL(NAME(lstm_step), scan_step_args) {
    const int64_t n = a.hidden;
    FOR_UNITS(i, b, j) {
        T *gate = (T *)a.gate + b * 4 * n + j;
        if (!NAME(begin_unit)(&a, b, j)) continue;
        const T in = NAME(logistic)(gate[0]), out = NAME(logistic)(gate[n]);
        const T keep = NAME(logistic)(gate[2 * n]), fresh = TANH(gate[3 * n]);
        const T cell = keep * ((const T *)a.c)[i] + in * fresh, h = out * TANH(cell);
        gate[0] = in;
        gate[n] = out;
        gate[2 * n] = keep;
        gate[3 * n] = fresh;
        ((T *)a.c)[i] = cell;
        ((T *)a.h)[i] = h;
        if (a.y) ((T *)a.y)[i] = h;
        if (a.cells) ((T *)a.cells)[i] = cell;
    }
}

KERNEL(NAME(rnn_back), scan_step_args) {
    FOR_UNITS(i, b, j) {
        if (!NAME(begin_unit_back)(&a, b, j, 1)) continue;
        const T h = ((const T *)a.gate)[i], dh = ((const T *)a.h)[i];
        ((T *)a.dz)[i] = a.positive ? (h > 0 ? dh : 0) : dh * (1 - h * h);
        ((T *)a.h)[i] = 0;
    }
}

KERNEL(NAME(gru_back), scan_step_args) {
    const int64_t n = a.hidden;
    FOR_UNITS(i, b, j) {
        const T *gate = (const T *)a.gate + b * 4 * n + j;
        T *dz = (T *)a.dz + b * 3 * n + j, *du = (T *)a.du + b * 3 * n + j;
        if (!NAME(begin_unit_back)(&a, b, j, 3)) continue;
        const T update = gate[0], reset = gate[n], fresh = gate[2 * n], inner = gate[3 * n];
        const T dh = ((const T *)a.h)[i], dn = dh * (1 - update) * (1 - fresh * fresh);
        du[0] = dz[0] = dh * (((const T *)a.before_in)[i] - fresh) * update * (1 - update);
        du[n] = dz[n] = dn * inner * reset * (1 - reset);
        dz[2 * n] = dn;
        du[2 * n] = dn * reset;
        ((T *)a.h)[i] = dh * update;
    }
}

KERNEL(NAME(lstm_back), scan_step_args) {
    const int64_t n = a.hidden, earlier = a.reverse ? a.t + 1 : a.t - 1;
    const T *cells = (const T *)a.cells_in;
    const T *c = earlier < 0 || earlier >= a.steps ? (const T *)a.first_c : cells + (earlier - a.t) * a.batch * n;
    FOR_UNITS(i, b, j) {
        const T *gate = (const T *)a.gate + b * 4 * n + j;
        T *dz = (T *)a.dz + b * 4 * n + j;
        if (!NAME(begin_unit_back)(&a, b, j, 4)) continue;
        const T in = gate[0], out = gate[n], keep = gate[2 * n], fresh = gate[3 * n];
        const T seen = TANH(cells[i]), dh = ((const T *)a.h)[i];
        const T d = ((const T *)a.c)[i] + dh * out * (1 - seen * seen);
        dz[0] = d * fresh * in * (1 - in);
        dz[n] = dh * seen * out * (1 - out);
        dz[2 * n] = d * c[i] * keep * (1 - keep);
        dz[3 * n] = d * in * (1 - fresh * fresh);
        ((T *)a.c)[i] = d * keep;
        ((T *)a.h)[i] = 0;
    }
}
#endif
