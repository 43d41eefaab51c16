/* parallel.c -- runs csrc/core/parallel.c's loops for fuzz targets, where sanitizers see what runs the parts. Under
 * the thread sanitizer each part has a thread of its own; otherwise they run one after another. */
#include "core/parallel.h"

#include <pthread.h>

enum { THREADS = 3 };

typedef struct part {
    range_fn *body;
    void *arg;
    int64_t begin, end;
    pthread_t thread;
} part;

int parallel_threads(void) { return THREADS; }

static void *run_part(void *arg) {
    part *p = arg;
    p->body(p->arg, p->begin, p->end);
    return NULL;
}

#ifdef __SANITIZE_THREAD__
static void run_all(part *all, int64_t count) {
    for (int64_t i = 1; i < count; i++)
        if (pthread_create(&all[i].thread, NULL, run_part, &all[i]) != 0) __builtin_trap();
    run_part(&all[0]);
    for (int64_t i = 1; i < count; i++) (void)pthread_join(all[i].thread, NULL);
}
#else
static void run_all(part *all, int64_t count) {
    for (int64_t i = 0; i < count; i++) run_part(&all[i]);
}
#endif

void parallel_for(int64_t count, int64_t grain, range_fn *body, void *arg) {
    int64_t parts = grain > 0 ? count / grain : count;
    part all[THREADS];

    if (count <= 0) return;
    if (parts > THREADS) parts = THREADS;
    if (parts < 1) parts = 1;
    for (int64_t p = 0; p < parts; p++)
        all[p] = (part){.body = body, .arg = arg, .begin = count * p / parts, .end = count * (p + 1) / parts};
    run_all(all, parts);
}
