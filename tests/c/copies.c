/* copies.c -- copies a graph many times into one, and counts the work that a pass has with them. */
#include "copies.h"

#include "build.h"
#include "effort.h"
#include "passes/pipeline.h"
#include "test.h"

#include <inttypes.h>

void check_blocks(const char *name, uint64_t least) {
    static const double most = 3; /* n log n is 2.2, what reaches a limit or grows a table at these sizes more */
    const double growth = effort_growth(least);
    char text[200];

    snprintf(text, sizeof text, "%s: twice the size takes %.2f times as many runs of the block at %#" PRIxPTR, name,
             growth, effort_place());
    test_check(growth < most, __FILE__, __LINE__, text, NULL);
}

/* --- copying -------------------------------------------------------------------------------------------------------- */

typedef struct copier {
    const graph *from;
    graph *to;
    value **made; /* [value id] of the copy that is made */
} copier;

static void take_shape(value *to, const value *from) {
    to->type = from->type;
    to->shape = from->shape;
    to->needs_grad = from->needs_grad;
}

static void copy_inputs(copier *k, bool own) {
    for (int i = 0; i < k->from->n_inputs; i++) {
        const value *v = k->from->inputs[i];
        value **made = &k->made[v->id];
        if (*made && !own) continue;
        must(k->to->c, graph_add_input(k->to, v->name, v->type, &v->shape, made));
        take_shape(*made, v);
    }
}

static value *copy_of(copier *k, value *v) {
    if (v && v->data) must(k->to->c, graph_share_constant(k->to, v, &k->made[v->id]));
    return v ? k->made[v->id] : NULL;
}

static void copy_node(copier *k, const node *from) {
    value **in = NULL;
    node *n = NULL;

    must(k->to->c, NEW(k->to->c, in, from->n_in));
    for (int i = 0; i < from->n_in; i++) in[i] = copy_of(k, from->in[i]);
    k->to->in_backward = from->backward;
    must(k->to->c, graph_make_node(k->to, from->op, from->name, from->attrs, from->n_in, in, from->n_out, &n));
    for (int i = 0; i < from->n_out; i++) {
        if (!from->out[i]) continue;
        take_shape(n->out[i], from->out[i]);
        k->made[from->out[i]->id] = n->out[i];
    }
    graph_insert_node(k->to, n);
    k->to->in_backward = false;
}

static void copy_ends(copier *k, int first_input, int count) {
    const graph *g = k->from;

    for (int i = 0; i < g->n_outputs; i++) make_output(k->to, copy_of(k, g->outputs[i]));
    for (const state_write *w = g->writes; w; w = w->next)
        must(k->to->c, graph_add_write(k->to, copy_of(k, w->input), copy_of(k, w->value)));
    if (!g->input_grads) return;
    if (!k->to->input_grads) must(k->to->c, NEW(k->to->c, k->to->input_grads, (size_t)count * (size_t)g->n_inputs));
    k->to->n_input_grads = count * g->n_inputs;
    for (int i = 0; i < g->n_input_grads; i++)
        must(k->to->c, graph_set_end(k->to, &k->to->input_grads[first_input + i], copy_of(k, g->input_grads[i])));
}

/* Sizes that data decides: those of one graph, for each. */
static void copy_sizes(const graph *g, graph *to, int count) {
    int64_t *sizes = NULL;

    must(to->c, NEW(to->c, sizes, (size_t)count * (size_t)g->n_sizes));
    for (int i = 0; i < count * g->n_sizes; i++) sizes[i] = g->sizes[i % g->n_sizes];
    to->sizes = sizes;
    to->n_sizes = count * g->n_sizes;
}

static graph *copies_of(ctx *c, const graph *g, int count, bool own) {
    copier k = {.from = g, .to = new_graph(c)};

    k.to->opset = g->opset;
    k.to->cuda = g->cuda;
    k.to->padding_unseen = g->padding_unseen;
    k.to->n_random = g->n_random;
    if (g->n_sizes) copy_sizes(g, k.to, count);
    must(c, NEW(c, k.made, g->n_values));
    for (int i = 0; i < count; i++) {
        const int first_input = k.to->n_inputs;
        copy_inputs(&k, own);
        for (const node *n = g->first; n; n = n->next) copy_node(&k, n);
        copy_ends(&k, first_input, count);
    }
    return k.to;
}

/* --- measuring ------------------------------------------------------------------------------------------------------ */

static void measure(const graph *g, const char *pass, int count, bool own) {
    graph *all;
    ctx c;

    ctx_init(&c);
    all = copies_of(&c, g, count, own);
    effort_begin();
    for (pass_stage stage = BEFORE_GRADIENT; stage <= LAST; stage <<= 1) {
        const status s = passes_run(all, stage, ~pass_bit(pass), NULL);
        test_check(s == OK || s == E_PENDING, __FILE__, __LINE__, "copies of a graph are refused", c.err.text);
    }
    ctx_release(&c);
}

/* With sanitizers nothing is counted: a few copies are enough. */
#ifdef __SANITIZE_ADDRESS__
enum { NODES = 100 };
#else
enum { NODES = 2000 };
#endif

void check_copies(const graph *g, const char *pass) {
    const int nodes = count_nodes(g, NULL), count = NODES / (nodes ? nodes : 1) + 1;

    for (int own = g->input_grads != NULL; own < 2; own++) {
        char name[100];
        for (int times = 1; times <= 4; times *= 2) measure(g, pass, times * count, own);
        snprintf(name, sizeof name, "%s, copies of %s", pass, own ? "inputs of their own" : "the same inputs");
        check_blocks(name, (uint64_t)(8 * NODES));
    }
}
