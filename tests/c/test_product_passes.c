/* test_product_passes.c -- tests the passes around matrix products and the loss behind the last one, as text before
 * and after. */
#include "build.h"
#include "gemm/gemm.h"
#include "ops/queries.h"
#include "passes/pipeline.h"
#include "test.h"

/* --- matmul_fusion ------------------------------------------------------------------------------------------------ */

#define TWO_MATRICES                                                                                                   \
    "input %0 a float32[2, 3] grad\n"                                                                                  \
    "input %1 b float32[3, 4] grad\n"

TEST(factors_go_into_the_product) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 3), *b = INPUT(g, "b", F32, 3, 4), *half = number(g, F32, 0.5), *product;

    product = NODE(g, "MatMul", NODE(g, "Mul", a, half), NODE(g, "Div", b, number(g, F32, 4)));
    make_output(g, NODE(g, "Div", NODE(g, "Mul", number(g, F32, 3), product), number(g, F32, 2)));
    check_rewrite(g, "matmul_fusion",
                  TWO_MATRICES "%2 = MatMulBias(%0 a, %1 b, alpha=0.1875) float32[2, 4]\n"
                               "output %2\n");
    ctx_release(&c);
}

TEST(a_bias_goes_into_the_product) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 3), *b = INPUT(g, "b", F32, 3, 4), *bias = INPUT(g, "bias", F32, 4);

    make_output(g, NODE(g, "Add", bias, NODE(g, "Mul", NODE(g, "MatMul", a, b), number(g, F32, 0.5))));
    check_rewrite(g, "matmul_fusion",
                  TWO_MATRICES "input %2 bias float32[4] grad\n"
                               "%3 = MatMulBias(%0 a, %1 b, %2 bias, alpha=0.5) float32[2, 4]\n"
                               "output %3\n");
    ctx_release(&c);
}

TEST(a_transposed_operand_is_cast_where_it_lies) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 2, 3), *w = INPUT(g, "w", F32, 4, 3), *turned;
    const int64_t perm[] = {1, 0};

    turned = NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), w);
    make_output(g, NODE(g, "MatMul", a, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[BF16].onnx)), turned)));
    check_rewrite(g, "matmul_fusion",
                  "input %0 a bfloat16[2, 3] grad\n"
                  "input %1 w float32[4, 3] grad\n"
                  "%2 = Cast(%1 w, to=16) bfloat16[4, 3]\n"
                  "%3 = Transpose(%2, perm=[1, 0]) bfloat16[3, 4]\n"
                  "%4 = MatMul(%0 a, %3) bfloat16[2, 4]\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(what_does_not_fit_stays_outside_the_product) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 3), *b = INPUT(g, "b", F32, 3, 4), *row = INPUT(g, "row", F32, 2, 4);
    value *i = INPUT(g, "i", I32, 2, 3), *k = INPUT(g, "k", I32, 3, 4);

    make_output(g, NODE(g, "Add", NODE(g, "MatMul", a, b), row)); /* no bias: a second matrix */
    make_output(g, NODE(g, "Mul", NODE(g, "MatMul", NODE(g, "Neg", a), b), number(g, F32, 0))); /* no alpha */
    make_output(g, NODE(g, "Div", NODE(g, "MatMul", i, k), number(g, I32, 2)));                 /* integer division */
    make_output(g,
                NODE(g, "Div", number(g, F32, 2), NODE(g, "MatMul", a, NODE(g, "Neg", b)))); /* the other way round */
    check_untouched(g, "matmul_fusion");
    ctx_release(&c);
}

/* --- parallel_products -------------------------------------------------------------------------------------------- */

