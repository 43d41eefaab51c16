/* optim.c -- the optimizers' update over lists of torch tensors. */
#include "optim/adam.h"
#include "py/py.h"

#include <stdlib.h>

/* --- arguments -------------------------------------------------------------------------------------------------------- */

enum { PARAM, GRAD, MEAN, SQUARE, MOST, EXACT, STEP, PARTS };

static const char *const part_names[PARTS] = {
    "parameter", "gradient", "exp_avg", "exp_avg_sq", "max_exp_avg_sq", "float32 weights of parameter", "step"};

static int check_part(const elements *e, const elements *param, int part, int index) {
    const bool optional = part == MOST || part == EXACT;

    if (!e->data && optional) return 0;
    if (!dtype_is_float(e->type)) {
        PyErr_Format(PyExc_TypeError, "%s %d is not of a float type", part_names[part], index);
        return -1;
    }
    if (part == STEP ? e->count == 1 : e->count == param->count && e->strides == param->strides) return 0;
    PyErr_Format(PyExc_ValueError, "%s %d has %lld elements in an order of its own, its parameter %lld",
                 part_names[part], index, (long long)e->count, (long long)param->count);
    return -1;
}

/* One row of tensors; adds 1 to its step. */
static int parse_row(PyObject *row, int index, adam_tensor *out) {
    elements e[PARTS] = {{0}};

    for (int part = 0; part < PARTS; part++) {
        PyObject *item = PySequence_GetItem(row, part);
        int bad = !item ? -1 : item == Py_None ? 0 : tensor_elements(item, part_names[part], index, &e[part]);
        Py_XDECREF(item);
        if (bad < 0 || check_part(&e[part], &e[PARAM], part, index) < 0) return -1;
    }
    if (e[MOST].data && e[MOST].type != e[MEAN].type) e[MOST].type = DT_NONE;
    if (e[MEAN].type != e[SQUARE].type || (e[MOST].data && e[MOST].type == DT_NONE)) {
        PyErr_Format(PyExc_TypeError, "the states of parameter %d are of different types", index);
        return -1;
    }
    if (e[EXACT].data && e[EXACT].type != F32) {
        PyErr_Format(PyExc_TypeError, "the exact weights of parameter %d are not float32", index);
        return -1;
    }
    *out = (adam_tensor){.count = e[PARAM].count,
                         .type = e[PARAM].type,
                         .grad_type = e[GRAD].type,
                         .state_type = e[MEAN].type,
                         .param = e[PARAM].data,
                         .grad = e[GRAD].data,
                         .m = e[MEAN].data,
                         .v = e[SQUARE].data,
                         .v_most = e[MOST].data,
                         .exact = e[EXACT].data};
    out->step = dtype_get(e[STEP].type, e[STEP].data, 0) + 1;
    return 0;
}

static void count_steps(PyObject *rows, int n, const adam_tensor *tensors) {
    for (int i = 0; i < n; i++) {
        PyObject *row = PySequence_GetItem(rows, i), *step = row ? PySequence_GetItem(row, STEP) : NULL;
        elements e;
        if (step && tensor_elements(step, "step", i, &e) == 0) dtype_set_value(e.type, e.data, 0, tensors[i].step);
        Py_XDECREF(step);
        Py_XDECREF(row);
    }
}

/* --- functions -------------------------------------------------------------------------------------------------------- */

PyObject *core_adam(PyObject *module, PyObject *args) {
    adam_settings s = {0};
    adam_tensor *tensors;
    PyObject *rows;
    int mode, correct_bias, maximize, clear, n = 0;
    Py_ssize_t count;

    (void)module;
    if (!PyArg_ParseTuple(args, "Oiddddddppp:adam", &rows, &mode, &s.lr, &s.beta_1, &s.beta_2, &s.eps, &s.weight_decay,
                          &s.grad_factor, &correct_bias, &maximize, &clear))
        return NULL;
    if (mode < ADAM_L2 || mode > ADAMW_TORCH)
        return PyErr_Format(PyExc_ValueError, "there is no mode %d of Adam", mode);
    if ((count = PySequence_Size(rows)) < 0) return NULL;
    if (!(tensors = calloc((size_t)count + 1, sizeof *tensors))) return PyErr_NoMemory();
    s.mode = (adam_mode)mode;
    s.correct_bias = correct_bias;
    s.maximize = maximize;
    s.clear_gradients = clear;
    for (; n < count; n++) {
        PyObject *row = PySequence_GetItem(rows, n);
        int bad = row ? parse_row(row, n, &tensors[n]) : -1;
        Py_XDECREF(row);
        if (bad < 0) break;
    }
    if (n == count) {
        Py_BEGIN_ALLOW_THREADS adam_update(tensors, n, &s);
        Py_END_ALLOW_THREADS count_steps(rows, n, tensors);
    }
    free(tensors);
    return n == count && !PyErr_Occurred() ? Py_NewRef(Py_None) : NULL;
}

static PyObject *list_of_floats(const double *values, int count) {
    PyObject *list = PyList_New(count);

    for (int i = 0; list && i < count; i++) {
        PyObject *value = PyFloat_FromDouble(values[i]);
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
    double *sums;
    int n = 0;

    (void)module;
    if (count < 0) return NULL;
    tensors = calloc((size_t)count + 1, sizeof *tensors);
    sums = calloc((size_t)count + 1, sizeof *sums);
    for (; tensors && sums && n < count; n++) {
        PyObject *item = PySequence_GetItem(list, n);
        elements e = {0};
        int bad = item ? tensor_elements(item, "tensor", n, &e) : -1;
        Py_XDECREF(item);
        if (bad < 0) break;
        if (!dtype_is_float(e.type)) {
            PyErr_Format(PyExc_TypeError, "tensor %d is not of a float type", n);
            break;
        }
        tensors[n] = (dense){e.type, e.count, e.data};
    }
    if (!tensors || !sums) {
        PyErr_NoMemory();
    } else if (n == count) {
        Py_BEGIN_ALLOW_THREADS sums_of_squares(tensors, n, sums);
        Py_END_ALLOW_THREADS result = list_of_floats(sums, n);
    }
    free(tensors);
    free(sums);
    return result;
}
