/* host_call.c -- nodes that the host runs: a Python function, forward and backward.
 *
 * A model has PythonOp. Only the host knows the types and shapes of its results, so specialisation makes it a HostCall
 * with these written into it; where the host has to run it to know them, a HostProbe ends a prologue. The first result
 * of all is a number without a meaning, for a caller that keeps the node. HostGrad is tied to its HostCall by their
 * number: all calls run in forward, in their order, as they may have effects. */
#include "graph/host.h"
#include "ops/op.h"

#include <string.h>

/* --- types and shapes as attributes --------------------------------------------------------------------------------- */

typedef struct specs {
    int count, n_sizes;
    int64_t *types, *ranks, *sizes;
} specs;

static status specs_new(ctx *c, int count, specs *s) {
    *s = (specs){.count = count};
    TRY(NEW(c, s->types, count + 1));
    TRY(NEW(c, s->ranks, count + 1));
    return NEW(c, s->sizes, (size_t)count * MAX_RANK + 1);
}

static void specs_set(specs *s, int i, dtype type, const shape *sh) {
    s->types[i] = type;
    s->ranks[i] = sh->rank;
    for (int d = 0; d < sh->rank; d++) s->sizes[s->n_sizes++] = sh->dim[d];
}

static status infer_specs(graph *g, node *n) {
    const int64_t *types, *ranks, *sizes;
    int count = node_ints(n, "types", &types);

    if (count != n->n_out || node_ints(n, "ranks", &ranks) != count || node_ints(n, "sizes", &sizes) < 0)
        return fail(g->c, E_INVALID, "%s has %d results and describes %d", n->op->name, n->n_out, count);
    for (int i = 0; i < count; i++) {
        shape s = {.rank = (int)ranks[i]};
        for (int d = 0; d < s.rank; d++) s.dim[d] = *sizes++;
        TRY(set_out(g, n, i, (dtype)types[i], &s));
    }
    return OK;
}

/* --- forward -------------------------------------------------------------------------------------------------------- */

/* The node runs once without results; after that the host knows its sizes. */
static status probe(graph *g, const node *n) {
    const op_def *op = op_find(ORT_DOMAIN, "HostProbe", 0);
    value *v;

    TRY(graph_emit_op(g, op, n->attrs, n->n_in, n->in, 1, &v));
    g->pending = v;
    return fail(g->c, E_PENDING, "the sizes of what Python returns are not known");
}

static status lower_python_op(graph *g, const node *n, value **out) {
    const op_def *op = op_find(ORT_DOMAIN, "HostCall", 0);
    int count = n->n_out - 1;
    host_answer a = {0};
    int64_t *gradients;
    specs s;

    if (!g->host) return fail(g->c, E_UNSUPPORTED, "PythonOp runs a function of the process that captured it");
    for (int i = 0; i < n->n_in; i++) TRY(require(g, n, i));
    TRY(NEW(g->c, a.types, count + 1));
    TRY(NEW(g->c, a.shapes, count + 1));
    TRY(NEW(g->c, a.gradients, n->n_in + 1));
    TRY(g->host->ask(g->host, g->c, n, &a));
    if (!a.known) return probe(g, n);
    TRY(specs_new(g->c, n->n_out, &s));
    TRY(NEW(g->c, gradients, n->n_in + 1));
    specs_set(&s, 0, I64, &SCALAR);
    for (int i = 0; i < count; i++) specs_set(&s, i + 1, a.types[i], &a.shapes[i]);
    for (int i = 0; i < n->n_in; i++) gradients[i] = a.gradients[i];
    return graph_emit_op(g, op,
                         NODE_ATTRS(INT("number", node_int(n, "number")), INT("given", node_int(n, "given")),
                                    INTS("types", n->n_out, s.types), INTS("ranks", n->n_out, s.ranks),
                                    INTS("sizes", s.n_sizes, s.sizes), INTS("gradients", n->n_in, gradients)),
                         n->n_in, n->in, n->n_out, out);
}

static status host_cpu(ctx *c, const call *k) {
    if (!k->host) return fail(c, E_UNSUPPORTED, "this run has no host to run a Python function");
    if (strcmp(k->node->op->name, "HostGrad") != 0 && k->out[0].data) *(int64_t *)k->out[0].data = 0;
    return k->host->run(k->host, c, k);
}

kernel_fn host_cuda; /* cuda/kernels/host_call.c */

/* --- backward ------------------------------------------------------------------------------------------------------- */

static status grad_host_call(graph *g, const node *n, value *const dy[], value *dx[]) {
    const int64_t *gradients;
    int flags = node_ints(n, "gradients", &gradients), count = 0;
    int64_t *wanted;
    value **results;
    specs s;

    TRY(NEW(g->c, wanted, n->n_in + 1));
    TRY(NEW(g->c, results, n->n_in + 1));
    TRY(specs_new(g->c, n->n_in, &s));
    for (int i = 0; i < n->n_in && i < flags; i++) {
        if (!need(n, i) || !gradients[i]) continue;
        specs_set(&s, count, n->in[i]->type, &n->in[i]->shape);
        wanted[count++] = i;
    }
    if (!count) return OK;
    TRY(graph_emit(g, "HostGrad",
                   NODE_ATTRS(INT("number", node_int(n, "number")), INTS("wanted", count, wanted),
                              INTS("types", count, s.types), INTS("ranks", count, s.ranks),
                              INTS("sizes", s.n_sizes, s.sizes)),
                   n->n_out - 1, dy + 1, count, results));
    for (int i = 0; i < count; i++) dx[wanted[i]] = results[i];
    return OK;
}

static status infer_probe(graph *g, node *n) { return set_out(g, n, 0, I64, &SCALAR); }

/* clang-format off */
#define CALL_ATTRS INT("number", 0), INT("given", 0)
#define SPEC_ATTRS NO_DEFAULT("types", INTS), NO_DEFAULT("ranks", INTS), NO_DEFAULT("sizes", INTS)

const op_def host_call_ops[] = {
    {.name = "PythonOp", .domain = ORT_DOMAIN, .since = 1, .max_in = VARIADIC, .max_out = VARIADIC,
     .flags = EFFECT | IN_MODELS, .attrs = NODE_ATTRS(CALL_ATTRS), .lower = lower_python_op},
    {.name = "HostCall", .domain = ORT_DOMAIN, .since = 1, .plain = ALL_OPERANDS, .max_in = VARIADIC, .max_out = VARIADIC, .flags = EFFECT,
     .attrs = NODE_ATTRS(CALL_ATTRS, SPEC_ATTRS, NO_DEFAULT("gradients", INTS)),
     .infer = infer_specs, .grad = grad_host_call, .cpu = host_cpu, .cuda = host_cuda},
    {.name = "HostProbe", .domain = ORT_DOMAIN, .since = 1, .plain = ALL_OPERANDS, .max_in = VARIADIC, .max_out = 1, .flags = EFFECT | NO_GRAD,
     .attrs = NODE_ATTRS(CALL_ATTRS), .infer = infer_probe, .cpu = host_cpu, .cuda = host_cuda},
    {.name = "HostGrad", .domain = ORT_DOMAIN, .since = 1, .plain = ALL_OPERANDS, .max_in = VARIADIC, .max_out = VARIADIC,
     .flags = KEEP | NO_GRAD, .attrs = NODE_ATTRS(INT("number", 0), NO_DEFAULT("wanted", INTS), SPEC_ATTRS),
     .infer = infer_specs, .cpu = host_cpu, .cuda = host_cuda},
    {0},
};
/* clang-format on */
