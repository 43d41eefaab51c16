/* test_passes.c -- the table of passes, and each pass as text before and after. */
#include "build.h"
#include "exec/gemm.h"
#include "passes/pipeline.h"
#include "test.h"

#include <math.h>

/* --- the table ---------------------------------------------------------------------------------------------------- */

TEST(every_pass_has_a_name_and_a_switch) {
    uint32_t all = 0;
    for (int i = 0; passes[i]; i++) {
        CHECK(passes[i]->name && passes[i]->name[0]);
        CHECK(!passes[i]->rules != !passes[i]->run);
        CHECK(pass_bit(passes[i]->name) == UINT32_C(1) << i);
        all |= pass_bit(passes[i]->name);
    }
    CHECK(pass_bit("no_such_pass") == 0);
    CHECK(passes_above(9) == 0 && passes_above(-1) == all);
}

/* --- gelu_fusion -------------------------------------------------------------------------------------------------- */

#define GELU_TEXT(op, type)                                                                                            \
    "input %0 x " type "[2, 3] grad\n"                                                                                 \
    "%1 = " op "(%0 x) " type "[2, 3]\n"                                                                               \
    "output %1\n"

/* x * 0.5 * factor, grouped in one of four ways */
static value *half_x_times(graph *g, value *x, value *factor, int way) {
    value *half = number(g, x->type, 0.5);
    switch (way) {
    case 0: return NODE(g, "Mul", NODE(g, "Mul", x, half), factor);
    case 1: return NODE(g, "Mul", NODE(g, "Mul", x, factor), half);
    case 2: return NODE(g, "Mul", x, NODE(g, "Mul", factor, half));
    default: return NODE(g, "Mul", NODE(g, "Mul", half, factor), x);
    }
}

static value *erf_factor(graph *g, value *x, bool divide) {
    value *root = number(g, x->type, divide ? sqrt(2) : sqrt(0.5)), *scaled = NODE(g, divide ? "Div" : "Mul", x, root);
    return NODE(g, "Add", NODE(g, "Erf", scaled), number(g, x->type, 1));
}

enum { CUBE_BY_POW, CUBE_LEFT, CUBE_RIGHT, FACTORED, FACTORED_SQUARE, CUBE_SPELLINGS };

static value *tanh_factor(graph *g, value *x, int spelling) {
    dtype t = x->type;
    value *cubic = number(g, t, 0.044715), *outer = number(g, t, sqrt(2 / M_PI)), *one = number(g, t, 1), *inner;

    if (spelling >= FACTORED) {
        value *square = spelling == FACTORED ? NODE(g, "Mul", NODE(g, "Mul", x, cubic), x)
                                             : NODE(g, "Mul", cubic, NODE(g, "Mul", x, x));
        inner = NODE(g, "Mul", NODE(g, "Mul", x, outer), NODE(g, "Add", square, one));
    } else {
        value *cube = spelling == CUBE_BY_POW ? NODE(g, "Pow", x, number(g, t, 3))
                      : spelling == CUBE_LEFT ? NODE(g, "Mul", NODE(g, "Mul", x, x), x)
                                              : NODE(g, "Mul", x, NODE(g, "Mul", x, x));
        inner = NODE(g, "Mul", outer, NODE(g, "Add", x, NODE(g, "Mul", cubic, cube)));
    }
    return NODE(g, "Add", one, NODE(g, "Tanh", inner));
}

TEST(gelu_of_erf) {
    for (int way = 0; way < 4; way++)
        for (int divide = 0; divide < 2; divide++) {
            ctx c;
            ctx_init(&c);
            graph *g = new_graph(&c);
            value *x = INPUT(g, "x", F32, 2, 3);
            make_output(g, half_x_times(g, x, erf_factor(g, x, divide), way));
            check_rewrite(g, "gelu_fusion", GELU_TEXT("Gelu", "float32"));
            ctx_release(&c);
        }
}

