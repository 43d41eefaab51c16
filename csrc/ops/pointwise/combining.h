/* combining.h -- template: how elements that land on one place are combined, for each type that can be.
 *
 * T is an element in memory, A what it is combined as, U an A whose overflow is defined; GET and PUT go from T to A and
 * back. 16-bit floats are combined in float32, integers as int64. */
#ifndef ORT_OPS_COMBINING_H
#define ORT_OPS_COMBINING_H

#include "ops/movement/move.h"

#define SAME(x) (x)
#define TO_F16(x) ((f16)(x))
#define TO_I32(x) ((int32_t)(x))
#define TO_I16(x) ((int16_t)(x))
#define TO_I8(x) ((int8_t)(x))
#define TO_U8(x) ((uint8_t)(x))
/* M(T, A, U, GET, PUT) for each type; name_T of each, by dtype. */
#define EACH_COMBINED(M)                                                                                               \
    M(float, float, float, SAME, SAME)                                                                                 \
    M(double, double, double, SAME, SAME)                                                                              \
    M(bf16, float, float, bf16_to_f32, f32_to_bf16)                                                                    \
    M(f16, float, float, SAME, TO_F16)                                                                                 \
    M(int64_t, int64_t, uint64_t, SAME, SAME)                                                                          \
    M(int32_t, int64_t, uint64_t, SAME, TO_I32)                                                                        \
    M(int16_t, int64_t, uint64_t, SAME, TO_I16)                                                                        \
    M(int8_t, int64_t, uint64_t, SAME, TO_I8)                                                                          \
    M(uint8_t, int64_t, uint64_t, SAME, TO_U8)
#define COMBINED_TABLE(name)                                                                                           \
    {                                                                                                                  \
        [F32] = name##_float,   [F64] = name##_double,  [BF16] = name##_bf16,                                          \
        [F16] = name##_f16,     [I64] = name##_int64_t, [I32] = name##_int32_t,                                        \
        [I16] = name##_int16_t, [I8] = name##_int8_t,   [U8] = name##_uint8_t}

/* take_T: acc (op)= x, n times */
#define TAKE(T, A, U, GET, PUT)                                                                                        \
    static inline void take_##T(combining how, A *restrict acc, const T *restrict x, int64_t n) {                      \
        switch (how) {                                                                                                 \
        case COMBINE_ADD:                                                                                              \
            for (int64_t i = 0; i < n; i++) acc[i] = (A)((U)acc[i] + (U)GET(x[i]));                                    \
            break;                                                                                                     \
        case COMBINE_MUL:                                                                                              \
            for (int64_t i = 0; i < n; i++) acc[i] = (A)((U)acc[i] * (U)GET(x[i]));                                    \
            break;                                                                                                     \
        case COMBINE_MAX:                                                                                              \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                A a = acc[i], b = GET(x[i]);                                                                           \
                acc[i] = a > b || a != a ? a : b;                                                                      \
            }                                                                                                          \
            break;                                                                                                     \
        case COMBINE_MIN:                                                                                              \
            for (int64_t i = 0; i < n; i++) {                                                                          \
                A a = acc[i], b = GET(x[i]);                                                                           \
                acc[i] = a < b || a != a ? a : b;                                                                      \
            }                                                                                                          \
            break;                                                                                                     \
        case COMBINE_NONE: break;                                                                                      \
        }                                                                                                              \
    }
EACH_COMBINED(TAKE)

#endif
