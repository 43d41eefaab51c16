/* fake_torch.c -- makes a libtorch_cuda.so with what csrc/cuda/libraries/attention.c calls of torch's C shim. That is
 * tensors, and attention by cuDNN, by flash attention and by the memory-efficient kernels, computed on the CPU in
 * float64.
 *
 * It checks what it is told: layouts and alignments, types, that nothing of the user's is switched on, that no stream is
 * captured but by the user, that backward is to add in one order, and that what it gets back is what there is. What it
 * allocates is full of rubbish, and again when it is given back. A graph of the user's draws again in each replay, and
 * keeps what was allocated for it.
 *     fake_attentions()    how often attention was computed, forward and backward
 *     fake_attentions_by(k) the same of one kernel: 0 cuDNN's, 1 flash attention, 2 the memory-efficient one
 *     fake_torch_lacks(k)  that one fails, always; 3: each; -1: none
 *     fake_cudnn_rank(r)   the rank of cuDNN's sums, which versions of torch have 3 and 4
 *     fake_lengths(k, out, n)  of the last call over lists of rows, of its queries (k = 0) or keys (1), the first n
 *                          sequences' lengths; returns how many sequences it had, 0: there was no such call
 *     fake_torch_fails(n)  the n-th tensor or computation from now on fails; 0: none */
#define _GNU_SOURCE
#include "fake.h"
#include "fake_numbers.h"

#include <math.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum {
    FLOAT32 = 6,
    HALF = 5,
    BFLOAT16 = 15,
    INT32 = 3,
    INT64 = 4,
    UINT64 = 29,
    CPU = 0,
    CUDA = 1,
    TENSOR = 0x5445,
    ROUND = 32,
    MOST = 64
};

typedef struct tensor {
    int kind, type, rank;
    int64_t dim[4], stride[4];
    char *data, *owned;
    size_t bytes;
    bool of_graph; /* made while a graph was captured: it stays, and numbers of the generator are on the GPU */
} tensor;

EXPORT int fake_attentions(void);
EXPORT void fake_torch_fails(int n);
EXPORT int fake_attentions_by(int kernel);
EXPORT void fake_torch_lacks(int kernel);
EXPORT void fake_cudnn_rank(int rank);
EXPORT int fake_lengths(int side, int *out, int n);
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
CONSTANT(aoti_torch_dtype_int32, INT32)
CONSTANT(aoti_torch_dtype_int64, INT64)
CONSTANT(aoti_torch_device_type_cpu, CPU)
CONSTANT(aoti_torch_device_type_cuda, CUDA)

EXPORT int aoti_torch_create_tensor_from_blob(void *data, int64_t rank, const int64_t *dim, const int64_t *stride,
                                              int64_t offset, int32_t type, int32_t device_type, int32_t device,
                                              tensor **out);
EXPORT int aoti_torch_delete_tensor_object(tensor *t);
EXPORT int aoti_torch_get_data_ptr(tensor *t, void **out);
EXPORT int aoti_torch_get_numel(tensor *t, int64_t *out);
EXPORT int aoti_torch_get_device_type(tensor *t, int32_t *out);
EXPORT int aoti_torch_get_dim(tensor *t, int64_t *out);
EXPORT int aoti_torch_get_stride(tensor *t, int64_t axis, int64_t *out);
EXPORT int aoti_torch_get_current_cuda_stream(int32_t device, void **out);
EXPORT int aoti_torch_new_uninitialized_tensor(tensor **out);
EXPORT int aoti_torch_cuda__efficient_attention_forward(tensor *q, tensor *k, tensor *v, tensor **bias,
                                                        tensor **starts_q, tensor **starts_k, int64_t *longest_q,
                                                        int64_t *longest_k, double dropout, int64_t mask,
                                                        int32_t with_lse, double *scale, tensor **used, int64_t *window,
                                                        tensor **y, tensor **lse, tensor **seed, tensor **offset,
                                                        int64_t *out_q, int64_t *out_k);
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
    const bool on_cpu = type == INT64 && !fake_capturing();
    if (!data || rank < 1 || rank > 4 || offset || device_type != (on_cpu ? CPU : CUDA) || device < 0 || device > 1)
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
    *t = (tensor){.kind = TENSOR, .type = type, .rank = rank, .of_graph = fake_capturing()};
    for (int d = rank - 1; d >= 0; d--) t->dim[d] = dim[d], t->stride[d] = step, step *= dim[d];
    t->bytes = (size_t)count(t) * (type == UINT64 || type == INT64 ? 8 : type == FLOAT32 ? 4 : 2) + 1;
    if (!(t->data = t->owned = aligned_alloc(512, (t->bytes + 511) / 512 * 512))) return free(t), NULL;
    memset(t->owned, 0xff, t->bytes);
    fake_hold(1);
    return t;
}

