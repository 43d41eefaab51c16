/* test_faults.c -- fails every allocation of a build in turn: always E_NOMEM, never a crash, nothing leaks.
 *
 * Leaks show in a sanitized build. What is built: a model, then everything up to a plan with a gradient. */
#include "machine.h"
#include "network.h"
#include "test.h"
#include "zoo.h"

#include "core/memory.h"
#include "onnx/read.h"
#include "onnx/write.h"

static const compile_options one_gradient = {.output_grads = (bool[]){true}};
static const compile_options with_gradient = {.output_grads = (bool[]){true, true}};

/* Builds in `c`, of which `after` allocations succeed. Without a model that is what is built. */
static status build(ctx *c, int64_t after, const graph *model) {
    graph *g;
    plan *p;

    ctx_init(c);
    c->mem.fail_after = after;
    return model ? compile(c, model, network_inputs, &with_gradient, &p) : network_make(c, &g);
}

/* So many allocations a build takes. */
static int64_t count_allocations(const graph *model) {
    const int64_t plenty = INT64_C(1) << 40;
    int64_t count;
    ctx c;

    CHECK_OK(&c, build(&c, plenty, model));
    count = plenty - c.mem.fail_after;
    ctx_release(&c);
    return count;
}

static void fail_each(const graph *model) {
    int64_t count = count_allocations(model);

    CHECK(count > 10);
    for (int64_t after = 0; after <= count; after++) {
        ctx c;
        status s = build(&c, after, model);
        CHECK(s == (after < count ? E_NOMEM : OK) && c.err.code == s);
        CHECK(s == OK || strstr(c.err.text, "out of memory"));
        ctx_release(&c);
    }
}

TEST(every_allocation_of_a_model_fails_in_turn) { fail_each(NULL); }

TEST(every_allocation_of_a_plan_fails_in_turn) {
    graph *model;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, network_make(&c, &model));
    fail_each(model);
    ctx_release(&c);
}

/* The bytes of a model of many operators: reading, specialising, differentiating, rewriting and planning them. */
static status build_zoo(ctx *c, int64_t after, const void *bytes, size_t n) {
    graph *model;
    plan *p;

    ctx_init(c);
    c->mem.fail_after = after;
    TRY(onnx_read(c, bytes, n, &model));
    return compile(c, model, zoo_inputs, &one_gradient, &p);
}

TEST(every_allocation_of_many_operators_fails_in_turn) {
    const int64_t plenty = INT64_C(1) << 40;
    const void *bytes = NULL;
    int64_t count;
    size_t n = 0;
    graph *zoo;
    ctx c, w;

    ctx_init(&w);
    CHECK_OK(&w, zoo_make(&w, &zoo));
    CHECK_OK(&w, onnx_write(&w, zoo, &bytes, &n));
    CHECK_OK(&c, build_zoo(&c, plenty, bytes, n));
    count = plenty - c.mem.fail_after;
    ctx_release(&c);
    CHECK(count > 1000);
    for (int64_t after = 0; after <= count; after++) {
        status s = build_zoo(&c, after, bytes, n);
        CHECK(s == (after < count ? E_NOMEM : OK) && c.err.code == s);
        CHECK(s == OK || strstr(c.err.text, "out of memory"));
        ctx_release(&c);
    }
    ctx_release(&w);
}

TEST(many_operators_run) {
    machine m;
    graph *zoo;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, zoo_make(&c, &zoo));
    CHECK_OK(&m.c, machine_make(&m, zoo, zoo_inputs, &one_gradient));
    for (int i = 0; i < ZOO_ROWS; i++) machine_fill(&m, i, (unsigned)i + 1, -1, 1);
    ((int64_t *)m.memory[AT_INPUT][ZOO_ROWS])[1] = 2;
    ((float *)m.memory[AT_OUTPUT_GRAD][0])[0] = 1;
    CHECK_OK(&m.c, machine_forward(&m));
    CHECK_OK(&m.c, machine_backward(&m));
    for (int i = 0; i < ZOO_ROWS; i++) CHECK(m.memory[AT_INPUT_GRAD][i] != NULL);
    machine_free(&m);
    ctx_release(&c);
}

