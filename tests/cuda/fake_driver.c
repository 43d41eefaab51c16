/* fake_driver.c -- makes a libcuda.so.1 with two devices whose memory is the host's and whose kernels are emulated.
 *
 * It checks what it is told: the order of calls, handles, the context, sizes; what is wrong is written down and the
 * call fails. It counts what is held, and fails the n-th call on request:
 *     fake_fail_at(n)     the n-th call from now on fails; 0: none
 *     fake_calls()        calls since then
 *     fake_held()         contexts, libraries, pinned pages, and what other libraries hold, that were not given back
 *     fake_launches(d)    kernels that were started on a device
 *     fake_complaint()    the first thing that was wrong, or an empty text */
#define _GNU_SOURCE
#include "emulate.h"
#include "fake.h"

#include <dlfcn.h>
#include <inttypes.h>
#include <pthread.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

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
enum { DEVICES = 2 };
static int initialized, contexts[DEVICES], libraries, pages, others, fail_at, calls;
static char complaint[256];
static char the_contexts[DEVICES], the_library; /* their addresses are handles */

/* Kernels that were compiled at run time: a shared object, loaded from memory. */
typedef struct loaded {
    void *handle;
    struct called *called; /* instead of a handle */
} loaded;
static _Thread_local void *bound;
static int launches[DEVICES];

/* The n-th launch from now on writes a byte besides. */
static int launches_until_written;
static unsigned char *written;
void fake_write_after(int n, unsigned char *at) {
    launches_until_written = n;
    written = at;
}

void fake_fail_at(int n) {
    fail_at = n;
    calls = 0;
}
int fake_calls(void) { return calls; }
int fake_held(void) { return contexts[0] + contexts[1] + libraries + pages + others; }
EXPORT int fake_launches(int device);
int fake_launches(int device) { return launches[device]; }
const char *fake_complaint(void) { return complaint; }

static int complain(int result, const char *what) {
    fake_complain(what);
    return result;
}

/* The real one has no context in a child of fork. */
static void see_process(void) {
    static pid_t owner;
    if (!owner) owner = getpid();
    if (owner != getpid()) fake_complain("a call in a forked process");
}

void fake_complain(const char *what) {
    if (!complaint[0]) snprintf(complaint, sizeof complaint, "%s", what);
}
int fake_enter(void) {
    see_process();
    return __atomic_add_fetch(&calls, 1, __ATOMIC_SEQ_CST) != fail_at; /* chains are compiled by several threads */
}
void fake_hold(int more) { (void)__atomic_add_fetch(&others, more, __ATOMIC_SEQ_CST); }

/* Of the context that is current; -1. */
static int device_of(void *context) {
    for (int i = 0; i < DEVICES; i++)
        if (context == &the_contexts[i] && contexts[i]) return i;
    return -1;
}
int fake_in_context(void) { return device_of(bound) >= 0; }

/* Every entry point begins so. Those that give back never fail on request: a program could do nothing about it. */
#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!fake_enter()) return OUT_OF_MEMORY;                                                                       \
        if (!initialized) return complain(NOT_INITIALIZED, "a call before cuInit");                                    \
    } while (0)
#define NEED_CONTEXT()                                                                                                 \
    do {                                                                                                               \
        if (device_of(bound) < 0) return complain(INVALID_CONTEXT, "a call without the device's context");             \
    } while (0)

EXPORT int cuInit(unsigned flags) {
    if (!fake_enter()) return OUT_OF_MEMORY;
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
    *out = DEVICES;
    return SUCCESS;
}

