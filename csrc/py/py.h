/* py.h -- declares what the files of this folder share. The only folder that includes Python.h. */
#ifndef ORT_PY_PY_H
#define ORT_PY_PY_H

#ifndef Py_LIMITED_API
#define Py_LIMITED_API 0x030b0000
#endif
#define PY_SSIZE_T_CLEAN
/* Slot tables hold functions in void pointers: CPython's interface, which ISO C does not know. */
#pragma GCC diagnostic ignored "-Wpedantic"
#include <Python.h>

#include "core/ctx.h"
#include "core/shape.h"

/* Everything that is global lives here, once a module. */
#define MODULE_STATE(X)                                                                                                \
    X(Error)             /* RuntimeError: all of ours derive from it */                                                \
    X(EngineError)       /* Error: the engine failed, or cannot compute a graph */                                     \
    X(UnsupportedError)  /* EngineError: well-formed, but only PyTorch can compute it */                               \
    X(InvalidModelError) /* EngineError and ValueError: the bytes are not a model */                                   \
    X(ArgumentError)     /* Error and ValueError: what was given has not the value or the shape that is wanted */      \
    X(ArgumentTypeError) /* Error and TypeError: what was given is of another type than is wanted */                   \
    X(OutOfMemoryError)  /* Error and MemoryError */                                                                   \
    X(FileError)         /* Error and OSError */                                                                       \
    X(model_type)                                                                                                      \
    X(number_type)                                                                                                     \
    X(plan_type)                                                                                                       \
    X(room_type)                                                                                                       \
    X(watch_type)                                                                                                      \
    X(profiler)     /* a dictionary of torch's, which says under */                                                    \
    X(profiler_key) /* this name whether its profiler is on */

typedef struct module_state {
#define X(name) PyObject *name;
    MODULE_STATE(X)
#undef X
} module_state;

/* state.c */
module_state *state_of(PyObject *type_or_module_object);

/* The one place where a status becomes an exception; returns NULL. */
PyObject *raise_status(const module_state *m, const err *e);

/* "float32" and an iterable of sizes, as Python gives them. -1 with an exception set. */
int parse_dtype(PyObject *name, dtype *out);
int parse_shape(PyObject *sizes, shape *out);
PyObject *build_spec(dtype type, const shape *s); /* ("float32", (2, 3)) */

/* Where memory is: ON_CPU, or the number of a GPU. */
enum { ON_CPU = -1 };

/* Address of a contiguous torch.Tensor of exactly this type and shape; `what` and `index` name it in errors. Like all of
 * these: RuntimeError where a tensor's storage has shrunk and does not have all of it any more. */
int tensor_address(PyObject *object, int device, dtype type, const shape *s, const char *what, int index, void **out);
/* The same of a tensor that the engine has just made and Python has not seen: its storage is not looked at. */
int tensor_address_of_ours(PyObject *object, int device, dtype type, const shape *s, const char *what, int index,
                           void **out);
/* Address and size in bytes of a contiguous tensor of any type. */
int tensor_bytes(PyObject *object, int device, const char *what, void **out, int64_t *bytes);

/* A new CPU tensor that owns its memory, not filled; `tensor_type` is torch.Tensor. `m`: for OutOfMemoryError; NULL in a
 * run, of which Python sees another error. */
PyObject *tensor_empty(const module_state *m, PyObject *tensor_type, dtype type, const shape *s);
/* The same over memory at `data`, which is the owner's: `give` is called once, when the last tensor over it is gone, from
 * any thread and without the interpreter's lock; not where there is no tensor (NULL). */
PyObject *tensor_over(PyObject *tensor_type, dtype type, const shape *s, void *data, void *owner,
                      void (*give)(void *owner));

/* The elements of a tensor on the CPU or that GPU that fills its memory without gaps, in whatever order of dimensions. */
typedef struct elements {
    dtype type; /* DT_NONE: one the engine does not know */
    int64_t count;
    void *data;
    uint64_t strides; /* equal for tensors whose elements lie in the same order; 0: contiguous */
} elements;

int tensor_elements(PyObject *object, int device, const char *what, int index, elements *out);

