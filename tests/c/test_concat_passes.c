/* test_concat_passes.c -- tests slices and concatenations that undo each other, as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

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

/* --- concat_slices -------------------------------------------------------------------------------------------------- */

/* x[2, n] from column `from` on, every `step`-th, `count` of them. */
static value *columns(graph *g, value *x, int64_t from, int64_t count, int64_t step) {
    const int64_t starts[] = {0, from}, counts[] = {2, count}, steps[] = {1, step};
    return NODE_WITH(g, "StridedSlice",
                     NODE_ATTRS(INTS("starts", 2, starts), INTS("counts", 2, counts), INTS("steps", 2, steps)), x);
}

static value *side_by_side(graph *g, value *a, value *b) {
    return NODE_WITH(g, "Concat", NODE_ATTRS(INT("axis", -1)), a, b);
}

#define SLICE(of, from, count, step)                                                                                   \
    "StridedSlice(" of ", starts=[0, " from "], counts=[2, " count "], steps=[1, " step "]) float32[2, " count "]\n"

TEST(a_slice_of_one_operand_is_cut_out_of_that) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 5), *y = INPUT(g, "y", F32, 2, 3), *z = INPUT(g, "z", F32, 2, 4);
    value *both = side_by_side(g, x, y), *all = side_by_side(g, both, z);

    make_output(g, columns(g, both, 0, 5, 1));
    make_output(g, NODE(g, "Neg", columns(g, both, 4, 3, -2)));
    make_output(g, NODE(g, "Abs", columns(g, all, 5, 2, 1)));  /* of y, through both */
    make_output(g, NODE(g, "Exp", columns(g, all, 4, 3, 1)));  /* of x and y: of both */
    make_output(g, NODE(g, "Sin", columns(g, all, 7, 2, 1)));  /* of y and z: of all */
    make_output(g, NODE(g, "Cos", columns(g, all, 8, 2, -1))); /* the same, backwards */
    check_rewrite(
        g, "concat_slices",
        "input %0 x float32[2, 5] grad\n"
        "input %1 y float32[2, 3] grad\n"
        "input %2 z float32[2, 4] grad\n"
        "%3 = Concat(%0 x, %1 y, axis=-1) float32[2, 8]\n"
        "%4 = Concat(%3, %2 z, axis=-1) float32[2, 12]\n"
        "%5 = " SLICE("%0 x", "4", "3",
                      "-2") "%6 = Neg(%5) float32[2, 3]\n"
                            "%7 = " SLICE("%1 y", "0", "2",
                                          "1") "%8 = Abs(%7) float32[2, 2]\n"
                                               "%9 = " SLICE("%3", "4", "3",
                                                             "1") "%10 = Exp(%9) float32[2, 3]\n"
                                                                  "%11 = " SLICE(
                                                                      "%4", "7", "2",
                                                                      "1") "%12 = Sin(%11) float32[2, 2]\n"
                                                                           "%13 = " SLICE(
                                                                               "%4", "8", "2",
                                                                               "-1") "%14 = Cos(%13) float32[2, 2]\n"
                                                                                     "output %0 x\n"
                                                                                     "output %6\n"
                                                                                     "output %8\n"
                                                                                     "output %10\n"
                                                                                     "output %12\n"
                                                                                     "output %14\n");
    ctx_release(&c);
}

TEST(neighbouring_slices_are_one) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 6), *y = INPUT(g, "y", F32, 2, 3);
    value *parts[] = {y, columns(g, x, 1, 1, 1), columns(g, x, 2, 2, 1), columns(g, x, 4, 2, 1), y}, *all;

    make_output(g, side_by_side(g, columns(g, x, 0, 2, 1), columns(g, x, 2, 4, 1)));
    CHECK_OK(&c, graph_emit(g, "Concat", NODE_ATTRS(INT("axis", 1)), 5, parts, 1, &all));
    make_output(g, all);
    check_rewrite(g, "concat_slices",
                  "input %0 x float32[2, 6] grad\n"
                  "input %1 y float32[2, 3] grad\n"
                  "%2 = " SLICE("%0 x", "1", "5", "1") "%3 = Concat(%1 y, %2, %1 y, axis=1) float32[2, 11]\n"
                                                       "output %0 x\n"
                                                       "output %3\n");
    ctx_release(&c);
}

TEST(other_slices_stay_joined) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 5), *y = INPUT(g, "y", F32, 2, 3);

    /* With a gap, in turns, in another order, of another value, along another axis. */
    make_output(g, side_by_side(g, columns(g, x, 0, 2, 1), columns(g, x, 3, 2, 1)));
    make_output(g, side_by_side(g, columns(g, x, 0, 2, 2), columns(g, x, 3, 2, 1)));
    make_output(g, side_by_side(g, columns(g, x, 2, 3, 1), columns(g, x, 0, 2, 1)));
    make_output(g, side_by_side(g, columns(g, x, 0, 2, 1), columns(g, y, 2, 1, 1)));
    make_output(g, NODE_WITH(g, "Concat", NODE_ATTRS(INT("axis", 0)), columns(g, x, 0, 2, 1), columns(g, x, 2, 2, 1)));
    check_untouched(g, "concat_slices");
    ctx_release(&c);
}

/* A value that is split and joined: what concat_gradient has joined is cut into the same pieces again. */
TEST(pieces_of_a_joined_gradient_are_the_pieces) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 2, 2), *b = INPUT(g, "b", F32, 2, 4);
    value *sum = NODE(g, "Add", place(g, a, 0), place(g, b, 2));
    int fired[MAX_PASSES] = {0};

    make_output(g, NODE(g, "Neg", columns(g, sum, 0, 2, 1)));
    make_output(g, NODE(g, "Exp", columns(g, sum, 3, 2, 1)));
    CHECK_OK(&c, passes_run(g, AFTER_GRADIENT, ~(pass_bit("concat_gradient") | pass_bit("concat_slices")), fired));
    CHECK_OK(&c, graph_verify(g));
    CHECK_TEXT(g, "input %0 a float32[2, 2] grad\n"
                  "input %1 b float32[2, 4] grad\n"
                  "%2 = Neg(%0 a) float32[2, 2]\n"
                  "%3 = " SLICE("%1 b", "1", "2", "1") "%4 = Exp(%3) float32[2, 2]\n"
                                                       "output %2\n"
                                                       "output %4\n");
    ctx_release(&c);
}
