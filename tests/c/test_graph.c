/* test_graph.c -- tests that emit simplifies, folds and reuses, that replacing and removing keep the graph true, and
 * verify and print. */
#include "build.h"
#include "test.h"

#include <math.h>
#include <string.h>

/* --- emit --------------------------------------------------------------------------------------------------------- */

TEST(constants_are_folded) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = NODE(g, "Mul", NODE(g, "Add", number(g, F32, 1), number(g, F32, 2)), number(g, F32, 4));
    double result = 0;

    CHECK(value_is_filled(x, &result) && result == 12);
    CHECK(g->first == NULL);
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}

TEST(shape_arithmetic_is_folded) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 6);
    value *rows = NODE_WITH(g, "Gather", NODE_ATTRS(INT("axis", 0)), NODE(g, "Shape", x), number(g, I64, 0));
    value *sizes = NODE_WITH(g, "Concat", NODE_ATTRS(INT("axis", 0)), NODE(g, "Unsqueeze", rows, INT_LIST(g, 0)),
                             INT_LIST(g, 3, -1));
    value *y = NODE(g, "Reshape", x, sizes);

    CHECK(value_is_constant(sizes));
    CHECK(shape_equal(&y->shape, &SHAPE(2, 3, 2)));
    CHECK(count_nodes(g, NULL) == 1);
    ctx_release(&c);
}

static value *softmax_along(graph *g, value *x, int axis) {
    return NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", axis)), x);
}

TEST(equal_nodes_are_one) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *y = INPUT(g, "y", F32, 3);

    CHECK(NODE(g, "Add", x, y) == NODE(g, "Add", x, y));
    CHECK(NODE(g, "Add", x, number(g, F32, 2)) == NODE(g, "Add", x, number(g, F32, 2)));
    CHECK(NODE(g, "Add", x, number(g, F32, 2)) != NODE(g, "Add", x, number(g, F32, 3)));
    CHECK(NODE(g, "Add", x, y) != NODE(g, "Mul", x, y));
    CHECK(softmax_along(g, x, 0) == softmax_along(g, x, 0));
    CHECK(softmax_along(g, x, 0) != softmax_along(g, x, 1));
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}

TEST(random_nodes_stay_apart) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *half = number(g, F32, 0.5), *training = number(g, BOOL, 1);

    CHECK(NODE(g, "Dropout", x, half, training) != NODE(g, "Dropout", x, half, training));
    ctx_release(&c);
}

TEST(what_changes_nothing_is_left_out) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3);

    CHECK(NODE(g, "Mul", x, number(g, F32, 1)) == x);
    CHECK(NODE(g, "Mul", number(g, F32, 1), x) == x);
    CHECK(NODE(g, "Add", x, number(g, F32, 0)) == x);
    CHECK(NODE(g, "Sub", x, number(g, F32, 0)) == x);
    CHECK(NODE(g, "Div", x, number(g, F32, 1)) == x);
    CHECK(NODE(g, "Identity", x) == x);
    CHECK(NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[F32].onnx)), x) == x);
    CHECK(NODE(g, "Reshape", x, INT_LIST(g, 2, 3)) == x);
    CHECK(NODE(g, "Expand", x, INT_LIST(g, 1, 3)) == x);
    CHECK(NODE_WITH(g, "Transpose", NODE_ATTRS(INTS("perm", 2, ((int64_t[]){0, 1}))), x) == x);
    CHECK(NODE(g, "Dropout", x, number(g, F32, 0), number(g, BOOL, 1)) == x);
    CHECK(NODE(g, "Dropout", x, number(g, F32, 0.5), number(g, BOOL, 0)) == x);
    CHECK(g->first == NULL);
    /* A one that makes the result larger is not nothing. */
    value *ones;
    CHECK_OK(&c, graph_full(g, F32, &SHAPE(4, 1, 1), 1, &ones));
    CHECK(NODE(g, "Mul", x, ones) != x);
    ctx_release(&c);
}

/* Forth and back, by shapes, axes and types, and some arithmetic that does nothing. */
static value *in_a_roundabout_way(graph *g, value *x) {
    const attr *turn = NODE_ATTRS(INTS("perm", 2, ((int64_t[]){1, 0})));
    value *y = NODE(g, "Reshape", NODE(g, "Reshape", x, INT_LIST(g, 6)), INT_LIST(g, -1, 2));

    y = NODE(g, "Mul", NODE(g, "Add", y, number(g, F32, 0)), number(g, F32, 1));
    y = NODE_WITH(g, "Transpose", turn, NODE_WITH(g, "Transpose", turn, NODE(g, "Neg", NODE(g, "Neg", y))));
    y = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[F64].onnx)), y);
    y = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[F32].onnx)), y);
    return NODE(g, "Expand", NODE(g, "Expand", y, INT_LIST(g, 1, 3, 2)), INT_LIST(g, 4, 3, 2));
}

