/* model.c -- defines _core.Model: an ONNX model that was read once, from which plans are made for shapes. */
#include "core/memory.h"
#include "cuda/host/compile.h"
#include "exec/exec.h"
#include "onnx/read.h"
#include "plan/compile.h"
#include "py/host.h"
#include "py/py.h"

#include <stdlib.h>
#include <string.h>

typedef struct {
    PyObject_HEAD ctx c; /* owns the graph */
    graph *g;            /* NULL until all of it has been read */
    bool begun;          /* reading; the interpreter's lock is not held meanwhile */
} model_object;

static int model_init(PyObject *object, PyObject *args, PyObject *kwargs) {
    model_object *self = (model_object *)object;
    char *names[] = {"data", NULL};
    Py_buffer data;
    graph *g = NULL; /* until it is whole: other threads run meanwhile */
    status s;

    if (self->begun) {
        PyErr_SetString(PyExc_RuntimeError, "a Model is initialised once");
        return -1;
    }
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "y*:Model", names, &data)) return -1;
    self->begun = true;
    ctx_init(&self->c);
    Py_BEGIN_ALLOW_THREADS s = onnx_read(&self->c, data.buf, (size_t)data.len, &g);
    if (s == OK) graph_remove_dead(g);
    Py_END_ALLOW_THREADS PyBuffer_Release(&data);
    if (s == OK) self->g = g;
    if (s == OK) return 0;
    raise_status(state_of((PyObject *)Py_TYPE(object)), &self->c.err);
    return -1;
}

static void model_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    ctx_release(&((model_object *)object)->c);
    memory_trim(); /* what its runs left behind */
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static graph *check_graph(PyObject *object) {
    graph *g = ((model_object *)object)->g;
    if (!g) PyErr_SetString(PyExc_RuntimeError, "this Model was never read");
    return g;
}

/* --- plan ----------------------------------------------------------------------------------------------------------- */

static int parse_spec(PyObject *spec, input_spec *out) {
    PyObject *type, *sizes;

    if (!PyTuple_Check(spec) || PyTuple_Size(spec) != 2) {
        PyErr_Format(PyExc_TypeError, "an input is described by a pair, (dtype name, shape), not by %R", spec);
        return -1;
    }
    type = PyTuple_GetItem(spec, 0);
    sizes = PyTuple_GetItem(spec, 1);
    return parse_dtype(type, &out->type) < 0 ? -1 : parse_shape(sizes, &out->shape);
}

/* `what` the list holds, and of what the model has `count`. */
static int check_length(PyObject *list, int count, const char *what, const char *of) {
    Py_ssize_t given = PySequence_Size(list);

    if (given == count) return 0;
    if (given >= 0) PyErr_Format(PyExc_ValueError, "the model has %d %s; %zd %s were given", count, of, given, what);
    return -1;
}

static int parse_specs(PyObject *list, int count, input_spec *specs) {
    if (check_length(list, count, "descriptions", "inputs") < 0) return -1;
    for (int i = 0; i < count; i++) {
        PyObject *spec = PySequence_GetItem(list, i);
        int bad = spec ? parse_spec(spec, &specs[i]) : -1;
        Py_XDECREF(spec);
        if (bad) return -1;
    }
    return 0;
}

static int parse_flags(PyObject *list, int count, const char *what, const char *of, bool *flags) {
    if (check_length(list, count, what, of) < 0) return -1;
    for (int i = 0; i < count; i++) {
        PyObject *item = PySequence_GetItem(list, i);
        int truth = item ? PyObject_IsTrue(item) : -1;
        Py_XDECREF(item);
        if (truth < 0) return -1;
        flags[i] = truth;
    }
    return 0;
}

enum { MOST_SIZES = 1024 };

typedef struct size_lists {
    known_size known[MOST_SIZES];
    int64_t sizes[MOST_SIZES];
    int n_known, n_sizes;
} size_lists;

