/* test_host_call.c -- tests nodes that the host runs, with a host in C whose nodes double their first operand. */
#include "build.h"
#include "graph/host.h"
#include "machine.h"
#include "test.h"

enum { ROWS = 2, COLUMNS = 3, COUNT = ROWS * COLUMNS, CALLS = 8 };

typedef struct twice {
    host base;
    bool known; /* what the results are like; otherwise it is after a node has run */
    bool fails_to_ask, fails_to_run;
    int asked, calls, probes, gradients; /* how often */
    int64_t numbers[CALLS];              /* of the calls, in their order */
} twice;

/* Only the first operand receives a gradient. */
static status ask(const host *h, ctx *c, const node *n, host_answer *out) {
    twice *t = (twice *)(uintptr_t)h;

    t->asked++;
    if (t->fails_to_ask) return fail(c, E_FOREIGN, "the host does not answer");
    out->known = t->known;
    for (int i = 0; i < n->n_out - 1; i++) {
        out->types[i] = n->in[0]->type;
        out->shapes[i] = n->in[0]->shape;
    }
    out->gradients[0] = true;
    return OK;
}

static status run_node(const host *h, ctx *c, const call *k) {
    twice *t = (twice *)(uintptr_t)h;
    const char *what = k->node->op->name;
    const bool backward = strcmp(what, "HostGrad") == 0;
    const tensor *to = &k->out[backward ? 0 : 1];

    if (t->fails_to_run) return fail(c, E_FOREIGN, "the host raises");
    if (strcmp(what, "HostProbe") == 0) {
        t->probes++;
        t->known = true;
        return OK;
    }
    if (backward) t->gradients++;
    else if (t->calls < CALLS) t->numbers[t->calls++] = node_int(k->node, "number");
    for (int64_t i = 0; tensor_present(to) && i < COUNT; i++)
        ((double *)to->data)[i] = 2 * ((const double *)k->in[0].data)[i];
    return OK;
}

static twice new_host(bool known) { return (twice){.base = {.ask = ask, .run = run_node}, .known = known}; }

static compile_options options_for(const twice *t) {
    static const bool output_grads[] = {true};
    return (compile_options){.output_grads = output_grads, .host = t ? &t->base : NULL};
}

static const input_spec specs[] = {SPEC(F64, true, ROWS, COLUMNS), SPEC(F64, true, ROWS, COLUMNS)};

static value *python_op(graph *g, int64_t number_, int n_in, value *const *in) {
    const op_def *op = op_find(ORT_DOMAIN, "PythonOp", 0);
    node *n = NULL;

    must(g->c,
         graph_add_node(g, op, op->name, NODE_ATTRS(INT("number", number_), INT("given", n_in)), n_in, in, 2, &n));
    return n->out[1];
}

/* call(a, b) * a, and two equal calls whose results no node reads. */
static graph *new_model(ctx *c) {
    graph *g = NULL;
    value *a, *b, *y;
    node *n = NULL;

    must(c, graph_new(c, &g));
    must(c, graph_add_input(g, "a", F64, &specs[0].shape, &a));
    must(c, graph_add_input(g, "b", F64, &specs[1].shape, &b));
    y = python_op(g, 3, 2, (value *[]){a, b});
    python_op(g, 5, 1, &a);
    python_op(g, 5, 1, &a);
    must(c, graph_add_node(g, op_find("", "Mul", 18), "Mul", NULL, 2, (value *[]){y, a}, 1, &n));
    make_output(g, n->out[0]);
    return g;
}

