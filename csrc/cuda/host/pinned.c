/* pinned.c -- orders one stream a device, for copies from and to pinned memory, with others by two events. */
#include "cuda/host/pinned.h"

#include "cuda/host/functions.h"

#include <pthread.h>

/* Of a device, for the life of the process: made by its first copy. An event is recorded and waited for under the lock,
 * so that no other thread records it in between. */
typedef struct side {
    void *stream, *run_was_here, *copies_were_here;
} side;

static side sides[MOST_DEVICES];
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

static status open_side(ctx *c, side *s) {
    if (!s->run_was_here) CALL(c, cuEventCreate, &s->run_was_here, EVENT_WITHOUT_TIME);
    if (!s->copies_were_here) CALL(c, cuEventCreate, &s->copies_were_here, EVENT_WITHOUT_TIME);
    if (!s->stream) CALL(c, cuStreamCreate, &s->stream, STREAM_NON_BLOCKING);
    return OK;
}

static status begin(ctx *c, side *s, const cuda_run *r) {
    TRY(open_side(c, s));
    CALL(c, cuEventRecord, s->run_was_here, r->stream);
    CALL(c, cuStreamWaitEvent, s->stream, s->run_was_here, 0);
    return OK;
}

static status start_write(ctx *c, side *s, const cuda_run *r, void *to, const void *from, size_t bytes) {
    TRY(begin(c, s, r));
    CALL(c, cuMemcpyDtoHAsync_v2, to, (uintptr_t)from, bytes, s->stream);
    return OK;
}

static status start_read(ctx *c, side *s, const cuda_run *r, void *to, const void *from, size_t bytes) {
    TRY(begin(c, s, r));
    CALL(c, cuMemcpyHtoDAsync_v2, (uintptr_t)to, from, bytes, s->stream);
    return OK;
}

static status join(ctx *c, side *s, const cuda_run *r) {
    if (!s->stream) return OK;
    CALL(c, cuEventRecord, s->copies_were_here, s->stream);
    CALL(c, cuStreamWaitEvent, r->stream, s->copies_were_here, 0);
    return OK;
}

status pinned_write(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes) {
    (void)pthread_mutex_lock(&lock);
    const status s = start_write(c, &sides[r->device], r, to, from, bytes);
    (void)pthread_mutex_unlock(&lock);
    return s;
}

status pinned_read(ctx *c, const cuda_run *r, void *to, const void *from, size_t bytes) {
    (void)pthread_mutex_lock(&lock);
    const status s = start_read(c, &sides[r->device], r, to, from, bytes);
    (void)pthread_mutex_unlock(&lock);
    return s;
}

status pinned_wait(ctx *c, const cuda_run *r) {
    (void)pthread_mutex_lock(&lock);
    const status s = join(c, &sides[r->device], r);
    (void)pthread_mutex_unlock(&lock);
    return s;
}

status pinned_take(ctx *c, int64_t bytes, offload_room *out) {
    *out = (offload_room){.file = NO_FILE, .bytes = bytes};
    CALL(c, cuMemHostAlloc, &out->memory, (size_t)bytes, PINNED_MEMORY);
    return OK;
}

static status give(ctx *c, const cuda_run *r, void *memory) {
    const side *s = &sides[r->device];

    if (s->stream) CALL(c, cuStreamSynchronize, s->stream);
    CALL(c, cuMemFreeHost, memory);
    return OK;
}

/* Where copies may not be over the memory stays for the life of the process. */
void pinned_give(int device, offload_room *room) {
    void *const memory = room->memory;
    cuda_run where;
    ctx c;

    room->memory = NULL;
    if (!memory || cuda_is_forked()) return;
    ctx_init(&c);
    if (cuda_begin(&c, device, NULL, &where) == OK) {
        status s = give(&c, &where, memory);
        s = cuda_end(&c, &where, s);
        (void)s; /* there is nothing to be done about it */
    }
    ctx_release(&c);
}
