/* plan.h -- the object behind _core.Plan, for the two files that know it. */
#ifndef ORT_PY_PLAN_H
#define ORT_PY_PLAN_H

#include "cuda/host/replay.h"
#include "exec/exec.h"
#include "py/host.h"

typedef struct plan_object {
    PyObject_HEAD ctx c; /* owns the plan */
    PyObject *model;     /* the plan shares its constants */
    plan *p;
    int device;          /* ON_CPU, or the number of a GPU */
    PyObject *constants; /* a tensor there, or NULL while the plan has none */
    replay *graphs;      /* of a plan for a GPU, or NULL */
    double *seconds;     /* NULL until there was profiling; then for as long as the plan: runs may be under way */
    int64_t profiled[2]; /* forward and backward runs that were measured */
    bool profiling;
    bool
        was_captured; /* a graph of the caller's knows where its constants are: they stay for the life of the process */
} plan_object;

/* Methods (run.c). */
PyObject *plan_forward(PyObject *object, PyObject *args);
PyObject *plan_backward(PyObject *object, PyObject *args);
PyObject *plan_backward_part(PyObject *object, PyObject *args);
PyObject *plan_reads(PyObject *object, PyObject *args);
extern const char plan_forward_doc[], plan_backward_doc[], plan_backward_part_doc[], plan_reads_doc[];

#endif
