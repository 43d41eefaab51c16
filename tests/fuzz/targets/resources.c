/* resources.c -- fuzz target: a model of N bytes whose inputs may be huge takes memory and time for its plan that have a
 * ceiling for N, and no place of the plan lies outside of what the plan says that a run needs. */
#define _GNU_SOURCE
#include "draw.h"
#include "plans.h"

#include "onnx/read.h"
#include "onnx/write.h"

#include <string.h>
#include <time.h>

/* Of a plan under sanitizers. A node may become a list of 65536 (ops/movement/sequence.c); folding may make FOLD_BYTES (graph/build.c)
 * a node, of which the file has 20 bytes or more. */
enum { BASE_BYTES = 128 << 20, BYTES_A_BYTE = 64 << 10 };
static const double BASE_SECONDS = 1, SECONDS_A_BYTE = 1e-3;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void plan_it(const graph *model, const drawn *d, bool gradient, size_t n) {
    const compile_options o = {.output_grads = gradient ? d->grads : NULL};
    const double began = seconds();
    plan *p = NULL;
    ctx c;

    ctx_init(&c);
    const status s = compile(&c, model, d->inputs, &o, &p);
    const double took = seconds() - began;
    if (s == OK) check_plan(p);
    if (c.mem.total > BASE_BYTES + n * BYTES_A_BYTE)
        wrong("a plan of a model of %zu bytes took %zu bytes", n, c.mem.total);
    if (took > BASE_SECONDS + (double)n * SECONDS_A_BYTE) wrong("a plan of a model of %zu bytes took %g s", n, took);
    ctx_release(&c);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    choices from = {data, data + size};
    const void *bytes;
    graph *model;
    drawn d;
    ctx c, r;
    size_t n;

    ctx_init(&c);
    ctx_init(&r);
    const bool gradient = choose(&from, 4) != 3;
    draw_model(&c, &from, INT64_C(1) << 40, &d);
    if (onnx_write(&c, d.model, &bytes, &n) != OK) wrong("the model cannot be written: %s", c.err.text);
    if (onnx_read(&r, bytes, n, &model) == OK) plan_it(model, &d, gradient, n);
    ctx_release(&r);
    ctx_release(&c);
    return 0;
}
