/* nccl.c -- finds NCCL, and says what its errors mean. */
#include "cuda/libraries/nccl.h"

#include <pthread.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static nccl_functions nccl;

static status load(ctx *c) { LIBRARY_ONCE(c, "NCCL", nccl, NCCL_FUNCTIONS, "libnccl.so.2"); }

status nccl_open(ctx *c, const nccl_functions **out) {
    (void)pthread_mutex_lock(&lock);
    const status s = load(c);
    (void)pthread_mutex_unlock(&lock);
    *out = s == OK ? &nccl : NULL;
    return s;
}

status nccl_refuse(ctx *c, int result, const char *what) {
    static const char *const texts[] = {"success",
                                        "a call of CUDA's failed",
                                        "a call of the system failed",
                                        "internal error",
                                        "invalid argument",
                                        "invalid use",
                                        "another process failed, or cannot be reached",
                                        "still under way"};
    const bool known = result >= 0 && result < (int)(sizeof texts / sizeof texts[0]);
    return fail(c, E_RUNTIME, "NCCL error %d in %s: %s", result, what, known ? texts[result] : "unknown error");
}

status nccl_version(ctx *c, int *out) {
    const nccl_functions *f;

    TRY(nccl_open(c, &f));
    const int result = f->ncclGetVersion(out);
    return result == 0 ? OK : nccl_refuse(c, result, "ncclGetVersion");
}