TEST(gelu_of_tanh) {
    for (int way = 0; way < 4; way++)
        for (int spelling = 0; spelling < CUBE_SPELLINGS; spelling++) {
            ctx c;
            ctx_init(&c);
            graph *g = new_graph(&c);
            value *x = INPUT(g, "x", F32, 2, 3);
            make_output(g, half_x_times(g, x, tanh_factor(g, x, spelling), way));
            check_rewrite(g, "gelu_fusion", GELU_TEXT("GeluTanh", "float32"));
            ctx_release(&c);
        }
}

TEST(gelu_in_every_float) {
    static const char *const after[] = {[F32] = GELU_TEXT("Gelu", "float32"),
                                        [F64] = GELU_TEXT("Gelu", "float64"),
                                        [BF16] = GELU_TEXT("Gelu", "bfloat16"),
                                        [F16] = GELU_TEXT("Gelu", "float16")};
    for (int t = F32; t <= F16; t++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = INPUT(g, "x", (dtype)t, 2, 3);
        make_output(g, half_x_times(g, x, erf_factor(g, x, true), 0));
        check_rewrite(g, "gelu_fusion", after[t]);
        ctx_release(&c);
    }
}

TEST(nearly_gelu_is_left_alone) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *y = INPUT(g, "y", F32, 2, 3), *half;

    make_output(g, NODE(g, "Mul", NODE(g, "Mul", y, number(g, F32, 0.5)), erf_factor(g, x, true))); /* of two values */
    make_output(g, NODE(g, "Mul", NODE(g, "Mul", x, number(g, F32, 0.4)), erf_factor(g, y, true))); /* another factor */
    make_output(g, erf_factor(g, INPUT(g, "z", F32, 2, 3), true)); /* the factor is seen */
    make_output(g, half_x_times(g, g->inputs[2], g->outputs[2], 0));
    CHECK_OK(&c, graph_full(g, F32, &SHAPE(4, 1, 1), 0.5, &half)); /* the result is larger than x */
    x = INPUT(g, "w", F32, 2, 3);
    make_output(g, NODE(g, "Mul", NODE(g, "Mul", x, half), erf_factor(g, x, true)));
    check_untouched(g, "gelu_fusion");
    ctx_release(&c);
}

/* --- silu_fusion -------------------------------------------------------------------------------------------------- */

TEST(silu) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *y = INPUT(g, "y", F32, 2, 3);

    make_output(g, NODE(g, "Mul", x, NODE(g, "Sigmoid", x)));
    make_output(g, NODE(g, "Mul", NODE(g, "Sigmoid", NODE(g, "Mul", number(g, F32, 1.75), x)), x));
    make_output(g, NODE(g, "Mul", NODE(g, "Sigmoid", y), x)); /* a gate */
    check_rewrite(g, "silu_fusion",
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 y float32[2, 3] grad\n"
                  "%2 = Swish(%0 x, alpha=1) float32[2, 3]\n"
                  "%3 = Swish(%0 x, alpha=1.75) float32[2, 3]\n"
                  "%4 = Sigmoid(%1 y) float32[2, 3]\n"
                  "%5 = Mul(%4, %0 x) float32[2, 3]\n"
                  "output %2\n"
                  "output %3\n"
                  "output %5\n");
    ctx_release(&c);
}

/* --- gradient_marks ----------------------------------------------------------------------------------------------- */

TEST(what_only_the_gradient_reads_goes) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *y = INPUT(g, "y", F32, 2, 3);

    make_output(g, NODE(g, "Neg", NODE(g, "Sloped", NODE(g, "StopGradient", NODE(g, "Exp", y)), x, NODE(g, "Abs", y))));
    check_rewrite(g, "gradient_marks",
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 y float32[2, 3] grad\n"
                  "%2 = Exp(%1 y) float32[2, 3]\n"
                  "%3 = Neg(%2) float32[2, 3]\n"
                  "output %3\n");
    ctx_release(&c);
}

/* --- product_cast ------------------------------------------------------------------------------------------------- */

static value *widened(graph *g, value *x, dtype to) {
    value *y = NULL;
    CHECK_OK(g->c, emit_cast(g, x, to, &y));
    return y;
}

