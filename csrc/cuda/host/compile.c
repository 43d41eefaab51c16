/* compile.c -- keeps compiled chains, by program and architecture. A kernel is good for all devices of one. */
#define _GNU_SOURCE
#include "cuda/host/compile.h"

#include "core/digest.h"
#include "cuda/host/generate.h"
#include "cuda/host/refusals.h"
#include "cuda/host/stored.h"
#include "cuda/libraries/nvrtc.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4096, MOST_CHAINS = SLOTS / 2, LONGEST_FOLDER = 4096, MOST_COMPILERS = 16, STACK = 16 << 20 };

typedef struct chain {
    int architecture;
    chain_program program;
    kernel kernel;
} chain;

/* One that is to be compiled, and what has become of it: an image that the list has to free, or a reason. */
typedef struct wanted_chain {
    struct wanted_chain *next;
    int architecture;
    chain_program program;
    void *image;
    status s;
    bool was_read; /* from the folder */
    char reason[sizeof((compile_counts *)0)->reason];
} wanted_chain;

/* Threads that compile a list: each takes the first that is left. */
typedef struct team {
    wanted_chain *_Atomic left;
    char folder[LONGEST_FOLDER];
    uint64_t version, headers;
} team;

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

static status image_of(ctx *c, const team *t, wanted_chain *w, const char *text) {
    const stored_key key = {text, {(uint64_t)w->architecture, t->version, t->headers}};
    size_t bytes = 0;

    if (*t->folder && (w->image = stored_read(t->folder, &key, &bytes))) {
        w->was_read = true;
        return OK;
    }
    TRY(nvrtc_compile(c, text, w->architecture, &w->image, &bytes));
    if (*t->folder) stored_write(t->folder, &key, w->image, bytes);
    return OK;
}

static void compile_one(const team *t, wanted_chain *w) {
    const size_t length = chain_text(&w->program, NULL, 0);
    char *text = malloc(length + 1);
    ctx own;

    ctx_init(&own);
    if (text) (void)chain_text(&w->program, text, length + 1);
    w->s = text ? image_of(&own, t, w, text) : fail(&own, E_NOMEM, "out of memory");
    if (w->s != OK) (void)snprintf(w->reason, sizeof w->reason, "%.*s", (int)sizeof w->reason - 1, own.err.text);
    ctx_release(&own);
    free(text);
}

static void *compile_those_left(void *arg) {
    team *t = arg;
    wanted_chain *w = atomic_load(&t->left);

    for (;;) {
        while (w && !atomic_compare_exchange_weak(&t->left, &w, w->next)) {
        }
        if (!w) return NULL;
        compile_one(t, w);
        w = atomic_load(&t->left);
    }
}

/* torch's number of threads would not do: a launcher of several processes may set it to one. */
static int cores(void) {
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* This thread compiles, too, and alone where there can be no other. */
static void compile_all(team *t, int count) {
    pthread_t others[MOST_COMPILERS];
    const int most = cores() < MOST_COMPILERS ? cores() : MOST_COMPILERS;
    const int wanted = (count < most ? count : most) - 1;
    pthread_attr_t large;
    int n = 0;

    if (wanted > 0 && pthread_attr_init(&large) == 0) {
        (void)pthread_attr_setstacksize(&large, STACK);
        while (n < wanted && pthread_create(&others[n], &large, compile_those_left, t) == 0) n++;
        (void)pthread_attr_destroy(&large);
    }
    (void)compile_those_left(t);
    for (int i = 0; i < n; i++) (void)pthread_join(others[i], NULL);
}

/* Into the table. */
static status add(ctx *c, const wanted_chain *w) {
    chain **place = find(&w->program, w->architecture), *made;
    status s;

    if (*place || n_chains == MOST_CHAINS) return OK; /* another thread's plan had it, too */
    if (!(made = calloc(1, sizeof *made))) return fail(c, E_NOMEM, "out of memory");
    *made = (chain){.architecture = w->architecture, .program = w->program, .kernel = {.name = "chain"}};
    if ((s = cuda_load(c, w->image, &made->kernel)) != OK) {
        free(made);
        return s;
    }
    *place = made;
    n_chains++;
    return OK;
}

/* What the compiler says against one is kept as the reason; the interpreter runs it then. */
static void refused(ctx *c, const char *reason) {
    (void)snprintf(counts.reason, sizeof counts.reason, "%.*s", (int)sizeof counts.reason - 1, reason);
    refusal_note(c, "NVRTC", ": a fused chain is interpreted by one kernel for all, which is slower");
}

/* With the lock. */
static status settle(ctx *c, const wanted_chain *w) {
    if (w->s != OK) {
        if (fail(c, w->s, "%s", w->reason) != OK) refused(c, w->reason);
        return OK;
    }
    counts.read += w->was_read;
    counts.compiled += !w->was_read;
    return add(c, w);
}

/* With the lock. False: there is no compiler. */
static bool begin(ctx *c, team *t) {
    if (open_compiler(c) != OK) {
        is_missing = !version;
        refused(c, c->err.text);
        return false;
    }
    memcpy(t->folder, folder, sizeof folder);
    t->version = (uint64_t)version;
    t->headers = headers_digest;
    return true;
}

status chains_compile(ctx *c, chain_list *list) {
    team *t = list->count > 0 ? arena_array(c, 1, sizeof *t) : NULL;
    status s = OK;

    if (list->count == 0) return OK;
    if (!t) return E_NOMEM;
    (void)pthread_mutex_lock(&lock);
    const bool has_compiler = begin(c, t);
    (void)pthread_mutex_unlock(&lock);
    if (!has_compiler) return OK;
    atomic_store(&t->left, list->first);
    compile_all(t, list->count);
    (void)pthread_mutex_lock(&lock);
    for (wanted_chain *w = list->first; w; w = w->next) {
        if (s == OK) s = settle(c, w);
        free(w->image);
    }
    (void)pthread_mutex_unlock(&lock);
    return s;
}

static status want(ctx *c, chain_list *list, const chain_program *p, int architecture) {
    wanted_chain *w;

    for (w = list->first; w; w = w->next)
        if (w->architecture == architecture && memcmp(&w->program, p, sizeof *p) == 0) return OK;
    TRY(NEW(c, w, 1));
    w->architecture = architecture;
    w->program = *p;
    if (list->last) list->last->next = w;
    else list->first = w;
    list->last = w;
    list->count++;
    return OK;
}

status chain_compiled(ctx *c, const call *k, const chain_program *p, kernel **out) {
    const int architecture = cuda_architecture(k->cuda->device);

    (void)pthread_mutex_lock(&lock);
    chain *found = *find(p, architecture);
    const bool may_be_made = !is_missing && n_chains < MOST_CHAINS;
    (void)pthread_mutex_unlock(&lock);
    *out = found ? &found->kernel : NULL;
    if (found || !k->cuda->dry || !k->cuda->chains || !may_be_made) return OK;
    return want(c, k->cuda->chains, p, architecture);
}