TEST(one_form_for_one_meaning) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    make_output(g, in_a_roundabout_way(g, INPUT(g, "x", F32, 2, 3)));
    graph_remove_dead(g);
    CHECK_TEXT(g, "input %0 x float32[2, 3] grad\n"
                  "%1 = Reshape(%0 x, [1, 3, 2], allowzero=1) float32[1, 3, 2]\n"
                  "%2 = Expand(%1, [4, 3, 2]) float32[4, 3, 2]\n"
                  "output %2\n");
    CHECK(g->n_simplified > 0);
    ctx_release(&c);
}

/* Looking for dead nodes is left out where nothing has changed since the last time. */
TEST(dead_nodes_are_removed_after_every_kind_of_change) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *a = NODE(g, "Exp", x), *b = NODE(g, "Neg", a);

    CHECK_OK(&c, graph_add_output(g, b));
    graph_remove_dead(g);
    graph_remove_dead(g);
    CHECK(count_nodes(g, NULL) == 2);
    NODE(g, "Sqrt", x);
    graph_remove_dead(g);
    CHECK(count_nodes(g, NULL) == 2 && count_nodes(g, "Sqrt") == 0);
    graph_set_operand(g, b->def, 0, x);
    graph_remove_dead(g);
    CHECK(count_nodes(g, NULL) == 1 && count_nodes(g, "Exp") == 0);
    CHECK_OK(&c, graph_replace(g, b, x));
    graph_remove_dead(g);
    CHECK(count_nodes(g, NULL) == 0);
    CHECK_OK(&c, graph_set_end(g, &g->outputs[0], NODE(g, "Tanh", x)));
    graph_remove_dead(g);
    CHECK_OK(&c, graph_set_end(g, &g->outputs[0], x));
    graph_remove_dead(g);
    CHECK(count_nodes(g, NULL) == 0);
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}

/* Inputs, constants, results and what is only written or given back have numbers of their own, without gaps; an equal node
 * is found as before. */
TEST(values_are_numbered_anew) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *counter = make_input(g, "counter", F32, SCALAR), *y;

    for (int i = 0; i < 10; i++) NODE(g, "Mul", x, number(g, F32, i + 2));
    y = NODE(g, "Add", x, number(g, F32, 2));
    make_output(g, NODE(g, "Exp", y));
    make_output(g, x);
    CHECK_OK(&c, graph_add_write(g, counter, number(g, F32, 3)));
    graph_remove_dead(g);
    CHECK(g->n_values > 20);
    graph_renumber(g);
    CHECK(g->n_values == 6 && x->id == 0 && counter->id == 1);
    CHECK_OK(&c, graph_verify(g));
    CHECK(NODE(g, "Add", x, number(g, F32, 2)) == y);
    CHECK(NODE(g, "Tanh", y)->id < g->n_values);
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}

TEST(operators_that_were_in_a_graph_are_known) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    CHECK(!graph_has_made(g, "Exp"));
    make_output(g, NODE(g, "Exp", INPUT(g, "x", F32, 2)));
    CHECK(graph_has_made(g, "Exp") && !graph_has_made(g, "Sqrt"));
    CHECK(g->n_made == 1);
    NODE(g, "Exp", g->inputs[0]);
    CHECK(g->n_made == 1);
    ctx_release(&c);
}

TEST(a_graph_as_it_is_written) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    g->as_written = true;
    make_output(g, in_a_roundabout_way(g, INPUT(g, "x", F32, 2, 3)));
    CHECK_OK(&c, graph_verify(g));
    CHECK_TEXT(g, "input %0 x float32[2, 3] grad\n"
                  "%1 = Reshape(%0 x, [6]) float32[6]\n"
                  "%2 = Reshape(%1, [-1, 2]) float32[3, 2]\n"
                  "%3 = Add(%2, 0) float32[3, 2]\n"
                  "%4 = Mul(%3, 1) float32[3, 2]\n"
                  "%5 = Neg(%4) float32[3, 2]\n"
                  "%6 = Neg(%5) float32[3, 2]\n"
                  "%7 = Transpose(%6, perm=[1, 0]) float32[2, 3]\n"
                  "%8 = Transpose(%7, perm=[1, 0]) float32[3, 2]\n"
                  "%9 = Cast(%8, to=11) float64[3, 2]\n"
                  "%10 = Cast(%9, to=1) float32[3, 2]\n"
                  "%11 = Expand(%10, [1, 3, 2]) float32[1, 3, 2]\n"
                  "%12 = Expand(%11, [4, 3, 2]) float32[4, 3, 2]\n"
                  "output %12\n");
    CHECK(g->n_simplified == 0);
    ctx_release(&c);
}

