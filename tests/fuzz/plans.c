/* plans.c -- makes plans and prologues for a fuzz target, and runs them. */
#include "plans.h"

#include "fuzz.h"

#include <string.h>

static int64_t bytes_of(value *const *values, int count) {
    int64_t sum = 0;
    for (int i = 0; values && i < count; i++)
        if (values[i]) sum += shape_count(&values[i]->shape) * (int64_t)dtype_size(values[i]->type);
    return sum;
}

int64_t plan_bytes(const plan *p) {
    const graph *g = p->g;
    int64_t sum = p->arena_bytes;

    sum += bytes_of(g->inputs, g->n_inputs) + bytes_of(g->outputs, g->n_outputs);
    return sum + bytes_of(g->input_grads, g->n_input_grads);
}

static void check_place(const plan *p, const operand *o) {
    int64_t last = 0;

    if (o->place != AT_ARENA) return;
    for (int i = 0; i < o->t.shape.rank; i++) {
        if (o->t.shape.dim[i] == 0) return;
        last += (o->t.shape.dim[i] - 1) * (o->t.stride[i] > 0 ? o->t.stride[i] : 0);
    }
    if (o->offset < 0 || o->offset + (last + 1) * (int64_t)dtype_size(o->t.type) > p->arena_bytes)
        wrong("an operand at %lld, %lld elements, in an arena of %lld bytes", (long long)o->offset, (long long)last + 1,
              (long long)p->arena_bytes);
}

void check_plan(const plan *p) {
    for (int i = 0; i < p->n_blocks; i++) {
        const interval *a = &p->blocks[i];
        if (a->bytes < 0 || a->offset < 0 || a->bytes > p->arena_bytes - a->offset)
            wrong("a block of %lld bytes at %lld in an arena of %lld", (long long)a->bytes, (long long)a->offset,
                  (long long)p->arena_bytes);
        for (int j = 0; j < i; j++) {
            const interval *b = &p->blocks[j];
            if (a->first <= b->last && b->first <= a->last && a->offset < b->offset + b->bytes &&
                b->offset < a->offset + a->bytes)
                wrong("two blocks that live at once overlap");
        }
    }
    for (int t = 0; t < p->n_code; t++) {
        const instr *in = &p->code[t];
        for (int i = 0; i < in->node->n_in; i++) check_place(p, &in->in[i]);
        for (int i = 0; i < in->node->n_out; i++) check_place(p, &in->out[i]);
    }
}

/* A failure says why. */
static status checked(machine *m, status s) {
    if (s != OK && !m->c.err.text[0]) wrong("status %d has no sentence", s);
    return s;
}

status planned_make(planned *p, const graph *model, const input_spec *inputs, const compile_options *o, int64_t most,
                    fill_fn *fill, void *arg) {
    compile_options options = *o;

    memset(p, 0, sizeof *p);
    for (;;) {
        options.known = p->known;
        options.n_known = p->n_known;
        options.sizes = p->sizes;
        options.n_sizes = p->n_sizes;
        TRY(checked(&p->m, machine_make(&p->m, model, inputs, &options)));
        check_plan(p->m.p);
        if (plan_bytes(p->m.p) > most)
            return fail(&p->m.c, E_UNSUPPORTED, "a run takes %lld bytes", (long long)plan_bytes(p->m.p));
        if (fill) fill(arg, &p->m);
        if (!p->m.p->g->pending) return OK;
        const graph *g = p->m.p->g;
        if (p->n_sizes + p->n_known + g->n_pending > MOST_SIZES)
            return fail(&p->m.c, E_UNSUPPORTED, "data decides too many sizes");
        TRY(checked(&p->m, machine_forward(&p->m)));
        for (int i = 0; i < g->n_pending; i++) {
            const int64_t key = g->pending_sizes[i].key;
            int64_t size;
            memcpy(&size, (const char *)p->m.memory[AT_OUTPUT][0] + (size_t)i * sizeof size, sizeof size);
            if (key >= MODEL_PLACE) p->known[p->n_known++] = (known_size){key, size};
            else p->sizes[p->n_sizes++] = size;
        }
        machine_free(&p->m);
    }
}

void planned_free(planned *p) { machine_free(&p->m); }
