/* guard.c -- defines _core.Watch: did anything change that a captured graph assumes about its module?
 *
 * A Watch remembers the contents of dicts and lists, attributes of classes, and the classes of objects. An entry that
 * is a plain tensor is remembered by its class, type, shape, device and need for a gradient: another tensor of the same
 * kind may take its place, as updated buffers and loaded weights do. Anything else is remembered by identity. */
#include "py/py.h"

#include <stdlib.h>

enum { MOST_TENSOR_CLASSES = 4 };

typedef struct entry {
    PyObject *key;   /* owned; NULL in a list */
    PyObject *value; /* owned; a tensor: borrowed and only compared */
    PyObject *type;  /* owned; of a tensor, else NULL */
    tensor_kind kind;
    int tied; /* the first entry with the same tensor, or its own number */
} entry;

typedef struct container {
    PyObject *object; /* borrowed from watch.containers */
    Py_ssize_t count;
    int is_dict;
} container;

typedef struct {
    PyObject_HEAD;
    PyObject *containers;                          /* list of dicts and lists */
    Py_ssize_t n_exact;                            /* of them: these many first ones by identity alone */
    PyObject *names;                               /* list of (class, name, value) */
    PyObject *objects;                             /* list of (object, class) */
    PyObject *tensor_classes[MOST_TENSOR_CLASSES]; /* owned */
    entry *entries;                                /* of one container after the other */
    PyObject **now;                                /* the tensors of one look, borrowed */
    Py_ssize_t n_all, n_entries;
    container *all;
    int *tensors, n_tensors;     /* entries with a tensor that no earlier entry has */
    int *exact, n_exact_tensors; /* other entries with a tensor */
    int unsure;                  /* something cannot be watched: always changed */
} watch;

static int is_plain_tensor(const watch *w, PyObject *object) {
    for (int i = 0; i < MOST_TENSOR_CLASSES && w->tensor_classes[i]; i++)
        if ((PyObject *)Py_TYPE(object) == w->tensor_classes[i]) return 1;
    return 0;
}

/* The next entry of a dict or a list; the references are borrowed. */
static int next(const container *from, Py_ssize_t *at, PyObject **key, PyObject **value) {
    if (from->is_dict) return PyDict_Next(from->object, at, key, value);
    if (*at >= PyList_Size(from->object)) return 0;
    *key = NULL;
    *value = PyList_GetItem(from->object, (*at)++);
    return 1;
}

/* --- remembering ---------------------------------------------------------------------------------------------------- */

static int remember(watch *w, PyObject *tensor_class) {
    Py_ssize_t n = PyList_Size(w->containers), total = 0, made = 0;

    w->all = calloc((size_t)n + 1, sizeof *w->all);
    if (!w->all) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *object = PyList_GetItem(w->containers, i);
        int is_dict = PyDict_Check(object);
        if (!is_dict && !PyList_Check(object)) {
            PyErr_Format(PyExc_TypeError, "container %zd is a %R, neither dict nor list", i, Py_TYPE(object));
            return -1;
        }
        w->all[i] = (container){object, is_dict ? PyDict_Size(object) : PyList_Size(object), is_dict};
        total += w->all[i].count;
    }
    w->n_all = n;
    w->entries = calloc((size_t)total + 1, sizeof *w->entries);
    w->now = calloc((size_t)total + 1, sizeof *w->now);
    w->tensors = calloc((size_t)total + 1, sizeof *w->tensors);
    w->exact = calloc((size_t)total + 1, sizeof *w->exact);
    if (!w->entries || !w->now || !w->tensors || !w->exact) return PyErr_NoMemory(), -1;
    for (Py_ssize_t i = 0; i < n; i++) {
        const container *from = &w->all[i];
        PyObject *key, *value;
        Py_ssize_t at = 0, end = made + from->count;
        while (made < end && next(from, &at, &key, &value)) {
            entry *e = &w->entries[made];
            e->key = key ? Py_NewRef(key) : NULL;
            e->value = w->now[made] = value;
            e->tied = (int)made;
            w->n_entries = ++made;
            if (i < w->n_exact || !is_plain_tensor(w, value)) {
                Py_INCREF(value);
                if (PyType_IsSubtype(Py_TYPE(value), (PyTypeObject *)tensor_class)) {
                    w->exact[w->n_exact_tensors++] = e->tied;
                    w->unsure |= i >= w->n_exact;
                }
                continue;
            }
            e->type = Py_NewRef((PyObject *)Py_TYPE(value));
            if (tensor_kind_of(value, &e->kind) < 0) {
                PyErr_Clear();
                w->unsure = 1;
            }
            for (int j = 0; j < w->n_tensors; j++)
                if (w->entries[w->tensors[j]].value == value) e->tied = w->tensors[j];
            if (e->tied == made - 1) w->tensors[w->n_tensors++] = e->tied;
        }
        if (made != end) w->unsure = 1; /* changed by another thread meanwhile */
        made = end;
    }
    return 0;
}

