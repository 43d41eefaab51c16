/* torch_lib.c -- asks the dynamic linker about torch, and is the one place that does. */
#include "core/torch_lib.h"

#include "core/parallel.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stddef.h>
#include <string.h>

static torch_lib lib, cuda_lib;
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

/* What a thread has switched on, as two words (torch_enter). */
#define THREAD_STATE "_ZN3c104impl26raw_local_dispatch_key_setE"

static const struct {
    const char *name, *use;
    size_t member;
} symbols[] = {
#define TORCH_LIB_ROW(result, name, parameters, use) {#name, use, offsetof(torch_lib, name)},
    TORCH_LIB_FUNCTIONS(TORCH_LIB_ROW)
#undef TORCH_LIB_ROW
};

/* Only what is loaded already: whether there is a torch is the program's business. */
static void look_into(const char *soname, torch_lib *out) {
    out->handle = dlopen(soname, RTLD_NOLOAD | RTLD_LAZY);
    for (size_t i = 0; out->handle && i < sizeof symbols / sizeof symbols[0]; i++) {
        void *found = dlsym(out->handle, symbols[i].name);
        memcpy((char *)out + symbols[i].member, &found, sizeof found); /* ISO C has no cast between the two */
    }
}

static void look_up(void) { look_into("libtorch_cpu.so", &lib); }

const torch_lib *torch_lib_get(void) {
    pthread_once(&once, look_up);
    return &lib;
}

const torch_lib *torch_cuda_get(void) {
    (void)pthread_mutex_lock(&lock);
    if (!cuda_lib.handle) look_into("libtorch_cuda.so", &cuda_lib);
    (void)pthread_mutex_unlock(&lock);
    return &cuda_lib;
}

static bool is_gpus(const char *name) {
    return strncmp(name, "aoti_torch_cuda_", 16) == 0 || strcmp(name, "aoti_torch_get_current_cuda_stream") == 0;
}

torch_symbol torch_lib_symbol(size_t i) {
    const size_t count = sizeof symbols / sizeof symbols[0];
    const torch_lib *t = i < count && is_gpus(symbols[i].name) ? torch_cuda_get() : torch_lib_get();
    const char *name = i < count ? symbols[i].name : i == count ? THREAD_STATE : NULL;

    return (torch_symbol){
        .name = name,
        .use = i < count ? symbols[i].use : FOR_CALLS,
        .found = !name || (t->handle ? dlsym(t->handle, name) != NULL : i < count && is_gpus(name)),
    };
}

bool torch_has_attention(bool cuda) {
    const torch_lib *t = cuda ? torch_cuda_get() : torch_lib_get();
    torch_quiet q;

    if (cuda &&
        (!t->aoti_torch_cuda__efficient_attention_forward || !t->aoti_torch_cuda__efficient_attention_backward ||
         !t->aoti_torch_get_device_type || !t->aoti_torch_dtype_int64 || !t->aoti_torch_device_type_cpu ||
         !t->aoti_torch_get_current_cuda_stream || !t->aoti_torch_device_type_cuda))
        return false;
    if (!cuda &&
        (!t->aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu ||
         !t->aoti_torch_cpu__scaled_dot_product_flash_attention_for_cpu_backward || !t->aoti_torch_device_type_cpu))
        return false;
    if (!t->aoti_torch_get_data_ptr || !t->aoti_torch_create_tensor_from_blob || !t->aoti_torch_delete_tensor_object ||
        !t->aoti_torch_get_numel || !t->aoti_torch_get_stride)
        return false;
    if (!torch_enter(t, &q)) return false; /* it would see the user's autocast and modes */
    torch_leave(&q);
    return true;
}

bool torch_has_flash_attention(void) {
    const torch_lib *t = torch_cuda_get();
    return t->aoti_torch_cuda__flash_attention_forward && t->aoti_torch_cuda__flash_attention_backward &&
           t->aoti_torch_new_uninitialized_tensor && t->aoti_torch_dtype_uint64 && torch_has_attention(true);
}

/* torch's number of an element type; the numbers are asked for, since only the functions' names are stable. */
static bool torch_dtype(const torch_lib *t, dtype type, int32_t *out) {
    int32_t (*const number[DTYPE_COUNT])(void) = {
        [F32] = t->aoti_torch_dtype_float32, [F64] = t->aoti_torch_dtype_float64, [BF16] = t->aoti_torch_dtype_bfloat16,
        [F16] = t->aoti_torch_dtype_float16, [I64] = t->aoti_torch_dtype_int64,   [I32] = t->aoti_torch_dtype_int32,
        [BOOL] = t->aoti_torch_dtype_bool,
    };
    if (!number[type]) return false;
    *out = number[type]();
    return true;
}

/* `number`: torch's, of the type. */
static aten tensor_on(const torch_lib *t, int32_t (*type_of_device)(void), int32_t index, int32_t number,
                      const void *data, int rank, const int64_t *dim, const int64_t *stride) {
    aten x = NULL;

    if (!t->aoti_torch_create_tensor_from_blob || !t->aoti_torch_delete_tensor_object || !type_of_device) return NULL;
    if (t->aoti_torch_create_tensor_from_blob((void *)(uintptr_t)data, rank, dim, stride, 0, number, type_of_device(),
                                              index, &x))
        return NULL;
    return x;
}