TEST(a_narrowing_cast_stays) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3);
    value *narrow = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[BF16].onnx)), x);
    value *wide = NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[F32].onnx)), narrow);

    CHECK(narrow->type == BF16 && wide != x); /* rounding happened */
    /* There and back through a wider type is nothing. */
    CHECK(NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[BF16].onnx)), wide) == narrow);
    ctx_release(&c);
}

TEST(a_wrong_operand_is_explained) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *y = INPUT(g, "y", F32, 4), *z = INPUT(g, "z", I64, 2, 3), *out;

    g->emit_name = "/layer/add";
    CHECK(emit(g, &out, "Add", x, y) == E_SHAPE);
    CHECK(strstr(c.err.text, "[2, 3]") && strstr(c.err.text, "[4]") && strstr(c.err.text, "/layer/add"));
    CHECK(emit(g, &out, "Add", x, z) == E_TYPE);
    CHECK(emit(g, &out, "NoSuchOperator", x) == E_UNSUPPORTED);
    CHECK(strstr(c.err.text, "NoSuchOperator"));
    CHECK(emit(g, &out, "Add", x) == E_INVALID);
    ctx_release(&c);
}

/* --- changing ----------------------------------------------------------------------------------------------------- */

TEST(replacing_moves_every_use) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3), *y = NODE(g, "Neg", x), *z = NODE(g, "Mul", y, y), *better;
    make_output(g, y);
    make_output(g, z);

    g->before = y->def;
    better = NODE(g, "Relu", x);
    g->before = NULL;
    CHECK_OK(&c, graph_replace(g, y, better));
    CHECK(y->n_uses == 0 && better->n_uses == 2 && g->outputs[0] == better);
    CHECK_OK(&c, graph_verify(g));
    graph_remove_dead(g);
    CHECK_OK(&c, graph_verify(g));
    CHECK_TEXT(g, "input %0 x float32[3] grad\n"
                  "%1 = Relu(%0 x) float32[3]\n"
                  "%2 = Mul(%1, %1) float32[3]\n"
                  "output %1\n"
                  "output %2\n");
    ctx_release(&c);
}

TEST(what_nothing_needs_is_removed) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3), *buffer = INPUT(g, "buffer", F32, 3);
    value *kept = NODE(g, "Neg", x), *written = NODE(g, "Exp", x), *dead = NODE(g, "Relu", x);
    make_output(g, kept);
    CHECK_OK(&c, graph_add_write(g, buffer, written));
    NODE(g, "Mul", dead, dead);

    CHECK(count_nodes(g, NULL) == 4);
    graph_remove_dead(g);
    CHECK(count_nodes(g, NULL) == 2 && x->n_uses == 2);
    CHECK_OK(&c, graph_verify(g));
    /* A node that was removed is not reused. */
    CHECK(NODE(g, "Relu", x)->def->op != NULL);
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}

/* --- verify ------------------------------------------------------------------------------------------------------- */

/* Breaks y = Mul(Neg(x), Neg(x)), z = Relu(y) in one way and expects verify to say so. */
static void check_broken(void (*breaking)(graph *g, node *neg, node *mul), const char *sentence) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3), *y = NODE(g, "Neg", x), *z;

    g->emit_name = "/mul";
    z = NODE(g, "Mul", y, y);
    make_output(g, NODE(g, "Relu", z));
    CHECK_OK(&c, graph_verify(g));
    breaking(g, y->def, z->def);
    CHECK(graph_verify(g) == E_INVALID);
    if (!strstr(c.err.text, sentence)) fprintf(stderr, "expected: %s\ngot: %s\n", sentence, c.err.text);
    CHECK(strstr(c.err.text, sentence));
    ctx_release(&c);
}

