/* plan_attributes.c -- says what _core.Plan is without running it: its attributes. */
#include "plan/cost.h"
#include "py/plan.h"

#include <stdlib.h>
#include <string.h>

static PyObject *value_specs(value *const *list, int count) {
    PyObject *specs = PyList_New(count);
    for (int i = 0; specs && i < count; i++) {
        PyObject *s = list && list[i] ? build_spec(list[i]->type, &list[i]->shape) : Py_NewRef(Py_None);
        if (!s || PyList_SetItem(specs, i, s) < 0) Py_CLEAR(specs);
    }
    return specs;
}

static PyObject *flag_list(const bool *flags, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) PyList_SetItem(list, i, PyBool_FromLong(flags[i]));
    return list;
}

static PyObject *get_outputs(PyObject *object, void *unused) {
    (void)unused;
    return value_specs(plan_of(object)->g->outputs, plan_of(object)->g->n_outputs);
}

static PyObject *get_output_grads(PyObject *object, void *unused) {
    (void)unused;
    return value_specs(plan_of(object)->g->output_grads, plan_of(object)->g->n_outputs);
}

static PyObject *get_input_grads(PyObject *object, void *unused) {
    (void)unused;
    return value_specs(plan_of(object)->g->input_grads, plan_model_inputs(plan_of(object)));
}

static PyObject *get_differentiates(PyObject *object, void *unused) {
    const graph *g = plan_of(object)->g;
    bool any = false;

    (void)unused;
    for (int i = 0; g->input_grads && i < g->n_input_grads; i++) any |= g->input_grads[i] != NULL;
    return PyBool_FromLong(any);
}

static PyObject *get_writes(PyObject *object, void *unused) {
    const plan *p = plan_of(object);
    PyObject *list = PyList_New(0);

    (void)unused;
    for (const state_write *w = p->g->writes; list && w; w = w->next) {
        PyObject *row = Py_BuildValue("(iN)", w->input->input, build_spec(w->value->type, &w->value->shape));
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *get_reads_input(PyObject *object, void *unused) {
    (void)unused;
    return flag_list(plan_of(object)->reads_input, plan_model_inputs(plan_of(object)));
}

static PyObject *get_reads_output(PyObject *object, void *unused) {
    (void)unused;
    return flag_list(plan_of(object)->reads_output, plan_of(object)->g->n_outputs);
}

static PyObject *get_gradient_lives(PyObject *object, void *unused) {
    const plan *p = plan_of(object);
    int count = plan_model_inputs(p), *lives = calloc(2 * (size_t)p->g->n_inputs + 1, sizeof *lives);
    PyObject *list = lives ? PyList_New(count) : PyErr_NoMemory();

    (void)unused;
    if (list) plan_gradient_lives(p, lives, lives + p->g->n_inputs);
    for (int i = 0; list && i < count; i++) {
        const int *first = &lives[i], *last = first + p->g->n_inputs;
        PyObject *row = *first < 0 ? Py_NewRef(Py_None) : Py_BuildValue("(ii)", *first, *last);
        if (!row || PyList_SetItem(list, i, row) < 0) Py_CLEAR(list);
    }
    free(lives);
    return list;
}

static PyObject *get_arena_bytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(plan_of(object)->arena_bytes);
}

static PyObject *get_joint_bytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(plan_of(object)->joint_bytes);
}

static PyObject *get_torch_bytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(plan_of(object)->torch_bytes);
}

static PyObject *get_offload_bytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(plan_of(object)->offload_bytes);
}

static PyObject *get_offloaded(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLong(plan_of(object)->again.n_offloaded);
}

static PyObject *get_recomputed(PyObject *object, void *unused) {
    const recompute_result *r = &plan_of(object)->again;
    (void)unused;
    return Py_BuildValue("(id)", r->count, r->total > 0 ? r->cost / r->total : 0.0);
}

static PyObject *get_order(PyObject *object, void *unused) {
    (void)unused;
    return PyUnicode_FromString(order_names[plan_of(object)->order]);
}

static PyObject *get_orders(PyObject *object, void *unused) {
    PyObject *dict = PyDict_New();

    (void)unused;
    for (int i = 0; dict && i < ORDER_RULES; i++) {
        PyObject *number = PyLong_FromLongLong(plan_of(object)->orders[i]);
        if (!number || PyDict_SetItemString(dict, order_names[i], number) < 0) Py_CLEAR(dict);
        Py_XDECREF(number);
    }
    return dict;
}

