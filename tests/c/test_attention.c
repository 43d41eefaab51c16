/* test_attention.c -- tests the passes that make attention one operator, as text before and after. */
#include "build.h"
#include "passes/pipeline.h"
#include "test.h"

/* q k' softmax, then v: the scores' shape is [2, heads, queries, keys]. */
static value *weights_of(graph *g, value *q, value *k) {
    value *keys = NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 4, ((const int64_t[]){0, 1, 3, 2}))), k);
    value *scores = NODE_WITH(g, "MatMulBias", NODE_ATTRS(FLOAT("alpha", 0.5)), q, keys);
    return NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", -1)), scores);
}

/* [B, S, H, D] as [B, H, S, D], and back */
static value *turned(graph *g, value *x) {
    return NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 4, ((const int64_t[]){0, 2, 1, 3}))), x);
}

#define THREE(queries, keys)                                                                                           \
    "input %0 q float32[2, " queries ", 3, 4] grad\n"                                                                  \
    "input %1 k float32[2, " keys ", 3, 4] grad\n"                                                                     \
    "input %2 v float32[2, " keys ", 3, 5] grad\n"

TEST(attention_is_one_operator_of_tokens) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 6, 3, 4)), *k = turned(g, INPUT(g, "k", F32, 2, 7, 3, 4));
    value *v = turned(g, INPUT(g, "v", F32, 2, 7, 3, 5));

    make_output(g, NODE(g, "MatMul", weights_of(g, q, k), v));
    check_rewrite(
        g, "efficient_attention",
        THREE(
            "6",
            "7") "%3, %4 = FusedAttention(%0 q, %1 k, %2 v, scale=0.5, ratio=0, key=0, safe=0, torch=0, lists=0, batch=0, queries=0, keys=0) "
                 "float32[2, 6, 3, 5], float32[2, 6, 3, 2]\n"
                 "%5 = Transpose(%3, perm=[0, 2, 1, 3]) float32[2, 3, 6, 5]\n"
                 "output %5\n");
    ctx_release(&c);
}

TEST(attention_takes_mask_bias_and_dropout) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 6, 3, 4)), *k = turned(g, INPUT(g, "k", F32, 2, 7, 3, 4));
    value *v = turned(g, INPUT(g, "v", F32, 2, 7, 3, 5)), *allowed = INPUT(g, "allowed", BOOL, 2, 1, 1, 7);
    value *bias = INPUT(g, "bias", F32, 3, 6, 7), *x = weights_of(g, q, k)->def->in[0];

    x = NODE(g, "MaskedSoftmax", NODE(g, "Add", bias, x), allowed);
    x = NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.25), INT("key", 9)), x);
    make_output(g, NODE(g, "MatMul", x, v));
    graph_remove_dead(g);
    check_rewrite(
        g, "efficient_attention",
        THREE(
            "6",
            "7") "input %3 allowed bool[2, 1, 1, 7]\n"
                 "input %4 bias float32[3, 6, 7] grad\n"
                 "%5, %6 = FusedAttention(%0 q, %1 k, %2 v, %3 allowed, %4 bias, scale=0.5, "
                 "ratio=0.25, key=9, safe=1, torch=0, lists=0, batch=0, queries=0, keys=0) float32[2, 6, 3, 5], float32[2, 6, 3, 2]\n"
                 "%7 = Transpose(%5, perm=[0, 2, 1, 3]) float32[2, 3, 6, 5]\n"
                 "output %7\n");
    ctx_release(&c);
}

/* [2, S, G, D], each head repeated for a group of queries' heads: [2, heads, S, D] */
static value *repeated(graph *g, value *x, int64_t heads) {
    const int64_t tokens = x->shape.dim[1], groups = x->shape.dim[2], width = x->shape.dim[3];
    value *more = NODE(g, "Reshape", turned(g, x), INT_LIST(g, 2, groups, 1, tokens, width));
    more = NODE(g, "Expand", more, INT_LIST(g, 2, groups, heads / groups, tokens, width));
    return NODE(g, "Reshape", more, INT_LIST(g, 2, heads, tokens, width));
}

TEST(attention_takes_keys_before_they_are_repeated) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 6, 3, 4)), *k = repeated(g, INPUT(g, "k", F32, 2, 7, 1, 4), 3);
    value *v = repeated(g, INPUT(g, "v", F32, 2, 7, 1, 5), 3);

    make_output(g, NODE(g, "MatMul", weights_of(g, q, k), v));
    check_rewrite(
        g, "efficient_attention",
        "input %0 q float32[2, 6, 3, 4] grad\n"
        "input %1 k float32[2, 7, 1, 4] grad\n"
        "input %2 v float32[2, 7, 1, 5] grad\n"
        "%3, %4 = FusedAttention(%0 q, %1 k, %2 v, scale=0.5, ratio=0, key=0, safe=0, torch=0, lists=0, batch=0, queries=0, keys=0) "
        "float32[2, 6, 3, 5], float32[2, 6, 3, 2]\n"
        "%5 = Transpose(%3, perm=[0, 2, 1, 3]) float32[2, 3, 6, 5]\n"
        "output %5\n");
    ctx_release(&c);
}