TEST(a_widened_product_keeps_its_sums) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", BF16, 2, 3), *b = INPUT(g, "b", BF16, 3, 4);

    make_output(g, widened(g, NODE(g, "MatMul", a, b), F32));
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
    make_output(g, widened(g, seen, F32));
    make_output(g, widened(g, NODE(g, "MatMul", b, INPUT(g, "d", BF16, 4, 2)), F64));
    make_output(g, widened(g, NODE(g, "MatMul", x, INPUT(g, "y", F64, 3, 2)), F32));
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
    if (sums) total = widened(g, total, F32);
    make_output(g, sums ? widened(g, NODE(g, "MatMul", turned, dy), F32) : NODE(g, "MatMul", turned, dy));
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
    uint32_t only = pass_bit("product_cast") | pass_bit("product_epilogue");
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

/* --- rotary_fusion ------------------------------------------------------------------------------------------------ */

/* Columns `from` to `to` of x[3, 6]. */
static value *columns(graph *g, value *x, int64_t from, int64_t to) {
    const int64_t starts[] = {0, from}, counts[] = {3, to - from}, steps[] = {1, 1};
    return NODE_WITH(g, "StridedSlice",
                     NODE_ATTRS(INTS("starts", 2, starts), INTS("counts", 2, counts), INTS("steps", 2, steps)), x);
}

static value *turned(graph *g, value *x, value *c, value *s, int64_t middle) {
    value *half = NODE(g, "Neg", columns(g, x, middle, 6));
    value *turn = NODE_WITH(g, "Concat", NODE_ATTRS(INT("axis", -1)), half, columns(g, x, 0, middle));
    return NODE(g, "Add", NODE(g, "Mul", x, c), NODE(g, "Mul", turn, s));
}

static void check_rotary(int64_t middle, bool angles_need_grad) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3, 6), *cosine = INPUT(g, "c", F32, 6), *sine = INPUT(g, "s", F32, 3, 6);

    cosine->needs_grad = sine->needs_grad = angles_need_grad;
    make_output(g, turned(g, x, cosine, sine, middle));
    if (middle == 3 && !angles_need_grad)
        check_rewrite(g, "rotary_fusion",
                      "input %0 x float32[3, 6] grad\n"
                      "input %1 c float32[6]\n"
                      "input %2 s float32[3, 6]\n"
                      "%3 = Rotary(%0 x, %1 c, %2 s) float32[3, 6]\n"
                      "output %3\n");
    else check_untouched(g, "rotary_fusion");
    ctx_release(&c);
}

TEST(a_turn_of_two_halves_is_rotary) { check_rotary(3, false); }
TEST(a_turn_of_other_parts_is_not) { check_rotary(2, false); }
TEST(a_turn_by_angles_that_learn_is_not) { check_rotary(3, true); }

/* --- norm_fusion -------------------------------------------------------------------------------------------------- */

static value *mean(graph *g, value *x, int64_t axis, int keep) {
    return NODE_WITH(g, "ReduceMean", NODE_ATTRS(INT("keepdims", keep)), x, INT_LIST(g, axis));
}

enum { DIV_ONE, RECIPROCAL, POW, DIVIDE, DIVISIONS };

/* d / sqrt(mean(d^2) + epsilon) */
static value *normed(graph *g, value *d, bool pow, int division) {
    dtype t = d->type;
    value *square = pow ? NODE(g, "Pow", d, number(g, t, 2)) : NODE(g, "Mul", d, d);
    value *variance = NODE(g, "Add", mean(g, square, -1, 1), number(g, t, 1e-5));

    switch (division) {
    case DIV_ONE: return NODE(g, "Mul", d, NODE(g, "Div", number(g, t, 1), NODE(g, "Sqrt", variance)));
    case RECIPROCAL: return NODE(g, "Mul", NODE(g, "Reciprocal", NODE(g, "Sqrt", variance)), d);
    case POW: return NODE(g, "Mul", d, NODE(g, "Pow", variance, number(g, t, -0.5)));
    default: return NODE(g, "Div", d, NODE(g, "Sqrt", variance));
    }
}

