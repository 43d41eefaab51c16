/* tensor.c -- reads torch tensors as addresses, through the C function table that torch publishes for DLPack.
 *
 * Nothing of torch is included: the structures below are the DLPack 1.x interface. */
#include "core/digest.h"
#include "core/memory.h"
#include "cuda/kernels/digest.h"
#include "py/py.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct dl_tensor {
    void *data;
    struct {
        int32_t type, id;
    } device;
    int32_t ndim;
    struct {
        uint8_t code, bits;
        uint16_t lanes;
    } dtype;
    int64_t *shape, *strides;
    uint64_t byte_offset;
} dl_tensor;

typedef struct dl_managed {
    struct {
        uint32_t major, minor;
    } version;
    void *owner;
    void (*deleter)(struct dl_managed *self);
    uint64_t flags;
    dl_tensor tensor;
} dl_managed;

typedef struct dl_exchange {
    struct {
        uint32_t major, minor;
    } version;
    struct dl_exchange *previous;
    void *allocator, *from_object;
    int (*to_object)(dl_managed *managed, void **out);
    int (*borrow)(void *object, dl_tensor *out);
    void *current_stream;
} dl_exchange;

enum { DL_CPU = 1, DL_CUDA = 2, DL_MAJOR = 1, NAME_TEXT = 64 };

/* In a build for tests the memory of a GPU is the CPU's (tests/cuda). */
#ifdef ORT_EMULATED
static const bool emulated = true;
#else
static const bool emulated = false;
#endif

/* The table is static in torch: looked up once a process, the same for every tensor type. */
static const dl_exchange *exchange;

static const dl_exchange *find_exchange(PyObject *type) {
    PyObject *capsule = PyObject_GetAttrString(type, "__dlpack_c_exchange_api__");
    const dl_exchange *e;

    if (!capsule) {
        PyErr_Clear();
        PyErr_Format(PyExc_TypeError, "expected a torch.Tensor (torch 2.11 or newer), not %R", type);
        return NULL;
    }
    e = PyCapsule_GetPointer(capsule, "dlpack_exchange_api");
    Py_DECREF(capsule);
    while (e && e->version.major > DL_MAJOR) e = e->previous;
    if (!e || !e->borrow) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch offers no DLPack 1.x exchange table");
        return NULL;
    }
    return exchange = e;
}

/* "input 3"; a negative index: there is only one of it. */
static const char *name_of(const char *what, int index, char text[NAME_TEXT]) {
    if (index < 0) return what;
    snprintf(text, NAME_TEXT, "%s %d", what, index);
    return text;
}

/* What torch says of a tensor, without the list of C++ functions that follows, becomes the end of a sentence. */
static void refuse(PyObject *object, const char *what, int index) {
    char name[NAME_TEXT];
    PyObject *type, *error, *trace, *text = NULL, *lines = NULL, *first = NULL;

    PyErr_Fetch(&type, &error, &trace);
    if (error && PyObject_HasAttrString(object, "__dlpack_c_exchange_api__")) text = PyObject_Str(error);
    if (text) lines = PyUnicode_Splitlines(text, 0);
    if (lines) first = PySequence_GetItem(lines, 0);
    PyErr_Clear();
    if (first)
        PyErr_Format(PyExc_TypeError, "%s, a %R, is not a tensor with memory on the CPU: %U",
                     name_of(what, index, name), Py_TYPE(object), first);
    else
        PyErr_Format(PyExc_TypeError, "%s, a %R, is not a tensor with memory on the CPU", name_of(what, index, name),
                     Py_TYPE(object));
    Py_XDECREF(type);
    Py_XDECREF(error);
    Py_XDECREF(trace);
    Py_XDECREF(text);
    Py_XDECREF(lines);
    Py_XDECREF(first);
}

static int is_on(const dl_tensor *t, int device) {
    if (device == ON_CPU || emulated) return t->device.type == DL_CPU;
    return t->device.type == DL_CUDA && t->device.id == device;
}

