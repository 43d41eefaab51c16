/* fake_events.c -- keeps events of the emulated driver, and copies to the host.
 *
 * Such a copy is late: it arrives when the host waits for an event behind it, or for the stream.
 *     fake_captured_by_others(on)  from now on another library captures the default stream
 *     fake_waits()    how often the host waited
 *     fake_idle()     of these: when the stream had been given nothing behind what was waited for, so a GPU would stand
 *                     still until the next work comes */
#include "fake.h"

#include <pthread.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE = 1, OUT_OF_MEMORY = 2, INVALID_HANDLE = 400 };
enum { WITHOUT_TIME = 2, MOST_LATE = 64, LARGEST = 1024, EVENT = 0x4556 };

typedef struct late {
    void *to;
    size_t bytes;
    int behind; /* copies before this one */
    char data[LARGEST];
} late;

typedef struct event {
    int kind, recorded;
    int timed;
    int copies, work; /* before it */
    int beside;       /* copies before it, of another stream than the default one */
    double at;
} event;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static late coming[MOST_LATE];
static int n_coming, copies, waits, idle, captured_by_others;
static double spent; /* milliseconds */

EXPORT int fake_waits(void);
EXPORT int fake_idle(void);
int fake_waits(void) { return waits; }
int fake_idle(void) { return idle; }

void fake_spend(double milliseconds) { spent += milliseconds; }
void fake_captured_by_others(int on) { captured_by_others = on; }

static int complain(int result, const char *what) {
    fake_complain(what);
    return result;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!fake_enter()) return OUT_OF_MEMORY;                                                                       \
        if (!fake_in_context()) return complain(INVALID_HANDLE, "a call without the device's context");                \
        if (fake_capturing() || captured_by_others)                                                                    \
            return complain(INVALID_HANDLE, "an event, or a copy to the host, during a capture");                      \
    } while (0)

/* The first `count` of all copies. */
static void deliver(int count) {
    int left = 0;
    for (int i = 0; i < n_coming; i++)
        if (coming[i].behind < count) memcpy(coming[i].to, coming[i].data, coming[i].bytes);
        else coming[left++] = coming[i];
    n_coming = left;
}

static void wait_for(int count, int work) {
    (void)pthread_mutex_lock(&lock);
    deliver(count);
    waits++;
    idle += work == fake_given();
    (void)pthread_mutex_unlock(&lock);
}

EXPORT int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream);
EXPORT int cuEventCreate(void **out, unsigned flags);
EXPORT int cuEventRecord(void *object, void *stream);
EXPORT int cuEventSynchronize(void *object);
EXPORT int cuStreamWaitEvent(void *stream, void *object, unsigned flags);
EXPORT int cuEventElapsedTime(float *milliseconds, void *from, void *to);
EXPORT int cuEventDestroy_v2(void *object);
EXPORT int cuStreamIsCapturing(void *stream, int *out);
EXPORT int cuStreamSynchronize(void *stream);

int cuMemcpyDtoHAsync_v2(void *to, uint64_t from, size_t bytes, void *stream) {
    ENTER();
    if (stream) return fake_copy_beside(stream, to, (const void *)(uintptr_t)from, bytes);
    if (!to || !from || bytes > LARGEST) return complain(INVALID_VALUE, "memory to copy to the host");
    (void)pthread_mutex_lock(&lock);
    if (n_coming == MOST_LATE) deliver(copies);
    late *l = &coming[n_coming++];
    *l = (late){.to = to, .bytes = bytes, .behind = copies++};
    memcpy(l->data, (const void *)(uintptr_t)from, bytes);
    (void)pthread_mutex_unlock(&lock);
    return SUCCESS;
}

int cuEventCreate(void **out, unsigned flags) {
    event *e;

    ENTER();
    if (flags && flags != WITHOUT_TIME) return complain(INVALID_VALUE, "an event is made");
    if (!(e = calloc(1, sizeof *e))) return OUT_OF_MEMORY;
    e->kind = EVENT;
    e->timed = flags == 0;
    fake_hold(1);
    *out = e;
    return SUCCESS;
}

int cuEventRecord(void *object, void *stream) {
    event *e = object;

    ENTER();
    if (!e || e->kind != EVENT || (stream && !fake_is_stream(stream)))
        return complain(INVALID_HANDLE, "an event is recorded");
    e->beside = stream ? fake_beside() : 0;
    e->recorded = 1;
    e->copies = copies;
    e->work = fake_given();
    e->at = spent;
    return SUCCESS;
}

int cuEventSynchronize(void *object) {
    const event *e = object;

    ENTER();
    if (!e || e->kind != EVENT || !e->recorded) return complain(INVALID_HANDLE, "an event that was not recorded");
    wait_for(e->copies, e->work);
    return SUCCESS;
}

/* What the default stream was given is done: others wait for nothing. */
int cuStreamWaitEvent(void *stream, void *object, unsigned flags) {
    const event *e = object;

    ENTER();
    if (flags || !e || e->kind != EVENT || !e->recorded || (stream && !fake_is_stream(stream)))
        return complain(INVALID_HANDLE, "a stream waits for an event");
    if (!stream) fake_make_beside(e->beside);
    return SUCCESS;
}

int cuEventElapsedTime(float *milliseconds, void *from, void *to) {
    const event *const both[] = {from, to};

    ENTER();
    for (int i = 0; i < 2; i++)
        if (!both[i] || both[i]->kind != EVENT || !both[i]->recorded || !both[i]->timed)
            return complain(INVALID_HANDLE, "the time of an event that has none");
    *milliseconds = (float)(both[1]->at - both[0]->at);
    return SUCCESS;
}

int cuStreamIsCapturing(void *stream, int *out) {
    if (!fake_enter()) return OUT_OF_MEMORY;
    (void)stream;
    *out = captured_by_others || fake_capturing();
    return SUCCESS;
}

/* The memory stays readable, so that a second time is seen. */
int cuEventDestroy_v2(void *object) {
    event *e = object;

    (void)fake_enter();
    if (!e || e->kind != EVENT) return complain(INVALID_HANDLE, "an event given back that there is not");
    e->kind = 0;
    fake_hold(-1);
    return SUCCESS;
}

int cuStreamSynchronize(void *stream) {
    ENTER();
    if (stream && !fake_is_stream(stream)) return complain(INVALID_HANDLE, "a stream that there is not");
    if (stream) return fake_make_beside(fake_beside()), SUCCESS;
    wait_for(copies, fake_given());
    return SUCCESS;
}
