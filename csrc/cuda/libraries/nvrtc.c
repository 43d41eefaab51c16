/* nvrtc.c -- calls NVRTC, which several threads may do: compile.c locks the first call alone. */
#include "cuda/libraries/nvrtc.h"

#include "cuda/host/library.h"

#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>

#define NVRTC_FUNCTIONS(F)                                                                                             \
    F(nvrtcVersion, (int *major, int *minor))                                                                          \
    F(nvrtcCreateProgram, (void **out, const char *text, const char *name, int n_headers, const char *const *headers,  \
                           const char *const *names))                                                                  \
    F(nvrtcCompileProgram, (void *program, int n_options, const char *const *options))                                 \
    F(nvrtcGetProgramLogSize, (void *program, size_t *out))                                                            \
    F(nvrtcGetProgramLog, (void *program, char *out))                                                                  \
    F(nvrtcGetCUBINSize, (void *program, size_t *out))                                                                 \
    F(nvrtcGetCUBIN, (void *program, char *out))                                                                       \
    F(nvrtcDestroyProgram, (void **program))

typedef struct nvrtc_functions {
    NVRTC_FUNCTIONS(ENTRY_MEMBER)
} nvrtc_functions;
static nvrtc_functions nvrtc;

enum { OUT_OF_MEMORY = 1, COMPILATION_FAILED = 6, MOST_LOG = 400 };

static status refuse(ctx *c, int result, const char *what) {
    return fail(c, result == OUT_OF_MEMORY ? E_NOMEM : E_RUNTIME, "NVRTC error %d in %s", result, what);
}

#define CALL(c, name, ...)                                                                                             \
    do {                                                                                                               \
        int result_ = nvrtc.name(__VA_ARGS__);                                                                         \
        if (result_ != 0) return refuse((c), result_, #name);                                                          \
    } while (0)

static status load(ctx *c) { LIBRARY_ONCE(c, "NVRTC", nvrtc, NVRTC_FUNCTIONS, "libnvrtc.so.13", "libnvrtc.so.12"); }

status nvrtc_version(ctx *c, int *version) {
    int major = 0, minor = 0;

    TRY(load(c));
    CALL(c, nvrtcVersion, &major, &minor);
    *version = 10 * major + minor;
    return OK;
}

/* The compiler's first lines as an error; of errors that are not the text's, too. */
static status explain(ctx *c, void *program, int result) {
    size_t bytes = 0;
    char *log = NULL;

    CALL(c, nvrtcGetProgramLogSize, program, &bytes);
    if (bytes && !(log = calloc(1, bytes + 1))) return fail(c, E_NOMEM, "out of memory");
    if (log && nvrtc.nvrtcGetProgramLog(program, log) != 0) log[0] = '\0';
    const status s = result == COMPILATION_FAILED
                         ? fail(c, E_RUNTIME, "NVRTC does not compile a chain: %.*s", MOST_LOG, log ? log : "")
                         : fail(c, result == OUT_OF_MEMORY ? E_NOMEM : E_RUNTIME,
                                "NVRTC error %d in nvrtcCompileProgram: %.*s", result, MOST_LOG, log ? log : "");
    free(log);
    return s;
}

static status compile(ctx *c, void *program, int architecture, void **image, size_t *bytes) {
    char target[40];
    /* Products and sums are rounded apart, as where operators run one by one. */
    const char *const options[] = {target, "--std=c++17", "--fmad=false", "-DORT_DEVICE"};
    int result;

    (void)snprintf(target, sizeof target, "--gpu-architecture=sm_%d", architecture);
    result = nvrtc.nvrtcCompileProgram(program, sizeof options / sizeof *options, options);
    if (result != 0) return explain(c, program, result);
    CALL(c, nvrtcGetCUBINSize, program, bytes);
    if (*bytes == 0) return fail(c, E_RUNTIME, "NVRTC made nothing");
    if (!(*image = malloc(*bytes))) return fail(c, E_NOMEM, "out of memory");
    result = nvrtc.nvrtcGetCUBIN(program, *image);
    if (result == 0) return OK;
    free(*image);
    *image = NULL;
    return refuse(c, result, "nvrtcGetCUBIN");
}

status nvrtc_compile(ctx *c, const char *text, int architecture, void **image, size_t *bytes) {
    void *program = NULL;
    status s;

    *image = NULL;
    TRY(load(c));
    CALL(c, nvrtcCreateProgram, &program, text, "chain.cu", NVRTC_HEADERS, nvrtc_headers, nvrtc_header_names);
    s = compile(c, program, architecture, image, bytes);
    (void)nvrtc.nvrtcDestroyProgram(&program);
    return s;
}