static const char *device_text(int type, int id, char text[NAME_TEXT]) {
    if (type == DL_CPU) return "the CPU";
    snprintf(text, NAME_TEXT, type == DL_CUDA ? "cuda:%d" : "device %d", id);
    return text;
}

static int refuse_device(const dl_tensor *t, int device, const char *name) {
    char found[NAME_TEXT], expected[NAME_TEXT];
    if (device == ON_CPU) PyErr_Format(PyExc_ValueError, "%s is not on the CPU", name);
    else
        PyErr_Format(PyExc_ValueError, "%s is on %s, not on %s", name, device_text(t->device.type, t->device.id, found),
                     device_text(DL_CUDA, device, expected));
    return -1;
}

/* --- storages: a tensor may say more than its storage has, which can shrink at any time --------------------------- */

/* object.name(), for names that are interned once a process. */
static PyObject *call_interned(PyObject *object, PyObject **interned, const char *name) {
    if (!*interned && !(*interned = PyUnicode_InternFromString(name))) return NULL;
    return PyObject_CallMethodObjArgs(object, *interned, NULL);
}

/* Where a tensor's storage begins, and how many bytes it has. */
static int storage_of(PyObject *object, const char **begin, int64_t *bytes) {
    static PyObject *untyped_storage, *data_ptr, *nbytes;
    PyObject *storage = call_interned(object, &untyped_storage, "untyped_storage");
    PyObject *at = storage ? call_interned(storage, &data_ptr, "data_ptr") : NULL;
    PyObject *size = at ? call_interned(storage, &nbytes, "nbytes") : NULL;

    if (size) {
        *begin = PyLong_AsVoidPtr(at);
        *bytes = PyLong_AsLongLong(size);
    }
    Py_XDECREF(storage);
    Py_XDECREF(at);
    Py_XDECREF(size);
    return size && !PyErr_Occurred() ? 0 : -1;
}

/* "[2, 3]" */
static void numbers_text(const int64_t *numbers, int count, char text[SHAPE_TEXT]) {
    shape s = {.rank = count < MAX_RANK ? count : MAX_RANK};
    for (int i = 0; i < s.rank; i++) s.dim[i] = numbers[i];
    shape_text(&s, text);
}

/* PyTorch's own sentence, and what it is about. */
static int refuse_storage(const dl_tensor *t, const char *name, int64_t offset, int64_t needed, int64_t found) {
    char sizes[SHAPE_TEXT], strides[SHAPE_TEXT] = "[]";

    numbers_text(t->shape, t->ndim, sizes);
    if (t->strides) numbers_text(t->strides, t->ndim, strides);
    PyErr_Format(PyExc_RuntimeError,
                 "setStorage: sizes %s, strides %s, storage offset %lld, and itemsize %d requiring a storage size of "
                 "%lld are out of bounds for storage of size %lld (%s)",
                 sizes, strides, (long long)offset, t->dtype.bits / 8, (long long)needed, (long long)found, name);
    return -1;
}

/* Whether all elements of a tensor that is not empty are in its storage. Asked in every run: what a storage that
 * shrank has left may lie where all of it did. */
static int check_storage(PyObject *object, const dl_tensor *t, const char *what, int index) {
    const char *data = (const char *)t->data + t->byte_offset, *begin = NULL;
    const int64_t item = (t->dtype.bits * t->dtype.lanes + 7) / 8;
    int64_t last = 0, n = 1, bytes, found = 0;
    char name[NAME_TEXT];

    for (int i = t->ndim - 1; i >= 0; i--) {
        last += (t->shape[i] - 1) * (t->strides ? t->strides[i] : n);
        n *= t->shape[i];
    }
    bytes = (last + 1) * item;
    if (storage_of(object, &begin, &found) < 0) return -1;
    const int64_t offset = (int64_t)((uintptr_t)data - (uintptr_t)begin);
    if (offset >= 0 && offset + bytes <= found) return 0;
    return refuse_storage(t, name_of(what, index, name), offset / item, offset + bytes, found);
}

/* Zeros that have no memory on purpose, as autograd makes them. -1 with an exception. */
static int is_zero_tensor(PyObject *object) {
    static PyObject *method;
    PyObject *answer = call_interned(object, &method, "_is_zerotensor");
    const int is = answer ? PyObject_IsTrue(answer) : -1;
    Py_XDECREF(answer);
    return is;
}

