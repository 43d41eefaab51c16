/* driver.c -- calls the driver: devices, kernels, numbers, time, graphs. */
#include "cuda/host/driver.h"

#include "cuda/host/fault_page.h"
#include "cuda/host/functions.h"
#include "cuda/host/image.h"
#include "cuda/host/named.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { CUDA_OUT_OF_MEMORY = 2, CUDA_NOT_FOUND = 500, CUDA_CAPTURE_IMPLICIT = 906 };
enum { DYNAMIC_SHARED_BYTES = 8, SHARED_BY_DEFAULT = 48 << 10 };
enum { CAPABILITY_MAJOR = 75, CAPABILITY_MINOR = 76 };
enum { CAPTURE_THREAD_LOCAL = 1 };

/* --- errors ------------------------------------------------------------------------------------------------------- */

driver_functions cuda_driver;
static bool is_loaded;

status cuda_refuse(ctx *c, int result, const char *what) {
    const char *text = NULL;
    if (!cuda_driver.cuGetErrorString || cuda_driver.cuGetErrorString(result, &text) != 0 || !text)
        text = "unknown error";
    return fail(c, result == CUDA_OUT_OF_MEMORY ? E_NOMEM : E_RUNTIME, "CUDA error %d in %s: %s", result, what, text);
}

/* --- opening ------------------------------------------------------------------------------------------------------ */

typedef struct device {
    void *context;
    cuda_fault *fault, *fault_there; /* as the host and as the device see it */
    int architecture;                /* 90: sm_90 */
    void *captured;                  /* a stream on which nothing ever runs, or NULL while nothing was captured */
} device;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER, capturing = PTHREAD_MUTEX_INITIALIZER;
static int n_devices = -1; /* -1: the driver is not open */
static device devices[MOST_DEVICES];
static atomic_bool opened[MOST_DEVICES];

static status load_driver(ctx *c) {
    static const char *const sonames[] = {"libcuda.so.1", NULL};
    static const entry_point rows[] = {
#define ROW(name, parameters) {#name, offsetof(driver_functions, name)},
        DRIVER_FUNCTIONS(ROW)
#undef ROW
    };

    if (is_loaded) return OK;
    TRY(library_open(c, "NVIDIA driver", sonames, rows, sizeof rows / sizeof rows[0], &cuda_driver,
                     sizeof cuda_driver));
    is_loaded = true;
    return OK;
}

/* --- forked processes --------------------------------------------------------------------------------------------- */

/* A child of fork has the parent's handles and no context of its own: a call of the driver's may fail, or crash. Its
 * locks may be held by threads that it does not have. */
static atomic_bool is_forked;

bool cuda_is_forked(void) { return atomic_load(&is_forked); }

static void forked(void) { atomic_store(&is_forked, true); }

static status refuse_forked(ctx *c) {
    return fail(c, E_RUNTIME,
                "CUDA was initialised before this process was forked and cannot be used in it: start processes by "
                "multiprocessing's 'spawn' or 'forkserver'");
}

static status open_driver(ctx *c) {
    int count = 0;

    if (n_devices >= 0) return OK;
    if (!cuda_images[0])
        return fail(c, E_UNSUPPORTED, "this build has no CUDA kernels: install it with nvcc and ORTMODULE_CUDA=1");
    TRY(load_driver(c));
    CALL(c, cuInit, 0);
    CALL(c, cuDeviceGetCount, &count);
    if (pthread_atfork(NULL, NULL, forked) != 0) return fail(c, E_NOMEM, "out of memory");
    n_devices = count < MOST_DEVICES ? count : MOST_DEVICES;
    return OK;
}

/* Those that are loaded stay, should one fail: the next attempt goes on there. */
static status open_libraries(ctx *c) {
    for (int i = 0; cuda_images[i]; i++) {
        void *loaded = NULL;
        if (cuda_libraries[i]) continue;
        CALL(c, cuLibraryLoadData, &loaded, cuda_images[i], NULL, NULL, 0, NULL, NULL, 0);
        cuda_libraries[i] = loaded;
    }
    return OK;
}

/* With the device's context current. */
static status open_fault(ctx *c, device *d) {
    void *memory = NULL;
    uint64_t there = 0;
    int result;

    CALL(c, cuMemHostAlloc, &memory, sizeof *d->fault, PINNED_MEMORY);
    if ((result = cuda_driver.cuMemHostGetDevicePointer_v2(&there, memory, 0)) != 0) {
        (void)cuda_driver.cuMemFreeHost(memory);
        return cuda_refuse(c, result, "cuMemHostGetDevicePointer");
    }
    memset(memory, 0, sizeof *d->fault);
    d->fault = memory;
    d->fault_there = (cuda_fault *)(uintptr_t)there;
    return OK;
}

