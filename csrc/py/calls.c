/* calls.c -- tells a capture of the calls that it looks at, among all of a thread. */
#include "py/py.h"

#include <string.h>

/* CPython's own, outside of its stable interface, the same in every version. sys.setprofile hands each call and each
 * return to a function of Python's, and before 3.13 with a dictionary of the frame's variables: half of a capture. */
typedef int (*profile_hook)(PyObject *, PyFrameObject *, int, PyObject *);
void PyEval_SetProfile(profile_hook hook, PyObject *object);
enum { PYTHON_CALLED = 0, C_CALLED = 4 };

/* What a capture looks at, and whom to tell: a tuple. The hook is given a function of C's that is bound to it, which
 * sys.getprofile hands out and sys.setprofile takes back. */
enum { CALLED, BEGAN, FUNCTIONS, OWNERS, BASES, SEEN, RAN, IS_TRACED };

static PyObject *part(PyObject *parts, int which) { return PyTuple_GetItem(parts, which); }

/* 1: a function of C's that a capture looks at; 0: another; -1 with an exception set. */
static int is_looked_at(PyObject *parts, PyObject *function) {
    PyObject *owner = PyObject_TypeCheck(function, &PyCFunction_Type) ? PyCFunction_GetSelf(function) : NULL;
    PyObject *owners = part(parts, OWNERS), *bases = part(parts, BASES);

    if (!owner) return 0;
    if (Py_TYPE(owner) == &PyModule_Type) return PySet_Contains(part(parts, FUNCTIONS), function);
    for (Py_ssize_t i = PyTuple_Size(owners); i-- > 0;)
        if ((PyObject *)Py_TYPE(owner) == PyTuple_GetItem(owners, i)) return 1;
    for (Py_ssize_t i = PyTuple_Size(bases); i-- > 0;)
        if (PyType_IsSubtype(Py_TYPE(owner), (PyTypeObject *)PyTuple_GetItem(bases, i))) return 1;
    return 0;
}

/* Notes a function of Python's that runs for the first time while there is a trace: RAN has it with its globals. */
static int note(PyObject *parts, PyFrameObject *frame, PyObject *code, PyObject *key) {
    PyObject *state = PyObject_CallNoArgs(part(parts, IS_TRACED)), *globals = NULL;
    int failed = !state;

    if (state && state != Py_None) {
        globals = PyObject_GetAttrString((PyObject *)frame, "f_globals");
        /* As it is alive from now on, no other code gets its address. */
        failed = !globals || PyDict_SetItem(part(parts, RAN), code, globals) < 0 ||
                 PyDict_SetItem(part(parts, SEEN), key, code) < 0;
    }
    Py_XDECREF(globals);
    Py_XDECREF(state);
    return failed ? -1 : 0;
}

/* 1: a function of Python's that a capture looks at at each call; 0: another; -1 with an exception set. */
static int begins(PyObject *parts, PyFrameObject *frame) {
    PyObject *code = (PyObject *)PyFrame_GetCode(frame);
    PyObject *key = PyLong_FromVoidPtr(code); /* to hash a code object is to hash what is in it */
    PyObject *seen = key ? PyDict_GetItemWithError(part(parts, SEEN), key) : NULL;
    int result = seen == Py_True;

    if (PyErr_Occurred()) result = -1;
    else if (!seen) result = note(parts, frame, code, key);
    Py_XDECREF(key);
    Py_DECREF(code);
    return result;
}

static int look(PyObject *bound, PyFrameObject *frame, int event, PyObject *function) {
    PyObject *parts = Py_NewRef(PyCFunction_GetSelf(bound)), *said = NULL;
    int found = 0;

    if (event == C_CALLED && (found = is_looked_at(parts, function)) > 0)
        said = PyObject_CallFunctionObjArgs(part(parts, CALLED), frame, function, PyCFunction_GetSelf(function), NULL);
    else if (event == PYTHON_CALLED && (found = begins(parts, frame)) > 0)
        said = PyObject_CallFunctionObjArgs(part(parts, BEGAN), frame, NULL);
    if (found < 0 || (found > 0 && !said)) {
        PyEval_SetProfile(NULL, NULL); /* as after an error in a function that sys.setprofile was given */
        found = -1;
    }
    Py_XDECREF(said);
    Py_DECREF(parts);
    return found < 0 ? -1 : 0;
}

static PyObject *take_back(PyObject *parts, PyObject *args);

static PyMethodDef bound_method = {"look", take_back, METH_VARARGS, PyDoc_STR("look(frame, event, function)")};

/* What sys.setprofile calls for the first event: the hook is in its place from now on. */
static PyObject *take_back(PyObject *parts, PyObject *args) {
    PyObject *frame, *function, *bound;
    const char *event;
    int failed;

    if (!PyArg_ParseTuple(args, "OsO:look", &frame, &event, &function)) return NULL;
    if (!(bound = PyCFunction_New(&bound_method, parts))) return NULL;
    PyEval_SetProfile(look, bound);
    failed = look(bound, (PyFrameObject *)frame,
                  strcmp(event, "call") == 0     ? PYTHON_CALLED
                  : strcmp(event, "c_call") == 0 ? C_CALLED
                                                 : -1,
                  function);
    Py_DECREF(bound);
    return failed ? NULL : Py_NewRef(Py_None);
}

PyObject *core_look_at_calls(PyObject *module, PyObject *args) {
    PyObject *of[8], *bound;

    (void)module;
    if (!PyArg_ParseTuple(args, "OOO!O!O!O!O!O:look_at_calls", &of[CALLED], &of[BEGAN], &PySet_Type, &of[FUNCTIONS],
                          &PyTuple_Type, &of[OWNERS], &PyTuple_Type, &of[BASES], &PyDict_Type, &of[SEEN], &PyDict_Type,
                          &of[RAN], &of[IS_TRACED]))
        return NULL;
    for (int which = OWNERS; which <= BASES; which++)
        for (Py_ssize_t i = PyTuple_Size(of[which]); i-- > 0;)
            if (!PyType_Check(PyTuple_GetItem(of[which], i))) {
                PyErr_SetString(PyExc_TypeError, "look_at_calls: owners and bases are types");
                return NULL;
            }
    if (!(bound = PyCFunction_New(&bound_method, args))) return NULL;
    PyEval_SetProfile(look, bound);
    Py_DECREF(bound);
    return Py_NewRef(Py_None);
}
