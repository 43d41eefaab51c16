/* attention.c -- calls the three kernels of torch's, the fastest first. */
#include "cuda/libraries/attention.h"

#include "cuda/host/refusals.h"

#include <stddef.h>

enum { ROUND = 32, HOPPER = 90, BLACKWELL = 100, CUDNN_WIDTH = 128 };

/* --- cuDNN's -------------------------------------------------------------------------------------------------------- */

/* The only one with the tensor cores' instructions of Hopper. */
static bool cudnn_takes(const attention_call *a) {
    const torch_lib *t = a->call.t;
    return dtype_is_narrow(a->type) && !a->biased && !a->same_bits && a->ratio == 0 && !a->listed && a->nothing &&
           a->queries > 1 && (a->architecture == HOPPER || a->architecture == BLACKWELL) && a->width <= CUDNN_WIDTH &&
           a->value_width <= CUDNN_WIDTH && t->aoti_torch_get_dim &&
           t->aoti_torch_cuda__scaled_dot_product_cudnn_attention &&
           t->aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward;
}

/* Versions of torch have the sums as [B, H, S] or as [B, H, S, 1], and backward wants them as forward returned them. */
static _Atomic int cudnn_rank;

static int cudnn_forward(attention_call *a) {
    aten *in = a->call.in, *out = a->call.out;
    int64_t longest[2], rank;
    const int result = a->call.t->aoti_torch_cuda__scaled_dot_product_cudnn_attention(
        in[ATTENTION_Q], in[ATTENTION_K], in[ATTENTION_V], NULL, a->kept, a->ratio, a->causal, 0, &a->scale, &out[0],
        &out[1], &out[2], &out[3], &longest[0], &longest[1], &out[4], &out[5], &out[6]);

    if (result || !a->kept) return result;
    if (a->call.t->aoti_torch_get_dim(out[1], &rank) || (rank != 3 && rank != 4)) return 1;
    cudnn_rank = (int)rank;
    return 0;
}

static int cudnn_backward(attention_call *a) {
    aten *in = a->call.in, *out = a->call.out;
    return a->call.t->aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward(
        in[ATTENTION_DY], in[ATTENTION_Q], in[ATTENTION_K], in[ATTENTION_V], in[ATTENTION_Y], in[ATTENTION_SUMS],
        a->nothing, a->nothing, a->nothing, a->nothing, a->nothing, a->queries, a->keys, a->ratio, a->causal, &a->scale,
        &out[0], &out[1], &out[2]);
}

/* Where sequences start, as forward takes it. */
static const aten *starts(const attention_call *a, int which) { return a->listed ? &a->call.in[which] : NULL; }

/* --- flash attention ------------------------------------------------------------------------------------------------ */

static bool flash_takes(const attention_call *a) {
    const torch_lib *t = a->call.t;
    if (a->listed && a->queries < 2) return false; /* it would take heads for queries, and turn its sums */
    return dtype_is_narrow(a->type) && !a->biased && a->nothing && a->width == a->value_width &&
           t->aoti_torch_cuda__flash_attention_forward && t->aoti_torch_cuda__flash_attention_backward &&
           (a->ratio == 0 || t->aoti_torch_dtype_uint64);
}

static int flash_forward(attention_call *a) {
    aten *in = a->call.in, *out = a->call.out;
    return a->call.t->aoti_torch_cuda__flash_attention_forward(
        in[ATTENTION_Q], in[ATTENTION_K], in[ATTENTION_V], starts(a, ATTENTION_STARTS_Q), starts(a, ATTENTION_STARTS_K),
        a->queries, a->keys, a->ratio, a->causal, 0, &a->scale, NULL, NULL, NULL, NULL, &out[0], &out[1], &out[2],
        &out[3], &out[4]);
}

static int flash_backward(attention_call *a) {
    aten *in = a->call.in, *out = a->call.out;
    return a->call.t->aoti_torch_cuda__flash_attention_backward(
        in[ATTENTION_DY], in[ATTENTION_Q], in[ATTENTION_K], in[ATTENTION_V], in[ATTENTION_Y], in[ATTENTION_SUMS],
        a->listed ? in[ATTENTION_STARTS_Q] : a->nothing, a->listed ? in[ATTENTION_STARTS_K] : a->nothing, a->queries,
        a->keys, a->ratio, a->causal, in[ATTENTION_DRAWN] ? in[ATTENTION_DRAWN] : a->nothing, a->nothing, &a->scale,
        NULL, NULL, &out[0], &out[1], &out[2]);
}