static value *cast(graph *g, value *x, dtype t) {
    return NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[t].onnx)), x);
}

TEST(rms_norm) {
    for (int pow = 0; pow < 2; pow++)
        for (int division = 0; division < DIVISIONS; division++) {
            ctx c;
            ctx_init(&c);
            graph *g = new_graph(&c);
            value *x = INPUT(g, "x", F32, 2, 3), *w = INPUT(g, "w", F32, 3);
            make_output(g, NODE(g, "Mul", w, normed(g, x, pow, division)));
            check_rewrite(
                g, "norm_fusion",
                "input %0 x float32[2, 3] grad\n"
                "input %1 w float32[3] grad\n"
                "%2, %3 = RMSNormalization(%0 x, %1 w, axis=-1, epsilon=9.99999975e-06) float32[2, 3], float32[2, 1]\n"
                "output %2\n");
            ctx_release(&c);
        }
}

TEST(rms_norm_in_16_bits) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 2, 3), *w = INPUT(g, "w", BF16, 3);

    make_output(g, NODE(g, "Mul", w, cast(g, normed(g, cast(g, x, F32), true, DIV_ONE), BF16)));
    check_rewrite(
        g, "norm_fusion",
        "input %0 x bfloat16[2, 3] grad\n"
        "input %1 w bfloat16[3] grad\n"
        "%2, %3 = RMSNormalization(%0 x, %1 w, axis=-1, epsilon=9.99999975e-06) bfloat16[2, 3], float32[2, 1]\n"
        "output %2\n");
    ctx_release(&c);
}

TEST(rms_norm_scaled_in_float32) {
    /* Gemma scales by 1 + w before it narrows: the operator is float32, the casts stay. */
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 2, 3), *w = INPUT(g, "w", F32, 3);
    value *scale = NODE(g, "Add", w, number(g, F32, 1));

    make_output(g, cast(g, NODE(g, "Mul", normed(g, cast(g, x, F32), true, DIV_ONE), scale), BF16));
    check_rewrite(g, "norm_fusion",
                  "input %0 x bfloat16[2, 3] grad\n"
                  "input %1 w float32[3] grad\n"
                  "%2 = Add(%1 w, 1) float32[3]\n"
                  "%3 = Cast(%0 x, to=1) float32[2, 3]\n"
                  "%4, %5 = RMSNormalization(%3, %2, axis=-1, epsilon=9.99999975e-06) float32[2, 3], float32[2, 1]\n"
                  "%6 = Cast(%4, to=16) bfloat16[2, 3]\n"
                  "output %6\n");
    ctx_release(&c);
}

TEST(layer_norm) {
    for (int division = 0; division < DIVISIONS; division++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = INPUT(g, "x", F32, 2, 3), *w = INPUT(g, "w", F32, 3), *b = INPUT(g, "b", F32, 3);
        value *d = NODE(g, "Sub", x, mean(g, x, 1, 1));
        make_output(g, NODE(g, "Add", NODE(g, "Mul", normed(g, d, division & 1, division), w), b));
        check_rewrite(
            g, "norm_fusion",
            "input %0 x float32[2, 3] grad\n"
            "input %1 w float32[3] grad\n"
            "input %2 b float32[3] grad\n"
            "%3, %4, %5 = LayerNormalization(%0 x, %1 w, %2 b, axis=-1, epsilon=9.99999975e-06) float32[2, 3], "
            "float32[2, 1], float32[2, 1]\n"
            "output %3\n");
        ctx_release(&c);
    }
}

TEST(nearly_a_norm_is_left_alone) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3, 3), *w = INPUT(g, "w", F32, 3), *wide = INPUT(g, "wide", F32, 3, 3);
    value *rows = NODE(g, "Sqrt", NODE(g, "Add", mean(g, NODE(g, "Mul", x, x), 0, 1), number(g, F32, 1e-5)));

    value *columns = NODE(g, "Sqrt", NODE(g, "Add", mean(g, NODE(g, "Mul", x, x), -1, 1), number(g, F32, 1e-5)));

    make_output(g, NODE(g, "Mul", w, NODE(g, "Div", x, rows)));           /* over the other axis */
    make_output(g, NODE(g, "Mul", w, NODE(g, "Div", w, columns)));        /* of another value */
    make_output(g, NODE(g, "Mul", wide, normed(g, wide, false, DIVIDE))); /* a scale for each element */
    check_untouched(g, "norm_fusion");
    ctx_release(&c);
}

