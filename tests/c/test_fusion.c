/* test_fusion.c -- tests the pass pointwise_fusion as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

#define PASS "pointwise_fusion"
/* The parameters of steps that have none. */
#define NONE "0, 0, 0, 0"

TEST(a_chain_becomes_one_node) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *scale = INPUT(g, "scale", F32, 3);

    make_output(g, NODE(g, "Tanh", NODE(g, "Add", NODE(g, "Mul", x, scale), number(g, F32, 2))));
    check_rewrite(g, PASS,
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 scale float32[3] grad\n"
                  "%2 = Fused(%0 x, %1 scale, 2, steps=\"Mul Add Tanh\", operands=[0, 1, 3, 2, 4], types=[1, 1, 1], "
                  "params=[" NONE ", " NONE ", " NONE "], results=[2]) float32[2, 3]\n"
                  "output %2\n");
    ctx_release(&c);
}

TEST(what_others_need_is_a_result_too) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *e = NODE(g, "Exp", x);

    make_output(g, e);
    make_output(g, NODE(g, "Softmax", NODE(g, "Add", e, x)));
    check_rewrite(g, PASS,
                  "input %0 x float32[2, 3] grad\n"
                  "%1, %2 = Fused(%0 x, steps=\"Exp Add\", operands=[0, 1, 0], types=[1, 1], params=[" NONE ", " NONE
                  "], results=[0, 1]) float32[2, 3], float32[2, 3]\n"
                  "%3 = Softmax(%2) float32[2, 3]\n"
                  "output %1\n"
                  "output %3\n");
    ctx_release(&c);
}

/* Exp and Add have a Softmax between them: they cannot run at once. Exp and Neg can, though the Softmax comes first. */
TEST(nothing_stands_between_members) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *e = NODE(g, "Exp", x), *s = NODE(g, "Softmax", e);

    make_output(g, NODE(g, "Add", s, e));
    make_output(g, NODE(g, "Neg", e));
    check_rewrite(g, PASS,
                  "input %0 x float32[2, 3] grad\n"
                  "%1, %2 = Fused(%0 x, steps=\"Exp Neg\", operands=[0, 1], types=[1, 1], params=[" NONE ", " NONE
                  "], results=[0, 1]) float32[2, 3], float32[2, 3]\n"
                  "%3 = Softmax(%1) float32[2, 3]\n"
                  "%4 = Add(%3, %1) float32[2, 3]\n"
                  "output %4\n"
                  "output %2\n");
    ctx_release(&c);
}

/* The mean of squares: all axes are folded, and nothing else is written. */
TEST(a_reduction_ends_a_chain) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 8, 64), *y = INPUT(g, "y", F32, 64), *d = NODE(g, "Sub", x, y);

    make_output(g, NODE(g, "ReduceMean", NODE(g, "Mul", d, d)));
    check_rewrite(g, PASS,
                  "input %0 x float32[8, 64] grad\n"
                  "input %1 y float32[64] grad\n"
                  "%2 = FusedReduce(%0 x, %1 y, steps=\"Sub Mul\", operands=[0, 1, 2, 2], types=[1, 1], params=[" NONE
                  ", " NONE "], results=[], folds=\"ReduceMean\", folded=[1], axes=[0, 1]) float32[1, 1]\n"
                  "output %2\n");
    ctx_release(&c);
}

/* A Softmax needs the product as it is: it stays a result beside its sum. Sums along other axes are no part of it. */
TEST(what_is_folded_may_be_a_result) {
    static const int64_t rows[] = {1}, columns[] = {0};
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 8, 64), *y = INPUT(g, "y", F32, 8, 64), *p = NODE(g, "Mul", x, y), *sum, *other;

    CHECK_OK(&c, emit_reduce(g, "ReduceSum", p, 1, rows, false, &sum));
    CHECK_OK(&c, emit_reduce(g, "ReduceSum", p, 1, columns, false, &other));
    make_output(g, sum);
    make_output(g, other);
    make_output(g, NODE(g, "Softmax", p));
    check_rewrite(g, PASS,
                  "input %0 x float32[8, 64] grad\n"
                  "input %1 y float32[8, 64] grad\n"
                  "%2, %3 = FusedReduce(%0 x, %1 y, steps=\"Mul\", operands=[0, 1], types=[1], params=[" NONE
                  "], results=[0], folds=\"ReduceSum\", folded=[0], axes=[0]) float32[8, 64], float32[1, 64]\n"
                  "%4 = Reshape(%3, [64], allowzero=1) float32[64]\n"
                  "%5 = ReduceSum(%2, [1], keepdims=0) float32[8]\n"
                  "%6 = Softmax(%2) float32[8, 64]\n"
                  "output %5\n"
                  "output %4\n"
                  "output %6\n");
    ctx_release(&c);
}

/* Sums and means of whole pieces, along axes that are neighbours, end a chain on a GPU. */
TEST(a_gpu_folds_whole_pieces) {
    static const struct {
        const char *op;
        int64_t columns, axes[2];
        int n_axes;
        bool folds;
    } cases[] = {{"ReduceSum", 24, {0}, 1, true},     {"ReduceMean", 24, {2}, 1, true},
                 {"ReduceSum", 24, {1, 2}, 2, true},  {"ReduceMax", 24, {0}, 1, false},
                 {"ReduceSum", 24, {0, 2}, 2, false}, {"ReduceSum", 20, {0}, 1, true},
                 {"ReduceSum", 20, {2}, 1, false}};

    for (size_t i = 0; i < sizeof cases / sizeof *cases; i++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = INPUT(g, "x", F32, 3, 6, cases[i].columns), *total;
        int fired[MAX_PASSES] = {0};

        g->cuda = true;
        CHECK_OK(&c, emit_reduce(g, cases[i].op, NODE(g, "Exp", NODE(g, "Neg", x)), cases[i].n_axes, cases[i].axes,
                                 true, &total));
        make_output(g, total);
        CHECK_OK(&c, passes_run(g, LAST, ~pass_bit(PASS), fired));
        CHECK(strcmp(g->outputs[0]->def->op->name, cases[i].folds ? "FusedReduce" : cases[i].op) == 0);
        ctx_release(&c);
    }
}

/* Two operands that only together have the shape of what is folded; a maximum of integers; rows between others. */
TEST(reductions_that_stay) {
    static const int64_t middle[] = {0, 2};
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 8, 1), *y = INPUT(g, "y", F32, 64), *i = INPUT(g, "i", I32, 8, 64), *sum;
    value *z = INPUT(g, "z", F32, 64, 4, 64);

    CHECK_OK(&c, emit_reduce(g, "ReduceSum", NODE(g, "Neg", z), 2, middle, false, &sum));
    make_output(g, NODE(g, "ReduceMean", NODE(g, "Mul", x, y)));
    make_output(g, NODE(g, "ReduceMax", NODE(g, "Neg", i)));
    make_output(g, sum);
    check_untouched(g, PASS);
    ctx_release(&c);
}

/* A smaller value that is broadcast later, another shape, a division of integers that may fail, a single node. */
TEST(what_does_not_go_together_stays) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *row = INPUT(g, "row", F32, 3), *i = INPUT(g, "i", I32, 2, 3);

    make_output(g, NODE(g, "Mul", x, NODE(g, "Exp", row)));
    make_output(g, NODE(g, "Neg", NODE(g, "Div", i, INPUT(g, "j", I32, 2, 3))));
    make_output(g, NODE(g, "Sin", NODE(g, "Softmax", x)));
    check_untouched(g, PASS);
    ctx_release(&c);
}
