/* test_recompute.c -- tests what backward computes again: the choice on random steps, without kernels, and nodes of a
 * graph. */
#include "plan/recompute.h"
#include "plan/recompute_choice.h"

#include "build.h"
#include "test.h"

enum { LAYERS = 6, STEPS_OF_A_LAYER = 4 };

/* --- steps as of a network ------------------------------------------------------------------------------------------ */

/* Forward: each layer makes three values and its result; backward reads all of them in reverse. */
typedef struct network {
    recompute_step steps[2 * LAYERS * STEPS_OF_A_LAYER];
    int in[2 * LAYERS * STEPS_OF_A_LAYER][3], out[2 * LAYERS * STEPS_OF_A_LAYER][1];
    int64_t bytes[3 * LAYERS * STEPS_OF_A_LAYER];
    int maker[3 * LAYERS * STEPS_OF_A_LAYER];
    bool held[3 * LAYERS * STEPS_OF_A_LAYER];
    recompute_problem p;
} network;

static void add(network *n, int a, int b, int c, int result, double cost, int64_t bytes, uint64_t kind) {
    const int t = n->p.n_steps++;
    const int given[3] = {a, b, c};
    recompute_step *s = &n->steps[t];

    for (int i = 0; i < 3; i++)
        if (given[i] >= 0) n->in[t][s->n_in++] = given[i];
    n->out[t][0] = result;
    s->in = n->in[t];
    s->out = n->out[t];
    s->n_out = 1;
    s->cost = cost;
    s->kind = kind;
    n->bytes[result] = bytes;
    n->maker[result] = t;
    if (result >= n->p.n_values) n->p.n_values = result + 1;
}

/* Values of forward are 1 ..., value 0 is given; gradients follow. */
static network *make_network(void) {
    network *n = calloc(1, sizeof *n);
    int v = 0, gradient = LAYERS * STEPS_OF_A_LAYER;

    n->p = (recompute_problem){.steps = n->steps, .bytes = n->bytes, .maker = n->maker, .held = n->held};
    n->maker[0] = -1;
    n->held[0] = true;
    n->p.n_values = 1;
    for (int k = 0; k < LAYERS; k++, v += STEPS_OF_A_LAYER) {
        add(n, v, -1, -1, v + 1, 1, 100, 1);      /* cheap */
        add(n, v + 1, -1, -1, v + 2, 50, 400, 2); /* a wide product */
        add(n, v + 2, -1, -1, v + 3, 4, 400, 3);  /* an activation function */
        add(n, v + 3, v, -1, v + 4, 50, 100, 4);  /* a product, and the sum with what came in */
    }
    n->p.n_forward = n->p.n_steps;
    for (int k = LAYERS * STEPS_OF_A_LAYER; k >= 1; k--, gradient++)
        add(n, k - 1, k % STEPS_OF_A_LAYER == 3 ? k : -1, k < LAYERS * STEPS_OF_A_LAYER ? gradient : -1, gradient + 1,
            10, 100, 5);
    n->held[gradient] = true;
    return n;
}

TEST(nothing_is_made_again_where_all_fits) {
    network *n = make_network();
    recompute_choice all, none;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, INT64_MAX, &none));
    CHECK(none.count == 0 && none.cost == 0 && none.peak == none.before);
    CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, none.before - 1, &all));
    CHECK(all.count > 0 && all.peak < all.before && all.before == none.before);
    ctx_release(&c);
    free(n);
}

TEST(fewer_bytes_cost_more) {
    network *n = make_network();
    recompute_choice made, first;
    double cost = 0;
    int reached = 0;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, INT64_MAX, &first));
    for (int64_t target = first.before; target > 0; target -= first.before / 20) {
        CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, target, &made));
        reached += made.peak <= target;
        CHECK(made.cost >= cost && made.peak <= first.before);
        cost = made.cost;
    }
    CHECK(made.peak * 2 < first.before && reached >= 10);
    ctx_release(&c);
    free(n);
}