static PyObject *get_work(PyObject *object, void *unused) {
    const plan *p = plan_of(object);
    PyObject *found = NULL;
    work_sum w = {0};
    status s = OK;
    ctx c;

    (void)unused;
    ctx_init(&c);
    for (int t = 0; t < p->n_code && s == OK; t++) s = work_of_node(&c, p->code[t].node, &w);
    if (s == OK) found = Py_BuildValue("(ddddd)", w.products[0], w.products[1], w.others, w.bytes, w.moved);
    else raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    ctx_release(&c);
    return found;
}

static PyObject *get_compiles(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLong(plan_of(object)->compiles);
}

static PyObject *cluster_row(const recompute_cluster *x) {
    PyObject *bytes = PyTuple_New(x->count);
    for (int i = 0; bytes && i < x->count; i++) {
        PyObject *number = PyLong_FromLongLong(x->bytes[i]);
        if (!number || PyTuple_SetItem(bytes, i, number) < 0) Py_CLEAR(bytes);
    }
    return bytes ? Py_BuildValue("(siiN)", x->name, (int)x->strategy, x->again, bytes) : NULL;
}

static PyObject *get_clusters(PyObject *object, void *unused) {
    const recompute_result *r = &plan_of(object)->again;
    PyObject *list = PyList_New(r->n_clusters);

    (void)unused;
    for (int k = 0; list && k < r->n_clusters; k++) {
        PyObject *row = cluster_row(&r->clusters[k]);
        if (!row || PyList_SetItem(list, k, row) < 0) Py_CLEAR(list);
    }
    return list;
}

static PyObject *get_constant_bytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromLongLong(plan_of(object)->constant_bytes);
}

static PyObject *get_graphs(PyObject *object, void *unused) {
    replay *graphs = ((plan_object *)object)->graphs;
    const replay_counts n = graphs ? replay_count(graphs) : (replay_counts){0};

    (void)unused;
    return Py_BuildValue("(LLL)", (long long)n.recorded, (long long)n.updated, (long long)n.started);
}

static PyObject *get_profiled(PyObject *object, void *unused) {
    const plan_object *self = (plan_object *)object;
    (void)unused;
    return Py_BuildValue("(LL)", (long long)__atomic_load_n(&self->profiled[0], __ATOMIC_RELAXED),
                         (long long)__atomic_load_n(&self->profiled[1], __ATOMIC_RELAXED));
}

static PyObject *get_host_bytes(PyObject *object, void *unused) {
    (void)unused;
    return PyLong_FromSize_t(((plan_object *)object)->c.mem.total);
}

static PyObject *get_nodes(PyObject *object, void *unused) {
    (void)unused;
    return Py_BuildValue("(ii)", plan_of(object)->n_forward, plan_of(object)->n_code - plan_of(object)->n_forward);
}

static PyObject *get_random(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(plan_of(object)->random);
}

static PyObject *get_prologue(PyObject *object, void *unused) {
    (void)unused;
    return PyBool_FromLong(plan_of(object)->g->pending != NULL);
}

static PyObject *get_pending_keys(PyObject *object, void *unused) {
    const graph *g = plan_of(object)->g;
    PyObject *keys = PyList_New(g->n_pending);

    (void)unused;
    for (int i = 0; keys && i < g->n_pending; i++) {
        PyObject *key = PyLong_FromLongLong(g->pending_sizes[i].key);
        if (!key || PyList_SetItem(keys, i, key) < 0) Py_CLEAR(keys);
    }
    return keys;
}

/* Is it a prologue whose only output an operator of this name computes? (A pass may have replaced the pending value.) */
static PyObject *is_prologue_of(PyObject *object, const char *name) {
    const graph *g = plan_of(object)->g;
    const node *last = g->pending && g->n_outputs ? g->outputs[0]->def : NULL;
    return PyBool_FromLong(last && strcmp(last->op->name, name) == 0);
}

static PyObject *get_bounded(PyObject *object, void *unused) {
    (void)unused;
    return is_prologue_of(object, "RowCount");
}

static PyObject *get_probe(PyObject *object, void *unused) {
    (void)unused;
    return is_prologue_of(object, "HostProbe");
}

static PyObject *get_fired(PyObject *object, void *unused) {
    PyObject *dict = PyDict_New();

    (void)unused;
    for (int i = 0; dict && passes[i]; i++) {
        int times = plan_of(object)->fired[i];
        PyObject *count = times ? PyLong_FromLong(times) : NULL;
        if (count && PyDict_SetItemString(dict, passes[i]->name, count) < 0) Py_CLEAR(dict);
        Py_XDECREF(count);
    }
    return dict;
}

