/* dnn.c -- opens cuDNN: the library, its handles, its errors, and what it was told of.
 *
 * Work is described once: its descriptors, and what the library's heuristic names, are kept for all of the same sizes.
 * When plans are made each is asked for, so a step finds them all. Only what gives the same bits every time is used. */
#include "cuda/libraries/dnn.h"
#include "cuda/host/refusals.h"
#include "cuda/libraries/dnn_library.h"
#include "cuda/libraries/measure.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

/* --- entry points ------------------------------------------------------------------------------------------------- */

#define DNN_FUNCTIONS(F)                                                                                               \
    F(cudnnCreate, (void **out))                                                                                       \
    F(cudnnSetStream, (void *handle, void *stream))                                                                    \
    F(cudnnCreateTensorDescriptor, (void **out))                                                                       \
    F(cudnnSetTensorNdDescriptor, (void *d, int type, int rank, const int *size, const int *stride))                   \
    F(cudnnDestroyTensorDescriptor, (void *d))

typedef struct dnn_functions {
    DNN_FUNCTIONS(ENTRY_MEMBER)
} dnn_functions;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of everything below, and of what users have */
static dnn_functions dnn;
static void *handles[MOST_DEVICES]; /* for the life of the process */

status dnn_refuse(ctx *c, int result, const char *what) {
    const bool no_memory = result == DNN_NO_HOST_MEMORY || result == DNN_NO_DEVICE_MEMORY;
    static const char *const texts[] = {"success",       "not initialized", "bad parameter",
                                        "not supported", "internal error",  "execution failed"};
    const char *text =
        result >= 0 && result / 1000 < (int)(sizeof texts / sizeof texts[0]) ? texts[result / 1000] : "?";
    return fail(c, no_memory ? E_NOMEM : E_RUNTIME, "cuDNN error %d in %s: %s", result, what,
                no_memory ? "out of memory" : text);
}

static status load_dnn(ctx *c) { DNN_ONCE(c, dnn, DNN_FUNCTIONS); }

static status load(ctx *c, const dnn_user *u) {
    TRY(load_dnn(c));
    return u->load(c);
}

/* What is optional is missed in silence. */
static status look_for(ctx *c, dnn_user *u, bool *found) {
    ctx aside;

    *found = true;
    if (!u->is_optional) return load(c, u);
    if (!u->was_looked_for) {
        ctx_init(&aside);
        u->is_missing = load(&aside, u) != OK;
        u->was_looked_for = true;
        ctx_release(&aside);
    }
    *found = !u->is_missing;
    return OK;
}

/* With the device's context current. */
static status handle_of(ctx *c, int device, void **out) {
    if (!handles[device]) {
        void *made = NULL;
        DNN_CALL(c, dnn, cudnnCreate, &made);
        handles[device] = made;
    }
    *out = handles[device];
    return OK;
}

/* --- what is described -------------------------------------------------------------------------------------------- */

enum { MOST_KNOWN = 1024 };

static dnn_known *all[MOST_KNOWN];
static int n_known;

static void dispose(dnn_known *p) {
    for (int i = 0; i < DNN_PARTS; i++)
        if (p->part[i]) (void)p->destroy[i](p->part[i]);
    free(p);
}

static void forget(void) {
    while (n_known > 0) dispose(all[--n_known]);
}

void dnn_forget(void) {
    (void)pthread_mutex_lock(&lock);
    forget();
    (void)pthread_mutex_unlock(&lock);
}

bool dnn_narrow(const int64_t *from, int64_t n, int *to) {
    for (int64_t i = 0; i < n; i++) {
        if (from[i] > INT32_MAX) return false;
        to[i] = (int)from[i];
    }
    return true;
}

int dnn_type(dtype type) {
    static const int types[DTYPE_COUNT] = {[F32] = 0, [F64] = 1, [F16] = 2, [BF16] = 9};
    return types[type];
}

const void *dnn_factor(dtype type, bool one) {
    static const float narrow[] = {0, 1};
    static const double wide[] = {0, 1};
    return type == F64 ? (const void *)&wide[one] : &narrow[one];
}

static void steps_of(const int64_t *size, int64_t rank, int64_t step[DNN_RANK]) {
    step[rank - 1] = 1;
    for (int64_t d = rank - 1; d > 0; d--) step[d - 1] = step[d] * size[d];
}

