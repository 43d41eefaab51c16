/* machine.c -- gives a plan memory, and runs its two halves. */
#include "machine.h"

#include <stdlib.h>
#include <string.h>

static void **new_memory(value *const *values, int count) {
    void **memory = calloc((size_t)count + 1, sizeof *memory);
    for (int i = 0; values && i < count; i++) {
        const value *v = values[i];
        if (v) memory[i] = calloc((size_t)shape_count(&v->shape) + 1, dtype_size(v->type));
    }
    return memory;
}

static void free_memory(void **memory, int count) {
    for (int i = 0; memory && i < count; i++) free(memory[i]);
    free(memory);
}

static int count_of(const machine *m, place at) {
    const graph *g = m->p->g;
    switch (at) {
    case AT_INPUT: return g->n_inputs;
    case AT_OUTPUT:
    case AT_OUTPUT_GRAD: return g->n_outputs;
    case AT_WRITE: return m->p->n_writes;
    case AT_INPUT_GRAD: return g->n_input_grads;
    default: return 0;
    }
}

status machine_make(machine *m, const graph *model, const input_spec *inputs, const compile_options *o) {
    value **written;
    int n = 0;

    memset(m, 0, sizeof *m);
    m->host = o->host;
    ctx_init(&m->c);
    TRY(compile(&m->c, model, inputs, o, &m->p));
    TRY(NEW(&m->c, written, m->p->n_writes));
    for (const state_write *w = m->p->g->writes; w; w = w->next) written[n++] = w->value;

    m->arena = aligned_alloc(64, ((size_t)m->p->arena_bytes + 127) / 64 * 64);
    m->memory[AT_INPUT] = new_memory(m->p->g->inputs, count_of(m, AT_INPUT));
    m->memory[AT_OUTPUT] = new_memory(m->p->g->outputs, count_of(m, AT_OUTPUT));
    m->memory[AT_WRITE] = new_memory(written, count_of(m, AT_WRITE));
    m->memory[AT_OUTPUT_GRAD] = new_memory(m->p->g->output_grads, count_of(m, AT_OUTPUT_GRAD));
    m->memory[AT_INPUT_GRAD] = new_memory(m->p->g->input_grads, count_of(m, AT_INPUT_GRAD));
    return OK;
}

void machine_free(machine *m) {
    for (int at = AT_INPUT; m->p && at < PLACES; at++) free_memory(m->memory[at], count_of(m, (place)at));
    free(m->arena);
    ctx_release(&m->c);
}

static status run_part(machine *m, int from, int to) {
    run r = {.arena = m->arena, .seed = 1, .host = m->host};
    for (int at = 0; at < PLACES; at++) r.memory[at] = m->memory[at];
    return exec_run(&m->c, m->p, from, to, &r);
}

status machine_forward(machine *m) { return run_part(m, 0, m->p->n_forward); }
status machine_backward(machine *m) { return run_part(m, m->p->n_forward, m->p->n_code); }

void machine_fill(machine *m, int input, unsigned seed, double low, double high) {
    const value *v = m->p->g->inputs[input];
    uint64_t state = seed;

    for (int64_t i = 0, n = shape_count(&v->shape); i < n; i++) {
        state = state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
        dtype_set_value(v->type, m->memory[AT_INPUT][input], i, low + (high - low) * (double)(state >> 11) * 0x1p-53);
    }
}
