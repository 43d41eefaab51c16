/* run.c -- runs forward and backward of _core.Plan, over memory that Python owns. */
#include "core/torch_lib.h"
#include "cuda/host/pinned.h"
#include "cuda/host/redzones.h"
#include "py/plan.h"

#include <stdlib.h>

/* Whose the tensors of a list are. */
typedef enum whose { THEIRS, OURS } whose;

/* Tensors of a run: they stay alive while it goes on without the interpreter's lock. */
typedef struct addresses {
    void **list;
    PyObject **owners;
    int count;
} addresses;

static void release(addresses *a) {
    for (int i = 0; a->owners && i < a->count; i++) Py_XDECREF(a->owners[i]);
    free(a->owners);
    free(a->list);
}

static int collect(const plan_object *self, PyObject *tensors, value *const *values, int count, const char *what,
                   whose from, addresses *out) {
    Py_ssize_t given = PySequence_Size(tensors);

    if (given < 0) return -1;
    if (given != count) {
        PyErr_Format(PyExc_ValueError, "%d %ss are needed, %zd were given", count, what, given);
        return -1;
    }
    out->count = count;
    out->list = calloc((size_t)count + 1, sizeof *out->list);
    out->owners = calloc((size_t)count + 1, sizeof *out->owners);
    if (!out->list || !out->owners) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; i < count; i++) {
        const value *v = values[i];
        if (!v) continue;
        if (!(out->owners[i] = PySequence_GetItem(tensors, i))) return -1;
        if ((from == OURS ? tensor_address_of_ours : tensor_address)(out->owners[i], self->device, v->type, &v->shape,
                                                                     what, i, &out->list[i]) < 0)
            return -1;
    }
    return 0;
}

static int collect_arena(const plan_object *self, PyObject *memory, bool joint, run *r) {
    const plan *p = self->p;
    const int aligned = p->cuda ? PLAN_ALIGNED_ON_GPU : PLAN_ALIGNED;
    const int64_t needed = plan_arena_bytes(p, joint);
    int64_t bytes;

    r->joint = joint;
    if (joint && !needed) {
        PyErr_SetString(PyExc_ValueError, "this plan has no joint arena");
        return -1;
    }
    if (needed == 0) return 0;
    if (tensor_bytes(memory, self->device, "the arena", &r->arena, &bytes) < 0) return -1;
    if (bytes >= needed && (uintptr_t)r->arena % (uintptr_t)aligned == 0) return 0;
    PyErr_Format(PyExc_ValueError, "the arena needs %lld bytes aligned to %d", (long long)needed, aligned);
    return -1;
}

/* How a run goes on a GPU. */
typedef struct gpu_way {
    unsigned long long stream; /* its handle */
    int math;                  /* what torch lets kernels do: a math_mode (cuda/host/driver.h) */
    int graphs;                /* sections may be recorded and started as a whole (cuda/host/replay.h) */
    unsigned long long seed;   /* address of the run's seed there, or 0 */
} gpu_way;

/* What lies in the arena is another's once the run's stream is done, even after an error: copies must be over by then. A
 * CUDA graph would hold one stream alone. */
static status run_with_copies(ctx *c, const plan *p, int from, int to, const run *r, const cuda_run *where) {
    const status s = exec_run(c, p, from, to, r);
    ctx aside;
    status waited;

    ctx_init(&aside);
    waited = pinned_wait(s == OK ? c : &aside, where);
    ctx_release(&aside);
    return s != OK ? s : waited;
}

static status run_on_gpu(ctx *c, const plan_object *self, gpu_way way, run *r, int from, int to, bool *is_captured) {
    cuda_run where;
    status s;

    TRY(cuda_begin(c, self->device, (void *)(uintptr_t)way.stream, &where));
    where.math = way.math;
    where.seed = (const uint64_t *)(uintptr_t)way.seed;
    r->cuda = &where;
    if ((s = cuda_is_captured(c, &where, is_captured)) != OK) return cuda_end(c, &where, s);
    if (self->p->red_zone) return cuda_end(c, &where, redzones_run(c, self->p, from, to, r, &where));
    if (r->room) return cuda_end(c, &where, run_with_copies(c, self->p, from, to, r, &where));
    const bool whole = way.graphs && self->graphs && !r->seconds && !way.seed && !*is_captured;
    return cuda_end(c, &where,
                    whole ? replay_run(c, self->graphs, self->p, from, to, r, &where)
                          : exec_run(c, self->p, from, to, r));
}

