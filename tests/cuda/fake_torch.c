/* fake_torch.c -- a libtorch_cuda.so with what csrc/cuda/libraries/attention.c calls of torch's C shim: tensors, and
 * attention by cuDNN, by flash attention and by the memory-efficient kernels, computed on the CPU in float64.
 *
 * It checks what it is told: layouts and alignments, types, that nothing of the user's is switched on, that no stream is
 * captured, that backward is to add in one order, and that what it gets back is what there is. What it allocates is
 * full of rubbish, and again when it is given back.
 *     fake_attentions()    how often attention was computed, forward and backward
 *     fake_attentions_by(k) the same of one kernel: 0 cuDNN's, 1 flash attention, 2 the memory-efficient one
 *     fake_torch_lacks(k)  that one fails, always; 3: each; -1: none
 *     fake_cudnn_rank(r)   the rank of cuDNN's sums, which versions of torch have 3 and 4
 *     fake_torch_fails(n)  the n-th tensor or computation from now on fails; 0: none */
#define _GNU_SOURCE
#include "fake.h"
#include "fake_numbers.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { FLOAT32 = 6, HALF = 5, BFLOAT16 = 15, UINT64 = 29, CUDA = 1, TENSOR = 0x5445, ROUND = 32 };

typedef struct tensor {
    int kind, type, rank;
    int64_t dim[4], stride[4];
    char *data, *owned;
    size_t bytes;
} tensor;

EXPORT int fake_attentions(void);
EXPORT void fake_torch_fails(int n);
EXPORT int fake_attentions_by(int kernel);
EXPORT void fake_torch_lacks(int kernel);
EXPORT void fake_cudnn_rank(int rank);
enum { CUDNN, FLASH, EFFICIENT, KERNELS };
static int attentions[KERNELS], fails_in, lacks = -1;
int fake_attentions(void) { return attentions[CUDNN] + attentions[FLASH] + attentions[EFFICIENT]; }
int fake_attentions_by(int kernel) { return attentions[kernel]; }
void fake_torch_lacks(int kernel) { lacks = kernel; }
static int cudnn_rank = 4;
void fake_cudnn_rank(int rank) { cudnn_rank = rank; }
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
CONSTANT(aoti_torch_dtype_uint64, UINT64)
CONSTANT(aoti_torch_device_type_cuda, CUDA)

EXPORT int aoti_torch_create_tensor_from_blob(void *data, int64_t rank, const int64_t *dim, const int64_t *stride,
                                              int64_t offset, int32_t type, int32_t device_type, int32_t device,
                                              tensor **out);
EXPORT int aoti_torch_delete_tensor_object(tensor *t);
EXPORT int aoti_torch_get_data_ptr(tensor *t, void **out);
EXPORT int aoti_torch_get_numel(tensor *t, int64_t *out);
EXPORT int aoti_torch_get_dim(tensor *t, int64_t *out);
EXPORT int aoti_torch_get_stride(tensor *t, int64_t axis, int64_t *out);
EXPORT int aoti_torch_get_current_cuda_stream(int32_t device, void **out);
EXPORT int aoti_torch_new_uninitialized_tensor(tensor **out);
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
EXPORT int aoti_torch_cuda__flash_attention_forward(tensor *q, tensor *k, tensor *v, tensor **starts_q,
                                                    tensor **starts_k, int64_t longest_q, int64_t longest_k,
                                                    double dropout, int32_t causal, int32_t with_mask, double *scale,
                                                    int64_t *left, int64_t *right, tensor **used, tensor **slopes,
                                                    tensor **y, tensor **lse, tensor **drawn, tensor **unused,
                                                    tensor **mask);
EXPORT int aoti_torch_cuda__flash_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor *y,
                                                     tensor *lse, tensor *starts_q, tensor *starts_k, int64_t longest_q,
                                                     int64_t longest_k, double dropout, int32_t causal, tensor *drawn,
                                                     tensor *unused, double *scale, int64_t *left, int64_t *right,
                                                     tensor **dq, tensor **dk, tensor **dv);
EXPORT int aoti_torch_cuda__scaled_dot_product_cudnn_attention(tensor *q, tensor *k, tensor *v, tensor **bias,
                                                               int32_t with_lse, double dropout, int32_t causal,
                                                               int32_t with_mask, double *scale, tensor **y,
                                                               tensor **lse, tensor **starts_q, tensor **starts_k,
                                                               int64_t *longest_q, int64_t *longest_k, tensor **seed,
                                                               tensor **offset, tensor **mask);
