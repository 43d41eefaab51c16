/* host.c -- nodes that Python runs: the engine's call becomes a method call on an object of Python's.
 *
 * Tensors that Python gets own their memory, since autograd and user code may keep them; what it returns is copied.
 * Operators that write into none of their operands get the run's inputs as they are. */
#include "py/host.h"

#include "cuda/host/driver.h"
#include "ops/op.h"

#include <string.h>

/* An exception is set. */
static status failed(ctx *c) { return fail(c, E_FOREIGN, "a function of Python's failed"); }

/* Type and shape; of a number that is known when it is asked for, its value, too: results may be as large as it says. */
static PyObject *spec_of(const value *v, bool numbers) {
    PyObject *spec = build_spec(v->type, &v->shape), *more;

    if (!spec || !numbers || v->type != I64 || v->shape.rank || !v->data) return spec;
    more = Py_BuildValue("(OOL)", PyTuple_GetItem(spec, 0), PyTuple_GetItem(spec, 1),
                         (long long)*(const int64_t *)v->data);
    Py_DECREF(spec);
    return more;
}

static PyObject *specs_of(value *const *values, int count, bool numbers) {
    PyObject *specs = PyTuple_New(count);
    for (int i = 0; specs && i < count; i++) {
        PyObject *s = spec_of(values[i], numbers);
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
    PyObject *specs = specs_of(n->in, n->n_in, true), *outputs, *flags, *answer = NULL;
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

static int device_of(const call *k) { return k->cuda ? k->cuda->device : ON_CPU; }

static status copy(ctx *c, const call *k, void *to, const void *from, size_t bytes) {
    if (k->cuda) return cuda_copy_bytes(c, k, to, from, bytes);
    if (bytes) memcpy(to, from, bytes);
    return OK;
}

/* A tensor of Python's for an operand, on the device of the run. */
static PyObject *new_operand(const python_host *self, const call *k, const tensor *t) {
    if (!k->cuda) return tensor_empty(NULL, NULL, t->type, &t->shape);
    PyObject *spec = build_spec(t->type, &t->shape);
    PyObject *made = spec ? PyObject_CallMethod(self->object, "empty", "(O)", spec) : NULL;
    Py_XDECREF(spec);
    return made;
}

/* Does this node take the run's inputs without copies? */
static bool is_shared(const python_host *self, const call *k) {
    PyObject *shared = self->inputs ? PyObject_GetAttrString(self->object, "shared") : NULL;
    PyObject *number = shared ? PyLong_FromLongLong(node_int(k->node, "number")) : NULL;
    const bool found = number && PySequence_Contains(shared, number) == 1;

    PyErr_Clear();
    Py_XDECREF(number);
    Py_XDECREF(shared);
    return found;
}

/* The run's input that an operand is, apart from autograd; NULL: it is none. */
static PyObject *input_for(const python_host *self, const tensor *t) {
    for (int i = 0; tensor_count(t) && i < self->n_inputs; i++) {
        void *memory;
        if (self->at[i] != t->data) continue;
        PyObject *input = PySequence_GetItem(self->inputs, i), *found = NULL;
        if (input && tensor_address(input, ON_CPU, t->type, &t->shape, "input", i, &memory) == 0)
            found = PyObject_CallMethod(input, "detach", NULL);
        PyErr_Clear(); /* another view of that memory */
        Py_XDECREF(input);
        if (found) return found;
    }
    return NULL;
}

static status copy_operand(const python_host *self, ctx *c, const call *k, int i, bool shared, PyObject **out) {
    const tensor *t = &k->in[i];
    void *memory;

    if (t->type == DT_NONE) {
        *out = Py_NewRef(Py_None);
        return OK;
    }
    if (shared && dtype_is_float(t->type) && (*out = input_for(self, t))) return OK; /* indices may be refilled */
    if (!(*out = new_operand(self, k, t))) return failed(c);
    if (tensor_address(*out, device_of(k), t->type, &t->shape, "operand", i, &memory) < 0) return failed(c);
    return copy(c, k, memory, t->data, (size_t)tensor_count(t) * dtype_size(t->type));
}

/* *out: copies of the first `count` operands; None for one that is absent. */
static status copies(const python_host *self, ctx *c, const call *k, int count, PyObject **out) {
    const bool shared = is_shared(self, k);

    if (!(*out = PyList_New(count))) return failed(c);
    for (int i = 0; i < count; i++) {
        PyObject *operand = NULL;
        status s = copy_operand(self, c, k, i, shared, &operand);
        if (s != OK) {
            Py_XDECREF(operand);
            return s;
        }
        if (PyList_SetItem(*out, i, operand) < 0) return failed(c);
    }
    return OK;
}

/* `results` become the outputs from `first` on. */
static status take(PyObject *results, ctx *c, const call *k, int first) {
    Py_ssize_t count = PySequence_Size(results);

    if (count != k->n_out - first) {
        if (count >= 0)
            PyErr_Format(PyExc_RuntimeError, "a node of Python's returned %zd tensors, not %d", count,
                         k->n_out - first);
        return failed(c);
    }
    for (int i = first; i < k->n_out; i++) {
        const tensor *t = &k->out[i];
        PyObject *result;
        void *memory;
        status s;
        if (t->type == DT_NONE) continue;
        if (!(result = PySequence_GetItem(results, i - first))) return failed(c);
        s = tensor_address(result, device_of(k), t->type, &t->shape, "result", i - first, &memory) < 0
                ? failed(c)
                : copy(c, k, t->data, memory, (size_t)tensor_count(t) * dtype_size(t->type));
        Py_DECREF(result);
        TRY(s);
    }
    return OK;
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

static status run_node(const python_host *self, ctx *c, const call *k) {
    const node *n = k->node;
    const char *kind = n->op->name;
    bool backward = strcmp(kind, "HostGrad") == 0, probe = strcmp(kind, "HostProbe") == 0;
    PyObject *given = NULL, *results = NULL;
    PyObject *expected = probe      ? Py_NewRef(Py_None)
                         : backward ? numbers(n, "wanted")
                                    : specs_of(n->out + 1, n->n_out - 1, false);
    status s = expected ? copies(self, c, k, backward ? k->n_in : (int)node_int(n, "given"), &given) : failed(c);

    if (s == OK) {
        results = PyObject_CallMethod(self->object, backward ? "backward" : "forward", "iOO",
                                      (int)node_int(n, "number"), given, expected);
        s = !results ? failed(c) : probe ? OK : take(results, c, k, backward ? 0 : 1);
    }
    Py_XDECREF(given);
    Py_XDECREF(expected);
    Py_XDECREF(results);
    return s;
}

static status host_run(const host *h, ctx *c, const call *k) {
    PyGILState_STATE lock = PyGILState_Ensure();
    status s = run_node((const python_host *)h, c, k);

    PyGILState_Release(lock);
    return s;
}

const host *python_host_init(python_host *self, PyObject *object) {
    if (!object || object == Py_None) return NULL;
    self->functions = (host){host_ask, host_run};
    self->object = object;
    self->inputs = NULL;
    self->n_inputs = 0;
    return &self->functions;
}
