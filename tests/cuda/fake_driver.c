/* fake_driver.c -- a libcuda.so.1 with one device whose memory is the host's and whose kernels are emulated.
 *
 * It checks what it is told: the order of calls, handles, the context, sizes; what is wrong is written down and the
 * call fails. It counts what is held, and fails the n-th call on request:
 *     fake_fail_at(n)     the n-th call from now on fails; 0: none
 *     fake_calls()        calls since then
 *     fake_held()         contexts, libraries, pinned pages, and what other libraries hold, that nobody has given back
 *     fake_complaint()    the first thing that was wrong, or an empty text */
#define _GNU_SOURCE
#include "emulate.h"
#include "fake.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum {
    SUCCESS,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    NOT_INITIALIZED = 3,
    INVALID_CONTEXT = 201,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int initialized, contexts, libraries, pages, others, fail_at, calls;
static char complaint[256];
static char the_context, the_library; /* their addresses are handles */
static _Thread_local void *bound;

void fake_fail_at(int n) {
    fail_at = n;
    calls = 0;
}
int fake_calls(void) { return calls; }
int fake_held(void) { return contexts + libraries + pages + others; }
const char *fake_complaint(void) { return complaint; }

static int complain(int result, const char *what) {
    fake_complain(what);
    return result;
}

void fake_complain(const char *what) {
    if (!complaint[0]) snprintf(complaint, sizeof complaint, "%s", what);
}
int fake_enter(void) { return ++calls != fail_at; }
void fake_hold(int more) { others += more; }
int fake_in_context(void) { return bound == &the_context; }

/* Every entry point begins so. Those that give back never fail on request: a program could do nothing about it. */
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (++calls == fail_at) return OUT_OF_MEMORY;                                                                  \
        if (!initialized) return complain(NOT_INITIALIZED, "a call before cuInit");                                    \
    } while (0)
#define NEED_CONTEXT()                                                                                                 \
    do {                                                                                                               \
        if (bound != &the_context) return complain(INVALID_CONTEXT, "a call without the device's context");            \
    } while (0)

EXPORT int cuInit(unsigned flags) {
    if (++calls == fail_at) return OUT_OF_MEMORY;
    initialized = 1;
    return flags ? complain(INVALID_VALUE, "flags of cuInit") : SUCCESS;
}

EXPORT int cuGetErrorString(int result, const char **out) {
    *out = result == OUT_OF_MEMORY   ? "out of memory"
           : result == NOT_FOUND     ? "named symbol not found"
           : result == LAUNCH_FAILED ? "unspecified launch failure"
                                     : "invalid argument";
    return SUCCESS;
}

EXPORT int cuDeviceGetCount(int *out) {
    ENTER();
    *out = 1;
    return SUCCESS;
}

EXPORT int cuDeviceGet(int *out, int ordinal) {
    ENTER();
    if (ordinal != 0) return complain(INVALID_VALUE, "a device that there is not");
    *out = 0;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER();
    if (device != 0) return complain(INVALID_VALUE, "the context of a device that there is not");
    contexts++;
    *out = &the_context;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    calls++;
    if (device != 0 || contexts == 0) return complain(INVALID_CONTEXT, "a context given back that was not taken");
    contexts--;
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void **out) {
    ENTER();
    *out = bound;
    return SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) {
    ENTER();
    if (context && (context != &the_context || contexts == 0))
        return complain(INVALID_CONTEXT, "a context that there is not");
    bound = context;
    return SUCCESS;
}

EXPORT int cuLibraryLoadData(void **out, const void *image, void *jit_options, void **jit_values, unsigned n_jit,
                             void *options, void **values, unsigned n) {
    ENTER();
    if (!image || strncmp(image, "emulated", 8) != 0) return complain(INVALID_VALUE, "an image that is none");
    if (jit_options || jit_values || n_jit || options || values || n) return complain(INVALID_VALUE, "options");
    libraries++;
    *out = &the_library;
    return SUCCESS;
}

EXPORT int cuLibraryUnload(void *library) {
    calls++;
    if (library != &the_library || libraries == 0) return complain(INVALID_HANDLE, "a library that was not loaded");
    libraries--;
    return SUCCESS;
}

EXPORT int cuLibraryGetKernel(void **out, void *library, const char *name) {
    Dl_info info;
    ENTER();
    if (library != &the_library || libraries == 0) return complain(INVALID_HANDLE, "a library that was not loaded");
    if (!dladdr(&the_library, &info)) return NOT_FOUND;
    void *self = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    *out = self ? dlsym(self, name) : NULL;
    if (self) dlclose(self);
    if (!*out) return NOT_FOUND;
    return SUCCESS;
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                          void **extra) {
    const char *why = NULL;
    emulated_kernel *f;

    ENTER();
    NEED_CONTEXT();
    if (!function || libraries == 0) return complain(INVALID_HANDLE, "a kernel that was not looked up");
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || shared || stream || extra || !parameters)
        return complain(INVALID_VALUE, "arguments of a launch");
    memcpy(&f, &function, sizeof f);
    (void)pthread_mutex_lock(&lock);
    int done = emulate(f, grid_x, block_x, parameters[0], &why);
    (void)pthread_mutex_unlock(&lock);
    return done ? SUCCESS : complain(LAUNCH_FAILED, why);
}

EXPORT int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
    ENTER();
    NEED_CONTEXT();
    if (flags != 3 || bytes == 0) return complain(INVALID_VALUE, "pinned memory");
    if (!(*out = malloc(bytes))) return OUT_OF_MEMORY;
    pages++;
    return SUCCESS;
}

EXPORT int cuMemFreeHost(void *memory) {
    calls++;
    if (!memory || pages == 0) return complain(INVALID_VALUE, "pinned memory that was not taken");
    free(memory);
    pages--;
    return SUCCESS;
}

EXPORT int cuMemHostGetDevicePointer_v2(uint64_t *out, void *memory, unsigned flags) {
    ENTER();
    if (!memory || flags) return complain(INVALID_VALUE, "the address of pinned memory");
    *out = (uintptr_t)memory;
    return SUCCESS;
}

EXPORT int cuMemsetD8Async(uint64_t memory, unsigned char value, size_t count, void *stream) {
    ENTER();
    NEED_CONTEXT();
    if (!memory || stream) return complain(INVALID_VALUE, "memory to fill");
    memset((void *)(uintptr_t)memory, value, count);
    return SUCCESS;
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    ENTER();
    NEED_CONTEXT();
    if (!to || !from || stream || (to < from + bytes && from < to + bytes))
        return complain(INVALID_VALUE, "memory to copy on the device");
    memcpy((void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes);
    return SUCCESS;
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    ENTER();
    NEED_CONTEXT();
    if (!to || !from || stream) return complain(INVALID_VALUE, "memory to copy");
    memcpy((void *)(uintptr_t)to, from, bytes);
    return SUCCESS;
}

EXPORT int cuStreamSynchronize(void *stream) {
    ENTER();
    NEED_CONTEXT();
    return stream ? complain(INVALID_HANDLE, "a stream that there is not") : SUCCESS;
}
