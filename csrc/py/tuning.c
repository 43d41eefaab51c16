/* tuning.c -- the table of measured ways to multiply, for Python, which keeps it in files (ortmodule/tuning.py). */
#include "exec/tune.h"
#include "py/py.h"

static PyObject *seconds_of(const tuned *t) {
    PyObject *dict = PyDict_New();

    for (int way = 1; dict && way < GEMM_WAYS; way++) {
        PyObject *seconds = t->seconds[way] > 0 ? PyFloat_FromDouble(t->seconds[way]) : NULL;
        if (t->seconds[way] > 0 && (!seconds || PyDict_SetItemString(dict, gemm_way_name((gemm_way)way), seconds) < 0))
            Py_CLEAR(dict);
        Py_XDECREF(seconds);
    }
    return dict;
}

static PyObject *rows_of(const tuned *list, int count) {
    PyObject *rows = PyList_New(count);
    char text[GEMM_CLASS_TEXT];

    for (int i = 0; rows && i < count; i++) {
        PyObject *seconds = seconds_of(&list[i]), *row = NULL;
        if (seconds)
            row = Py_BuildValue("(ssN)", gemm_class_text(list[i].of, text), gemm_way_name(list[i].best), seconds);
        if (!row || PyList_SetItem(rows, i, row) < 0) Py_CLEAR(rows);
    }
    return rows;
}

PyObject *core_tune(PyObject *module, PyObject *args) {
    module_state *m = state_of(module);
    PyObject *object, *rows = NULL;
    double limit = 0;
    tuned *list = NULL;
    int count = 0;
    ctx c;
    status s;

    if (!PyArg_ParseTuple(args, "O!|d:tune", (PyTypeObject *)m->plan_type, &object, &limit)) return NULL;
    const struct plan *p = plan_for_cpu(object);
    if (!p) {
        PyErr_SetString(PyExc_ValueError, "products of a plan for a GPU are not measured");
        return NULL;
    }
    ctx_init(&c);
    Py_BEGIN_ALLOW_THREADS s = tune_plan(&c, p, limit, &list, &count);
    Py_END_ALLOW_THREADS if (s == OK) { rows = rows_of(list, count); }
    else {
        raise_status(m, &c.err);
    }
    ctx_release(&c);
    return rows;
}

PyObject *core_tuning_set(PyObject *module, PyObject *args) {
    const char *text, *name;
    gemm_class of;

    (void)module;
    if (!PyArg_ParseTuple(args, "ss:tuning_set", &text, &name)) return NULL;
    const gemm_way way = gemm_way_named(name);
    if (!gemm_class_parse(text, &of)) return PyErr_Format(PyExc_ValueError, "'%s' is no class of products", text);
    if (way == GEMM_WAYS) return PyErr_Format(PyExc_ValueError, "'%s' is no way to multiply", name);
    if (!gemm_table_set(of, way)) {
        PyErr_SetString(PyExc_MemoryError, "the table of ways to multiply is full");
        return NULL;
    }
    return Py_NewRef(Py_None);
}

PyObject *core_tuning_clear(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    gemm_table_clear();
    return Py_NewRef(Py_None);
}

PyObject *core_tuning_uses(PyObject *module, PyObject *unused) {
    PyObject *dict = PyDict_New();

    (void)module, (void)unused;
    for (int way = 1; dict && way < GEMM_WAYS; way++) {
        PyObject *count = PyLong_FromLongLong(gemm_table_uses((gemm_way)way));
        if (!count || PyDict_SetItemString(dict, gemm_way_name((gemm_way)way), count) < 0) Py_CLEAR(dict);
        Py_XDECREF(count);
    }
    return dict;
}