/* --- the memory-efficient one --------------------------------------------------------------------------------------- */

bool attention_draws_numbers(const attention_call *a) {
    return a->biased || !dtype_is_narrow(a->type) || a->width != a->value_width;
}

static bool efficient_takes(const attention_call *a) {
    return a->type != F64 && a->heads == a->groups && (a->ratio == 0 || (attention_draws_numbers(a) && !a->listed));
}

static const aten *bias(const attention_call *a) { return a->biased ? &a->call.in[ATTENTION_BIAS] : NULL; }

static int efficient_forward(attention_call *a) {
    aten *in = a->call.in, *out = a->call.out;
    int64_t longest[2];
    return a->call.t->aoti_torch_cuda__efficient_attention_forward(
        in[ATTENTION_Q], in[ATTENTION_K], in[ATTENTION_V], bias(a), starts(a, ATTENTION_STARTS_Q),
        starts(a, ATTENTION_STARTS_K), a->listed ? &a->queries : NULL, a->listed ? &a->keys : NULL, a->ratio, a->causal,
        a->kept, &a->scale, NULL, NULL, &out[0], &out[1], &out[2], &out[3], &longest[0], &longest[1]);
}

/* Without dropout seed and offset are not read. */
static int efficient_backward(attention_call *a) {
    static const int64_t one = 1;
    aten *in = a->call.in, *out = a->call.out, sums = in[ATTENTION_SUMS];
    const aten seed = a->ratio > 0 ? in[ATTENTION_SEED] : sums, offset = a->ratio > 0 ? in[ATTENTION_OFFSET] : sums;
    return a->call.t->aoti_torch_cuda__efficient_attention_backward(
        in[ATTENTION_DY], in[ATTENTION_Q], in[ATTENTION_K], in[ATTENTION_V], bias(a), in[ATTENTION_Y],
        starts(a, ATTENTION_STARTS_Q), starts(a, ATTENTION_STARTS_K), a->queries, a->keys, sums, a->ratio, seed, offset,
        a->causal, a->bias_slope, &a->scale, &one, NULL, 0, &out[0], &out[1], &out[2], &out[3]);
}

/* --- which takes a call ----------------------------------------------------------------------------------------------- */

static const attention_kernel kernels[] = {
    {"cuDNN's attention", true, false, 0, 1, cudnn_takes, cudnn_forward, cudnn_backward},
    {"flash attention", false, true, 3, 1, flash_takes, flash_forward, flash_backward},
    {"memory-efficient attention", false, false, 3, ROUND, efficient_takes, efficient_forward, efficient_backward},
};

enum { KERNELS = sizeof kernels / sizeof *kernels, FORMS = 64, MOST_FAILURES = 2 };
static _Atomic int failures[KERNELS][FORMS];

void attention_kernels_forget(void) {
    for (int n = 0; n < KERNELS; n++)
        for (int i = 0; i < FORMS; i++) failures[n][i] = 0;
}

static int form_of(const attention_call *a) {
    return (a->groups < a->heads) + 2 * a->causal + 4 * (a->type == F16) + 8 * (a->width != a->value_width) +
           16 * a->listed + 32 * a->biased;
}

const attention_kernel *attention_kernel_next(const attention_call *a, const attention_kernel *f) {
    for (int n = f ? (int)(f - kernels) + 1 : 0; n < KERNELS; n++)
        if (failures[n][form_of(a)] < MOST_FAILURES && kernels[n].takes(a)) return &kernels[n];
    return NULL;
}

int attention_kernel_rank(const attention_kernel *f) { return f->rank ? f->rank : cudnn_rank; }

void attention_kernel_failed(const attention_call *a, const attention_kernel *f) {
    ctx c;

    if (a->ratio > 0 || ++failures[f - kernels][form_of(a)] != MOST_FAILURES)
        return; /* with dropout that is an error */
    ctx_init(&c);
    if (fail(&c, E_RUNTIME, "torch wrote the reason to the standard error stream") != OK)
        refusal_note(&c, "torch", "%s failed for %lld queries of %lld x %lld heads of width %lld", f->name,
                     (long long)a->queries, (long long)a->heads, (long long)a->groups, (long long)a->width);
    ctx_release(&c);
}
