/* fake_nvrtc.c -- makes a libnvrtc.so.13 that has the C compiler make a shared object of kernels, for the emulated
 * driver.
 *
 * It refuses to make programs until a test allows it, since a compiler takes its time. It checks what it is told, and
 * fails calls on request, with the driver's others (fake.h).
 *     fake_nvrtc_allow(on)     0: programs are refused, 1: compiled, 2: the compiler finds mistakes in them
 *     fake_nvrtc_together()    how many programs were compiled at one time, at most, since it was asked last
 *     fake_nvrtc_text()        the text that was compiled last
 *     fake_nvrtc_header(i), fake_nvrtc_name(i)   what it may include; NULL behind the last */
#define _GNU_SOURCE
#include "emulate.h" /* so that this file is compiled again when it changes */
#include "fake.h"

#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { SUCCESS, OUT_OF_MEMORY = 1, CREATION_FAILED = 2, INVALID_INPUT = 3, COMPILATION_FAILED = 6, LONGEST = 4096 };

/* The emulator's header, which the kernels' include where there is no CUDA. */
__asm__(".section .rodata\n"
        "fake_emulate_h: .incbin \"tests/cuda/emulate.h\"\n"
        ".byte 0\n"
        ".previous\n");
extern const char fake_emulate_h[] __attribute__((visibility("hidden")));

typedef struct program {
    char *text, *image;
    size_t bytes;
    int n_headers;
    const char *const *headers, *const *names;
} program;

static int allowed, compiling, most_compiling;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of what was asked for last: threads compile together */
static char last_text[1 << 16];
static const char *const *last_headers, *const *last_names;
EXPORT void fake_nvrtc_allow(int on);
EXPORT int fake_nvrtc_together(void);
EXPORT const char *fake_nvrtc_text(void);
EXPORT const char *fake_nvrtc_header(int i);
EXPORT const char *fake_nvrtc_name(int i);
const char *fake_nvrtc_header(int i) { return last_headers[i]; }
const char *fake_nvrtc_name(int i) { return last_names[i]; }
void fake_nvrtc_allow(int on) { allowed = on; }
int fake_nvrtc_together(void) {
    (void)pthread_mutex_lock(&lock);
    const int most = most_compiling;
    most_compiling = 0;
    (void)pthread_mutex_unlock(&lock);
    return most;
}
const char *fake_nvrtc_text(void) { return last_text; }

EXPORT int nvrtcVersion(int *major, int *minor);
EXPORT int nvrtcCreateProgram(void **out, const char *text, const char *name, int n_headers, const char *const *headers,
                              const char *const *names);
EXPORT int nvrtcCompileProgram(void *p, int n, const char *const *options);
EXPORT int nvrtcGetProgramLogSize(void *p, size_t *out);
EXPORT int nvrtcGetProgramLog(void *p, char *out);
EXPORT int nvrtcGetCUBINSize(void *p, size_t *out);
EXPORT int nvrtcGetCUBIN(void *p, char *out);
EXPORT int nvrtcDestroyProgram(void **p);

static int complain(const char *what) {
    fake_complain(what);
    return INVALID_INPUT;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!fake_enter()) return OUT_OF_MEMORY;                                                                       \
    } while (0)

int nvrtcVersion(int *major, int *minor) {
    ENTER();
    *major = 13, *minor = 0;
    return SUCCESS;
}

int nvrtcCreateProgram(void **out, const char *text, const char *name, int n_headers, const char *const *headers,
                       const char *const *names) {
    program *p;

    ENTER();
    if (!text || !name || n_headers < 1 || !headers || !names) return complain("what a program is made of");
    for (int i = 0; i < n_headers; i++)
        if (!headers[i] || !names[i]) return complain("a header");
    if (!allowed) return CREATION_FAILED;
    if (!(p = calloc(1, sizeof *p)) || !(p->text = strdup(text))) return OUT_OF_MEMORY;
    p->n_headers = n_headers, p->headers = headers, p->names = names;
    (void)pthread_mutex_lock(&lock);
    (void)snprintf(last_text, sizeof last_text, "%s", text);
    last_headers = headers, last_names = names;
    (void)pthread_mutex_unlock(&lock);
    fake_hold(1);
    *out = p;
    return SUCCESS;
}

