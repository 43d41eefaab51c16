/* dtype.c -- holds the table of element types. */
#include "core/dtype.h"

/* clang-format off */
const dtype_info dtype_table[DTYPE_COUNT] = {
    /*            name       size onnx dlpack   float  int   */
    [DT_NONE] = {"none",     0,   0,   -1, 0,   false, false},
    [F32]     = {"float32",  4,   1,   2, 32,   true,  false},
    [F64]     = {"float64",  8,   11,  2, 64,   true,  false},
    [BF16]    = {"bfloat16", 2,   16,  4, 16,   true,  false},
    [F16]     = {"float16",  2,   10,  2, 16,   true,  false},
    [I64]     = {"int64",    8,   7,   0, 64,   false, true},
    [I32]     = {"int32",    4,   6,   0, 32,   false, true},
    [I16]     = {"int16",    2,   5,   0, 16,   false, true},
    [I8]      = {"int8",     1,   3,   0, 8,    false, true},
    [U8]      = {"uint8",    1,   2,   1, 8,    false, true},
    [BOOL]    = {"bool",     1,   9,   6, 8,    false, false},
};
/* clang-format on */

dtype dtype_from_onnx(int onnx) {
    for (int t = F32; t < DTYPE_COUNT; t++)
        if (dtype_table[t].onnx == onnx) return (dtype)t;
    return DT_NONE;
}

dtype dtype_from_dlpack(int code, int bits) {
    for (int t = F32; t < DTYPE_COUNT; t++)
        if (dtype_table[t].dlpack_code == code && dtype_table[t].dlpack_bits == bits) return (dtype)t;
    return DT_NONE;
}

double dtype_get(dtype t, const void *data, int64_t i) {
    switch (t) {
    case F32: return (double)((const float *)data)[i];
    case F64: return ((const double *)data)[i];
    case BF16: return (double)bf16_to_f32(((const bf16 *)data)[i]);
    case F16: return (double)((const f16 *)data)[i];
    default: return (double)dtype_get_int(t, data, i);
    }
}

int64_t dtype_get_int(dtype t, const void *data, int64_t i) {
    switch (t) {
    case I64: return ((const int64_t *)data)[i];
    case I32: return ((const int32_t *)data)[i];
    case I16: return ((const int16_t *)data)[i];
    case I8: return ((const int8_t *)data)[i];
    case U8: return ((const uint8_t *)data)[i];
    case BOOL: return ((const uint8_t *)data)[i] != 0;
    case DT_NONE:
    case DTYPE_COUNT: return 0;
    default: return (int64_t)dtype_get(t, data, i);
    }
}

void dtype_set_value(dtype t, void *data, int64_t i, double v) {
    switch (t) {
    case F32: ((float *)data)[i] = (float)v; break;
    case F64: ((double *)data)[i] = v; break;
    case BF16: ((bf16 *)data)[i] = f32_to_bf16((float)v); break;
    case F16: ((f16 *)data)[i] = (f16)v; break;
    case BOOL: ((uint8_t *)data)[i] = v != 0; break;
    default: dtype_set_int(t, data, i, (int64_t)v); break;
    }
}

void dtype_set_int(dtype t, void *data, int64_t i, int64_t v) {
    switch (t) {
    case I64: ((int64_t *)data)[i] = v; break;
    case I32: ((int32_t *)data)[i] = (int32_t)v; break;
    case I16: ((int16_t *)data)[i] = (int16_t)v; break;
    case I8: ((int8_t *)data)[i] = (int8_t)v; break;
    case U8: ((uint8_t *)data)[i] = (uint8_t)v; break;
    case BOOL: ((uint8_t *)data)[i] = v != 0; break;
    case DT_NONE:
    case DTYPE_COUNT: break;
    default: dtype_set_value(t, data, i, (double)v); break;
    }
}