/* Groups of keys and of values differ, so that all heads have to be there: on a GPU they are repeated tokens first, in the
 * one copy that attention reads. */
TEST(heads_are_repeated_tokens_first) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 5, 6, 4)), *k = repeated(g, INPUT(g, "k", F32, 2, 7, 2, 4), 6);
    value *v = repeated(g, INPUT(g, "v", F32, 2, 7, 3, 4), 6);

    g->cuda = true;
    make_output(g, NODE(g, "MatMul", weights_of(g, q, k), v));
    check_rewrite(
        g, "efficient_attention",
        "input %0 q float32[2, 5, 6, 4] grad\n"
        "input %1 k float32[2, 7, 2, 4] grad\n"
        "input %2 v float32[2, 7, 3, 4] grad\n"
        "%3 = Reshape(%1 k, [2, 7, 2, 1, 4], allowzero=1) float32[2, 7, 2, 1, 4]\n"
        "%4 = Expand(%3, [2, 7, 2, 3, 4]) float32[2, 7, 2, 3, 4]\n"
        "%5 = Reshape(%4, [2, 7, 6, 4], allowzero=1) float32[2, 7, 6, 4]\n"
        "%6 = Reshape(%2 v, [2, 7, 3, 1, 4], allowzero=1) float32[2, 7, 3, 1, 4]\n"
        "%7 = Expand(%6, [2, 7, 3, 2, 4]) float32[2, 7, 3, 2, 4]\n"
        "%8 = Reshape(%7, [2, 7, 6, 4], allowzero=1) float32[2, 7, 6, 4]\n"
        "%9, %10 = FusedAttention(%0 q, %5, %8, scale=0.5, ratio=0, key=0, safe=0, torch=0, lists=0, batch=0, queries=0, keys=0) "
        "float32[2, 5, 6, 4], float32[2, 5, 6, 2]\n"
        "%11 = Transpose(%9, perm=[0, 2, 1, 3]) float32[2, 6, 5, 4]\n"
        "output %11\n");
    ctx_release(&c);
}

TEST(short_attention_stays_as_it_is) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 6, 3, 4)), *k = turned(g, INPUT(g, "k", F32, 2, 7, 3, 4));

    make_output(g, NODE(g, "MatMul", weights_of(g, q, k), k));
    check_untouched(g, "attention_fusion");
    ctx_release(&c);
}

TEST(long_attention_is_one_operator) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 1100, 3, 4)), *k = turned(g, INPUT(g, "k", F32, 2, 1200, 3, 4));
    value *v = turned(g, INPUT(g, "v", F32, 2, 1200, 3, 5));

    make_output(g, NODE(g, "MatMul", weights_of(g, q, k), v));
    check_rewrite(
        g, "attention_fusion",
        THREE(
            "1100",
            "1200") "%3, %4 = FusedAttention(%0 q, %1 k, %2 v, scale=0.5, ratio=0, key=0, safe=0, torch=0, lists=0, batch=0, queries=0, keys=0) "
                    "float32[2, 1100, 3, 5], float32[2, 1100, 3, 2]\n"
                    "%5 = Transpose(%3, perm=[0, 2, 1, 3]) float32[2, 3, 1100, 5]\n"
                    "output %5\n");
    ctx_release(&c);
}

TEST(attention_whose_weights_are_seen_stays) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", F32, 2, 6, 3, 4)), *k = turned(g, INPUT(g, "k", F32, 2, 7, 3, 4));
    value *weights = weights_of(g, q, k);

    make_output(g, weights);
    make_output(g, NODE(g, "MatMul", weights, k));
    check_untouched(g, "efficient_attention");
    ctx_release(&c);
}

/* A pass for GPUs, and for torch's kernels: without them dropout stays as it is. */
TEST(flash_dropout_needs_torch) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = turned(g, INPUT(g, "q", BF16, 2, 2048, 3, 8)), *k = turned(g, INPUT(g, "k", BF16, 2, 2048, 3, 8));
    value *x = NODE_WITH(g, "DropoutTrain", NODE_ATTRS(FLOAT("ratio", 0.25), INT("key", 9)), weights_of(g, q, k));

    make_output(g, NODE(g, "MatMul", x, k));
    graph_remove_dead(g);
    check_untouched(g, "flash_dropout");
    ctx_release(&c);
}

/* --- attention_lengths -------------------------------------------------------------------------------------------- */

/* [5, 3, D] as rows of [2, 4, 3, D] */
static value *in_place(graph *g, value *x, value *rows) {
    value *all = NODE_WITH(g, "UnpackRows", NODE_ATTRS(INT("size", 8)), x, rows);
    return NODE(g, "Reshape", all, INT_LIST(g, 2, 4, 3, x->shape.dim[2]));
}