TEST(narrow_products_of_one_value_are_one) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 300, 8), *a = INPUT(g, "a", F32, 8, 2), *b = INPUT(g, "b", F32, 3, 8);
    value *wide = INPUT(g, "wide", F32, 8, 40), *y;
    const int64_t perm[] = {1, 0};

    y = NODE(g, "Softmax", NODE(g, "MatMul", x, a));
    make_output(g, NODE(g, "MatMul", x, wide));
    make_output(g, NODE(g, "MatMul", x, NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), b)));
    make_output(g, y);
    check_rewrite(g, "parallel_products",
                  "input %0 x float32[300, 8] grad\n"
                  "input %1 a float32[8, 2] grad\n"
                  "input %2 b float32[3, 8] grad\n"
                  "input %3 wide float32[8, 40] grad\n"
                  "%4 = Transpose(%2 b, perm=[1, 0]) float32[8, 3]\n"
                  "%5 = Concat(%1 a, %4, axis=1) float32[8, 5]\n"
                  "%6 = MatMulBias(%0 x, %5, alpha=1) float32[300, 5]\n"
                  "%7 = StridedSlice(%6, starts=[0, 0], counts=[300, 2], steps=[1, 1]) float32[300, 2]\n"
                  "%8 = StridedSlice(%6, starts=[0, 2], counts=[300, 3], steps=[1, 1]) float32[300, 3]\n"
                  "%9 = Softmax(%7) float32[300, 2]\n"
                  "%10 = MatMul(%0 x, %3 wide) float32[300, 40]\n"
                  "output %10\n"
                  "output %8\n"
                  "output %9\n");
    ctx_release(&c);
}

static value *linear(graph *g, value *x, value *w, value *bias) {
    const int64_t perm[] = {1, 0};
    return NODE(g, "MatMulBias", x, NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), w), bias);
}

TEST(narrow_linear_layers_are_joined_as_their_weights_lie) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 2, 150, 8), *a = INPUT(g, "a", BF16, 2, 8), *a_bias = INPUT(g, "a_bias", BF16, 2);
    value *b = INPUT(g, "b", BF16, 1, 8), *b_bias = INPUT(g, "b_bias", BF16, 1);

    make_output(g, linear(g, x, a, a_bias));
    make_output(g, linear(g, x, b, b_bias));
    check_rewrite(g, "parallel_products",
                  "input %0 x bfloat16[2, 150, 8] grad\n"
                  "input %1 a bfloat16[2, 8] grad\n"
                  "input %2 a_bias bfloat16[2] grad\n"
                  "input %3 b bfloat16[1, 8] grad\n"
                  "input %4 b_bias bfloat16[1] grad\n"
                  "%5 = Concat(%1 a, %3 b, axis=0) bfloat16[3, 8]\n"
                  "%6 = Transpose(%5, perm=[1, 0]) bfloat16[8, 3]\n"
                  "%7 = Concat(%2 a_bias, %4 b_bias, axis=0) bfloat16[3]\n"
                  "%8 = MatMulBias(%0 x, %6, %7, alpha=1) bfloat16[2, 150, 3]\n"
                  "%9 = StridedSlice(%8, starts=[0, 0, 0], counts=[2, 150, 2], steps=[1, 1, 1]) bfloat16[2, 150, 2]\n"
                  "%10 = StridedSlice(%8, starts=[0, 0, 2], counts=[2, 150, 1], steps=[1, 1, 1]) bfloat16[2, 150, 1]\n"
                  "output %9\n"
                  "output %10\n");
    ctx_release(&c);
}

/* Few rows; wide ones; different factors; a matrix that is made of the product before. */
TEST(products_that_stay_apart) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 300, 300), *few = INPUT(g, "few", F32, 4, 300), *a = INPUT(g, "a", F32, 300, 2);
    value *b = INPUT(g, "b", F32, 300, 2), *wide = INPUT(g, "wide", F32, 300, 40), *half, *y;

    make_output(g, NODE(g, "MatMul", few, a));
    make_output(g, NODE(g, "MatMul", few, b));
    make_output(g, NODE(g, "MatMul", x, wide));
    make_output(g, NODE(g, "MatMul", x, NODE(g, "Neg", wide)));
    y = NODE(g, "MatMul", x, a);
    half = NODE_WITH(g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", 0.5)), x, b);
    make_output(g, half);
    make_output(g, NODE(g, "MatMul", x, NODE(g, "Neg", y)));
    check_untouched(g, "parallel_products");
    ctx_release(&c);
}

/* --- product_cast ------------------------------------------------------------------------------------------------- */

TEST(a_widened_product_keeps_its_sums) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 2, 3), *b = INPUT(g, "b", BF16, 3, 4);

    make_output(g, cast(g, NODE(g, "MatMul", a, b), F32));
    check_rewrite(g, "product_cast",
                  "input %0 a bfloat16[2, 3] grad\n"
                  "input %1 b bfloat16[3, 4] grad\n"
                  "%2 = MatMulBias(%0 a, %1 b, alpha=1, wide=1) float32[2, 4]\n"
                  "output %2\n");
    ctx_release(&c);
}

