/* onnx.c -- reads bytes as an ONNX model, writes it, plans it with its gradient, and runs it when it is small. */
#include "fuzz.h"
#include "plans.h"

#include "onnx/read.h"
#include "onnx/write.h"

#include <stdlib.h>
#include <string.h>

enum { MOST_BYTES = 1 << 16 };

/* What the file does not say of an input follows from its name. */
static input_spec spec_of(const value *declared) {
    unsigned draw = 2166136261u;
    input_spec spec = {.type = declared->type == DT_NONE ? F32 : declared->type, .shape = declared->shape};

    for (const char *name = declared->name; name && *name; name++) draw = (draw ^ (unsigned char)*name) * 16777619u;
    if (spec.shape.rank < 0) {
        spec.shape = (shape){.rank = (int)(draw % 4)};
        for (int i = 0; i < spec.shape.rank; i++) spec.shape.dim[i] = -1;
    }
    for (int i = 0; i < spec.shape.rank; i++)
        if (spec.shape.dim[i] < 0) spec.shape.dim[i] = 1 + (draw >> (4 + 2 * i)) % 4;
    spec.needs_grad = dtype_is_float(spec.type);
    return spec;
}

static void try_model(const graph *model, const input_spec *specs, const bool *grads) {
    planned p;
    const compile_options o = {.output_grads = grads};
    const void *bytes;
    size_t n;
    const char *text;

    if (planned_make(&p, model, specs, &o, MOST_BYTES, NULL, NULL) == OK) {
        if (graph_verify(p.m.p->g) != OK) wrong("a plan's graph: %s", p.m.c.err.text);
        if (graph_print(p.m.p->g, &text) != OK || onnx_write(&p.m.c, p.m.p->g, &bytes, &n) != OK)
            wrong("a plan cannot be shown: %s", p.m.c.err.text);
        if (machine_forward(&p.m) == OK && grads && p.m.p->g->input_grads) (void)!machine_backward(&p.m);
    }
    planned_free(&p);
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    graph *g = NULL;
    ctx c;

    ctx_init(&c);
    if (onnx_read(&c, data, size, &g) == OK) {
        input_spec *specs = calloc((size_t)g->n_inputs + 1, sizeof *specs);
        bool *grads = calloc((size_t)g->n_outputs + 1, sizeof *grads);
        if (!specs || !grads) abort();
        if (graph_verify(g) != OK) wrong("a graph that was read: %s", c.err.text);
        graph_remove_dead(g);
        for (int i = 0; i < g->n_inputs; i++) specs[i] = spec_of(g->inputs[i]);
        for (int i = 0; i < g->n_outputs; i++) grads[i] = true;
        try_model(g, specs, grads);
        try_model(g, specs, NULL);
        free(specs);
        free(grads);
    } else if (g || !c.err.text[0]) {
        wrong("a refusal has a sentence and no graph");
    }
    ctx_release(&c);
    return 0;
}