EXPORT int aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward(
    tensor *dy, tensor *q, tensor *k, tensor *v, tensor *y, tensor *lse, tensor *seed, tensor *offset, tensor *bias,
    tensor *starts_q, tensor *starts_k, int64_t longest_q, int64_t longest_k, double dropout, int32_t causal,
    double *scale, tensor **dq, tensor **dk, tensor **dv);

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

/* One that is not defined. */
int aoti_torch_new_uninitialized_tensor(tensor **out) {
    if (!enter() || !(*out = calloc(1, sizeof **out))) return 1;
    **out = (tensor){.kind = TENSOR};
    fake_hold(1);
    return 0;
}

static bool is_nothing(const tensor *t) { return is(t) && !t->data; }

static tensor *make(int type, int rank, const int64_t *dim) {
    tensor *t = calloc(1, sizeof *t);
    int64_t step = 1;

    if (!t) return NULL;
    *t = (tensor){.kind = TENSOR, .type = type, .rank = rank};
    for (int d = rank - 1; d >= 0; d--) t->dim[d] = dim[d], t->stride[d] = step, step *= dim[d];
    t->bytes = (size_t)count(t) * (type == UINT64 ? 8 : type == FLOAT32 ? 4 : 2) + 1;
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

int aoti_torch_get_dim(tensor *t, int64_t *out) {
    if (!is(t)) return complain("the rank of a tensor that there is not");
    *out = t->rank;
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

/* A call, with operands as [B, S, H, D]; heads of keys are shared. */
typedef struct work {
    int kernel;
    tensor q, k, v;
    bool causal;
    double scale, dropout;
    const uint64_t *drawn;
} work;

/* As the other of [B, S, H, D] and [B, H, S, D]. */
static tensor turned(const tensor *t) {
    tensor x = *t;
    x.dim[1] = t->dim[2], x.dim[2] = t->dim[1];
    x.stride[1] = t->stride[2], x.stride[2] = t->stride[1];
    return x;
}

static tensor tokens_first(int kernel, const tensor *t) { return kernel == CUDNN && is(t) ? turned(t) : *t; }

static bool operand_fits(int kernel, const tensor *t, const tensor *like, bool aligned) {
    const int64_t step = t->type == FLOAT32 ? 4 : 8;
    if (!is(t) || t->rank != 4 || t->stride[3] != 1 || t->type != like->type) return false;
    if (t->type != HALF && t->type != BFLOAT16 && (kernel != EFFICIENT || t->type != FLOAT32)) return false;
    for (int d = 0; d < 3; d++)
        if (aligned && t->dim[d] > 1 && t->stride[d] % step) return false;
    return t->dim[0] == like->dim[0] && (!aligned || (uintptr_t)t->data % 16 == 0);
}

static const char *wrong(const work *w) {
    const uint64_t *on = _ZN3c104impl26raw_local_dispatch_key_setE;
    const tensor *q = &w->q, *k = &w->k, *v = &w->v;
    if (on[0] || on[1]) return "attention sees what the user has switched on";
    if (fake_capturing()) return "attention by torch during a capture";
    if (!fake_in_context()) return "attention without the device's context";
    if (!operand_fits(w->kernel, q, q, true) || !operand_fits(w->kernel, k, q, true) ||
        !operand_fits(w->kernel, v, q, true))
        return "operands of attention";
    if (k->dim[3] != q->dim[3] || v->dim[1] != k->dim[1] || v->dim[2] != k->dim[2] || q->dim[2] % k->dim[2])
        return "sizes of attention";
    if (w->kernel == EFFICIENT && q->dim[2] != k->dim[2]) return "fewer heads of keys than it takes";
    if (w->kernel == FLASH && q->dim[3] != v->dim[3]) return "other widths than it takes";
    if (w->kernel != FLASH && w->dropout != 0) return "dropout that is not asked for there";
    return w->dropout < 0 || w->dropout >= 1 ? "a form of attention" : NULL;
}

/* What a weight is multiplied by: whether it is dropped follows from what was drawn, and its place. */
static double kept(const work *w, int64_t b, int64_t h, int64_t i, int64_t j) {
    if (w->dropout == 0) return 1;
    const int64_t place = ((b * w->q.dim[2] + h) * w->q.dim[1] + i) * w->k.dim[1] + j;
    uint64_t x = (w->drawn[0] ^ w->drawn[1] * 0x9E3779B97F4A7C15u) + (uint64_t)place * 0xBF58476D1CE4E5B9u;
    x = (x ^ x >> 31) * 0x94D049BB133111EBu;
    return (double)((x ^ x >> 29) >> 11) / 9007199254740992.0 < w->dropout ? 0 : 1 / (1 - w->dropout);
}

static int64_t group(const work *w, int64_t h) { return h * w->k.dim[2] / w->q.dim[2]; }

static double score(const work *w, int64_t b, int64_t h, int64_t i, int64_t j) {
    const int64_t qi = at(&w->q, b, i, h), kj = at(&w->k, b, j, group(w, h));
    double sum = 0;
    for (int64_t d = 0; d < w->q.dim[3]; d++) sum += element(&w->q, qi + d) * element(&w->k, kj + d);
    return w->scale * sum;
}

static void attend(const work *w, int64_t b, int64_t h, int64_t i, tensor *y, tensor *lse, double *x) {
    const int64_t keys = w->causal ? i + 1 : w->k.dim[1];
    double most = -INFINITY, total = 0;

    for (int64_t j = 0; j < keys; j++) most = fmax(most, x[j] = score(w, b, h, i, j));
    for (int64_t j = 0; j < keys; j++) total += x[j] = exp(x[j] - most);
    for (int64_t j = 0; j < keys; j++) x[j] *= kept(w, b, h, i, j);
    for (int64_t d = 0; d < w->v.dim[3]; d++) {
        double sum = 0;
        for (int64_t j = 0; j < keys; j++) sum += x[j] * element(&w->v, at(&w->v, b, j, group(w, h)) + d);
        set(y, at(y, b, i, h) + d, sum / total);
    }
    if (lse) set(lse, b * lse->stride[0] + h * lse->stride[1] + i, most + log(total));
}

/* Results of a call that is right: y, and sums with `room` for each head; none where there is no room. */
static int forward(const work *w, int64_t room, int rank, tensor **y, tensor **lse) {
    const char *what = wrong(w);
    tensor *dense, turn;

    if (!enter() || w->kernel == lacks || lacks == KERNELS) return 1;
    if (what) return complain(what);
    dense = make(w->q.type, 4, (int64_t[]){w->q.dim[0], w->q.dim[1], w->q.dim[2], w->v.dim[3]});
    *lse = make(FLOAT32, rank, (int64_t[]){w->q.dim[0], w->q.dim[2], room, 1});
    double *x = calloc((size_t)w->k.dim[1] + 1, sizeof *x);
    for (int64_t n = 0; n < w->q.dim[0] * w->q.dim[2] * w->q.dim[1]; n++)
        attend(w, n / w->q.dim[1] / w->q.dim[2], n / w->q.dim[1] % w->q.dim[2], n % w->q.dim[1], dense,
               room ? *lse : NULL, x);
    free(x);
    turn = turned(dense);
    if (w->kernel == CUDNN) *dense = turn;
    *y = dense;
    attentions[w->kernel]++;
    return 0;
}

static void add(double *to, const tensor *t, int64_t from, int64_t n, double by) {
    for (int64_t d = 0; d < n; d++) to[d] += by * element(t, from + d);
}

static void store(tensor *to, int64_t from, const double *x, int64_t n) {
    for (int64_t d = 0; d < n; d++) set(to, from + d, x[d]);
}

/* Heads that share keys, of one sequence; sums: of dq of each of these heads, dk, dv. */
static void turn_back(const work *w, const tensor *dy, const tensor *y, const tensor *lse, int64_t b, int64_t g,
                      tensor *d[3], double *sums) {
    const int64_t queries = w->q.dim[1], keys = w->k.dim[1], width = w->q.dim[3], out = w->v.dim[3];
    const int64_t shared = w->q.dim[2] / w->k.dim[2];
    double *dq = sums, *dk = dq + queries * width, *dv = dk + keys * width;

    memset(dk, 0, sizeof *sums * (size_t)(keys * (width + out)));
    for (int64_t h = g * shared; h < (g + 1) * shared; h++) {
        memset(dq, 0, sizeof *sums * (size_t)(queries * width));
        for (int64_t i = 0; i < queries; i++) {
            const int64_t row = at(dy, b, i, h), most = w->causal ? i + 1 : keys;
            double delta = 0;
            for (int64_t e = 0; e < out; e++) delta += element(dy, row + e) * element(y, at(y, b, i, h) + e);
            for (int64_t j = 0; j < most; j++) {
                const double p = exp(score(w, b, h, i, j) - element(lse, b * lse->stride[0] + h * lse->stride[1] + i));
                const double by = kept(w, b, h, i, j);
                double dp = 0;
                for (int64_t e = 0; e < out; e++) dp += element(dy, row + e) * element(&w->v, at(&w->v, b, j, g) + e);
                const double ds = p * (by * dp - delta) * w->scale;
                add(dv + j * out, dy, row, out, p * by);
                add(dq + i * width, &w->k, at(&w->k, b, j, g), width, ds);
                add(dk + j * width, &w->q, at(&w->q, b, i, h), width, ds);
            }
        }
        for (int64_t i = 0; i < queries; i++) store(d[0], at(d[0], b, i, h), dq + i * width, width);
    }
    for (int64_t j = 0; j < keys; j++) store(d[1], at(d[1], b, j, g), dk + j * width, width);
    for (int64_t j = 0; j < keys; j++) store(d[2], at(d[2], b, j, g), dv + j * out, out);
}

static int backward(const work *w, const tensor *dy, const tensor *y, const tensor *lse, int rank, int64_t room,
                    tensor **dq, tensor **dk, tensor **dv) {
    const char *what = wrong(w);
    const tensor *like[] = {&w->q, &w->k, &w->v};
    tensor *d[3], turn, from = tokens_first(w->kernel, dy), of = tokens_first(w->kernel, y);

    if (!enter() || w->kernel == lacks || lacks == KERNELS) return 1;
    if (what) return complain(what);
    if (!operand_fits(w->kernel, &from, &w->q, false) || !operand_fits(w->kernel, &of, &w->q, false) || !is_dense(&of))
        return complain("the result of attention, and its gradient");
    if (!is(lse) || lse->type != FLOAT32 || lse->rank != rank || lse->dim[0] != w->q.dim[0] ||
        lse->dim[1] != w->q.dim[2] || lse->dim[2] != room || lse->stride[2] != 1 || (uintptr_t)lse->data % 16)
        return complain("sums of attention");
    for (int i = 0; i < 3; i++) d[i] = make(w->q.type, 4, like[i]->dim);
    const size_t sizes = (size_t)((w->q.dim[1] + w->k.dim[1]) * w->q.dim[3] + w->k.dim[1] * w->v.dim[3] + 1);
    double *sums = malloc(sizeof *sums * sizes);
    for (int64_t n = 0; n < w->q.dim[0] * w->k.dim[2]; n++)
        turn_back(w, &from, &of, lse, n / w->k.dim[2], n % w->k.dim[2], d, sums);
    free(sums);
    for (int i = 0; i < 3; i++) {
        turn = turned(d[i]);
        if (w->kernel == CUDNN) *d[i] = turn;
    }
    *dq = d[0], *dk = d[1], *dv = d[2];
    attentions[w->kernel]++;
    return 0;
}

static int64_t padded(int64_t length) { return (length + ROUND - 1) / ROUND * ROUND; }
static tensor *one(int type) { return make(type, 1, (const int64_t[]){1}); }

int aoti_torch_cuda__efficient_attention_forward(tensor *q, tensor *k, tensor *v, tensor **bias, tensor **starts_q,
                                                 tensor **starts_k, int64_t *longest_q, int64_t *longest_k,
                                                 double dropout, int64_t mask, int32_t with_lse, double *scale,
                                                 tensor **lengths, int64_t *window, tensor **y, tensor **lse,
                                                 tensor **seed, tensor **offset, int64_t *out_q, int64_t *out_k) {
    const work w = {EFFICIENT, *q, *k, *v, mask == 1, *scale, dropout, NULL};

    if (bias || starts_q || starts_k || longest_q || longest_k || lengths || window || mask < 0 || mask > 1)
        return complain("what else attention takes");
    if (forward(&w, with_lse ? padded(q->dim[1]) : 0, 3, y, lse)) return 1;
    *seed = one(FLOAT32), *offset = one(FLOAT32);
    *out_q = q->dim[1], *out_k = k->dim[1];
    return 0;
}

int aoti_torch_cuda__efficient_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor **bias, tensor *y,
                                                  tensor **starts_q, tensor **starts_k, int64_t longest_q,
                                                  int64_t longest_k, tensor *lse, double dropout, tensor *seed,
                                                  tensor *offset, int64_t mask, int32_t with_dbias, double *scale,
                                                  int64_t *splits, int64_t *window, int32_t shared, tensor **dq,
                                                  tensor **dk, tensor **dv, tensor **dbias) {
    const work w = {EFFICIENT, *q, *k, *v, mask == 1, *scale, dropout, NULL};

    if (bias || starts_q || starts_k || with_dbias || window || shared || !is(seed) || !is(offset))
        return complain("what else attention's gradient takes");
    if (!splits || *splits != 1) return complain("a gradient of attention that is not the same every time");
    if (longest_q != q->dim[1] || longest_k != k->dim[1]) return complain("lengths of attention");
    if (backward(&w, dy, y, lse, 3, padded(q->dim[1]), dq, dk, dv)) return 1;
    *dbias = one(FLOAT32);
    return 0;
}

/* torch's generator. */
static uint64_t generator[2] = {0x5eed, 0};

int aoti_torch_cuda__flash_attention_forward(tensor *q, tensor *k, tensor *v, tensor **starts_q, tensor **starts_k,
                                             int64_t longest_q, int64_t longest_k, double dropout, int32_t causal,
                                             int32_t with_mask, double *scale, int64_t *left, int64_t *right,
                                             tensor **used, tensor **slopes, tensor **y, tensor **lse, tensor **drawn,
                                             tensor **unused, tensor **mask) {
    const work w = {FLASH, *q, *k, *v, causal != 0, *scale, dropout, generator};

    if (starts_q || starts_k || with_mask || left || right || used || slopes || longest_q != q->dim[1] ||
        longest_k != k->dim[1])
        return complain("what else flash attention takes");
    generator[1] += dropout != 0;
    if (forward(&w, q->dim[1], 3, y, lse)) return 1;
    *drawn = make(UINT64, 1, (const int64_t[]){2});
    memcpy((*drawn)->data, generator, sizeof generator);
    *unused = one(UINT64), *mask = one(FLOAT32);
    return 0;
}

int aoti_torch_cuda__flash_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor *y, tensor *lse,
                                              tensor *starts_q, tensor *starts_k, int64_t longest_q, int64_t longest_k,
                                              double dropout, int32_t causal, tensor *drawn, tensor *unused,
                                              double *scale, int64_t *left, int64_t *right, tensor **dq, tensor **dk,
                                              tensor **dv) {
    const bool draws = dropout > 0;
    if (!is_nothing(starts_q) || !is_nothing(starts_k) || !is_nothing(unused) || left || right)
        return complain("what else flash attention's gradient takes");
    if (draws ? !is(drawn) || drawn->type != UINT64 || count(drawn) != 2 || !drawn->data : !is_nothing(drawn))
        return complain("what flash attention drew");
    if (longest_q != q->dim[1] || longest_k != k->dim[1]) return complain("lengths of attention");
    const work w = {FLASH, *q, *k, *v, causal != 0, *scale, dropout, (const uint64_t *)(const void *)drawn->data};
    return backward(&w, dy, y, lse, 3, q->dim[1], dq, dk, dv);
}