TEST(products_that_are_seen_or_otherwise_cast_are_rounded) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 2, 3), *b = INPUT(g, "b", BF16, 3, 4), *x = INPUT(g, "x", F64, 2, 3), *seen;

    make_output(g, seen = NODE(g, "MatMul", a, b));
    make_output(g, cast(g, seen, F32));
    make_output(g, cast(g, NODE(g, "MatMul", b, INPUT(g, "d", BF16, 4, 2)), F64));
    make_output(g, cast(g, NODE(g, "MatMul", x, INPUT(g, "y", F64, 3, 2)), F32));
    check_untouched(g, "product_cast");
    ctx_release(&c);
}

/* Of one sequence a weight's gradient is a batch of one product, without its first axis and turned. */
TEST(a_product_that_is_widened_behind_views_keeps_its_sums) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 1, 2, 3), *b = INPUT(g, "b", BF16, 1, 3, 4);
    value *turned = NODE_WITH(g, "Transpose", PERM(0, 2, 1), NODE(g, "MatMul", a, b));

    make_output(g, NODE(g, "Neg", cast(g, NODE(g, "Reshape", turned, INT_LIST(g, 4, 2)), F32)));
    check_rewrite(g, "product_cast",
                  "input %0 a bfloat16[1, 2, 3] grad\n"
                  "input %1 b bfloat16[1, 3, 4] grad\n"
                  "%2 = MatMulBias(%0 a, %1 b, alpha=1, wide=1) float32[1, 2, 4]\n"
                  "%3 = Transpose(%2, perm=[0, 2, 1]) float32[1, 4, 2]\n"
                  "%4 = Reshape(%3, [4, 2], allowzero=1) float32[4, 2]\n"
                  "%5 = Neg(%4) float32[4, 2]\n"
                  "output %5\n");
    ctx_release(&c);
}

/* Given back as it is, it would be copied in float32. */
TEST(a_product_that_is_given_back_turned_is_rounded) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *y = NODE(g, "MatMul", INPUT(g, "a", BF16, 2, 3), INPUT(g, "b", BF16, 3, 4));

    make_output(g, cast(g, NODE_WITH(g, "Transpose", PERM(1, 0), y), F32));
    check_untouched(g, "product_cast");
    ctx_release(&c);
}

/* --- product_epilogue --------------------------------------------------------------------------------------------- */

static value *linear_gelu(graph *g, value *x, int64_t columns) {
    value *w = INPUT(g, "w", F32, 3, columns), *b = INPUT(g, "b", F32, columns);
    return NODE(g, "GeluTanh", NODE(g, "MatMulBias", x, w, b));
}

TEST(gelu_is_the_epilogue_of_a_product) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    g->cuda = true;
    make_output(g, linear_gelu(g, INPUT(g, "x", F32, 2, 3), 8));
    check_rewrite(g, "product_epilogue",
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 w float32[3, 8] grad\n"
                  "input %2 b float32[8] grad\n"
                  "%3, %4 = MatMulGelu(%0 x, %1 w, %2 b, alpha=1) float32[2, 8], float32[2, 8]\n"
                  "output %3\n");
    ctx_release(&c);
}

TEST(a_sum_that_is_seen_is_the_second_result) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *y;

    g->cuda = true;
    make_output(g, y = linear_gelu(g, INPUT(g, "x", F32, 2, 3), 8));
    make_output(g, y->def->in[0]);
    check_rewrite(g, "product_epilogue",
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 w float32[3, 8] grad\n"
                  "input %2 b float32[8] grad\n"
                  "%3, %4 = MatMulGelu(%0 x, %1 w, %2 b, alpha=1) float32[2, 8], float32[2, 8]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(no_epilogue_on_the_cpu_of_other_widths_or_in_a_chain) {
    for (int other = 0; other < 3; other++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = INPUT(g, "x", F32, 2, 3), *y = linear_gelu(g, x, other == 1 ? 12 : 8);

        g->cuda = other > 0;
        make_output(g, other == 2 ? NODE(g, "Tanh", y) : y);
        check_untouched(g, "product_epilogue");
        ctx_release(&c);
    }
}