/* --- safe_softmax ------------------------------------------------------------------------------------------------- */

TEST(safe_softmax_replaces_isnan) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *y = INPUT(g, "y", F32, 2, 3), *s, *t;

    s = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", -1)), x);
    t = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", -1)), y);
    make_output(g, NODE(g, "Where", NODE(g, "IsNaN", s), number(g, F32, 0), s));
    make_output(g, NODE(g, "Where", NODE(g, "IsNaN", t), number(g, F32, 1), t));
    check_rewrite(g, "safe_softmax",
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 y float32[2, 3] grad\n"
                  "%2 = Softmax(%1 y, axis=-1) float32[2, 3]\n"
                  "%3 = MaskedSoftmax(%0 x) float32[2, 3]\n"
                  "%4 = IsNaN(%2) bool[2, 3]\n"
                  "%5 = Where(%4, 1, %2) float32[2, 3]\n"
                  "output %3\n"
                  "output %5\n");
    ctx_release(&c);
}

/* --- masked_softmax ------------------------------------------------------------------------------------------------- */

/* where(allowed, softmax(where(allowed, x, lowest)), 0) */
static value *masked_around(graph *g, value *x, value *allowed, double lowest) {
    value *hidden = NODE(g, "Where", allowed, x, number(g, x->type, lowest));
    value *softmax = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", -1)), hidden);
    return NODE(g, "Where", allowed, softmax, number(g, x->type, 0));
}

TEST(a_mask_goes_into_the_softmax) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *y = INPUT(g, "y", F32, 2, 4, 3);
    value *allowed = INPUT(g, "allowed", BOOL, 4, 3);

    make_output(g, masked_around(g, x, allowed, -INFINITY));
    make_output(g, masked_around(g, y, NODE(g, "Expand", allowed, INT_LIST(g, 2, 4, 3)), -3.4028234663852886e38));
    check_rewrite(g, "masked_softmax",
                  "input %0 x float32[2, 4, 3] grad\n"
                  "input %1 y float32[2, 4, 3] grad\n"
                  "input %2 allowed bool[4, 3]\n"
                  "%3 = MaskedSoftmax(%0 x, %2 allowed) float32[2, 4, 3]\n"
                  "%4 = MaskedSoftmax(%1 y, %2 allowed) float32[2, 4, 3]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(a_mask_of_what_is_hidden_goes_into_the_softmax) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *allowed = INPUT(g, "allowed", BOOL, 4, 3);
    value *other = INPUT(g, "other", BOOL, 3), *hidden = NODE(g, "Not", allowed);

    for (int i = 0; i < 2; i++) {
        value *mask = i ? other : hidden, *low = number(g, F32, -INFINITY), *y = NODE(g, "Where", mask, low, x);
        y = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 2)), y);
        make_output(g, NODE(g, "Where", mask, number(g, F32, 0), y));
    }
    check_rewrite(g, "masked_softmax",
                  "input %0 x float32[2, 4, 3] grad\n"
                  "input %1 allowed bool[4, 3]\n"
                  "input %2 other bool[3]\n"
                  "%3 = MaskedSoftmax(%0 x, %1 allowed) float32[2, 4, 3]\n"
                  "%4 = Not(%2 other) bool[3]\n"
                  "%5 = MaskedSoftmax(%0 x, %4) float32[2, 4, 3]\n"
                  "output %3\n"
                  "output %5\n");
    ctx_release(&c);
}

