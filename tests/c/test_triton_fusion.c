/* test_triton_fusion.c -- tests the pass triton_fusion: which nodes become one kernel, and the program that it is
 * given. */
#include "build.h"
#include "graph/triton.h"
#include "ops/pointwise/pointwise.h"
#include "passes/pipeline.h"
#include "test.h"

#include <string.h>

#define PASS "triton_fusion"

enum { ALL_CLASSES = (1 << TILE_CLASSES) - 1 };
#define TAKEN_AS_IT_IS(name_) {.name = name_, .classes = ALL_CLASSES}

static const triton_operator operators[] = {
    TAKEN_AS_IT_IS("Add"),  TAKEN_AS_IT_IS("Mul"),       TAKEN_AS_IT_IS("Sub"),     TAKEN_AS_IT_IS("Exp"),
    TAKEN_AS_IT_IS("Tanh"), TAKEN_AS_IT_IS("ReduceSum"), TAKEN_AS_IT_IS("Softmax"), TAKEN_AS_IT_IS("LayerNormGrad"),
};
static const triton_rules all = {
    .n_operators = LENGTH(operators), .min_nodes = 2, .operators = operators, .inlines = true, .widest = 1024};

static graph *graph_by(ctx *c, const triton_rules *rules) {
    ctx_init(c);
    graph *g = new_graph(c);
    g->triton = rules;
    return g;
}

static value *sum_of_rows(ctx *c, graph *g, value *x, bool keep) {
    const int64_t last = x->shape.rank - 1;
    value *total = NULL;
    CHECK_OK(c, emit_reduce(g, "ReduceSum", x, 1, &last, keep, &total));
    return total;
}

/* The program of the only kernel that the pass leaves; NULL: it leaves none, or several. */
static const char *program_of(ctx *c, graph *g) {
    const char *found = NULL;
    int fired[MAX_PASSES] = {0}, times = 0;

    CHECK_OK(c, passes_run(g, LAST, ~pass_bit(PASS), fired));
    CHECK_OK(c, graph_verify(g));
    for (int i = 0; passes[i]; i++) times += fired[i];
    for (const node *n = g->first; n; n = n->next)
        if (strcmp(n->op->name, "TritonChain") == 0) found = found ? NULL : node_string(n, "program");
    return times == 1 ? found : NULL;
}

#define CHECK_PROGRAM(c, g, expected)                                                                                  \
    do {                                                                                                               \
        const char *program_ = program_of(c, g);                                                                       \
        test_check(program_ && strcmp(program_, expected) == 0, __FILE__, __LINE__, "another program:", program_);     \
    } while (0)

TEST(pointwise_nodes_and_a_constant) {
    ctx c;
    graph *g = graph_by(&c, &all);
    value *x = INPUT(g, "x", F32, 4, 6), *y = INPUT(g, "y", F32, 6);

    make_output(g, NODE(g, "Exp", NODE(g, "Mul", NODE(g, "Add", x, y), number(g, F32, 0.5))));
    CHECK_PROGRAM(&c, g,
                  "elements\noperand float32\noperand float32\nconstant float32 3fe0000000000000\n"
                  "step Add - 0 1 -> w:float32\nstep Mul - 3 2 -> w:float32\n"
                  "step Exp - 4 -> w:float32\nresults 5\n");
    ctx_release(&c);
}

/* A total that loses its axis and gets it back is read for each row. */
TEST(totals_and_their_readers) {
    ctx c;
    graph *g = graph_by(&c, &all);
    value *x = INPUT(g, "x", F32, 4, 6), *total = sum_of_rows(&c, g, NODE(g, "Tanh", x), false), *kept = NULL;

    CHECK_OK(&c, emit_reshape(g, total, &SHAPE(4, 1), &kept));
    make_output(g, NODE(g, "Softmax", NODE(g, "Sub", x, kept)));
    CHECK_PROGRAM(&c, g,
                  "rows\noperand float32\nstep Tanh - 0 -> w:float32\n"
                  "step ReduceSum - 1 -> r:float32\nstep Sub - 0 2 -> w:float32\n"
                  "step Softmax - 3 -> w:float32\nresults 4\n");
    ctx_release(&c);
}

/* No kernel: one node, rows that are too long, another axis, rules that want more nodes, no rules. */
TEST(what_stays_as_it_is) {
    static const triton_rules more = {
        .n_operators = LENGTH(operators), .min_nodes = 3, .operators = operators, .widest = 1024};
    for (int which = 0; which < 5; which++) {
        ctx c;
        graph *g = graph_by(&c, which == 4 ? NULL : which == 3 ? &more : &all);
        value *x = INPUT(g, "x", F32, 4, which == 1 ? 1025 : 6), *y = NULL;
        static const int64_t first[] = {0};

        if (which == 0) y = NODE(g, "Exp", x);
        else if (which == 1) y = NODE(g, "Softmax", sum_of_rows(&c, g, x, true));
        else if (which == 2) CHECK_OK(&c, emit_reduce(g, "ReduceSum", NODE(g, "Sin", x), 1, first, true, &y));
        else y = NODE(g, "Exp", NODE(g, "Tanh", x));
        make_output(g, y);
        check_untouched(g, PASS);
        ctx_release(&c);
    }
}