TEST(the_exact_gelu_is_no_epilogue) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *w = INPUT(g, "w", F32, 3, 8);

    g->cuda = true;
    make_output(g, NODE(g, "Gelu", NODE(g, "MatMul", x, w)));
    check_untouched(g, "product_epilogue");
    ctx_release(&c);
}

TEST(a_gradient_of_gelu_and_its_totals_are_one_product) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *dy = INPUT(g, "dy", BF16, 2, 3), *w = INPUT(g, "w", BF16, 3, 8), *x = INPUT(g, "x", BF16, 2, 8), *dx;

    g->cuda = true;
    dx = NODE(g, "GeluTanhGrad", NODE(g, "MatMul", dy, w), x);
    make_output(g, dx);
    CHECK_OK(&c, emit_reduce(g, "ReduceSum", dx, 1, (const int64_t[]){0}, false, &dx));
    make_output(g, dx);
    check_rewrite(g, "product_epilogue",
                  "input %0 dy bfloat16[2, 3] grad\n"
                  "input %1 w bfloat16[3, 8] grad\n"
                  "input %2 x bfloat16[2, 8] grad\n"
                  "%3, %4 = MatMulGeluGrad(%0 dy, %1 w, %2 x, alpha=1) bfloat16[2, 8], bfloat16[8]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

/* The totals of dy's rows beside x' dy; `sums`: as they are, in float32. `along`: the axis that they are taken over. */
static graph *weight_gradient(ctx *c, bool sums, int64_t along) {
    graph *g = new_graph(c);
    value *x = INPUT(g, "x", BF16, 4, 3), *dy = INPUT(g, "dy", BF16, 4, 4), *total, *turned;

    g->cuda = true;
    CHECK_OK(c, emit_transpose(g, x, (const int[]){1, 0}, &turned));
    CHECK_OK(c, emit_reduce(g, "ReduceSum", dy, 1, &along, false, &total));
    if (sums) total = cast(g, total, F32);
    make_output(g, sums ? cast(g, NODE(g, "MatMul", turned, dy), F32) : NODE(g, "MatMul", turned, dy));
    make_output(g, total);
    return g;
}

TEST(a_weights_gradient_leaves_its_biass) {
    ctx c;
    ctx_init(&c);
    check_rewrite(weight_gradient(&c, false, 0), "product_epilogue",
                  "input %0 x bfloat16[4, 3] grad\n"
                  "input %1 dy bfloat16[4, 4] grad\n"
                  "%2 = Transpose(%0 x, perm=[1, 0]) bfloat16[3, 4]\n"
                  "%3, %4 = MatMulTotals(%2, %1 dy, right=1, wide=0) bfloat16[3, 4], bfloat16[4]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(totals_beside_sums_that_stay_wide_are_wide) {
    ctx c;
    ctx_init(&c);
    graph *g = weight_gradient(&c, true, 0);
    uint64_t only = pass_bit("product_cast") | pass_bit("product_epilogue");
    int fired[MAX_PASSES] = {0};

    CHECK_OK(&c, passes_run(g, AFTER_GRADIENT, ~only, fired));
    check_rewrite(g, "product_epilogue",
                  "input %0 x bfloat16[4, 3] grad\n"
                  "input %1 dy bfloat16[4, 4] grad\n"
                  "%2 = Transpose(%0 x, perm=[1, 0]) bfloat16[3, 4]\n"
                  "%3, %4 = MatMulTotals(%2, %1 dy, right=1, wide=1) float32[3, 4], float32[4]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(totals_over_another_axis_are_no_biass_gradient) {
    ctx c;
    ctx_init(&c);
    check_untouched(weight_gradient(&c, false, 1), "product_epilogue");
    ctx_release(&c);
}

/* Attention's gradient has heads, and each of its readers has reshaped it for itself. */
TEST(totals_of_another_view_of_the_rows) {
    static const int64_t rows[] = {0, 1};
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 4, 3), *heads = INPUT(g, "heads", BF16, 2, 2, 2, 4), *dy, *seen, *turned, *total;

    g->cuda = true;
    CHECK_OK(&c, emit_transpose(g, x, (const int[]){1, 0}, &turned));
    CHECK_OK(&c, emit_reshape(g, heads, &SHAPE(4, 8), &dy));
    CHECK_OK(&c, emit_reshape(g, heads, &SHAPE(2, 2, 8), &seen));
    make_output(g, NODE(g, "MatMul", turned, dy));
    CHECK_OK(&c, emit_reduce(g, "ReduceSum", seen, 2, rows, false, &total));
    make_output(g, total);
    check_rewrite(g, "product_epilogue",
                  "input %0 x bfloat16[4, 3] grad\n"
                  "input %1 heads bfloat16[2, 2, 2, 4] grad\n"
                  "%2 = Transpose(%0 x, perm=[1, 0]) bfloat16[3, 4]\n"
                  "%3 = Reshape(%1 heads, [4, 8], allowzero=1) bfloat16[4, 8]\n"
                  "%4, %5 = MatMulTotals(%2, %3, right=1, wide=0) bfloat16[3, 8], bfloat16[8]\n"
                  "output %4\n"
                  "output %5\n");
    ctx_release(&c);
}

/* --- wide_operands ------------------------------------------------------------------------------------------------ */

TEST(weights_are_rounded_on_their_way) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 2, 3), *w = INPUT(g, "w", F32, 4, 3), *b = INPUT(g, "b", BF16, 4), *narrow;
    const int64_t perm[] = {1, 0};

    narrow = cast(g, w, BF16);
    narrow = NODE_WITH(g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", 0.5)), a,
                       NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), narrow), b);
    make_output(g, NODE(g, "MatMul", narrow, cast(g, w, BF16)));
    if (product_rounds(BF16))
        check_rewrite(g, "wide_operands",
                      "input %0 a bfloat16[2, 3] grad\n"
                      "input %1 w float32[4, 3] grad\n"
                      "input %2 b bfloat16[4] grad\n"
                      "%3 = Transpose(%1 w, perm=[1, 0]) float32[3, 4]\n"
                      "%4 = MatMulBias(%0 a, %3, %2 b, alpha=0.5, wide=0) bfloat16[2, 4]\n"
                      "%5 = MatMulBias(%4, %1 w, alpha=1, wide=0) bfloat16[2, 3]\n"
                      "output %5\n");
    ctx_release(&c);
}

