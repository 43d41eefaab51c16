/* planner.c -- chooses what is computed again, or offloaded, without a graph: recompute(...). */
#include "plan/recompute_choice.h"
#include "py/py.h"

#include <stdlib.h>

typedef struct problem {
    ctx c;
    recompute_problem p;
    recompute_step *steps;
    int64_t *bytes;
    int *maker;
    bool *held;
} problem;

static int fail_allocation(void) {
    PyErr_NoMemory();
    return -1;
}

/* Numbers of values from 0 to below `n_values`. */
static int parse_numbers(ctx *c, PyObject *list, int n_values, const int **out, int *count) {
    const Py_ssize_t n = PySequence_Size(list);
    int *numbers;

    if (n < 0) return -1;
    if (NEW(c, numbers, n) != OK) return fail_allocation();
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        const long x = item ? PyLong_AsLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
        if (x < 0 || x >= n_values) {
            PyErr_Format(PyExc_ValueError, "there is no value %ld", x);
            return -1;
        }
        numbers[i] = (int)x;
    }
    *out = numbers;
    *count = (int)n;
    return 0;
}

/* (operands, results, cost, workspace, in place). */
static int parse_step(problem *x, PyObject *row, int t) {
    recompute_step *s = &x->steps[t];
    PyObject *in, *out;
    long long work;
    int in_place;

    if (!PyArg_ParseTuple(row, "OOdLp:step", &in, &out, &s->cost, &work, &in_place)) return -1;
    s->work = work;
    s->in_place = in_place;
    s->kind = (uint64_t)t;
    if (parse_numbers(&x->c, in, x->p.n_values, &s->in, &s->n_in) < 0) return -1;
    if (parse_numbers(&x->c, out, x->p.n_values, &s->out, &s->n_out) < 0) return -1;
    for (int i = 0; i < s->n_in; i++)
        if (x->maker[s->in[i]] < 0 && !x->held[s->in[i]]) {
            PyErr_Format(PyExc_ValueError, "step %d reads the value %d, which no earlier step makes", t, s->in[i]);
            return -1;
        }
    for (int i = 0; i < s->n_out; i++) x->maker[s->out[i]] = t;
    return 0;
}

/* (bytes, held). */
static int parse_value(problem *x, PyObject *row, int v) {
    long long bytes;
    int held;

    if (!PyArg_ParseTuple(row, "Lp:value", &bytes, &held)) return -1;
    x->bytes[v] = bytes;
    x->held[v] = held;
    x->maker[v] = -1;
    return 0;
}

typedef int parse_row(problem *x, PyObject *row, int i);

static int parse_rows(problem *x, PyObject *list, int count, parse_row *parse) {
    int bad = 0;
    for (int i = 0; i < count && !bad; i++) {
        PyObject *row = PySequence_GetItem(list, i);
        bad = row ? parse(x, row, i) : -1;
        Py_XDECREF(row);
    }
    return bad;
}

static int parse_problem(problem *x, PyObject *steps, PyObject *values, int n_forward) {
    const Py_ssize_t n_steps = PySequence_Size(steps), n_values = PySequence_Size(values);

    if (n_steps < 0 || n_values < 0) return -1;
    if (n_forward < 0 || n_forward > n_steps) {
        PyErr_Format(PyExc_ValueError, "forward cannot have %d of %zd steps", n_forward, n_steps);
        return -1;
    }
    if (NEW(&x->c, x->steps, n_steps) != OK || NEW(&x->c, x->bytes, n_values) != OK ||
        NEW(&x->c, x->maker, n_values) != OK || NEW(&x->c, x->held, n_values) != OK)
        return fail_allocation();
    x->p = (recompute_problem){.n_values = (int)n_values,
                               .n_steps = (int)n_steps,
                               .n_forward = n_forward,
                               .steps = x->steps,
                               .bytes = x->bytes,
                               .maker = x->maker,
                               .held = x->held};
    if (parse_rows(x, values, (int)n_values, parse_value) < 0) return -1;
    return parse_rows(x, steps, (int)n_steps, parse_step);
}

/* What moving each value costs; None: nothing is offloaded. */
static int parse_moving(problem *x, PyObject *list) {
    double *moving;

    if (list == Py_None) return 0;
    const Py_ssize_t count = PySequence_Size(list);
    if (count < 0) return -1;
    if (count != x->p.n_values) {
        PyErr_Format(PyExc_ValueError, "there are %d values to move", x->p.n_values);
        return -1;
    }
    if (NEW(&x->c, moving, x->p.n_values) != OK) return fail_allocation();
    for (int v = 0; v < x->p.n_values; v++) {
        PyObject *item = PySequence_GetItem(list, v);
        moving[v] = item ? PyFloat_AsDouble(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    x->p.moving = moving;
    return 0;
}

static PyObject *numbers(const bool *flags, int count) {
    PyObject *list = PyList_New(0);

    for (int v = 0; list && v < count; v++) {
        PyObject *number = flags[v] ? PyLong_FromLong(v) : NULL;
        if (flags[v] && (!number || PyList_Append(list, number) < 0)) Py_CLEAR(list);
        Py_XDECREF(number);
    }
    return list;
}

static PyObject *result_of(const problem *x, const recompute_choice *r) {
    return Py_BuildValue("(NLLddN)", numbers(r->again, x->p.n_values), (long long)r->before, (long long)r->peak,
                         r->cost, r->bound, numbers(r->offloaded, x->p.n_values));
}

PyObject *core_recompute(PyObject *module, PyObject *args) {
    PyObject *steps, *values, *moving = Py_None, *result = NULL;
    recompute_choice choice;
    long long target;
    problem x = {0};
    int n_forward;

    if (!PyArg_ParseTuple(args, "OOiL|O:recompute", &steps, &values, &n_forward, &target, &moving)) return NULL;
    ctx_init(&x.c);
    if (parse_problem(&x, steps, values, n_forward) == 0 && parse_moving(&x, moving) == 0) {
        if (recompute_to(&x.c, &x.p, NULL, 0, target, &choice) == OK) result = result_of(&x, &choice);
        else raise_status(state_of(module), &x.c.err);
    }
    ctx_release(&x.c);
    return result;
}
