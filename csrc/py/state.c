/* state.c -- keeps the state of ortmodule._core, and turns a status into an exception. */
#include "py/py.h"

#include <string.h>

module_state *state_of(PyObject *object) {
    return PyModule_Check(object) ? PyModule_GetState(object) : PyType_GetModuleState((PyTypeObject *)object);
}

PyObject *raise_status(const module_state *m, const err *e) {
    PyObject *type = m->EngineError, *text;

    switch (e->code) {
    case E_NOMEM: type = m->OutOfMemoryError; break;
    case E_INVALID: type = m->InvalidModelError; break;
    case E_SHAPE: type = m->ArgumentError; break;
    case E_TYPE: type = m->ArgumentTypeError; break;
    case E_DATA:
    case E_UNSUPPORTED: type = m->UnsupportedError; break;
    case E_FOREIGN:
        if (PyErr_Occurred()) return NULL;
        break;
    case E_RUNTIME:
    case E_PENDING:
    case OK: break;
    }
    /* A long name may have been cut within a character. */
    text = PyUnicode_DecodeUTF8(e->text, (Py_ssize_t)strlen(e->text), "replace");
    if (text) PyErr_SetObject(type, text);
    Py_XDECREF(text);
    return NULL;
}