/* Functions of the module: empty(torch.Tensor, dtype name, sizes), zero(tensor), copy(to, from), digest(tensor), and on
 * a GPU cuda_digests(tensors, found, device, stream). */
PyObject *core_empty(PyObject *module, PyObject *args);
PyObject *core_zero(PyObject *module, PyObject *object);
PyObject *core_copy(PyObject *module, PyObject *args);
PyObject *core_digest(PyObject *module, PyObject *object);
PyObject *core_cuda_digests(PyObject *module, PyObject *args);

/* Functions of the module: objects(types, generation), referrers(objects), noting(types, found, oldest). */
PyObject *core_objects(PyObject *module, PyObject *args);
PyObject *core_referrers(PyObject *module, PyObject *objects);
PyObject *core_noting(PyObject *module, PyObject *args);

/* Function of the module: look_at_calls(called, began, functions, owners, bases, seen, ran, is_traced). */
PyObject *core_look_at_calls(PyObject *module, PyObject *args);

/* Functions of the module: tune(plan, seconds), tuning_set(class, way), tuning_clear(), tuning_uses(), and for a GPU
 * cuda_tune(plan, math_mode, ..., products, convolutions), cuda_tuning_set(device, product, algorithm), cuda_place(device). */
PyObject *core_tune(PyObject *module, PyObject *args);
PyObject *core_tuning_set(PyObject *module, PyObject *args);
PyObject *core_tuning_clear(PyObject *module, PyObject *unused);
PyObject *core_tuning_uses(PyObject *module, PyObject *unused);
PyObject *core_cuda_tune(PyObject *module, PyObject *args);
PyObject *core_cuda_tuning_set(PyObject *module, PyObject *args);
PyObject *core_cuda_place(PyObject *module, PyObject *device);

/* Functions of the module: optimize(rule, rows, settings, ...), sums_of_squares(tensors), and those on a GPU. */
PyObject *core_optimize(PyObject *module, PyObject *args);
PyObject *core_sums_of_squares(PyObject *module, PyObject *tensors);
PyObject *core_cuda_sums_of_squares(PyObject *module, PyObject *args);

/* What a graph assumes of a plain tensor. */
typedef struct tensor_kind {
    uint64_t dims; /* a hash of the sizes */
    int32_t device_type, device_id, rank;
    uint16_t lanes;
    uint8_t code, bits, needs_grad;
} tensor_kind;

int tensor_kind_of(PyObject *object, tensor_kind *out); /* -1 with an exception set */
int tensor_kind_equal(const tensor_kind *a, const tensor_kind *b);

/* Function of the module: recompute(steps, values, n_forward, target, moving). */
PyObject *core_recompute(PyObject *module, PyObject *args);

/* Functions of the module: triton_maker(object, interprets), pointwise_formulas(). */
PyObject *core_triton_maker(PyObject *module, PyObject *args);
PyObject *core_pointwise_formulas(PyObject *module, PyObject *unused);
struct triton_rules;
/* The rules that Model.plan is given, in memory of `c`; *out is NULL for None. -1 with an exception set. */
int parse_triton_rules(ctx *c, PyObject *rules, const struct triton_rules **out);

PyObject *model_type_new(PyObject *module);
PyObject *watch_type_new(PyObject *module);
PyObject *plan_type_new(PyObject *module);
PyObject *room_type_new(PyObject *module);
PyObject *number_type_new(PyObject *module);

/* Function of the module: read(tensor, device, stream) -> Number. */
PyObject *core_read(PyObject *module, PyObject *args);

struct plan;
/* Wraps a plan whose memory is `c` (taken over); keeps `model` alive. `folder`: where its runs may offload to, or NULL. */
PyObject *plan_object_new(module_state *m, PyObject *model, ctx *c, struct plan *p, int device, const char *folder);

/* The plan of a Plan, borrowed; NULL: it is for a GPU. */
const struct plan *plan_for_cpu(PyObject *plan_object);
const struct plan *plan_for_gpu(PyObject *object, int *device); /* of a plan for a GPU, else NULL */

#endif
