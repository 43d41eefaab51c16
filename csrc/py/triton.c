/* triton.c -- gives Python the rules for Triton kernels, and has an object compile and interpret them. */
#include "py/py.h"

#include "cuda/host/generate.h"
#include "graph/triton.h"
#include "ops/chains/triton.h"

#include <stdlib.h>
#include <string.h>

/* --- rules ------------------------------------------------------------------------------------------------------------ */

static int fail_allocation(void) {
    PyErr_NoMemory();
    return -1;
}

static int copy_text(ctx *c, const char *from, const char **out) {
    char *to;
    if (NEW(c, to, strlen(from) + 1) != OK) return fail_allocation();
    memcpy(to, from, strlen(from) + 1);
    *out = to;
    return 0;
}

static int parse_condition(ctx *c, PyObject *row, triton_condition *out) {
    PyObject *numbers;
    const char *name;
    int wanted;

    if (!PyArg_ParseTuple(row, "siO", &name, &wanted, &numbers)) return -1;
    const Py_ssize_t n = PySequence_Size(numbers);
    if (n < 0) return -1;
    if (n > TRITON_NUMBERS) {
        PyErr_Format(PyExc_ValueError, "a condition on %s has %zd numbers", name, n);
        return -1;
    }
    out->wanted = (triton_wanted)wanted;
    out->count = (int)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(numbers, i);
        out->numbers[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return copy_text(c, name, &out->name);
}

static int parse_operator(ctx *c, PyObject *row, triton_operator *out) {
    triton_condition *conditions;
    PyObject *list;
    const char *name;
    unsigned classes;
    int no_op;

    if (!PyArg_ParseTuple(row, "sIpO", &name, &classes, &no_op, &list)) return -1;
    const Py_ssize_t n = PySequence_Size(list);
    if (n < 0) return -1;
    if (NEW(c, conditions, n + 1) != OK) return fail_allocation();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        const int bad = item ? parse_condition(c, item, &conditions[i]) : -1;
        Py_XDECREF(item);
        if (bad) return -1;
    }
    out->is_no_op = no_op;
    out->classes = classes;
    out->n_conditions = (int)n;
    out->conditions = conditions;
    return copy_text(c, name, &out->name);
}

int parse_triton_rules(ctx *c, PyObject *given, const triton_rules **out) {
    triton_operator *operators;
    triton_rules *rules;
    PyObject *list;
    long long widest;
    int least, inlines, flash;

    *out = NULL;
    if (given == Py_None) return 0;
    if (!PyArg_ParseTuple(given, "ippLO:rules", &least, &inlines, &flash, &widest, &list)) return -1;
    const Py_ssize_t n = PySequence_Size(list);
    if (n < 0) return -1;
    if (NEW(c, rules, 1) != OK || NEW(c, operators, n + 1) != OK) return fail_allocation();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        const int bad = item ? parse_operator(c, item, &operators[i]) : -1;
        Py_XDECREF(item);
        if (bad) return -1;
    }
    *rules = (triton_rules){.n_operators = (int)n,
                            .min_nodes = least,
                            .operators = operators,
                            .inlines = inlines,
                            .flash = flash,
                            .widest = widest};
    *out = rules;
    return 0;
}

/* --- the maker -------------------------------------------------------------------------------------------------------- */

static PyObject *process_object; /* for the life of the process, or until another comes */

static status failed(ctx *c) { return fail(c, E_FOREIGN, "a Triton kernel could not be made or run"); }

static PyObject *arguments_of(const triton_launch *l) {
    PyObject *list = PyList_New(l->n_arguments);

    for (int i = 0; list && i < l->n_arguments; i++) {
        const triton_argument *a = &l->arguments[i];
        PyObject *row = Py_BuildValue("(LsL)", (long long)a->value, a->type == DT_NONE ? "" : dtype_name(a->type),
                                      (long long)a->count);
        if (!row || PyList_SetItem(list, i, row) < 0) Py_CLEAR(list);
    }
    return list;
}