/* Is torch's profiler on? */
static bool is_recorded(const module_state *m) {
    return m->profiler && PyDict_GetItem(m->profiler, m->profiler_key) == Py_True;
}

static status run_range(plan_object *self, gpu_way way, run *r, int from, int to, err *e) {
    const bool backward = from >= self->p->n_forward && self->p->n_code > self->p->n_forward;
    void *constants = NULL;
    bool is_captured = false;
    torch_range range = {0};
    int64_t bytes;
    ctx c;
    status s;

    ctx_init(&c);
    r->seconds = self->profiling ? self->seconds : NULL;
    if (self->constants &&
        tensor_bytes(self->constants, self->device, "the memory of constants", &constants, &bytes) < 0) {
        e->code = E_FOREIGN;
        return E_FOREIGN;
    }
    r->constants = constants;
    r->recorded = is_recorded(state_of((PyObject *)Py_TYPE((PyObject *)self)));
    if (r->recorded) torch_range_begin(backward ? "ortmodule::backward" : "ortmodule::forward", 0, NULL, &range);
    Py_BEGIN_ALLOW_THREADS s = self->device == ON_CPU ? exec_run(&c, self->p, from, to, r)
                                                      : run_on_gpu(&c, self, way, r, from, to, &is_captured);
    Py_END_ALLOW_THREADS *e = c.err;
    torch_range_end(&range);
    if (r->seconds && s == OK && to == (backward ? self->p->n_code : self->p->n_forward))
        __atomic_add_fetch(&self->profiled[backward], 1, __ATOMIC_RELAXED);
    self->was_captured |= is_captured; /* several threads may run a plan: here one at a time */
    ctx_release(&c);
    return s;
}

static int check_stream(const plan_object *self, PyObject *args, Py_ssize_t at) {
    if (self->device != ON_CPU || PyTuple_Size(args) <= at) return 0;
    PyErr_SetString(PyExc_TypeError, "a plan for the CPU takes no stream");
    return -1;
}

const char plan_forward_doc[] =
    "forward(arena, inputs, outputs, writes, seed, host=None, stream=0, math_mode=0, graphs=False,\n"
    "seed_at=0): fills outputs and writes.\n\n"
    "host: runs the nodes of Python's, if there are any (ortmodule/host/host_node.py).\n"
    "room, by name: of take_room(), for a plan with offload_bytes. joint, by name: arena is of joint_arena().\n"
    "stream: of a plan for a GPU, the handle of the stream that the work is put into; math_mode: what torch\n"
    "lets kernels do, added up, 1: TF32 in products, 2: in convolutions, 4: only the same bits in every run;\n"
    "graphs: whether the work may be recorded, and started as a whole where memory is what it was; seed_at:\n"
    "where the seed lies on the GPU, if not 0: `seed` is not read then. Where the stream is captured by the\n"
    "caller the work becomes part of that graph.";