/* `ours`: the engine has just made it. */
static int borrow_some(PyObject *object, int device, const char *what, int index, bool ours, dl_tensor *t) {
    const dl_exchange *e = exchange ? exchange : find_exchange((PyObject *)Py_TYPE(object));
    char name[NAME_TEXT];
    bool empty = false;
    int zeros = 0;

    if (!e) return -1;
    if (e->borrow(object, t) != 0) {
        refuse(object, what, index);
        return -1;
    }
    if (!is_on(t, device)) return refuse_device(t, device, name_of(what, index, name));
    for (int i = 0; i < t->ndim; i++) empty |= t->shape[i] == 0;
    if (empty) return 0;
    if (!t->data && (zeros = is_zero_tensor(object)) < 0) return -1;
    if (!ours && !zeros && check_storage(object, t, what, index) < 0) return -1;
    if (t->data) return 0;
    PyErr_Format(PyExc_ValueError, "%s is a tensor that has no memory", name_of(what, index, name));
    return -1;
}

static int borrow(PyObject *object, int device, const char *what, int index, dl_tensor *t) {
    return borrow_some(object, device, what, index, false, t);
}

static int is_contiguous(const dl_tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->ndim; i++)
        if (t->shape[i] == 0) return 1;
    for (int i = t->ndim - 1; i >= 0; i--) {
        if (t->shape[i] != 1 && t->strides && t->strides[i] != n) return 0;
        n *= t->shape[i];
    }
    return 1;
}

static int same_shape(const dl_tensor *t, const shape *s) {
    if (t->ndim != s->rank) return 0;
    for (int i = 0; i < s->rank; i++)
        if (t->shape[i] != s->dim[i]) return 0;
    return 1;
}

static int address(PyObject *object, int device, dtype type, const shape *s, const char *what, int index, bool ours,
                   void **out) {
    dl_tensor t;
    char expected[SHAPE_TEXT], found[SHAPE_TEXT];

    if (borrow_some(object, device, what, index, ours, &t) < 0) return -1;
    if (dtype_from_dlpack(t.dtype.code, t.dtype.bits) != type || !same_shape(&t, s)) {
        shape got = {.rank = t.ndim < MAX_RANK ? t.ndim : MAX_RANK};
        for (int i = 0; i < got.rank; i++) got.dim[i] = t.shape[i];
        PyErr_Format(PyExc_ValueError, "%s %d: expected %s %s, got %s %s", what, index, dtype_name(type),
                     shape_text(s, expected), dtype_name(dtype_from_dlpack(t.dtype.code, t.dtype.bits)),
                     shape_text(&got, found));
        return -1;
    }
    if (!is_contiguous(&t)) {
        PyErr_Format(PyExc_ValueError, "%s %d is not contiguous", what, index);
        return -1;
    }
    *out = (char *)t.data + t.byte_offset;
    return 0;
}

int tensor_address(PyObject *object, int device, dtype type, const shape *s, const char *what, int index, void **out) {
    return address(object, device, type, s, what, index, false, out);
}

int tensor_address_of_ours(PyObject *object, int device, dtype type, const shape *s, const char *what, int index,
                           void **out) {
    return address(object, device, type, s, what, index, true, out);
}

int tensor_bytes(PyObject *object, int device, const char *what, void **out, int64_t *bytes) {
    dl_tensor t;

    if (borrow(object, device, what, -1, &t) < 0) return -1;
    if (!is_contiguous(&t)) {
        PyErr_Format(PyExc_ValueError, "%s is not contiguous", what);
        return -1;
    }
    *bytes = t.dtype.bits / 8;
    for (int i = 0; i < t.ndim; i++) *bytes *= t.shape[i];
    *out = (char *)t.data + t.byte_offset;
    return 0;
}

