/* room.c -- defines _core.OffloadRoom: where activations of one run wait for backward outside of its arena. */
#include "cuda/host/pinned.h"
#include "py/plan.h"

#include <stdlib.h>
#include <string.h>
#include <unistd.h>

typedef struct room_object {
    PyObject_HEAD offload_room room;
    int device;  /* ON_CPU, or the number of a GPU */
    pid_t owner; /* a process that was forked would write into the room of another run */
} room_object;

static void close_room(int device, offload_room *room) {
    if (device == ON_CPU) offload_close(room);
    else pinned_give(device, room);
}

static status open_room(ctx *c, const plan_object *self, offload_room *out) {
    cuda_run where;

    if (self->device == ON_CPU) return offload_open(c, self->folder ? self->folder : "", self->p->offload_bytes, out);
    TRY(cuda_begin(c, self->device, NULL, &where));
    return cuda_end(c, &where, pinned_take(c, self->p->offload_bytes, out));
}

static void room_dealloc(PyObject *object) {
    PyTypeObject *type = Py_TYPE(object);
    room_object *self = (room_object *)object;

    close_room(self->device, &self->room);
    ((freefunc)PyType_GetSlot(type, Py_tp_free))(object);
    Py_DECREF(type);
}

static PyType_Slot room_slots[] = {
    {Py_tp_doc, (void *)PyDoc_STR("Where activations of one run wait for backward. Made by Plan.take_room.")},
    {Py_tp_dealloc, room_dealloc},
    {0, NULL},
};

static PyType_Spec room_spec = {
    .name = "ortmodule._core.OffloadRoom",
    .basicsize = sizeof(room_object),
    .flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_IMMUTABLETYPE | Py_TPFLAGS_DISALLOW_INSTANTIATION,
    .slots = room_slots,
};

PyObject *room_type_new(PyObject *module) { return PyType_FromModuleAndSpec(module, &room_spec, NULL); }

const char plan_take_room_doc[] =
    "take_room() -> where a run of this plan offloads activations to, for its forward and its backward.\n"
    "MemoryError where there is no room for them.";

PyObject *plan_take_room(PyObject *object, PyObject *unused) {
    plan_object *self = (plan_object *)object;
    const module_state *m = state_of((PyObject *)Py_TYPE(object));
    PyTypeObject *type = (PyTypeObject *)m->room_type;
    PyObject *spare = self->spare_room;
    offload_room made;
    room_object *room;
    status s;
    ctx c;

    (void)unused;
    self->spare_room = NULL;
    if (spare && ((room_object *)spare)->owner == getpid()) return spare;
    Py_XDECREF(spare);
    ctx_init(&c);
    Py_BEGIN_ALLOW_THREADS;
    s = open_room(&c, self, &made);
    Py_END_ALLOW_THREADS;
    if (s == E_RUNTIME) PyErr_SetString(m->FileError, c.err.text); /* nothing that PyTorch would have to run instead */
    else if (s != OK) raise_status(m, &c.err);
    ctx_release(&c);
    if (s != OK) return NULL;
    if ((room = (room_object *)((allocfunc)PyType_GetSlot(type, Py_tp_alloc))(type, 0))) {
        room->room = made;
        room->owner = getpid();
        room->device = self->device;
    } else {
        close_room(self->device, &made);
    }
    return (PyObject *)room;
}

const char plan_give_room_doc[] = "give_room(room): no backward will read it any more. The next run may have it.";

PyObject *plan_give_room(PyObject *object, PyObject *room) {
    plan_object *self = (plan_object *)object;
    const offload_room *found;

    if (plan_room(self, room, &found) < 0) return NULL;
    if (!self->spare_room) self->spare_room = Py_NewRef(room);
    Py_RETURN_NONE;
}

int plan_room(const plan_object *self, PyObject *object, const offload_room **out) {
    const module_state *m = state_of((PyObject *)Py_TYPE((PyObject *)self));
    const room_object *room = (room_object *)object;

    *out = NULL;
    if (self->p->offload_bytes == 0) return 0;
    if (!object || Py_TYPE(object) != (PyTypeObject *)m->room_type) {
        PyErr_SetString(PyExc_TypeError, "the run needs a room for the activations that it offloads: take_room()");
        return -1;
    }
    if (room->room.bytes < self->p->offload_bytes || room->device != self->device) {
        PyErr_SetString(PyExc_ValueError, "the room for offloaded activations is that of another plan");
        return -1;
    }
    if (room->owner != getpid()) {
        PyErr_SetString(PyExc_RuntimeError,
                        "activations were offloaded by another process, before this one was forked");
        return -1;
    }
    *out = &room->room;
    return 0;
}
