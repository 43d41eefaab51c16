/* fake_torch.c -- a libtorch_cuda.so with what csrc/cuda/kernels/torch_attention.cu calls of torch's C shim: tensors, and
 * memory-efficient attention, computed on the CPU in float64.
 *
 * It checks what it is told: layouts and alignments, types, that nothing of the user's is switched on, that no stream is
 * captured, that backward is to add in one order, and that what it gets back is what there is. What it allocates is
 * full of rubbish, and again when it is given back.
 *     fake_attentions()    how often attention was computed, forward and backward
 *     fake_torch_fails(n)  the n-th tensor or computation from now on fails; 0: none */
#define _GNU_SOURCE
#include "fake.h"
#include "fake_numbers.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32 = 6, HALF = 5, BFLOAT16 = 15, CUDA = 1, TENSOR = 0x5445, ROUND = 32 };

typedef struct tensor {
    int kind, type, rank;
    int64_t dim[4], stride[4];
    char *data, *owned;
    size_t bytes;
} tensor;

EXPORT int fake_attentions(void);
EXPORT void fake_torch_fails(int n);
static int attentions, fails_in;
int fake_attentions(void) { return attentions; }
void fake_torch_fails(int n) { fails_in = n; }
static bool enter(void) { return fake_enter() && (fails_in == 0 || --fails_in != 0); }

/* What a thread has switched on, as torch keeps it. */
EXPORT extern _Thread_local uint64_t _ZN3c104impl26raw_local_dispatch_key_setE[2];
_Thread_local uint64_t _ZN3c104impl26raw_local_dispatch_key_setE[2] = {3, 5};

static int complain(const char *what) {
    fake_complain(what);
    return 1;
}

#define CONSTANT(name, number)                                                                                         \
    EXPORT int32_t name(void);                                                                                         \
    int32_t name(void) { return number; }
CONSTANT(aoti_torch_dtype_float32, FLOAT32)
CONSTANT(aoti_torch_dtype_float16, HALF)
CONSTANT(aoti_torch_dtype_bfloat16, BFLOAT16)
CONSTANT(aoti_torch_device_type_cuda, CUDA)

EXPORT int aoti_torch_create_tensor_from_blob(void *data, int64_t rank, const int64_t *dim, const int64_t *stride,
                                              int64_t offset, int32_t type, int32_t device_type, int32_t device,
                                              tensor **out);
EXPORT int aoti_torch_delete_tensor_object(tensor *t);
EXPORT int aoti_torch_get_data_ptr(tensor *t, void **out);
EXPORT int aoti_torch_get_numel(tensor *t, int64_t *out);
EXPORT int aoti_torch_get_stride(tensor *t, int64_t axis, int64_t *out);
EXPORT int aoti_torch_get_current_cuda_stream(int32_t device, void **out);
EXPORT int aoti_torch_cuda__efficient_attention_forward(tensor *q, tensor *k, tensor *v, tensor **bias,
                                                        tensor **starts_q, tensor **starts_k, int64_t *longest_q,
                                                        int64_t *longest_k, double dropout, int64_t mask,
                                                        int32_t with_lse, double *scale, tensor **lengths,
                                                        int64_t *window, tensor **y, tensor **lse, tensor **seed,
                                                        tensor **offset, int64_t *out_q, int64_t *out_k);
EXPORT int aoti_torch_cuda__efficient_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor **bias,
                                                         tensor *y, tensor **starts_q, tensor **starts_k,
                                                         int64_t longest_q, int64_t longest_k, tensor *lse,
                                                         double dropout, tensor *seed, tensor *offset, int64_t mask,
                                                         int32_t with_dbias, double *scale, int64_t *splits,
                                                         int64_t *window, int32_t shared, tensor **dq, tensor **dk,
                                                         tensor **dv, tensor **dbias);

/* --- tensors ------------------------------------------------------------------------------------------------------ */

static bool is(const tensor *t) { return t && t->kind == TENSOR; }
static int64_t count(const tensor *t) {
    int64_t n = 1;
    for (int d = 0; d < t->rank; d++) n *= t->dim[d];
    return n;
}

