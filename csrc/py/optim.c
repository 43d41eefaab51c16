/* optim.c -- updates lists of torch tensors by the optimizers' rules. */
#include "cuda/kernels/optim.h"
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
static int parse_part(PyObject *row, Py_ssize_t size, int part, int device, int index, elements *out) {
    PyObject *item = part < size ? PySequence_GetItem(row, part) : Py_NewRef(Py_None);
    int bad = !item ? -1 : item == Py_None ? 0 : tensor_elements(item, device, part_names[part], index, out);

    if (!bad && item != Py_None && !out->type) {
        PyErr_Format(PyExc_TypeError, "%s %d is not of a float type", part_names[part], index);
        bad = -1;
    }
    Py_XDECREF(item);
    return bad;
}

static int parse_row(PyObject *row, const update_rule *rule, int device, int index, update_tensor *out) {
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
        if (parse_part(row, size, part, device, index, &e[part]) < 0) return -1;
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
                           .counter = e[STEP].data,
                           .counter_type = e[STEP].type,
                           .step = 1};
    for (int i = 0; i < rule->n_states; i++) out->state[i] = e[STATE + i].data;
    if (e[STEP].type && device == ON_CPU) out->step += dtype_get(e[STEP].type, e[STEP].data, 0);
    return 0;
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

/* --- a GPU ------------------------------------------------------------------------------------------------------------ */

/* Where a step runs on a GPU: (device, stream, lr, scale, overflow, clip, room); lr, scale, overflow and clip are tensors
 * of one element or None, of which `lr` has any float type, `clip` float64, the others float32. `room` is None, or
 * float64, for rules that measure whole tensors: 2 CUDA_SUM_PARTS elements for each row. */
typedef struct gpu_place {
    int device;
    unsigned long long stream;
    cuda_scalars at;
    int64_t rows; /* that there is room for */
} gpu_place;

static int parse_scalar(PyObject *item, int device, const char *what, dtype type, const void **out, dtype *found) {
    elements e;

    *out = NULL;
    if (item == Py_None) return 0;
    if (tensor_elements(item, device, what, 0, &e) < 0) return -1;
    if (e.count != 1 || (type ? e.type != type : !dtype_is_float(e.type))) {
        PyErr_Format(PyExc_TypeError, "the %s is not one %s", what, type ? dtype_name(type) : "float");
        return -1;
    }
    *out = e.data;
    if (found) *found = e.type;
    return 0;
}

static int parse_place(PyObject *place, gpu_place *out) {
    PyObject *lr, *scale, *overflow, *clip, *room;
    elements of_room = {0};
    const void *scale_at, *overflow_at, *clip_at;

    *out = (gpu_place){.device = ON_CPU};
    if (place == Py_None) return 0;
    if (!PyArg_ParseTuple(place, "iKOOOOO:place", &out->device, &out->stream, &lr, &scale, &overflow, &clip, &room))
        return -1;
    if (parse_scalar(lr, out->device, "learning rate", DT_NONE, &out->at.lr, &out->at.lr_type) < 0 ||
        parse_scalar(scale, out->device, "gradients' scale", F32, &scale_at, NULL) < 0 ||
        parse_scalar(overflow, out->device, "overflow", F32, &overflow_at, NULL) < 0 ||
        parse_scalar(clip, out->device, "clipping factor", F64, &clip_at, NULL) < 0)
        return -1;
    if (room != Py_None && tensor_elements(room, out->device, "room", 0, &of_room) < 0) return -1;
    if (room != Py_None && of_room.type != F64) {
        PyErr_SetString(PyExc_TypeError, "the room for sums is not float64");
        return -1;
    }
    out->at.room = of_room.data;
    out->rows = of_room.count / (2 * CUDA_SUM_PARTS);
    out->at.scale = scale_at;
    out->at.overflow = overflow_at;
    out->at.clip = clip_at;
    return 0;
}

static status update_there(ctx *c, const gpu_place *place, const update_rule *rule, const update_tensor *tensors,
                           int count, const double *numbers, double grad, bool clear) {
    cuda_run where;

    if (place->at.room && place->rows < count)
        return fail(c, E_INVALID, "there is room for the sums of %lld tensors, not %d", (long long)place->rows, count);
    TRY(cuda_begin(c, place->device, (void *)(uintptr_t)place->stream, &where));
    return cuda_end(c, &where, cuda_update(c, &where, rule, tensors, count, numbers, grad, clear, place->at));
}

static status sums_there(ctx *c, const gpu_place *place, const dense *tensors, int count, double *sums, double *room) {
    cuda_run where;

    TRY(cuda_begin(c, place->device, (void *)(uintptr_t)place->stream, &where));
    return cuda_end(c, &where, cuda_sums_of_squares(c, &where, tensors, count, sums, room));
}

/* --- functions -------------------------------------------------------------------------------------------------------- */

static void count_steps(const update_tensor *tensors, int n) {
    for (int i = 0; i < n; i++)
        if (tensors[i].counter) dtype_set_value(tensors[i].counter_type, tensors[i].counter, 0, tensors[i].step);
}

