/* test_faults.c -- every allocation of a build fails in turn: always E_NOMEM, never a crash, nothing leaks.
 *
 * Leaks show in a sanitized build. What is built: a model, then everything up to a plan with a gradient. */
#include "machine.h"
#include "network.h"
#include "test.h"
#include "zoo.h"

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