TEST(one_search_finds_what_each_target_has) {
    network *n = make_network();
    recompute_choice made, series[RECOMPUTE_TARGETS];
    int count, at = 0;
    ctx c, keeps;

    ctx_init(&c);
    ctx_init(&keeps);
    CHECK_OK(&c, recompute_to_each(&c, &n->p, NULL, 0, &keeps, series, &count));
    ctx_release(&c); /* they are elsewhere */
    CHECK(count > 5 && count <= RECOMPUTE_TARGETS);
    for (int i = 1; i <= RECOMPUTE_TARGETS; i++) {
        const int64_t target = series[0].before / RECOMPUTE_TARGETS * (RECOMPUTE_TARGETS - i);
        CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, target, &made));
        while (at < count - 1 && (series[at].peak > target || series[at].peak != made.peak)) at++;
        CHECK(series[at].peak == made.peak && series[at].cost == made.cost && series[at].count == made.count);
        CHECK(memcmp(series[at].again, made.again, (size_t)n->p.n_values) == 0);
        CHECK(memcmp(series[at].kept, made.kept, (size_t)n->p.n_values) == 0);
    }
    CHECK(at == count - 1);
    for (int i = 1; i < count; i++) CHECK(series[i].peak < series[i - 1].peak && series[i].cost >= series[i - 1].cost);
    ctx_release(&c);
    ctx_release(&keeps);
    free(n);
}

TEST(memory_for_what_one_search_finds_may_be_missing) {
    network *n = make_network();
    recompute_choice series[RECOMPUTE_TARGETS];
    status s = E_NOMEM;
    int count;

    for (int64_t allowed = 0; s == E_NOMEM; allowed++) {
        ctx c, keeps;
        ctx_init(&c);
        ctx_init(&keeps);
        keeps.mem.fail_after = allowed;
        s = recompute_to_each(&c, &n->p, NULL, 0, &keeps, series, &count);
        CHECK(s == OK || strstr(c.err.text, "out of memory"));
        ctx_release(&c);
        ctx_release(&keeps);
    }
    CHECK(s == OK && count > 5);
    free(n);
}

TEST(the_cheapest_goes_first) {
    network *n = make_network();
    recompute_choice made;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, INT64_MAX, &made));
    CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, made.before - 300, &made));
    for (int v = 0; v < n->p.n_values; v++) /* 4 for 400 bytes, or 1 for 100 */
        CHECK(!made.again[v] || v % STEPS_OF_A_LAYER == 3 || v % STEPS_OF_A_LAYER == 1);
    ctx_release(&c);
    free(n);
}

TEST(what_costs_little_is_made_again_to_a_bound) {
    network *n = make_network();
    recompute_choice made, none;
    int64_t peak = INT64_MAX;
    ctx c;

    ctx_init(&c);
    for (int bound = 1; bound <= 32; bound *= 2) {
        CHECK_OK(&c, recompute_cheaply(&c, &n->p, bound, &made));
        CHECK(made.cost <= bound && made.peak <= peak && made.peak <= made.before);
        peak = made.peak;
    }
    CHECK(made.count > 0 && made.peak < made.before);
    CHECK_OK(&c, recompute_cheaply(&c, &n->p, 0.5, &none)); /* nothing costs so little */
    CHECK(none.count == 0 && none.cost == 0 && none.peak == none.before);
    ctx_release(&c);
    free(n);
}

/* A saving that is small beside the peak is not worth nodes that run twice. */
TEST(a_small_saving_is_left) {
    network *n = make_network();
    recompute_choice made;
    ctx c;

    ctx_init(&c);
    for (int t = 0; t < n->p.n_forward; t++)
        if (n->steps[t].kind != 1 || t > 0) n->steps[t].cost = -1;
    n->bytes[n->steps[0].out[0]] = 10;
    CHECK_OK(&c, recompute_cheaply(&c, &n->p, 100, &made));
    CHECK(made.count == 0 && made.cost == 0 && made.peak == made.before);
    ctx_release(&c);
    free(n);
}

TEST(what_must_not_run_twice_does_not) {
    network *n = make_network();
    recompute_choice made;
    ctx c;

    ctx_init(&c);
    for (int t = 0; t < n->p.n_forward; t++)
        if (t % STEPS_OF_A_LAYER == 1) n->steps[t].cost = -1;
    CHECK_OK(&c, recompute_to(&c, &n->p, NULL, 0, 0, &made));
    for (int v = 1; v < n->p.n_values; v++) CHECK(!made.again[v] || n->maker[v] % STEPS_OF_A_LAYER != 1);
    CHECK(made.count > 0);
    ctx_release(&c);
    free(n);
}

