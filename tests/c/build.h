/* build.h -- makes small specialised graphs in tests, and reads them as text.
 *
 *   graph *g = new_graph(&c);
 *   value *x = INPUT(g, "x", F32, 2, 3), *y = NODE(g, "Add", x, number(g, F32, 1));
 *
 * A graph that cannot be built ends the program: then there is nothing to test. */
#ifndef ORT_TEST_BUILD_H
#define ORT_TEST_BUILD_H

#include "ops/op.h"

/* Ends the program with the context's sentence unless `s` is OK. */
void must(ctx *c, status s);

graph *new_graph(ctx *c);
value *make_input(graph *g, const char *name, dtype type, shape s); /* needs a gradient when it is a float */
value *make_node(graph *g, const char *op, const attr *attrs, int n_in, value *const *in);
value *number(graph *g, dtype type, double x);
value *int_list(graph *g, int count, const int64_t *x);
value *cast(graph *g, value *x, dtype type);
void make_output(graph *g, value *v);
/* `v` is what backward gives back for input i. Called when all inputs are there. */
void make_gradient(graph *g, int i, value *v);

#define LENGTH(array) ((int)(sizeof(array) / sizeof *(array)))
#define INPUT(g, name, type, ...) make_input(g, name, type, SHAPE(__VA_ARGS__))
#define NODE_WITH(g, op, attrs, ...)                                                                                   \
    make_node(g, op, attrs, LENGTH(((value *[]){__VA_ARGS__})), (value *[]){__VA_ARGS__})
#define NODE(g, op, ...) NODE_WITH(g, op, NULL, __VA_ARGS__)
#define INT_LIST(g, ...) int_list(g, LENGTH(((int64_t[]){__VA_ARGS__})), (int64_t[]){__VA_ARGS__})
/* The attributes of a Transpose. */
#define PERM(...) NODE_ATTRS(INTS("perm", LENGTH(((int64_t[]){__VA_ARGS__})), ((int64_t[]){__VA_ARGS__})))

/* graph_print's text with values numbered in the order they appear: %17 becomes %3. In the graph's arena. */
const char *graph_text(graph *g);
/* Compares it with `expected`, and shows it when it differs. */
#define CHECK_TEXT(g, expected)                                                                                        \
    test_check(strcmp(graph_text(g), expected) == 0, __FILE__, __LINE__, "another graph:", graph_text(g))
/* Runs one pass alone on `g` and expects the text `after`; expects the text to stay. */
void check_rewrite(graph *g, const char *name, const char *after);
void check_untouched(graph *g, const char *name);
/* Nodes of one operator; NULL: all. */
int count_nodes(const graph *g, const char *op);

#endif
