/* test_match.c -- tests what patterns match, and what the driver does with rules. */
#include "build.h"
#include "passes/match.h"
#include "test.h"

/* --- the matcher -------------------------------------------------------------------------------------------------- */

enum { X, Y };

static const pattern *const sum_of_product = OP("Add", OP("Mul", VAR(X), VAR(Y)), VAR(X));

TEST(operand_order_does_not_matter) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 3), *b = INPUT(g, "b", F32, 3), *v[MAX_CAPTURES];
    value *sums[] = {NODE(g, "Add", NODE(g, "Mul", a, b), a), NODE(g, "Add", a, NODE(g, "Mul", b, a)),
                     NODE(g, "Add", NODE(g, "Mul", a, a), a)};

    for (int i = 0; i < 3; i++) make_output(g, sums[i]);
    CHECK(match(g, sum_of_product, sums[0]->def, v) && v[X] == a && v[Y] == b);
    CHECK(match(g, sum_of_product, sums[2]->def, v) && v[X] == a && v[Y] == a);
    CHECK(match(g, sum_of_product, sums[1]->def, v) && v[X] == a && v[Y] == b);
    ctx_release(&c);
}

TEST(a_choice_is_taken_back_when_it_fails_later) {
    /* The product comes first and fits in its first order; only the sum shows that it was the wrong one. */
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 3), *b = INPUT(g, "b", F32, 3), *v[MAX_CAPTURES];
    value *sum = NODE(g, "Add", NODE(g, "Mul", b, a), a);

    CHECK(match(g, sum_of_product, sum->def, v) && v[X] == a && v[Y] == b);
    CHECK(!match(g, sum_of_product, NODE(g, "Add", NODE(g, "Mul", a, a), b)->def, v));
    ctx_release(&c);
}

TEST(what_others_use_is_not_matched) {
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *a = INPUT(g, "a", F32, 3), *b = INPUT(g, "b", F32, 3), *buffer = INPUT(g, "buffer", F32, 3);
    value *product = NODE(g, "Mul", a, b), *sum = NODE(g, "Add", product, a), *v[MAX_CAPTURES];

    CHECK(match(g, sum_of_product, sum->def, v));
    make_output(g, product);
    CHECK(!match(g, sum_of_product, sum->def, v));
    CHECK_OK(&c, graph_set_end(g, &g->outputs[0], NULL));
    g->n_outputs = 0;
    CHECK(match(g, sum_of_product, sum->def, v));
    NODE(g, "Neg", product);
    CHECK(!match(g, sum_of_product, sum->def, v));
    graph_remove_dead(g);
    sum = NODE(g, "Add", NODE(g, "Mul", a, b), a);
    CHECK(match(g, sum_of_product, sum->def, v));
    CHECK_OK(&c, graph_add_write(g, buffer, sum->def->in[0]));
    CHECK(!match(g, sum_of_product, sum->def, v));
    ctx_release(&c);
}

TEST(numbers_match_as_their_type_holds_them) {
    const pattern *const third = OP("Mul", VAR(X), CONST(1.0 / 3));
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *v[MAX_CAPTURES], *full;

    for (int t = F32; t <= F16; t++) {
        value *x = INPUT(g, NULL, (dtype)t, 2, 2);
        CHECK(match(g, third, NODE(g, "Mul", x, number(g, (dtype)t, 1.0 / 3))->def, v));
        CHECK(match(g, third, NODE(g, "Mul", number(g, (dtype)t, 1.0 / 3), x)->def, v));
        CHECK(!match(g, third, NODE(g, "Mul", x, number(g, (dtype)t, 0.32))->def, v));
    }
    value *x = INPUT(g, NULL, F32, 2, 2), *wide = INPUT(g, NULL, F64, 2, 2);
    CHECK(match(g, third, NODE(g, "Mul", x, number(g, F32, 0.3333332))->def, v));
    CHECK(!match(g, third, NODE(g, "Mul", wide, number(g, F64, 0.3333332))->def, v));
    CHECK_OK(&c, graph_full(g, F32, &SHAPE(2, 2), 1.0 / 3, &full));
    CHECK(match(g, third, NODE(g, "Mul", x, full)->def, v));
    CHECK(!match(g, third, NODE(g, "Mul", x, wide->data ? wide : x)->def, v));
    ctx_release(&c);
}

static bool along_rows(const node *n) { return node_int(n, "axis") == 1; }

TEST(attributes_can_be_asked_for) {
    const pattern *const rows = OP_WHERE(along_rows, "Softmax", VAR(X));
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 2, 3), *v[MAX_CAPTURES];

    CHECK(match(g, rows, NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 1)), x)->def, v) && v[X] == x);
    CHECK(!match(g, rows, NODE_WITH(g, "Softmax", NODE_ATTRS(INT("axis", 0)), x)->def, v));
    ctx_release(&c);
}