int aoti_torch_delete_tensor_object(tensor *t) {
    (void)fake_enter();
    if (!is(t)) return complain("a tensor given back that there is not");
    if (t->owned && !t->of_graph) memset(t->owned, 0xff, t->bytes);
    if (!t->of_graph) free(t->owned);
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

/* Numbers of the generator are on the CPU, if they are not a graph's; all else is not. */
int aoti_torch_get_device_type(tensor *t, int32_t *out) {
    if (!is(t)) return complain("the device of a tensor that there is not");
    *out = t->type == INT64 && !t->of_graph ? CPU : CUDA;
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

static int64_t padded(int64_t length) { return (length + ROUND - 1) / ROUND * ROUND; }

/* torch's generator. */
static uint64_t generator[2] = {0x5eed, 0};
static void draw(uint64_t drawn[2]) {
    generator[1]++;
    memcpy(drawn, generator, sizeof generator);
}

#include "fake_attention.h"

static tensor *one(int type) { return make(type, 1, (const int64_t[]){1}); }

static tensor *number(uint64_t x) {
    tensor *t = one(INT64);
    memcpy(t->data, &x, sizeof x);
    return t;
}

/* As the kernel wants it; NULL: there is none. */
static const char *take_bias(work *w, tensor **bias) {
    if (!bias) return NULL;
    const tensor *t = *bias;
    if (!is(t) || t->rank != 4 || t->type != w->q.type || t->stride[3] != 1 || (uintptr_t)t->data % 16)
        return "a bias of attention";
    if (t->dim[0] != w->q.dim[0] || t->dim[1] != w->q.dim[2] || t->dim[2] != w->q.dim[1] || t->dim[3] != w->k.dim[1])
        return "sizes of a bias";
    for (int d = 0; d < 3; d++)
        if (t->dim[d] > 1 && t->stride[d] % (t->type == FLOAT32 ? 4 : 8)) return "rows of a bias that are not aligned";
    w->bias = t;
    return NULL;
}

static work efficient_work(const tensor *q, const tensor *k, const tensor *v, double dropout, int64_t mask,
                           double scale, uint64_t *drawn) {
    return (work){.kernel = EFFICIENT,
                  .q = *q,
                  .k = *k,
                  .v = *v,
                  .causal = mask == 1,
                  .scale = scale,
                  .dropout = dropout,
                  .drawn = drawn};
}

int aoti_torch_cuda__efficient_attention_forward(tensor *q, tensor *k, tensor *v, tensor **bias, tensor **starts_q,
                                                 tensor **starts_k, int64_t *longest_q, int64_t *longest_k,
                                                 double dropout, int64_t mask, int32_t with_lse, double *scale,
                                                 tensor **used, int64_t *window, tensor **y, tensor **lse,
                                                 tensor **seed, tensor **offset, int64_t *out_q, int64_t *out_k) {
    uint64_t drawn[2] = {0};
    work w = efficient_work(q, k, v, dropout, mask, *scale, drawn);
    const char *what = take_bias(&w, bias);

    if (what) return complain(what);
    if (used || window || mask < 0 || mask > 1 || (bias && starts_q)) return complain("what else attention takes");
    const bool draws = dropout != 0, replayed = draws && fake_capturing();
    if (draws && !replayed) draw(drawn);
    *seed = number(drawn[0]), *offset = number(drawn[1]);
    uint64_t *const numbers[] = {(uint64_t *)(void *)(*seed)->data, (uint64_t *)(void *)(*offset)->data};
    if (starts_q) {
        what = starts_k && longest_q && longest_k && q->rank == 4 && q->dim[0] == 1
                   ? take_starts(&w, *starts_q, *starts_k, *longest_q, *longest_k)
                   : "operands of sequences";
        if (what) return complain(what);
        if (forward_listed(&w, with_lse ? padded(*longest_q) : 0, y, lse)) return 1;
        *out_q = *longest_q, *out_k = *longest_k;
    } else {
        if (starts_k || longest_q || longest_k) return complain("what else attention takes");
        if (forward(&w, with_lse ? padded(q->dim[1]) : 0, 3, y, lse, replayed ? numbers : NULL)) return 1;
        *out_q = q->dim[1], *out_k = k->dim[1];
    }
    return 0;
}

/* What was drawn, if something was. */
static const char *take_numbers(const tensor *seed, const tensor *offset, uint64_t drawn[2]) {
    if (!is(seed) || !is(offset) || seed->type != INT64 || offset->type != INT64) return "what attention drew";
    if (fake_capturing()) return NULL; /* it is read when it is there */
    memcpy(&drawn[0], seed->data, sizeof *drawn);
    memcpy(&drawn[1], offset->data, sizeof *drawn);
    return NULL;
}

int aoti_torch_cuda__efficient_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor **bias, tensor *y,
                                                  tensor **starts_q, tensor **starts_k, int64_t longest_q,
                                                  int64_t longest_k, tensor *lse, double dropout, tensor *seed,
                                                  tensor *offset, int64_t mask, int32_t with_dbias, double *scale,
                                                  int64_t *splits, int64_t *window, int32_t shared, tensor **dq,
                                                  tensor **dk, tensor **dv, tensor **dbias) {
    uint64_t drawn[2] = {0};
    work w = efficient_work(q, k, v, dropout, mask, *scale, drawn);
    const char *what = take_bias(&w, bias);

    if (!what && dropout > 0) what = take_numbers(seed, offset, drawn);
    if (what) return complain(what);
    if (window || shared || !is(seed) || !is(offset) || !starts_q != !starts_k || (with_dbias && !bias))
        return complain("what else attention's gradient takes");
    if (!splits || *splits != 1) return complain("a gradient of attention that is not the same every time");
    if (starts_q) {
        what = take_starts(&w, *starts_q, *starts_k, longest_q, longest_k);
        if (what) return complain(what);
        if (backward_listed(&w, dy, y, lse, padded(longest_q), dq, dk, dv)) return 1;
        *dbias = one(FLOAT32);
        return 0;
    }
    if (longest_q != q->dim[1] || longest_k != k->dim[1]) return complain("lengths of attention");
    *dbias = NULL;
    if (with_dbias) { /* its rows are longer than it */
        const int64_t keys = k->dim[1];
        *dbias = make(q->type, 4, (const int64_t[]){q->dim[0], q->dim[2], q->dim[1], (keys + 15) / 16 * 16});
        (*dbias)->dim[3] = keys;
        w.dbias = *dbias;
    }
    uint64_t *const numbers[] = {(uint64_t *)(void *)seed->data, (uint64_t *)(void *)offset->data};
    const bool replayed = dropout > 0 && fake_capturing();
    const int failed = backward(&w, dy, y, lse, 3, padded(q->dim[1]), dq, dk, dv, replayed ? numbers : NULL);
    if (failed && *dbias) (void)aoti_torch_delete_tensor_object(*dbias), *dbias = NULL;
    return failed;
}

int aoti_torch_cuda__flash_attention_forward(tensor *q, tensor *k, tensor *v, tensor **starts_q, tensor **starts_k,
                                             int64_t longest_q, int64_t longest_k, double dropout, int32_t causal,
                                             int32_t with_mask, double *scale, int64_t *left, int64_t *right,
                                             tensor **used, tensor **slopes, tensor **y, tensor **lse, tensor **drawn,
                                             tensor **unused, tensor **mask) {
    uint64_t state[2] = {0};
    work w = {.kernel = FLASH,
              .q = as_one(q),
              .k = as_one(k),
              .v = as_one(v),
              .causal = causal != 0,
              .scale = *scale,
              .dropout = dropout,
              .drawn = state};
    const bool replayed = dropout != 0 && fake_capturing();

    if (with_mask || left || right || used || slopes || !starts_q != !starts_k || (starts_q && q->rank != 3))
        return complain("what else flash attention takes");
    if (!starts_q && (longest_q != q->dim[1] || longest_k != k->dim[1])) return complain("lengths of attention");
    const char *what = starts_q ? take_starts(&w, *starts_q, *starts_k, longest_q, longest_k) : NULL;
    if (what) return complain(what);
    if (dropout != 0 && !replayed) draw(state);
    *drawn = make(UINT64, 1, (const int64_t[]){2});
    uint64_t *const words = (uint64_t *)(void *)(*drawn)->data, *const numbers[] = {words, words + 1};
    memcpy(words, state, sizeof state);
    if (starts_q ? forward_listed(&w, 1, y, lse) : forward(&w, q->dim[1], 3, y, lse, replayed ? numbers : NULL))
        return 1;
    *unused = one(UINT64), *mask = one(FLOAT32);
    return 0;
}

int aoti_torch_cuda__flash_attention_backward(tensor *dy, tensor *q, tensor *k, tensor *v, tensor *y, tensor *lse,
                                              tensor *starts_q, tensor *starts_k, int64_t longest_q, int64_t longest_k,
                                              double dropout, int32_t causal, tensor *drawn, tensor *unused,
                                              double *scale, int64_t *left, int64_t *right, tensor **dq, tensor **dk,
                                              tensor **dv) {
    const bool draws = dropout > 0;
    const bool listed = !is_nothing(starts_q);
    if (is_nothing(starts_k) == listed || !is_nothing(unused) || left || right)
        return complain("what else flash attention's gradient takes");
    if (draws ? !is(drawn) || drawn->type != UINT64 || count(drawn) != 2 || !drawn->data : !is_nothing(drawn))
        return complain("what flash attention drew");
    if (!listed && (longest_q != q->dim[1] || longest_k != k->dim[1])) return complain("lengths of attention");
    work w = {.kernel = FLASH,
              .q = as_one(q),
              .k = as_one(k),
              .v = as_one(v),
              .causal = causal != 0,
              .scale = *scale,
              .dropout = dropout,
              .drawn = (const uint64_t *)(const void *)drawn->data};
    const char *what = listed ? take_starts(&w, starts_q, starts_k, longest_q, longest_k) : NULL;
    if (what) return complain(what);
    if (listed) return backward_listed(&w, dy, y, lse, 1, dq, dk, dv);
    uint64_t *const words = (uint64_t *)(void *)drawn->data, *const numbers[] = {words, draws ? words + 1 : NULL};
    return backward(&w, dy, y, lse, 3, q->dim[1], dq, dk, dv, draws && fake_capturing() ? numbers : NULL);
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
    const work w = {.kernel = CUDNN,
                    .q = turned(q),
                    .k = turned(k),
                    .v = turned(v),
                    .causal = causal != 0,
                    .scale = *scale,
                    .dropout = dropout};

    if (bias || with_mask || !longest_q || !longest_k) return complain("what else cuDNN's attention takes");
    if (forward(&w, with_lse ? q->dim[2] : 0, cudnn_rank, y, lse, NULL)) return 1;
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
    const work w = {.kernel = CUDNN,
                    .q = turned(q),
                    .k = turned(k),
                    .v = turned(v),
                    .causal = causal != 0,
                    .scale = *scale,
                    .dropout = dropout};

    if (!is_nothing(seed) || !is_nothing(offset) || !is_nothing(bias) || !is_nothing(starts_q) || !is_nothing(starts_k))
        return complain("what else cuDNN's gradient of attention takes");
    if (longest_q != q->dim[2] || longest_k != k->dim[2]) return complain("lengths of attention");
    return backward(&w, dy, y, lse, cudnn_rank, q->dim[2], dq, dk, dv, NULL);
}