static bool is_narrow(const int64_t *size, int64_t rank) {
    int64_t step[DNN_RANK];
    int unused[DNN_RANK];

    steps_of(size, rank, step);
    return dnn_narrow(size, rank, unused) && dnn_narrow(step, rank, unused);
}

static bool fits(const dnn_key *k) {
    return is_narrow(k->x, k->rank) && is_narrow(k->w, k->rank) && is_narrow(k->y, k->rank);
}

status dnn_make_tensor(ctx *c, dnn_known *p, int at, dtype type, const int64_t *size) {
    const int64_t rank = p->key.rank;
    int64_t step[DNN_RANK];
    int sizes[DNN_RANK], steps[DNN_RANK];

    steps_of(size, rank, step);
    (void)(dnn_narrow(size, rank, sizes) && dnn_narrow(step, rank, steps)); /* fits() has seen to it */
    DNN_MAKE(c, p, at, dnn, Tensor);
    DNN_CALL(c, dnn, cudnnSetTensorNdDescriptor, p->part[at], dnn_type(type), (int)rank, sizes, steps);
    return OK;
}

/* Its description, made when there was none. All are forgotten when there are too many. */
static status find(ctx *c, void *handle, const dnn_user *u, const dnn_key *k, dnn_known **out) {
    dnn_known *p;
    status s = OK;

    for (int i = 0; i < n_known; i++)
        if (memcmp(&all[i]->key, k, sizeof *k) == 0) {
            *out = all[i];
            return OK;
        }
    if (n_known == MOST_KNOWN) forget();
    p = calloc(1, sizeof *p);
    if (!p) return fail(c, E_NOMEM, "no memory for what cuDNN is told");
    p->key = *k;
    if (fits(k)) s = u->describe(c, handle, p);
    if (s != OK) {
        dispose(p);
        return s;
    }
    *out = all[n_known++] = p;
    return OK;
}

/* --- starting ----------------------------------------------------------------------------------------------------- */

/* An error where it is none. */
static status note_refusal(ctx *c, const dnn_known *p, const dnn_said *said) {
    const dnn_key *k = &p->key;
    const status s = dnn_refuse(c, said->result, said->by);

    if (!dnn_is_refusal(said->result)) return s;
    refusal_note(c, "cuDNN",
                 ", for %s x [%" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], w [%" PRId64
                 ", %" PRId64 ", %" PRId64 ", %" PRId64 ", %" PRId64 "], algorithm %d",
                 dtype_name((dtype)k->type), k->x[0], k->x[1], k->x[2], k->x[3], k->x[4], k->w[0], k->w[1], k->w[2],
                 k->w[3], k->w[4], p->n_ways ? p->ways[p->way].algorithm : 0);
    return OK;
}

/* Where a dry run measures what has not run yet. */
static status settle(ctx *c, const call *k, const dnn_user *u, void *handle, dnn_known *p) {
    measuring *m = k->cuda->measuring;

    if (!m || !m->convolutions || !u->measure || p->settled || p->n_ways < 2) return OK;
    DNN_CALL(c, dnn, cudnnSetStream, handle, m->at.stream);
    return u->measure(c, m, handle, p);
}

/* With the lock. */
static status run(ctx *c, const call *k, dnn_user *u, const dnn_key *of, const void *arg, bool *done) {
    dnn_said said = {0, NULL};
    void *handle = NULL;
    dnn_known *p = NULL;
    bool found;

    TRY(look_for(c, u, &found));
    if (!found) return OK;
    TRY(handle_of(c, k->cuda->device, &handle));
    TRY(find(c, handle, u, of, &p));
    *done = p->taken;
    if (p->taken && k->cuda->dry) return settle(c, k, u, handle, p);
    if (!p->taken) return OK;
    p->settled = true;
    DNN_CALL(c, dnn, cudnnSetStream, handle, k->cuda->stream);
    for (;; p->way++) {
        TRY(u->start(c, k, handle, p, arg, &said));
        if (said.result == 0) return OK;
        TRY(note_refusal(c, p, &said));
        if (p->way + 1 >= p->n_ways) break;
    }
    *done = p->taken = false; /* and it is not asked again */
    return OK;
}

status dnn_run(ctx *c, const call *k, dnn_user *u, const dnn_key *of, const void *arg, bool *done) {
    *done = false;
    (void)pthread_mutex_lock(&lock);
    const status s = run(c, k, u, of, arg, done);
    (void)pthread_mutex_unlock(&lock);
    return s;
}
