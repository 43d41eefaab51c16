/* test_faults.c -- every allocation of a build fails in turn: always E_NOMEM, never a crash, nothing leaks.
 *
 * Leaks show in a sanitized build. What is built: a model, then everything up to a plan with a gradient. */
#include "network.h"
#include "test.h"

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
