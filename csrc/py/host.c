/* host.c -- nodes that Python runs: the engine's call becomes a method call on an object of Python's.
 *
 * Tensors that Python gets own their memory, since autograd and user code may keep them; what it returns is copied. */
#include "py/host.h"

#include "ops/op.h"

#include <string.h>

/* An exception is set. */
static status failed(ctx *c) { return fail(c, E_FOREIGN, "a function of Python's failed"); }

static PyObject *specs_of(value *const *values, int count) {
    PyObject *specs = PyTuple_New(count);
    for (int i = 0; specs && i < count; i++) {
        PyObject *s = build_spec(values[i]->type, &values[i]->shape);
        if (!s || PyTuple_SetItem(specs, i, s) < 0) Py_CLEAR(specs);
    }
    return specs;
}

/* --- ask ------------------------------------------------------------------------------------------------------------ */

static int parse_outputs(PyObject *outputs, int count, host_answer *out) {
    if (!PyTuple_Check(outputs) || PyTuple_Size(outputs) != count) {
        PyErr_Format(PyExc_TypeError, "a node of Python's has %d results, described as %R", count, outputs);
        return -1;
    }
    for (int i = 0; i < count; i++) {
        PyObject *name, *sizes;
        if (!PyArg_ParseTuple(PyTuple_GetItem(outputs, i), "OO", &name, &sizes)) return -1;
        if (parse_dtype(name, &out->types[i]) < 0 || parse_shape(sizes, &out->shapes[i]) < 0) return -1;
    }
    return 0;
}

static int parse_gradients(PyObject *flags, int count, host_answer *out) {
    if (!PyTuple_Check(flags) || PyTuple_Size(flags) != count) {
        PyErr_Format(PyExc_TypeError, "a node of Python's has %d operands, described as %R", count, flags);
        return -1;
    }
    for (int i = 0; i < count; i++) out->gradients[i] = PyTuple_GetItem(flags, i) == Py_True;
    return 0;
}

static int ask(const python_host *self, const node *n, host_answer *out) {
    PyObject *specs = specs_of(n->in, n->n_in), *outputs, *flags, *answer = NULL;
    int bad = -1;

    if (specs) answer = PyObject_CallMethod(self->object, "ask", "iO", (int)node_int(n, "number"), specs);
    if (answer == Py_None) bad = 0;
    else if (answer && PyArg_ParseTuple(answer, "OO", &outputs, &flags))
        bad = parse_outputs(outputs, n->n_out - 1, out) || parse_gradients(flags, n->n_in, out) ? -1 : 0;
    out->known = bad == 0 && answer != Py_None;
    Py_XDECREF(answer);
    Py_XDECREF(specs);
    return bad;
}

static status host_ask(const host *h, ctx *c, const node *n, host_answer *out) {
    PyGILState_STATE lock = PyGILState_Ensure();
    int bad = ask((const python_host *)h, n, out);

    PyGILState_Release(lock);
    return bad ? failed(c) : OK;
}

/* --- run ------------------------------------------------------------------------------------------------------------ */

/* Copies of the first `count` operands; None for one that is absent. */
static PyObject *copies(const call *k, int count) {
    PyObject *list = PyList_New(count);

    for (int i = 0; list && i < count; i++) {
        const tensor *t = &k->in[i];
        PyObject *copy = Py_None;
        void *memory;
        if (t->type == DT_NONE) {
            Py_INCREF(copy);
        } else if ((copy = tensor_empty(NULL, t->type, &t->shape))) {
            size_t bytes = (size_t)tensor_count(t) * dtype_size(t->type);
            if (tensor_address(copy, ON_CPU, t->type, &t->shape, "operand", i, &memory) < 0) Py_CLEAR(copy);
            else if (bytes) memcpy(memory, t->data, bytes);
        }
        if (!copy || PyList_SetItem(list, i, copy) < 0) Py_CLEAR(list);
    }
    return list;
}

/* `results` become the outputs from `first` on. */
static int take(PyObject *results, const call *k, int first) {
    Py_ssize_t count = PySequence_Size(results);

    if (count != k->n_out - first) {
        if (count >= 0)
            PyErr_Format(PyExc_RuntimeError, "a node of Python's returned %zd tensors, not %d", count,
                         k->n_out - first);
        return -1;
    }
    for (int i = first; i < k->n_out; i++) {
        const tensor *t = &k->out[i];
        PyObject *result;
        void *memory;
        int bad;
        if (t->type == DT_NONE) continue;
        if (!(result = PySequence_GetItem(results, i - first))) return -1;
        bad = tensor_address(result, ON_CPU, t->type, &t->shape, "result", i - first, &memory);
        if (!bad && shape_count(&t->shape)) memcpy(t->data, memory, (size_t)tensor_count(t) * dtype_size(t->type));
        Py_DECREF(result);
        if (bad) return -1;
    }
    return 0;
}

static PyObject *numbers(const node *n, const char *name) {
    const int64_t *list;
    int count = node_ints(n, name, &list);
    PyObject *tuple = PyTuple_New(count < 0 ? 0 : count);

    for (int i = 0; tuple && i < count; i++) {
        PyObject *number = PyLong_FromLongLong(list[i]);
        if (!number || PyTuple_SetItem(tuple, i, number) < 0) Py_CLEAR(tuple);
    }
    return tuple;
}

static int run_node(const python_host *self, const call *k) {
    const node *n = k->node;
    const char *kind = n->op->name;
    bool backward = strcmp(kind, "HostGrad") == 0, probe = strcmp(kind, "HostProbe") == 0;
    PyObject *given = copies(k, backward ? k->n_in : (int)node_int(n, "given"));
    PyObject *expected = probe      ? Py_NewRef(Py_None)
                         : backward ? numbers(n, "wanted")
                                    : specs_of(n->out + 1, n->n_out - 1);
    PyObject *results = NULL;
    int bad = -1;

    if (given && expected)
        results = PyObject_CallMethod(self->object, backward ? "backward" : "forward", "iOO",
                                      (int)node_int(n, "number"), given, expected);
    if (results) bad = probe ? 0 : take(results, k, backward ? 0 : 1);
    Py_XDECREF(given);
    Py_XDECREF(expected);
    Py_XDECREF(results);
    return bad;
}

static status host_run(const host *h, ctx *c, const call *k) {
    PyGILState_STATE lock = PyGILState_Ensure();
    int bad = run_node((const python_host *)h, k);

    PyGILState_Release(lock);
    return bad ? failed(c) : OK;
}

const host *python_host_init(python_host *self, PyObject *object) {
    if (!object || object == Py_None) return NULL;
    self->functions = (host){host_ask, host_run};
    self->object = object;
    return &self->functions;
}