int tensor_kind_of(PyObject *object, tensor_kind *out) {
    const dl_exchange *e = exchange ? exchange : find_exchange((PyObject *)Py_TYPE(object));
    static PyObject *name; /* interned, for the life of the process */
    PyObject *needs;
    dl_tensor t;

    if (!e || e->borrow(object, &t) != 0) {
        if (!PyErr_Occurred()) PyErr_SetString(PyExc_TypeError, "this is not a strided tensor");
        return -1;
    }
    if (!name && !(name = PyUnicode_InternFromString("requires_grad"))) return -1;
    if (!(needs = PyObject_GetAttr(object, name))) return -1;
    out->device_type = t.device.type, out->device_id = t.device.id;
    out->code = t.dtype.code, out->bits = t.dtype.bits, out->lanes = t.dtype.lanes;
    out->rank = t.ndim;
    out->needs_grad = needs == Py_True;
    out->dims = 14695981039346656037u;
    for (int i = 0; i < t.ndim; i++) out->dims = (out->dims ^ (uint64_t)t.shape[i]) * 1099511628211u;
    Py_DECREF(needs);
    return 0;
}

int tensor_kind_equal(const tensor_kind *a, const tensor_kind *b) {
    return a->dims == b->dims && a->rank == b->rank && a->device_type == b->device_type &&
           a->device_id == b->device_id && a->code == b->code && a->bits == b->bits && a->lanes == b->lanes &&
           a->needs_grad == b->needs_grad;
}

static int is_dense(const dl_tensor *t, int64_t *count) {
    int64_t reached = 0;

    *count = 1;
    for (int i = 0; i < t->ndim; i++) {
        *count *= t->shape[i];
        if (t->shape[i] == 0) return *count = 0, 1;
    }
    for (int i = 0; i < t->ndim; i++) {
        if (t->shape[i] > 1 && t->strides && t->strides[i] <= 0) return 0;
        reached += (t->shape[i] - 1) * (t->strides ? t->strides[i] : 0);
    }
    return !t->strides || reached == *count - 1 || is_contiguous(t);
}

int tensor_elements(PyObject *object, int device, const char *what, int index, elements *out) {
    dl_tensor t;

    if (borrow(object, device, what, index, &t) < 0) return -1;
    out->type = dtype_from_dlpack(t.dtype.code, t.dtype.bits);
    out->data = (char *)t.data + t.byte_offset;
    out->strides = is_contiguous(&t) ? 0 : 1;
    for (int i = 0; out->strides && i < t.ndim; i++)
        if (t.shape[i] > 1) out->strides = out->strides * UINT64_C(0x9e3779b97f4a7c15) + (uint64_t)t.strides[i];
    if (is_dense(&t, &out->count)) return 0;
    PyErr_Format(PyExc_ValueError, "%s %d has gaps between its elements", what, index);
    return -1;
}

/* --- new tensors ------------------------------------------------------------------------------------------------------ */

/* A tensor's memory and its description in one block; torch calls the deleter when the last tensor over it is gone,
 * from any thread and without the interpreter's lock. */
typedef struct owned {
    dl_managed managed;
    int64_t shape[MAX_RANK], stride[MAX_RANK];
} owned;

static void give_owned(dl_managed *self) { memory_give(self->owner); }

/* NULL: torch did not take it over, and nothing has been given back. */
static PyObject *hand_over(const dl_exchange *e, owned *o, dtype type, const shape *s, void *data,
                           void (*deleter)(dl_managed *self)) {
    void *object = NULL;

    memset(o, 0, sizeof *o);
    memcpy(o->shape, s->dim, sizeof o->shape);
    stride_contiguous(s, o->stride);
    o->managed.version.major = DL_MAJOR;
    o->managed.owner = o;
    o->managed.deleter = deleter;
    o->managed.tensor.data = data;
    o->managed.tensor.device.type = DL_CPU;
    o->managed.tensor.ndim = s->rank;
    o->managed.tensor.dtype.code = (uint8_t)dtype_table[type].dlpack_code;
    o->managed.tensor.dtype.bits = (uint8_t)dtype_table[type].dlpack_bits;
    o->managed.tensor.dtype.lanes = 1;
    o->managed.tensor.shape = o->shape;
    o->managed.tensor.strides = o->stride;
    if (e->to_object(&o->managed, &object) == 0) return object;
    if (!PyErr_Occurred()) PyErr_SetString(PyExc_RuntimeError, "torch did not take a new tensor over");
    return NULL;
}

