/* test_rotary_passes.c -- tests passes on rotary embeddings and the casts around them, as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

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
                      "%3 = Rotary(%0 x, %1 c, %2 s, wide=0) float32[3, 6]\n"
                      "output %3\n");
    else check_untouched(g, "rotary_fusion");
    ctx_release(&c);
}

TEST(a_turn_of_two_halves_is_rotary) { check_rotary(3, false); }
TEST(a_turn_of_other_parts_is_not) { check_rotary(2, false); }
TEST(a_turn_by_angles_that_learn_is_not) { check_rotary(3, true); }

/* c and s in float32, x and the result in 16 bits: a cast of x for all its readers, or one for each. */
static graph *turned_wide(ctx *c, bool one_cast, dtype to) {
    ctx_init(c);
    graph *g = new_graph(c);
    value *x = INPUT(g, "x", BF16, 3, 6), *cosine = INPUT(g, "c", F32, 6), *sine = INPUT(g, "s", F32, 3, 6);
    value *wide = one_cast ? cast(g, x, F32) : x, *half, *turn;

    cosine->needs_grad = sine->needs_grad = false;
    half = NODE(g, "Neg", columns(g, wide, 3, 6));
    turn = NODE_WITH(g, "Concat", NODE_ATTRS(INT("axis", -1)), half, columns(g, wide, 0, 3));
    if (!one_cast) {
        wide = cast(g, x, F32);
        turn = cast(g, turn, F32);
    }
    wide = NODE(g, "Add", NODE(g, "Mul", wide, cosine), NODE(g, "Mul", turn, sine));
    make_output(g, to == F32 ? wide : cast(g, wide, to));
    return g;
}

TEST(a_turn_between_casts_is_rotary_of_16_bits) {
    for (int one = 0; one < 2; one++) {
        ctx c;
        check_rewrite(turned_wide(&c, one, BF16), "rotary_fusion",
                      "input %0 x bfloat16[3, 6] grad\n"
                      "input %1 c float32[6]\n"
                      "input %2 s float32[3, 6]\n"
                      "%3 = Rotary(%0 x, %1 c, %2 s) bfloat16[3, 6]\n"
                      "output %3\n");
        ctx_release(&c);
    }
}

TEST(a_turn_that_is_seen_in_float32_is_stored_so) {
    ctx c;
    for (int one = 0; one < 2; one++) {
        check_rewrite(turned_wide(&c, one, F32), "rotary_fusion",
                      "input %0 x bfloat16[3, 6] grad\n"
                      "input %1 c float32[6]\n"
                      "input %2 s float32[3, 6]\n"
                      "%3 = Rotary(%0 x, %1 c, %2 s, wide=1) float32[3, 6]\n"
                      "output %3\n");
        ctx_release(&c);
    }
    check_rewrite(turned_wide(&c, false, F16), "rotary_fusion",
                  "input %0 x bfloat16[3, 6] grad\n"
                  "input %1 c float32[6]\n"
                  "input %2 s float32[3, 6]\n"
                  "%3 = Rotary(%0 x, %1 c, %2 s, wide=1) float32[3, 6]\n"
                  "%4 = Cast(%3, to=10) float16[3, 6]\n"
                  "output %4\n");
    ctx_release(&c);
}

TEST(a_turn_that_is_seen_in_both_types_is_stored_in_both) {
    ctx c;
    graph *g = turned_wide(&c, false, F32);

    make_output(g, cast(g, g->outputs[0], BF16));
    check_rewrite(g, "rotary_fusion",
                  "input %0 x bfloat16[3, 6] grad\n"
                  "input %1 c float32[6]\n"
                  "input %2 s float32[3, 6]\n"
                  "%3 = Rotary(%0 x, %1 c, %2 s, wide=1) float32[3, 6]\n"
                  "%4 = Rotary(%0 x, %1 c, %2 s) bfloat16[3, 6]\n"
                  "output %3\n"
                  "output %4\n");
    ctx_release(&c);
}

/* --- early_cast --------------------------------------------------------------------------------------------------- */

/* x[2, 3, 5, 4] for groups of `times` heads: [2, 3 times, 5, 4]. */
static value *repeated(graph *g, value *x, int64_t times) {
    value *few = NODE(g, "Reshape", x, INT_LIST(g, 2, 3, 1, 5, 4));
    value *all = NODE(g, "Expand", few, INT_LIST(g, 2, 3, times, 5, 4));
    return NODE(g, "Reshape", all, INT_LIST(g, 2, 3 * times, 5, 4));
}

TEST(what_is_repeated_is_rounded_before) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    make_output(g, cast(g, repeated(g, NODE(g, "Neg", cast(g, INPUT(g, "x", BF16, 2, 3, 5, 4), F32)), 2), BF16));
    check_rewrite(g, "early_cast",
                  "input %0 x bfloat16[2, 3, 5, 4] grad\n"
                  "%1 = Cast(%0 x, to=1) float32[2, 3, 5, 4]\n"
                  "%2 = Neg(%1) float32[2, 3, 5, 4]\n"
                  "%3 = Cast(%2, to=16) bfloat16[2, 3, 5, 4]\n"
                  "%4 = Reshape(%3, [2, 3, 1, 5, 4], allowzero=1) bfloat16[2, 3, 1, 5, 4]\n"
                  "%5 = Expand(%4, [2, 3, 2, 5, 4]) bfloat16[2, 3, 2, 5, 4]\n"
                  "%6 = Reshape(%5, [2, 6, 5, 4], allowzero=1) bfloat16[2, 6, 5, 4]\n"
                  "output %6\n");
    ctx_release(&c);
}

/* Wider than before; of what others read repeated; of what is only turned; where a gradient of float32 would be rounded. */
TEST(casts_that_stay_where_they_are) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *seen = repeated(g, INPUT(g, "y", F32, 2, 3, 5, 4), 2);

    make_output(g, cast(g, repeated(g, INPUT(g, "x", BF16, 2, 3, 5, 4), 2), F32));
    make_output(g, seen);
    make_output(g, cast(g, seen, BF16));
    make_output(g, cast(g, NODE_WITH(g, "Transpose", PERM(1, 0), INPUT(g, "z", F32, 2, 3)), BF16));
    make_output(g, cast(g, repeated(g, NODE(g, "Neg", INPUT(g, "w", F32, 2, 3, 5, 4)), 2), BF16));
    check_untouched(g, "early_cast");
    ctx_release(&c);
}
