/* test_rows.c -- tests passes that compute some rows only, as text before and after. */
#include "build.h"
#include "copies.h"
#include "passes/pipeline.h"
#include "test.h"

/* Runs one pass alone on `g`, with one size known, and expects the text `after`. */
static void check_pass(graph *g, const char *name, int64_t rows, const char *after) {
    g->sizes = &rows;
    g->n_sizes = 1;
    CHECK(pass_bit(name) != 0);
    check_copies(g, name);
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

/* --- shifted_loss --------------------------------------------------------------------------------------------------- */

/* The loss of a language model: scores of all tokens but the last of each sequence, in a wider type. */
static value *shifted(graph *g, int64_t length, int64_t taken) {
    const int64_t starts[] = {0, 0, 0}, counts[] = {2, taken, 5}, steps[] = {1, 1, 1};
    value *x = INPUT(g, "x", BF16, 2, length, 5), *labels = INPUT(g, "labels", I64, 2 * taken);

    x = NODE_WITH(g, "StridedSlice",
                  NODE_ATTRS(INTS("starts", 3, starts), INTS("counts", 3, counts), INTS("steps", 3, steps)), x);
    x = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 1)), NODE(g, "Reshape", x, INT_LIST(g, 2 * taken, 5)));
    return NODE_WITH(g, "CrossEntropy", NODE_ATTRS(STRING("reduction", "mean"), INT("ignore_index", -100)), x, labels);
}

TEST(a_shifted_loss_takes_all_rows) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    make_output(g, shifted(g, 16, 15));
    check_pass(g, "shifted_loss", 0,
               "input %0 x bfloat16[2, 16, 5] grad\n"
               "input %1 labels int64[30]\n"
               "%2 = Reshape(%1 labels, [2, 15], allowzero=1) int64[2, 15]\n"
               "%3 = Place(%2, -100, starts=[0, 0], shape=[2, 16], steps=[1, 1]) int64[2, 16]\n"
               "%4 = Reshape(%3, [32], allowzero=1) int64[32]\n"
               "%5 = Cast(%0 x, to=1) float32[2, 16, 5]\n"
               "%6 = Reshape(%5, [32, 5], allowzero=1) float32[32, 5]\n"
               "%7, %8, %9 = CrossEntropy(%6, %4, reduction=\"mean\", ignore_index=-100) float32[], "
               "float64[32], float64[]\n"
               "output %7\n");
    ctx_release(&c);
}

TEST(a_loss_of_few_rows_stays) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    make_output(g, shifted(g, 16, 14));
    check_pass(g, "shifted_loss", 0, graph_text(g));
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

/* --- padding_removal ------------------------------------------------------------------------------------------------ */

/* Attention with one head of all width over an embedding of 8 * 16 tokens, then a layer; `mask` NULL: over all. */
static value *encoder(graph *g, value *ids, value *mask) {
    value *x = NODE(g, "Gather", INPUT(g, "table", F32, 9, 4), ids), *heads, *weights;

    x = layer(g, x, "w", 4, 4);
    heads = NODE(g, "Reshape", x, INT_LIST(g, 8, 1, 16, 4));
    weights = NODE(g, "MatMul", heads,
                   NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 4, ((const int64_t[]){0, 1, 3, 2}))), heads));
    weights = mask ? NODE(g, "MaskedSoftmax", weights, NODE(g, "Reshape", mask, INT_LIST(g, 8, 1, 1, 16)))
                   : NODE(g, "MaskedSoftmax", weights);
    x = NODE(g, "Reshape", NODE(g, "MatMul", weights, heads), INT_LIST(g, 8, 16, 4));
    return layer(g, x, "v", 4, 3);
}

/* The sum over tokens of x, those that the mask hides left out. */
static value *pooled(graph *g, value *x, value *mask) {
    value *factor = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", 1)), NODE(g, "Reshape", mask, INT_LIST(g, 8, 16, 1)));
    return NODE_WITH(g, "ReduceSum", NODE_ATTRS(INT("keepdims", 0)), NODE(g, "Mul", x, factor), INT_LIST(g, 1));
}

