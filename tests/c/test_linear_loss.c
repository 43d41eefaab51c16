/* test_linear_loss.c -- tests the passes linear_loss and loss_gradient as text before and after. */
#include "build.h"
#include "gemm/gemm.h"
#include "grad/grad.h"
#include "ops/losses/linear_loss.h"
#include "passes/pipeline.h"
#include "test.h"

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
                  "%5, %6, %7, %8, %9 = LinearCrossEntropy(%4, %1 w, %3 labels, %2 bias, reduction=\"mean\", "
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
                  "%3, %4, %5, %6, %7 = LinearCrossEntropy(%0 h, %1 w, %2 labels, reduction=\"sum\", "
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

/* Backward of losses that the script weighs and adds up: from each row's factor, known in forward. */
TEST(weighed_losses_have_their_gradient_in_forward) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *logits = linear_logits(g, 1024), *mask = INPUT(g, "mask", F32, 1024);
    value *each = loss_of(g, logits, INPUT(g, "labels", I64, 1024), "none");
    int fired[MAX_PASSES] = {0};

    mask->needs_grad = false;
    make_output(g, NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), NODE(g, "Mul", each, mask)));
    CHECK_OK(&c, passes_run(g, BEFORE_GRADIENT, ~pass_bit("linear_loss"), fired));
    CHECK_TEXT(g, "input %0 h float32[2, 512, 4] grad\n"
                  "input %1 w float32[1024, 4] grad\n"
                  "input %2 bias float32[1024] grad\n"
                  "input %3 mask float32[1024]\n"
                  "input %4 labels int64[1024]\n"
                  "%5 = Reshape(%0 h, [1024, 4], allowzero=1) float32[1024, 4]\n"
                  "%6, %7, %8, %9, %10 = LinearCrossEntropy(%5, %1 w, %4 labels, %2 bias, reduction=\"none\", "
                  "ignore_index=-100) float32[1024], float32[1024, 4], float32[1024, 4], float32[1024], float64[1024]\n"
                  "%11 = Mul(%6, %3 mask) float32[1024]\n"
                  "%12 = ReduceSum(%11, keepdims=0) float32[]\n"
                  "output %12\n");
    CHECK_OK(&c, grad_build(g, (bool[]){true}));
    graph_remove_dead(g);
    CHECK(count_nodes(g, "LinearCrossEntropyGrad") == 1);
    CHECK_OK(&c, passes_run(g, AFTER_GRADIENT, ~pass_bit("loss_gradient"), fired));
    CHECK_OK(&c, graph_verify(g));
    CHECK_TEXT(
        g, "input %0 h float32[2, 512, 4] grad\n"
           "input %1 w float32[1024, 4] grad\n"
           "input %2 bias float32[1024] grad\n"
           "input %3 mask float32[1024]\n"
           "input %4 labels int64[1024]\n"
           "input %5 float32[]\n"
           "%6 = Reshape(%0 h, [1024, 4], allowzero=1) float32[1024, 4]\n"
           "%7, %8, %9, %10, %11 = LinearCrossEntropy(%6, %1 w, %4 labels, %2 bias, -, %3 mask, reduction=\"none\", "
           "ignore_index=-100) float32[1024], float32[1024, 4], float32[1024, 4], float32[1024], float64[1024]\n"
           "%12 = Mul(%7, %3 mask) float32[1024]\n"
           "%13 = ReduceSum(%12, keepdims=0) float32[]\n"
           "backward\n"
           "%14 = Mul(%5, %8) float32[1024, 4]\n"
           "%15 = Mul(%5, %9) float32[1024, 4]\n"
           "%16 = Mul(%5, %10) float32[1024]\n"
           "%17 = Reshape(%14, [2, 512, 4], allowzero=1) float32[2, 512, 4]\n"
           "output %13\n"
           "grad %0 h <- %17\n"
           "grad %1 w <- %15\n"
           "grad %2 bias <- %16\n");
    ctx_release(&c);
}

/* Of a GPU's loss: all rows, parts of equal lengths, or so few rows that 1.5 GiB hold their logits. */
TEST(rows_of_logits_at_a_time) {
    CHECK(linear_loss_chunk(BF16, 0, 50257) == 0);
    CHECK(linear_loss_chunk(BF16, 4096, 50257) == 4096);
    CHECK(linear_loss_chunk(BF16, 4097, 50257) == 2176);
    CHECK(linear_loss_chunk(BF16, 8192, 50257) == 4096);
    CHECK(linear_loss_chunk(F16, 12289, 50257) == 3200);
    CHECK(linear_loss_chunk(BF16, 1 << 20, 262144) == 1024);
    CHECK(linear_loss_chunk(F32, 1 << 20, 262144) == 1536);
    CHECK(linear_loss_chunk(F64, 1 << 20, 1 << 30) == 128);
    CHECK(linear_loss_chunk(BF16, 100, 0) == 100);
    CHECK(linear_loss_line(50257) == 50264 && linear_loss_line(8) == 8);
}