/* A wide value from a narrow one that nothing else needs, from what must not run twice. */
static void add_drawn(network *n, int kept_from) {
    const int v = n->p.n_values;
    add(n, kept_from, -1, -1, v, -1, 40, 8); /* what is drawn */
    add(n, v, -1, -1, v + 1, 3, 400, 9);     /* made wide */
    add(n, v + 1, -1, -1, v + 2, 5, 1, 10);  /* a result */
    n->p.n_forward = n->p.n_steps;
    add(n, v + 1, v + 2, -1, v + 3, 10, 100, 11); /* backward reads the wide one */
    n->held[v + 3] = true;
}

TEST(a_smaller_value_stands_in_for_a_larger) {
    network *n = calloc(1, sizeof *n);
    recompute_option *options;
    recompute_choice made;
    int count;
    ctx c;

    ctx_init(&c);
    n->p = (recompute_problem){.steps = n->steps, .bytes = n->bytes, .maker = n->maker, .held = n->held, .n_values = 1};
    n->maker[0] = -1;
    n->held[0] = true;
    add_drawn(n, 0);
    CHECK_OK(&c, recompute_options(&c, &n->p, &options, &count));
    CHECK(count == 2); /* the result, which takes one byte, has no smaller one before it that helps */
    CHECK(options[0].step == 1 && options[0].stash == 1 && options[0].n_chain == 1 && options[0].bytes == 400 - 40);
    CHECK(options[1].step == 2 && options[1].stash == -1);
    const recompute_option *taken[] = {&options[0]};
    CHECK_OK(&c, recompute_to(&c, &n->p, taken, 1, INT64_MAX, &made));
    CHECK(made.again[2] && made.kept[1] && made.cost == 3 && made.count == 1);
    n->bytes[1] = 201; /* more than half */
    CHECK_OK(&c, recompute_options(&c, &n->p, &options, &count));
    CHECK(count == 1);
    ctx_release(&c);
    free(n);
}

TEST(layers_keep_what_one_gives_to_the_next) {
    network *n = make_network();
    recompute_choice made;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, recompute_layers(&c, &n->p, 0, &made));
    for (int v = 1; v <= LAYERS * STEPS_OF_A_LAYER; v++) {
        const bool inside = v % STEPS_OF_A_LAYER != 0, last = v > (LAYERS - 1) * STEPS_OF_A_LAYER;
        CHECK(made.again[v] == (inside && !last && made.kept[v]));
    }
    CHECK(made.peak < made.before / 2);
    CHECK_OK(&c, recompute_layers(&c, &n->p, 2, &made)); /* the first two */
    for (int v = 1; v <= LAYERS * STEPS_OF_A_LAYER; v++)
        CHECK(made.again[v] == (v % STEPS_OF_A_LAYER != 0 && v < 2 * STEPS_OF_A_LAYER && made.kept[v]));
    n->steps[2].kind = 77; /* the first is like no other */
    CHECK_OK(&c, recompute_layers(&c, &n->p, 0, &made));
    CHECK(!made.again[3] && made.again[STEPS_OF_A_LAYER + 3]);
    for (int t = 0; t < n->p.n_forward; t++) n->steps[t].kind = 100 + (uint64_t)t;
    CHECK_OK(&c, recompute_layers(&c, &n->p, 0, &made));
    CHECK(made.count == 0);
    ctx_release(&c);
    free(n);
}

TEST(the_last_layer_runs_again_where_it_waits_for_a_large_loss) {
    const int loss = LAYERS * STEPS_OF_A_LAYER, end = loss - STEPS_OF_A_LAYER, first = end - STEPS_OF_A_LAYER + 1;
    network *n = make_network();
    recompute_choice made;
    ctx c;

    ctx_init(&c);
    n->steps[loss - 1].kind = 77;    /* is of no layer, so the last one ends at `end` */
    n->in[n->p.n_forward][0] = loss; /* backward begins with it, while the last layer's values wait */
    n->bytes[loss] = 5000;
    CHECK_OK(&c, recompute_layers(&c, &n->p, 0, &made));
    for (int v = first; v < end; v++) CHECK(made.again[v] == made.kept[v]);
    CHECK(made.again[end - 1] && made.peak < 5000 + made.before / 4);
    ctx_release(&c);
    free(n);
}

