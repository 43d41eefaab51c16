/* triton.c -- mirrors ops/chains/triton.c: starts kernels that Triton has compiled, and keeps them by program.
 *
 * They are compiled when a plan is made, in its dry run; what only a run knows, that an address is less aligned than the
 * plan could hope, has another compiled then. Python's lock is never waited for while the table's is held. */
#include "cuda/kernels/triton.h"

#include "ops/attention/triton_attention.h"
#include "ops/chains/triton.h"

#include "cuda/host/driver.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4096, MOST_KERNELS = SLOTS / 2, MOST_SCRATCH = 4 };

typedef struct compiled {
    char *program, *how, name[sizeof((triton_image *)0)->name];
    int64_t room; /* of a row, a power of two; 0 without rows */
    int architecture, threads, block, shared, scratch;
    kernel kernel;
} compiled;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the two below */
static compiled *table[SLOTS];
static int n_kernels;

static bool has_rows(const triton_launch *l) { return strncmp(l->program, "rows", 4) == 0; }

static int64_t room_of(const triton_launch *l) {
    int64_t room = 1;
    while (room < l->width) room *= 2;
    return has_rows(l) ? room : 0;
}

static uint64_t hash_text(uint64_t h, const char *text) {
    for (; *text; text++) h = (h ^ (unsigned char)*text) * 1099511628211u;
    return h ^ h >> 32;
}

/* Its place in the table; an empty one where it is not there. With the lock. */
static compiled **find(const triton_launch *l, int architecture) {
    const int64_t room = room_of(l);
    uint64_t at = hash_text(hash_text(14695981039346656037u ^ (uint64_t)(architecture + room), l->program), l->how);

    for (;; at++) {
        compiled **place = &table[at % SLOTS];
        const compiled *f = *place;
        if (!f || (f->architecture == architecture && f->room == room && strcmp(f->how, l->how) == 0 &&
                   strcmp(f->program, l->program) == 0))
            return place;
    }
}

static compiled *look_up(const triton_launch *l, int architecture) {
    (void)pthread_mutex_lock(&lock);
    compiled *found = *find(l, architecture);
    (void)pthread_mutex_unlock(&lock);
    return found;
}

static void drop(compiled *f) {
    if (!f) return;
    free(f->program);
    free(f->how);
    free(f);
}

static status load(ctx *c, const triton_launch *l, int architecture, const triton_image *image, compiled **out) {
    compiled *f = calloc(1, sizeof *f);
    status s = OK;

    *out = NULL;
    if (!f || !(f->program = strdup(l->program)) || !(f->how = strdup(l->how))) {
        drop(f);
        return fail(c, E_NOMEM, "out of memory");
    }
    memcpy(f->name, image->name, sizeof f->name);
    f->kernel.name = f->name;
    f->room = room_of(l), f->architecture = architecture;
    f->threads = image->threads, f->block = image->block, f->shared = image->shared, f->scratch = image->scratch;
    if (f->scratch > MOST_SCRATCH) s = fail(c, E_INVALID, "a Triton kernel wants %d scratch pointers", f->scratch);
    if (s == OK) s = cuda_load(c, image->bytes, &f->kernel);
    if (s == OK) *out = f;
    else drop(f);
    return s;
}

/* Of two threads that compile one kernel the first keeps its own. */
static status keep(ctx *c, const triton_launch *l, int architecture, compiled *made, compiled **out) {
    status s = OK;

    (void)pthread_mutex_lock(&lock);
    compiled **place = find(l, architecture);
    if (!*place && n_kernels >= MOST_KERNELS)
        s = fail(c, E_UNSUPPORTED, "there are %d Triton kernels already", n_kernels);
    else if (!*place) *place = made, n_kernels++;
    *out = *place;
    (void)pthread_mutex_unlock(&lock);
    return s;
}

static status make(ctx *c, const triton_launch *l, int architecture, compiled **out) {
    const triton_maker *maker;
    triton_image image;
    compiled *made = NULL;
    status s;

    TRY(triton_get_maker(c, &maker));
    TRY(maker->compile(c, l, architecture, &image));
    s = load(c, l, architecture, &image, &made);
    free(image.bytes);
    return s == OK ? keep(c, l, architecture, made, out) : s;
}

static status launch(ctx *c, const call *k, triton_launch *l, compiled *f) {
    void *parameters[TRITON_ARGUMENTS + MOST_SCRATCH];
    void *nothing = NULL;
    geometry g = {.threads = f->threads};
    int n = 0;

    for (; n < l->n_arguments; n++) parameters[n] = &l->arguments[n].value;
    for (int i = 0; i < f->scratch; i++) parameters[n++] = &nothing;
    g.blocks = ((has_rows(l) ? l->rows : l->width) + f->block - 1) / f->block;
    if (l->programs) g.blocks = l->programs;
    if (l->times) g.blocks *= l->times;
    return cuda_launch_with(c, k, &f->kernel, g, f->shared, parameters);
}

static status start(ctx *c, const call *k, triton_launch *l) {
    const int architecture = cuda_architecture(k->cuda->device);
    const triton_maker *maker;
    compiled *f;

    TRY(triton_get_maker(c, &maker));
    if (maker->interprets) return k->cuda->dry ? OK : maker->interpret(c, l);
    if (!(f = look_up(l, architecture))) TRY(make(c, l, architecture, &f));
    return launch(c, k, l, f);
}

kernel_fn triton_cuda;

status triton_cuda(ctx *c, const call *k) {
    triton_launch l;

    TRY(triton_launch_of(c, k, k->cuda->seed, &l));
    return start(c, k, &l);
}

status triton_attention_start(ctx *c, const call *k, bool *done) {
    triton_launch launches[TRITON_ATTENTION_KERNELS];
    int count;

    TRY(triton_attention_of(c, k, k->cuda->seed, launches, &count));
    *done = count > 0;
    for (int i = 0; i < count; i++) TRY(start(c, k, &launches[i]));
    return OK;
}
