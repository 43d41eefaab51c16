/* tuning.c -- gives Python the tables of measured ways to multiply, which engine/autotune.py keeps in files. */
#include "cuda/kernels/triton.h"
#include "cuda/libraries/attention.h"
#include "cuda/libraries/blas.h"
#include "cuda/libraries/dnn.h"
#include "cuda/libraries/measure.h"
#include "exec/exec.h"
#include "exec/tune.h"
#include "py/py.h"

#include <stdio.h>

/* Adds {way: seconds} to *dict, unless it does not run (0); *dict is NULL after an error. */
static void add_seconds(PyObject **dict, const char *way, double seconds) {
    if (!*dict || seconds <= 0) return;
    PyObject *number = PyFloat_FromDouble(seconds);
    if (!number || PyDict_SetItemString(*dict, way, number) < 0) Py_CLEAR(*dict);
    Py_XDECREF(number);
}

static PyObject *seconds_of(const tuned *t) {
    PyObject *dict = PyDict_New();

    for (int way = 1; way < GEMM_WAYS; way++) add_seconds(&dict, gemm_way_name((gemm_way)way), t->seconds[way]);
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
    blas_forget();
    dnn_forget();
    attention_kernels_forget();
    triton_forget();
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

/* --- on a GPU ------------------------------------------------------------------------------------------------------- */

/* {number of the library's answer: seconds} of those that run. */
static PyObject *seconds_there(const blas_measured *m) {
    PyObject *dict = PyDict_New();

    for (int i = 0; i < m->count; i++) {
        char name[16];
        (void)snprintf(name, sizeof name, "%d", i);
        add_seconds(&dict, name, m->seconds[i]);
    }
    return dict;
}

static PyObject *rows_there(const blas_measured *list) {
    PyObject *rows = PyList_New(0);
    char of[BLAS_KEY_TEXT], best[BLAS_ALGORITHM_TEXT];

    for (const blas_measured *m = list; rows && m; m = m->next) {
        PyObject *seconds = seconds_there(m), *row = NULL;
        if (seconds)
            row = Py_BuildValue("(ssN)", blas_key_text(&m->of, of), blas_algorithm_text(&m->best, best), seconds);
        if (!row || PyList_Append(rows, row) < 0) Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows;
}

static PyObject *seconds_of_ways(const triton_measured *m) {
    PyObject *dict = PyDict_New();

    for (int i = 0; i < m->count; i++) add_seconds(&dict, m->ways[i], m->seconds[i]);
    return dict;
}

static PyObject *with_kernels(PyObject *rows, const triton_measured *list) {
    for (const triton_measured *m = list; rows && m; m = m->next) {
        PyObject *seconds = seconds_of_ways(m), *row = NULL;
        if (seconds) row = Py_BuildValue("(ssN)", m->key, m->ways[m->best], seconds);
        if (!row || PyList_Append(rows, row) < 0) Py_CLEAR(rows);
        Py_XDECREF(row);
    }
    return rows;
}

/* A dry run that measures. */
static status tune_there(ctx *c, const struct plan *p, int device, void *stream, int math, measuring *t) {
    cuda_run where;
    bool is_captured = false;
    status s;

    TRY(cuda_begin(c, device, stream, &where));
    where.math = math;
    t->at = where;
    s = cuda_is_captured(c, &where, &is_captured);
    if (s == OK && t->memory && !is_captured) s = measure_fill(c, t);
    where.dry = true;
    where.measuring = t;
    if (s == OK && !is_captured) s = exec_check(c, p, &where);
    return cuda_end(c, &t->at, s);
}

PyObject *core_cuda_tune(PyObject *module, PyObject *args) {
    module_state *m = state_of(module);
    PyObject *object, *memory = Py_None, *rows = NULL;
    unsigned long long stream = 0;
    measuring t = {0};
    int math, device, products = true, convolutions = false;
    int64_t bytes = 0;
    void *at = NULL;
    ctx c;
    status s;

    if (!PyArg_ParseTuple(args, "O!i|dOKpp:cuda_tune", (PyTypeObject *)m->plan_type, &object, &math, &t.limit, &memory,
                          &stream, &products, &convolutions))
        return NULL;
    const struct plan *p = plan_for_gpu(object, &device);
    if (!p) {
        PyErr_SetString(PyExc_ValueError, "a plan for the CPU has no product for cuBLASLt");
        return NULL;
    }
    if (memory != Py_None && tensor_bytes(memory, device, "the memory to measure in", &at, &bytes) < 0) return NULL;
    if ((uintptr_t)at % MEASURE_ALIGNED != 0) {
        PyErr_Format(PyExc_ValueError, "the memory to measure in is not aligned to %d", (int)MEASURE_ALIGNED);
        return NULL;
    }
    t.products = products;
    t.convolutions = convolutions;
    t.memory = at;
    t.bytes = (size_t)bytes;
    ctx_init(&c);
    Py_BEGIN_ALLOW_THREADS s = tune_there(&c, p, device, (void *)(uintptr_t)stream, math, &t);
    Py_END_ALLOW_THREADS if (s == OK) { rows = with_kernels(rows_there(t.found), t.kernels); }
    else {
        raise_status(m, &c.err);
    }
    ctx_release(&c);
    return rows ? Py_BuildValue("(nNi)", (Py_ssize_t)t.needed, rows, t.n_convolutions) : NULL;
}

PyObject *core_cuda_tuning_set(PyObject *module, PyObject *args) {
    const char *text, *name;
    blas_key of;
    blas_algorithm algorithm;
    int device;

    (void)module;
    if (!PyArg_ParseTuple(args, "iss:cuda_tuning_set", &device, &text, &name)) return NULL;
    if (triton_choose(text, name)) return Py_NewRef(Py_None);
    if (device < 0 || device >= MOST_DEVICES || !blas_key_parse(text, device, &of))
        return PyErr_Format(PyExc_ValueError, "'%s' is no product on cuda:%d", text, device);
    if (!blas_algorithm_parse(name, &algorithm)) return PyErr_Format(PyExc_ValueError, "'%s' is no algorithm", name);
    if (!blas_choose(&of, &algorithm)) {
        PyErr_SetString(PyExc_MemoryError, "the table of cuBLASLt's algorithms is full");
        return NULL;
    }
    return Py_NewRef(Py_None);
}

static status name_place(ctx *c, int device, char name[CUDA_NAME], char version[BLAS_VERSION]) {
    cuda_run where;
    status s;

    TRY(cuda_begin(c, device, NULL, &where));
    s = cuda_name(c, device, name);
    if (s == OK) s = blas_version(c, version);
    return cuda_end(c, &where, s);
}

PyObject *core_cuda_place(PyObject *module, PyObject *number) {
    char name[CUDA_NAME], version[BLAS_VERSION];
    const long device = PyLong_AsLong(number);
    PyObject *result = NULL;
    ctx c;

    if (device == -1 && PyErr_Occurred()) return NULL;
    ctx_init(&c);
    if (name_place(&c, device < 0 || device >= MOST_DEVICES ? -1 : (int)device, name, version) == OK)
        result = PyUnicode_FromFormat("%s, cuBLASLt %s", name, version);
    else raise_status(state_of(module), &c.err);
    ctx_release(&c);
    return result;
}