/* The folders of `name` are made, too. */
static int write_text(const char *folder, const char *name, const char *text) {
    char path[LONGEST];
    FILE *f;

    (void)snprintf(path, sizeof path, "%s/%s", folder, name);
    for (char *end = path + strlen(folder) + 1; (end = strchr(end, '/')); *end++ = '/') {
        *end = 0;
        (void)mkdir(path, 0700);
    }
    if (!(f = fopen(path, "w"))) return 0;
    const int done = fputs(text, f) >= 0;
    return fclose(f) == 0 && done;
}

static int read_image(program *p, const char *path) {
    FILE *f = fopen(path, "rb");
    struct stat s;
    uint64_t bytes;

    if (!f || fstat(fileno(f), &s) != 0) return 0;
    bytes = (uint64_t)s.st_size;
    p->bytes = 16 + bytes;
    p->image = malloc(p->bytes);
    const int done = p->image && fread(p->image + 16, bytes, 1, f) == 1;
    if (done) memcpy(p->image, "compiled", 8), memcpy(p->image + 8, &bytes, 8);
    (void)fclose(f);
    return done;
}

static int compile_in(program *p, const char *folder) {
    char path[LONGEST], command[4 * LONGEST];
    Dl_info driver;
    int done = 1;

    done = dladdr((void *)(uintptr_t)fake_hold, &driver) != 0;
    for (int i = 0; done && i < p->n_headers; i++) /* the others are the compiler's own */
        if (strchr(p->names[i], '/')) done = write_text(folder, p->names[i], p->headers[i]);
    done = done && write_text(folder, "emulate.h", fake_emulate_h) && write_text(folder, "chain.c", p->text);
    (void)snprintf(
        command, sizeof command,
        "gcc -std=gnu11 -O1 -w -fPIC -shared -fno-math-errno -fno-trapping-math -DORT_DEVICE -I%s %s/chain.c -o "
        "%s/chain.so %s -lm",
        folder, folder, folder, driver.dli_fname);
    (void)snprintf(path, sizeof path, "%s/chain.so", folder);
    return done && system(command) == 0 && read_image(p, path);
}

static void count_compiling(int more) {
    (void)pthread_mutex_lock(&lock);
    compiling += more;
    if (compiling > most_compiling) most_compiling = compiling;
    (void)pthread_mutex_unlock(&lock);
}

int nvrtcCompileProgram(void *of, int n, const char *const *options) {
    char folder[] = "/tmp/chain-XXXXXX", command[64];
    program *p = of;

    ENTER();
    if (!p || n < 1 || strcmp(options[0], "--gpu-architecture=sm_90") != 0) return complain("options of a compilation");
    if (allowed == 2) return COMPILATION_FAILED;
    if (!mkdtemp(folder)) return OUT_OF_MEMORY;
    count_compiling(1);
    const int done = compile_in(p, folder);
    count_compiling(-1);
    (void)snprintf(command, sizeof command, "rm -r %s", folder);
    if (system(command) != 0) return complain("a folder that cannot be removed");
    return done ? SUCCESS : COMPILATION_FAILED;
}

static const char what_is_wrong[] = "chain.cu(1): error: a mistake";

int nvrtcGetProgramLogSize(void *p, size_t *out) {
    ENTER();
    if (!p) return complain("a program that there is not");
    *out = sizeof what_is_wrong;
    return SUCCESS;
}

int nvrtcGetProgramLog(void *p, char *out) {
    ENTER();
    if (!p) return complain("a program that there is not");
    memcpy(out, what_is_wrong, sizeof what_is_wrong);
    return SUCCESS;
}

int nvrtcGetCUBINSize(void *of, size_t *out) {
    const program *p = of;
    ENTER();
    if (!p || !p->image) return complain("a program that was not compiled");
    *out = p->bytes;
    return SUCCESS;
}

int nvrtcGetCUBIN(void *of, char *out) {
    const program *p = of;
    ENTER();
    if (!p || !p->image) return complain("a program that was not compiled");
    memcpy(out, p->image, p->bytes);
    return SUCCESS;
}

int nvrtcDestroyProgram(void **of) {
    program *p = *of;
    if (!p) return complain("a program that there is not");
    free(p->text), free(p->image), free(p);
    *of = NULL;
    fake_hold(-1);
    return SUCCESS;
}
