/* optim.c -- the optimizers' update over lists of torch tensors. */
#include "optim/update.h"
#include "py/py.h"

#include <stdlib.h>

/* --- arguments -------------------------------------------------------------------------------------------------------- */

/* A row is (parameter, gradient, step or None, float32 weights or None, state or None, ...). */
enum { PARAM, GRAD, STEP, EXACT, STATE, PARTS = STATE + MOST_STATES };

static const char *const part_names[PARTS] = {
    "parameter", "gradient", "step", "float32 weights of parameter", "first state", "second state", "third state"};

static int check_part(const elements *e, const elements *param, int part, bool optional, int index) {
    if (!e->type && optional) return 0;
    if (!dtype_is_float(e->type)) {
        PyErr_Format(PyExc_TypeError, "%s %d is not of a float type", part_names[part], index);
        return -1;
    }
    if (part == STEP ? e->count == 1 : e->count == param->count && e->strides == param->strides) return 0;
    PyErr_Format(PyExc_ValueError, "%s %d has %lld elements in an order of its own, its parameter %lld",
                 part_names[part], index, (long long)e->count, (long long)param->count);
    return -1;
}

/* An item of a row: a tensor's elements, of no type when it is None or not there. */
static int parse_part(PyObject *row, Py_ssize_t size, int part, int index, elements *out) {
    PyObject *item = part < size ? PySequence_GetItem(row, part) : Py_NewRef(Py_None);
    int bad = !item ? -1 : item == Py_None ? 0 : tensor_elements(item, part_names[part], index, out);

    if (!bad && item != Py_None && !out->type) {
        PyErr_Format(PyExc_TypeError, "%s %d is not of a float type", part_names[part], index);
        bad = -1;
    }
    Py_XDECREF(item);
    return bad;
}

static int parse_row(PyObject *row, const update_rule *rule, int index, update_tensor *out) {
    elements e[PARTS] = {{0}};
    const Py_ssize_t size = PySequence_Size(row);

    if (size < 0) return -1;
    if (size > STATE + rule->n_states) {
        PyErr_Format(PyExc_ValueError, "row %d has %zd parts; %s knows %d", index, size, rule->name,
                     STATE + rule->n_states);
        return -1;
    }
    for (int part = 0; part < PARTS; part++) {
        const bool optional = part == STEP || part == EXACT || part >= STATE + rule->n_needed;
        if (parse_part(row, size, part, index, &e[part]) < 0) return -1;
        if (check_part(&e[part], &e[PARAM], part, optional, index) < 0) return -1;
        if (part > STATE && e[part].type && e[part].type != e[STATE].type) {
            PyErr_Format(PyExc_TypeError, "the states of parameter %d are of different types", index);
            return -1;
        }
    }
    if (e[EXACT].type && e[EXACT].type != F32) {
        PyErr_Format(PyExc_TypeError, "the exact weights of parameter %d are not float32", index);
        return -1;
    }
    *out = (update_tensor){.tiles.count = e[PARAM].count,
                           .type = e[PARAM].type,
                           .grad_type = e[GRAD].type,
                           .state_type = e[STATE].type,
                           .param = e[PARAM].data,
                           .grad = e[GRAD].data,
                           .exact = e[EXACT].data,
                           .step = 1};
    for (int i = 0; i < rule->n_states; i++) out->state[i] = e[STATE + i].data;
    if (e[STEP].type) out->step += dtype_get(e[STEP].type, e[STEP].data, 0);
    return 0;
}

/* Writes the steps that have been done. */
static void count_steps(PyObject *rows, int n, const update_tensor *tensors) {
    for (int i = 0; i < n; i++) {
        PyObject *row = PySequence_GetItem(rows, i);
        elements e = {0};
        if (row && parse_part(row, PySequence_Size(row), STEP, i, &e) == 0 && e.type)
            dtype_set_value(e.type, e.data, 0, tensors[i].step);
        Py_XDECREF(row);
    }
}

static int parse_settings(PyObject *settings, const update_rule *rule, double *out) {
    const Py_ssize_t n = PySequence_Size(settings);
    const char *refusal;

    if (n < 0) return -1;
    if (n != rule->n_settings) {
        PyErr_Format(PyExc_ValueError, "%s has %d settings, not %zd", rule->name, rule->n_settings, n);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(settings, i);
        out[i] = item ? PyFloat_AsDouble(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    if (!(refusal = rule->refuse ? rule->refuse(out) : NULL)) return 0;
    PyErr_Format(PyExc_ValueError, "%s: %s", rule->name, refusal);
    return -1;
}

/* --- functions -------------------------------------------------------------------------------------------------------- */

PyObject *core_optimize(PyObject *module, PyObject *args) {
    double numbers[MOST_SETTINGS], grad;
    const update_rule *rule;
    update_tensor *tensors;
    PyObject *rows, *settings;
    Py_ssize_t count;
    const char *name;
    int clear, n = 0;

    (void)module;
    if (!PyArg_ParseTuple(args, "sOOdp:optimize", &name, &rows, &settings, &grad, &clear)) return NULL;
    if (!(rule = update_rule_find(name))) return PyErr_Format(PyExc_ValueError, "there is no rule %s", name);
    if (parse_settings(settings, rule, numbers) < 0) return NULL;
    if ((count = PySequence_Size(rows)) < 0) return NULL;
    if (!(tensors = calloc((size_t)count + 1, sizeof *tensors))) return PyErr_NoMemory();
    for (; n < count; n++) {
        PyObject *row = PySequence_GetItem(rows, n);
        int bad = row ? parse_row(row, rule, n, &tensors[n]) : -1;
        Py_XDECREF(row);
        if (bad < 0) break;
    }
    if (n == count) {
        Py_BEGIN_ALLOW_THREADS update_tensors(rule, tensors, n, numbers, grad, clear);
        Py_END_ALLOW_THREADS count_steps(rows, n, tensors);
    }
    free(tensors);
    return n == count && !PyErr_Occurred() ? Py_NewRef(Py_None) : NULL;
}

static PyObject *list_of_sums(const dense *tensors, int count) {
    PyObject *list = PyList_New(count);

    for (int i = 0; list && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(tensors[i].tiles.sums[0]);
        if (!value || PyList_SetItem(list, i, value) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

PyObject *core_sums_of_squares(PyObject *module, PyObject *list) {
    Py_ssize_t count = PySequence_Size(list);
    PyObject *result = NULL;
    dense *tensors;
    int n = 0;

    (void)module;
    if (count < 0) return NULL;
    if (!(tensors = calloc((size_t)count + 1, sizeof *tensors))) return PyErr_NoMemory();
    for (; n < count; n++) {
        PyObject *item = PySequence_GetItem(list, n);
        elements e = {0};
        int bad = item ? tensor_elements(item, "tensor", n, &e) : -1;
        Py_XDECREF(item);
        if (bad < 0) break;
        if (!dtype_is_float(e.type)) {
            PyErr_Format(PyExc_TypeError, "tensor %d is not of a float type", n);
            break;
        }
        tensors[n] = (dense){.tiles.count = e.count, .type = e.type, .data = e.data};
    }
    if (n == count) {
        Py_BEGIN_ALLOW_THREADS sums_of_squares(tensors, n);
        Py_END_ALLOW_THREADS result = list_of_sums(tensors, n);
    }
    free(tensors);
    return result;
}
