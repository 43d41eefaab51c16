/* test_index_formula.c -- tests masks and numbers that are formulas of their indices, small as constants and large as
 * nodes. */
#include "passes/index_formula.h"

#include "build.h"
#include "passes/attention_mask.h"
#include "test.h"

static value *range_along(graph *g, int64_t from, int64_t count, int axis) {
    value *x =
        NODE(g, "Range", number(g, I64, (double)from), number(g, I64, (double)(from + count)), number(g, I64, 1));
    return axis ? NODE(g, "Reshape", x, INT_LIST(g, 1, 1, count)) : NODE(g, "Reshape", x, INT_LIST(g, 1, count, 1));
}

static value *ones(graph *g, int64_t size) {
    return NODE(g, "Expand", cast(g, number(g, I64, 1), BOOL), INT_LIST(g, 1, 1, size, size));
}

static value *triangle(graph *g, int64_t size, int64_t upper, int64_t at) {
    return NODE_WITH(g, "Trilu", NODE_ATTRS(INT("upper", upper)), ones(g, size), number(g, I64, (double)at));
}

/* CAUSAL masks, as models make them, then others. */
enum { CAUSAL = 8, ALL_MASKS = 14 };
static void masks_of(graph *g, int64_t n, value *out[ALL_MASKS]) {
    value *q = range_along(g, 0, n, 0), *k = range_along(g, 0, n, 1);
    value *yes = cast(g, number(g, I64, 1), BOOL), *no = cast(g, number(g, I64, 0), BOOL);
    value *window = NODE(g, "Greater", k, NODE(g, "Sub", q, number(g, I64, (double)n)));
    const int64_t most = n < 100 ? n / 2 : 100;
    int i = 0;

    out[i++] = triangle(g, n, 0, 0);
    out[i++] = NODE(g, "Not", triangle(g, n, 1, 1));
    out[i++] = NODE(g, "LessOrEqual", k, q);
    out[i++] = NODE(g, "And", NODE(g, "GreaterOrEqual", q, k), window); /* as long as all */
    out[i++] = NODE(g, "Less", k, NODE(g, "Add", q, number(g, I64, 1)));
    out[i++] = NODE(g, "Where", NODE(g, "Greater", k, q), no, yes);
    out[i++] = NODE(g, "Not", NODE(g, "Or", NODE(g, "Greater", k, q), NODE(g, "Less", k, number(g, I64, 0))));
    out[i++] = NODE(g, "LessOrEqual", range_along(g, 7, n, 1), range_along(g, 7, n, 0));
    out[i++] = triangle(g, n, 0, 1);
    out[i++] = triangle(g, n, 1, 0);
    out[i++] = NODE(g, "And", out[2], NODE(g, "Greater", k, NODE(g, "Sub", q, number(g, I64, (double)most))));
    out[i++] = NODE(g, "LessOrEqual", range_along(g, 7, n, 1), q);
    out[i++] = ones(g, n);
    out[i++] = NODE(g, "Less", k, q);
}

static void check_masks(int64_t n) {
    value *mask[ALL_MASKS];
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    masks_of(g, n, mask);
    for (int i = 0; i < ALL_MASKS; i++) {
        char of[64];
        snprintf(of, sizeof of, "mask %d of %d keys", i, (int)n);
        test_check(attention_mask_causal(mask[i], n) == (i < CAUSAL), __FILE__, __LINE__, "causal", of);
    }
    ctx_release(&c);
}

TEST(causal_masks_of_constants) { check_masks(16); }
TEST(causal_masks_that_are_too_large_for_constants) { check_masks(4096); }

TEST(formulas_of_numbers) {
    index_formula f;
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    const int64_t uneven[] = {0, 2, 5}, far[] = {INT64_MIN, INT64_MAX};
    value *x = NODE(g, "Sub", range_along(g, 5, 700000, 0), range_along(g, 0, 3, 1));

    CHECK(index_formula_of(x, &f) && f.by[0] == 0 && f.by[1] == 1 && f.by[2] == -1 && f.plus == 5);
    CHECK(!index_formula_of(INPUT(g, "data", I64, 3), &f));
    CHECK(!index_formula_of(int_list(g, 3, uneven), &f));
    CHECK(!index_formula_of(int_list(g, 2, far), &f));
    CHECK(!index_formula_of(number(g, F32, 1), &f));
    CHECK(!index_formula_of(NODE(g, "Add", x, number(g, I64, 9e15)), &f)); /* sums of such may not fit */
    ctx_release(&c);
}

TEST(equal_nodes_are_folded_once) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    const value *first = triangle(g, 1000, 0, 0);

    CHECK(first->data != NULL);
    for (int layer = 0; layer < 100; layer++) CHECK(triangle(g, 1000, 0, 0)->data == first->data);
    CHECK(triangle(g, 1000, 0, 1)->data != first->data);
    ctx_release(&c);
}
