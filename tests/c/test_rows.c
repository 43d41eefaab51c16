/* test_rows.c -- passes that compute some rows only, as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

/* Runs one pass alone on `g`, with one size known, and expects the text `after`. */
static void check_pass(graph *g, const char *name, int64_t rows, const char *after) {
    g->sizes = &rows;
    g->n_sizes = 1;
    CHECK(pass_bit(name) != 0);
    CHECK_OK(g->c, passes_run(g, BEFORE_GRADIENT, ~pass_bit(name), NULL));
    CHECK_OK(g->c, graph_verify(g));
    CHECK_TEXT(g, after);
}

static value *layer(graph *g, value *x, const char *name, int64_t in, int64_t out) {
    return NODE(g, "Gelu", NODE(g, "MatMul", x, make_input(g, name, F32, SHAPE(in, out))));
}

/* --- label_sparsity ------------------------------------------------------------------------------------------------- */

#define LOSS_INPUTS                                                                                                    \
    "input %0 x float32[4, 32, 3] grad\n"                                                                              \
    "input %1 labels int64[128]\n"                                                                                     \
    "input %2 w float32[3, 5] grad\n"

static value *make_loss(graph *g, value **hidden) {
    value *x = INPUT(g, "x", F32, 4, 32, 3), *labels = INPUT(g, "labels", I64, 128);
    value *scores;

    *hidden = layer(g, x, "w", 3, 5);
    scores = NODE(g, "Reshape", *hidden, INT_LIST(g, 128, 5));
    return NODE_WITH(g, "CrossEntropy", NODE_ATTRS(STRING("reduction", "mean"), INT("ignore_index", -100)), scores,
                     labels);
}

TEST(rows_with_ignored_labels_are_not_computed) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *hidden;

    make_output(g, make_loss(g, &hidden));
    check_pass(g, "label_sparsity", 3,
               LOSS_INPUTS "%3 = Equal(%1 labels, -100) bool[128]\n"
                           "%4 = Not(%3) bool[128]\n"
                           "%5 = RowIndex(%4, count=3) int64[3]\n"
                           "%6 = Reshape(%0 x, [128, 3], allowzero=1) float32[128, 3]\n"
                           "%7 = PackRows(%6, %5) float32[3, 3]\n"
                           "%8 = MatMul(%7, %2 w) float32[3, 5]\n"
                           "%9 = Gelu(%8) float32[3, 5]\n"
                           "%10 = PackRows(%1 labels, %5, repeat=0, filler=-100) int64[3]\n"
                           "%11, %12, %13 = CrossEntropy(%9, %10, reduction=\"mean\", ignore_index=-100) float32[], "
                           "float64[3], float64[]\n"
                           "output %11\n");
    ctx_release(&c);
}

TEST(scores_that_are_seen_and_losses_with_most_labels_stay) {
    for (int seen = 0; seen < 2; seen++) {
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *hidden, *loss = make_loss(g, &hidden);

        make_output(g, loss);
        if (seen) make_output(g, hidden);
        check_pass(g, "label_sparsity", seen ? 3 : 128, graph_text(g));
        ctx_release(&c);
    }
}

TEST(a_number_of_rows_that_is_not_known_is_asked_for) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *hidden;

    make_output(g, make_loss(g, &hidden));
    CHECK(passes_run(g, BEFORE_GRADIENT, ~pass_bit("label_sparsity"), NULL) == E_PENDING);
    CHECK(g->pending && strcmp(g->pending->def->op->name, "RowCount") == 0);
    ctx_release(&c);
}

/* --- row_selection -------------------------------------------------------------------------------------------------- */

TEST(a_selection_moves_up) {
    const int64_t starts[] = {0, 0, 0}, counts[] = {2, 1, 5}, steps[] = {1, 1, 1};
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *bias = INPUT(g, "bias", F32, 1, 4, 5), *y;

    y = NODE(g, "Add", NODE(g, "MatMul", x, INPUT(g, "w", F32, 3, 5)), bias);
    y = NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.5), INT("key", 0)), y);
    make_output(g, NODE_WITH(g, "StridedSlice",
                             NODE_ATTRS(INTS("starts", 3, starts), INTS("counts", 3, counts), INTS("steps", 3, steps)),
                             y));
    check_pass(g, "row_selection", 0,
               "input %0 x float32[2, 4, 3] grad\n"
               "input %1 bias float32[1, 4, 5] grad\n"
               "input %2 w float32[3, 5] grad\n"
               "%3 = Reshape(%0 x, [8, 3], allowzero=1) float32[8, 3]\n"
               "%4 = StridedSlice(%3, starts=[0, 0], counts=[2, 3], steps=[4, 1]) float32[2, 3]\n"
               "%5 = MatMul(%4, %2 w) float32[2, 5]\n"
               "%6 = Expand(%1 bias, [2, 4, 5]) float32[2, 4, 5]\n"
               "%7 = Reshape(%6, [8, 5], allowzero=1) float32[8, 5]\n"
               "%8 = StridedSlice(%7, starts=[0, 0], counts=[2, 5], steps=[4, 1]) float32[2, 5]\n"
               "%9 = Add(%5, %8) float32[2, 5]\n"
               "%10 = DropoutTrain(%9, [0, 4], ratio=0.5, key=0) float32[2, 5]\n"
               "%11 = Reshape(%10, [2, 1, 5], allowzero=1) float32[2, 1, 5]\n"
               "output %11\n");
    ctx_release(&c);
}

TEST(a_selection_of_what_mixes_rows_stays) {
    const int64_t starts[] = {0, 0, 0}, counts[] = {2, 1, 3}, steps[] = {1, 1, 1};
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 4, 3), *p = INPUT(g, "p", F32, 2, 4, 4);

    make_output(g, NODE_WITH(g, "StridedSlice",
                             NODE_ATTRS(INTS("starts", 3, starts), INTS("counts", 3, counts), INTS("steps", 3, steps)),
                             NODE(g, "MatMul", p, x)));
    check_pass(g, "row_selection", 0, graph_text(g));
    ctx_release(&c);
}
