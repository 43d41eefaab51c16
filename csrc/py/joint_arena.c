/* joint_arena.c -- arenas that hold a step's gradients: their memory stays until the last of these is gone.
 *
 * A gradient is a tensor of its own over a part of the arena. When the run lets the arena go, all that no gradient has is
 * spare (core/memory.h). One such arena at a time for each model: a second forward that waits for its backward, or one
 * that begins while gradients are still held, would hold more with it than without. */
#include "core/memory.h"
#include "plan/peak.h"
#include "py/plan.h"

#include <pthread.h>
#include <stdlib.h>

struct joint_arena;

/* A gradient in it. */
typedef struct part {
    struct joint_arena *in;
    int64_t offset, bytes;
    bool held;
} part;

typedef struct joint_arena {
    const void *of; /* the model */
    char *memory;
    int64_t bytes;
    bool open;   /* the run has it */
    part *parts; /* NULL until there are gradients */
    int n_parts, n_held;
    struct joint_arena *next;
} joint_arena;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER; /* tensors go in any thread */
static joint_arena *all;

static void before_fork(void) { (void)pthread_mutex_lock(&lock); }
static void after_fork(void) { (void)pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_fork(void) { (void)pthread_atfork(before_fork, after_fork, after_fork); }

/* --- the end of one ------------------------------------------------------------------------------------------------- */

/* With the lock. Whether the run or a gradient still has something of it; if not it is in no list any more. */
static bool is_held(joint_arena *a) {
    joint_arena **at = &all;

    if (a->open || a->n_held) return true;
    while (*at != a) at = &(*at)->next;
    *at = a->next;
    return false;
}

static void give(joint_arena *a) {
    memory_give(a->memory);
    free(a->parts);
    free(a);
}

static int by_offset(const void *x, const void *y) {
    const part *a = x, *b = y;
    return (a->offset > b->offset) - (a->offset < b->offset);
}

/* What lies between the gradients that are held, which are in order of their places. */
static void spare_gaps(joint_arena *a, const part *held, int count) {
    int64_t at = 0;

    for (int i = 0; i < count; i++) {
        memory_spare(a->memory, (size_t)at, (size_t)(held[i].offset - at));
        at = held[i].offset + held[i].bytes;
    }
    memory_spare(a->memory, (size_t)at, MEMORY_TO_ITS_END);
}

/* Without memory for the list nothing is spare. */
static void spare_rest(joint_arena *a) {
    part *held = malloc(sizeof *held * (size_t)a->n_held);
    int n = 0;

    if (!held) return;
    for (int i = 0; i < a->n_parts; i++)
        if (a->parts[i].held) held[n++] = a->parts[i];
    qsort(held, (size_t)n, sizeof *held, by_offset);
    spare_gaps(a, held, n);
    free(held);
}

static void give_arena(void *owner) {
    joint_arena *a = owner;
    bool held;

    (void)pthread_mutex_lock(&lock);
    a->open = false;
    if ((held = is_held(a))) spare_rest(a);
    (void)pthread_mutex_unlock(&lock);
    if (!held) give(a);
}

static void give_part(void *owner) {
    part *p = owner;
    joint_arena *a = p->in;
    bool held;

    (void)pthread_mutex_lock(&lock);
    p->held = false;
    a->n_held--;
    held = is_held(a);
    if (held && !a->open) memory_spare(a->memory, (size_t)p->offset, (size_t)p->bytes);
    (void)pthread_mutex_unlock(&lock);
    if (!held) give(a);
}

/* --- a new one ------------------------------------------------------------------------------------------------------ */

const char plan_joint_arena_doc[] =
    "joint_arena(torch.Tensor, another=False) -> memory for a run with joint=True, which empty_input_grads takes its\n"
    "gradients from. None where the plan has no such arena, and where one of this model's is in use, as far as there\n"
    "need not be another. MemoryError where there is not so much memory now.";

/* Puts it into the list, unless one of the same model is there. */
static bool enter(joint_arena *a, bool another) {
    bool free_now = true;

    (void)pthread_mutex_lock(&lock);
    for (const joint_arena *x = all; x && !another; x = x->next) free_now &= x->of != a->of;
    if (free_now) {
        a->next = all;
        all = a;
    }
    (void)pthread_mutex_unlock(&lock);
    return free_now;
}

typedef status of_plan(ctx *c, const plan *p, bool joint);

/* Raises what it says. */
static status ask(of_plan *question, const plan *p, const module_state *m) {
    status s;
    ctx c;

    ctx_init(&c);
    if ((s = question(&c, p, true)) != OK) raise_status(m, &c.err);
    ctx_release(&c);
    return s;
}

PyObject *plan_joint_arena(PyObject *object, PyObject *args) {
    const plan_object *self = (plan_object *)object;
    const plan *p = self->p;
    const shape all_of_it = {.rank = 1, .dim = {p->joint_bytes}};
    const module_state *m = state_of((PyObject *)Py_TYPE(object));
    PyObject *tensor_type, *made;
    joint_arena *a;
    int another = 0;

    if (!PyArg_ParseTuple(args, "O|p:joint_arena", &tensor_type, &another)) return NULL;
    if (!p->joint_bytes) Py_RETURN_NONE;
    if (!(a = calloc(1, sizeof *a))) return PyErr_NoMemory();
    *a = (joint_arena){.of = self->model, .bytes = p->joint_bytes, .open = true};
    if (!enter(a, another)) {
        free(a);
        Py_RETURN_NONE;
    }
    made = NULL;
    if (ask(plan_check_memory, p, m) == OK) {
        if ((a->memory = memory_take((size_t)a->bytes)))
            made = tensor_over(tensor_type, U8, &all_of_it, a->memory, a, give_arena);
        else (void)ask(plan_no_memory, p, m);
    }
    if (!made) give_arena(a);
    return made;
}

/* --- its gradients -------------------------------------------------------------------------------------------------- */

const char plan_empty_input_grads_doc[] =
    "empty_input_grads(torch.Tensor, arena=None) -> for each input a new tensor for its gradient, or None. arena: of\n"
    "joint_arena(): they are in it.";

/* The arena of so many bytes at this address, if it has no gradients yet: from now on it has room for `count`. */
static joint_arena *find_for(const void *memory, int64_t bytes, int count) {
    part *parts = calloc((size_t)count + 1, sizeof *parts);
    joint_arena *a;

    (void)pthread_mutex_lock(&lock);
    for (a = all; a && (a->memory != memory || a->bytes < bytes || a->parts); a = a->next);
    if (a && parts) {
        a->parts = parts;
        a->n_parts = count;
        parts = NULL;
    } else {
        a = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    free(parts);
    return a;
}

static void hold(part *p, joint_arena *a, int64_t offset, int64_t bytes) {
    (void)pthread_mutex_lock(&lock);
    *p = (part){.in = a, .offset = offset, .bytes = bytes, .held = true};
    a->n_held++;
    (void)pthread_mutex_unlock(&lock);
}

/* The tensor at a place of the arena; a gradient without one has memory of its own. */
static PyObject *new_gradient(const module_state *m, PyObject *tensor_type, joint_arena *a, int i, const value *v,
                              int64_t offset) {
    PyObject *made;

    if (!a || offset < 0) return tensor_empty(m, tensor_type, v->type, &v->shape);
    hold(&a->parts[i], a, offset, value_bytes(v));
    made = tensor_over(tensor_type, v->type, &v->shape, a->memory + offset, &a->parts[i], give_part);
    if (!made) give_part(&a->parts[i]);
    return made;
}

PyObject *plan_empty_input_grads(PyObject *object, PyObject *args) {
    const plan_object *self = (plan_object *)object;
    const plan *p = self->p;
    const int count = plan_model_inputs(p);
    const module_state *m = state_of((PyObject *)Py_TYPE(object));
    PyObject *tensor_type, *memory = Py_None, *list;
    joint_arena *a = NULL;
    int64_t bytes;
    void *at;

    if (!PyArg_ParseTuple(args, "O|O:empty_input_grads", &tensor_type, &memory)) return NULL;
    if (memory != Py_None && tensor_bytes(memory, self->device, "the arena", &at, &bytes) < 0) return NULL;
    if (memory != Py_None && p->joint_bytes) a = find_for(at, p->joint_bytes, count);
    list = PyList_New(count);
    for (int i = 0; list && i < count; i++) {
        const value *v = p->g->input_grads ? p->g->input_grads[i] : NULL;
        PyObject *t = v ? new_gradient(m, tensor_type, a, i, v, a ? p->joint_grad[i] : -1) : Py_NewRef(Py_None);
        if (!t || PyList_SetItem(list, i, t) < 0) Py_CLEAR(list);
    }
    return list;
}