static void check_step(machine *m, twice *t) {
    const double *a = m->memory[AT_INPUT][0], *y = m->memory[AT_OUTPUT][0], *da = m->memory[AT_INPUT_GRAD][0];
    const double *db = m->memory[AT_INPUT_GRAD][1];
    double *dy = m->memory[AT_OUTPUT_GRAD][0];

    machine_fill(m, 0, 1, -1, 1);
    machine_fill(m, 1, 2, -1, 1);
    for (int i = 0; i < COUNT; i++) dy[i] = i;
    t->calls = t->gradients = 0;
    CHECK_OK(&m->c, machine_forward(m));
    CHECK(t->calls == 3 && t->numbers[0] == 3 && t->numbers[1] == 5 && t->numbers[2] == 5);
    CHECK(t->gradients == 0);
    CHECK_OK(&m->c, machine_backward(m));
    CHECK(t->calls == 3 && t->gradients == 1);
    CHECK(db == NULL);
    for (int i = 0; i < COUNT; i++) {
        CHECK(y[i] == 2 * a[i] * a[i]);
        CHECK(da[i] == dy[i] * 2 * a[i] + 2 * (dy[i] * a[i]));
    }
}

TEST(host_call_runs_forward_and_backward) {
    twice t = new_host(true);
    const compile_options o = options_for(&t);
    machine m;
    ctx c;

    ctx_init(&c);
    if (CHECK_OK(&m.c, machine_make(&m, new_model(&c), specs, &o))) {
        CHECK(t.asked == 3 && t.calls == 0);
        check_step(&m, &t);
    }
    machine_free(&m);
    ctx_release(&c);
}

/* Sizes that only running tells: a prologue runs the first node, and the plan after it is complete. */
TEST(host_call_probes_what_it_does_not_know) {
    twice t = new_host(false);
    const compile_options o = options_for(&t);
    const graph *model;
    machine m;
    ctx c;

    ctx_init(&c);
    model = new_model(&c);
    if (CHECK_OK(&m.c, machine_make(&m, model, specs, &o))) {
        CHECK(m.p->g->pending != NULL && count_nodes(m.p->g, "HostProbe") == 1);
        CHECK(count_nodes(m.p->g, "HostCall") == 0);
        CHECK_OK(&m.c, machine_forward(&m));
        CHECK(t.probes == 1 && t.calls == 0);
    }
    machine_free(&m);
    if (CHECK_OK(&m.c, machine_make(&m, model, specs, &o))) {
        CHECK(m.p->g->pending == NULL);
        check_step(&m, &t);
        CHECK(t.probes == 1);
    }
    machine_free(&m);
    ctx_release(&c);
}

/* What the host fails with goes out as it is; the next step runs in the same plan. */
TEST(host_call_fails_and_runs_again) {
    twice t = new_host(true);
    const compile_options o = options_for(&t), without = options_for(NULL);
    const graph *model;
    machine m;
    ctx c;

    ctx_init(&c);
    model = new_model(&c);
    t.fails_to_ask = true;
    CHECK_FAILS(&m.c, E_FOREIGN, "the host does not answer", machine_make(&m, model, specs, &o));
    machine_free(&m);
    CHECK_FAILS(&m.c, E_UNSUPPORTED, "PythonOp runs a function of the process",
                machine_make(&m, model, specs, &without));
    machine_free(&m);

    t.fails_to_ask = false;
    if (CHECK_OK(&m.c, machine_make(&m, model, specs, &o))) {
        t.fails_to_run = true;
        CHECK_FAILS(&m.c, E_FOREIGN, "the host raises", machine_forward(&m));
        t.fails_to_run = false;
        check_step(&m, &t);
        t.fails_to_run = true;
        CHECK_FAILS(&m.c, E_FOREIGN, "the host raises", machine_backward(&m));
        t.fails_to_run = false;
        check_step(&m, &t);
        m.host = NULL;
        CHECK_FAILS(&m.c, E_UNSUPPORTED, "no host", machine_forward(&m));
    }
    machine_free(&m);
    ctx_release(&c);
}

/* Inference: no gradient is made, and the calls are the same. */
TEST(host_call_without_gradients) {
    twice t = new_host(true);
    const compile_options o = {.host = &t.base};
    machine m;
    ctx c;

    ctx_init(&c);
    if (CHECK_OK(&m.c, machine_make(&m, new_model(&c), specs, &o))) {
        CHECK(count_nodes(m.p->g, "HostGrad") == 0);
        CHECK_OK(&m.c, machine_forward(&m));
        CHECK(t.calls == 3 && t.gradients == 0);
    }
    machine_free(&m);
    ctx_release(&c);
}
