/* fake_sides.c -- copies for the emulated driver on streams beside the default one.
 *
 * A copy is as late as it may be: it is made when the default stream, or the host, waits for what is behind it. So memory
 * that is another's too early, or read before its copy is there, shows.
 *     fake_copies_early(on)  from now on copies are made at once: memory that is still another's shows
 *     fake_copies()          how many were made */
#include "fake.h"

#include <pthread.h>
#include <stddef.h>
#include <string.h>

enum { SUCCESS, INVALID_VALUE = 1, INVALID_HANDLE = 400, MOST_WAITING = 64 };

typedef struct copy {
    void *to;
    const void *from;
    size_t bytes;
} copy;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static copy waiting[MOST_WAITING];
static int given, made, early;

EXPORT void fake_copies_early(int on);
EXPORT int fake_copies(void);
void fake_copies_early(int on) { early = on; }
int fake_copies(void) { return made; }

int fake_beside(void) { return given; }

void fake_make_beside(int count) {
    (void)pthread_mutex_lock(&lock);
    for (; made < count; made++) {
        const copy *c = &waiting[made % MOST_WAITING];
        memcpy(c->to, c->from, c->bytes);
    }
    (void)pthread_mutex_unlock(&lock);
}

int fake_copy_beside(void *stream, void *to, const void *from, size_t bytes) {
    if (!fake_is_stream(stream) || !to || !from || fake_capturing()) {
        fake_complain("a copy beside the default stream");
        return INVALID_HANDLE;
    }
    if (given - made == MOST_WAITING) fake_make_beside(made + 1);
    (void)pthread_mutex_lock(&lock);
    waiting[given++ % MOST_WAITING] = (copy){to, from, bytes};
    (void)pthread_mutex_unlock(&lock);
    if (early) fake_make_beside(given);
    return SUCCESS;
}