static void set_wrong_shape(graph *g, node *neg, node *mul) { (void)g, (void)neg, mul->out[0]->shape.dim[0] = 4; }
static void set_wrong_type(graph *g, node *neg, node *mul) { (void)g, (void)neg, mul->out[0]->type = F64; }
static void lose_use(graph *g, node *neg, node *mul) {
    (void)g, (void)mul;
    neg->out[0]->uses = neg->out[0]->uses->next;
}
static void repeat_use(graph *g, node *neg, node *mul) {
    (void)g, (void)mul;
    neg->out[0]->uses->index = neg->out[0]->uses->next->index;
}
static void change_operand(graph *g, node *neg, node *mul) { (void)neg, mul->in[1] = g->inputs[0]; }
static void forget_origin(graph *g, node *neg, node *mul) { (void)g, (void)neg, mul->out[0]->def = NULL; }
static void repeat_id(graph *g, node *neg, node *mul) { (void)g, mul->out[0]->id = neg->out[0]->id; }
static void turn_around(graph *g, node *neg, node *mul) { (void)g, neg->in[0] = mul->out[0]; }
static void break_list(graph *g, node *neg, node *mul) { (void)g, (void)neg, mul->prev = NULL; }
static void lose_input(graph *g, node *neg, node *mul) { (void)neg, (void)mul, g->inputs[0]->input = 7; }
static void mix_stages(graph *g, node *neg, node *mul) { (void)g, (void)mul, neg->backward = true; }
static void make_both(graph *g, node *neg, node *mul) { (void)g, (void)mul, neg->out[0]->data = "constant"; }
TEST(verify_names_what_is_broken) {
    check_broken(set_wrong_shape, "result 0 is float32[4], but inference says float32[3]");
    check_broken(set_wrong_shape, "checking Mul (/mul)");
    check_broken(set_wrong_type, "result 0 is float64[3], but inference says float32[3]");
    check_broken(lose_use, "lists 1 uses, counts 2 and has 2");
    check_broken(repeat_use, "lists a use that does not exist, or lists it twice");
    check_broken(change_operand, "lists 1 uses, counts 1 and has 2");
    check_broken(forget_origin, "does not know where it comes from");
    check_broken(repeat_id, "two values have the id 1");
    check_broken(turn_around, "used before it is computed");
    check_broken(break_list, "the list of nodes is broken");
    check_broken(lose_input, "does not know that it is one");
    check_broken(mix_stages, "comes from backward");
    check_broken(make_both, "does not know where it comes from");
}

TEST(verify_finds_an_output_of_another_graph) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value stray = {.id = 1, .input = -1, .type = F32, .shape = SHAPE(3)}, *x = INPUT(g, "x", F32, 3);

    make_output(g, NODE(g, "Neg", x));
    g->outputs[0] = &stray;
    CHECK(graph_verify(g) == E_INVALID);
    CHECK(strstr(c.err.text, "two values have the id 1"));
    ctx_release(&c);
}

/* --- integers of kernels ------------------------------------------------------------------------------------------ */

static status infer_like_first(graph *g, node *n) {
    (void)g;
    n->out[0]->type = n->in[0]->type;
    n->out[0]->shape = n->in[0]->shape;
    return OK;
}

static status compute_nothing(ctx *c, const call *k) {
    (void)c, (void)k;
    return OK;
}

TEST(a_record_says_what_its_integers_are) {
    op_def silent = {
        .name = "Silent",
        .domain = ORT_DOMAIN,
        .min_in = 2,
        .max_in = 2,
        .max_out = 1,
        .infer = infer_like_first,
        .cpu = compute_nothing,
    };
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *in[] = {INPUT(g, "x", F32, 3), INPUT(g, "i", I64, 3)}, *out = NULL;

    CHECK_FAILS(&c, E_INVALID, "the record of Silent does not say what the integers of operand 1 are",
                graph_emit_op(g, &silent, NULL, 2, in, 1, &out));
    silent.checked = OPERAND(1);
    CHECK_OK(&c, graph_emit_op(g, &silent, NULL, 2, in, 1, &out));
    ctx_release(&c);
}

/* --- print -------------------------------------------------------------------------------------------------------- */

TEST(a_graph_as_text) {
    static const float table[] = {1, 2, 3, 4, 5, 6, 7, 8, 9};
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 9), *i = INPUT(g, "i", I64, 2), *many, *filled, *y;

    CHECK_OK(&c, graph_add_constant(g, F32, &SHAPE(9), table, &many));
    CHECK_OK(&c, graph_add_constant(g, F32, &SHAPE(9), NULL, &filled));
    g->emit_name = "/scale";
    y = NODE(g, "Mul", x, many);
    y = NODE(g, "Maximum", y, filled);
    g->emit_name = NULL;
    y = NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 1)), NODE(g, "Mul", y, number(g, F32, 0.1)));
    make_output(g, NODE_WITH(g, "Gather", NODE_ATTRS(INT("axis", 0)), y, i));
    make_output(g, number(g, F32, INFINITY));
    CHECK_OK(&c, graph_add_write(g, i, INT_LIST(g, 3, 4)));
    CHECK_TEXT(g, "input %0 x float32[2, 9] grad\n"
                  "input %1 i int64[2]\n"
                  "%2 = Mul(%0 x, float32[9] of ...) float32[2, 9]  ; /scale\n"
                  "%3 = Maximum(%2, float32[9] of 0) float32[2, 9]  ; /scale\n"
                  "%4 = Mul(%3, 0.100000001) float32[2, 9]\n"
                  "%5 = Softmax(%4, axis=1) float32[2, 9]\n"
                  "%6 = Gather(%5, %1 i, axis=0) float32[2, 9]\n"
                  "output %6\n"
                  "output inf\n"
                  "write %1 i <- [3, 4]\n");
    ctx_release(&c);
}