static status open_in_context(ctx *c, device *d, int handle) {
    int major = 0, minor = 0;

    CALL(c, cuDeviceGetAttribute, &major, CAPABILITY_MAJOR, handle);
    CALL(c, cuDeviceGetAttribute, &minor, CAPABILITY_MINOR, handle);
    d->architecture = 10 * major + minor;
    TRY(open_libraries(c));
    return open_fault(c, d);
}

static status open_device(ctx *c, int index) {
    device d = {0};
    void *previous = NULL;
    int handle, result;
    status s;

    TRY(open_driver(c));
    if (index < 0 || index >= n_devices)
        return fail(c, E_UNSUPPORTED, "there is no cuda:%d: the driver knows %d devices", index, n_devices);
    CALL(c, cuDeviceGet, &handle, index);
    CALL(c, cuCtxGetCurrent, &previous);
    CALL(c, cuDevicePrimaryCtxRetain, &d.context, handle);
    s = (result = cuda_driver.cuCtxSetCurrent(d.context)) != 0 ? cuda_refuse(c, result, "cuCtxSetCurrent")
                                                               : open_in_context(c, &d, handle);
    if ((result = cuda_driver.cuCtxSetCurrent(previous)) != 0 && s == OK) s = cuda_refuse(c, result, "cuCtxSetCurrent");
    if (s != OK) {
        if (d.fault) (void)cuda_driver.cuMemFreeHost(d.fault);
        (void)cuda_driver.cuDevicePrimaryCtxRelease_v2(handle);
        return s;
    }
    devices[index] = d;
    atomic_store(&opened[index], true);
    return OK;
}

status cuda_available(ctx *c, int *count) {
    *count = 0;
    if (atomic_load(&is_forked)) return refuse_forked(c);
    (void)pthread_mutex_lock(&lock);
    status s = open_driver(c);
    *count = s == OK ? n_devices : 0;
    (void)pthread_mutex_unlock(&lock);
    return s;
}

/* --- running ------------------------------------------------------------------------------------------------------ */

static status tell(ctx *c, const cuda_fault *f) {
    switch (f->kind) {
    case FAULT_LABEL:
        return fail(c, E_RUNTIME, "label %" PRId64 " is out of range: there are %" PRId64 " classes", f->value,
                    f->limit);
    case FAULT_COUNT:
        return fail(c, E_RUNTIME, "NonZero finds %" PRId64 " elements; %" PRId64 " were counted before", f->value,
                    f->limit);
    case FAULT_LENGTH:
        return fail(c, E_RUNTIME, "a sequence of length %" PRId64 " in %" PRId64 " steps", f->value, f->limit);
    case FAULT_PROBABILITY: {
        double x;
        memcpy(&x, &f->limit, sizeof x);
        return fail(c, E_RUNTIME, "element %" PRId64 " of Bernoulli's operand is %g, which is no probability", f->value,
                    x);
    }
    case FAULT_LOG_PROBABILITIES:
        return fail(c, E_RUNTIME,
                    "row %" PRId64 " of Multinomial's operand holds no log probabilities: it has NaN, infinity, "
                    "or nothing that is possible",
                    f->value);
    case FAULT_DIVISOR: return fail(c, E_RUNTIME, "ZeroDivisionError: a divisor is 0");
    default:
        return fail(c, E_RUNTIME, "index %" PRId64 " is out of range for an axis of size %" PRId64, f->value, f->limit);
    }
}

static status look(ctx *c, const device *d) {
    cuda_fault f;
    return fault_take(d->fault, &f) ? cuda_blame(c, tell(c, &f), f.node) : OK;
}

status cuda_begin(ctx *c, int index, void *stream, cuda_run *out) {
    status s = OK;

    *out = (cuda_run){.device = index, .stream = stream};
    if (atomic_load(&is_forked)) return refuse_forked(c);
    if (index < 0 || index >= MOST_DEVICES || !atomic_load(&opened[index])) {
        (void)pthread_mutex_lock(&lock);
        if (index < 0 || index >= MOST_DEVICES || !atomic_load(&opened[index])) s = open_device(c, index);
        (void)pthread_mutex_unlock(&lock);
        if (s != OK) return s;
    }
    const device *d = &devices[index];
    TRY(look(c, d));
    out->fault = d->fault_there;
    CALL(c, cuCtxGetCurrent, &out->previous);
    if (out->previous != d->context) CALL(c, cuCtxSetCurrent, d->context);
    return OK;
}

