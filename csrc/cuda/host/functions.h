/* functions.h -- declares, inside of this folder, the driver's entry points, once, and how a call of one fails. */
#ifndef ORT_CUDA_FUNCTIONS_H
#define ORT_CUDA_FUNCTIONS_H

#include "core/ctx.h"
#include "cuda/host/library.h"

#include <stdint.h>

/* Why an executable graph was not updated. */
typedef struct update_result {
    int result;
    void *node, *from;
} update_result;

/* Name of the symbol, parameters; every one returns a CUresult. */
#define DRIVER_FUNCTIONS(F)                                                                                            \
    F(cuInit, (unsigned flags))                                                                                        \
    F(cuGetErrorString, (int result, const char **out))                                                                \
    F(cuDeviceGetCount, (int *out))                                                                                    \
    F(cuDeviceGet, (int *out, int ordinal))                                                                            \
    F(cuDeviceGetName, (char *out, int length, int device))                                                            \
    F(cuDeviceGetAttribute, (int *out, int attribute, int device))                                                     \
    F(cuDevicePrimaryCtxRetain, (void **out, int device))                                                              \
    F(cuDevicePrimaryCtxRelease_v2, (int device))                                                                      \
    F(cuCtxGetCurrent, (void **out))                                                                                   \
    F(cuCtxSetCurrent, (void *context))                                                                                \
    F(cuLibraryLoadData, (void **out, const void *image, void *jit_options, void **jit_values, unsigned n_jit,         \
                          void *options, void **values, unsigned n))                                                   \
    F(cuLibraryUnload, (void *library))                                                                                \
    F(cuLibraryGetKernel, (void **out, void *library, const char *name))                                               \
    F(cuKernelSetAttribute, (int attribute, int value, void *kernel, int device))                                      \
    F(cuLaunchKernel,                                                                                                  \
      (void *function, unsigned grid_x, unsigned grid_y, unsigned grid_z, unsigned block_x, unsigned block_y,          \
       unsigned block_z, unsigned shared, void *stream, void **parameters, void **extra))                              \
    F(cuMemHostAlloc, (void **out, size_t bytes, unsigned flags))                                                      \
    F(cuMemFreeHost, (void *memory))                                                                                   \
    F(cuMemHostGetDevicePointer_v2, (uint64_t *out, void *memory, unsigned flags))                                     \
    F(cuMemsetD8Async, (uint64_t memory, unsigned char value, size_t count, void *stream))                             \
    F(cuMemcpyDtoDAsync_v2, (uint64_t to, uint64_t from, size_t bytes, void *stream))                                  \
    F(cuMemcpyHtoDAsync_v2, (uint64_t to, const void *from, size_t bytes, void *stream))                               \
    F(cuMemsetD32Async, (uint64_t memory, unsigned value, size_t count, void *stream))                                 \
    F(cuMemcpyDtoHAsync_v2, (void *to, uint64_t from, size_t bytes, void *stream))                                     \
    F(cuStreamSynchronize, (void *stream))                                                                             \
    F(cuStreamIsCapturing, (void *stream, int *out))                                                                   \
    F(cuEventCreate, (void **out, unsigned flags))                                                                     \
    F(cuEventRecord, (void *event, void *stream))                                                                      \
    F(cuEventSynchronize, (void *event))                                                                               \
    F(cuEventElapsedTime, (float *milliseconds, void *from, void *to))                                                 \
    F(cuEventDestroy_v2, (void *event))                                                                                \
    F(cuStreamWaitEvent, (void *stream, void *event, unsigned flags))                                                  \
    F(cuStreamCreate, (void **out, unsigned flags))                                                                    \
    F(cuStreamBeginCapture_v2, (void *stream, int mode))                                                               \
    F(cuStreamEndCapture, (void *stream, void **graph))                                                                \
    F(cuGraphDestroy, (void *graph))                                                                                   \
    F(cuGraphInstantiateWithFlags, (void **out, void *graph, unsigned long long flags))                                \
    F(cuGraphExecUpdate_v2, (void *executable, void *graph, update_result *out))                                       \
    F(cuGraphExecDestroy, (void *executable))                                                                          \
    F(cuGraphLaunch, (void *executable, void *stream))

typedef struct driver_functions {
    DRIVER_FUNCTIONS(ENTRY_MEMBER)
} driver_functions;
extern driver_functions cuda_driver; /* once a device is open */

enum { STREAM_NON_BLOCKING = 1, EVENT_WITHOUT_TIME = 2 };
enum { PINNED_MEMORY = 3 /* for all contexts, and where devices see it */ };

/* What the driver says of `result`, of its function `what`. */
MUST_USE status cuda_refuse(ctx *c, int result, const char *what);

#define CALL(c, name, ...)                                                                                             \
    do {                                                                                                               \
        int result_ = cuda_driver.name(__VA_ARGS__);                                                                   \
        if (result_ != 0) return cuda_refuse((c), result_, #name);                                                     \
    } while (0)

#endif
