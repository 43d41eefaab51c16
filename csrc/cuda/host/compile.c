/* compile.c -- the table of compiled chains, by program and architecture. A kernel is good for all devices of one. */
#include "cuda/host/compile.h"

#include "core/digest.h"
#include "cuda/host/generate.h"
#include "cuda/host/refusals.h"
#include "cuda/host/stored.h"
#include "cuda/libraries/nvrtc.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4096, MOST_CHAINS = SLOTS / 2, LONGEST_FOLDER = 4096 };

typedef struct chain {
    int architecture;
    chain_program program;
    kernel kernel;
} chain;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below */
static chain *chains[SLOTS];
static int n_chains, version;
static bool is_missing; /* NVRTC */
static char folder[LONGEST_FOLDER];
static uint64_t headers_digest;
static compile_counts counts;

bool compile_folder(const char *path) {
    const size_t length = strlen(path);

    if (length >= sizeof folder) return false;
    (void)pthread_mutex_lock(&lock);
    memcpy(folder, path, length + 1);
    (void)pthread_mutex_unlock(&lock);
    return true;
}

compile_counts compile_count(void) {
    (void)pthread_mutex_lock(&lock);
    const compile_counts now = counts;
    (void)pthread_mutex_unlock(&lock);
    return now;
}

static uint64_t hash(const chain_program *p, int architecture) {
    uint64_t h = 14695981039346656037u ^ (uint64_t)architecture;
    const unsigned char *bytes = (const unsigned char *)p;
    for (size_t i = 0; i < sizeof *p; i++) h = (h ^ bytes[i]) * 1099511628211u;
    return h ^ h >> 32;
}

/* Its place in the table; an empty one where it is not there. */
static chain **find(const chain_program *p, int architecture) {
    for (uint64_t at = hash(p, architecture);; at++) {
        chain **place = &chains[at % SLOTS];
        if (!*place || ((*place)->architecture == architecture && memcmp(&(*place)->program, p, sizeof *p) == 0))
            return place;
    }
}

/* The compiler, and what it is given beside a chain's text. */
static status open_compiler(ctx *c) {
    if (version) return OK;
    for (int i = 0; nvrtc_headers[i]; i++) {
        uint64_t one = 0;
        if (!digest(nvrtc_headers[i], strlen(nvrtc_headers[i]), &one)) return fail(c, E_NOMEM, "out of memory");
        headers_digest = (headers_digest ^ one) * 1099511628211u;
    }
    return nvrtc_version(c, &version);
}

static status image_of(ctx *c, const char *text, int architecture, void **image, size_t *bytes) {
    const stored_key key = {text, {(uint64_t)architecture, (uint64_t)version, headers_digest}};

    if (*folder && (*image = stored_read(folder, &key, bytes))) {
        counts.read++;
        return OK;
    }
    TRY(nvrtc_compile(c, text, architecture, image, bytes));
    counts.compiled++;
    if (*folder) stored_write(folder, &key, *image, *bytes);
    return OK;
}

/* Into the table. */
static status add(ctx *c, chain **place, const chain_program *p, int architecture, const void *image) {
    chain *made = calloc(1, sizeof *made);
    status s;

    if (!made) return fail(c, E_NOMEM, "out of memory");
    *made = (chain){.architecture = architecture, .program = *p, .kernel = {.name = "chain"}};
    if ((s = cuda_load(c, image, &made->kernel)) != OK) {
        free(made);
        return s;
    }
    *place = made;
    n_chains++;
    return OK;
}

/* What the compiler says against it is kept as the reason; the interpreter runs it then. */
static status make(ctx *c, chain **place, const chain_program *p, int architecture) {
    const size_t length = chain_text(p, NULL, 0);
    char *text = malloc(length + 1);
    void *image = NULL;
    size_t bytes = 0;
    status s = text ? open_compiler(c) : fail(c, E_NOMEM, "out of memory");

    if (s == OK) {
        (void)chain_text(p, text, length + 1);
        s = image_of(c, text, architecture, &image, &bytes);
    } else if (text && !version) {
        is_missing = true;
    }
    free(text);
    if (s != OK) {
        (void)snprintf(counts.reason, sizeof counts.reason, "%.*s", (int)sizeof counts.reason - 1, c->err.text);
        refusal_note(c, "NVRTC", ": a fused chain is interpreted by one kernel for all, which is slower");
        return OK;
    }
    s = add(c, place, p, architecture, image);
    free(image);
    return s;
}

/* With the lock. */
static status look_up(ctx *c, const call *k, const chain_program *p, kernel **out) {
    const int architecture = cuda_architecture(k->cuda->device);
    chain **place = find(p, architecture);

    if (!*place && k->cuda->dry && n_chains < MOST_CHAINS && !is_missing) TRY(make(c, place, p, architecture));
    *out = *place ? &(*place)->kernel : NULL;
    return OK;
}

status chain_compiled(ctx *c, const call *k, const chain_program *p, kernel **out) {
    (void)pthread_mutex_lock(&lock);
    status s = look_up(c, k, p, out);
    (void)pthread_mutex_unlock(&lock);
    return s;
}
