/* elements.h -- elements of a tensor, four at a time: read where they lie, of any type and strides, and written densely.
 *
 * An operand that lies as the output does is read in one piece, a single number once, any other element by element
 * through its strides; narrow types are widened on the way. */
#ifndef ORT_CUDA_ELEMENTS_H
#define ORT_CUDA_ELEMENTS_H

#include <stdint.h>

enum { AT_ONCE = 4 };

typedef enum reach { DENSE, SINGLE, STRIDES, UNREAD } reach; /* UNREAD: by nobody */

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

typedef struct alignas_8 {
    uint16_t x[4];
} __attribute__((aligned(8))) four_16;
typedef struct alignas_16 {
    uint32_t x[4];
} __attribute__((aligned(16))) four_32;

IO int64_t offset_of(const space *a, const source *s, int64_t i) {
    int64_t offset = 0;
    if (a->count <= INT32_MAX) {
        uint32_t rest = (uint32_t)i;
        for (int d = a->rank - 1; d >= 0; d--) {
            uint32_t next = rest / (uint32_t)a->dim[d];
            offset += (int64_t)(rest - next * (uint32_t)a->dim[d]) * s->stride[d];
            rest = next;
        }
    } else {
        for (int d = a->rank - 1; d >= 0; d--) {
            offset += i % a->dim[d] * s->stride[d];
            i /= a->dim[d];
        }
    }
    return offset;
}

DEVICE float get_float(const void *p, int type, int64_t i) {
    return type == F32    ? ((const float *)p)[i]
           : type == BF16 ? bf16_to_f32(((const bf16 *)p)[i])
                          : f16_to_f32(((const f16 *)p)[i]);
}
DEVICE double get_double(const void *p, int type, int64_t i) { return (void)type, ((const double *)p)[i]; }
DEVICE int64_t get_int64_t(const void *p, int type, int64_t i) { return (void)type, ((const int64_t *)p)[i]; }
DEVICE int32_t get_int32_t(const void *p, int type, int64_t i) {
    return type == I32   ? ((const int32_t *)p)[i]
           : type == I16 ? ((const int16_t *)p)[i]
           : type == I8  ? ((const int8_t *)p)[i]
                         : ((const uint8_t *)p)[i];
}
DEVICE uint8_t get_uint8_t(const void *p, int type, int64_t i) { return (void)type, ((const uint8_t *)p)[i]; }

/* Four at a time, where they are aligned; false: nothing was read. */
DEVICE int get_four_float(const void *p, int type, int64_t i, float x[AT_ONCE]) {
    if (type == F32) {
        if ((uintptr_t)p & 15) return 0;
        four_32 v = *(const four_32 *)((const float *)p + i);
        for (int j = 0; j < AT_ONCE; j++) x[j] = bits_to_f32(v.x[j]);
    } else {
        if ((uintptr_t)p & 7) return 0;
        four_16 v = *(const four_16 *)((const uint16_t *)p + i);
        for (int j = 0; j < AT_ONCE; j++) x[j] = type == BF16 ? bf16_to_f32(v.x[j]) : f16_to_f32(v.x[j]);
    }
    return 1;
}
#define NO_FOUR(T)                                                                                                     \
    DEVICE int get_four_##T(const void *p, int type, int64_t i, T x[AT_ONCE]) {                                        \
        return (void)p, (void)type, (void)i, (void)x, 0;                                                               \
    }
NO_FOUR(double)
NO_FOUR(int64_t)
NO_FOUR(int32_t)
NO_FOUR(uint8_t)

/* Elements [i, i + n). */
#define LOAD(T)                                                                                                        \
    IO void load_##T(const space *a, const source *s, int how, int type, int64_t i, int n, T x[AT_ONCE]) {             \
        if (how == DENSE) {                                                                                            \
            if (n == AT_ONCE && get_four_##T(s->data, type, i, x)) return;                                             \
            for (int j = 0; j < AT_ONCE; j++) x[j] = j < n ? get_##T(s->data, type, i + j) : 0;                        \
        } else if (how == SINGLE) {                                                                                    \
            const T v = get_##T(s->data, type, 0);                                                                     \
            for (int j = 0; j < AT_ONCE; j++) x[j] = v;                                                                \
        } else {                                                                                                       \
            for (int j = 0; j < AT_ONCE; j++) x[j] = j < n ? get_##T(s->data, type, offset_of(a, s, i + j)) : 0;       \
        }                                                                                                              \
    }
LOAD(float)
LOAD(double)
LOAD(int64_t)
LOAD(int32_t)
LOAD(uint8_t)

IO void store_float(void *out, int type, int64_t i, int n, const float x[AT_ONCE]) {
    if (type == F32) {
        if (n == AT_ONCE && ((uintptr_t)out & 15) == 0) {
            four_32 v;
            for (int j = 0; j < AT_ONCE; j++) v.x[j] = f32_to_bits(x[j]);
            *(four_32 *)((float *)out + i) = v;
        } else {
            for (int j = 0; j < AT_ONCE; j++)
                if (j < n) ((float *)out)[i + j] = x[j];
        }
    } else {
        uint16_t v[AT_ONCE];
        for (int j = 0; j < AT_ONCE; j++) v[j] = type == BF16 ? f32_to_bf16(x[j]) : f32_to_f16(x[j]);
        if (n == AT_ONCE && ((uintptr_t)out & 7) == 0) {
            four_16 w;
            for (int j = 0; j < AT_ONCE; j++) w.x[j] = v[j];
            *(four_16 *)((uint16_t *)out + i) = w;
        } else {
            for (int j = 0; j < AT_ONCE; j++)
                if (j < n) ((uint16_t *)out)[i + j] = v[j];
        }
    }
}
#define STORE(T)                                                                                                       \
    IO void store_##T(void *out, int type, int64_t i, int n, const T x[AT_ONCE]) {                                     \
        (void)type;                                                                                                    \
        for (int j = 0; j < AT_ONCE; j++)                                                                              \
            if (j < n) ((T *)out)[i + j] = x[j];                                                                       \
    }
STORE(double)
STORE(int64_t)
STORE(uint8_t)
IO void store_int32_t(void *out, int type, int64_t i, int n, const int32_t x[AT_ONCE]) {
    for (int j = 0; j < AT_ONCE; j++) {
        if (j >= n) continue;
        if (type == I32) ((int32_t *)out)[i + j] = x[j];
        else if (type == I16) ((int16_t *)out)[i + j] = (int16_t)x[j];
        else ((int8_t *)out)[i + j] = (int8_t)x[j];
    }
}

#endif

#endif
