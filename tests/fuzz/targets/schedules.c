/* schedules.c -- plans, runs, shows, measures and tunes in several threads at once, which get what one thread gets.
 * This target is for the thread sanitizer. */
#include "draw.h"
#include "plans.h"

#include "core/memory.h"
#include "exec/tune.h"
#include "onnx/write.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 20, MOST_THREADS = 4, MOST_STEPS = 6 };
enum { PLAN, RUN, PROFILE, SHOW, WRITE, TUNE, MEMORY, ACTIONS };

typedef struct shared {
    const drawn *d;
    const plan *p;
    machine *alone; /* its results */
    double *seconds;
    bool tuned;
} shared;

typedef struct worker {
    shared *all;
    unsigned steps[MOST_STEPS];
    int n_steps;
    pthread_t thread;
} worker;

static void fill(void *arg, machine *m) {
    const drawn *d = arg;
    const graph *g = m->p->g;

    for (int i = 0; i < d->model->n_inputs; i++)
        if (dtype_is_float(g->inputs[i]->type)) machine_fill(m, i, d->seed + (unsigned)i, -2, 2);
        else machine_fill(m, i, d->seed + (unsigned)i, 0, 3);
}

static status run_both(machine *m, double *profile) {
    run r = {.arena = m->arena, .seed = 1, .seconds = profile};
    for (int at = 0; at < PLACES; at++) r.memory[at] = m->memory[at];
    return exec_run(&m->c, m->p, 0, m->p->n_code, &r);
}

static void check_same(const machine *a, const machine *b) {
    const graph *g = a->p->g;

    for (int i = 0; i < g->n_outputs; i++) {
        const size_t bytes = (size_t)shape_count(&g->outputs[i]->shape) * dtype_size(g->outputs[i]->type);
        if (memcmp(a->memory[AT_OUTPUT][i], b->memory[AT_OUTPUT][i], bytes) != 0)
            wrong("output %d differs from that of one thread alone", i);
    }
}

/* Memory of its own for the shared plan. */
static void run_shared(shared *s, bool profile) {
    const compile_options o = {.output_grads = s->d->grads};
    planned p;

    if (planned_make(&p, s->d->model, s->d->inputs, &o, MOST_BYTES, fill, (void *)(uintptr_t)s->d) == OK) {
        plan *own = p.m.p;
        p.m.p = (plan *)(uintptr_t)s->p; /* of the same model and shapes, so the memory fits */
        if (run_both(&p.m, profile ? s->seconds : NULL) == OK && !s->tuned) check_same(&p.m, s->alone);
        p.m.p = own;
    }
    planned_free(&p);
}

static void do_step(shared *s, unsigned step) {
    graph view = *s->p->g;
    const void *bytes;
    const char *text;
    tuned *found;
    void *memory;
    planned p;
    int count;
    size_t n;
    ctx c;

    ctx_init(&c);
    view.c = &c;
    switch (step) {
    case PLAN:
        (void)!planned_make(&p, s->d->model, s->d->inputs, &(compile_options){0}, MOST_BYTES, fill,
                            (void *)(uintptr_t)s->d);
        planned_free(&p);
        break;
    case RUN: run_shared(s, false); break;
    case PROFILE: run_shared(s, true); break;
    case SHOW: (void)!graph_print(&view, &text); break;
    case WRITE: (void)!onnx_write(&c, &view, &bytes, &n); break;
    case TUNE: (void)!tune_plan(&c, s->p, 1e-5, &found, &count); break;
    default:
        memory = memory_take(3 << 20);
        memory_give(memory);
        memory_trim();
    }
    ctx_release(&c);
}

static void *work(void *arg) {
    worker *w = arg;
    for (int i = 0; i < w->n_steps; i++) do_step(w->all, w->steps[i]);
    return NULL;
}

static void run_threads(shared *s, choices *from) {
    worker workers[MOST_THREADS] = {{0}};
    const int n = 2 + (int)choose(from, MOST_THREADS - 1);

    for (int i = 0; i < n; i++) {
        worker *w = &workers[i];
        w->all = s;
        w->n_steps = 1 + (int)choose(from, MOST_STEPS);
        for (int k = 0; k < w->n_steps; k++) s->tuned |= (w->steps[k] = choose(from, ACTIONS)) == TUNE;
    }
    for (int i = 0; i < n; i++)
        if (pthread_create(&workers[i].thread, NULL, work, &workers[i]) != 0) abort();
    for (int i = 0; i < n; i++) (void)pthread_join(workers[i].thread, NULL);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    choices from = {data, data + (size > 24 ? 24 : size)}, model = {from.end, data + size};
    planned p;
    drawn d;
    ctx c;

    ctx_init(&c);
    draw_model(&c, &model, 8, &d);
    const compile_options o = {.output_grads = d.grads};
    if (planned_make(&p, d.model, d.inputs, &o, MOST_BYTES, fill, &d) == OK && run_both(&p.m, NULL) == OK) {
        shared s = {.d = &d, .p = p.m.p, .alone = &p.m, .seconds = calloc((size_t)p.m.p->n_code + 1, sizeof(double))};
        run_threads(&s, &from);
        free(s.seconds);
    }
    planned_free(&p);
    ctx_release(&c);
    return 0;
}
