/* combining.h -- combines elements that land on one place, for each type that can be: take_T. */
#ifndef ORT_OPS_COMBINING_H
#define ORT_OPS_COMBINING_H

#include "ops/movement/move.h"

/* A function of each_combined.h by dtype. */
#define COMBINED_TABLE(name)                                                                                           \
    {                                                                                                                  \
        [F32] = name##_float,   [F64] = name##_double,  [BF16] = name##_bf16,                                          \
        [F16] = name##_f16,     [I64] = name##_int64_t, [I32] = name##_int32_t,                                        \
        [I16] = name##_int16_t, [I8] = name##_int8_t,   [U8] = name##_uint8_t}

#define TEMPLATE "ops/pointwise/combining_take.h"
#include "ops/pointwise/each_combined.h"

#endif
