/* elements.h -- elements of a tensor, AT_ONCE at a time: read where they lie, of any type and strides, and written
 * densely.
 *
 * An operand that lies as the output does is read in pieces of 16 bytes, a single number once, any other element by
 * element through its strides; narrow types are widened on the way. */
#ifndef ORT_CUDA_ELEMENTS_H
#define ORT_CUDA_ELEMENTS_H

#include "cuda/kernels/pieces.h"

#include <stdint.h>

/* Of an operand, seen from its result. RUNS: its elements lie together wherever a thread takes AT_ONCE of them; SPREAD:
 * these are one element. Of compiled chains alone: UNREAD, which no step takes. */
typedef enum reach { DENSE, SINGLE, STRIDES, UNREAD, RUNS, SPREAD } reach;

/* An operand seen through the output: its strides along the output's dimensions. */
typedef struct source {
    const void *data;
    int32_t type, how; /* a reach */
    int64_t stride[8];
} source;

/* The output's dimensions, as few as describe every operand. */
typedef struct space {
    int64_t count, dim[8];
    int32_t rank, unused;
} space;

#ifdef ORT_HOST
/* Of `n` operands of a call, as seen from its result. */
void space_of(const tensor *in, int n, const tensor *out, space *to, source *sources);
#endif

#ifdef ORT_DEVICE
#ifndef IO
#define IO FAR
#endif

/* Where element i of the output is in an operand. */
DEVICE int64_t narrow_offset_of(const space *a, const source *s, int64_t i) {
    int64_t offset = 0;
    uint32_t rest = (uint32_t)i;
    for (int d = a->rank - 1; d >= 0; d--) {
        uint32_t next = rest / (uint32_t)a->dim[d];
        offset += (int64_t)(rest - next * (uint32_t)a->dim[d]) * s->stride[d];
        rest = next;
    }
    return offset;
}
FAR __attribute__((unused)) int64_t wide_offset_of(const space *a, const source *s, int64_t i) {
    int64_t offset = 0;
    for (int d = a->rank - 1; d >= 0; d--) {
        offset += i % a->dim[d] * s->stride[d];
        i /= a->dim[d];
    }
    return offset;
}
IO int64_t offset_of(const space *a, const source *s, int64_t i) {
    return a->count <= INT32_MAX ? narrow_offset_of(a, s, i) : wide_offset_of(a, s, i);
}

/* Elements [i, i + n), i a multiple of AT_ONCE. */
#define LOAD(T)                                                                                                        \
    IO void load_##T(const space *a, const source *s, int how, int type, int64_t i, int n, T x[AT_ONCE]) {             \
        if (how == DENSE || (how == RUNS && IS_ALIGNED(s->data, type))) {                                              \
            const int64_t at = how == DENSE ? i : offset_of(a, s, i);                                                  \
            if (n == AT_ONCE && IS_ALIGNED(s->data, type)) {                                                           \
                read_##T(s->data, type, at, x);                                                                        \
                return;                                                                                                \
            }                                                                                                          \
            for (int j = 0; j < AT_ONCE; j++) x[j] = j < n ? get_##T(s->data, type, at + j) : 0;                       \
        } else if (how == SINGLE || how == SPREAD) {                                                                   \
            const T v = get_##T(s->data, type, how == SINGLE ? 0 : offset_of(a, s, i));                                \
            for (int j = 0; j < AT_ONCE; j++) x[j] = v;                                                                \
        } else {                                                                                                       \
            for (int j = 0; j < AT_ONCE; j++) x[j] = j < n ? get_##T(s->data, type, offset_of(a, s, i + j)) : 0;       \
        }                                                                                                              \
    }
#define STORE(T)                                                                                                       \
    IO void store_##T(void *out, int type, int64_t i, int n, const T x[AT_ONCE]) {                                     \
        if (n == AT_ONCE && IS_ALIGNED(out, type)) {                                                                   \
            write_##T(out, type, i, x);                                                                                \
            return;                                                                                                    \
        }                                                                                                              \
        for (int j = 0; j < AT_ONCE; j++)                                                                              \
            if (j < n) set_##T(out, type, i + j, x[j]);                                                                \
    }
#ifndef IS_CHAIN
LOAD(float)
STORE(float)
LOAD(double)
STORE(double)
LOAD(int64_t)
STORE(int64_t)
LOAD(int32_t)
STORE(int32_t)
LOAD(uint8_t)
STORE(uint8_t)
#endif

#endif

#endif
