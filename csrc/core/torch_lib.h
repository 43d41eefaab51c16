/* torch_lib.h -- functions of the libraries torch has already loaded, found at run time.
 *
 * Nothing here is linked or required: without torch (the engine's C tests), or in a build of torch that lacks a
 * symbol, its pointer is NULL and the caller has another way, which torch_lib_symbol tells the user of. Three kinds are
 * looked for: BLAS, which the wheels happen to export; torch's C shim, whose functions return 0 on success and own no
 * argument; and one variable of C++ (torch_enter). */
#ifndef ORT_EXEC_TORCH_LIB_H
#define ORT_EXEC_TORCH_LIB_H

#include "core/shape.h"

typedef struct aten_tensor *aten; /* torch's handle of an at::Tensor */

/* What the functions are for, and what happens without one. */
#define FOR_PRODUCTS "products of float32 and float64 on the CPU: the engine's own kernel is used, which is slower"
#define FOR_BF16 "products of bfloat16 on the CPU, with AMX: the engine's own kernel is used"
#define FOR_NARROW "products of 16-bit floats on the CPU: the engine's own kernel is used, which is slower"
#define FOR_CONVOLUTIONS "large convolutions on the CPU: products over columns are used, which are slower"
#define FOR_ATTENTION "attention of long sequences on the CPU: the engine's own kernel is used, which is slower"
#define FOR_GPU_ATTENTION "attention of long sequences on a GPU: the engine's own kernels are used, which are slower"
#define FOR_FLASH                                                                                                         \
    "attention of 16-bit floats on a GPU by flash attention or cuDNN: torch's memory-efficient attention is used, which " \
    "is slower, or the engine's own kernels"
#define FOR_TENSORS "torch's functions on memory of the engine: its own kernels are used, which are slower"
#define FOR_RANGES "operators in traces of torch.profiler: it does not see those that the engine runs"
#define FOR_CALLS                                                                                                      \
    "torch's functions out of reach of a user's autocast: the engine's own kernels are used, which are slower"

/* Each row is one function: result, name of the member and of the symbol, parameters, what it is for. BLAS takes its
 * integers as pointers: they point to 64-bit ones here, which on a little-endian machine a library of 32-bit integers
 * reads right as well. */
