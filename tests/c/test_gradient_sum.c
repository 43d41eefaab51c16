/* test_gradient_sum.c -- gradients that meet in one value: their graphs before and after the pass, as text. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

TEST(a_product_adds_to_the_gradient_that_is_there) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 6), *dy = INPUT(g, "dy", F32, 4, 8), *q = INPUT(g, "q", F32, 8, 6);
    value *k = INPUT(g, "k", F32, 8, 6), *first, *second;

    make_output(g, x);
    g->in_backward = true;
    first = NODE(g, "MatMul", dy, q);
    second = NODE(g, "MatMul", dy, k);
    make_gradient(g, 0, NODE(g, "Softmax", NODE(g, "Add", second, first)));
    g->in_backward = false;
    check_rewrite(g, "gradient_sum",
                  "input %0 x float32[4, 6] grad\n"
                  "input %1 dy float32[4, 8] grad\n"
                  "input %2 q float32[8, 6] grad\n"
                  "input %3 k float32[8, 6] grad\n"
                  "backward\n"
                  "%4 = MatMul(%1 dy, %2 q) float32[4, 6]\n"
                  "%5 = MatMulAdd(%4, %1 dy, %3 k, alpha=1) float32[4, 6]\n"
                  "%6 = Softmax(%5) float32[4, 6]\n"
                  "output %0 x\n"
                  "grad %0 x <- %6\n");
    ctx_release(&c);
}

TEST(rows_are_added_to_the_gradient_that_is_there) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 40, 6), *dy = INPUT(g, "dy", F32, 40, 8), *w = INPUT(g, "w", F32, 8, 6);
    value *rows = INPUT(g, "rows", F32, 5, 6), *index = INPUT(g, "index", I64, 5), *table, *head;

    make_output(g, x);
    g->in_backward = true;
    head = NODE(g, "MatMul", dy, w);
    CHECK_OK(&c, emit_with(g, &table, "GatherGrad",
                           NODE_ATTRS(INT("axis", 0), INTS("shape", 2, ((int64_t[]){40, 6})), INT("padding_idx", 3)),
                           rows, index));
    make_gradient(g, 0, NODE(g, "Softmax", NODE(g, "Add", table, head)));
    g->in_backward = false;
    check_rewrite(g, "gradient_sum",
                  "input %0 x float32[40, 6] grad\n"
                  "input %1 dy float32[40, 8] grad\n"
                  "input %2 w float32[8, 6] grad\n"
                  "input %3 rows float32[5, 6] grad\n"
                  "input %4 index int64[5]\n"
                  "backward\n"
                  "%5 = MatMul(%1 dy, %2 w) float32[40, 6]\n"
                  "%6 = GatherGradAdd(%5, %3 rows, %4 index, axis=0, padding_idx=3) float32[40, 6]\n"
                  "%7 = Softmax(%6) float32[40, 6]\n"
                  "output %0 x\n"
                  "grad %0 x <- %7\n");
    ctx_release(&c);
}

/* Of 16 bits, to what others read as well; a product of 16 bits that stays wide. */
TEST(a_product_adds_to_any_gradient_on_a_gpu) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 4, 6), *y = INPUT(g, "y", F32, 4, 6), *dy = INPUT(g, "dy", BF16, 4, 8);
    value *q = INPUT(g, "q", BF16, 8, 6), *sum, *wide, *before;

    g->cuda = true;
    make_output(g, x);
    make_output(g, y);
    g->in_backward = true;
    before = NODE(g, "MatMul", dy, q);
    sum = NODE(g, "Add", NODE(g, "MatMul", NODE(g, "Neg", dy), q), before);
    make_gradient(g, 0, NODE(g, "Softmax", sum));
    before = NODE(g, "Softmax", cast(g, before, F32));
    wide = NODE_WITH(g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", 2), INT("wide", 1)), NODE(g, "Abs", dy), q);
    make_gradient(g, 1, NODE(g, "Add", before, wide));
    g->in_backward = false;
    check_rewrite(g, "gradient_sum",
                  "input %0 x bfloat16[4, 6] grad\n"
                  "input %1 y float32[4, 6] grad\n"
                  "input %2 dy bfloat16[4, 8] grad\n"
                  "input %3 q bfloat16[8, 6] grad\n"
                  "backward\n"
                  "%4 = MatMul(%2 dy, %3 q) bfloat16[4, 6]\n"
                  "%5 = Neg(%2 dy) bfloat16[4, 8]\n"
                  "%6 = MatMulAdd(%4, %5, %3 q, alpha=1) bfloat16[4, 6]\n"
                  "%7 = Softmax(%6) bfloat16[4, 6]\n"
                  "%8 = Cast(%4, to=1) float32[4, 6]\n"
                  "%9 = Softmax(%8) float32[4, 6]\n"
                  "%10 = Abs(%2 dy) bfloat16[4, 8]\n"
                  "%11 = MatMulAdd(%9, %10, %3 q, alpha=2) float32[4, 6]\n"
                  "output %0 x\n"
                  "output %1 y\n"
                  "grad %0 x <- %7\n"
                  "grad %1 y <- %11\n");
    ctx_release(&c);
}