TEST(what_is_no_weight_is_cast) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 3, 3), *w = INPUT(g, "w", F32, 3, 3), *v = INPUT(g, "v", F32, 3, 3), *narrow;

    make_output(g, NODE(g, "MatMul", a, cast(g, NODE(g, "Neg", w), BF16))); /* computed */
    make_output(g, NODE(g, "MatMul", cast(g, w, F16), cast(g, w, F16)));    /* by itself */
    narrow = cast(g, v, BF16);
    make_output(g, NODE(g, "MatMul", a, narrow));
    make_output(g, narrow); /* seen */
    check_untouched(g, "wide_operands");
    ctx_release(&c);
}

/* As in z z' of z = Cast(w), with both turned, and with another product beside. */
TEST(a_weight_times_itself_turned_is_cast) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    const int64_t perm[] = {0, 2, 1}, round[] = {1, 2, 0};
    value *a = INPUT(g, "a", BF16, 3, 3, 3), *w = INPUT(g, "w", F32, 3, 3, 3), *v = INPUT(g, "v", F32, 3, 3, 3);
    value *x = cast(g, w, BF16), *z = cast(g, v, BF16), *turned;

    make_output(g, NODE(g, "MatMul", x, NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 3, perm)), x)));
    turned = NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 3, perm)), z);
    make_output(g, NODE(g, "MatMul", NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 3, round)), z), turned));
    make_output(g, NODE(g, "MatMul", a, turned));
    check_untouched(g, "wide_operands");
    ctx_release(&c);
}

/* --- packed_weights ----------------------------------------------------------------------------------------------- */

