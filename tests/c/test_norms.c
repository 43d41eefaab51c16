/* test_norms.c -- tests norm_residual and embedding_norm: what stands around a norm, as text before and after. */
#include "build.h"
#include "test.h"

static value *dropped(graph *g, value *x) {
    return NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.25), INT("key", 7)), x);
}

static value *layer_norm(graph *g, value *x, value *w, value *b) {
    return NODE_WITH(g, "LayerNormalization", NODE_ATTRS(INT("axis", -1), FLOAT("epsilon", 0.5)), x, w, b);
}

static value *rms_norm(graph *g, value *x, value *w) {
    return NODE_WITH(g, "RMSNormalization", NODE_ATTRS(INT("axis", -1), FLOAT("epsilon", 0.5)), x, w);
}

TEST(a_residual_goes_into_the_norm) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *r = INPUT(g, "r", F32, 2, 3), *w = INPUT(g, "w", F32, 3);
    value *b = INPUT(g, "b", F32, 3), *sum = NODE(g, "Add", x, r);

    make_output(g, layer_norm(g, sum, w, b));
    make_output(g, NODE(g, "Softmax", sum));
    check_rewrite(g, "norm_residual",
                  "input %0 x float32[2, 3] grad\n"
                  "input %1 r float32[2, 3] grad\n"
                  "input %2 w float32[3] grad\n"
                  "input %3 b float32[3] grad\n"
                  "%4, %5, %6, %7, %8 = FusedNorm(%0 x, %2 w, %3 b, %1 r, axis=-1, epsilon=0.5, centred=1, narrow=0, "
                  "ratio=0, key=0) float32[2, 3], float32[2, 1], float32[2, 1], float32[2, 3]\n"
                  "%9 = Softmax(%7) float32[2, 3]\n"
                  "output %4\n"
                  "output %9\n");
    ctx_release(&c);
}

TEST(a_dropout_and_a_cast_before_the_residual_go_too) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", BF16, 2, 3), *r = INPUT(g, "r", F32, 2, 3), *w = INPUT(g, "w", F32, 3);

    make_output(g, rms_norm(g, NODE(g, "Add", r, cast(g, dropped(g, x), F32)), w));
    check_rewrite(g, "norm_residual",
                  "input %0 x bfloat16[2, 3] grad\n"
                  "input %1 r float32[2, 3] grad\n"
                  "input %2 w float32[3] grad\n"
                  "%3, %4, %5, %6, %7 = FusedNormRandom(%0 x, %2 w, -, %1 r, axis=-1, epsilon=0.5, centred=0, "
                  "narrow=0, ratio=0.25, key=7) float32[2, 3], float32[2, 1], float32[2, 1], float32[2, 3]\n"
                  "output %3\n");
    ctx_release(&c);
}

TEST(a_norm_is_stored_in_16_bits) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *w = INPUT(g, "w", F32, 3), *y = rms_norm(g, x, w);

    make_output(g, NODE(g, "Softmax", cast(g, NODE(g, "Reshape", y, INT_LIST(g, 8, 3)), BF16)));
    make_output(g, NODE(g, "Softmax", cast(g, y, BF16)));
    check_rewrite(g, "norm_residual",
                  "input %0 x float32[2, 4, 3] grad\n"
                  "input %1 w float32[3] grad\n"
                  "%2, %3, %4, %5, %6 = FusedNorm(%0 x, %1 w, axis=-1, epsilon=0.5, centred=0, narrow=3, ratio=0, "
                  "key=0) float32[2, 4, 3], float32[2, 4, 1], float32[2, 4, 1], bfloat16[2, 4, 3]\n"
                  "%7 = Reshape(%6, [8, 3], allowzero=1) bfloat16[8, 3]\n"
                  "%8 = Softmax(%7) bfloat16[8, 3]\n"
                  "%9 = Softmax(%6) bfloat16[2, 4, 3]\n"
                  "output %8\n"
                  "output %9\n");
    ctx_release(&c);
}

