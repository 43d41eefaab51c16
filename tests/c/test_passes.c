/* test_passes.c -- tests the table of passes, and passes on pointwise formulas, norms and softmax as text before and
 * after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

#include <math.h>

/* --- the table ---------------------------------------------------------------------------------------------------- */

TEST(every_pass_has_a_name_and_a_switch) {
    for (int i = 0; passes[i]; i++) {
        CHECK(passes[i]->name && passes[i]->name[0]);
        CHECK(!passes[i]->rules != !passes[i]->run);
        CHECK(pass_bit(passes[i]->name) == UINT64_C(1) << i);
    }
    CHECK(pass_bit("no_such_pass") == 0);
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

/* As autocast has it, which takes the power in float32: half of x before the cast, and what comes out rounded again. */
static value *gelu_of_cast(graph *g, value *x, value *half_of, dtype to) {
    value *wide = cast(g, x, F32), *half = NODE(g, "Mul", number(g, half_of->type, 0.5), half_of);
    return cast(g, NODE(g, "Mul", cast(g, half, F32), tanh_factor(g, wide, CUBE_BY_POW)), to);
}

TEST(gelu_under_autocast) {
    static const char *const after[] = {[BF16] = GELU_TEXT("GeluTanh", "bfloat16"),
                                        [F16] = GELU_TEXT("GeluTanh", "float16")};
    for (int t = BF16; t <= F16; t++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *x = INPUT(g, "x", (dtype)t, 2, 3);
        make_output(g, gelu_of_cast(g, x, x, (dtype)t));
        check_rewrite(g, "gelu_fusion", after[t]);
        ctx_release(&c);
    }
}

TEST(gelu_that_is_rounded_otherwise_stays_wide) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 2, 3);
    make_output(g, gelu_of_cast(g, x, x, F16));
    check_rewrite(g, "gelu_fusion",
                  "input %0 x bfloat16[2, 3] grad\n"
                  "%1 = Cast(%0 x, to=1) float32[2, 3]\n"
                  "%2 = GeluTanh(%1) float32[2, 3]\n"
                  "%3 = Cast(%2, to=10) float16[2, 3]\n"
                  "output %3\n");
    ctx_release(&c);
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
    x = INPUT(g, "narrow", BF16, 2, 3); /* half of something else was cast */
    make_output(g, gelu_of_cast(g, x, INPUT(g, "other", BF16, 2, 3), BF16));
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

    make_output(g, masked_around(g, NODE(g, "Tanh", x), allowed, -INFINITY));
    make_output(g, masked_around(g, NODE(g, "Tanh", y), NODE(g, "Expand", allowed, INT_LIST(g, 2, 4, 3)),
                                 -3.4028234663852886e38));
    check_rewrite(g, "masked_softmax",
                  "input %0 x float32[2, 4, 3] grad\n"
                  "input %1 y float32[2, 4, 3] grad\n"
                  "input %2 allowed bool[4, 3]\n"
                  "%3 = Tanh(%0 x) float32[2, 4, 3]\n"
                  "%4 = MaskedSoftmax(%3, %2 allowed) float32[2, 4, 3]\n"
                  "%5 = Tanh(%1 y) float32[2, 4, 3]\n"
                  "%6 = MaskedSoftmax(%5, %2 allowed) float32[2, 4, 3]\n"
                  "output %4\n"
                  "output %6\n");
    ctx_release(&c);
}

TEST(logits_that_may_be_nothing_but_infinite_keep_their_mask) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *w = INPUT(g, "w", F32, 3), *allowed = INPUT(g, "allowed", BOOL, 4, 3);

    make_output(g, masked_around(g, x, allowed, -INFINITY));
    make_output(g, masked_around(g, NODE(g, "Mul", x, w), allowed, -INFINITY));
    make_output(g, masked_around(g, NODE(g, "Log", x), allowed, -INFINITY));
    check_untouched(g, "masked_softmax");
    ctx_release(&c);
}

TEST(a_mask_of_what_is_hidden_goes_into_the_softmax) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *allowed = INPUT(g, "allowed", BOOL, 4, 3);
    value *other = INPUT(g, "other", BOOL, 3), *hidden = NODE(g, "Not", allowed);

    x = NODE(g, "Tanh", x);
    for (int i = 0; i < 2; i++) {
        value *mask = i ? other : hidden, *low = number(g, F32, -INFINITY), *y = NODE(g, "Where", mask, low, x);
        y = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 2)), y);
        make_output(g, NODE(g, "Where", mask, number(g, F32, 0), y));
    }
    check_rewrite(g, "masked_softmax",
                  "input %0 x float32[2, 4, 3] grad\n"
                  "input %1 allowed bool[4, 3]\n"
                  "input %2 other bool[3]\n"
                  "%3 = Tanh(%0 x) float32[2, 4, 3]\n"
                  "%4 = MaskedSoftmax(%3, %1 allowed) float32[2, 4, 3]\n"
                  "%5 = Not(%2 other) bool[3]\n"
                  "%6 = MaskedSoftmax(%3, %5) float32[2, 4, 3]\n"
                  "output %4\n"
                  "output %6\n");
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