/* A key, a size, a key, a size, ...: as plan.pending_keys has the keys. */
static int parse_sizes(PyObject *list, size_lists *out) {
    const Py_ssize_t n = PySequence_Size(list);

    if (n % 2 || n > 2 * MOST_SIZES) {
        PyErr_Format(PyExc_ValueError, "%zd keys and sizes; they come in pairs, and at most %d are supported", n,
                     MOST_SIZES);
        return -1;
    }
    for (Py_ssize_t i = 0; i < n; i += 2) {
        int64_t pair[2];
        for (int k = 0; k < 2; k++) {
            PyObject *item = PySequence_GetItem(list, i + k);
            pair[k] = item ? PyLong_AsLongLong(item) : -1;
            Py_XDECREF(item);
            if (PyErr_Occurred()) return -1;
        }
        if (pair[0] >= MODEL_PLACE) out->known[out->n_known++] = (known_size){pair[0], pair[1]};
        else out->sizes[out->n_sizes++] = pair[1];
    }
    return 0;
}

static void free_wishes(const recompute_request *r) {
    for (int i = 0; i < r->n_wishes; i++) free((char *)(uintptr_t)r->wishes[i].cluster);
    free((recompute_wish *)(uintptr_t)r->wishes);
}

static int parse_wish(PyObject *row, recompute_wish *out) {
    const char *name;
    int strategy;

    if (!PyArg_ParseTuple(row, "sii:cluster", &name, &strategy, &out->count)) return -1;
    if (strategy < KEEP_ALL || strategy > MAKE_AGAIN_FROM_STASH || out->count < -1) {
        PyErr_Format(PyExc_ValueError, "a cluster's strategy is 0, 1 or 2, and its count at least -1; not %R", row);
        return -1;
    }
    out->strategy = (recompute_strategy)strategy;
    if ((out->cluster = strdup(name))) return 0;
    PyErr_NoMemory();
    return -1;
}

/* `clusters`: None or [(name, strategy, count), ...], whose memory free_wishes frees; -1 with an exception set. */
static int parse_request(PyObject *clusters, int goal, const char *folder, recompute_request *out) {
    const Py_ssize_t n = clusters == Py_None ? 0 : PySequence_Size(clusters);
    recompute_wish *wishes;
    int bad = 0;

    if (n < 0) return -1;
    if (!(wishes = calloc((size_t)n + 1, sizeof *wishes))) {
        PyErr_NoMemory();
        return -1;
    }
    if (folder && goal == RECOMPUTE_CHEAP) goal = OFFLOAD_ALL;
    *out = (recompute_request){.goal = (recompute_goal)goal,
                               .wishes = wishes,
                               .n_wishes = (int)n,
                               .list = clusters != Py_None,
                               .offload = folder != NULL};
    for (Py_ssize_t i = 0; i < n && !bad; i++) {
        PyObject *row = PySequence_GetItem(clusters, i);
        bad = row ? parse_wish(row, &wishes[i]) : -1;
        Py_XDECREF(row);
    }
    return bad;
}

PyDoc_STRVAR(
    plan_doc,
    "plan(inputs, needs_grad, output_grads=None, disabled_passes=0, sizes=(), host=None,\n"
    "     padding_unseen=False, device=-1, recompute=0, budget=0, any_size=False,\n"
    "     clusters=None, triton=None, offload=None, joint_from=0, layers=0, costs=...) -> Plan\n\n"
    "inputs: one (dtype name, shape) for each model input. needs_grad: one bool each.\n"
    "output_grads: which outputs receive a gradient; None plans inference only.\n"
    "sizes: keys and sizes that data decides in turn, as far as they are known. A plan whose `prologue` is true has one\n"
    "output, the next of them, whose keys are `pending_keys`: run it and ask again.\n"
    "host: knows the nodes of Python's, if there are any (ortmodule/host/host_node.py).\n"
    "padding_unseen: results for tokens that are padding may be zeros.\n"
    "recompute: 1, backward computes layers again; 2, all that needs less memory.\n"
    "budget: bytes that the arena and the results may have; MemoryError where they cannot.\n"
    "offload: a folder. A budget, and recompute=2, may offload activations to a file there, or, on a GPU, to memory of\n"
    "the host; without either what lowers the peak is offloaded.\n"
    "any_size: no MemoryError where this machine has no memory for the plan's runs.\n"
    "clusters: [(name, strategy, count), ...], what is computed again with recompute=0; the plan lists its\n"
    "clusters, unless it is None.\n"
    "triton: what becomes Triton kernels, (least nodes, constants in the text, flash attention, widest row, [(operator,\n"
    "classes of operands, does it not count, [(attribute, what it has to be, numbers), ...]), ...]).\n"
    "joint_from: bytes of gradients from which a plan for the CPU has a joint arena, that is one for these, too; 0: it has\n"
    "none. A budget counts on it.\n"
    "layers: of recompute=1, the first so many of each row of layers; 0: all.\n"
    "costs: with a budget or recompute=2, how long each takes beside a multiplication of a product in float32: one in 16\n"
    "bits, one of another kernel, a byte; zeros: as on a usual processor.\n"
    "device: the number of a GPU; -1 is the CPU.");

