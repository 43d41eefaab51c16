/* uses.c -- says what memory instructions use that is not the arena's. */
#include "plan/plan.h"

typedef void use_fn(const operand *o, int t, void *arg);

static void each_use(const plan *p, int from, int to, use_fn *f, void *arg) {
    for (int t = from; t < to; t++) {
        const instr *in = &p->code[t];
        for (int i = 0; i < in->node->n_in; i++) f(&in->in[i], t, arg);
        for (int i = 0; i < in->node->n_out; i++) f(&in->out[i], t, arg);
    }
}

static void note_use(const operand *o, int t, void *arg) {
    bool *const *flags = arg;
    (void)t;
    if (flags[o->place]) flags[o->place][o->index] = true;
}

void plan_uses(const plan *p, int from, int to, bool *const flags[PLACES]) {
    each_use(p, from, to, note_use, (void *)(uintptr_t)flags);
}

typedef struct lives {
    int *first, *last;
} lives;

static void note_life(const operand *o, int t, void *arg) {
    const lives *l = arg;

    if ((o->place != AT_INPUT_GRAD && o->place != AT_INPUT) || l->last[o->index] < 0) return;
    if (o->place == AT_INPUT_GRAD && t < l->first[o->index]) l->first[o->index] = t;
    l->last[o->index] = t + 1;
}

void plan_gradient_lives(const plan *p, int *first, int *last) {
    const graph *g = p->g;
    lives l = {first, last};

    for (int i = 0; i < g->n_inputs; i++) {
        const bool has = g->input_grads && i < g->n_input_grads && g->input_grads[i];
        first[i] = has ? p->n_code : -1;
        last[i] = has ? p->n_forward : -1;
    }
    each_use(p, p->n_forward, p->n_code, note_life, &l);
}