/* --- softmax_cast --------------------------------------------------------------------------------------------------- */

TEST(a_softmax_is_stored_as_it_is_read) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 3), *allowed = INPUT(g, "allowed", BOOL, 3), *y;

    make_output(
        g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 16)), NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 1)), x)));
    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 10)), NODE(g, "MaskedSoftmax", x, allowed)));
    y = dropped(g, NODE(g, "MaskedSoftmax", x), 7);
    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 16)), y));
    check_rewrite(
        g, "softmax_cast",
        "input %0 x float32[4, 3] grad\n"
        "input %1 allowed bool[3]\n"
        "%2, %3 = NarrowSoftmax(%0 x, to=16, safe=0, ratio=0, key=0) bfloat16[4, 3], bfloat16[4, 3]\n"
        "%4, %5 = NarrowSoftmax(%0 x, %1 allowed, to=10, safe=1, ratio=0, key=0) float16[4, 3], float16[4, 3]\n"
        "%6, %7 = NarrowSoftmaxRandom(%0 x, to=16, safe=1, ratio=0.25, key=7) bfloat16[4, 3], bfloat16[4, 3]\n"
        "output %2\n"
        "output %4\n"
        "output %6\n");
    ctx_release(&c);
}

TEST(the_gradient_of_a_softmax_is_stored_as_it_is_read) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *dy = INPUT(g, "dy", F32, 4, 3), *y = INPUT(g, "y", BF16, 4, 3), *z = INPUT(g, "z", BF16, 4, 3);
    const attr *to = NODE_ATTRS(INT("to", 1));

    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 16)), NODE_WITH(g, "NarrowSoftmaxGrad", to, dy, y)));
    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 10)), NODE_WITH(g, "NarrowSoftmaxGrad", to, dy, z)));
    CHECK_OK(&c, passes_run(g, AFTER_GRADIENT, ~pass_bit("softmax_cast"), NULL));
    CHECK(count_nodes(g, "NarrowSoftmaxGrad") == 2 && count_nodes(g, "Cast") == 1); /* of another type than y's */
    ctx_release(&c);
}

TEST(a_softmax_stays_float32) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 3), *seen = NODE(g, "MaskedSoftmax", x), *long_rows = INPUT(g, "l", F32, 2, 4097);
    value *first = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 0)), x);

    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 16)), seen)); /* which is seen, too */
    make_output(g, seen);
    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 16)), first)); /* along another axis */
    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 16)), NODE(g, "MaskedSoftmax", long_rows)));
    make_output(g, NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 11)), NODE(g, "MaskedSoftmax", NODE(g, "Exp", x))));
    check_untouched(g, "softmax_cast");
    ctx_release(&c);
}

/* --- relu_dropout --------------------------------------------------------------------------------------------------- */

TEST(what_a_dropout_has_left_tells_the_slope_of_a_relu) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 3), *dy = INPUT(g, "dy", F32, 4, 3), *y = NODE(g, "Relu", x);

    make_output(g, dropped(g, y, 7));
    make_output(g, NODE(g, "ReluGrad", dropped(g, dy, 7), y));
    check_rewrite(g, "relu_dropout",
                  "input %0 x float32[4, 3] grad\n"
                  "input %1 dy float32[4, 3] grad\n"
                  "%2 = Relu(%0 x) float32[4, 3]\n"
                  "%3 = DropoutTrain(%2, ratio=0.25, key=7) float32[4, 3]\n"
                  "%4 = ReluDropoutGrad(%1 dy, %3, scale=1.33333333) float32[4, 3]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(a_relu_that_others_read_keeps_its_result) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 4, 3), *dy = INPUT(g, "dy", F32, 4, 3), *rows = INPUT(g, "rows", I64, 4);
    value *y = NODE(g, "Relu", x), *z = NODE(g, "Relu", NODE(g, "Neg", x)), *w = NODE(g, "Relu", NODE(g, "Abs", x));

    make_output(g, dropped(g, y, 7));
    make_output(g, NODE(g, "ReluGrad", dropped(g, dy, 7), y));
    make_output(g, NODE(g, "Exp", y));
    make_output(g, dropped(g, z, 8)); /* another one */
    make_output(g, NODE(g, "ReluGrad", dropped(g, dy, 9), z));
    make_output(g, dropped(g, w, 10)); /* of all rows, and of some */
    make_output(g, NODE(g, "ReluGrad",
                        NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.25), INT("key", 10)), dy, rows), w));
    check_untouched(g, "relu_dropout");
    ctx_release(&c);
}
