/* test_scaling.c -- tests that a plan for a graph of twice the size takes twice the work and memory, not four times.
 *
 * What is counted is no time: basic blocks that run in the folders that make a plan, which are compiled for that here
 * (PLANNING in setup.py), all together and each by itself, and bytes that are allocated. Each graph of the passes' tests is
 * doubled, too (copies.h). */
#include "plan/compile.h"

#include "build.h"
#include "copies.h"
#include "effort.h"
#include "machine.h"
#include "test.h"

/* --- families --------------------------------------------------------------------------------------------------------- */

static value *op(graph *g, const char *name, const attr *attrs, int n_in, value *const *in) {
    node *n = NULL;
    must(g->c, graph_add_node(g, op_find(NULL, name, 18), "n", attrs, n_in, in, 1, &n));
    return n ? n->out[0] : NULL;
}

#define NODE_OF_WITH(g, name, attrs, ...)                                                                              \
    op(g, name, attrs, LENGTH(((value *[]){__VA_ARGS__})), (value *[]){__VA_ARGS__})
#define NODE_OF(g, name, ...) NODE_OF_WITH(g, name, NULL, __VA_ARGS__)

typedef value *family(graph *g, value *x, int n);

/* Pointwise nodes, one after the other. */
static value *chain(graph *g, value *x, int n) {
    for (int i = 0; i < n; i++) x = NODE_OF(g, i % 2 ? "Tanh" : "Sigmoid", x);
    return x;
}

static value *sum_up(graph *g, value *sum, value *part) { return sum ? NODE_OF(g, "Add", sum, part) : part; }

/* Products with constants that begin alike. */
static value *constants(graph *g, value *x, int n) {
    for (int i = 0; i < n / 2; i++) {
        value *c = NULL;
        must(g->c, graph_add_constant(g, F32, &SHAPE(8), (float[8]){1, 1, 1, 1, 1, 1, 1, (float)i}, &c));
        x = NODE_OF(g, "Tanh", NODE_OF(g, "Mul", x, c));
    }
    return x;
}

/* Nodes that differ in their last attribute alone. */
static value *attributes(graph *g, value *x, int n) {
    value *sum = NULL;
    for (int i = 0; i < n / 2; i++)
        sum = sum_up(g, sum, NODE_OF_WITH(g, "Selu", NODE_ATTRS(FLOAT("alpha", 1), FLOAT("gamma", i + 2)), x));
    return sum;
}

/* One node with many results. */
static value *split(graph *g, value *x, int n) {
    node *cut = NULL;
    value **parts = NULL;
    must(g->c, graph_add_node(g, op_find(NULL, "Split", 18), "n", NODE_ATTRS(INT("axis", 0), INT("num_outputs", n / 2)),
                              1, &x, n / 2, &cut));
    must(g->c, NEW(g->c, parts, n / 2));
    for (int i = 0; i < n / 2; i++) parts[i] = NODE_OF(g, "Tanh", cut->out[i]);
    return op(g, "Concat", NODE_ATTRS(INT("axis", 0)), n / 2, parts);
}

/* One value with many readers. */
static value *fan_out(graph *g, value *x, int n) {
    value *root = NODE_OF(g, "Tanh", x), *sum = NULL;
    for (int i = 0; i < n / 2; i++)
        sum = sum_up(g, sum, NODE_OF_WITH(g, "LeakyRelu", NODE_ATTRS(FLOAT("alpha", 1.0 / (i + 2))), root));
    return sum;
}

/* Rows of one value, by slices and by indices. */
static value *slices(graph *g, value *x, int n) {
    value *sum = NULL, *axis = INT_LIST(g, 0);
    for (int i = 0; i < n / 2; i++)
        sum = sum_up(g, sum, NODE_OF(g, "Slice", x, INT_LIST(g, i), INT_LIST(g, i + 1), axis));
    return sum;
}

static value *gathers(graph *g, value *x, int n) {
    value *sum = NULL;
    for (int i = 0; i < n / 2; i++)
        sum = sum_up(g, sum, NODE_OF_WITH(g, "Gather", NODE_ATTRS(INT("axis", 0)), x, number(g, I64, i)));
    return sum;
}

/* One node with many operands, all different, and all the same. */
static value *joined(graph *g, value *x, int n, bool same) {
    value **in = NULL;
    must(g->c, NEW(g->c, in, n));
    for (int i = 0; i < n; i++)
        in[i] = same && i ? in[0] : NODE_OF_WITH(g, "LeakyRelu", NODE_ATTRS(FLOAT("alpha", 1.0 / (i + 2))), x);
    return op(g, "Concat", NODE_ATTRS(INT("axis", 0)), n, in);
}
static value *operands(graph *g, value *x, int n) { return joined(g, x, n, false); }
static value *repeated(graph *g, value *x, int n) { return joined(g, x, n, true); }

