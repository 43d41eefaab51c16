/* objects.c -- finds objects of some types among all that the garbage collector knows.
 *
 * In C, since no other thread runs meanwhile: a list of all objects, held while Python code goes through it, has a second
 * reference to tuples that another thread is just making, and CPython refuses to finish these. */
#include "py/py.h"

#include <string.h>

/* The module gc, which is there: an import would go through the builtins of the frame that runs, and that may have none (a
 * named tuple's `__new__`). */
static PyObject *gc_module(void) {
    PyObject *name = PyUnicode_FromString("gc"), *gc = name ? PyImport_GetModule(name) : NULL;

    Py_XDECREF(name);
    if (!gc && !PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "sys.modules has no gc any more");
    return gc;
}

/* Appends to `found` those of generation `generation` (-1: of all) whose type is one of `kinds` or a subtype. */
static bool append_objects(PyObject *found, PyObject *kinds, int generation) {
    const Py_ssize_t types = PyTuple_Size(kinds);
    PyObject *gc = gc_module(), *all;
    bool ok = true;

    if (!gc) return false;
    all = generation < 0 ? PyObject_CallMethod(gc, "get_objects", NULL)
                         : PyObject_CallMethod(gc, "get_objects", "i", generation);
    Py_DECREF(gc);
    for (Py_ssize_t i = 0, count = all ? PyList_Size(all) : 0; ok && i < count; i++) {
        PyObject *object = PyList_GetItem(all, i);
        bool one = false;
        for (Py_ssize_t k = 0; k < types && !one; k++)
            one = PyType_IsSubtype(Py_TYPE(object), (PyTypeObject *)PyTuple_GetItem(kinds, k));
        ok = !one || PyList_Append(found, object) == 0;
    }
    ok = ok && all;
    Py_XDECREF(all);
    return ok;
}

static bool are_types(PyObject *kinds) {
    for (Py_ssize_t k = 0; k < PyTuple_Size(kinds); k++)
        if (!PyType_Check(PyTuple_GetItem(kinds, k))) {
            PyErr_SetString(PyExc_TypeError, "objects are looked for by a tuple of types");
            return false;
        }
    return true;
}

PyObject *core_objects(PyObject *module, PyObject *args) {
    PyObject *kinds, *found;
    int generation = -1;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!|i:objects", &PyTuple_Type, &kinds, &generation)) return NULL;
    if (!are_types(kinds) || !(found = PyList_New(0))) return NULL;
    if (!append_objects(found, kinds, generation)) Py_CLEAR(found);
    return found;
}

/* --- what becomes old ------------------------------------------------------------------------------------------------ */

enum { MOST_NOTED = 200 }; /* then those that nothing else holds are let go of */

static bool let_go(PyObject *found) {
    PyObject *kept = PyList_New(0);
    bool ok = kept != NULL;

    for (Py_ssize_t i = 0; ok && i < PyList_Size(found); i++) {
        PyObject *object = PyList_GetItem(found, i);
        ok = Py_REFCNT(object) == 1 || PyList_Append(kept, object) == 0;
    }
    ok = ok && PyList_SetSlice(found, 0, PyList_Size(found), kept) == 0;
    Py_XDECREF(kept);
    return ok;
}

/* What the collector calls: (phase, {"generation": ...}). `self`: (kinds, found, the oldest of the young generations).
 * In C, since between this look at young objects and the collection no other thread may run and make some. */
static PyObject *note_young(PyObject *self, PyObject *args) {
    PyObject *kinds, *found, *info, *number;
    const char *phase;
    int oldest;

    if (!PyArg_ParseTuple(self, "OOi", &kinds, &found, &oldest)) return NULL;
    if (!PyArg_ParseTuple(args, "sO!:note_young", &phase, &PyDict_Type, &info)) return NULL;
    number = PyDict_GetItemString(info, "generation");
    if (strcmp(phase, "start") != 0 || !number || PyLong_AsLong(number) < oldest) Py_RETURN_NONE;
    if (PyList_Size(found) > MOST_NOTED && !let_go(found)) return NULL;
    for (int generation = 0; generation <= oldest; generation++)
        if (!append_objects(found, kinds, generation)) return NULL;
    Py_RETURN_NONE;
}

static PyMethodDef note_young_method = {"note_young", note_young, METH_VARARGS, NULL};

PyObject *core_noting(PyObject *module, PyObject *args) {
    PyObject *kinds, *found, *state, *function;
    int oldest;

    (void)module;
    if (!PyArg_ParseTuple(args, "O!O!i:noting", &PyTuple_Type, &kinds, &PyList_Type, &found, &oldest)) return NULL;
    if (!are_types(kinds) || !(state = Py_BuildValue("(OOi)", kinds, found, oldest))) return NULL;
    function = PyCFunction_NewEx(&note_young_method, state, NULL);
    Py_DECREF(state);
    return function;
}
