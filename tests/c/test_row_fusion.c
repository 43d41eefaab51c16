/* test_row_fusion.c -- tests the pass row_fusion as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

#include <omp.h>

#define PASS "row_fusion"
/* The parameters of a step that has none. */
#define NONE "0, 0, 0, 0"

static const int64_t last_axis[] = {1};

/* Each thread has memory of its own, which is part of the plan. */
static graph *graph_for_threads(ctx *c) {
    ctx_init(c);
    omp_set_num_threads(3);
    return new_graph(c);
}

static value *fold(ctx *c, graph *g, const char *op, value *x, bool keep) {
    value *total = NULL;
    CHECK_OK(c, emit_reduce(g, op, x, 1, last_axis, keep, &total));
    return total;
}

/* What is between a total and its readers comes along, and only the end of it is in memory. */
TEST(readers_of_a_total_follow_it) {
    ctx c;
    graph *g = graph_for_threads(&c);
    value *x = INPUT(g, "x", F32, 256, 300);

    make_output(g, NODE(g, "Div", x, NODE(g, "Exp", fold(&c, g, "ReduceMean", x, true))));
    check_rewrite(
        g, PASS,
        "input %0 x float32[256, 300] grad\n"
        "%1 = FusedRows(%0 x, steps=\"Exp Div\", operands=[0, 0, 1], types=[1, 1], params=[" NONE ", " NONE
        "], results=[0, 0], folds=\"ReduceMean\", folded=[-1], reads=[0, 1, 0, 2], "
        "stages=[1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 2, 1, 2, 1, 0, 0], gives=[3], shape=[256, 300], kept=1, parts=3) "
        "float32[256, 300]\n"
        "output %1\n");
    ctx_release(&c);
}

/* A total without its axis that gets it back; another node wants it, too, and comes after. */
TEST(totals_may_be_reshaped) {
    static const int64_t column[] = {256, 1};
    ctx c;
    graph *g = graph_for_threads(&c);
    value *x = INPUT(g, "x", F32, 256, 300), *s = fold(&c, g, "ReduceSum", x, false), *kept = NULL;

    CHECK_OK(&c, emit_reshape(g, s, &SHAPE(column[0], column[1]), &kept));
    make_output(g, NODE(g, "Softmax", s));
    make_output(g, NODE(g, "Sub", x, kept));
    check_rewrite(g, PASS,
                  "input %0 x float32[256, 300] grad\n"
                  "%1, %2 = FusedRows(%0 x, steps=\"Sub\", operands=[0, 1], types=[1], params=[" NONE
                  "], results=[0], folds=\"ReduceSum\", folded=[-1], reads=[0, 0, 1], "
                  "stages=[1, 0, 0, 0, 1, 0, 2, 1, 2, 1, 0, 0], gives=[1, 2], shape=[256, 300], kept=1, parts=3) "
                  "float32[256, 1], float32[256, 300]\n"
                  "%3 = Reshape(%1, [256], allowzero=1) float32[256]\n"
                  "%4 = Softmax(%3) float32[256]\n"
                  "output %4\n"
                  "output %2\n");
    ctx_release(&c);
}

/* As the gradient of a mean: the total is scaled, and repeated for each element before a node reads it. */
TEST(totals_may_be_expanded) {
    static const int64_t whole[] = {256, 300};
    ctx c;
    graph *g = graph_for_threads(&c);
    value *x = INPUT(g, "x", F32, 256, 300), *s = fold(&c, g, "ReduceSum", x, true), *dims = NULL;

    CHECK_OK(&c, graph_ints(g, 2, whole, &dims));
    make_output(g, NODE(g, "Add", x, NODE(g, "Expand", NODE(g, "Neg", s), dims)));
    check_rewrite(g, PASS,
                  "input %0 x float32[256, 300] grad\n"
                  "%1 = FusedRows(%0 x, steps=\"Neg Add\", operands=[0, 0, 1], types=[1, 1], params=[" NONE ", " NONE
                  "], results=[0, 0], folds=\"ReduceSum\", folded=[-1], reads=[0, 1, 0, 2], "
                  "stages=[1, 0, 0, 0, 1, 0, 1, 1, 1, 1, 0, 1, 2, 1, 2, 1, 0, 0], gives=[3], shape=[256, 300], kept=1, "
                  "parts=3) float32[256, 300]\n"
                  "output %1\n");
    ctx_release(&c);
}

/* Totals that no node reads over elements, that are read along the other axis, behind a Softmax; few rows; columns. */
TEST(rows_that_stay) {
    static const int64_t first_axis[] = {0};
    ctx c;
    graph *g = graph_for_threads(&c);
    value *x = INPUT(g, "x", F32, 300, 300), *few = INPUT(g, "few", F32, 8, 30000), *columns = NULL;

    make_output(g, NODE(g, "Exp", fold(&c, g, "ReduceMean", x, true)));
    make_output(g, NODE(g, "Mul", x, fold(&c, g, "ReduceMax", x, false)));
    make_output(g, NODE(g, "Mul", NODE(g, "Softmax", x), NODE(g, "Softmax", fold(&c, g, "ReduceSum", x, true))));
    make_output(g, NODE(g, "Sub", few, fold(&c, g, "ReduceSum", few, true)));
    CHECK_OK(&c, emit_reduce(g, "ReduceSum", x, 1, first_axis, true, &columns));
    make_output(g, NODE(g, "Div", x, columns));
    check_untouched(g, PASS);
    ctx_release(&c);
}
