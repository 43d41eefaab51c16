/* triton.c -- mirrors ops/chains/triton.c: starts kernels that Triton has compiled, and keeps them by program.
 *
 * They are compiled when a plan is made, in its dry run; what only a run knows, that an address is less aligned than the
 * plan could hope, has another compiled then. With ORTMODULE_ENABLE_TUNING the ways to cut a kernel that has not run are
 * compiled and timed, and the fastest stays (measure.c). Python's lock is never waited for while the table's is held. */
#include "cuda/kernels/triton.h"

#include "ops/attention/triton_attention.h"

#include "cuda/host/driver.h"
#include "cuda/libraries/measure.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SLOTS = 4096, MOST_KERNELS = SLOTS / 2, MOST_SCRATCH = 4 };

typedef struct compiled {
    char *program, *how, name[sizeof((triton_image *)0)->name];
    int64_t room; /* of a row, a power of two; 0 without rows */
    int architecture, threads, block, shared, scratch;
    kernel kernel;
    _Atomic bool settled;      /* it has run, or its way was chosen: it stays */
    struct compiled *replaced; /* which other threads may be starting */
} compiled;

typedef struct choice {
    char key[TRITON_KEY], way[TRITON_WAY];
} choice;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of those below */
static compiled *table[SLOTS];
static int n_kernels;
static choice choices[MOST_KERNELS];
static int n_choices;

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

enum { HASHED = 16 }; /* digits */
static const uint64_t basis = 14695981039346656037u;

/* --- choices ---------------------------------------------------------------------------------------------------------- */

static const char *key_of(const triton_launch *l, char key[TRITON_KEY]) {
    (void)snprintf(key, TRITON_KEY, "triton %0*" PRIx64 " %s %" PRId64, HASHED, hash_text(basis, l->program), l->how,
                   room_of(l));
    return key;
}

/* With the lock. */
static choice *choice_for(const char *key) {
    for (int i = 0; i < n_choices; i++)
        if (strcmp(choices[i].key, key) == 0) return &choices[i];
    return NULL;
}

bool triton_choose(const char *key, const char *way) {
    choice *own;

    if (strncmp(key, "triton ", 7) != 0 || strlen(key) >= TRITON_KEY || strlen(way) >= TRITON_WAY || !*way)
        return false;
    (void)pthread_mutex_lock(&lock);
    own = choice_for(key);
    if (!own && n_choices < MOST_KERNELS) own = &choices[n_choices++];
    if (own) {
        memcpy(own->key, key, strlen(key) + 1);
        memcpy(own->way, way, strlen(way) + 1);
    }
    (void)pthread_mutex_unlock(&lock);
    return own != NULL;
}

void triton_forget(void) {
    (void)pthread_mutex_lock(&lock);
    n_choices = 0;
    (void)pthread_mutex_unlock(&lock);
}

/* The way that was chosen, or "". */
static void chosen_way(const triton_launch *l, char way[TRITON_WAY]) {
    char key[TRITON_KEY];
    const choice *own;

    (void)pthread_mutex_lock(&lock);
    own = choice_for(key_of(l, key));
    memcpy(way, own ? own->way : "", own ? sizeof own->way : 1);
    (void)pthread_mutex_unlock(&lock);
}

/* --- kernels ---------------------------------------------------------------------------------------------------------- */