PyObject *plan_forward(PyObject *object, PyObject *args, PyObject *kwargs) {
    char *names[] = {"", "", "", "", "", "", "", "", "", "", "room", "joint", NULL};
    plan_object *self = (plan_object *)object;
    const plan *p = self->p;
    PyObject *memory, *inputs, *outputs, *writes, *object_of_host = NULL, *room = NULL, *result = NULL;
    addresses in = {0}, out = {0}, written = {0};
    value *write_values[64];
    unsigned long long seed;
    gpu_way way = {0};
    python_host from_python;
    int n = 0, joint = 0;
    run r = {0};
    err e;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOK|OKipK$Op:forward", names, &memory, &inputs, &outputs, &writes,
                                     &seed, &object_of_host, &way.stream, &way.math, &way.graphs, &way.seed, &room,
                                     &joint))
        return NULL;
    if (check_stream(self, args, 6) < 0 || plan_room(self, room, &r.room) < 0) return NULL;
    r.host = python_host_init(&from_python, object_of_host);
    value **targets = p->n_writes > 64 ? calloc((size_t)p->n_writes, sizeof *targets) : write_values;
    if (!targets) return PyErr_NoMemory();
    for (const state_write *w = p->g->writes; w; w = w->next) targets[n++] = w->value;
    if (collect_arena(self, memory, joint, &r) == 0 &&
        collect(self, inputs, p->g->inputs, plan_model_inputs(p), "input", THEIRS, &in) == 0 &&
        collect(self, outputs, p->g->outputs, p->g->n_outputs, "output", OURS, &out) == 0 &&
        collect(self, writes, targets, n, "write", OURS, &written) == 0) {
        r.memory[AT_INPUT] = in.list;
        r.memory[AT_OUTPUT] = out.list;
        r.memory[AT_WRITE] = written.list;
        r.seed = seed;
        if (r.host && self->device == ON_CPU) {
            from_python.inputs = inputs;
            from_python.at = in.list;
            from_python.n_inputs = plan_model_inputs(p);
        }
        if (run_range(self, way, &r, 0, p->n_forward, &e) == OK) result = Py_NewRef(Py_None);
        else raise_status(state_of((PyObject *)Py_TYPE(object)), &e);
    }
    release(&in);
    release(&out);
    release(&written);
    if (targets != write_values) free(targets);
    return result;
}

const char plan_backward_doc[] =
    "backward(arena, inputs, outputs, output_grads, input_grads, seed, host=None, stream=0,\n"
    "math_mode=0, graphs=False, seed_at=0): fills input_grads.\n\n"
    "arena, inputs, outputs, seed, host, room, joint: those of the forward. Entries that the plan does not read may be\n"
    "None.";

/* Of the tensors that backward is given only those it uses are looked at: the caller may have dropped the rest. */
typedef struct given {
    value **values;
    addresses at;
    bool *flags; /* for a part of backward */
} given;

static int collect_used(const plan_object *self, PyObject *tensors, value *const *values, const bool *flags, int count,
                        const char *what, whose from, given *out) {
    if (!(out->values = calloc((size_t)count + 1, sizeof *out->values))) {
        PyErr_NoMemory();
        return -1;
    }
    for (int i = 0; values && i < count; i++) out->values[i] = !flags || flags[i] ? values[i] : NULL;
    return collect(self, tensors, out->values, count, what, from, &out->at);
}

static void release_given(given *g) {
    release(&g->at);
    free(g->values);
    free(g->flags);
}

static const place BACKWARD_PLACES[] = {AT_INPUT, AT_OUTPUT, AT_OUTPUT_GRAD, AT_INPUT_GRAD};

/* of[place].flags of what instructions [from, to) use. */
static int find_used(const plan *p, int from, int to, given *of) {
    bool *flags[PLACES] = {0};
    const int room = p->g->n_inputs + p->g->n_outputs;

    for (size_t i = 0; i < sizeof BACKWARD_PLACES / sizeof *BACKWARD_PLACES; i++) {
        const place where = BACKWARD_PLACES[i];
        if (!(flags[where] = of[where].flags = calloc((size_t)room + 1, sizeof(bool)))) {
            PyErr_NoMemory();
            return -1;
        }
    }
    plan_uses(p, from, to, flags);
    return 0;
}