status cuda_end(ctx *c, const cuda_run *r, status s) {
    const device *d = &devices[r->device];
    int result = r->previous == d->context ? 0 : cuda_driver.cuCtxSetCurrent(r->previous);

    if (s != OK) return s;
    if (result != 0) return cuda_refuse(c, result, "cuCtxSetCurrent");
    return look(c, d);
}

static status find(ctx *c, kernel *f, void **out) {
    *out = atomic_load_explicit(&f->function, memory_order_acquire);
    if (*out) return OK;
    int result = CUDA_NOT_FOUND;
    for (int i = 0; cuda_images[i] && result == CUDA_NOT_FOUND; i++)
        result = cuda_driver.cuLibraryGetKernel(out, cuda_libraries[i], f->name);
    if (result != 0) return cuda_refuse(c, result, "cuLibraryGetKernel");
    atomic_store_explicit(&f->function, *out, memory_order_release);
    return OK;
}

int cuda_architecture(int index) { return devices[index].architecture; }

status cuda_load(ctx *c, const void *image, kernel *f) {
    void *loaded = NULL, *function = NULL;
    int result;

    CALL(c, cuLibraryLoadData, &loaded, image, NULL, NULL, 0, NULL, NULL, 0);
    if ((result = cuda_driver.cuLibraryGetKernel(&function, loaded, f->name)) != 0) {
        (void)cuda_driver.cuLibraryUnload(loaded);
        return cuda_refuse(c, result, "cuLibraryGetKernel");
    }
    atomic_store_explicit(&f->function, function, memory_order_release);
    return OK;
}

status cuda_launch_with(ctx *c, const call *k, kernel *f, geometry g, int shared, void **parameters) {
    void *function;
    int result = 0;

    TRY_AT(c, find(c, f, &function), "looking for the kernel %s", f->name);
    if (k->cuda->dry || g.blocks == 0) return OK;
    if (shared > SHARED_BY_DEFAULT)
        CALL(c, cuKernelSetAttribute, DYNAMIC_SHARED_BYTES, shared, function, k->cuda->device);
    result = cuda_driver.cuLaunchKernel(function, (unsigned)g.blocks, 1, 1, (unsigned)g.threads, 1, 1, (unsigned)shared,
                                        k->cuda->stream, parameters, NULL);
    if (result == 0) return OK;
    return blame(c, cuda_refuse(c, result, "cuLaunchKernel"), "starting the kernel %s", f->name);
}

status cuda_launch(ctx *c, const call *k, kernel *f, geometry g, const void *args) {
    void *parameters[] = {(void *)(uintptr_t)args};
    return cuda_launch_with(c, k, f, g, 0, parameters);
}

status cuda_fill(ctx *c, const call *k, void *memory, unsigned char byte, size_t bytes) {
    if (k->cuda->dry || bytes == 0) return OK;
    CALL(c, cuMemsetD8Async, (uintptr_t)memory, byte, bytes, k->cuda->stream);
    return OK;
}

status cuda_clear(ctx *c, const call *k, void *memory, size_t bytes) { return cuda_fill(c, k, memory, 0, bytes); }

status cuda_copy_bytes(ctx *c, const call *k, void *to, const void *from, size_t bytes) {
    return k->cuda->dry || bytes == 0 ? OK : cuda_move(c, k->cuda, to, from, bytes);
}

status cuda_upload(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes) {
    if (bytes == 0) return OK;
    CALL(c, cuMemcpyHtoDAsync_v2, (uintptr_t)to, from, bytes, r->stream);
    CALL(c, cuStreamSynchronize, r->stream);
    return OK;
}

status cuda_download(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes) {
    if (bytes == 0) return OK;
    CALL(c, cuMemcpyDtoHAsync_v2, to, (uintptr_t)from, bytes, r->stream);
    CALL(c, cuStreamSynchronize, r->stream);
    return OK;
}

/* --- numbers that come back --------------------------------------------------------------------------------------- */

struct cuda_number {
    int device;
    void *event;
    int64_t *here; /* pinned */
    bool coming;
    struct cuda_number *next; /* of those that are free */
};
static cuda_number *unused[MOST_DEVICES];