TEST(a_mask_that_is_added_goes_into_the_softmax) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *allowed = INPUT(g, "allowed", BOOL, 4, 3);
    value *other = INPUT(g, "o", F32, 4, 3);
    value *mask = NODE(g, "Where", allowed, number(g, F32, 0), number(g, F32, -INFINITY));

    /* The mask is shared by two layers; a mask of other numbers stays where it is. */
    make_output(g, NODE(g, "MaskedSoftmax", NODE(g, "Add", x, mask)));
    make_output(g, NODE(g, "MaskedSoftmax", NODE(g, "Add", mask, NODE(g, "Neg", x))));
    make_output(g, NODE(g, "MaskedSoftmax", NODE(g, "Add", x, other)));
    check_rewrite(g, "masked_softmax",
                  "input %0 x float32[2, 4, 3] grad\n"
                  "input %1 allowed bool[4, 3]\n"
                  "input %2 o float32[4, 3] grad\n"
                  "%3 = MaskedSoftmax(%0 x, %1 allowed) float32[2, 4, 3]\n"
                  "%4 = Neg(%0 x) float32[2, 4, 3]\n"
                  "%5 = MaskedSoftmax(%4, %1 allowed) float32[2, 4, 3]\n"
                  "%6 = Add(%0 x, %2 o) float32[2, 4, 3]\n"
                  "%7 = MaskedSoftmax(%6) float32[2, 4, 3]\n"
                  "output %3\n"
                  "output %5\n"
                  "output %7\n");
    ctx_release(&c);
}

TEST(a_mask_of_another_kind_stays_around_the_softmax) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *allowed = INPUT(g, "allowed", BOOL, 4, 3);
    value *wide = INPUT(g, "w", BOOL, 5, 2, 4, 3);

    make_output(g, masked_around(g, x, allowed, -10000)); /* what is masked is not 0 */
    make_output(g, masked_around(g, x, wide, -INFINITY)); /* the result is larger than x */
    check_untouched(g, "masked_softmax");
    ctx_release(&c);
}

/* --- softmax_dropout ------------------------------------------------------------------------------------------------ */

static value *dropped(graph *g, value *x, int key) {
    return NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.25), INT("key", key)), x);
}

TEST(dropout_goes_into_the_softmax_with_its_key) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 3), *y = INPUT(g, "y", F32, 4, 3), *allowed = INPUT(g, "allowed", BOOL, 3);

    make_output(g, dropped(g, NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 1)), x), 7));
    make_output(g, dropped(g, NODE(g, "MaskedSoftmax", x), 8));
    make_output(g, dropped(g, NODE(g, "MaskedSoftmax", y, allowed), 9));
    check_rewrite(g, "softmax_dropout",
                  "input %0 x float32[4, 3] grad\n"
                  "input %1 y float32[4, 3] grad\n"
                  "input %2 allowed bool[3]\n"
                  "%3, %4 = SoftmaxDropout(%0 x, ratio=0.25, key=7) float32[4, 3], float32[4, 3]\n"
                  "%5, %6 = MaskedSoftmaxDropout(%0 x, ratio=0.25, key=8) float32[4, 3], float32[4, 3]\n"
                  "%7, %8 = MaskedSoftmaxDropout(%1 y, %2 allowed, ratio=0.25, key=9) float32[4, 3], float32[4, 3]\n"
                  "output %3\n"
                  "output %5\n"
                  "output %7\n");
    ctx_release(&c);
}

TEST(dropout_stays_behind_a_softmax) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 3), *rows = INPUT(g, "rows", I64, 4), *seen = NODE(g, "MaskedSoftmax", x);
    value *softmax = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 0)), x);

    make_output(g, dropped(g, softmax, 0)); /* along another axis */
    make_output(g, dropped(g, seen, 1));    /* what is before it is seen, too */
    make_output(g, seen);
    make_output(g, NODE(g, "Neg", dropped(g, NODE(g, "MaskedSoftmax", NODE(g, "Abs", x)), 2))); /* a step of a chain */
    make_output(g, NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.25), INT("key", 3)),
                             NODE(g, "MaskedSoftmax", NODE(g, "Exp", x)), rows));            /* of some rows */
    make_output(g, dropped(g, NODE(g, "MaskedSoftmax", INPUT(g, "narrow", BF16, 4, 3)), 4)); /* on the CPU */
    check_untouched(g, "softmax_dropout");
    g->cuda = true;
    CHECK_OK(&c, passes_run(g, BEFORE_GRADIENT, ~pass_bit("softmax_dropout"), NULL));
    CHECK(count_nodes(g, "MaskedSoftmaxDropout") == 1);
    ctx_release(&c);
}

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
    if (gemm_rounds(BF16))
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