EXPORT int cuDeviceGet(int *out, int ordinal) {
    ENTER();
    if (ordinal < 0 || ordinal >= DEVICES) return complain(INVALID_VALUE, "a device that there is not");
    *out = ordinal;
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRetain(void **out, int device) {
    ENTER();
    if (device < 0 || device >= DEVICES) return complain(INVALID_VALUE, "the context of a device that there is not");
    contexts[device]++;
    *out = &the_contexts[device];
    return SUCCESS;
}

EXPORT int cuDevicePrimaryCtxRelease_v2(int device) {
    (void)fake_enter();
    if (device < 0 || device >= DEVICES || contexts[device] == 0)
        return complain(INVALID_CONTEXT, "a context given back that was not taken");
    contexts[device]--;
    return SUCCESS;
}

EXPORT int cuCtxGetCurrent(void **out) {
    ENTER();
    *out = bound;
    return SUCCESS;
}

EXPORT int cuCtxSetCurrent(void *context) {
    ENTER();
    if (context && device_of(context) < 0) complain(INVALID_CONTEXT, "a context that there is not");
    bound = context;
    return SUCCESS;
}

/* "compiled", the size, a shared object. */
static int load_compiled(void **out, const char *image) {
    uint64_t bytes;
    char path[] = "/tmp/chain-XXXXXX"; /* the loader knows libraries by their names */
    loaded *l = calloc(1, sizeof *l);
    const int file = mkstemp(path);

    memcpy(&bytes, image + 8, sizeof bytes);
    if (!l || file < 0 || write(file, image + 16, bytes) != (ssize_t)bytes) return OUT_OF_MEMORY;
    l->handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    (void)close(file);
    (void)unlink(path);
    if (!l->handle) return free(l), complain(INVALID_VALUE, dlerror());
    libraries++;
    *out = l;
    return SUCCESS;
}

/* "callback <address> <parameters>": a kernel of many parameters of 8 bytes each, which a function of the test runs. */
typedef struct called {
    emulated_kernel kernel; /* first: what a launch is given; without `run` */
    int (*run)(unsigned blocks, unsigned threads, unsigned shared, const uint64_t *parameters);
} called;

static int load_called(void **out, const char *image) {
    uintptr_t address;
    unsigned count;
    called *c = calloc(1, sizeof *c);
    loaded *l = calloc(1, sizeof *l);

    if (!c || !l || sscanf(image, "callback %" SCNxPTR " %u", &address, &count) != 2)
        return complain(INVALID_VALUE, "an image that is none");
    c->kernel.bytes = count * sizeof(uint64_t);
    memcpy(&c->run, &address, sizeof c->run);
    l->called = c;
    libraries++;
    *out = l;
    return SUCCESS;
}

EXPORT int cuKernelSetAttribute(int attribute, int value, void *kernel, int device) {
    ENTER();
    if (attribute != 8 || value <= 0 || !kernel || device < 0 || device >= DEVICES)
        return complain(INVALID_VALUE, "an attribute of a kernel");
    return SUCCESS;
}

EXPORT int cuDeviceGetAttribute(int *out, int attribute, int device) {
    ENTER();
    if (device < 0 || device >= DEVICES || (attribute != 75 && attribute != 76))
        return complain(INVALID_VALUE, "an attribute of a device");
    *out = attribute == 75 ? 9 : 0;
    return SUCCESS;
}

EXPORT int cuLibraryLoadData(void **out, const void *image, void *jit_options, void **jit_values, unsigned n_jit,
                             void *options, void **values, unsigned n) {
    ENTER();
    if (fake_capturing()) return complain(INVALID_VALUE, "kernels are loaded during a capture");
    if (image && strncmp(image, "compiled", 8) == 0) return load_compiled(out, image);
    if (image && strncmp(image, "callback", 8) == 0) return load_called(out, image);
    if (!image || strncmp(image, "emulated", 8) != 0) return complain(INVALID_VALUE, "an image that is none");
    if (jit_options || jit_values || n_jit || options || values || n) return complain(INVALID_VALUE, "options");
    libraries++;
    *out = &the_library;
    return SUCCESS;
}

EXPORT int cuLibraryUnload(void *library) {
    (void)fake_enter();
    if (!library || libraries == 0) return complain(INVALID_HANDLE, "a library that was not loaded");
    if (library != &the_library) {
        if (((loaded *)library)->handle) (void)dlclose(((loaded *)library)->handle);
        free(((loaded *)library)->called);
        free(library);
    }
    libraries--;
    return SUCCESS;
}

EXPORT int cuLibraryGetKernel(void **out, void *library, const char *name) {
    Dl_info info;
    ENTER();
    if (!library || libraries == 0) return complain(INVALID_HANDLE, "a library that was not loaded");
    if (library != &the_library && ((loaded *)library)->called) return *out = ((loaded *)library)->called, SUCCESS;
    if (library != &the_library) return (*out = dlsym(((loaded *)library)->handle, name)) ? SUCCESS : NOT_FOUND;
    if (!dladdr(&the_library, &info)) return NOT_FOUND;
    void *self = dlopen(info.dli_fname, RTLD_NOLOAD | RTLD_LAZY);
    *out = self ? dlsym(self, name) : NULL;
    if (self) dlclose(self);
    if (!*out) return NOT_FOUND;
    return SUCCESS;
}

/* What a stream is given: a kernel, bytes to set, bytes to copy. */
enum { MOST_ARGUMENT = 4096 };

typedef struct launch {
    const emulated_kernel *f;
    unsigned blocks, threads, shared;
    int device;
    _Alignas(16) char argument[MOST_ARGUMENT];
} launch;

static int run_launch(const void *data) {
    const launch *l = data;
    const char *why = NULL;
    int done;

    if (!l->f->run)
        return ((const called *)l->f)->run(l->blocks, l->threads, l->shared, (const uint64_t *)l->argument)
                   ? SUCCESS
                   : complain(LAUNCH_FAILED, "a function of the test");
    (void)pthread_mutex_lock(&lock);
    done = emulate(l->f, l->blocks, l->threads, l->argument, &why);
    launches[l->device]++;
    if (written && --launches_until_written == 0) *written = 0x55;
    (void)pthread_mutex_unlock(&lock);
    return done ? SUCCESS : complain(LAUNCH_FAILED, why);
}

EXPORT int cuLaunchKernel(void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x,
                          unsigned block_y, unsigned block_z, unsigned shared, void *stream, void **parameters,
                          void **extra) {
    launch l = {.f = function, .blocks = grid_x, .threads = block_x, .shared = shared};

    ENTER();
    NEED_CONTEXT();
    if (!function || libraries == 0) return complain(INVALID_HANDLE, "a kernel that was not looked up");
    if (grid_y != 1 || grid_z != 1 || block_y != 1 || block_z != 1 || extra || !parameters || (shared && l.f->run))
        return complain(INVALID_VALUE, "arguments of a launch");
    if (l.f->bytes > MOST_ARGUMENT) return complain(INVALID_VALUE, "an argument that is too large");
    l.device = device_of(bound);
    if (l.f->run) memcpy(l.argument, parameters[0], l.f->bytes);
    for (size_t i = 0; !l.f->run && i < l.f->bytes / sizeof(uint64_t); i++)
        memcpy(l.argument + i * sizeof(uint64_t), parameters[i], sizeof(uint64_t));
    return fake_give(stream, run_launch, &l, offsetof(launch, argument) + l.f->bytes);
}

typedef struct filling {
    void *to;
    unsigned word;
    size_t count, each;
} filling;

static int run_filling(const void *data) {
    const filling *f = data;
    for (size_t i = 0; i < f->count; i++) memcpy((char *)f->to + i * f->each, &f->word, f->each);
    return SUCCESS;
}

typedef struct copying {
    void *to;
    const void *from;
    size_t bytes;
} copying;

static int run_copying(const void *data) {
    const copying *o = data;
    memcpy(o->to, o->from, o->bytes);
    return SUCCESS;
}

EXPORT int cuMemHostAlloc(void **out, size_t bytes, unsigned flags) {
    ENTER();
    NEED_CONTEXT();
    if (flags != 3 || bytes == 0) return complain(INVALID_VALUE, "pinned memory");
    if (fake_capturing()) return complain(INVALID_VALUE, "pinned memory is taken during a capture");
    if (!(*out = malloc(bytes))) return OUT_OF_MEMORY;
    pages++;
    return SUCCESS;
}

EXPORT int cuMemFreeHost(void *memory) {
    (void)fake_enter();
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
    const filling f = {(void *)(uintptr_t)memory, value, count, 1};
    ENTER();
    NEED_CONTEXT();
    if (!memory) return complain(INVALID_VALUE, "memory to fill");
    return fake_give(stream, run_filling, &f, sizeof f);
}

EXPORT int cuMemsetD32Async(uint64_t memory, unsigned value, size_t count, void *stream) {
    const filling f = {(void *)(uintptr_t)memory, value, count, 4};
    ENTER();
    NEED_CONTEXT();
    if (!memory || memory % 4) return complain(INVALID_VALUE, "memory to fill with words");
    return fake_give(stream, run_filling, &f, sizeof f);
}

EXPORT int cuMemcpyDtoDAsync_v2(uint64_t to, uint64_t from, size_t bytes, void *stream) {
    const copying o = {(void *)(uintptr_t)to, (void *)(uintptr_t)from, bytes};
    ENTER();
    NEED_CONTEXT();
    if (!to || !from || (to < from + bytes && from < to + bytes))
        return complain(INVALID_VALUE, "memory to copy on the device");
    return fake_give(stream, run_copying, &o, sizeof o);
}

EXPORT int cuMemcpyHtoDAsync_v2(uint64_t to, const void *from, size_t bytes, void *stream) {
    ENTER();
    NEED_CONTEXT();
    if (stream) return fake_copy_beside(stream, (void *)(uintptr_t)to, from, bytes);
    if (!to || !from) return complain(INVALID_VALUE, "memory to copy");
    if (fake_capturing()) return complain(INVALID_VALUE, "memory of the host is copied during a capture");
    memcpy((void *)(uintptr_t)to, from, bytes);
    return SUCCESS;
}

EXPORT int cuDeviceGetName(char *out, int length, int device) {
    ENTER();
    if (length < 16 || device < 0 || device >= DEVICES) return complain(INVALID_VALUE, "the name of a device");
    (void)snprintf(out, (size_t)length, "emulated");
    return SUCCESS;
}