TEST(a_failed_build_leaves_the_model_as_it_was) {
    graph *model;
    plan *p;
    ctx c, failing;

    ctx_init(&c);
    CHECK_OK(&c, network_make(&c, &model));
    CHECK(build(&failing, 100, model) == E_NOMEM);
    ctx_release(&failing);
    CHECK_OK(&c, compile(&c, model, network_inputs, &with_gradient, &p));
    ctx_release(&c);
}

/* --- a step --------------------------------------------------------------------------------------------------------- */

static void fill_zoo(machine *m) {
    for (int i = 0; i < ZOO_ROWS; i++) machine_fill(m, i, (unsigned)i + 1, -1, 1);
    ((int64_t *)m->memory[AT_INPUT][ZOO_ROWS])[1] = 2;
    ((float *)m->memory[AT_OUTPUT_GRAD][0])[0] = 1;
}

static void fill_network(machine *m) {
    for (int i = TABLE; i < INPUTS; i++) machine_fill(m, i, (unsigned)i + 1, -1, 1);
    memset(m->memory[AT_INPUT][SEEN], 1, TIME * TIME);
    for (int i = 0; i < TOKENS; i++) ((int64_t *)m->memory[AT_INPUT][LABELS])[i] = i % WORDS;
    ((double *)m->memory[AT_OUTPUT_GRAD][0])[0] = 1;
}

/* All gradients, one behind the other; returns their bytes. */
static size_t read_gradients(const machine *m, char *to) {
    const graph *g = m->p->g;
    size_t at = 0;

    for (int i = 0; i < g->n_input_grads; i++) {
        const value *v = g->input_grads[i];
        if (!v) continue;
        const size_t bytes = (size_t)value_bytes(v);
        if (to) memcpy(to + at, m->memory[AT_INPUT_GRAD][i], bytes);
        at += bytes;
    }
    return at;
}

static status step(machine *m) {
    TRY(machine_forward(m));
    return machine_backward(m);
}

/* Of a step's allocations so many succeed: those of kernels, of operands and of threads. */
static status step_that_fails(machine *m, int64_t after) {
    status s;

    m->c.mem.fail_after = after;
    memory_fail_after(after);
    s = step(m);
    memory_fail_after(-1);
    m->c.mem.fail_after = -1;
    return s;
}

/* Each allocation of forward and backward fails, then none: the step behind it is the step that it was before. */
static void fail_each_of_a_step(const graph *model, const input_spec *inputs, const compile_options *o,
                                void (*fill)(machine *m)) {
    enum { PLENTY = 1000 };
    char *before, *after;
    size_t bytes;
    machine m;
    status s = E_NOMEM;

    CHECK_OK(&m.c, machine_make(&m, model, inputs, o));
    fill(&m);
    CHECK_OK(&m.c, step(&m));
    bytes = read_gradients(&m, NULL);
    before = malloc(bytes);
    after = malloc(bytes);
    read_gradients(&m, before);
    for (int64_t k = 0; s != OK && k < PLENTY; k++) {
        s = step_that_fails(&m, k);
        CHECK(s == OK || (s == E_NOMEM && strstr(m.c.err.text, "out of memory")));
        CHECK_OK(&m.c, step(&m));
        read_gradients(&m, after);
        CHECK(memcmp(before, after, bytes) == 0);
    }
    CHECK(s == OK);
    free(before);
    free(after);
    machine_free(&m);
}

TEST(every_allocation_of_a_step_of_many_operators_fails_in_turn) {
    graph *zoo;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, zoo_make(&c, &zoo));
    fail_each_of_a_step(zoo, zoo_inputs, &one_gradient, fill_zoo);
    ctx_release(&c);
}

TEST(every_allocation_of_a_step_of_a_transformer_fails_in_turn) {
    graph *model;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, network_make(&c, &model));
    fail_each_of_a_step(model, network_inputs, &with_gradient, fill_network);
    ctx_release(&c);
}
