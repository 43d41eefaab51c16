/* scratch.c -- keeps one block for all threads, from the list of kept blocks: it is there already the next time. */
#include "core/scratch.h"
#include "core/memory.h"

enum { LEAST_KEPT = 1 << 20, ALIGNMENT = 64 }; /* smaller blocks are not kept (memory.h) */

typedef struct job {
    scratch_fn *body;
    void *arg;
    int64_t count, parts;
    char *memory;
    size_t bytes;
} job;

static void run_parts(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    for (int64_t p = begin; p < end; p++)
        j->body(j->arg, j->count * p / j->parts, j->count * (p + 1) / j->parts, j->memory + (size_t)p * j->bytes);
}

status parallel_for_with(ctx *c, int64_t count, int64_t grain, size_t bytes, scratch_fn *body, void *arg) {
    const int64_t most = grain > 0 ? count / grain : count, threads = parallel_threads();
    job j = {body, arg, count, most < threads ? most : threads, NULL, (bytes + ALIGNMENT - 1) / ALIGNMENT * ALIGNMENT};

    if (count <= 0) return OK;
    if (j.parts < 1) j.parts = 1;
    const size_t all = j.bytes * (size_t)j.parts;
    if (!(j.memory = memory_take(all > LEAST_KEPT ? all : LEAST_KEPT)))
        return fail(c, E_NOMEM, "out of memory: %zu bytes for the threads of a kernel", all);
    parallel_for(j.parts, 1, run_parts, &j);
    memory_give(j.memory);
    return OK;
}