/* What was joined is cut again. */
static value *slices_of_a_concat(graph *g, value *x, int n) {
    value *row = NODE_OF_WITH(g, "Gather", NODE_ATTRS(INT("axis", 0)), x, INT_LIST(g, 0));
    return slices(g, joined(g, row, n, false), n);
}

/* Layers of one weight, with a bias. */
static value *layers(graph *g, value *x, int n) {
    value *w = NULL, *b = NULL;
    must(g->c, graph_add_input(g, "w", F32, &(shape){.rank = -1}, &w));
    must(g->c, graph_add_input(g, "b", F32, &(shape){.rank = -1}, &b));
    for (int i = 0; i < n / 3; i++) x = NODE_OF(g, "Tanh", NODE_OF(g, "Add", NODE_OF(g, "MatMul", x, w), b));
    return x;
}

/* Small products of one value. */
static value *products(graph *g, value *x, int n) {
    value *w = NULL, *b = NULL, *sum = NULL;
    must(g->c, graph_add_input(g, "w", F32, &(shape){.rank = -1}, &w));
    must(g->c, graph_add_input(g, "b", F32, &(shape){.rank = -1}, &b));
    for (int i = 0; i < n / 3; i++)
        sum = sum_up(g, sum, NODE_OF(g, "MatMul", x, NODE_OF(g, "Mul", w, number(g, F32, i + 2))));
    return NODE_OF(g, "Add", sum, b);
}

/* The same with weights of their own. */
static value *weights(graph *g, value *x, int n) {
    value *sum = NULL;
    for (int i = 0; i < n / 3; i++) {
        value *w = NULL;
        must(g->c, graph_add_input(g, "w", F32, &(shape){.rank = -1}, &w));
        sum = sum_up(g, sum, NODE_OF(g, "MatMul", x, w));
    }
    return sum;
}

/* Many results. */
static value *outputs(graph *g, value *x, int n) {
    for (int i = 0; i < n / 2; i++)
        must(g->c, graph_add_output(g, NODE_OF(g, "Tanh", NODE_OF(g, "Mul", x, number(g, F32, i + 2)))));
    return x;
}

/* A cell, step by step: a slice of the input, a product of the state, gates. */
static value *cell(graph *g, value *x, int n) {
    value *w = NULL, *b = NULL, *state = NULL, *axis = INT_LIST(g, 0);
    must(g->c, graph_add_input(g, "w", F32, &(shape){.rank = -1}, &w));
    must(g->c, graph_add_input(g, "b", F32, &(shape){.rank = -1}, &b));
    for (int i = 0; i < n / 6; i++) {
        value *now = NODE_OF(g, "Slice", x, INT_LIST(g, i), INT_LIST(g, i + 1), axis);
        if (state) now = NODE_OF(g, "Add", now, NODE_OF(g, "MatMul", state, w));
        state = NODE_OF(g, "Mul", NODE_OF(g, "Sigmoid", now), NODE_OF(g, "Tanh", NODE_OF(g, "Add", now, b)));
    }
    return state;
}

/* --- counting --------------------------------------------------------------------------------------------------------- */

typedef struct effort {
    uint64_t blocks;
    size_t bytes;
} effort;

/* `rows`: of x; 0: as many as the size says. `again`: what backward computes again. */
static effort plan_of(family *make, int n, int rows, const recompute_request *again) {
    graph *g = NULL;
    value *x = NULL;
    effort e = {0};
    input_spec *specs = NULL;
    bool *grads = NULL;
    plan *p;
    ctx c, m;

    ctx_init(&m);
    must(&m, graph_new(&m, &g));
    g->opset = 18;
    must(&m, graph_add_input(g, "x", F32, &(shape){.rank = -1}, &x));
    must(&m, graph_add_output(g, make(g, x, n)));
    must(&m, NEW(&m, specs, g->n_inputs));
    must(&m, NEW(&m, grads, g->n_outputs));
    for (int i = 0; i < g->n_inputs; i++) specs[i] = (input_spec)SPEC(F32, true, 8, 8);
    specs[0].shape = SHAPE(rows ? rows : n, 8);
    if (g->n_inputs == 3) specs[2].shape = SHAPE(8); /* a bias */
    for (int i = 0; i < g->n_outputs; i++) grads[i] = true;
    ctx_init(&c);
    effort_begin();
    CHECK_OK(&c, compile(&c, g, specs, &(compile_options){.output_grads = grads, .again = *again}, &p));
    e = (effort){effort_blocks(), c.mem.total};
    ctx_release(&c);
    ctx_release(&m);
    return e;
}

/* n log n grows by less than 2.2 from here on; what is chosen (to be computed again, an order) takes the work of few nodes until
 * there are some thousand of them. Another size can be asked for, and what it takes is printed (docs/scaling.md). */