#define TORCH_LIB_FUNCTIONS(F)                                                                                         \
    F(void, sgemm_,                                                                                                    \
      (const char *trans_a, const char *trans_b, const int64_t *m, const int64_t *n, const int64_t *k,                 \
       const float *alpha, const float *a, const int64_t *lda, const float *b, const int64_t *ldb, const float *beta,  \
       float *c, const int64_t *ldc),                                                                                  \
      FOR_PRODUCTS)                                                                                                    \
    F(void, dgemm_,                                                                                                    \
      (const char *trans_a, const char *trans_b, const int64_t *m, const int64_t *n, const int64_t *k,                 \
       const double *alpha, const double *a, const int64_t *lda, const double *b, const int64_t *ldb,                  \
       const double *beta, double *c, const int64_t *ldc),                                                             \
      FOR_PRODUCTS)                                                                                                    \
    F(void, gemm_bf16bf16f32_,                                                                                         \
      (const char *trans_a, const char *trans_b, const int64_t *m, const int64_t *n, const int64_t *k,                 \
       const float *alpha, const void *a, const int64_t *lda, const void *b, const int64_t *ldb, const float *beta,    \
       float *c, const int64_t *ldc),                                                                                  \
      FOR_BF16)                                                                                                        \
    F(int32_t, aoti_torch_dtype_float32, (void), FOR_TENSORS)                                                          \
    F(int32_t, aoti_torch_dtype_float64, (void), FOR_TENSORS)                                                          \
    F(int32_t, aoti_torch_dtype_bfloat16, (void), FOR_TENSORS)                                                         \
    F(int32_t, aoti_torch_dtype_float16, (void), FOR_TENSORS)                                                          \
    F(int32_t, aoti_torch_device_type_cpu, (void), FOR_TENSORS)                                                        \
    F(int32_t, aoti_torch_device_type_cuda, (void), FOR_GPU_ATTENTION)                                                 \
    F(int32_t, aoti_torch_create_tensor_from_blob,                                                                     \
      (void *data, int64_t rank, const int64_t *dim, const int64_t *stride, int64_t offset, int32_t type,              \
       int32_t device_type, int32_t device_index, aten *out),                                                          \
      FOR_TENSORS)                                                                                                     \
    F(int32_t, aoti_torch_delete_tensor_object, (aten t), FOR_TENSORS)                                                 \
    F(int32_t, aoti_torch_get_data_ptr, (aten t, void **out), FOR_TENSORS)                                             \
    F(int32_t, aoti_torch_get_numel, (aten t, int64_t *out), FOR_TENSORS)                                              \
    F(int32_t, aoti_torch_get_stride, (aten t, int64_t axis, int64_t *out), FOR_TENSORS)                               \
    F(int32_t, aoti_torch_cpu_baddbmm_out, (aten out, aten self, aten a, aten b, double beta, double alpha),           \
      FOR_NARROW)                                                                                                      \
    F(int32_t, aoti_torch_cpu_convolution,                                                                             \
      (aten x, aten w, const aten *bias, const int64_t *stride, int64_t n_stride, const int64_t *pad, int64_t n_pad,   \
       const int64_t *dilation, int64_t n_dilation, int32_t transposed, const int64_t *out_pad, int64_t n_out_pad,     \
       int64_t groups, aten *y),                                                                                       \
      FOR_CONVOLUTIONS)                                                                                                \
    F(int32_t, aoti_torch_cpu_convolution_backward,                                                                    \
      (aten dy, aten x, aten w, const int64_t **bias_size, int64_t n_bias_size, const int64_t *stride,                 \
       int64_t n_stride, const int64_t *pad, int64_t n_pad, const int64_t *dilation, int64_t n_dilation,               \
       int32_t transposed, const int64_t *out_pad, int64_t n_out_pad, int64_t groups, const int32_t *mask,             \
       int64_t n_mask, aten *dx, aten *dw, aten *db),                                                                  \
      FOR_CONVOLUTIONS)                                                                                                \
    F(int32_t, aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu,                                             \
      (aten q, aten k, aten v, double dropout, int32_t causal, const aten *mask, const double *scale, aten *y,         \
       aten *lse),                                                                                                     \
      FOR_ATTENTION)                                                                                                   \
    F(int32_t, aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward,                                    \
      (aten dy, aten q, aten k, aten v, aten y, aten lse, double dropout, int32_t causal, const aten *mask,            \
       const double *scale, aten *dq, aten *dk, aten *dv),                                                             \
      FOR_ATTENTION)                                                                                                   \
    F(int32_t, aoti_torch_get_device_type, (aten t, int32_t *out), FOR_GPU_ATTENTION)                                  \
    F(int32_t, aoti_torch_get_current_cuda_stream, (int32_t device, void **out), FOR_GPU_ATTENTION)                    \
    F(int32_t, aoti_torch_cuda__efficient_attention_forward,                                                           \
      (aten q, aten k, aten v, const aten *bias, const aten *starts_q, const aten *starts_k, const int64_t *longest_q, \
       const int64_t *longest_k, double dropout, int64_t mask, int32_t with_lse, const double *scale,                  \
       const aten *lengths_k, const int64_t *window, aten *y, aten *lse, aten *seed, aten *offset,                     \
       int64_t *longest_q_out, int64_t *longest_k_out),                                                                \
      FOR_GPU_ATTENTION)                                                                                               \
    F(int32_t, aoti_torch_cuda__efficient_attention_backward,                                                          \
      (aten dy, aten q, aten k, aten v, const aten *bias, aten y, const aten *starts_q, const aten *starts_k,          \
       int64_t longest_q, int64_t longest_k, aten lse, double dropout, aten seed, aten offset, int64_t mask,           \
       int32_t with_dbias, const double *scale, const int64_t *splits, const int64_t *window, int32_t shared,          \
       aten *dq, aten *dk, aten *dv, aten *dbias),                                                                     \
      FOR_GPU_ATTENTION)                                                                                               \
    F(int32_t, aoti_torch_cuda__flash_attention_forward,                                                               \
      (aten q, aten k, aten v, const aten *starts_q, const aten *starts_k, int64_t longest_q, int64_t longest_k,       \
       double dropout, int32_t causal, int32_t with_mask, const double *scale, const int64_t *window_left,             \
       const int64_t *window_right, const aten *used_k, const aten *slopes, aten *y, aten *lse, aten *drawn,           \
       aten *unused, aten *mask),                                                                                      \
      FOR_FLASH)                                                                                                       \
    F(int32_t, aoti_torch_cuda__flash_attention_backward,                                                              \
      (aten dy, aten q, aten k, aten v, aten y, aten lse, aten starts_q, aten starts_k, int64_t longest_q,             \
       int64_t longest_k, double dropout, int32_t causal, aten drawn, aten unused, const double *scale,                \
       const int64_t *window_left, const int64_t *window_right, aten *dq, aten *dk, aten *dv),                         \
      FOR_FLASH)                                                                                                       \
    F(int32_t, aoti_torch_cuda__scaled_dot_product_cudnn_attention,                                                    \
      (aten q, aten k, aten v, const aten *bias, int32_t with_lse, double dropout, int32_t causal, int32_t with_mask,  \
       const double *scale, aten *y, aten *lse, aten *starts_q, aten *starts_k, int64_t *longest_q,                    \
       int64_t *longest_k, aten *seed, aten *offset, aten *mask),                                                      \
      FOR_FLASH)                                                                                                       \
    F(int32_t, aoti_torch_cuda__scaled_dot_product_cudnn_attention_backward,                                           \
      (aten dy, aten q, aten k, aten v, aten y, aten lse, aten seed, aten offset, aten bias, aten starts_q,            \
       aten starts_k, int64_t longest_q, int64_t longest_k, double dropout, int32_t causal, const double *scale,       \
       aten *dq, aten *dk, aten *dv),                                                                                  \
      FOR_FLASH)                                                                                                       \
    F(int32_t, aoti_torch_new_uninitialized_tensor, (aten * out), FOR_FLASH)                                           \
    F(int32_t, aoti_torch_dtype_uint64, (void), FOR_FLASH)                                                             \
    F(int32_t, aoti_torch_get_dim, (aten t, int64_t *out), FOR_FLASH)                                                  \
    F(int32_t, aoti_record_function_start,                                                                             \
      (const char *name, void *named, void *const *operands, uint64_t n_operands, void **out), FOR_RANGES)             \
    F(int32_t, aoti_record_function_end, (void *range), FOR_RANGES)                                                    \
    F(int32_t, aoti_torch_tensor_to_ivalue, (aten t, void **out), FOR_RANGES)                                          \
    F(int32_t, aoti_torch_delete_c10_value_object, (void *x), FOR_RANGES)                                              \
    F(int32_t, aoti_torch_dtype_int64, (void), FOR_RANGES)                                                             \
    F(int32_t, aoti_torch_dtype_int32, (void), FOR_RANGES)                                                             \
    F(int32_t, aoti_torch_dtype_bool, (void), FOR_RANGES)