static PyObject *watch_new(PyTypeObject *type, PyObject *args, PyObject *kwargs) {
    PyObject *containers, *exact, *names, *objects, *classes;
    watch *w;

    if (kwargs && PyDict_Size(kwargs)) {
        PyErr_SetString(PyExc_TypeError, "Watch() takes no keywords");
        return NULL;
    }
    if (!PyArg_ParseTuple(args, "O!O!O!O!O!:Watch", &PyList_Type, &containers, &PyList_Type, &exact, &PyList_Type,
                          &names, &PyList_Type, &objects, &PyTuple_Type, &classes))
        return NULL;
    for (Py_ssize_t i = 0; i < PyList_Size(names); i++) {
        PyObject *name = PyList_GetItem(names, i);
        if (!PyTuple_Check(name) || PyTuple_Size(name) != 3 || !PyUnicode_Check(PyTuple_GetItem(name, 1))) {
            PyErr_Format(PyExc_TypeError, "name %zd is not (class, name, value)", i);
            return NULL;
        }
    }
    for (Py_ssize_t i = 0; i < PyList_Size(objects); i++) {
        PyObject *object = PyList_GetItem(objects, i);
        if (!PyTuple_Check(object) || PyTuple_Size(object) != 2) {
            PyErr_Format(PyExc_TypeError, "object %zd is not (object, class)", i);
            return NULL;
        }
    }
    if (PyTuple_Size(classes) < 1 || PyTuple_Size(classes) > MOST_TENSOR_CLASSES) {
        PyErr_Format(PyExc_TypeError, "1 to %d tensor classes are wanted", MOST_TENSOR_CLASSES);
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyTuple_Size(classes); i++)
        if (!PyType_Check(PyTuple_GetItem(classes, i))) {
            PyErr_Format(PyExc_TypeError, "tensor class %zd is no class", i);
            return NULL;
        }
    if (!(w = (watch *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0))) return NULL;
    w->names = PyList_GetSlice(names, 0, PyList_Size(names));
    w->objects = PyList_GetSlice(objects, 0, PyList_Size(objects));
    w->n_exact = PyList_Size(exact);
    w->containers = PySequence_Concat(exact, containers);
    for (int i = 0; i < PyTuple_Size(classes); i++) w->tensor_classes[i] = Py_NewRef(PyTuple_GetItem(classes, i));
    if (w->names && w->objects && w->containers && remember(w, w->tensor_classes[0]) == 0) return (PyObject *)w;
    Py_DECREF(w);
    return NULL;
}

/* --- comparing ------------------------------------------------------------------------------------------------------ */

/* 1: this tensor stands where one of the same kind stood. */
static int same_kind(const entry *e, PyObject *value) {
    tensor_kind kind;

    if ((PyObject *)Py_TYPE(value) != e->type) return 0;
    if (tensor_kind_of(value, &kind) < 0) {
        PyErr_Clear();
        return 0;
    }
    return tensor_kind_equal(&kind, &e->kind);
}

static int containers_changed(watch *w) {
    Py_ssize_t number = 0;
    int moved = 0;

    for (const container *from = w->all; from < w->all + w->n_all; from++) {
        PyObject *key, *value;
        Py_ssize_t at = 0, end = number + from->count;
        if ((from->is_dict ? PyDict_Size(from->object) : PyList_Size(from->object)) != from->count) return 1;
        while (number < end && next(from, &at, &key, &value)) {
            entry *e = &w->entries[number];
            if (key != e->key) return 1;
            w->now[number] = value;
            if (!e->type) {
                if (value != e->value) return 1;
            } else if (e->tied != number) {
                if (value != w->now[e->tied]) return 1;
            } else {
                Py_INCREF(value); /* torch may run Python */
                int same = same_kind(e, value);
                Py_DECREF(value);
                if (!same) return 1;
                moved |= value != e->value;
            }
            number++;
        }
        if (number != end) return 1;
    }
    /* A tensor that is new may be one that stands elsewhere, too. */
    for (int i = 0; moved && i < w->n_tensors; i++) {
        PyObject *now = w->now[w->tensors[i]];
        if (now == w->entries[w->tensors[i]].value) continue;
        for (int j = 0; j < w->n_tensors; j++)
            if (j != i && w->now[w->tensors[j]] == now) return 1;
    }
    return 0;
}

static int names_changed(const watch *w) {
    for (Py_ssize_t i = 0, n = PyList_Size(w->names); i < n; i++) {
        PyObject *name = PyList_GetItem(w->names, i);
        PyObject *value = PyObject_GetAttr(PyTuple_GetItem(name, 0), PyTuple_GetItem(name, 1));
        int same = value == PyTuple_GetItem(name, 2);
        if (!value) PyErr_Clear();
        Py_XDECREF(value);
        if (!same) return 1;
    }
    return 0;
}