/* Nothing of a plan is refused when it runs, and its chains have kernels. */
static status check_there(ctx *c, const plan *p, int device) {
    chain_list chains = {0};
    cuda_run where;
    status s;

    TRY(cuda_begin(c, device, NULL, &where));
    where.dry = true;
    where.chains = &chains;
    s = exec_check(c, p, &where);
    if (s == OK) s = chains_compile(c, &chains);
    return cuda_end(c, &where, s);
}

/* Other threads run meanwhile. */
static status make_plan(ctx *c, const graph *g, const input_spec *specs, const compile_options *o, int64_t budget,
                        int device, plan **out) {
    status s;

    Py_BEGIN_ALLOW_THREADS;
    s = budget > 0 ? compile_within(c, g, specs, o, budget, out) : compile(c, g, specs, o, out);
    if (s == OK && o->cuda) s = check_there(c, *out, device);
    Py_END_ALLOW_THREADS;
    return s;
}

/* What is said of each input and output of a model. */
typedef struct boundary {
    input_spec *specs;
    bool *needed; /* the inputs' flags, as they are parsed */
    bool *flags;  /* of each output: does it receive a gradient? */
} boundary;

static int boundary_init(const graph *g, boundary *b) {
    b->specs = calloc((size_t)g->n_inputs + 1, sizeof *b->specs);
    b->needed = calloc((size_t)g->n_inputs + 1, sizeof *b->needed);
    b->flags = calloc((size_t)g->n_outputs + 1, sizeof *b->flags);
    if (b->specs && b->needed && b->flags) return 0;
    PyErr_NoMemory();
    return -1;
}

static void boundary_free(boundary *b) {
    free(b->specs);
    free(b->needed);
    free(b->flags);
}

/* Types, shapes and needs for gradients of the inputs; gradients of the outputs, unless `grads` is None. */
static int parse_boundary(const graph *g, PyObject *inputs, PyObject *needs, PyObject *grads, boundary *b) {
    if (parse_specs(inputs, g->n_inputs, b->specs) < 0) return -1;
    if (parse_flags(needs, g->n_inputs, "needs_grad flags", "inputs", b->needed) < 0) return -1;
    for (int i = 0; i < g->n_inputs; i++) b->specs[i].needs_grad = b->needed[i];
    return grads == Py_None ? 0 : parse_flags(grads, g->n_outputs, "output_grads flags", "outputs", b->flags);
}

static char *plan_arguments[] = {
    "inputs",         "needs_grad", "output_grads", "disabled_passes", "sizes",    "host",
    "padding_unseen", "device",     "recompute",    "budget",          "any_size", "clusters",
    "triton",         "offload",    "joint_from",   "layers",          "costs",    NULL};