static int size_of_tests(bool *print) {
    const char *asked = getenv("ORTMODULE_TEST_SIZE");
    *print = asked != NULL;
    return asked && atoi(asked) > 100 ? atoi(asked) : 4000;
}

/* The work is counted where nothing else is looked for: sanitizers, with which it takes minutes, see a smaller plan. */
#ifdef __SANITIZE_ADDRESS__
enum { SANITIZED = true, SMALL = 500 };
#else
enum { SANITIZED = false, SMALL = 500 };
#endif

static void check_doubling(const char *name, family *make, int rows, const recompute_request *again) {
    bool print;
    const int size = size_of_tests(&print);

    if (SANITIZED) {
        plan_of(make, SMALL, rows, again);
        return;
    }
    plan_of(make, size / 2, rows, again);
    const effort small = plan_of(make, size, rows, again), large = plan_of(make, 2 * size, rows, again);
    const double work = (double)large.blocks / (double)small.blocks, memory = (double)large.bytes / (double)small.bytes;
    char text[160];

    snprintf(text, sizeof text, "%s: twice the size takes %.2f times the work and %.2f times the memory", name, work,
             memory);
    CHECK(small.blocks > (uint64_t)size);
    if (print)
        printf("| %s | %d | %.1f | %.0f | %.2f | %.2f |\n", name, 2 * size, (double)large.blocks / 1e6,
               (double)large.bytes / 1e6, work, memory);
    test_check(work < 2.25 && memory < 2.25, __FILE__, __LINE__, text, NULL);
    check_blocks(name, 16 * (uint64_t)size);
}

#define DOUBLES(name, rows)                                                                                            \
    TEST(twice_the_##name##_take_twice_the_work) { check_doubling(#name, name, rows, &(recompute_request){0}); }

DOUBLES(chain, 4)
DOUBLES(fan_out, 4)
DOUBLES(slices, 0)
DOUBLES(gathers, 0)
DOUBLES(operands, 4)
DOUBLES(repeated, 4)
DOUBLES(slices_of_a_concat, 4)
DOUBLES(layers, 4)
DOUBLES(products, 512)
DOUBLES(cell, 0)
DOUBLES(weights, 512)
DOUBLES(outputs, 4)
DOUBLES(constants, 4)
DOUBLES(attributes, 4)
DOUBLES(split, 0)

/* --- what backward computes again --------------------------------------------------------------------------------------- */

/* With the clusters that users can name; each goal where a size is asked for, and else the one that takes the most work. */
static void check_goals(const char *name, family *make, int rows) {
    static const char *const names[] = {"named", "layers", "as little as possible"};
    bool every;

    size_of_tests(&every);
    for (recompute_goal goal = every ? RECOMPUTE_NOTHING : RECOMPUTE_TO; goal <= RECOMPUTE_TO; goal++) {
        char text[80];
        snprintf(text, sizeof text, "%s, %s", name, names[goal]);
        check_doubling(text, make, rows, &(recompute_request){.goal = goal, .list = true});
    }
}

#define GOALS(name, rows)                                                                                              \
    TEST(twice_the_##name##_take_twice_the_work_to_compute_again) { check_goals(#name, name, rows); }

GOALS(chain, 4)
GOALS(fan_out, 4)
GOALS(operands, 4)
GOALS(layers, 4)
GOALS(cell, 0)
GOALS(weights, 512)
GOALS(constants, 4)
GOALS(split, 0)

/* --- offsets alone ------------------------------------------------------------------------------------------------------ */

/* Lives of any length at any time, and no two blocks of one size: those that take the longest to place. */
static uint64_t effort_of_lives(int count) {
    uint64_t x = 1;
    interval *lives;
    int64_t peak;
    ctx c;

    ctx_init(&c);
    must(&c, NEW(&c, lives, count));
    for (int i = 0; i < count; i++) {
        int time[2];
        for (int k = 0; k < 2; k++) {
            x = x * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
            time[k] = (int)((x >> 33) % (uint64_t)count);
        }
        lives[i] =
            (interval){.first = time[0] < time[1] ? time[0] : time[1], .last = time[0] < time[1] ? time[1] : time[0]};
        lives[i].bytes = 1 + (int64_t)(x >> 40);
    }
    effort_begin();
    CHECK_OK(&c, offsets_plan(&c, lives, count, 64, 0, &peak));
    const uint64_t blocks = effort_blocks();
    ctx_release(&c);
    return blocks;
}

TEST(twice_the_lives_take_twice_the_work) {
    enum { LIVES = SANITIZED ? SMALL : 16000 };
    effort_of_lives(LIVES / 2);
    const uint64_t small = effort_of_lives(LIVES), large = effort_of_lives(2 * LIVES);
    CHECK(SANITIZED || (double)large < 2.25 * (double)small);
    check_blocks("lives", 16 * (uint64_t)LIVES);
}