TEST(tokens_that_are_not_seen_are_not_computed) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *ids = INPUT(g, "ids", I64, 8, 16), *mask = INPUT(g, "mask", BOOL, 8, 16);

    make_output(g, pooled(g, encoder(g, ids, mask), mask));
    check_pass(g, "padding_removal", 40,
               "input %0 ids int64[8, 16]\n"
               "input %1 mask bool[8, 16]\n"
               "input %2 table float32[9, 4] grad\n"
               "input %3 w float32[4, 4] grad\n"
               "input %4 v float32[4, 3] grad\n"
               "%5 = Reshape(%1 mask, [8, 1, 1, 16], allowzero=1) bool[8, 1, 1, 16]\n"
               "%6 = Reshape(%1 mask, [8, 16, 1], allowzero=1) bool[8, 16, 1]\n"
               "%7 = Cast(%6, to=1) float32[8, 16, 1]\n"
               "%8 = Reshape(%1 mask, [128], allowzero=1) bool[128]\n"
               "%9 = RowIndex(%8, count=40) int64[40]\n"
               "%10 = CheckedIndex(%0 ids, size=9, from_end=1) int64[8, 16]\n"
               "%11 = Reshape(%10, [128], allowzero=1) int64[128]\n"
               "%12 = PackRows(%11, %9) int64[40]\n"
               "%13 = Gather(%2 table, %12) float32[40, 4]\n"
               "%14 = MatMul(%13, %3 w) float32[40, 4]\n"
               "%15 = Gelu(%14) float32[40, 4]\n"
               "%16 = UnpackRows(%15, %9, size=128) float32[128, 4]\n"
               "%17 = Reshape(%16, [8, 16, 4], allowzero=1) float32[8, 16, 4]\n"
               "%18 = Reshape(%17, [8, 1, 16, 4], allowzero=1) float32[8, 1, 16, 4]\n"
               "%19 = Transpose(%18, perm=[0, 1, 3, 2]) float32[8, 1, 4, 16]\n"
               "%20 = MatMul(%18, %19) float32[8, 1, 16, 16]\n"
               "%21 = MaskedSoftmax(%20, %5) float32[8, 1, 16, 16]\n"
               "%22 = MatMul(%21, %18) float32[8, 1, 16, 4]\n"
               "%23 = Reshape(%22, [128, 4], allowzero=1) float32[128, 4]\n"
               "%24 = PackRows(%23, %9) float32[40, 4]\n"
               "%25 = MatMul(%24, %4 v) float32[40, 3]\n"
               "%26 = Gelu(%25) float32[40, 3]\n"
               "%27 = Reshape(%7, [128, 1], allowzero=1) float32[128, 1]\n"
               "%28 = PackRows(%27, %9) float32[40, 1]\n"
               "%29 = Mul(%26, %28) float32[40, 3]\n"
               "%30 = UnpackRows(%29, %9, size=128) float32[128, 3]\n"
               "%31 = Reshape(%30, [8, 16, 3], allowzero=1) float32[8, 16, 3]\n"
               "%32 = ReduceSum(%31, [1], keepdims=0) float32[8, 3]\n"
               "output %32\n");
    ctx_release(&c);
}

TEST(tokens_that_are_seen_stay) {
    for (int way = 0; way < 3; way++) { /* no mask; a look at all; so many that it does not pay */
        ctx c;
        ctx_init(&c);
        graph *g = new_graph(&c);
        value *ids = INPUT(g, "ids", I64, 8, 16), *mask = INPUT(g, "mask", BOOL, 8, 16);
        value *other = INPUT(g, "other", BOOL, 8, 16), *x = encoder(g, ids, way == 0 ? NULL : mask);

        make_output(g, pooled(g, x, way == 2 ? other : mask));
        if (way == 1) make_output(g, NODE_WITH(g, "ReduceMax", NODE_ATTRS(INT("keepdims", 0)), x, INT_LIST(g, 1)));
        g->sizes = (const int64_t[]){128};
        g->n_sizes = way == 2;
        CHECK_OK(&c, passes_run(g, BEFORE_GRADIENT, ~pass_bit("padding_removal"), NULL));
        CHECK(count_nodes(g, "RowIndex") == 0 && count_nodes(g, "PackRows") == 0);
        ctx_release(&c);
    }
}
