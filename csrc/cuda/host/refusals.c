/* refusals.c -- keeps the list of what libraries did not take. */
#include "cuda/host/refusals.h"

#include <pthread.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* of the list */
static refusal list[MOST_REFUSALS];
static atomic_int count;

void refusal_note(ctx *c, const char *library, const char *format, ...) {
    char about[REFUSAL_TEXT / 2];
    va_list args;

    va_start(args, format);
    (void)vsnprintf(about, sizeof about, format, args);
    va_end(args);
    (void)pthread_mutex_lock(&lock);
    const int at = atomic_load(&count);
    refusal *to = &list[at % MOST_REFUSALS];
    (void)snprintf(to->library, sizeof to->library, "%s", library);
    (void)snprintf(to->text, sizeof to->text, "%.*s%s", REFUSAL_TEXT / 2, c->err.text, about);
    atomic_store(&count, at + 1);
    (void)pthread_mutex_unlock(&lock);
    c->err = (err){.code = OK};
}

int refusals_count(void) { return atomic_load(&count); }

bool refusals_get(int i, refusal *out) {
    (void)pthread_mutex_lock(&lock);
    const int now = atomic_load(&count);
    const bool is_kept = i >= 0 && i < now && i >= now - MOST_REFUSALS;
    if (is_kept) *out = list[i % MOST_REFUSALS];
    (void)pthread_mutex_unlock(&lock);
    return is_kept;
}
