/* plan.c -- _core.Plan: what it is, and what it can be asked (run.c runs it). */
#include "py/plan.h"

#include "onnx/write.h"
#include "plan/peak.h"

#include <stdlib.h>
#include <string.h>

PyObject *plan_object_new(module_state *m, PyObject *model, ctx *c, plan *p, int device, const char *folder) {
    PyTypeObject *type = (PyTypeObject *)m->plan_type;
    plan_object *self = (plan_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0);

    if (!self) {
        ctx_release(c);
        return NULL;
    }
    self->c = *c;
    p->g->c = &self->c;
    self->p = p;
    self->device = device;
    self->graphs = device == ON_CPU ? NULL : replay_new(p);
    self->model = Py_NewRef(model);
    if (folder && !(self->folder = strdup(folder))) {
        Py_DECREF(self);
        return PyErr_NoMemory();
    }
    return (PyObject *)self;
}

static void plan_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    plan_object *self = (plan_object *)object;

    replay_free(self->graphs);
    ctx_release(&self->c);
    free(self->seconds);
    free(self->folder);
    Py_XDECREF(self->spare_room);
    if (!self->was_captured) Py_XDECREF(self->constants);
    Py_XDECREF(self->model);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

PyDoc_STRVAR(keep_doc,
             "keep(memory, stream=0): a tensor of constant_bytes on the plan's GPU, which gets its constants.");

static status upload(ctx *c, plan_object *self, void *stream, char *memory) {
    const plan *p = self->p;
    cuda_run where;
    status s = OK;

    TRY(cuda_begin(c, self->device, stream, &where));
    for (int i = 0; i < p->n_constants && s == OK; i++) {
        const device_constant *k = &p->constants[i];
        s = cuda_upload(c, &where, memory + k->offset, k->data, (size_t)k->bytes);
    }
    return cuda_end(c, &where, s);
}

static PyObject *plan_keep(PyObject *object, PyObject *args) {
    plan_object *self = (plan_object *)object;
    unsigned long long stream = 0;
    PyObject *memory, *old = self->constants, *result = NULL;
    int64_t bytes;
    void *at;
    ctx c;

    if (!PyArg_ParseTuple(args, "O|K:keep", &memory, &stream)) return NULL;
    if (tensor_bytes(memory, self->device, "the memory of constants", &at, &bytes) < 0) return NULL;
    if (bytes < self->p->constant_bytes) {
        PyErr_Format(PyExc_ValueError, "the constants take %lld bytes", (long long)self->p->constant_bytes);
        return NULL;
    }
    if ((uintptr_t)at % PLAN_ALIGNED_ON_GPU != 0) {
        PyErr_Format(PyExc_ValueError, "the memory of constants is not aligned to %d", (int)PLAN_ALIGNED_ON_GPU);
        return NULL;
    }
    ctx_init(&c);
    if (upload(&c, self, (void *)(uintptr_t)stream, at) == OK) {
        self->constants = Py_NewRef(memory);
        Py_XDECREF(old);
        result = Py_NewRef(Py_None);
    } else {
        raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    }
    ctx_release(&c);
    return result;
}

/* --- asking ------------------------------------------------------------------------------------------------------------- */

/* Of times that runs under way add to (exec/exec.c). */
static double seconds_now(const plan_object *self, int t) {
    double x = 0;
    if (self->profiling) __atomic_load(&self->seconds[t], &x, __ATOMIC_RELAXED);
    return x;
}

static void forget_seconds(plan_object *self) {
    double zero = 0;
    for (int t = 0; t < self->p->n_code; t++) __atomic_store(&self->seconds[t], &zero, __ATOMIC_RELAXED);
    for (int i = 0; i < 2; i++) __atomic_store_n(&self->profiled[i], 0, __ATOMIC_RELAXED);
}

static PyObject *plan_profile(PyObject *object, PyObject *flag) {
    plan_object *self = (plan_object *)object;
    int on = PyObject_IsTrue(flag);

    if (on < 0) return NULL;
    if (on && !self->seconds && !(self->seconds = calloc((size_t)self->p->n_code + 1, sizeof *self->seconds)))
        return PyErr_NoMemory();
    if (on && !self->profiling) forget_seconds(self);
    self->profiling = on;
    return Py_NewRef(Py_None);
}