PyObject *core_optimize(PyObject *module, PyObject *args) {
    double numbers[MOST_SETTINGS], grad;
    const update_rule *rule;
    update_tensor *tensors;
    PyObject *rows, *settings, *where = Py_None;
    Py_ssize_t count;
    const char *name;
    gpu_place place;
    int clear, n = 0;
    status s = OK;
    ctx c;

    if (!PyArg_ParseTuple(args, "sOOdp|O:optimize", &name, &rows, &settings, &grad, &clear, &where)) return NULL;
    if (!(rule = update_rule_find(name))) return PyErr_Format(PyExc_ValueError, "there is no rule %s", name);
    if (parse_settings(settings, rule, numbers) < 0 || parse_place(where, &place) < 0) return NULL;
    if ((count = PySequence_Size(rows)) < 0) return NULL;
    if (!(tensors = calloc((size_t)count + 1, sizeof *tensors))) return PyErr_NoMemory();
    ctx_init(&c);
    for (; n < count; n++) {
        PyObject *row = PySequence_GetItem(rows, n);
        int bad = row ? parse_row(row, rule, place.device, n, &tensors[n]) : -1;
        Py_XDECREF(row);
        if (bad < 0) break;
    }
    if (n == count) {
        Py_BEGIN_ALLOW_THREADS if (place.device != ON_CPU) s =
            update_there(&c, &place, rule, tensors, n, numbers, grad, clear);
        else update_tensors(rule, tensors, n, numbers, grad, clear);
        if (place.device == ON_CPU) count_steps(tensors, n);
        Py_END_ALLOW_THREADS
    }
    if (s != OK) raise_status(state_of(module), &c.err);
    ctx_release(&c);
    free(tensors);
    return n == count && !PyErr_Occurred() ? Py_NewRef(Py_None) : NULL;
}

static PyObject *list_of_sums(const dense *tensors, int count) {
    PyObject *list = PyList_New(count);

    for (int i = 0; list && i < count; i++) {
        PyObject *sum = PyFloat_FromDouble(tensors[i].tiles.sums[0]);
        if (!sum || PyList_SetItem(list, i, sum) < 0) {
            Py_DECREF(list);
            return NULL;
        }
    }
    return list;
}

static dense *parse_tensors(PyObject *list, int device, int *out) {
    Py_ssize_t count = PySequence_Size(list);
    dense *tensors;
    int n = 0;

    if (count < 0) return NULL;
    if (!(tensors = calloc((size_t)count + 1, sizeof *tensors))) return (void)PyErr_NoMemory(), NULL;
    for (; n < count; n++) {
        PyObject *item = PySequence_GetItem(list, n);
        elements e = {0};
        int bad = item ? tensor_elements(item, device, "tensor", n, &e) : -1;
        Py_XDECREF(item);
        if (bad < 0) break;
        if (!dtype_is_float(e.type)) {
            PyErr_Format(PyExc_TypeError, "tensor %d is not of a float type", n);
            break;
        }
        tensors[n] = (dense){.tiles.count = e.count, .type = e.type, .data = e.data};
    }
    *out = n;
    if (n == count) return tensors;
    free(tensors);
    return NULL;
}

PyObject *core_sums_of_squares(PyObject *module, PyObject *list) {
    PyObject *result;
    int n;
    dense *tensors = parse_tensors(list, ON_CPU, &n);

    (void)module;
    if (!tensors) return NULL;
    Py_BEGIN_ALLOW_THREADS sums_of_squares(tensors, n);
    Py_END_ALLOW_THREADS result = list_of_sums(tensors, n);
    free(tensors);
    return result;
}

PyObject *core_cuda_sums_of_squares(PyObject *module, PyObject *args) {
    PyObject *list, *sums, *room;
    elements of_sums, of_room;
    gpu_place place = {0};
    dense *tensors;
    status s;
    ctx c;
    int n;

    if (!PyArg_ParseTuple(args, "OOOiK:cuda_sums_of_squares", &list, &sums, &room, &place.device, &place.stream))
        return NULL;
    if (tensor_elements(sums, place.device, "sums", 0, &of_sums) < 0) return NULL;
    if (tensor_elements(room, place.device, "room", 0, &of_room) < 0) return NULL;
    if (!(tensors = parse_tensors(list, place.device, &n))) return NULL;
    if (of_sums.type != F64 || of_room.type != F64 || of_sums.count != n ||
        of_room.count < (int64_t)n * CUDA_SUM_PARTS) {
        free(tensors);
        return PyErr_Format(PyExc_ValueError, "sums are a float64 for each tensor, room is %d for each",
                            CUDA_SUM_PARTS);
    }
    ctx_init(&c);
    Py_BEGIN_ALLOW_THREADS s = sums_there(&c, &place, tensors, n, of_sums.data, of_room.data);
    Py_END_ALLOW_THREADS if (s != OK) raise_status(state_of(module), &c.err);
    ctx_release(&c);
    free(tensors);
    return s == OK ? Py_NewRef(Py_None) : NULL;
}