/* Not for a chain, but for the gradient of a norm, which reads 16 bits as they are. */
TEST(a_product_adds_to_the_gradient_that_a_norm_gets) {
    for (int norm = 0; norm < 2; norm++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = INPUT(g, "x", F32, 4, 6), *dy = INPUT(g, "dy", BF16, 4, 8), *q = INPUT(g, "q", BF16, 8, 6);
        value *scale = INPUT(g, "scale", F32, 6), *inverse = INPUT(g, "inverse", F32, 4, 1), *sum, *wide;

        g->cuda = true;
        make_output(g, x);
        g->in_backward = true;
        sum = NODE(g, "Add", NODE(g, "MatMul", NODE(g, "Neg", dy), q), NODE(g, "MatMul", dy, q));
        wide = cast(g, sum, F32);
        make_gradient(g, 0, norm ? NODE(g, "RMSNormGrad", wide, x, scale, inverse) : NODE(g, "Exp", wide));
        g->in_backward = false;
        if (!norm) check_untouched(g, "gradient_sum");
        else {
            int fired[MAX_PASSES] = {0};
            CHECK_OK(&c, passes_run(g, AFTER_GRADIENT, ~pass_bit("gradient_sum"), fired));
            CHECK(count_nodes(g, "MatMulAdd") == 1 && count_nodes(g, "Add") == 0);
        }
        ctx_release(&c);
    }
}

/* One of 16 bits; with something that comes after the product; with an input; one that a chain reads. */
TEST(sums_of_gradients_that_stay) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 4, 6), *y = INPUT(g, "y", F32, 4, 6), *z = INPUT(g, "z", F32, 4, 6);
    value *u = INPUT(g, "u", F32, 4, 6), *dy = INPUT(g, "dy", F32, 4, 8), *q = INPUT(g, "q", F32, 8, 6);
    value *narrow = INPUT(g, "narrow", BF16, 4, 8), *w = INPUT(g, "w", BF16, 8, 6), *product, *other;

    make_output(g, u);
    g->in_backward = true;
    other = NODE(g, "MatMul", narrow, NODE(g, "Neg", w));
    product = NODE(g, "MatMul", narrow, w);
    make_gradient(g, 0, NODE(g, "Softmax", NODE(g, "Add", product, other)));
    product = NODE(g, "MatMul", dy, NODE(g, "Exp", q));
    other = NODE(g, "LogSoftmax", y);
    make_gradient(g, 1, NODE(g, "Softmax", NODE(g, "Add", product, other)));
    product = NODE(g, "MatMul", dy, NODE(g, "Sin", q));
    make_gradient(g, 2, NODE(g, "Softmax", NODE(g, "Add", product, z)));
    other = NODE(g, "MatMul", dy, NODE(g, "Cos", q));
    product = NODE(g, "MatMul", dy, NODE(g, "Tanh", q));
    make_gradient(g, 3, NODE(g, "Sigmoid", NODE(g, "Add", product, other)));
    g->in_backward = false;
    (void)x;
    check_untouched(g, "gradient_sum");
    ctx_release(&c);
}
