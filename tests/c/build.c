/* build.c -- makes graphs for tests, and writes them as text. */
#include "build.h"
#include "copies.h"
#include "passes/pipeline.h"
#include "test.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

void must(ctx *c, status s) {
    if (s == OK) return;
    printf("a test's graph cannot be built: %s\n", c->err.text);
    exit(1);
}

graph *new_graph(ctx *c) {
    graph *g = NULL;
    must(c, graph_new(c, &g));
    g->specialised = true;
    return g;
}

value *make_input(graph *g, const char *name, dtype type, shape s) {
    value *v = NULL;
    must(g->c, graph_add_input(g, name, type, &s, &v));
    v->needs_grad = dtype_is_float(type);
    return v;
}

value *make_node(graph *g, const char *op, const attr *attrs, int n_in, value *const *in) {
    value *v = NULL;
    must(g->c, graph_emit(g, op, attrs, n_in, in, 1, &v));
    return v;
}

value *number(graph *g, dtype type, double x) {
    value *v = NULL;
    must(g->c, graph_scalar(g, type, x, &v));
    return v;
}

value *cast(graph *g, value *x, dtype type) {
    return NODE_WITH(g, "Cast", NODE_ATTRS(INT("to", dtype_table[type].onnx)), x);
}

value *int_list(graph *g, int count, const int64_t *x) {
    value *v = NULL;
    must(g->c, graph_ints(g, count, x, &v));
    return v;
}

void make_gradient(graph *g, int i, value *v) {
    if (!g->input_grads) {
        must(g->c, NEW(g->c, g->input_grads, g->n_inputs));
        g->n_input_grads = g->n_inputs;
    }
    must(g->c, graph_set_end(g, &g->input_grads[i], v));
}

void make_output(graph *g, value *v) { must(g->c, graph_add_output(g, v)); }

const char *graph_text(graph *g) {
    int *number_of = NULL, numbers = 0;
    const char *from = NULL;
    char *text = NULL, *to, *end;

    must(g->c, graph_print(g, &from));
    must(g->c, NEW(g->c, number_of, g->n_values));
    must(g->c, NEW(g->c, text, 6 * strlen(from) + 1)); /* "%1" may become "%1234567890" */
    for (to = text; *from;) {
        if (*from != '%') {
            *to++ = *from++;
            continue;
        }
        int *known = &number_of[strtol(from + 1, &end, 10)];
        if (!*known) *known = ++numbers;
        to += sprintf(to, "%%%d", *known - 1);
        from = end;
    }
    return text;
}

int count_nodes(const graph *g, const char *op) {
    int count = 0;
    for (const node *n = g->first; n; n = n->next) count += !op || strcmp(n->op->name, op) == 0;
    return count;
}

void check_rewrite(graph *g, const char *name, const char *after) {
    int fired[MAX_PASSES] = {0}, total = 0;
    const char *before = graph_text(g);

    CHECK(pass_bit(name) != 0);
    check_copies(g, name);
    for (pass_stage stage = BEFORE_GRADIENT; stage <= LAST; stage <<= 1)
        CHECK_OK(g->c, passes_run(g, stage, ~UINT64_C(0), fired));
    CHECK_TEXT(g, before);
    for (pass_stage stage = BEFORE_GRADIENT; stage <= LAST; stage <<= 1)
        CHECK_OK(g->c, passes_run(g, stage, ~pass_bit(name), fired));
    CHECK_OK(g->c, graph_verify(g));
    CHECK_TEXT(g, after);
    for (int i = 0; passes[i]; i++) {
        CHECK(fired[i] == 0 || pass_bit(name) == UINT64_C(1) << i);
        total += fired[i];
    }
    CHECK((total > 0) == (strcmp(before, after) != 0));
}

void check_untouched(graph *g, const char *name) { check_rewrite(g, name, graph_text(g)); }
