/* test_score_mask.c -- tests the pass score_mask, as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

#include <math.h>

#define LOWEST (-3.4028234663852886e38)
#define BEFORE                                                                                                         \
    "input %0 q float32[2, 3] grad\n"                                                                                  \
    "input %1 k float32[3, 2] grad\n"
#define SCORES "%2 = MatMul(%0 q, %1 k) float32[2, 2]\n"

static value *scores_of(graph *g) { return NODE(g, "MatMul", INPUT(g, "q", F32, 2, 3), INPUT(g, "k", F32, 3, 2)); }
static value *softmax(graph *g, value *x) { return NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", -1)), x); }

/* bool [2, 2] */
static value *allowed(graph *g, bool a, bool b, bool c, bool d) {
    const bool x[] = {a, b, c, d};
    value *v;
    must(g->c, graph_add_constant(g, BOOL, &SHAPE(2, 2), x, &v));
    return v;
}

static value *added(graph *g, float a, float b, float c, float d) {
    const float x[] = {a, b, c, d};
    value *v;
    must(g->c, graph_add_constant(g, F32, &SHAPE(2, 2), x, &v));
    return v;
}

static void expect(graph *g, value *scores, const char *after) {
    make_output(g, softmax(g, scores));
    check_rewrite(g, "score_mask", after);
}

TEST(scores_that_are_replaced_are_hidden) {
    const double lowest[] = {LOWEST, -INFINITY};
    for (int i = 0; i < 2; i++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = scores_of(g);
        expect(g, NODE(g, "Where", allowed(g, 1, 0, 1, 1), x, number(g, F32, lowest[i])),
               BEFORE SCORES
               "%3 = MaskedSoftmax(%2, bool[2, 2] of [true, false, true, true]) float32[2, 2]\noutput %3\n");
        ctx_release(&c);
    }
}

TEST(masks_that_are_added_are_one) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = NODE(g, "Add", scores_of(g), INPUT(g, "bias", F32, 2));
    value *first = NODE(g, "Where", allowed(g, 0, 0, 0, 1), number(g, F32, LOWEST), number(g, F32, 0));
    value *all = NODE(g, "Add", NODE(g, "Add", first, added(g, 0, -INFINITY, 0, 0)), x);
    expect(g, all,
           BEFORE "input %2 bias float32[2] grad\n"
                  "%3 = MatMul(%0 q, %1 k) float32[2, 2]\n"
                  "%4 = Add(%3, %2 bias) float32[2, 2]\n"
                  "%5 = MaskedSoftmax(%4, bool[2, 2] of [true, false, true, false]) float32[2, 2]\noutput %5\n");
    ctx_release(&c);
}

TEST(where_a_query_sees_nothing_scores_stay) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = scores_of(g);
    make_output(g, softmax(g, NODE(g, "Where", allowed(g, 1, 0, 0, 0), x, number(g, F32, LOWEST))));
    check_untouched(g, "score_mask");
    ctx_release(&c);
}

TEST(what_may_hide_more_or_too_little_stays) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = scores_of(g), *mask = allowed(g, 1, 0, 1, 1);
    make_output(g, softmax(g, NODE(g, "Where", mask, x, number(g, F32, -1e9))));
    make_output(g, softmax(g, NODE(g, "Where", mask, NODE(g, "Log", x), number(g, F32, LOWEST))));
    make_output(g, softmax(g, NODE(g, "Where", mask, added(g, 1, 2, -1e20f, 3), number(g, F32, LOWEST))));
    check_untouched(g, "score_mask");
    ctx_release(&c);
}

TEST(a_mask_that_is_data_is_asked_for) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = INPUT(g, "q", F32, 2, 3, 64, 8), *k = INPUT(g, "k", F32, 2, 3, 8, 64);
    value *mask = INPUT(g, "mask", BOOL, 2, 1, 1, 64);
    const int64_t sizes[] = {0, 1};

    make_output(g, softmax(g, NODE(g, "Where", mask, NODE(g, "MatMul", q, k), number(g, F32, LOWEST))));
    for (int i = 0; i < 2; i++) {
        g->sizes = sizes + 1 - i;
        g->n_sizes = 1;
        g->n_sized = 0;
        int fired[MAX_PASSES] = {0};
        must(&c, passes_run(g, BEFORE_GRADIENT, ~pass_bit("score_mask"), fired));
        CHECK(count_nodes(g, "MaskedSoftmax") == i);
        CHECK(count_nodes(g, "Softmax") == 1 - i);
    }
    ctx_release(&c);
}