static tensor *nothing(void) {
    tensor *t = NULL;
    return aoti_torch_new_uninitialized_tensor(&t) ? NULL : t;
}

int aoti_torch_cuda__scaled_dot_product_cudnn_attention(tensor *q, tensor *k, tensor *v, tensor **bias,
                                                        int32_t with_lse, double dropout, int32_t causal,
                                                        int32_t with_mask, double *scale, tensor **y, tensor **lse,
                                                        tensor **starts_q, tensor **starts_k, int64_t *longest_q,
                                                        int64_t *longest_k, tensor **seed, tensor **offset,
                                                        tensor **mask) {
    const work w = {CUDNN, turned(q), turned(k), turned(v), causal != 0, *scale, dropout, NULL};

    if (bias || with_mask || !longest_q || !longest_k) return complain("what else cuDNN's attention takes");
    if (forward(&w, with_lse ? q->dim[2] : 0, cudnn_rank, y, lse)) return 1;
    *starts_q = nothing(), *starts_k = nothing(), *mask = nothing();
    *seed = one(FLOAT32), *offset = one(FLOAT32);
    *longest_q = q->dim[2], *longest_k = k->dim[2];
    return 0;
}

int aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor *y,
                                                                 tensor *lse, tensor *seed, tensor *offset,
                                                                 tensor *bias, tensor *starts_q, tensor *starts_k,
                                                                 int64_t longest_q, int64_t longest_k, double dropout,
                                                                 int32_t causal, double *scale, tensor **dq,
                                                                 tensor **dk, tensor **dv) {
    const work w = {CUDNN, turned(q), turned(k), turned(v), causal != 0, *scale, dropout, NULL};

    if (!is_nothing(seed) || !is_nothing(offset) || !is_nothing(bias) || !is_nothing(starts_q) || !is_nothing(starts_k))
        return complain("what else cuDNN's gradient of attention takes");
    if (longest_q != q->dim[2] || longest_k != k->dim[2]) return complain("lengths of attention");
    return backward(&w, dy, y, lse, cudnn_rank, q->dim[2], dq, dk, dv);
}