/* Three layers of one weight, w + w's last, and a bias in the second; a fourth where there are `more`. */
static value *shared_layers(graph *g, value *x, value *w, value *b, bool more) {
    value *y = NODE(g, "MatMul", x, w);
    y = NODE_WITH(g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", 0.5)), y, w, b);
    y = NODE(g, "MatMul", NODE(g, "Neg", y), w);
    return more ? NODE(g, "MatMul", y, w) : y;
}

TEST(a_weight_of_many_layers_is_laid_out_once) {
    enum { ROWS = 8, WIDTH = 16, ROOM = 1200 };
    const gemm product = {.type = BF16, .m = ROWS, .n = WIDTH, .k = WIDTH};
    const long long bytes = (long long)gemm_prepack_bytes(&product);
    char after[ROOM];
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, ROWS, WIDTH), *w = INPUT(g, "w", BF16, WIDTH, WIDTH),
          *b = INPUT(g, "b", BF16, WIDTH);

    make_output(g, shared_layers(g, x, w, b, true));
    snprintf(after, sizeof after,
             "input %%0 x bfloat16[8, 16] grad\n"
             "input %%1 w bfloat16[16, 16] grad\n"
             "input %%2 b bfloat16[16] grad\n"
             "%%3 = Prepack(%%1 w, rows=8, to=16) uint8[%lld]\n"
             "%%4 = MatMulBias(%%0 x, %%1 w, -, %%3, alpha=1, wide=0) bfloat16[8, 16]\n"
             "%%5 = MatMulBias(%%4, %%1 w, %%2 b, %%3, alpha=0.5, wide=0) bfloat16[8, 16]\n"
             "%%6 = Neg(%%5) bfloat16[8, 16]\n"
             "%%7 = MatMulBias(%%6, %%1 w, -, %%3, alpha=1, wide=0) bfloat16[8, 16]\n"
             "%%8 = MatMulBias(%%7, %%1 w, -, %%3, alpha=1, wide=0) bfloat16[8, 16]\n"
             "output %%8\n",
             bytes);
    if (bytes) check_rewrite(g, "packed_weights", after);
    else check_untouched(g, "packed_weights");
    ctx_release(&c);
}

TEST(a_weight_of_few_layers_is_read_where_it_is) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 8, 16), *w = INPUT(g, "w", BF16, 16, 16), *b = INPUT(g, "b", BF16, 16);
    value *y = shared_layers(g, x, w, b, false), *top = NULL;

    /* Of other rows, and multiplied from the other side. */
    CHECK(emit_slice_axis(g, y, 0, 0, 5, &top) == OK);
    make_output(g, NODE(g, "MatMul", top, w));
    make_output(g, NODE(g, "MatMul", w, NODE(g, "MatMul", w, w)));
    make_output(g, y);
    check_untouched(g, "packed_weights");
    ctx_release(&c);
}

/* --- loss_cast ---------------------------------------------------------------------------------------------------- */

static value *loss_of(graph *g, value *scores, value *labels) {
    value *in[] = {scores, labels}, *loss = NULL;
    CHECK(graph_emit(g, "CrossEntropy", NODE_ATTRS(STRING("reduction", "mean"), INT("ignore_index", -1)), 2, in, 1,
                     &loss) == OK);
    return loss;
}

TEST(scores_reach_the_loss_as_they_are) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 2, 3, 5), *labels = INPUT(g, "labels", I64, 6), *flat = NULL;

    CHECK(emit_reshape(g, cast(g, x, F32), &SHAPE(6, 5), &flat) == OK);
    make_output(g, loss_of(g, flat, labels));
    check_rewrite(g, "loss_cast",
                  "input %0 x bfloat16[2, 3, 5] grad\n"
                  "input %1 labels int64[6]\n"
                  "%2 = Reshape(%0 x, [6, 5], allowzero=1) bfloat16[6, 5]\n"
                  "%3, %4, %5 = CrossEntropy(%2, %1 labels, reduction=\"mean\", ignore_index=-1, wide=1) float32[], "
                  "float64[6], float64[]\n"
                  "output %3\n");
    ctx_release(&c);
}

TEST(scores_that_are_seen_in_float32_stay) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 6, 5), *labels = INPUT(g, "labels", I64, 6), *wide = cast(g, x, F32);

    make_output(g, loss_of(g, wide, labels));
    make_output(g, wide);
    make_output(g, loss_of(g, cast(g, INPUT(g, "y", F64, 6, 5), F32), labels)); /* of more digits */
    check_untouched(g, "loss_cast");
    ctx_release(&c);
}
