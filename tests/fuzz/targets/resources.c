/* resources.c -- plans a model of N bytes whose inputs may be huge: memory and time have a ceiling for N. No place of
 * the plan lies outside of what the plan says that a run needs. */
#define _GNU_SOURCE
#include "draw.h"
#include "plans.h"

#include "onnx/read.h"
#include "onnx/write.h"

#include <string.h>
#include <time.h>

/* Of a plan under sanitizers: once, and for each byte of the file. Measured over 35,000 models: 64 KiB and 0.53 KiB a byte,
 * 5.5 ms in all; what is allowed is four times that memory and, since the machine may be busy, nine times that time. What is
 * bounded otherwise comes on top: results that were computed while the graph was made (graph/build.c), as they are, and a
 * list of 65536 elements (ops/movement/sequence.c), measured at 150 MiB and 0.35 s. */
enum { BASE_BYTES = 1 << 20, BYTES_A_BYTE = 2 << 10, FOLDED_BYTES = 64 << 20, LIST_BYTES = 256 << 20 };
static const double BASE_SECONDS = 0.05, SECONDS_A_BYTE = 4e-5, LIST_SECONDS = 4;

static double seconds(void) {
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static size_t count_lists(const graph *model) {
    size_t count = 0;
    for (const node *n = model->first; n; n = n->next) count += strcmp(n->op->name, "SplitToSequence") == 0;
    return count;
}

static void plan_it(const graph *model, const drawn *d, bool gradient, size_t n) {
    const compile_options o = {.output_grads = gradient ? d->grads : NULL};
    const size_t lists = count_lists(model);
    const double began = seconds();
    plan *p = NULL;
    ctx c;

    ctx_init(&c);
    const status s = compile(&c, model, d->inputs, &o, &p);
    const double took = seconds() - began;
    if (s == OK) check_plan(p);
    const size_t folded = s == OK ? (size_t)p->g->folded : FOLDED_BYTES;
    if (c.mem.total > BASE_BYTES + n * BYTES_A_BYTE + folded + lists * LIST_BYTES)
        wrong("a plan of a model of %zu bytes took %zu bytes, of which %zu for results", n, c.mem.total, folded);
    if (took > BASE_SECONDS + (double)n * SECONDS_A_BYTE + (double)lists * LIST_SECONDS)
        wrong("a plan of a model of %zu bytes took %g s", n, took);
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