int aoti_torch_create_tensor_from_blob(void *data, int64_t rank, const int64_t *dim, const int64_t *stride,
                                       int64_t offset, int32_t type, int32_t device_type, int32_t device,
                                       tensor **out) {
    tensor *t;

    if (!enter()) return 1;
    if (!data || rank < 1 || rank > 4 || offset || device_type != CUDA || device < 0 || device > 1)
        return complain("a tensor over memory");
    if (!(t = calloc(1, sizeof *t))) return 1;
    *t = (tensor){.kind = TENSOR, .type = type, .rank = (int)rank, .data = data};
    for (int d = 0; d < rank; d++) t->dim[d] = dim[d], t->stride[d] = stride[d];
    fake_hold(1);
    *out = t;
    return 0;
}

static tensor *make(int type, int rank, const int64_t *dim) {
    tensor *t = calloc(1, sizeof *t);
    int64_t step = 1;

    if (!t) return NULL;
    *t = (tensor){.kind = TENSOR, .type = type, .rank = rank};
    for (int d = rank - 1; d >= 0; d--) t->dim[d] = dim[d], t->stride[d] = step, step *= dim[d];
    t->bytes = (size_t)count(t) * (type == FLOAT32 ? 4 : 2) + 1;
    if (!(t->data = t->owned = aligned_alloc(512, (t->bytes + 511) / 512 * 512))) return free(t), NULL;
    memset(t->owned, 0xff, t->bytes);
    fake_hold(1);
    return t;
}

int aoti_torch_delete_tensor_object(tensor *t) {
    (void)fake_enter();
    if (!is(t)) return complain("a tensor given back that there is not");
    if (t->owned) memset(t->owned, 0xff, t->bytes);
    free(t->owned);
    t->kind = 0; /* the memory stays readable, so that a second time is seen */
    fake_hold(-1);
    return 0;
}

int aoti_torch_get_data_ptr(tensor *t, void **out) {
    if (!is(t)) return complain("the memory of a tensor that there is not");
    *out = t->data;
    return 0;
}

int aoti_torch_get_numel(tensor *t, int64_t *out) {
    if (!is(t)) return complain("the size of a tensor that there is not");
    *out = count(t);
    return 0;
}

static bool is_dense(const tensor *t) {
    int64_t step = 1;
    bool dense = true;

    for (int d = t->rank - 1; d >= 0; d--) {
        dense &= t->dim[d] == 1 || t->stride[d] == step;
        step *= t->dim[d];
    }
    return dense;
}

int aoti_torch_get_stride(tensor *t, int64_t axis, int64_t *out) {
    if (!is(t) || axis < 0 || axis >= t->rank) return complain("a stride of a tensor that there is not");
    *out = t->stride[axis];
    return 0;
}

int aoti_torch_get_current_cuda_stream(int32_t device, void **out) {
    if (device < 0 || device > 1) return complain("the stream of a device that there is not");
    *out = NULL;
    return 0;
}

/* --- attention ---------------------------------------------------------------------------------------------------- */

static int number_type(int type) { return type == FLOAT32 ? R_32F : type == HALF ? R_16F : R_16BF; }
static int64_t at(const tensor *t, int64_t b, int64_t s, int64_t h) {
    return b * t->stride[0] + s * t->stride[1] + h * t->stride[2];
}
static double element(const tensor *t, int64_t i) { return get(number_type(t->type), t->data, i); }
static void set(tensor *t, int64_t i, double x) { put(number_type(t->type), t->data, i, x); }

static bool operand_fits(const tensor *t, const tensor *like, bool aligned) {
    if (!is(t) || t->rank != 4 || t->stride[3] != 1 || t->type != like->type) return false;
    if (t->type != HALF && t->type != BFLOAT16) return false;
    for (int d = 0; d < 3; d++)
        if (aligned && t->dim[d] > 1 && t->stride[d] % 8) return false;
    return t->dim[0] == like->dim[0] && t->dim[2] == like->dim[2] && (!aligned || (uintptr_t)t->data % 16 == 0);
}

