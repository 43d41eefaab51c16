/* dtype.h -- describes element types: everything that is known about each in one table. */
#ifndef ORT_CORE_DTYPE_H
#define ORT_CORE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

typedef enum dtype { DT_NONE, F32, F64, BF16, F16, I64, I32, I16, I8, U8, BOOL, DTYPE_COUNT } dtype;

typedef struct dtype_info {
    const char *name;             /* numpy's spelling */
    int size;                     /* bytes an element */
    int onnx;                     /* TensorProto.DataType */
    int dlpack_code, dlpack_bits; /* DLDataType */
    bool is_float, is_int;        /* bool is neither */
} dtype_info;

extern const dtype_info dtype_table[DTYPE_COUNT];

static inline size_t dtype_size(dtype t) { return (size_t)dtype_table[t].size; }
static inline const char *dtype_name(dtype t) { return dtype_table[t].name; }
static inline bool dtype_is_float(dtype t) { return dtype_table[t].is_float; }
/* A float of 16 bits? */
static inline bool dtype_is_narrow(dtype t) { return t == BF16 || t == F16; }
static inline bool dtype_is_int(dtype t) { return dtype_table[t].is_int; }

/* DT_NONE when there is no such type here. */
dtype dtype_from_onnx(int onnx);
dtype dtype_from_dlpack(int code, int bits);

/* Sets of types, for operator records. */
typedef uint32_t dtype_set;
#define SET(t) (1u << (t))
#define FLOATS (SET(F32) | SET(F64) | SET(BF16) | SET(F16))
#define INTEGERS (SET(I64) | SET(I32) | SET(I16) | SET(I8) | SET(U8))
#define NUMBERS (FLOATS | INTEGERS)
#define ANY_TYPE (NUMBERS | SET(BOOL))

/* --- the 16-bit floats, rounded to nearest even ------------------------------------------------------------------- */

typedef uint16_t bf16;
__extension__ typedef _Float16 f16;

static inline float bf16_to_f32(bf16 x) {
    union {
        uint32_t u;
        float f;
    } v = {.u = (uint32_t)x << 16};
    return v.f;
}

static inline bf16 f32_to_bf16(float x) {
    union {
        float f;
        uint32_t u;
    } v = {.f = x};
    uint32_t more = 0x7fffu + ((v.u >> 16) & 1u);
    /* Rounding a NaN's payload could turn it into infinity: make it quiet instead. */
    more = x != x ? ~v.u & 0x400000u : more;
    return (bf16)((v.u + more) >> 16);
}

/* The same of what is not NaN, in fewer instructions. */
static inline bf16 f32_to_bf16_finite(float x) {
    union {
        float f;
        uint32_t u;
    } v = {.f = x};
    return (bf16)((v.u + 0x7fffu + ((v.u >> 16) & 1u)) >> 16);
}

/* float16 through its bits: not every CPU has a conversion, and compilers do not vectorise the one there is. */
static inline float f16_bits_to_f32(uint16_t x) {
    union {
        uint32_t u;
        float f;
    } y, least = {.u = 113u << 23}; /* the least normal number */
    uint32_t bits = (x & 0x7fffu) << 13, exponent = bits >> 23;

    y.u = bits + (exponent == 31 ? 224u << 23 : exponent == 0 ? 113u << 23 : 112u << 23);
    y.f -= exponent == 0 ? least.f : 0; /* a denormal has no leading 1 */
    y.u |= (x & 0x8000u) << 16;
    return y.f;
}

static inline uint16_t f32_to_f16_bits(float x) {
    union {
        float f;
        uint32_t u;
    } v = {.f = x}, size = {.u = v.u & 0x7fffffffu}, denormal;
    uint32_t normal = (size.u - (112u << 23) + 0xfffu + (size.u >> 13 & 1u)) >> 13;

    denormal.f = size.f + 0.5f; /* rounds to units of a denormal, which are then the low bits */
    denormal.u -= 126u << 23;
    normal = size.u < 113u << 23 ? denormal.u : size.u < 143u << 23 ? normal : size.u > 255u << 23 ? 0x7e00u : 0x7c00u;
    return (uint16_t)(normal | (v.u >> 16 & 0x8000u));
}

/* One element of any type as a double or an int64, and back (conversions as in C; float to integer truncates). */
double dtype_get(dtype t, const void *data, int64_t index);
int64_t dtype_get_int(dtype t, const void *data, int64_t index);
void dtype_set_value(dtype t, void *data, int64_t index, double value);
void dtype_set_int(dtype t, void *data, int64_t index, int64_t value);

#endif
