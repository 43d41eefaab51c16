/* parallel.c -- one parallel region a loop; ranges are static, so results do not depend on scheduling. */
#include "core/parallel.h"

#include <omp.h>

int parallel_threads(void) { return omp_in_parallel() ? 1 : omp_get_max_threads(); }

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