static const char *wrong(const tensor *q, const tensor *k, const tensor *v, double dropout, int64_t mask) {
    const uint64_t *on = _ZN3c104impl26raw_local_dispatch_key_setE;
    if (on[0] || on[1]) return "attention sees what the user has switched on";
    if (fake_capturing()) return "attention by torch during a capture";
    if (!fake_in_context()) return "attention without the device's context";
    if (!is(q) || !operand_fits(q, q, true) || !operand_fits(k, q, true) || !operand_fits(v, q, true))
        return "operands of attention";
    if (k->dim[3] != q->dim[3] || v->dim[1] != k->dim[1]) return "sizes of attention";
    return dropout != 0 || mask < 0 || mask > 1 ? "a form of attention" : NULL;
}

typedef struct work {
    const tensor *q, *k, *v;
    int64_t mask;
    double scale;
} work;

static double score(const work *w, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t qi = at(w->q, b, i, h), kj = at(w->k, b, j, h);
    double sum = 0;
    for (int64_t d = 0; d < w->q->dim[3]; d++) sum += element(w->q, qi + d) * element(w->k, kj + d);
    return w->scale * sum;
}

static void attend(const work *w, int64_t b, int64_t h, int64_t i, tensor *y, tensor *lse, double *x) {
    const int64_t keys = w->mask ? i + 1 : w->k->dim[1];
    double most = -INFINITY, total = 0;

    for (int64_t j = 0; j < keys; j++) most = fmax(most, x[j] = score(w, b, h, i, j));
    for (int64_t j = 0; j < keys; j++) total += x[j] = exp(x[j] - most);
    for (int64_t d = 0; d < w->v->dim[3]; d++) {
        double sum = 0;
        for (int64_t j = 0; j < keys; j++) sum += x[j] * element(w->v, at(w->v, b, j, h) + d);
        set(y, at(y, b, i, h) + d, sum / total);
    }
    if (lse) set(lse, b * lse->stride[0] + h * lse->stride[1] + i, most + log(total));
}

int aoti_torch_cuda__efficient_attention_forward(tensor *q, tensor *k, tensor *v, tensor **bias, tensor **starts_q,
                                                 tensor **starts_k, int64_t *longest_q, int64_t *longest_k,
                                                 double dropout, int64_t mask, int32_t with_lse, double *scale,
                                                 tensor **lengths, int64_t *window, tensor **y, tensor **lse,
                                                 tensor **seed, tensor **offset, int64_t *out_q, int64_t *out_k) {
    const char *what = wrong(q, k, v, dropout, mask);

    if (!enter()) return 1;
    if (what) return complain(what);
    if (bias || starts_q || starts_k || longest_q || longest_k || lengths || window || !scale || !out_q || !out_k)
        return complain("what else attention takes");
    const int64_t room = with_lse ? (q->dim[1] + ROUND - 1) / ROUND * ROUND : 0, none[] = {1};
    *y = make(q->type, 4, (int64_t[]){q->dim[0], q->dim[1], q->dim[2], v->dim[3]});
    *lse = make(FLOAT32, 3, (int64_t[]){q->dim[0], q->dim[2], room});
    *seed = make(FLOAT32, 1, none);
    *offset = make(FLOAT32, 1, none);
    *out_q = q->dim[1], *out_k = k->dim[1];
    double *x = calloc((size_t)k->dim[1] + 1, sizeof *x);
    const work w = {q, k, v, mask, *scale};
    for (int64_t n = 0; n < q->dim[0] * q->dim[2] * q->dim[1]; n++)
        attend(&w, n / q->dim[1] / q->dim[2], n / q->dim[1] % q->dim[2], n % q->dim[1], *y, with_lse ? *lse : NULL, x);
    free(x);
    attentions++;
    return 0;
}

static void add(double *to, const tensor *t, int64_t from, int64_t n, double by) {
    for (int64_t d = 0; d < n; d++) to[d] += by * element(t, from + d);
}

static void store(tensor *to, int64_t from, const double *x, int64_t n) {
    for (int64_t d = 0; d < n; d++) set(to, from + d, x[d]);
}

