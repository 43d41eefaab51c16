/* host.h -- uses an object of Python's as the host of a plan or a run. */
#ifndef ORT_PY_HOST_H
#define ORT_PY_HOST_H

#include "graph/host.h"
#include "py/py.h"

typedef struct python_host {
    host functions;   /* first: the engine's pointer is one to all of it */
    PyObject *object; /* borrowed: has the methods ask, forward and backward (ortmodule/host/host_node.py) */
    PyObject *inputs; /* of a forward on the CPU, borrowed, or NULL: nodes that are `shared` get these, not copies */
    void *const *at;  /* where they lie */
    int n_inputs;
} python_host;

/* NULL, for no host, when `object` is NULL or None. */
const host *python_host_init(python_host *self, PyObject *object);

#endif
