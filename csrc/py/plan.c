/* plan.c -- defines _core.Plan: what it is, and what it can be asked (run.c runs it). */
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

static PyObject *empty_values(const module_state *m, PyObject *tensor_type, value *const *list, int count) {
    PyObject *tensors = PyList_New(count);
    for (int i = 0; tensors && i < count; i++) {
        const value *v = list ? list[i] : NULL;
        PyObject *t = v ? tensor_empty(m, tensor_type, v->type, &v->shape) : Py_NewRef(Py_None);
        if (!t || PyList_SetItem(tensors, i, t) < 0) Py_CLEAR(tensors);
    }
    return tensors;
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

static PyObject *empty_outputs(PyObject *object, PyObject *args) {
    const module_state *m = state_of((PyObject *)Py_TYPE(object));
    PyObject *tensor_type;
    int has_arena = 0;
    status s;
    ctx c;

    if (!PyArg_ParseTuple(args, "O|p:empty_outputs", &tensor_type, &has_arena)) return NULL;
    ctx_init(&c);
    s = has_arena ? OK : plan_check_memory(&c, plan_of(object), false);
    ctx_release(&c);
    if (s != OK) return raise_status(m, &c.err);
    return empty_values(m, tensor_type, plan_of(object)->g->outputs, plan_of(object)->g->n_outputs);
}

static PyObject *no_memory(PyObject *object, PyObject *unused) {
    ctx c;

    (void)unused;
    ctx_init(&c);
    if (plan_no_memory(&c, plan_of(object), false) != OK) raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    ctx_release(&c);
    return NULL;
}

static PyMethodDef plan_methods[] = {
    {"forward", (PyCFunction)(void (*)(void))plan_forward, METH_VARARGS | METH_KEYWORDS, plan_forward_doc},
    {"backward", (PyCFunction)(void (*)(void))plan_backward, METH_VARARGS | METH_KEYWORDS, plan_backward_doc},
    {"backward_part", (PyCFunction)(void (*)(void))plan_backward_part, METH_VARARGS | METH_KEYWORDS,
     plan_backward_part_doc},
    {"no_memory", no_memory, METH_NOARGS,
     PyDoc_STR("no_memory() -> MemoryError: an arena for a run cannot be had; it names what is the largest there")},
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

static PyType_Slot plan_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("A plan: instructions over one arena, for fixed shapes. Made by Model.plan.")},
    {Py_tp_dealloc, plan_dealloc},
    {Py_tp_methods, plan_methods},
    {Py_tp_getset, plan_attributes},
    {0, NULL},
};

static PyType_Spec plan_spec = {
    .name = "ortmodule._core.Plan",
    .basicsize = sizeof(plan_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = plan_slots,
};

PyObject *plan_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &plan_spec, NULL); }
