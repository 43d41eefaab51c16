/* module.c -- defines ortmodule._core: the module and its functions. */
#include "py/py.h"

#include "core/limit.h"
#include "core/memory.h"
#include "core/torch_lib.h"
#include "cuda/host/compile.h"
#include "cuda/host/driver.h"
#include "cuda/host/refusals.h"
#include "cuda/host/replay.h"
#include "cuda/kernels/digest.h"
#include "cuda/kernels/optim.h"
#include "cuda/libraries/nccl.h"
#include "exec/record.h"
#include "ops/op.h"
#include "passes/pipeline.h"
#include "plan/cost.h"
#include "plan/recompute.h"

#include <stdlib.h>
#include <string.h>

/* One dict a record: what tests and documentation read the registry through. */
static PyObject *core_operators(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);

    (void)module, (void)unused;
    for (const op_def *const *family = op_families; list && *family; family++)
        for (const op_def *op = *family; list && op->name; op++) {
            PyObject *types = PyList_New(0), *row;
            for (int t = F32; types && t < DTYPE_COUNT; t++) {
                PyObject *name = op->dtypes & SET(t) ? PyUnicode_FromString(dtype_name((dtype)t)) : NULL;
                if (name && PyList_Append(types, name) < 0) Py_CLEAR(types);
                Py_XDECREF(name);
            }
            row = Py_BuildValue("{sssssisNsOsOsOsOsOsIsIsIsI}", "name", op->name, "domain", op->domain, "since",
                                op->since, "dtypes", types, "has_kernel", op->cpu ? Py_True : Py_False, "has_cuda",
                                op->cuda ? Py_True : Py_False, "has_grad", op->grad ? Py_True : Py_False, "has_lower",
                                op->lower ? Py_True : Py_False, "no_grad", op->flags & NO_GRAD ? Py_True : Py_False,
                                "flags", op->flags, "checked", op->checked, "owned", op->owned, "plain", op->plain);
            if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
            Py_XDECREF(row);
        }
    return list;
}

typedef struct listed {
    const char *name, *function;
    int operands;
    const char *domain, *attributes;
} listed;

#define OPERATOR(name_, function_, operands_, domain, since, cost, attributes, ...)                                    \
    {#name_, #function_, operands_, #domain, #attributes},
static const listed rows[] = {
#include "ops/pointwise/operators.h"
};

/* What the exporter, type promotion, the reference and the cases take from the list of pointwise operators. */
static PyObject *core_pointwise_operators(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);

    (void)module, (void)unused;
    for (size_t i = 0; list && i < sizeof rows / sizeof *rows; i++) {
        if (strcmp(rows[i].domain, "OURS") != 0 || strcmp(rows[i].attributes, "NONE") != 0) continue;
        PyObject *made = Py_BuildValue("(ssi)", rows[i].name, rows[i].function, rows[i].operands);
        if (!made || PyList_Append(list, made) < 0) Py_CLEAR(list);
        Py_XDECREF(made);
    }
    return list;
}

static PyObject *core_memory(PyObject *module, PyObject *unused) {
    memory_state m = memory_now();

    (void)module, (void)unused;
    return Py_BuildValue("{snsnsn}", "used", (Py_ssize_t)m.used, "kept", (Py_ssize_t)m.kept, "peak",
                         (Py_ssize_t)m.peak);
}

static PyObject *core_memory_most(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    return PyLong_FromSize_t(memory_most());
}

static PyObject *core_memory_trim(PyObject *module, PyObject *unused) {
    (void)module, (void)unused;
    memory_trim();
    return Py_NewRef(Py_None);
}

static PyObject *core_memory_limits(PyObject *module, PyObject *unused) {
    const memory_limits l = memory_limits_now();

    (void)module, (void)unused;
    return Py_BuildValue("{sKsK}", "most", (unsigned long long)l.most, "room", (unsigned long long)l.room);
}

