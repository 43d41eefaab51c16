/* number.c -- defines _core.Number: an int64 on its way from a GPU, for Python. */
#include "cuda/host/driver.h"
#include "py/py.h"

typedef struct {
    PyObject_HEAD int device;
    cuda_number *n;
} number_object;

static status start(ctx *c, int device, void *stream, const void *from, cuda_number **out) {
    cuda_run where;

    TRY(cuda_begin(c, device, stream, &where));
    return cuda_end(c, &where, cuda_number_read(c, &where, from, out));
}

PyObject *core_read(PyObject *module, PyObject *args) {
    module_state *m = state_of(module);
    PyTypeObject *type = (PyTypeObject *)m->number_type;
    unsigned long long stream = 0;
    PyObject *object;
    number_object *self;
    void *from;
    int device;
    ctx c;

    if (!PyArg_ParseTuple(args, "Oi|K:read", &object, &device, &stream)) return NULL;
    if (tensor_address(object, device, I64, &SCALAR, "number", 0, &from) < 0) return NULL;
    if (!(self = (number_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0))) return NULL;
    self->device = device;
    ctx_init(&c);
    if (start(&c, device, (void *)(uintptr_t)stream, from, &self->n) != OK) {
        raise_status(m, &c.err);
        Py_CLEAR(self);
    }
    ctx_release(&c);
    return (PyObject *)self;
}

static status get(ctx *c, const number_object *self, int64_t *out) {
    cuda_run where;

    TRY(cuda_begin(c, self->device, NULL, &where));
    return cuda_end(c, &where, cuda_number_get(c, self->n, out));
}

static PyObject *number_value(PyObject *object, PyObject *unused) {
    PyObject *result = NULL;
    int64_t found = 0;
    ctx c;
    status s;

    (void)unused;
    ctx_init(&c);
    Py_BEGIN_ALLOW_THREADS s = get(&c, (number_object *)object, &found);
    Py_END_ALLOW_THREADS if (s == OK) { result = PyLong_FromLongLong(found); }
    else {
        raise_status(state_of((PyObject *)Py_TYPE(object)), &c.err);
    }
    ctx_release(&c);
    return result;
}

static void number_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);

    cuda_number_free(((number_object *)object)->n);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef number_methods[] = {
    {"value", number_value, METH_NOARGS,
     PyDoc_STR("value() -> the number; waits until it is there, not for what the stream was given since")},
    {NULL, NULL, 0, NULL},
};

static PyType_Slot number_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("A number on its way from a GPU. Made by read.")},
    {Py_tp_dealloc, number_dealloc},
    {Py_tp_methods, number_methods},
    {0, NULL},
};

static PyType_Spec number_spec = {
    .name = "ortmodule._core.Number",
    .basicsize = sizeof(number_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = number_slots,
};

PyObject *number_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &number_spec, NULL); }