static status new_number(ctx *c, int index, cuda_number **out) {
    cuda_number *n = calloc(1, sizeof *n);
    void *here = NULL;
    int result;

    if (!n) return fail(c, E_NOMEM, "no memory for a number from cuda:%d", index);
    n->device = index;
    if ((result = cuda_driver.cuEventCreate(&n->event, EVENT_WITHOUT_TIME)) != 0) {
        free(n);
        return cuda_refuse(c, result, "cuEventCreate");
    }
    if ((result = cuda_driver.cuMemHostAlloc(&here, sizeof *n->here, PINNED_MEMORY)) != 0) {
        (void)cuda_driver.cuEventDestroy_v2(n->event);
        free(n);
        return cuda_refuse(c, result, "cuMemHostAlloc");
    }
    n->here = here;
    *out = n;
    return OK;
}

static void put_back(cuda_number *n) {
    (void)pthread_mutex_lock(&lock);
    n->next = unused[n->device];
    unused[n->device] = n;
    (void)pthread_mutex_unlock(&lock);
}

status cuda_number_read(ctx *c, const cuda_run *r, const void *from, cuda_number **out) {
    cuda_number *n;
    int result;

    (void)pthread_mutex_lock(&lock);
    if ((n = unused[r->device])) unused[r->device] = n->next;
    (void)pthread_mutex_unlock(&lock);
    if (!n) TRY(new_number(c, r->device, &n));
    if ((result = cuda_driver.cuMemcpyDtoHAsync_v2(n->here, (uintptr_t)from, sizeof *n->here, r->stream)) != 0) {
        put_back(n);
        return cuda_refuse(c, result, "cuMemcpyDtoHAsync");
    }
    if ((result = cuda_driver.cuEventRecord(n->event, r->stream)) != 0) {
        (void)cuda_driver.cuStreamSynchronize(r->stream);
        put_back(n);
        return cuda_refuse(c, result, "cuEventRecord");
    }
    n->coming = true;
    *out = n;
    return OK;
}

status cuda_number_get(ctx *c, cuda_number *n, int64_t *out) {
    if (n->coming) CALL(c, cuEventSynchronize, n->event);
    n->coming = false;
    *out = *n->here;
    return OK;
}

void cuda_number_free(cuda_number *n) {
    void *previous = NULL;

    if (!n || atomic_load(&is_forked)) return;
    if (n->coming && cuda_driver.cuCtxGetCurrent(&previous) == 0) {
        (void)cuda_driver.cuCtxSetCurrent(devices[n->device].context);
        n->coming = cuda_driver.cuEventSynchronize(n->event) != 0;
        (void)cuda_driver.cuCtxSetCurrent(previous);
    }
    if (!n->coming) put_back(n); /* otherwise its memory may be written any time: it is not used again */
}

/* --- time --------------------------------------------------------------------------------------------------------- */

static status between(ctx *c, const cuda_run *r, cuda_work *work, void *arg, void *const mark[2], double *seconds) {
    float milliseconds = 0;

    CALL(c, cuEventRecord, mark[0], r->stream);
    TRY(work(c, arg));
    CALL(c, cuEventRecord, mark[1], r->stream);
    CALL(c, cuEventSynchronize, mark[1]);
    CALL(c, cuEventElapsedTime, &milliseconds, mark[0], mark[1]);
    *seconds = (double)milliseconds / 1000;
    return OK;
}

status cuda_seconds(ctx *c, const cuda_run *r, cuda_work *work, void *arg, double *seconds) {
    void *mark[2] = {NULL, NULL};
    int result = cuda_driver.cuEventCreate(&mark[0], 0);
    status s;

    if (result == 0) result = cuda_driver.cuEventCreate(&mark[1], 0);
    s = result == 0 ? between(c, r, work, arg, mark, seconds) : cuda_refuse(c, result, "cuEventCreate");
    for (int i = 0; i < 2; i++)
        if (mark[i]) (void)cuda_driver.cuEventDestroy_v2(mark[i]);
    return s;
}

/* The default stream is not, and says so with an error while another one is. */
static status ask_captured(ctx *c, void *stream, bool *out) {
    int state = 0;
    const int result = cuda_driver.cuStreamIsCapturing(stream, &state);

    *out = result == 0 && state != 0;
    return result == 0 || result == CUDA_CAPTURE_IMPLICIT ? OK : cuda_refuse(c, result, "cuStreamIsCapturing");
}

