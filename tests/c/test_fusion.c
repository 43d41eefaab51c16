/* test_fusion.c -- the pass pointwise_fusion as text before and after. */
#include "build.h"
#include "exec/gemm.h"
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

/* --- linear_loss ---------------------------------------------------------------------------------------------------- */

static value *loss_of(graph *g, value *logits, value *labels, const char *reduction) {
    return NODE_WITH(g, "CrossEntropy", NODE_ATTRS(STRING("reduction", reduction), INT("ignore_index", -100)), logits,
                     labels);
}

static value *linear_logits(graph *g, int64_t rows) {
    static const int64_t perm[] = {1, 0};
    value *h = INPUT(g, "h", F32, 2, rows / 2, 4), *w = INPUT(g, "w", F32, 1024, 4),
          *bias = INPUT(g, "bias", F32, 1024);
    value *turned = NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), w);
    return NODE(g, "Reshape", NODE(g, "MatMulBias", h, turned, bias), INT_LIST(g, rows, 1024));
}

TEST(logits_that_only_a_loss_sees_are_not_made) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *logits = linear_logits(g, 1024);

    make_output(g, loss_of(g, logits, INPUT(g, "labels", I64, 1024), "mean"));
    check_rewrite(g, "linear_loss",
                  "input %0 h float32[2, 512, 4] grad\n"
                  "input %1 w float32[1024, 4] grad\n"
                  "input %2 bias float32[1024] grad\n"
                  "input %3 labels int64[1024]\n"
                  "%4 = Reshape(%0 h, [1024, 4], allowzero=1) float32[1024, 4]\n"
                  "%5, %6, %7, %8 = LinearCrossEntropy(%4, %1 w, %3 labels, %2 bias, reduction=\"mean\", "
                  "ignore_index=-100) float32[], float32[1024, 4], float32[1024, 4], float32[1024]\n"
                  "output %5\n");
    ctx_release(&c);
}

/* Under autocast: logits of 16 bits are widened, the loss is float32. */
TEST(logits_of_sixteen_bits_are_not_made) {
    static const int64_t perm[] = {1, 0};
    ctx c;
    if (!gemm_rounds(BF16)) return;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *h = INPUT(g, "h", BF16, 1024, 4), *w = INPUT(g, "w", BF16, 1024, 4);
    value *turned = NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), w);
    value *logits = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 1)), NODE(g, "MatMul", h, turned));

    make_output(g, loss_of(g, logits, INPUT(g, "labels", I64, 1024), "sum"));
    check_rewrite(g, "linear_loss",
                  "input %0 h bfloat16[1024, 4] grad\n"
                  "input %1 w bfloat16[1024, 4] grad\n"
                  "input %2 labels int64[1024]\n"
                  "%3, %4, %5, %6 = LinearCrossEntropy(%0 h, %1 w, %2 labels, reduction=\"sum\", "
                  "ignore_index=-100, wide=1) float32[], float32[1024, 4], float32[1024, 4]\n"
                  "output %3\n");
    ctx_release(&c);
}

/* Logits that are given back, a loss for each row, few rows. */
TEST(logits_that_others_see_are_made) {
    for (int why = 0; why < 3; why++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        const int64_t rows = why == 2 ? 512 : 1024;
        value *logits = linear_logits(g, rows);
        make_output(g, loss_of(g, logits, INPUT(g, "labels", I64, rows), why == 1 ? "none" : "mean"));
        if (why == 0) make_output(g, logits);
        check_untouched(g, "linear_loss");
        ctx_release(&c);
    }
}