TEST(checkpoints_keep_what_goes_into_them) {
    network *n = make_network();
    recompute_choice made;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, recompute_checkpoints(&c, &n->p, &made));
    CHECK(made.count == 0 && made.peak == made.before);
    for (int t = 0; t < n->p.n_forward; t++) n->steps[t].checkpoint = 1 + (uint64_t)(t / STEPS_OF_A_LAYER);
    n->steps[2].cost = -1; /* must not run twice */
    CHECK_OK(&c, recompute_checkpoints(&c, &n->p, &made));
    for (int v = 1; v <= LAYERS * STEPS_OF_A_LAYER; v++) {
        const bool inside = v % STEPS_OF_A_LAYER != 0, last = v > (LAYERS - 1) * STEPS_OF_A_LAYER;
        CHECK(made.again[v] == (inside && !last && made.kept[v] && v != 2 && v != 3));
    }
    CHECK(made.peak < made.before / 2);
    n->steps[2].cost = 1;
    for (int t = 0; t < n->p.n_forward; t++) n->steps[t].checkpoint = t >= STEPS_OF_A_LAYER; /* one of many layers */
    CHECK_OK(&c, recompute_checkpoints(&c, &n->p, &made));
    CHECK(made.count == 0); /* all of it is needed when backward begins */
    ctx_release(&c);
    free(n);
}

TEST(each_allocation_of_the_choice_may_fail) {
    network *n = make_network();
    recompute_choice made;
    status s = E_NOMEM;
    ctx c;

    for (int64_t allowed = 0; s == E_NOMEM; allowed++) {
        ctx_init(&c);
        c.mem.fail_after = allowed;
        s = allowed % 2 ? recompute_layers(&c, &n->p, 0, &made) : recompute_to(&c, &n->p, NULL, 0, 0, &made);
        if (s == OK) s = recompute_checkpoints(&c, &n->p, &made);
        ctx_release(&c);
    }
    CHECK(s == OK);
    free(n);
}

/* --- nodes ---------------------------------------------------------------------------------------------------------- */

TEST(a_node_of_forward_stands_in_backward_too) {
    enum { COUNT = 6 };
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 64, 64), *y[COUNT], *dy;
    recompute_result r;

    for (int i = 0; i < COUNT; i++) y[i] = NODE(g, i % 2 ? "Exp" : "Sigmoid", i ? y[i - 1] : x);
    make_output(g, NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), y[COUNT - 1]));
    must(&c, graph_add_input(g, NULL, F32, &x->shape, &dy));
    g->in_backward = true;
    for (int i = COUNT - 1; i >= 0; i--) dy = NODE(g, "Mul", dy, y[i]);
    g->in_backward = false;
    make_gradient(g, 0, dy);
    must(&c, recompute(g, &(recompute_request){.goal = RECOMPUTE_TO}, &r));
    CHECK(r.count > 0 && r.after < r.before && r.cost > 0 && r.cost < r.total);
    CHECK(count_nodes(g, NULL) > 2 * COUNT + 1);
    must(&c, graph_verify(g));
    for (const node *n = g->first; n; n = n->next) CHECK(!n->again || n->backward);
    ctx_release(&c);
}

/* `count` steps over values of `elements` numbers, and backward, which reads them; what is made again unasked. */
static recompute_result of_a_loop(int count, int elements) {
    recompute_result r;
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, elements), **y, *dy;

    must(&c, NEW(&c, y, count));
    for (int i = 0; i < count; i++) y[i] = NODE(g, i % 2 ? "Exp" : "Sigmoid", i ? y[i - 1] : x);
    make_output(g, NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), y[count - 1]));
    must(&c, graph_add_input(g, NULL, F32, &x->shape, &dy));
    g->in_backward = true;
    for (int i = count - 1; i >= 0; i--) dy = NODE(g, "Mul", dy, y[i]);
    g->in_backward = false;
    make_gradient(g, 0, dy);
    must(&c, recompute(g, &(recompute_request){.goal = RECOMPUTE_CHEAP}, &r));
    ctx_release(&c);
    return r;
}

TEST(long_loops_over_short_values_are_not_searched) {
    enum { LONG = 1500, SHORT = 100, FEW = 64, MANY = 8192 };

    CHECK(of_a_loop(LONG, FEW).before == 0);
    CHECK(of_a_loop(SHORT, FEW).before > 0);
    CHECK(of_a_loop(LONG, MANY).before > 0);
}
