/* build.h -- making small specialised graphs in tests, and reading them as text.
 *
 *     graph *g = new_graph(&c);
 *     value *x = INPUT(g, "x", F32, 2, 3), *y = NODE(g, "Add", x, number(g, F32, 1));
 *
 * A graph that cannot be built ends the program: then there is nothing to test. */
#ifndef ORT_TESTS_BUILD_H
#define ORT_TESTS_BUILD_H

#include "ops/op.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static inline void must(ctx *c, status s) {
    if (s == OK) return;
    fprintf(stderr, "a test's graph cannot be built: %s\n", c->err.text);
    exit(1);
}

static inline graph *new_graph(ctx *c) {
    graph *g = NULL;
    must(c, graph_new(c, &g));
    g->specialised = true;
    return g;
}

static inline value *add_input(graph *g, const char *name, dtype type, shape s) {
    value *v = NULL;
    must(g->c, graph_add_input(g, name, type, &s, &v));
    v->needs_grad = dtype_is_float(type);
    return v;
}

static inline value *add_node(graph *g, const char *op, const attr *attrs, int n_in, value *const *in) {
    value *v = NULL;
    must(g->c, graph_emit(g, op, attrs, n_in, in, 1, &v));
    return v;
}

static inline value *number(graph *g, dtype type, double x) {
    value *v = NULL;
    must(g->c, graph_scalar(g, type, x, &v));
    return v;
}

static inline value *int_list(graph *g, int count, const int64_t *x) {
    value *v = NULL;
    must(g->c, graph_ints(g, count, x, &v));
    return v;
}

#define INPUT(g, name, type, ...) add_input(g, name, type, SHAPE(__VA_ARGS__))
#define NODE_WITH(g, op, attrs, ...)                                                                                   \
    add_node(g, op, attrs, (int)(sizeof((value *[]){__VA_ARGS__}) / sizeof(value *)), (value *[]){__VA_ARGS__})
#define NODE(g, op, ...) NODE_WITH(g, op, NULL, __VA_ARGS__)
#define INT_LIST(g, ...)                                                                                               \
    int_list(g, (int)(sizeof((int64_t[]){__VA_ARGS__}) / sizeof(int64_t)), (int64_t[]){__VA_ARGS__})
#define OUTPUT(g, v) must((g)->c, graph_add_output(g, v))

/* graph_print's text with values numbered in the order they appear: %17 becomes %3. In the graph's arena. */
static inline const char *graph_text(graph *g) {
    int *number_of = NULL, numbers = 0;
    const char *from = NULL;
    char *text = NULL, *to;

    must(g->c, graph_print(g, &from));
    must(g->c, NEW(g->c, number_of, g->n_values));
    must(g->c, NEW(g->c, text, 2 * strlen(from) + 1)); /* a number never becomes twice as long */
    for (to = text; *from;) {
        if (*from != '%') {
            *to++ = *from++;
            continue;
        }
        int *known = &number_of[strtol(from + 1, (char **)(uintptr_t)&from, 10)];
        if (!*known) *known = ++numbers;
        to += sprintf(to, "%%%d", *known - 1);
    }
    return text;
}

static inline int count_nodes(const graph *g, const char *op) {
    int count = 0;
    for (const node *n = g->first; n; n = n->next) count += !op || strcmp(n->op->name, op) == 0;
    return count;
}

#endif