static value *attention_of(graph *g, value *q, value *k, value *v, value *allowed) {
    value *in[] = {q, k, v, allowed}, *y[2];
    must(g->c, graph_emit(g, "FusedAttention", NODE_ATTRS(FLOAT("ratio", 0.5), INT("key", 3)), 4, in, 2, y));
    return y[0];
}

TEST(attention_takes_the_rows_that_are_there) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = INPUT(g, "q", F32, 5, 3, 2), *k = INPUT(g, "k", F32, 5, 3, 2), *v = INPUT(g, "v", F32, 5, 3, 7);
    value *allowed = INPUT(g, "allowed", BOOL, 2, 1, 1, 4), *rows = INPUT(g, "rows", I64, 5), *y;

    y = attention_of(g, in_place(g, q, rows), in_place(g, k, rows), in_place(g, v, rows), allowed);
    make_output(g, NODE(g, "PackRows", NODE(g, "Reshape", y, INT_LIST(g, 8, 21)), rows));
    check_rewrite(g, "attention_lengths",
                  "input %0 q float32[5, 3, 2] grad\n"
                  "input %1 k float32[5, 3, 2] grad\n"
                  "input %2 v float32[5, 3, 7] grad\n"
                  "input %3 allowed bool[2, 1, 1, 4]\n"
                  "input %4 rows int64[5]\n"
                  "%5, %6 = FusedAttention(%0 q, %1 k, %2 v, %3 allowed, -, %4 rows, %4 rows, scale=1, ratio=0.5, "
                  "key=3, safe=1, batch=2, queries=4, keys=4, torch=0) float32[5, 3, 7], float32[5, 3, 2]\n"
                  "%7 = Reshape(%5, [5, 21], allowzero=1) float32[5, 21]\n"
                  "output %7\n");
    ctx_release(&c);
}

TEST(a_mask_that_a_list_of_rows_stands_for_is_dropped) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = INPUT(g, "q", F32, 5, 3, 2), *k = INPUT(g, "k", F32, 5, 3, 2), *v = INPUT(g, "v", F32, 5, 3, 7);
    value *mask = INPUT(g, "mask", BOOL, 2, 4), *rest = INPUT(g, "rest", BOOL, 1, 1, 4, 4), *y;
    value *rows = NODE_WITH(g, "RowIndex", NODE_ATTRS(INT("count", 5)), NODE(g, "Reshape", mask, INT_LIST(g, 8)));
    value *allowed = NODE(g, "And", rest, NODE(g, "Reshape", mask, INT_LIST(g, 2, 1, 1, 4)));

    y = attention_of(g, in_place(g, q, rows), in_place(g, k, rows), in_place(g, v, rows), allowed);
    make_output(g, NODE(g, "PackRows", NODE(g, "Reshape", y, INT_LIST(g, 8, 21)), rows));
    check_rewrite(g, "attention_lengths",
                  "input %0 q float32[5, 3, 2] grad\n"
                  "input %1 k float32[5, 3, 2] grad\n"
                  "input %2 v float32[5, 3, 7] grad\n"
                  "input %3 mask bool[2, 4]\n"
                  "input %4 rest bool[1, 1, 4, 4]\n"
                  "%5 = Reshape(%3 mask, [8], allowzero=1) bool[8]\n"
                  "%6 = RowIndex(%5, count=5) int64[5]\n"
                  "%7, %8 = FusedAttention(%0 q, %1 k, %2 v, %4 rest, -, %6, %6, scale=1, ratio=0.5, "
                  "key=3, safe=1, batch=2, queries=4, keys=4, torch=0) float32[5, 3, 7], float32[5, 3, 2]\n"
                  "%9 = Reshape(%7, [5, 21], allowzero=1) float32[5, 21]\n"
                  "output %9\n");
    ctx_release(&c);
}

TEST(mask_removal_needs_torch) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *mask = INPUT(g, "mask", BOOL, 2, 2048);

    g->cuda = true;
    make_output(g, NODE(g, "MaskedSoftmax", INPUT(g, "x", F32, 2, 3, 2048, 2048),
                        NODE(g, "Reshape", mask, INT_LIST(g, 2, 1, 1, 2048))));
    check_untouched(g, "mask_removal");
    ctx_release(&c);
}

TEST(keys_that_nothing_hides_all_count) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *q = INPUT(g, "q", F32, 2, 4, 3, 2), *k = INPUT(g, "k", F32, 5, 3, 2), *v = INPUT(g, "v", F32, 5, 3, 7);
    value *rows = INPUT(g, "rows", I64, 5);

    make_output(g, attention_of(g, q, in_place(g, k, rows), in_place(g, v, rows), NULL));
    check_untouched(g, "attention_lengths");
    ctx_release(&c);
}