static PyObject *plan_code(PyObject *object, PyObject *unused) {
    const plan_object *self = (plan_object *)object;
    const plan *p = self->p;
    PyObject *list = PyList_New(p->n_code);

    (void)unused;
    for (int t = 0; list && t < p->n_code; t++) {
        const node *n = p->code[t].node;
        const value *v = n->n_out ? n->out[0] : NULL;
        PyObject *row =
            Py_BuildValue("(sssdN)", n->op->name, n->name ? n->name : "", t < p->n_forward ? "forward" : "backward",
                          seconds_now(self, t), v ? build_spec(v->type, &v->shape) : Py_NewRef(Py_None));
        if (!row || PyList_SetItem(list, t, row) < 0) Py_CLEAR(list);
    }
    return list;
}

/* An operand as plan_graph gives it: what makes it, by its number, an input by its name, or None. */
static PyObject *operand_of(const value *v) {
    if (!v || v->data) return Py_NewRef(Py_None);
    if (!v->def && v->name) return PyUnicode_FromString(v->name);
    return PyLong_FromLong(v->id);
}

static PyObject *operands_of(value *const *list, int count) {
    PyObject *found = PyList_New(count);
    for (int i = 0; found && i < count; i++) {
        PyObject *one = operand_of(list[i]);
        if (!one || PyList_SetItem(found, i, one) < 0) Py_CLEAR(found);
    }
    return found;
}

