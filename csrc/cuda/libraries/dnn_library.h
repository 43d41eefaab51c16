/* dnn_library.h -- keeps cuDNN's handles and what it knows for dnn_conv.c, dnn_batchnorm.c and dnn_pool.c,
 * which have the entry points of their own kind each, so that one that is missing takes nothing away from the others. */
#ifndef ORT_CUDA_DNN_LIBRARY_H
#define ORT_CUDA_DNN_LIBRARY_H

#include "cuda/host/driver.h"
#include "cuda/host/library.h"
#include "ops/spatial/spatial.h"

/* Body of a function that loads what one of these files calls (library.h). */
#define DNN_ONCE(c, functions, LIST) LIBRARY_ONCE(c, "cuDNN", functions, LIST, "libcudnn.so.9")

typedef enum dnn_kind { DNN_CONVOLUTION, DNN_NORM, DNN_POOL } dnn_kind;
enum { DNN_RANK = 2 + SPATIAL, DNN_PARTS = 4 };

/* All that a description and the library's choice depend on, zeros where a kind has nothing to say. Sizes as the library
 * has them, with two spatial axes at least. */
typedef struct dnn_key {
    int64_t device, kind, which, type, mode, tf32, groups, workspace;
    int64_t rank, x[DNN_RANK], w[DNN_RANK], y[DNN_RANK], pad[SPATIAL], stride[SPATIAL], dilation[SPATIAL];
} dnn_key;

/* An algorithm, and the kind of math that it was named with. */
enum { DNN_WAYS = 10 };
typedef struct dnn_way {
    int algorithm, math;
} dnn_way;

typedef struct dnn_known {
    dnn_key key;
    void *part[DNN_PARTS]; /* descriptors */
    int (*destroy[DNN_PARTS])(void *part);
    dnn_way ways[DNN_WAYS]; /* of doing it, best guess first, where there are several */
    int n_ways, way;        /* the one that is used */
    bool taken;             /* by the library */
    bool settled;           /* it has run, or been measured: its bits stay as they are */
} dnn_known;

/* What an entry point returned, and its name. */
typedef struct dnn_said {
    int result;
    const char *by;
} dnn_said;

/* A kind of work. `describe` makes the parts and says whether the library takes it, and in which ways; `start` leaves in `said` what the
 * call returned that starts it. Both run with a lock. */
typedef struct dnn_user {
    status (*load)(ctx *c);
    status (*describe)(ctx *c, void *handle, dnn_known *p);
    status (*start)(ctx *c, const call *k, void *handle, const dnn_known *p, const void *arg, dnn_said *said);
    /* Measures the ways, where there are several, and puts the fastest first; NULL: they are never measured. */
    status (*measure)(ctx *c, struct measuring *m, void *handle, dnn_known *p);
    /* There are kernels of ours: the library may be missing. It is looked for once. */
    bool is_optional, was_looked_for, is_missing;
} dnn_user;

/* Starts what `of` says, or in a dry run finds out whether it can be; where the library refuses one way, by the next.
 * *done is false, and nothing was started, where the library does not take it, or, of what is optional, is not there. */
MUST_USE status dnn_run(ctx *c, const call *k, dnn_user *u, const dnn_key *of, const void *arg, bool *done);

/* Part `at` of a description: a tensor of the key's rank, dense, the channels first. */
MUST_USE status dnn_make_tensor(ctx *c, dnn_known *p, int at, dtype type, const int64_t *size);

/* As the library has them. False: one has more than 31 bits. */
bool dnn_narrow(const int64_t *from, int64_t n, int *to);
int dnn_type(dtype type);
/* 1 or 0 in the type in which the library takes factors of this type's elements. */
const void *dnn_factor(dtype type, bool one);

MUST_USE status dnn_refuse(ctx *c, int result, const char *what);
enum { DNN_NO_HOST_MEMORY = 4003, DNN_NO_DEVICE_MEMORY = 4004 };
/* The library says so of what it cannot do: the sizes are right, we have checked them. 2000: bad parameters, 3000: not
 * supported, 4000: internal errors, 5000: a kernel that does not start. */
static inline bool dnn_is_refusal(int result) {
    return result >= 2000 && result < 6000 && result != DNN_NO_HOST_MEMORY && result != DNN_NO_DEVICE_MEMORY;
}

#define DNN_CALL(c, functions, name, ...)                                                                              \
    do {                                                                                                               \
        int result_ = (functions).name(__VA_ARGS__);                                                                   \
        if (result_ != 0) return dnn_refuse((c), result_, #name);                                                      \
    } while (0)
/* Part `at` of a description: cuDNN's descriptor of this kind. */
#define DNN_MAKE(c, p, at, functions, Kind)                                                                            \
    do {                                                                                                               \
        (p)->destroy[at] = (functions).cudnnDestroy##Kind##Descriptor;                                                 \
        DNN_CALL(c, functions, cudnnCreate##Kind##Descriptor, &(p)->part[at]);                                         \
    } while (0)
#define DNN_SAID(functions, name, ...) ((dnn_said){(functions).name(__VA_ARGS__), #name})

#endif