static status interpret(ctx *c, const triton_launch *l) {
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *arguments = arguments_of(l), *done = NULL;

    if (arguments)
        done = PyObject_CallMethod(process_object, "interpret", "ssLLLLO", l->program, l->how, (long long)l->rows,
                                   (long long)l->width, (long long)l->programs, (long long)l->times, arguments);
    const status s = done ? OK : failed(c);
    Py_XDECREF(arguments);
    Py_XDECREF(done);
    PyGILState_Release(lock);
    return s;
}

static int take_image(PyObject *made, triton_image *out) {
    const char *bytes, *name;
    Py_ssize_t n_bytes;

    if (made == Py_None) return 0; /* it cannot be cut so */
    if (!PyArg_ParseTuple(made, "y#siiii:kernel", &bytes, &n_bytes, &name, &out->threads, &out->block, &out->shared,
                          &out->scratch))
        return -1;
    if (strlen(name) >= sizeof out->name) {
        PyErr_Format(PyExc_ValueError, "the name of a kernel is too long: %s", name);
        return -1;
    }
    if (!(out->bytes = malloc((size_t)n_bytes + 1))) return fail_allocation();
    memcpy(out->bytes, bytes, (size_t)n_bytes);
    memcpy(out->name, name, strlen(name) + 1);
    out->n_bytes = (size_t)n_bytes;
    return 0;
}

static status compile_kernel(ctx *c, const triton_launch *l, int architecture, const char *way, triton_image *out) {
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *made;
    int bad = -1;

    *out = (triton_image){.bytes = NULL};
    made = PyObject_CallMethod(process_object, "compile", "ssLLis", l->program, l->how, (long long)l->rows,
                               (long long)l->width, architecture, way);
    if (made) bad = take_image(made, out);
    const status s = bad ? failed(c) : OK;
    Py_XDECREF(made);
    PyGILState_Release(lock);
    return s;
}

static int take_ways(PyObject *list, char ways[TRITON_WAYS][TRITON_WAY], int *count) {
    const Py_ssize_t n = PySequence_Size(list);

    if (n < 0) return -1;
    for (*count = 0; *count < n && *count < TRITON_WAYS; ++*count) {
        PyObject *item = PySequence_GetItem(list, *count), *text = item ? PyUnicode_AsUTF8String(item) : NULL;
        const char *way = text ? PyBytes_AsString(text) : NULL;
        const bool fits = way && strlen(way) < TRITON_WAY;
        if (fits) memcpy(ways[*count], way, strlen(way) + 1);
        else if (way) PyErr_Format(PyExc_ValueError, "the name of a way is too long: %s", way);
        Py_XDECREF(text);
        Py_XDECREF(item);
        if (!fits) return -1;
    }
    return 0;
}

static status list_ways(ctx *c, const triton_launch *l, char ways[TRITON_WAYS][TRITON_WAY], int *count) {
    PyGILState_STATE lock = PyGILState_Ensure();
    PyObject *list = PyObject_CallMethod(process_object, "ways", "ssL", l->program, l->how, (long long)l->width);
    const status s = list && take_ways(list, ways, count) == 0 ? OK : failed(c);

    Py_XDECREF(list);
    PyGILState_Release(lock);
    return s;
}

PyObject *core_triton_maker(PyObject *module, PyObject *args) {
    static triton_maker maker = {.interpret = interpret, .compile = compile_kernel, .ways = list_ways};
    PyObject *object;
    int interprets;

    (void)module;
    if (!PyArg_ParseTuple(args, "Op:triton_maker", &object, &interprets)) return NULL;
    Py_XDECREF(process_object);
    process_object = Py_NewRef(object);
    maker.interprets = interprets;
    triton_set_maker(&maker);
    return Py_NewRef(Py_None);
}

PyObject *core_pointwise_formulas(PyObject *module, PyObject *unused) {
    static const char *const classes[TILE_CLASSES] = {[TILE_F32] = "float32",
                                                      [TILE_F64] = "float64",
                                                      [TILE_I64] = "int64",
                                                      [TILE_I32] = "int32",
                                                      [TILE_BOOL] = "bool"};
    PyObject *list = PyList_New(0);
    step_formula f;

    (void)module, (void)unused;
    for (int kind = 0; list && chain_step_formula(kind, &f); kind++) {
        PyObject *row =
            Py_BuildValue("(sssiss)", f.name, classes[f.from], classes[f.to], f.operands, f.expression, f.before);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}
