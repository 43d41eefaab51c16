/* fake_dnn.h -- declares what the files of our libcudnn.so.9 share: tensors, handles, factors. */
#ifndef ORT_TEST_FAKE_DNN_H
#define ORT_TEST_FAKE_DNN_H

enum { SUCCESS, WRONG = 2000, NOT_SUPPORTED = 3000, NO_MEMORY = 4003 };

#include "fake_library.h"
#include "fake_numbers.h"

#include <stdbool.h>

enum { FLOAT, DOUBLE, HALF, BFLOAT16 = 9 };
enum { MOST_RANK = 5, AXES = 3 };

typedef struct tensor {
    int type, rank, size[MOST_RANK];
} tensor;

typedef struct handle {
    void *stream;
} handle;

/* Whether the library takes nothing now. */
extern int fake_dnn_refusing;
/* What this start is to return. */
int fake_dnn_fails(void);

/* Functions that make and give back a descriptor. */
#define MAKES(name, type, destroy)                                                                                     \
    EXPORT int name(void **out);                                                                                       \
    EXPORT int destroy(void *what);                                                                                    \
    int name(void **out) {                                                                                             \
        ENTER();                                                                                                       \
        if (!fake_in_context()) return complain(#name " without the device's context");                                \
        return make(out, NULL, sizeof(type));                                                                          \
    }                                                                                                                  \
    int destroy(void *what) { return give_back(what); }

/* Sizes of the last three axes; those that there are not are 1. */
static inline void axes_of(const tensor *t, int size[AXES]) {
    for (int i = 0; i < AXES; i++) size[i] = t->rank - AXES + i < 2 ? 1 : t->size[t->rank - AXES + i];
}

static inline int cuda_type(int type) { return type == BFLOAT16 ? R_16BF : type; }

static inline int64_t count_of(const tensor *t) {
    int64_t n = 1;
    for (int i = 0; i < t->rank; i++) n *= t->size[i];
    return n;
}

static inline double factor_of(int type, const void *x) {
    return type == DOUBLE ? *(const double *)x : (double)*(const float *)x;
}

static inline bool is_same(const tensor *a, const tensor *b) {
    return a && b && a->type == b->type && a->rank == b->rank &&
           memcmp(a->size, b->size, sizeof(int) * (size_t)a->rank) == 0;
}

#endif