status cuda_is_captured(ctx *c, const cuda_run *r, bool *out) { return ask_captured(c, r->stream, out); }

status cuda_captured(ctx *c, void *stream, bool *out) {
    ctx aside;

    *out = false;
    if (atomic_load(&is_forked)) return OK;
    ctx_init(&aside);
    (void)pthread_mutex_lock(&lock);
    const bool is_there = load_driver(&aside) == OK;
    (void)pthread_mutex_unlock(&lock);
    ctx_release(&aside);
    return is_there ? ask_captured(c, stream, out) : OK;
}

/* With the device open. */
status cuda_name(ctx *c, int index, char name[CUDA_NAME]) {
    char model[CUDA_NAME / 2] = "";
    int handle;

    CALL(c, cuDeviceGet, &handle, index);
    CALL(c, cuDeviceGetName, model, (int)sizeof model - 1, handle);
    (void)snprintf(name, CUDA_NAME, "%s (sm_%d)", model, devices[index].architecture);
    return OK;
}

/* --- graphs ------------------------------------------------------------------------------------------------------- */

static status begin_capture(ctx *c, device *d) {
    if (!d->captured) {
        void *made = NULL;
        CALL(c, cuStreamCreate, &made, STREAM_NON_BLOCKING);
        d->captured = made;
    }
    CALL(c, cuStreamBeginCapture_v2, d->captured, CAPTURE_THREAD_LOCAL);
    return OK;
}

status cuda_capture_begin(ctx *c, const cuda_run *r, cuda_run *to) {
    device *d = &devices[r->device];
    status s;

    (void)pthread_mutex_lock(&capturing);
    if ((s = begin_capture(c, d)) != OK) {
        (void)pthread_mutex_unlock(&capturing);
        return s;
    }
    *to = *r;
    to->stream = d->captured;
    return OK;
}

status cuda_capture_end(ctx *c, const cuda_run *to, status s, void **captured) {
    int result;

    *captured = NULL;
    result = cuda_driver.cuStreamEndCapture(to->stream, captured);
    (void)pthread_mutex_unlock(&capturing);
    if (s == OK && result != 0) s = cuda_refuse(c, result, "cuStreamEndCapture");
    if (s != OK && *captured) {
        (void)cuda_driver.cuGraphDestroy(*captured);
        *captured = NULL;
    }
    return s;
}

static status instantiate(ctx *c, void *captured, void **executable, bool *updated) {
    update_result why = {0};
    void *made = NULL;

    *updated = *executable && cuda_driver.cuGraphExecUpdate_v2(*executable, captured, &why) == 0;
    if (*updated) return OK;
    cuda_graph_forget(*executable);
    *executable = NULL;
    CALL(c, cuGraphInstantiateWithFlags, &made, captured, 0);
    *executable = made;
    return OK;
}

status cuda_graph_make(ctx *c, void *captured, void **executable, bool *updated) {
    status s = instantiate(c, captured, executable, updated);
    (void)cuda_driver.cuGraphDestroy(captured);
    return s;
}

status cuda_graph_start(ctx *c, const cuda_run *r, void *executable) {
    CALL(c, cuGraphLaunch, executable, r->stream);
    return OK;
}

void cuda_graph_forget(void *executable) {
    if (executable && !atomic_load(&is_forked)) (void)cuda_driver.cuGraphExecDestroy(executable);
}

status cuda_set_u64(ctx *c, const cuda_run *r, void *to, uint64_t x) {
    CALL(c, cuMemsetD32Async, (uintptr_t)to, (unsigned)x, 1, r->stream);
    CALL(c, cuMemsetD32Async, (uintptr_t)to + 4, (unsigned)(x >> 32), 1, r->stream);
    return OK;
}

status cuda_move(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes) {
    CALL(c, cuMemcpyDtoDAsync_v2, (uintptr_t)to, (uintptr_t)from, bytes, r->stream);
    return OK;
}

/* --- geometry ----------------------------------------------------------------------------------------------------- */

geometry geometry_over(int64_t count, int64_t each, int threads) {
    int64_t blocks = (count + each - 1) / each;
    return (geometry){blocks < MOST_BLOCKS ? blocks : MOST_BLOCKS, threads};
}

geometry geometry_rows(int64_t rows, int64_t width) {
    int threads = WARP;
    while (threads < 512 && threads * 4 < width) threads *= 2;
    return geometry_over(rows, 1, threads);
}