static PyObject *core_fail_memory(PyObject *module, PyObject *count) {
    const long long n = PyLong_AsLongLong(count);

    (void)module;
    if (n == -1 && PyErr_Occurred()) return NULL;
    memory_fail_after(n);
    return Py_NewRef(Py_None);
}

static PyObject *core_torch_symbols(PyObject *module, PyObject *unused) {
    PyObject *list = PyList_New(0);

    (void)module, (void)unused;
    for (size_t i = 0; list; i++) {
        torch_symbol symbol = torch_lib_symbol(i);
        if (!symbol.name) break;
        PyObject *row = Py_BuildValue("(ssO)", symbol.name, symbol.use, symbol.found ? Py_True : Py_False);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list;
}

static PyObject *core_profiled_by(PyObject *module, PyObject *args) {
    module_state *m = state_of(module);
    PyObject *dict, *key;

    if (!PyArg_ParseTuple(args, "O!U", &PyDict_Type, &dict, &key)) return NULL;
    Py_XDECREF(m->profiler);
    Py_XDECREF(m->profiler_key);
    m->profiler = Py_NewRef(dict);
    m->profiler_key = Py_NewRef(key);
    return Py_NewRef(Py_None);
}

static PyObject *core_module_path(PyObject *module, PyObject *name) {
    PyObject *bytes = PyUnicode_AsUTF8String(name), *path = NULL;
    char *from, *out;
    Py_ssize_t length;

    (void)module;
    if (!bytes || PyBytes_AsStringAndSize(bytes, &from, &length) < 0) return NULL;
    if ((out = malloc((size_t)length + 1))) {
        record_module_path(from, out, (size_t)length + 1);
        path = PyUnicode_FromString(out);
        free(out);
    } else {
        PyErr_NoMemory();
    }
    Py_DECREF(bytes);
    return path;
}

static PyObject *core_passes(PyObject *module, PyObject *unused) {
    PyObject *bits = PyDict_New();

    (void)module, (void)unused;
    for (int i = 0; bits && passes[i]; i++) {
        PyObject *bit = PyLong_FromUnsignedLongLong(pass_bit(passes[i]->name));
        if (!bit || PyDict_SetItemString(bits, passes[i]->name, bit) < 0) Py_CLEAR(bits);
        Py_XDECREF(bit);
    }
    return bits;
}

static PyObject *core_cuda_devices(PyObject *module, PyObject *unused) {
    PyObject *result = NULL;
    int count;
    ctx c;

    (void)unused;
    ctx_init(&c);
    if (cuda_available(&c, &count) == OK) result = PyLong_FromLong(count);
    else raise_status(state_of(module), &c.err);
    ctx_release(&c);
    return result;
}

static PyObject *core_nccl_version(PyObject *module, PyObject *unused) {
    PyObject *result = NULL;
    int version;
    ctx c;

    (void)unused;
    ctx_init(&c);
    if (nccl_version(&c, &version) == OK) result = PyLong_FromLong(version);
    else raise_status(state_of(module), &c.err);
    ctx_release(&c);
    return result;
}

static PyObject *core_cuda_chains(PyObject *module, PyObject *args) {
    const char *folder = NULL;

    (void)module;
    if (!PyArg_ParseTuple(args, "|s", &folder)) return NULL;
    if (folder && !compile_folder(folder)) {
        PyErr_SetString(PyExc_ValueError, "the path of a folder for compiled kernels is too long");
        return NULL;
    }
    const compile_counts n = compile_count();
    return Py_BuildValue("{sisiss}", "compiled", n.compiled, "read", n.read, "reason", n.reason);
}

static PyObject *core_cuda_captured(PyObject *module, PyObject *args) {
    unsigned long long stream = 0;
    bool is_captured = false;
    ctx c;

    if (!PyArg_ParseTuple(args, "K", &stream)) return NULL;
    ctx_init(&c);
    if (cuda_captured(&c, (void *)(uintptr_t)stream, &is_captured) != OK) raise_status(state_of(module), &c.err);
    ctx_release(&c);
    return PyErr_Occurred() ? NULL : PyBool_FromLong(is_captured);
}

static PyObject *core_cuda_graphs(PyObject *module, PyObject *unused) {
    const replay_kept n = replay_all_kept();

    (void)module, (void)unused;
    return Py_BuildValue("(LL)", (long long)n.graphs, (long long)n.kernels);
}

static PyObject *core_cuda_refusals(PyObject *module, PyObject *args) {
    const int count = refusals_count();
    PyObject *list, *row;
    refusal one;
    int known;

    (void)module;
    if (!PyArg_ParseTuple(args, "i", &known)) return NULL;
    if (known == count) return Py_NewRef(Py_None);
    list = PyList_New(0);
    for (int i = known < 0 ? 0 : known; list && i < count; i++) {
        if (!refusals_get(i, &one)) continue;
        row = Py_BuildValue("(ss)", one.library, one.text);
        if (!row || PyList_Append(list, row) < 0) Py_CLEAR(list);
        Py_XDECREF(row);
    }
    return list ? Py_BuildValue("(iN)", count, list) : NULL;
}

static PyMethodDef methods[] = {
    {"empty", core_empty, METH_VARARGS,
     PyDoc_STR("empty(torch.Tensor, dtype, sizes) -> a new tensor with memory of its own; no ATen operator runs")},
    {"zero", core_zero, METH_O, PyDoc_STR("zero(tensor): all bytes of a contiguous tensor become 0")},
    {"copy", core_copy, METH_VARARGS,
     PyDoc_STR("copy(to, from): the bytes of one contiguous tensor into another of the same size")},
    {"digest", core_digest, METH_O,
     PyDoc_STR("digest(tensor) -> 64 bits of a contiguous tensor's bytes, others when they have changed")},
    {"cuda_digests", core_cuda_digests, METH_VARARGS,
     PyDoc_STR(
         "cuda_digests(tensors, found, device, stream): the same of tensors on a GPU, cuda_digest_parts int64 for "
         "each, into a tensor there")},
    {"objects", core_objects, METH_VARARGS,
     PyDoc_STR(
         "objects(types, generation=-1) -> those that the garbage collector knows, of these types and subtypes, frozen ones "
         "too;\ngeneration: the young alone, 0 or 1. No other thread runs meanwhile.")},
    {"referrers", core_referrers, METH_O,
     PyDoc_STR(
         "referrers(objects: list) -> what the garbage collector knows to refer to one of them, frozen objects too,\n"
         "this list aside. What is frozen stays so, and nothing else becomes it.")},
    {"noting", core_noting, METH_VARARGS,
     "noting(types, found, oldest): a function for gc.callbacks that appends objects of these types to found before they "
     "become old"},
    {"look_at_calls", core_look_at_calls, METH_VARARGS,
     PyDoc_STR(
         "look_at_calls(called, began, functions, owners, bases, seen, ran, is_traced): the profile function of this\n"
         "thread, until sys.setprofile(None). called(frame, function, owner): C code among `functions` is called, or a\n"
         "method of an owner whose type is among `owners` or derives from one of `bases`. began(frame): code whose id\n"
         "`seen` maps to True runs. Other code that runs while is_traced() is not None comes into `ran`, with its globals.")},
    {"memory", core_memory, METH_NOARGS,
     PyDoc_STR("memory() -> bytes of large blocks: in use, kept for the next use, most in use at one time")},
    {"memory_most", core_memory_most, METH_NOARGS,
     PyDoc_STR("memory_most() -> bytes of large blocks, the most in use at one time since this was asked last")},
    {"memory_trim", core_memory_trim, METH_NOARGS,
     PyDoc_STR("memory_trim(): large blocks that are kept for the next use go back to the system")},
    {"memory_limits", core_memory_limits, METH_NOARGS,
     PyDoc_STR("memory_limits() -> bytes that this process may use at all, and besides what is in use now")},
    {"fail_memory", core_fail_memory, METH_O,
     PyDoc_STR(
         "fail_memory(count): for tests: so many blocks of memory can be had from now on, then none; -1: any number")},
    {"optimize", core_optimize, METH_VARARGS,
     PyDoc_STR(
         "optimize(rule, [(param, grad, step | None, exact | None, state | None, ...), ...], settings, "
         "grad_factor, clear_gradients, place=None): one step of all by the rule adam, sgd, adagrad or lamb "
         "(csrc/optim); place, on a GPU: (device, stream, lr | None, scale | None, overflow | None, clip | None)")},
    {"sums_of_squares", core_sums_of_squares, METH_O, PyDoc_STR("sums_of_squares(tensors) -> a float for each")},
    {"cuda_sums_of_squares", core_cuda_sums_of_squares, METH_VARARGS,
     PyDoc_STR("cuda_sums_of_squares(tensors, sums, room, device, stream): sums_of_squares into a float64 tensor")},
    {"cuda_devices", core_cuda_devices, METH_NOARGS,
     PyDoc_STR("cuda_devices() -> how many GPUs there are; Error with the reason where none can be used")},
    {"tune", core_tune, METH_VARARGS,
     PyDoc_STR(
         "tune(plan, seconds=0.0) -> [(class, way, {way: seconds}), ...]: measures every class of products of a\n"
         "plan for the CPU that the table of ways does not have yet, and puts the fastest into it. seconds: about\n"
         "the most for a class; 0: as long as it takes.")},
    {"tuning_set", core_tuning_set, METH_VARARGS,
     PyDoc_STR(
         "tuning_set(class, way): products of that class go that way from now on, where they can. ValueError for\n"
         "names that there are not.")},
    {"tuning_clear", core_tuning_clear, METH_NOARGS,
     PyDoc_STR(
         "tuning_clear(): forgets the table of ways, that of cuBLASLt's algorithms, and which of torch's attention\n"
         "kernels have failed")},
    {"tuning_uses", core_tuning_uses, METH_NOARGS,
     PyDoc_STR("tuning_uses() -> {way: how many products of this process went it because the table says so}")},
    {"triton_maker", core_triton_maker, METH_VARARGS,
     PyDoc_STR(
         "triton_maker(object, interprets): who makes Triton kernels from now on (ortmodule/triton_kernels/maker.py)")},
    {"pointwise_formulas", core_pointwise_formulas, METH_NOARGS,
     PyDoc_STR("pointwise_formulas() -> [(operator, class of operands, class of the result, operands, expression,\n"
               "declarations before it), ...], in C, of the operators that chains on a GPU have")},
    {"read", core_read, METH_VARARGS,
     PyDoc_STR("read(tensor, device, stream=0) -> Number: an int64 scalar of a GPU's, on its way to the host as soon\n"
               "as the stream gets there")},
    {"cuda_tune", core_cuda_tune, METH_VARARGS,
     PyDoc_STR(
         "cuda_tune(plan, math_mode, seconds=0.0, memory=None, stream=0, products=True, convolutions=False) -> (bytes,\n"
         "[(product, algorithm, {answer: seconds}), ...], convolutions): with memory on its GPU, cuBLASLt's products or\n"
         "cuDNN's convolutions of a plan that have neither run nor been chosen for are measured there, and the fastest\n"
         "of the library's answers is used from now on. bytes: how many that takes.\n"
         "Nothing is measured while the stream is captured. seconds: about the most for one; 0: as long as it takes.")},
    {"cuda_tuning_set", core_cuda_tuning_set, METH_VARARGS,
     PyDoc_STR(
         "cuda_tuning_set(device, product, algorithm): that product is computed so from now on, unless it has run or\n"
         "the library does not take it. ValueError for texts that are none of cuda_tune's.")},
    {"cuda_place", core_cuda_place, METH_O,
     PyDoc_STR("cuda_place(device) -> what algorithms hold for: the GPU's model and the version of cuBLASLt")},
    {"nccl_version", core_nccl_version, METH_NOARGS,
     PyDoc_STR("nccl_version() -> 22809 is NCCL 2.28.9; Error with the reason where it cannot be used")},
    {"cuda_chains", core_cuda_chains, METH_VARARGS,
     PyDoc_STR("cuda_chains(folder=None) -> how many fused chains were compiled for GPUs, and read from the folder "
               "where they are kept from now on (\"\": nowhere), and why one was not compiled")},
    {"cuda_captured", core_cuda_captured, METH_VARARGS,
     PyDoc_STR("cuda_captured(stream) -> whether that stream is being captured into a CUDA graph")},
    {"cuda_graphs", core_cuda_graphs, METH_NOARGS,
     PyDoc_STR(
         "cuda_graphs() -> (graphs, kernels): how many CUDA graphs the plans of this process keep, and about how many\n"
         "kernels these start")},
    {"cuda_refusals", core_cuda_refusals, METH_VARARGS,
     PyDoc_STR(
         "cuda_refusals(known) -> None where there have been `known` of them in this process; else how many, and\n"
         "[(library, sentence), ...] of those since, of which the last are kept: what cuBLASLt, cuDNN or NVRTC were asked\n"
         "for and refused, and something slower did")},
    {"operators", core_operators, METH_NOARGS, PyDoc_STR("operators() -> list of dicts, one for each record")},
    {"pointwise_operators", core_pointwise_operators, METH_NOARGS,
     PyDoc_STR("pointwise_operators() -> [(name, name in ATen, operands), ...] of our domain, without attributes")},
    {"profiled_by", core_profiled_by, METH_VARARGS,
     PyDoc_STR("profiled_by(dictionary, name): its entry of this name is True while torch's profiler is on; it sees\n"
               "instructions then.")},
    {"module_path", core_module_path, METH_O,
     PyDoc_STR(
         "module_path(name of a node) -> path of the submodule that it is of: \"/layers/layers.0/norm/Add\" is of\n"
         "\"layers.0.norm\".")},
    {"torch_symbols", core_torch_symbols, METH_NOARGS,
     PyDoc_STR("torch_symbols() -> [(name, what it is for, whether torch's libraries have it), ...]")},
    {"recompute", core_recompute, METH_VARARGS,
     PyDoc_STR(
         "recompute([(operands, results, cost, workspace, in_place), ...], [(bytes, held), ...], n_forward, target,\n"
         "moving=None) -> (values made again, peak before, peak, cost, bound, values offloaded): what a planner chooses\n"
         "for steps whose operands and results are numbers of values; bound: no choice that reaches the target costs\n"
         "less; moving: what it costs to offload each value; None: none is")},
    {"passes", core_passes, METH_NOARGS, PyDoc_STR("passes() -> {name: the bit that disables it}")},
    {NULL, NULL, 0, NULL},
};

static int add(PyObject *module, const char *name, PyObject **slot, PyObject *object) {
    *slot = object;
    return object ? PyModule_AddObjectRef(module, name, object) : -1;
}

/* An exception that derives from `base`, and from `also` if that is given. */
static int add_error(PyObject *module, const char *name, PyObject **slot, PyObject *base, PyObject *also) {
    PyObject *bases = also ? PyTuple_Pack(2, base, also) : PyTuple_Pack(1, base);
    char path[64];
    int added;

    if (!bases) return -1;
    PyOS_snprintf(path, sizeof path, "ortmodule.%s", name);
    added = add(module, name, slot, PyErr_NewException(path, bases, NULL));
    Py_DECREF(bases);
    return added;
}

static int add_errors(PyObject *module, module_state *m) {
    if (add_error(module, "Error", &m->Error, PyExc_RuntimeError, NULL) < 0 ||
        add_error(module, "EngineError", &m->EngineError, m->Error, NULL) < 0 ||
        add_error(module, "UnsupportedError", &m->UnsupportedError, m->EngineError, NULL) < 0 ||
        add_error(module, "InvalidModelError", &m->InvalidModelError, m->EngineError, PyExc_ValueError) < 0 ||
        add_error(module, "ArgumentError", &m->ArgumentError, m->Error, PyExc_ValueError) < 0 ||
        add_error(module, "ArgumentTypeError", &m->ArgumentTypeError, m->Error, PyExc_TypeError) < 0)
        return -1;
    if (add_error(module, "OutOfMemoryError", &m->OutOfMemoryError, m->Error, PyExc_MemoryError) < 0) return -1;
    return add_error(module, "FileError", &m->FileError, m->Error, PyExc_OSError);
}

#ifdef ORT_EMULATED
static PyObject *emulated(void) { return Py_NewRef(Py_True); }
#else
static PyObject *emulated(void) { return Py_NewRef(Py_False); }
#endif

/* What is found once a process (tensor.c) would be of the interpreter that came first. */
static int check_interpreter(void) {
    if (PyInterpreterState_GetID(PyInterpreterState_Get()) == 0) return 0;
    PyErr_SetString(PyExc_ImportError, "ortmodule runs in the main interpreter only, as torch does");
    return -1;
}

static int core_exec(PyObject *module) {
    module_state *m = PyModule_GetState(module);
    PyObject *gpu;
    int added;

    if (check_interpreter() < 0) return -1;
    gpu = emulated();
    added = PyModule_AddObjectRef(module, "emulated", gpu); /* a GPU is emulated, in memory of the CPU */

    Py_DECREF(gpu);
    if (added < 0 || PyModule_AddIntConstant(module, "cuda_sum_parts", CUDA_SUM_PARTS) < 0 ||
        PyModule_AddIntConstant(module, "cuda_digest_parts", CUDA_DIGEST_PARTS) < 0 ||
        PyModule_AddIntConstant(module, "slower_kernels", SLOWER_KERNELS) < 0 ||
        PyModule_AddIntConstant(module, "slower_files", SLOWER_FILES) < 0 ||
        PyModule_AddIntConstant(module, "slower_buses", SLOWER_BUSES) < 0 ||
        PyModule_AddStringConstant(module, "checkpoint_step", CHECKPOINT_STEP) < 0)
        return -1;
    if (add_errors(module, m) < 0) return -1;
    if (add(module, "Model", &m->model_type, model_type_new(module)) < 0) return -1;
    if (add(module, "Number", &m->number_type, number_type_new(module)) < 0) return -1;
    if (add(module, "Plan", &m->plan_type, plan_type_new(module)) < 0) return -1;
    if (add(module, "OffloadRoom", &m->room_type, room_type_new(module)) < 0) return -1;
    return add(module, "Watch", &m->watch_type, watch_type_new(module));
}

static int core_traverse(PyObject *module, visitproc visit, void *arg) {
    module_state *m = PyModule_GetState(module);
#define X(name) Py_VISIT(m->name);
    MODULE_STATE(X)
#undef X
    return 0;
}

static int core_clear(PyObject *module) {
    module_state *m = PyModule_GetState(module);
#define X(name) Py_CLEAR(m->name);
    MODULE_STATE(X)
#undef X
    return 0;
}

static void core_free(void *module) { core_clear(module); }

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, core_exec},
    {0, NULL},
};

static PyModuleDef core_module = {
    PyModuleDef_HEAD_INIT,
    .m_name = "ortmodule._core",
    .m_doc = PyDoc_STR("The C engine: models, plans, operators."),
    .m_size = sizeof(module_state),
    .m_methods = methods,
    .m_slots = slots,
    .m_traverse = core_traverse,
    .m_clear = core_clear,
    .m_free = core_free,
};

PyMODINIT_FUNC PyInit__core(void) { return PyModuleDef_Init(&core_module); }
