/* parallel.c -- runs one parallel region a loop; ranges are static, so results do not depend on scheduling. */
#include "core/parallel.h"

#include <omp.h>
#include <pthread.h>
#include <stdbool.h>
#include <sys/stat.h>

/* A child that was forked has none of its parent's threads, but OpenMP waits for them, in the engine and in the libraries
 * it calls: where the parent had threads, the child computes with one. */
static bool parent_has_threads, alone;

static void before_fork(void) {
    struct stat tasks;
    parent_has_threads = stat("/proc/self/task", &tasks) != 0 || tasks.st_nlink > 3; /* ".", its name, and a thread's */
}

static void in_child(void) {
    if (!parent_has_threads) return;
    alone = true;
    omp_set_num_threads(1);
}

__attribute__((constructor)) static void watch_forks(void) { (void)pthread_atfork(before_fork, NULL, in_child); }

int parallel_threads(void) { return alone || omp_in_parallel() ? 1 : omp_get_max_threads(); }

void parallel_for(int64_t count, int64_t grain, range_fn *body, void *arg) {
    int64_t parts = grain > 0 ? count / grain : count;
    int threads = parallel_threads();

    if (count <= 0) return;
    if (parts > threads) parts = threads;
    if (parts <= 1) {
        body(arg, 0, count);
        return;
    }
#pragma omp parallel for num_threads((int)parts) schedule(static, 1)
    for (int64_t p = 0; p < parts; p++) body(arg, count * p / parts, count * (p + 1) / parts);
}