/* What a chain makes; what is broadcast; what a Transpose leaves where it is; a sum that is read before the norm is
 * there, or is what the norm scales with; a norm that only a chain reads in 16 bits, and one wider than float32. */
TEST(norms_that_stay) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3, 3), *r = INPUT(g, "r", F32, 3, 3), *w = INPUT(g, "w", F32, 3);
    value *wide = INPUT(g, "wide", F64, 3, 3), *w64 = INPUT(g, "w64", F64, 3), *sum;

    make_output(g, rms_norm(g, NODE(g, "Add", NODE(g, "Exp", x), r), w));
    make_output(g, rms_norm(g, NODE(g, "Add", x, w), w));
    make_output(g, rms_norm(g, NODE(g, "Add", x, NODE(g, "Transpose", r)), w));
    sum = NODE(g, "Add", x, r);
    make_output(g, rms_norm(g, sum, NODE(g, "ReduceMax", sum, INT_LIST(g, 0))));
    sum = NODE(g, "Add", w, INPUT(g, "q", F32, 3));
    make_output(g, rms_norm(g, sum, sum));
    make_output(g, NODE(g, "Tanh", cast(g, rms_norm(g, r, w), BF16)));
    make_output(g, cast(g, rms_norm(g, wide, w64), BF16));
    check_untouched(g, "norm_residual");
    ctx_release(&c);
}

/* --- backward ----------------------------------------------------------------------------------------------------- */

static value *layer_norm_grad(graph *g, value *dy, value *x, value *w, value *row) {
    return NODE_WITH(g, "LayerNormGrad", NODE_ATTRS(INT("axis", -1)), dy, x, w, row, row);
}

#define GRADIENT_INPUTS                                                                                                \
    "input %0 x float32[2, 3] grad\n"                                                                                  \
    "input %1 w float32[3] grad\n"                                                                                     \
    "input %2 row float32[2, 1] grad\n"                                                                                \
    "input %3 dy bfloat16[2, 3] grad\n"                                                                                \
    "input %4 ds float32[2, 3] grad\n"

TEST(the_gradient_along_the_residual_is_added_by_the_norm) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *w = INPUT(g, "w", F32, 3), *row = INPUT(g, "row", F32, 2, 1);
    value *dy = INPUT(g, "dy", BF16, 2, 3), *ds = INPUT(g, "ds", F32, 2, 3);

    make_output(g, x);
    g->in_backward = true;
    make_gradient(g, 0, NODE(g, "Add", ds, layer_norm_grad(g, cast(g, dy, F32), x, w, row)));
    g->in_backward = false;
    check_rewrite(g, "norm_residual",
                  GRADIENT_INPUTS
                  "backward\n"
                  "%5, %6, %7 = LayerNormGrad(%3 dy, %0 x, %1 w, %2 row, %2 row, %4 ds, axis=-1) float32[2, 3], "
                  "float32[3], float32[3]\n"
                  "output %0 x\n"
                  "grad %0 x <- %5\n");
    ctx_release(&c);
}

/* One that a chain makes; one that is there later. */
TEST(gradients_that_stay_beside_the_norm) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *w = INPUT(g, "w", F32, 3), *row = INPUT(g, "row", F32, 2, 1);
    value *ds = INPUT(g, "ds", F32, 2, 3), *dx;

    make_output(g, x);
    g->in_backward = true;
    make_gradient(g, 0, NODE(g, "Add", NODE(g, "Exp", ds), layer_norm_grad(g, ds, x, w, row)));
    dx = layer_norm_grad(g, x, x, w, row);
    make_gradient(g, 3, NODE(g, "Add", dx, NODE(g, "Softmax", ds)));
    g->in_backward = false;
    check_untouched(g, "norm_residual");
    ctx_release(&c);
}

