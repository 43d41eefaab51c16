/* objects.c -- finds objects of some types among all that the garbage collector knows.
 *
 * In C, since no other thread runs meanwhile: a list of all objects, held while Python code goes through it, has a second
 * reference to tuples that another thread is just making, and CPython refuses to finish these. */
#include "py/py.h"

/* Those of `all`, a list, whose type is one of `kinds` or a subtype. */
static PyObject *of_types(PyObject *all, PyObject *kinds) {
    const Py_ssize_t count = PyList_Size(all), types = PyTuple_Size(kinds);
    PyObject *found = PyList_New(0);

    for (Py_ssize_t i = 0; found && i < count; i++) {
        PyObject *object = PyList_GetItem(all, i);
        bool one = false;
        for (Py_ssize_t k = 0; k < types && !one; k++)
            one = PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)PyTuple_GetItem(kinds, k));
        if (one && PyList_Append(found, object) < 0) Py_CLEAR(found);
    }
    return found;
}

PyObject *core_objects(PyObject *module, PyObject *args) {
    PyObject *kinds, *gc, *all, *found = NULL;
    int generation = -1;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!|i:objects", &PyTuple_Type, &kinds, &generation)) return NULL;
    for (Py_ssize_t k = 0; k < PyTuple_Size(kinds); k++)
        if (!PyType_Check(PyTuple_GetItem(kinds, k))) {
            PyErr_SetString(PyExc_TypeError, "objects takes a tuple of types");
            return NULL;
        }
    if (!(gc = PyImport_ImportModule("gc"))) return NULL;
    all = generation < 0 ? PyObject_CallMethod(gc, "get_objects", NULL)
                         : PyObject_CallMethod(gc, "get_objects", "i", generation);
    if (all) found = of_types(all, kinds);
    Py_XDECREF(all);
    Py_DECREF(gc);
    return found;
}