static PyObject *new_tensor(const module_state *m, const dl_exchange *e, dtype type, const shape *s) {
    size_t header = (sizeof(owned) + 63) & ~(size_t)63, bytes = (size_t)shape_count(s) * dtype_size(type);
    owned *o = memory_take(header + (bytes ? bytes : 1)); /* no two empty tensors at one address */
    PyObject *object;

    if (!o) {
        char sizes[SHAPE_TEXT];
        return PyErr_Format(m ? m->OutOfMemoryError : PyExc_MemoryError,
                            "out of memory: a tensor of %s %s takes %zu bytes", dtype_name(type), shape_text(s, sizes),
                            bytes);
    }
    if (!(object = hand_over(e, o, type, s, (char *)o + header, give_owned))) memory_give(o);
    return object;
}

/* A description of memory that is another's. */
typedef struct lent {
    owned o;
    void *owner;
    void (*give)(void *owner);
} lent;

static void give_lent(dl_managed *self) {
    lent *l = self->owner;
    l->give(l->owner);
    free(l);
}

PyObject *tensor_over(PyObject *tensor_type, dtype type, const shape *s, void *data, void *owner,
                      void (*give)(void *owner)) {
    const dl_exchange *e = exchange ? exchange : find_exchange(tensor_type);
    lent *l = e ? malloc(sizeof *l) : NULL;
    PyObject *object;

    if (!l) return e ? PyErr_NoMemory() : NULL;
    l->owner = owner;
    l->give = give;
    if (!(object = hand_over(e, &l->o, type, s, data, give_lent))) free(l);
    return object;
}

PyObject *tensor_empty(const module_state *m, PyObject *tensor_type, dtype type, const shape *s) {
    const dl_exchange *e = exchange ? exchange : find_exchange(tensor_type);
    return e ? new_tensor(m, e, type, s) : NULL;
}

PyObject *core_empty(PyObject *module, PyObject *args) {
    PyObject *tensor_type, *name, *sizes;
    dtype type;
    shape s;
    ctx c = {0};

    if (!PyArg_ParseTuple(args, "OOO:empty", &tensor_type, &name, &sizes)) return NULL;
    if (parse_dtype(name, &type) < 0 || parse_shape(sizes, &s) < 0) return NULL;
    if (shape_check(&c, &s) != OK) return raise_status(state_of(module), &c.err);
    return tensor_empty(state_of(module), tensor_type, type, &s);
}

PyObject *core_zero(PyObject *module, PyObject *object) {
    int64_t bytes;
    void *memory;

    (void)module;
    if (tensor_bytes(object, ON_CPU, "the target", &memory, &bytes) < 0) return NULL;
    if (bytes) memset(memory, 0, (size_t)bytes);
    return Py_NewRef(Py_None);
}

PyObject *core_copy(PyObject *module, PyObject *args) {
    PyObject *to, *from;
    int64_t to_bytes, from_bytes;
    void *target, *source;

    (void)module;
    if (!PyArg_ParseTuple(args, "OO:copy", &to, &from)) return NULL;
    if (tensor_bytes(to, ON_CPU, "the target", &target, &to_bytes) < 0) return NULL;
    if (tensor_bytes(from, ON_CPU, "the source", &source, &from_bytes) < 0) return NULL;
    if (to_bytes != from_bytes) {
        PyErr_SetString(PyExc_ValueError, "target and source are not of one size");
        return NULL;
    }
    memmove(target, source, (size_t)to_bytes);
    return Py_NewRef(Py_None);
}

PyObject *core_digest(PyObject *module, PyObject *object) {
    uint64_t found = 0;
    int64_t bytes;
    void *memory;
    bool done;

    (void)module;
    if (tensor_bytes(object, ON_CPU, "the tensor", &memory, &bytes) < 0) return NULL;
    Py_BEGIN_ALLOW_THREADS done = digest(memory, (size_t)bytes, &found);
    Py_END_ALLOW_THREADS return done ? PyLong_FromUnsignedLongLong(found) : PyErr_NoMemory();
}