static int objects_changed(const watch *w) {
    for (Py_ssize_t i = 0, n = PyList_Size(w->objects); i < n; i++) {
        PyObject *object = PyList_GetItem(w->objects, i);
        if ((PyObject *)Py_TYPE(PyTuple_GetItem(object, 0)) != PyTuple_GetItem(object, 1)) return 1;
    }
    return 0;
}

static PyObject *watch_changed(PyObject *object, PyObject *unused) {
    watch *w = (watch *)object;

    (void)unused;
    return PyBool_FromLong(w->unsure || objects_changed(w) || containers_changed(w) || names_changed(w));
}

/* --- holding -------------------------------------------------------------------------------------------------------- */

static int holds(const watch *w, const PyObject *object) {
    for (int i = 0; i < w->n_tensors; i++)
        if (w->now[w->tensors[i]] == object) return 1;
    for (int i = 0; i < w->n_exact_tensors; i++)
        if (w->entries[w->exact[i]].value == object) return 1;
    for (Py_ssize_t i = 0, n = w->names ? PyList_Size(w->names) : 0; i < n; i++)
        if (PyTuple_GetItem(PyList_GetItem(w->names, i), 2) == object) return 1;
    return 0;
}

static PyObject *watch_holds(PyObject *object, PyObject *tensors) {
    const watch *w = (const watch *)object;

    if (!PyList_Check(tensors)) {
        PyErr_SetString(PyExc_TypeError, "holds() takes a list");
        return NULL;
    }
    for (Py_ssize_t i = 0; i < PyList_Size(tensors); i++)
        if (holds(w, PyList_GetItem(tensors, i))) Py_RETURN_TRUE;
    Py_RETURN_FALSE;
}

/* --- the type ------------------------------------------------------------------------------------------------------- */

static int watch_traverse(PyObject *object, visitproc visit, void *arg) {
    watch *w = (watch *)object;

    Py_VISIT(Py_TYPE(object));
    Py_VISIT(w->containers);
    Py_VISIT(w->names);
    Py_VISIT(w->objects);
    for (Py_ssize_t i = 0; i < w->n_entries; i++) {
        Py_VISIT(w->entries[i].key);
        Py_VISIT(w->entries[i].type);
        if (!w->entries[i].type) Py_VISIT(w->entries[i].value);
    }
    return 0;
}

static int watch_clear(PyObject *object) {
    watch *w = (watch *)object;
    Py_ssize_t n = w->n_entries;

    w->n_entries = 0;
    w->n_tensors = w->n_exact_tensors = 0;
    w->unsure = 1;
    for (Py_ssize_t i = 0; i < n; i++) {
        if (!w->entries[i].type) Py_CLEAR(w->entries[i].value);
        Py_CLEAR(w->entries[i].key);
        Py_CLEAR(w->entries[i].type);
    }
    Py_CLEAR(w->containers);
    Py_CLEAR(w->names);
    Py_CLEAR(w->objects);
    return 0;
}

static void watch_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    watch *w = (watch *)object;

    PyObject_GC_UnTrack(object);
    watch_clear(object);
    for (int i = 0; i < MOST_TENSOR_CLASSES; i++) Py_CLEAR(w->tensor_classes[i]);
    free(w->entries), free(w->now), free(w->all), free(w->tensors), free(w->exact);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyMethodDef watch_methods[] = {
    {"changed", watch_changed, METH_NOARGS, PyDoc_STR("changed() -> is anything not as it was when this was made?")},
    {"holds", watch_holds, METH_O, PyDoc_STR("holds(tensors) -> is one of these there, by the latest look?")},
    {NULL, NULL, 0, NULL},
};

PyDoc_STRVAR(
    watch_doc,
    "Watch(containers, exact, names, objects, tensor_classes)\n\n"
    "Remembers what dicts and lists contain, (class, name, value) attributes of classes, and the classes of\n"
    "(object, class) pairs. In `containers`, an entry whose class is one of tensor_classes may be replaced by\n"
    "a tensor of the same class, type, shape, device and need for a gradient; in `exact`, by nothing. The\n"
    "first of tensor_classes is the class of all tensors.");

static PyType_Slot watch_slots[] = {
    {Py_tp_new, watch_new},
    {Py_tp_dealloc, watch_dealloc},
    {Py_tp_traverse, watch_traverse},
    {Py_tp_clear, watch_clear},
    {Py_tp_methods, watch_methods},
    {Py_tp_doc, (void *)watch_doc},
    {0, NULL},
};

static PyType_Spec watch_spec = {
    .name = "ortmodule._core.Watch",
    .basicsize = sizeof(watch),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_HAVE_GC | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = watch_slots,
};

PyObject *watch_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &watch_spec, NULL); }