/* All of one head of one sequence; sums: of dq, dk, dv. */
static void turn_back(const work *w, const tensor *dy, const tensor *y, const tensor *lse, int64_t b, int64_t h,
                      tensor *d[3], double *sums) {
    const int64_t queries = w->q->dim[1], keys = w->k->dim[1], width = w->q->dim[3], out = w->v->dim[3];
    double *dq = sums, *dk = dq + queries * width, *dv = dk + keys * width;

    memset(sums, 0, sizeof *sums * (size_t)((queries + keys) * width + keys * out));
    for (int64_t i = 0; i < queries; i++) {
        const int64_t row = at(dy, b, i, h), most = w->mask ? i + 1 : keys;
        double delta = 0;
        for (int64_t e = 0; e < out; e++) delta += element(dy, row + e) * element(y, at(y, b, i, h) + e);
        for (int64_t j = 0; j < most; j++) {
            const int64_t vj = at(w->v, b, j, h);
            const double p = exp(score(w, b, h, i, j) - element(lse, b * lse->stride[0] + h * lse->stride[1] + i));
            double dp = 0;
            for (int64_t e = 0; e < out; e++) dp += element(dy, row + e) * element(w->v, vj + e);
            const double ds = p * (dp - delta) * w->scale;
            add(dv + j * out, dy, row, out, p);
            add(dq + i * width, w->k, at(w->k, b, j, h), width, ds);
            add(dk + j * width, w->q, at(w->q, b, i, h), width, ds);
        }
    }
    for (int64_t i = 0; i < queries; i++) store(d[0], at(d[0], b, i, h), dq + i * width, width);
    for (int64_t j = 0; j < keys; j++) store(d[1], at(d[1], b, j, h), dk + j * width, width);
    for (int64_t j = 0; j < keys; j++) store(d[2], at(d[2], b, j, h), dv + j * out, out);
}

int aoti_torch_cuda__efficient_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor **bias, tensor *y,
                                                  tensor **starts_q, tensor **starts_k, int64_t longest_q,
                                                  int64_t longest_k, tensor *lse, double dropout, tensor *seed,
                                                  tensor *offset, int64_t mask, int32_t with_dbias, double *scale,
                                                  int64_t *splits, int64_t *window, int32_t shared, tensor **dq,
                                                  tensor **dk, tensor **dv, tensor **dbias) {
    const char *what = wrong(q, k, v, dropout, mask);

    if (!enter()) return 1;
    if (what) return complain(what);
    if (bias || starts_q || starts_k || with_dbias || window || shared || !scale || !is(seed) || !is(offset))
        return complain("what else attention's gradient takes");
    if (!splits || *splits != 1) return complain("a gradient of attention that is not the same every time");
    if (!operand_fits(dy, q, false) || !operand_fits(y, q, false) || !is_dense(y))
        return complain("the result of attention, and its gradient");
    if (longest_q != q->dim[1] || longest_k != k->dim[1]) return complain("lengths of attention");
    if (!is(lse) || lse->type != FLOAT32 || lse->rank != 3 || lse->dim[0] != q->dim[0] || lse->dim[1] != q->dim[2] ||
        lse->dim[2] % ROUND || lse->dim[2] < q->dim[1] || lse->stride[2] != 1 || (uintptr_t)lse->data % 16)
        return complain("sums of attention");
    tensor *const like[] = {q, k, v};
    tensor *d[3];
    for (int i = 0; i < 3; i++) d[i] = make(q->type, 4, like[i]->dim);
    double *sums = malloc(sizeof *sums * (size_t)((q->dim[1] + k->dim[1]) * q->dim[3] + k->dim[1] * v->dim[3] + 1));
    const work w = {q, k, v, mask, *scale};
    for (int64_t n = 0; n < q->dim[0] * q->dim[2]; n++)
        turn_back(&w, dy, y, lse, n / q->dim[2], n % q->dim[2], d, sums);
    free(sums);
    *dq = d[0], *dk = d[1], *dv = d[2];
    *dbias = make(FLOAT32, 1, (const int64_t[]){1});
    attentions++;
    return 0;
}