/* Its place in the table; an empty one where it is not there. With the lock. */
static compiled **find(const triton_launch *l, int architecture) {
    const int64_t room = room_of(l);
    uint64_t at = hash_text(hash_text(basis ^ (uint64_t)(architecture + room), l->program), l->how);

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

/* Puts `made` into the table. Of two threads that compile one kernel the first keeps its own, unless it is to be replaced
 * and has not run. */
static status keep(ctx *c, const triton_launch *l, int architecture, bool replaces, compiled *made, compiled **out) {
    status s = OK;

    (void)pthread_mutex_lock(&lock);
    compiled **place = find(l, architecture), *old = *place;
    if (!old && n_kernels >= MOST_KERNELS) s = fail(c, E_UNSUPPORTED, "there are %d Triton kernels already", n_kernels);
    else if (!old) *place = made, n_kernels++;
    else if (replaces && old != made && !old->settled) made->replaced = old, *place = made;
    *out = *place;
    (void)pthread_mutex_unlock(&lock);
    if (*out != made) drop(made);
    return s;
}

/* The kernel cut that way; NULL where Triton makes none. */
static status make_way(ctx *c, const triton_launch *l, int architecture, const char *way, compiled **out) {
    const triton_maker *maker;
    triton_image image;
    status s = OK;

    *out = NULL;
    TRY(triton_get_maker(c, &maker));
    TRY(maker->compile(c, l, architecture, way, &image));
    if (image.bytes) s = load(c, l, architecture, &image, out);
    free(image.bytes);
    return s;
}

static status make(ctx *c, const triton_launch *l, int architecture, compiled **out) {
    char way[TRITON_WAY];
    compiled *made = NULL;

    chosen_way(l, way);
    if (*way) TRY(make_way(c, l, architecture, way, &made));
    if (made) made->settled = true;
    else TRY(make_way(c, l, architecture, "", &made));
    if (!made) return fail(c, E_UNSUPPORTED, "Triton makes no kernel");
    return keep(c, l, architecture, false, made, out);
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

/* --- measuring -------------------------------------------------------------------------------------------------------- */

typedef struct trial {
    call k; /* where to run */
    triton_launch l;
    compiled *made[TRITON_WAYS];
} trial;

/* Operands and results lie in the memory to measure in. Returns how many bytes all take. */
static size_t place_arguments(triton_launch *l, const measuring *m) {
    size_t at = 0;

    for (int i = 0; i < l->n_arguments; i++) {
        triton_argument *a = &l->arguments[i];
        if (a->type == DT_NONE) continue;
        a->value = (int64_t)(intptr_t)measure_take(m, &at, (size_t)a->count * dtype_size(a->type), MEASURE_ALIGNED);
    }
    return at;
}

static status start_way(ctx *c, void *arg, int way, bool *refused) {
    trial *t = arg;

    *refused = !t->made[way];
    return *refused ? OK : launch(c, &t->k, &t->l, t->made[way]);
}

static status time_ways(ctx *c, trial *t, int architecture, measuring *m, triton_measured *found) {
    for (int i = 0; i < found->count; i++) TRY(make_way(c, &t->l, architecture, found->ways[i], &t->made[i]));
    TRY(measure_ways(c, m, found->count, start_way, t, found->seconds));
    found->best = measure_best(found->seconds, found->count);
    return OK;
}

/* Compiles and times each way; the fastest goes into the table. Modules of the others stay loaded, as all do. */
static status tune(ctx *c, const call *k, const triton_launch *l, int architecture, measuring *m, compiled **out) {
    const triton_maker *maker;
    triton_measured *found;
    cuda_run where = m->at;
    trial *t;
    status s;

    TRY(NEW(c, t, 1));
    t->k = *k;
    t->k.cuda = &where;
    t->l = *l;
    if (!measure_fits(m, place_arguments(&t->l, m))) return OK;
    TRY(NEW(c, found, 1));
    TRY(triton_get_maker(c, &maker));
    TRY(maker->ways(c, l, found->ways, &found->count));
    if (found->count < 2) return OK;
    found->best = -1;
    s = time_ways(c, t, architecture, m, found);
    for (int i = 0; i < found->count; i++)
        if (i != found->best) drop(t->made[i]);
    if (s != OK || found->best < 0) return s;
    t->made[found->best]->settled = true;
    TRY(keep(c, l, architecture, true, t->made[found->best], out));
    if (!triton_choose(key_of(l, found->key), found->ways[found->best])) return OK; /* it holds for this process */
    found->next = m->kernels;
    m->kernels = found;
    return OK;
}

static status start(ctx *c, const call *k, triton_launch *l) {
    const int architecture = cuda_architecture(k->cuda->device);
    measuring *m = k->cuda->measuring;
    const triton_maker *maker;
    compiled *f;

    TRY(triton_get_maker(c, &maker));
    if (maker->interprets) return k->cuda->dry ? OK : maker->interpret(c, l);
    f = look_up(l, architecture);
    if (m && m->products && !(f && f->settled)) TRY(tune(c, k, l, architecture, m, &f));
    if (!f) TRY(make(c, l, architecture, &f));
    if (!k->cuda->dry) f->settled = true;
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