/* --- embeddings --------------------------------------------------------------------------------------------------- */

static value *rows_of(graph *g, value *table, value *index) {
    return NODE_WITH(g, "Gather", NODE_ATTRS(INT("axis", 0)), table, index);
}

/* Positions are the same for each sequence; the sum is read by others, too. Words do not count from the end. */
TEST(embeddings_go_into_the_norm_of_their_sum) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *words = INPUT(g, "words", F32, 9, 3), *types = INPUT(g, "types", F32, 2, 3);
    value *places = INPUT(g, "places", F32, 1, 4, 3), *w = INPUT(g, "w", F32, 3), *b = INPUT(g, "b", F32, 3);
    value *ids = INPUT(g, "ids", I64, 2, 4), *kinds = INPUT(g, "kinds", I32, 2, 4);
    value *word = NODE_WITH(g, "Gather", NODE_ATTRS(INT("axis", 0), INT("from_end", 0)), words, ids);
    value *sum = NODE(g, "Add", places, NODE(g, "Add", word, rows_of(g, types, kinds)));

    make_output(g, layer_norm(g, sum, w, b));
    make_output(g, NODE(g, "Softmax", sum));
    check_rewrite(g, "embedding_norm",
                  "input %0 words float32[9, 3] grad\n"
                  "input %1 types float32[2, 3] grad\n"
                  "input %2 places float32[1, 4, 3] grad\n"
                  "input %3 w float32[3] grad\n"
                  "input %4 b float32[3] grad\n"
                  "input %5 ids int64[2, 4]\n"
                  "input %6 kinds int32[2, 4]\n"
                  "%7, %8, %9, %10 = EmbeddingNorm(%3 w, %4 b, %0 words, %5 ids, %1 types, %6 kinds, %2 places, "
                  "shape=[2, 4, 3], epsilon=0.5, from_end=2) float32[2, 4, 3], float32[2, 4, 1], float32[2, 4, 1], "
                  "float32[2, 4, 3]\n"
                  "%11 = Softmax(%10) float32[2, 4, 3]\n"
                  "output %7\n"
                  "output %11\n");
    ctx_release(&c);
}

/* Nothing is selected; a selection that others read, along another axis; another norm; rows that do not repeat; addends
 * that a chain adds up. */
TEST(sums_that_stay_before_the_norm) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *few = INPUT(g, "few", F32, 2, 1, 3), *row = INPUT(g, "row", F32, 4, 3);
    value *w = INPUT(g, "w", F32, 3), *b = INPUT(g, "b", F32, 3), *ids = INPUT(g, "ids", I64, 2, 4);
    value *three = INPUT(g, "three", I64, 3), *words[7], *seen;

    for (int i = 0; i < 7; i++) words[i] = INPUT(g, "words", F32, 4, 3);
    make_output(g, layer_norm(g, NODE(g, "Add", x, row), w, b));
    make_output(g, seen = rows_of(g, words[0], ids));
    make_output(g, layer_norm(g, NODE(g, "Add", seen, x), w, b));
    make_output(
        g,
        layer_norm(g, NODE(g, "Add", row, NODE_WITH(g, "Gather", NODE_ATTRS(INT("axis", 1)), words[1], three)), w, b));
    make_output(g, rms_norm(g, NODE(g, "Add", x, rows_of(g, words[2], ids)), w));
    make_output(g, layer_norm(g, NODE(g, "Add", few, rows_of(g, words[3], ids)), w, b));
    make_output(g, layer_norm(g, NODE(g, "Add", NODE(g, "Exp", x), rows_of(g, words[4], ids)), w, b));
    make_output(g, layer_norm(g,
                              NODE(g, "Add", NODE(g, "Add", rows_of(g, words[5], ids), x),
                                   NODE(g, "Add", rows_of(g, words[6], ids), x)),
                              w, b));
    check_untouched(g, "embedding_norm");
    ctx_release(&c);
}