static PyObject *get_through_torch(PyObject *object, void *unused) {
    const plan *p = plan_of(object);
    const bool on_cpu = ((const plan_object *)object)->device == ON_CPU; /* a GPU's plan calls its own libraries */
    PyObject *set = PySet_New(NULL);

    (void)unused;
    for (int t = 0; set && on_cpu && t < p->n_code; t++) {
        const node *n = p->code[t].node;
        const char *aten = n->op->through_torch ? n->op->through_torch(n) : NULL;
        PyObject *name = aten ? PyUnicode_FromString(aten) : NULL;
        if (aten && (!name || PySet_Add(set, name) < 0)) Py_CLEAR(set);
        Py_XDECREF(name);
    }
    return set;
}

PyGetSetDef plan_attributes[] = {
    {"outputs", get_outputs, NULL, "(dtype, shape) of each output", NULL},
    {"output_grads", get_output_grads, NULL, "(dtype, shape) or None for each output", NULL},
    {"input_grads", get_input_grads, NULL, "(dtype, shape) or None for each input", NULL},
    {"differentiates", get_differentiates, NULL, "whether any input gets a gradient", NULL},
    {"gradient_lives", get_gradient_lives, NULL,
     "(first, last) or None for each input: backward is done with input and gradient before instruction `last`, and\n"
     "uses the gradient's memory from `first` on",
     NULL},
    {"writes", get_writes, NULL, "[(input index, (dtype, shape)), ...]: inputs whose memory forward changes", NULL},
    {"reads_input", get_reads_input, NULL, "for each input: does backward read it?", NULL},
    {"reads_output", get_reads_output, NULL, "for each output: does backward read it?", NULL},
    {"arena_bytes", get_arena_bytes, NULL, "bytes of the arena a run needs", NULL},
    {"joint_bytes", get_joint_bytes, NULL,
     "bytes of an arena that holds the gradients, too; 0: they are too small for that, or the plan is for a GPU", NULL},
    {"torch_bytes", get_torch_bytes, NULL, "the most that torch takes for itself in one instruction, on the CPU; about",
     NULL},
    {"offload_bytes", get_offload_bytes, NULL, "bytes that a run needs elsewhere, for activations that are offloaded",
     NULL},
    {"offloaded", get_offloaded, NULL, "activations that are written elsewhere in forward, and read back in backward",
     NULL},
    {"recomputed", get_recomputed, NULL,
     "(values that backward computes again, the share of a step's work that this adds, estimated)", NULL},
    {"order", get_order, NULL, "which of `orders` its instructions have: as written, where no other takes less", NULL},
    {"orders", get_orders, NULL,
     "{order: the most bytes that values need at one time}: as written, and in other orders", NULL},
    {"work", get_work, NULL,
     "(of products, of those in 16 bits, of other kernels, bytes, bytes moved elsewhere), all estimated", NULL},
    {"compiles", get_compiles, NULL, "how often the model was compiled until the plan was within its budget", NULL},
    {"clusters", get_clusters, NULL,
     "[(operators, strategy, places made again, (bytes of each place, ...)), ...], of a plan that was asked for them:\n"
     "what backward can compute again",
     NULL},
    {"constant_bytes", get_constant_bytes, NULL, "bytes of the constants that a plan for a GPU keeps there", NULL},
    {"graphs", get_graphs, NULL,
     "(recorded, updated, started): how often a CUDA graph of this plan was made, took an older one's place, and ran",
     NULL},
    {"profiled", get_profiled, NULL, "(forward, backward) runs that were measured since profile(True)", NULL},
    {"host_bytes", get_host_bytes, NULL, "bytes the plan itself takes", NULL},
    {"nodes", get_nodes, NULL, "(forward, backward) instructions", NULL},
    {"fired", get_fired, NULL, "{pass name: how often it changed something}", NULL},
    {"through_torch", get_through_torch, NULL, "ATen operators that instructions run through torch", NULL},
    {"prologue", get_prologue, NULL, "whether this only computes the next sizes that data decides", NULL},
    {"pending_keys", get_pending_keys, NULL, "of a prologue, a key for each of its sizes, as sizes= of plan takes it",
     NULL},
    {"bounded", get_bounded, NULL, "whether that size is a bound: a plan for a larger one is right, too", NULL},
    {"probe", get_probe, NULL, "whether it is a prologue for what the host does not know yet", NULL},
    {"random", get_random, NULL, "whether a run needs a seed", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};