static PyObject *model_plan(PyObject *object, PyObject *args, PyObject *kwargs) {
    module_state *m = state_of((PyObject *)Py_TYPE(object));
    PyObject *inputs, *needs, *grads = Py_None, *known = NULL, *from_host = NULL, *clusters = Py_None;
    PyObject *triton = Py_None, *result = NULL;
    const struct triton_rules *rules = NULL;
    size_lists lists = {.n_known = 0};
    int device = ON_CPU, unseen = 0, any_size = 0, goal = RECOMPUTE_CHEAP, layers = 0;
    unsigned long long off = 0;
    long long budget = 0, joint_from = 0;
    recompute_request again = {RECOMPUTE_CHEAP};
    cost_rates rates = {0};
    graph *g = check_graph(object);
    boundary b = {0};
    python_host from_python;
    const char *folder = NULL;
    plan *p = NULL;
    ctx c, of_rules;
    status s;

    ctx_init(&c);
    if (!g || !PyArg_ParseTupleAndKeywords(args, kwargs, "OO|OKOOpiiLpOOzLi(ddd):plan", plan_arguments, &inputs, &needs,
                                           &grads, &off, &known, &from_host, &unseen, &device, &goal, &budget,
                                           &any_size, &clusters, &triton, &folder, &joint_from, &layers, &rates.narrow,
                                           &rates.others, &rates.byte))
        return NULL;
    ctx_init(&of_rules);
    if (boundary_init(g, &b) < 0 || (known && parse_sizes(known, &lists) < 0) ||
        parse_boundary(g, inputs, needs, grads, &b) < 0 || parse_request(clusters, goal, folder, &again) < 0 ||
        parse_triton_rules(&of_rules, triton, &rules) < 0)
        goto done;
    again.layers = layers;
    again.rates = rates;
    compile_options o = {.output_grads = grads == Py_None ? NULL : b.flags,
                         .disabled_passes = off,
                         .n_known = lists.n_known,
                         .known = lists.known,
                         .n_sizes = lists.n_sizes,
                         .sizes = lists.sizes,
                         .host = python_host_init(&from_python, from_host),
                         .padding_unseen = unseen,
                         .triton = rules,
                         .cuda = device != ON_CPU,
                         .any_size = any_size,
                         .again = again,
                         .joint_from = joint_from};
    s = make_plan(&c, g, b.specs, &o, budget, device, &p);
    if (s != OK) raise_status(m, &c.err);
    else result = plan_object_new(m, object, &c, p, device, folder); /* takes the context over, even when it fails */
    if (s == OK) ctx_init(&c);
done:
    ctx_release(&c);
    ctx_release(&of_rules);
    boundary_free(&b);
    free_wishes(&again);
    return result;
}

/* --- attributes ------------------------------------------------------------------------------------------------------- */

static PyObject *value_names(value *const *list, int count) {
    PyObject *names = PyList_New(count);
    for (int i = 0; names && i < count; i++) {
        PyObject *name = PyUnicode_FromString(list[i]->name ? list[i]->name : "");
        if (!name || PyList_SetItem(names, i, name) < 0) Py_CLEAR(names);
    }
    return names;
}

static PyObject *model_inputs(PyObject *object, void *unused) {
    graph *g = check_graph(object);
    (void)unused;
    return g ? value_names(g->inputs, g->n_inputs) : NULL;
}

static PyObject *model_outputs(PyObject *object, void *unused) {
    graph *g = check_graph(object);
    (void)unused;
    return g ? value_names(g->outputs, g->n_outputs) : NULL;
}

static PyObject *model_nodes(PyObject *object, void *unused) {
    graph *g = check_graph(object);
    (void)unused;
    return g ? PyLong_FromLong(g->n_nodes) : NULL;
}

static PyMethodDef model_methods[] = {
    {"plan", (PyCFunction)(void (*)(void))model_plan, METH_VARARGS | METH_KEYWORDS, plan_doc},
    {NULL, NULL, 0, NULL},
};

static PyGetSetDef model_getset[] = {
    {"inputs", model_inputs, NULL, "names of the inputs", NULL},
    {"outputs", model_outputs, NULL, "names of the outputs", NULL},
    {"nodes", model_nodes, NULL, "number of nodes that were read", NULL},
    {NULL, NULL, NULL, NULL, NULL},
};

static PyType_Slot model_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Model(data): reads ONNX bytes; raises InvalidModelError, UnsupportedError.")},
    {Py_tp_init, model_init},
    {Py_tp_dealloc, model_dealloc},
    {Py_tp_methods, model_methods},
    {Py_tp_getset, model_getset},
    {0, NULL},
};

static PyType_Spec model_spec = {
    .name = "ortmodule._core.Model",
    .basicsize = sizeof(model_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE,
    .slots = model_slots,
};

PyObject *model_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &model_spec, NULL); }