/* --- the driver --------------------------------------------------------------------------------------------------- */

static status to_relu(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return emit(g, out, "Relu", v[X]);
}

static status to_wrong_shape(graph *g, value *const v[], const node *root, value **out) {
    (void)root;
    return emit(g, out, "Add", v[X], INPUT(g, NULL, F32, 5, 1));
}

static status to_nothing(graph *g, value *const v[], const node *root, value **out) {
    value *unused;
    (void)root, (void)out;
    return emit(g, &unused, "Relu", v[X]);
}

static status to_error(graph *g, value *const v[], const node *root, value **out) {
    (void)v, (void)root, (void)out;
    return fail(g->c, E_RUNTIME, "no reason");
}

/* How often Neg(x), in a graph of Neg(Neg(Neg(x))), is replaced by what `rewrite` gives. */
static int count_fired(rewrite_fn *rewrite, status expected, const char *after) {
    const rule rules[] = {{OP("Neg", VAR(X)), rewrite}, {0}};
    int fired = 0;
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3);

    g->emit_name = "/neg";
    make_output(g, NODE(g, "Neg", NODE(g, "Exp", NODE(g, "Neg", x))));
    g->emit_name = NULL;
    CHECK(rules_apply(g, rules, &fired) == expected);
    if (expected == OK) {
        CHECK_OK(&c, graph_verify(g));
        CHECK_TEXT(g, after);
    } else {
        CHECK(strstr(c.err.text, after));
    }
    ctx_release(&c);
    return fired;
}

TEST(rules_replace_in_place_and_in_name) {
    CHECK(count_fired(to_relu, OK,
                      "input %0 x float32[3] grad\n"
                      "%1 = Relu(%0 x) float32[3]  ; /neg\n"
                      "%2 = Exp(%1) float32[3]  ; /neg\n"
                      "%3 = Relu(%2) float32[3]  ; /neg\n"
                      "output %3\n") == 2);
}

/* What a rule makes may be the first of its operator, and others wait for it. */
TEST(a_rule_fires_on_what_another_made) {
    const rule rules[] = {{OP("Exp", OP("Relu", VAR(X))), to_relu}, {OP("Neg", VAR(X)), to_relu}, {0}};
    int fired;
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    make_output(g, NODE(g, "Exp", NODE(g, "Neg", INPUT(g, "x", F32, 3))));
    CHECK_OK(&c, rules_apply(g, rules, &fired));
    CHECK(fired == 2);
    CHECK_TEXT(g, "input %0 x float32[3] grad\n"
                  "%1 = Relu(%0 x) float32[3]\n"
                  "output %1\n");
    ctx_release(&c);
}

TEST(rules_may_decline) {
    static const char unchanged[] = "input %0 x float32[3] grad\n"
                                    "%1 = Neg(%0 x) float32[3]  ; /neg\n"
                                    "%2 = Exp(%1) float32[3]  ; /neg\n"
                                    "%3 = Neg(%2) float32[3]  ; /neg\n"
                                    "output %3\n";
    CHECK(count_fired(to_nothing, OK, unchanged) == 0);
}

TEST(an_error_in_a_rule_names_the_node) {
    CHECK(count_fired(to_error, E_RUNTIME, "no reason\n  while rewriting Neg (/neg)") == 0);
}

TEST(a_replacement_of_another_shape_is_declined) {
    const rule rules[] = {{OP("Neg", VAR(X)), to_wrong_shape}, {0}};
    int fired = -1;
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);

    make_output(g, NODE(g, "Neg", INPUT(g, "x", F32, 3)));
    CHECK_OK(&c, rules_apply(g, rules, &fired));
    CHECK(fired == 0 && count_nodes(g, "Neg") == 1 && count_nodes(g, NULL) == 1);
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}

TEST(backward_nodes_are_replaced_by_backward_nodes) {
    const rule rules[] = {{OP("Neg", VAR(X)), to_relu}, {0}};
    int fired;
    ctx c;
    ctx_init(&c);
    graph *g = new_graph(&c);
    value *x = INPUT(g, "x", F32, 3), *y = NODE(g, "Exp", x);

    make_output(g, y);
    g->in_backward = true;
    g->n_input_grads = 1;
    g->input_grads = (value *[]){NULL};
    CHECK_OK(&c, graph_set_end(g, &g->input_grads[0], NODE(g, "Neg", y)));
    g->in_backward = false;
    CHECK_OK(&c, rules_apply(g, rules, &fired));
    CHECK(fired == 1 && g->last->backward && !g->first->backward && g->input_grads[0] == g->last->out[0]);
    CHECK_OK(&c, graph_verify(g));
    ctx_release(&c);
}