static PyObject *plan_graph(PyObject *object, PyObject *unused) {
    const plan *p = ((plan_object *)object)->p;
    int *at = malloc(sizeof *at * ((size_t)p->g->n_nodes + 1));
    PyObject *list = at ? PyList_New(0) : PyErr_NoMemory();

    (void)unused;
    for (int i = 0; list && i < p->g->n_nodes; i++) at[i] = -1;
    for (int t = 0; list && t < p->n_code; t++) at[p->code[t].node->id] = t;
    for (const node *n = p->g->first; list && n; n = n->next) {
        const value *v = n->n_out ? n->out[0] : NULL;
        const int pass = made_by_pass(&p->made, n);
        PyObject *row =
            Py_BuildValue("(sssNNNisO)", n->op->name, n->name ? n->name : "", n->backward ? "backward" : "forward",
                          operands_of(n->in, n->n_in), operands_of(n->out, n->n_out),
                          v && v->type != DT_NONE ? build_spec(v->type, &v->shape) : Py_NewRef(Py_None), at[n->id],
                          pass < 0 ? "" : passes[pass]->name, n->again ? Py_True : Py_False);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    free(at);
    return list;
}

/* (kind, operator, name, part, type and shape or None) of what a block is for. */
static PyObject *use_of_block(const plan *p, const interval *b, const block_use *what, bool gradient) {
    const char *part = b->first < p->n_forward ? "forward" : "backward";
    const value *v = what->value;

    if (!what->node) return Py_BuildValue("(ssssO)", "fixed", "", "", part, Py_None);
    return Py_BuildValue("(ssssN)",
                         gradient ? "gradient"
                         : v      ? "value"
                                  : "workspace",
                         what->node->op->name, what->node->name ? what->node->name : "", part,
                         v ? build_spec(v->type, &v->shape) : Py_NewRef(Py_None));
}

static PyObject *plan_blocks(PyObject *object, PyObject *args) {
    const plan *p = ((plan_object *)object)->p;
    const interval *blocks;
    PyObject *list;
    int joint = 0, n;

    if (!PyArg_ParseTuple(args, "|p:blocks", &joint)) return NULL;
    blocks = plan_arena_blocks(p, joint, &n);
    list = PyList_New(0);
    for (int i = 0; list && i < n; i++) {
        const interval *b = &blocks[i];
        PyObject *row = Py_BuildValue("(LLiiN)", (long long)b->offset, (long long)b->bytes, b->first, b->last,
                                      use_of_block(p, b, &p->of_block[i], i >= p->n_blocks));
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *find_peak(PyObject *object, PyObject *args) {
    const plan *p = ((plan_object *)object)->p;
    PyObject *result = NULL;
    int64_t bytes;
    int at, joint = 0;
    ctx c;

    if (!PyArg_ParseTuple(args, "|p:peak", &joint)) return NULL;
    ctx_init(&c);
    if (plan_peak(&c, p, joint, &at, &bytes) == OK) result = Py_BuildValue("(iL)", at, (long long)bytes);
    else raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    ctx_release(&c);
    return result;
}

static PyObject *plan_text(PyObject *object, PyObject *unused) {
    graph view =
        *((plan_object *)object)->p->g; /* with memory of its own: the plan does not grow, and may be running */
    PyObject *result = NULL;
    const char *text;
    ctx c;

    (void)unused;
    ctx_init(&c);
    view.c = &c;
    if (graph_print(&view, &text) == OK) result = PyUnicode_FromString(text);
    else raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    ctx_release(&c);
    return result;
}

static PyObject *plan_onnx(PyObject *object, PyObject *unused) {
    plan_object *self = (plan_object *)object;
    PyObject *result = NULL;
    const void *bytes;
    size_t n;
    ctx c;

    (void)unused;
    ctx_init(&c);
    if (onnx_write(&c, self->p->g, &bytes, &n) == OK) result = PyBytes_FromStringAndSize(bytes, (Py_ssize_t)n);
    else raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    ctx_release(&c);
    return result;
}

static PyObject *value_specs(value *const *list, int count) {
    PyObject *specs = PyList_New(count);
    for (int i = 0; specs && i < count; i++) {
        PyObject *s = list && list[i] ? build_spec(list[i]->type, &list[i]->shape) : Py_NewRef(Py_None);
        if (!s || PyList_SetItem(specs, i, s) < 0) Py_CLEAR(specs);
    }
    return specs;
}

static PyObject *empty_values(PyObject *tensor_type, value *const *list, int count) {
    PyObject *tensors = PyList_New(count);
    for (int i = 0; tensors && i < count; i++) {
        const value *v = list ? list[i] : NULL;
        PyObject *t = v ? tensor_empty(tensor_type, v->type, &v->shape) : Py_NewRef(Py_None);
        if (!t || PyList_SetItem(tensors, i, t) < 0) Py_CLEAR(tensors);
    }
    return tensors;
}

static PyObject *flag_list(const bool *flags, int count) {
    PyObject *list = PyList_New(count);
    for (int i = 0; list && i < count; i++) PyList_SetItem(list, i, PyBool_FromLong(flags[i]));
    return list;
}

const plan *plan_for_cpu(PyObject *object) {
    const plan_object *self = (plan_object *)object;
    return self->device == ON_CPU ? self->p : NULL;
}

const plan *plan_for_gpu(PyObject *object, int *device) {
    const plan_object *self = (plan_object *)object;
    *device = self->device;
    return self->device == ON_CPU ? NULL : self->p;
}

static const plan *plan_of(PyObject *object) { return ((plan_object *)object)->p; }

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

static PyObject *empty_outputs(PyObject *object, PyObject *args) {
    PyObject *tensor_type;
    int has_arena = 0;
    status s;
    ctx c;

    if (!PyArg_ParseTuple(args, "O|p:empty_outputs", &tensor_type, &has_arena)) return NULL;
    ctx_init(&c);
    s = has_arena ? OK : plan_check_memory(&c, plan_of(object), false);
    ctx_release(&c);
    if (s != OK) return raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    return empty_values(tensor_type, plan_of(object)->g->outputs, plan_of(object)->g->n_outputs);
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

static PyObject *get_foreign(PyObject *object, void *unused) {
    const plan *p = plan_of(object);
    const bool on_cpu = ((const plan_object *)object)->device == ON_CPU; /* a GPU's plan calls its own libraries */
    PyObject *set = PySet_New(NULL);

    (void)unused;
    for (int t = 0; set && on_cpu && t < p->n_code; t++) {
        const node *n = p->code[t].node;
        const char *aten = n->op->foreign ? n->op->foreign(n) : NULL;
        PyObject *name = aten ? PyUnicode_FromString(aten) : NULL;
        if (aten && (!name || PySet_Add(set, name) < 0)) Py_CLEAR(set);
        Py_XDECREF(name);
    }
    return set;
}

static PyMethodDef plan_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))plan_forward, METH_VARARGS | METH_KEYWORDS, plan_forward_doc},
    {"backward", (PyCFunction)(void (*)(void))plan_backward, METH_VARARGS | METH_KEYWORDS, plan_backward_doc},
    {"backward_part", (PyCFunction)(void (*)(void))plan_backward_part, METH_VARARGS | METH_KEYWORDS,
     plan_backward_part_doc},
    {"take_room", plan_take_room, METH_NOARGS, plan_take_room_doc},
    {"give_room", plan_give_room, METH_O, plan_give_room_doc},
    {"reads", plan_reads, METH_VARARGS, plan_reads_doc},
    {"empty_outputs", empty_outputs, METH_VARARGS,
     PyDoc_STR("empty_outputs(torch.Tensor, has_arena=False) -> a new tensor for each output")},
    {"empty_input_grads", plan_empty_input_grads, METH_VARARGS, plan_empty_input_grads_doc},
    {"joint_arena", plan_joint_arena, METH_VARARGS, plan_joint_arena_doc},
    {"keep", plan_keep, METH_VARARGS, keep_doc},
    {"profile", plan_profile, METH_O, PyDoc_STR("profile(on): measure each instruction from now on, or stop.")},
    {"code", plan_code, METH_NOARGS,
     PyDoc_STR("code() -> [(operator, name, part, seconds, (dtype, shape)), ...] in the order of execution")},
    {"graph", plan_graph, METH_NOARGS,
     PyDoc_STR(
         "graph() -> [(operator, name, part, operands, results, (dtype, shape) or None, instruction, pass, again),\n"
         "...]: the nodes; operands are numbers of results, names of inputs or None; instruction: -1 for a view;\n"
         "again: backward computes it again")},
    {"blocks", plan_blocks, METH_VARARGS,
     PyDoc_STR(
         "blocks(joint=False) -> [(offset, bytes, first, last, (kind, operator, name, part, (dtype, shape) or None)),\n"
         "...]: what an arena holds from one instruction to another; kind: value, workspace, gradient or fixed")},
    {"peak", find_peak, METH_VARARGS,
     PyDoc_STR(
         "peak(joint=False) -> (instruction, bytes): when the blocks of the arena, or of the joint one, have the\n"
         "most bytes in all, and how many")},
    {"text", plan_text, METH_NOARGS, PyDoc_STR("text() -> the graph, one node a line")},
    {"onnx", plan_onnx, METH_NOARGS, PyDoc_STR("onnx() -> the graph as the bytes of an ONNX model")},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef plan_getset[] = {
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
    {"offload_bytes", get_offload_bytes, NULL, "bytes that a run needs elsewhere, for activations that are offloaded",
     NULL},
    {"offloaded", get_offloaded, NULL, "activations that are written elsewhere in forward, and read back in backward",
     NULL},
    {"recomputed", get_recomputed, NULL,
     "(values that backward computes again, the share of a step's work that this adds, estimated)", NULL},
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
    {"foreign", get_foreign, NULL, "ATen operators that instructions run through torch", NULL},
    {"prologue", get_prologue, NULL, "whether this only computes the next sizes that data decides", NULL},
    {"pending_keys", get_pending_keys, NULL, "of a prologue, a key for each of its sizes, as sizes= of plan takes it",
     NULL},
    {"bounded", get_bounded, NULL, "whether that size is a bound: a plan for a larger one is right, too", NULL},
    {"probe", get_probe, NULL, "whether it is a prologue for what the host does not know yet", NULL},
    {"random", get_random, NULL, "whether a run needs a seed", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("A plan: instructions over one arena, for fixed shapes. Made by Model.plan.")},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_getset},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "ortmodule._core.Plan",
    .basicsize = sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = plan_slots,
};

PyObject *plan_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &plan_spec, NULL); }