typedef struct torch_lib {
    void *handle; /* of the library, NULL without torch */
#define TORCH_LIB_MEMBER(result, name, parameters, use) result(*name) parameters;
    TORCH_LIB_FUNCTIONS(TORCH_LIB_MEMBER)
#undef TORCH_LIB_MEMBER
} torch_lib;

/* Looked up at the first call, from any thread; never NULL. */
const torch_lib *torch_lib_get(void);
/* The same functions as torch's library for GPUs has them; its handle is NULL as long as that is not loaded. */
const torch_lib *torch_cuda_get(void);
/* One name that is looked up in torch's libraries: what it is for and what happens without it, and whether it is there.
 * Names for GPUs are there where torch has no library for them. The i-th; its name is NULL after the last. */
typedef struct torch_symbol {
    const char *name, *use;
    bool found;
} torch_symbol;
torch_symbol torch_lib_symbol(size_t i);
/* Whether it has all that attention by torch needs (ops/attention/fused_attention_shim.c, cuda/kernels/torch_attention.cu). */
bool torch_has_attention(bool cuda);
/* Whether it has flash attention for GPUs besides, which takes fewer heads of keys, and drops elements. */
bool torch_has_flash_attention(void);

/* A tensor over memory of ours, which must outlive it; NULL when torch cannot make one. */
aten torch_tensor(const torch_lib *t, dtype type, const void *data, int rank, const int64_t *dim,
                  const int64_t *stride);
/* The same on a GPU; a handle of torch_cuda_get. */
aten torch_tensor_there(const torch_lib *t, int device, dtype type, const void *data, int rank, const int64_t *dim,
                        const int64_t *stride);
/* `count` 64-bit words without a sign, as torch keeps the state of its random numbers. */
aten torch_words_there(const torch_lib *t, int device, const void *data, int64_t count);
/* The first for a contiguous tensor. */
aten torch_contiguous(const torch_lib *t, dtype type, const void *data, const shape *s);
void torch_tensor_free(const torch_lib *t, aten x); /* NULL is fine */
/* The elements of a tensor that torch made, which should be of this shape and lie so; NULL when it is no such. */
const void *torch_tensor_data(const torch_lib *t, aten x, const shape *s, const int64_t *stride);

/* Does torch have vector instructions for this 16-bit float on this machine? Otherwise it goes element by element. */
bool torch_has_narrow(dtype type);

/* Between enter and leave, torch's functions called on this thread see none of what a user's program may have switched
 * on around us: autocast, dispatch modes, function transforms. False: it cannot be had, and nothing was changed. */
typedef struct torch_quiet {
    uint64_t *state, saved[2];
} torch_quiet;
bool torch_enter(const torch_lib *t, torch_quiet *q);
void torch_leave(const torch_quiet *q);

/* A call between the two, and its handles: those that are there are freed at its end. */
typedef struct torch_call {
    const torch_lib *t;
    torch_quiet quiet;
    aten in[12], out[7];
} torch_call;
bool torch_begin(torch_call *c, const torch_lib *t); /* false: there is no call */
void torch_end(torch_call *c);
/* A range in the trace of torch's profiler; {0}: none, which ends as any. */
typedef struct torch_range {
    void *handle;
} torch_range;
/* `operands`: on the CPU, with or without memory; of those of types that torch_lib knows the profiler keeps the shapes,
 * if it is to. */
void torch_range_begin(const char *name, int n_operands, const tensor *operands, torch_range *out);
void torch_range_end(torch_range *range);

/* Copies out[i], which should be of this shape and lie so, to memory where it lies alike; false when it is no such. */
bool torch_take(const torch_call *c, int i, dtype type, const shape *s, const int64_t *stride, void *to);

#endif