/* --- concat_gradient ------------------------------------------------------------------------------------------------ */

/* `x` as columns `from` on of [2, 6]. */
static value *place(graph *g, value *x, int64_t from) {
    const int64_t starts[] = {0, from}, whole[] = {2, 6}, steps[] = {1, 1};
    return NODE_WITH(g, "Place",
                     NODE_ATTRS(INTS("starts", 2, starts), INTS("shape", 2, whole), INTS("steps", 2, steps)), x);
}

TEST(pieces_that_fill_an_axis_are_joined) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 1), *b = INPUT(g, "b", F32, 2, 2), *d = INPUT(g, "d", F32, 2, 3);
    value *rest = INPUT(g, "rest", F32, 2, 6);

    make_output(g,
                NODE(g, "Add", NODE(g, "Add", place(g, b, 1), place(g, d, 3)), NODE(g, "Add", place(g, a, 0), rest)));
    check_rewrite(g, "concat_gradient",
                  "input %0 a float32[2, 1] grad\n"
                  "input %1 b float32[2, 2] grad\n"
                  "input %2 d float32[2, 3] grad\n"
                  "input %3 rest float32[2, 6] grad\n"
                  "%4 = Concat(%0 a, %1 b, %2 d, axis=1) float32[2, 6]\n"
                  "%5 = Add(%3 rest, %4) float32[2, 6]\n"
                  "output %5\n");
    ctx_release(&c);
}

TEST(gaps_between_pieces_are_zeros) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 1), *b = INPUT(g, "b", F32, 2, 2), *d = INPUT(g, "d", F32, 2, 4);

    /* The third overlaps both of the others. */
    make_output(g, NODE(g, "Add", NODE(g, "Add", place(g, b, 3), place(g, d, 1)), place(g, a, 1)));
    check_rewrite(g, "concat_gradient",
                  "input %0 a float32[2, 1] grad\n"
                  "input %1 b float32[2, 2] grad\n"
                  "input %2 d float32[2, 4] grad\n"
                  "%3 = Place(%2 d, starts=[0, 1], shape=[2, 6], steps=[1, 1]) float32[2, 6]\n"
                  "%4 = Concat(float32[2, 1] of [0, 0], %0 a, float32[2, 1] of [0, 0], %1 b, "
                  "float32[2, 1] of [0, 0], axis=1) float32[2, 6]\n"
                  "%5 = Add(%3, %4) float32[2, 6]\n"
                  "output %5\n");
    ctx_release(&c);
}

TEST(pieces_that_overlap_stay_a_sum) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 4), *b = INPUT(g, "b", F32, 2, 3), *rest = INPUT(g, "rest", F32, 2, 6);

    make_output(g, NODE(g, "Add", place(g, a, 0), place(g, b, 3)));
    make_output(g, NODE(g, "Add", place(g, a, 0), rest));
    check_untouched(g, "concat_gradient");
    ctx_release(&c);
}

TEST(a_sum_that_is_seen_is_not_taken_apart) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 2), *rest = INPUT(g, "rest", F32, 2, 6);
    value *sum = NODE(g, "Add", rest, place(g, a, 2));

    make_output(g, sum);
    make_output(g, NODE(g, "Add", sum, place(g, a, 4)));
    check_untouched(g, "concat_gradient");
    ctx_release(&c);
}

/* --- gradients that meet ------------------------------------------------------------------------------------------ */

/* `v` is what backward gives back for input i. Called when all inputs are there. */
static void make_gradient(graph *g, int i, value *v) {
    if (!g->input_grads) {
        CHECK_OK(g->c, NEW(g->c, g->input_grads, g->n_inputs));
        g->n_input_grads = g->n_inputs;
    }
    g->input_grads[i] = v;
}

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