aten torch_tensor(const torch_lib *t, dtype type, const void *data, int rank, const int64_t *dim,
                  const int64_t *stride) {
    int32_t number;
    if (!torch_dtype(t, type, &number)) return NULL;
    return tensor_on(t, t->aoti_torch_device_type_cpu, 0, number, data, rank, dim, stride);
}

aten torch_tensor_there(const torch_lib *t, int device, dtype type, const void *data, int rank, const int64_t *dim,
                        const int64_t *stride) {
    int32_t number;
    if (!torch_dtype(t, type, &number)) return NULL;
    return tensor_on(t, t->aoti_torch_device_type_cuda, device, number, data, rank, dim, stride);
}

aten torch_words_there(const torch_lib *t, int device, const void *data, int64_t count) {
    static const int64_t one = 1;
    if (!t->aoti_torch_dtype_uint64) return NULL;
    return tensor_on(t, t->aoti_torch_device_type_cuda, device, t->aoti_torch_dtype_uint64(), data, 1, &count, &one);
}

aten torch_contiguous(const torch_lib *t, dtype type, const void *data, const shape *s) {
    int64_t stride[MAX_RANK];
    stride_contiguous(s, stride);
    return torch_tensor(t, type, data, s->rank, s->dim, stride);
}

const void *torch_tensor_data(const torch_lib *t, aten x, const shape *s, const int64_t *stride) {
    int64_t count, step;
    void *data = NULL;

    if (!x || t->aoti_torch_get_numel(x, &count) || count != shape_count(s)) return NULL;
    for (int i = 0; i < s->rank; i++)
        if (t->aoti_torch_get_stride(x, i, &step) || (s->dim[i] > 1 && step != stride[i])) return NULL;
    return t->aoti_torch_get_data_ptr(x, &data) ? NULL : data;
}

void torch_tensor_free(const torch_lib *t, aten x) {
    if (x) (void)t->aoti_torch_delete_tensor_object(x);
}

bool torch_has_narrow(dtype type) {
#ifdef __x86_64__
    if (type == BF16) return __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl");
    if (type == F16) return __builtin_cpu_supports("avx512fp16");
#endif
    (void)type;
    return false;
}

/* torch keeps what a thread has switched on as two words, coded so that both are 0 in a thread as it begins.
 * The symbol is a thread's own, so it is looked up on the thread that asks. */
bool torch_enter(const torch_lib *t, torch_quiet *q) {
    q->state = t->handle ? dlsym(t->handle, THREAD_STATE) : NULL;
    if (!q->state) return false;
    memcpy(q->saved, q->state, sizeof q->saved);
    memset(q->state, 0, sizeof q->saved);
    return true;
}

void torch_leave(const torch_quiet *q) {
    if (q->state) memcpy(q->state, q->saved, sizeof q->saved);
}

bool torch_begin(torch_call *c, const torch_lib *t) {
    *c = (torch_call){.t = t};
    return torch_enter(t, &c->quiet);
}

void torch_end(torch_call *c) {
    for (size_t i = 0; i < sizeof c->in / sizeof *c->in; i++) torch_tensor_free(c->t, c->in[i]);
    for (size_t i = 0; i < sizeof c->out / sizeof *c->out; i++) torch_tensor_free(c->t, c->out[i]);
    torch_leave(&c->quiet);
}

typedef struct copy {
    const char *from;
    char *to;
} copy;

static void copy_range(void *arg, int64_t first, int64_t last) {
    const copy *k = arg;
    memcpy(k->to + first, k->from + first, (size_t)(last - first));
}

bool torch_take(const torch_call *c, int i, dtype type, const shape *s, const int64_t *stride, void *to) {
    copy k = {.from = torch_tensor_data(c->t, c->out[i], s, stride), .to = to};
    if (!k.from) return false;
    parallel_for(shape_count(s) * (int64_t)dtype_size(type), 4 * GRAIN, copy_range, &k);
    return true;
}

/* --- ranges --------------------------------------------------------------------------------------------------------- */

enum { MOST_SHOWN = 16 }; /* operands of a range */

static void *shown(const torch_lib *t, const tensor *x) {
    void *value = NULL;
    aten handle = x->type == DT_NONE ? NULL : torch_tensor(t, x->type, x->data, x->shape.rank, x->shape.dim, x->stride);

    if (handle && t->aoti_torch_tensor_to_ivalue(handle, &value)) value = NULL;
    torch_tensor_free(t, handle);
    return value;
}

void torch_range_begin(const char *name, int n_operands, const tensor *operands, torch_range *out) {
    const torch_lib *t = torch_lib_get();
    void *values[MOST_SHOWN];
    torch_quiet quiet;
    int n = 0;

    out->handle = NULL;
    if (!t->aoti_record_function_start || !t->aoti_record_function_end || !t->aoti_torch_tensor_to_ivalue ||
        !t->aoti_torch_delete_c10_value_object || !torch_enter(t, &quiet))
        return;
    for (int i = 0; i < n_operands && n < MOST_SHOWN; i++)
        if ((values[n] = shown(t, &operands[i]))) n++;
    if (t->aoti_record_function_start(name, NULL, values, (uint64_t)n, &out->handle)) out->handle = NULL;
    for (int i = 0; i < n; i++) (void)t->aoti_torch_delete_c10_value_object(values[i]);
    torch_leave(&quiet);
}

void torch_range_end(torch_range *range) {
    if (range->handle) (void)torch_lib_get()->aoti_record_function_end(range->handle);
    range->handle = NULL;
}
