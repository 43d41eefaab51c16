/* plan.h -- declares the object behind _core.Plan, for the files that know it. */
#ifndef ORT_PY_PLAN_H
#define ORT_PY_PLAN_H

#include "core/offload.h"
#include "cuda/host/replay.h"
#include "exec/exec.h"
#include "py/host.h"

typedef struct plan_object {
    PyObject_HEAD ctx c; /* owns the plan */
    PyObject *model;     /* the plan shares its constants */
    plan *p;
    int device;           /* ON_CPU, or the number of a GPU */
    PyObject *constants;  /* a tensor there, or NULL while the plan has none */
    replay *graphs;       /* of a plan for a GPU, or NULL */
    char *folder;         /* where files of offloaded activations are, or NULL */
    PyObject *spare_room; /* of a run that is over, for the next one, or NULL */
    double *seconds;      /* NULL until there was profiling; then for as long as the plan: runs may be under way */
    int64_t profiled[2];  /* forward and backward runs that were measured */
    bool profiling;
    bool
        was_captured; /* a graph of the caller's knows where its constants are: they stay for the life of the process */
} plan_object;

static inline const plan *plan_of(PyObject *object) { return ((plan_object *)object)->p; }

/* Attributes (plan_attributes.c). */
extern PyGetSetDef plan_attributes[];

/* Methods (run.c). */
PyObject *plan_forward(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *plan_backward(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *plan_backward_part(PyObject *object, PyObject *args, PyObject *kwargs);
PyObject *plan_reads(PyObject *object, PyObject *args);
extern const char plan_forward_doc[], plan_backward_doc[], plan_backward_part_doc[], plan_reads_doc[];

/* Methods (joint_arena.c). */
PyObject *plan_joint_arena(PyObject *object, PyObject *args);
PyObject *plan_empty_input_grads(PyObject *object, PyObject *args);
extern const char plan_joint_arena_doc[], plan_empty_input_grads_doc[];

/* Methods (room.c). */
PyObject *plan_take_room(PyObject *object, PyObject *unused);
PyObject *plan_give_room(PyObject *object, PyObject *room);
extern const char plan_take_room_doc[], plan_give_room_doc[];
/* The room behind an OffloadRoom that runs of this plan need; *out is NULL where they need none. -1 with an exception set. */
int plan_room(const plan_object *self, PyObject *object, const offload_room **out);

#endif
