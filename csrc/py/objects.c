/* objects.c -- finds objects of some types, and what refers to some, among all that the garbage collector knows.
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

/* --- frozen ones ------------------------------------------------------------------------------------------------------ */

enum { INTERPRETERS = 1000 }; /* so many frozen objects are the interpreter's own, which it makes at its start */

/* Has the program frozen objects (gc.freeze)? No look of the collector's finds those. Negative: an error. */
static int has_frozen(PyObject *gc) {
    PyObject *count = PyObject_CallMethod(gc, "get_freeze_count", NULL);
    const Py_ssize_t frozen = count ? PyLong_AsSsize_t(count) : -1;

    Py_XDECREF(count);
    return frozen < 0 ? -1 : frozen > INTERPRETERS;
}

/* Freezes all objects but `others`, a list that loses those that the collector does not track any more. It freezes all that
 * it tracks, and what is frozen and becomes garbage in a circle of references is never freed. */
static bool freeze_but(PyObject *gc, PyObject *others) {
    const Py_ssize_t count = PyList_Size(others);
    PyObject *done;

    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyList_GetItem(others, i);
        if (PyObject_GC_IsTracked(object)) PyObject_GC_UnTrack(object);
        else PyList_SetItem(others, i, Py_NewRef(Py_None));
    }
    done = PyObject_CallMethod(gc, "freeze", NULL);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *object = PyList_GetItem(others, i);
        if (object != Py_None) PyObject_GC_Track(object);
    }
    Py_XDECREF(done);
    return done != NULL;
}

/* Takes `object` out of the list. */
static bool leave_out(PyObject *list, const PyObject *object) {
    for (Py_ssize_t i = PyList_Size(list); i-- > 0;)
        if (PyList_GetItem(list, i) == object && PyList_SetSlice(list, i, i + 1, NULL) != 0) return false;
    return true;
}

/* The list that `look`(*arguments) gives while no object is frozen. */
static PyObject *look_unfrozen(PyObject *gc, PyObject *look, PyObject *arguments) {
    PyObject *others = PyObject_CallMethod(gc, "get_objects", NULL), *done, *found, *type, *value, *traceback;

    if (!others) return NULL;
    done = PyObject_CallMethod(gc, "unfreeze", NULL);
    found = done ? PyObject_CallObject(look, arguments) : NULL;
    PyErr_Fetch(&type, &value, &traceback);
    if ((done && !freeze_but(gc, others)) || (found && !leave_out(found, others))) Py_CLEAR(found);
    if (type) PyErr_Restore(type, value, traceback);
    Py_XDECREF(done);
    Py_DECREF(others);
    return found;
}

/* The list that the collector's function `name` gives for the arguments, frozen objects among it. No collection comes
 * meanwhile, and no other thread runs. */
static PyObject *look_at_all(PyObject *gc, const char *name, PyObject *arguments) {
    PyObject *look = PyObject_GetAttrString(gc, name), *found = NULL;
    const int frozen = look ? has_frozen(gc) : -1;
    const int collects = PyGC_Disable();

    if (frozen >= 0) found = frozen ? look_unfrozen(gc, look, arguments) : PyObject_CallObject(look, arguments);
    if (collects) PyGC_Enable();
    Py_XDECREF(look);
    return found;
}

/* --- looks ------------------------------------------------------------------------------------------------------------ */

/* Appends to `found` those of generation `generation` (-1: of all, frozen ones too) whose type is one of `kinds` or a subtype. */
static bool append_objects(PyObject *found, PyObject *kinds, int generation) {
    const Py_ssize_t types = PyTuple_Size(kinds);
    PyObject *gc = gc_module(), *all;
    bool ok = true;

    if (!gc) return false;
    all =
        generation < 0 ? look_at_all(gc, "get_objects", NULL) : PyObject_CallMethod(gc, "get_objects", "i", generation);
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

PyObject *core_referrers(PyObject *module, PyObject *objects) {
    PyObject *gc, *arguments, *found = NULL;

    (void)module;
    if (!PyList_Check(objects)) return PyErr_Format(PyExc_TypeError, "what is referred to is given as a list");
    gc = gc_module();
    arguments = gc ? PyList_AsTuple(objects) : NULL;
    if (arguments) found = look_at_all(gc, "get_referrers", arguments);
    if (found && !(leave_out(found, objects) && leave_out(found, arguments))) Py_CLEAR(found);
    Py_XDECREF(arguments);
    Py_XDECREF(gc);
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