/* What the tensors of `list`, of that GPU, hold; freed by the caller. NULL: an exception is set. */
static digest_bytes *parse_digested(PyObject *list, int device, Py_ssize_t count) {
    digest_bytes *tensors = calloc((size_t)count + 1, sizeof *tensors);
    Py_ssize_t n = 0;

    if (!tensors) return (void)PyErr_NoMemory(), NULL;
    for (; n < count; n++) {
        PyObject *item = PySequence_GetItem(list, n);
        void *memory = NULL;
        int bad = item ? tensor_bytes(item, device, "the tensor", &memory, &tensors[n].bytes) : -1;
        tensors[n].from = memory;
        Py_XDECREF(item);
        if (bad < 0) break;
    }
    if (n == count) return tensors;
    free(tensors);
    return NULL;
}

static status digests_there(ctx *c, int device, unsigned long long stream, const digest_bytes *tensors, int count,
                            uint64_t *found) {
    cuda_run where;

    TRY(cuda_begin(c, device, (void *)(uintptr_t)stream, &where));
    return cuda_end(c, &where, cuda_digests(c, &where, tensors, count, found));
}

PyObject *core_cuda_digests(PyObject *module, PyObject *args) {
    unsigned long long stream;
    digest_bytes *tensors;
    PyObject *list, *found;
    Py_ssize_t count;
    void *out;
    int device;
    status s;
    ctx c;

    if (!PyArg_ParseTuple(args, "OOiK:cuda_digests", &list, &found, &device, &stream)) return NULL;
    if ((count = PySequence_Size(list)) < 0) return NULL;
    const shape wanted = {.rank = 2, .dim = {count, CUDA_DIGEST_PARTS}};
    if (tensor_address(found, device, I64, &wanted, "found", 0, &out) < 0) return NULL;
    if (!(tensors = parse_digested(list, device, count))) return NULL;
    ctx_init(&c);
    Py_BEGIN_ALLOW_THREADS s = digests_there(&c, device, stream, tensors, (int)count, out);
    Py_END_ALLOW_THREADS if (s != OK) raise_status(state_of(module), &c.err);
    ctx_release(&c);
    free(tensors);
    return s == OK ? Py_NewRef(Py_None) : NULL;
}

int parse_dtype(PyObject *name, dtype *out) {
    const char *text = PyUnicode_AsUTF8AndSize(name, NULL);

    *out = DT_NONE;
    for (int t = F32; text && t < DTYPE_COUNT; t++)
        if (strcmp(dtype_name((dtype)t), text) == 0) *out = (dtype)t;
    if (text && *out == DT_NONE) PyErr_Format(PyExc_TypeError, "tensors of type %s are not supported", text);
    return *out == DT_NONE ? -1 : 0;
}

int parse_shape(PyObject *sizes, shape *out) {
    Py_ssize_t n = PySequence_Size(sizes);

    if (n < 0) return -1;
    if (n > MAX_RANK) {
        PyErr_Format(PyExc_ValueError, "a tensor of rank %zd; at most %d are supported", n, MAX_RANK);
        return -1;
    }
    out->rank = (int)n;
    for (Py_ssize_t i = 0; i < n; i++) {
        PyObject *item = PySequence_GetItem(sizes, i);
        out->dim[i] = item ? PyLong_AsLongLong(item) : -1;
        Py_XDECREF(item);
        if (PyErr_Occurred()) return -1;
    }
    return 0;
}

PyObject *build_spec(dtype type, const shape *s) {
    PyObject *sizes = PyTuple_New(s->rank < 0 ? 0 : s->rank);
    for (int i = 0; sizes && i < s->rank; i++) {
        PyObject *size = PyLong_FromLongLong(s->dim[i]);
        if (!size || PyTuple_SetItem(sizes, i, size) < 0) Py_CLEAR(sizes);
    }
    return sizes ? Py_BuildValue("(sN)", dtype_name(type), sizes) : NULL;
}