/* Instructions [from, to) of backward. */
static PyObject *run_backward(plan_object *self, PyObject *args, PyObject *kwargs, int from, int to) {
    char *names[] = {"", "", "", "", "", "", "", "", "", "", "", "room", "joint", NULL};
    const plan *p = self->p;
    const graph *g = p->g;
    const bool whole = from == p->n_forward && to == p->n_code;
    PyObject *memory, *inputs, *outputs, *output_grads, *input_grads, *object_of_host = NULL, *room = NULL;
    PyObject *result = NULL;
    given of[PLACES] = {0};
    unsigned long long seed;
    gpu_way way = {0};
    python_host from_python;
    int joint = 0;
    run r = {0};
    err e;

    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OOOOOK|OKipK$Op:backward", names, &memory, &inputs, &outputs,
                                     &output_grads, &input_grads, &seed, &object_of_host, &way.stream, &way.math,
                                     &way.graphs, &way.seed, &room, &joint))
        return NULL;
    if (check_stream(self, args, 7) < 0 || plan_room(self, room, &r.room) < 0) return NULL;
    r.host = python_host_init(&from_python, object_of_host);
    if (!g->input_grads) {
        PyErr_SetString(PyExc_RuntimeError, "this plan is for inference: it has no backward");
        return NULL;
    }
    if ((whole || find_used(p, from, to, of) == 0) && collect_arena(self, memory, joint, &r) == 0 &&
        collect_used(self, inputs, g->inputs, whole ? p->reads_input : of[AT_INPUT].flags, plan_model_inputs(p),
                     "input", THEIRS, &of[AT_INPUT]) == 0 &&
        collect_used(self, outputs, g->outputs, whole ? p->reads_output : of[AT_OUTPUT].flags, g->n_outputs, "output",
                     THEIRS, &of[AT_OUTPUT]) == 0 &&
        collect_used(self, output_grads, g->output_grads, of[AT_OUTPUT_GRAD].flags, g->n_outputs, "output gradient",
                     THEIRS, &of[AT_OUTPUT_GRAD]) == 0 &&
        collect_used(self, input_grads, g->input_grads, of[AT_INPUT_GRAD].flags, g->n_input_grads, "input gradient",
                     OURS, &of[AT_INPUT_GRAD]) == 0) {
        for (int i = 0; i < PLACES; i++) r.memory[i] = of[i].at.list;
        r.seed = seed;
        if (run_range(self, way, &r, from, to, &e) == OK) result = Py_NewRef(Py_None);
        else raise_status(state_of((PyObject *)Py_TYPE((PyObject *)self)), &e);
    }
    for (int i = 0; i < PLACES; i++) release_given(&of[i]);
    return result;
}

PyObject *plan_backward(PyObject *object, PyObject *args, PyObject *kwargs) {
    plan_object *self = (plan_object *)object;
    return run_backward(self, args, kwargs, self->p->n_forward, self->p->n_code);
}

const char plan_backward_part_doc[] =
    "backward_part(first, last, ...): instructions [first, last) of backward, after all before them; the\n"
    "rest as in backward. Entries that these instructions do not use may be None.";

PyObject *plan_backward_part(PyObject *object, PyObject *args, PyObject *kwargs) {
    plan_object *self = (plan_object *)object;
    PyObject *range = PyTuple_GetSlice(args, 0, 2), *rest = PyTuple_GetSlice(args, 2, PyTuple_Size(args));
    PyObject *result = NULL;
    int first, last;

    if (range && rest && PyArg_ParseTuple(range, "ii:backward_part", &first, &last)) {
        if (self->p->n_forward <= first && first <= last && last <= self->p->n_code)
            result = run_backward(self, rest, kwargs, first, last);
        else PyErr_Format(PyExc_ValueError, "backward is [%d, %d)", self->p->n_forward, self->p->n_code);
    }
    Py_XDECREF(range);
    Py_XDECREF(rest);
    return result;
}

const char plan_reads_doc[] =
    "reads(first, last) -> indices of the inputs and of the outputs that these instructions use";

static PyObject *indices(const bool *flags, int count) {
    PyObject *list = PyList_New(0);
    for (int i = 0; list && i < count; i++) {
        PyObject *index = flags[i] ? PyLong_FromLong(i) : NULL;
        if (flags[i] && (!index || PyList_Append(list, index) < 0)) Py_CLEAR(list);
        Py_XDECREF(index);
    }
    return list;
}

PyObject *plan_reads(PyObject *object, PyObject *args) {
    const plan *p = ((plan_object *)object)->p;
    given of[PLACES] = {0};
    PyObject *result = NULL;
    int first, last;

    if (!PyArg_ParseTuple(args, "ii:reads", &first, &last)) return NULL;
    if (first < 0 || last > p->n_code) PyErr_Format(PyExc_ValueError, "there are %d instructions", p->n_code);
    else if (find_used(p, first, last, of) == 0)
        result = Py_BuildValue("(NN)", indices(of[AT_INPUT].flags, plan_model_inputs(p)),
                               indices(of[AT_OUTPUT].flags, p->g->n_outputs));
    for (int i = 0; i < PLACES; i++) release_given(&of[i]);
    return result;
}
