/* fake_numbers.h -- reads and writes elements of CUDA's types (cudaDataType), for libraries of ours that compute on
 * the CPU. */
#ifndef ORT_TEST_FAKE_NUMBERS_H
#define ORT_TEST_FAKE_NUMBERS_H

#include <stdint.h>
#include <string.h>

enum { R_32F, R_64F, R_16F, R_16BF = 14 };

static inline double get(int type, const void *data, int64_t i) {
    union {
        uint32_t u;
        float f;
    } v;
    __extension__ _Float16 half;

    if (type == R_64F) return ((const double *)data)[i];
    if (type == R_32F) return ((const float *)data)[i];
    if (type == R_16F) return memcpy(&half, (const uint16_t *)data + i, 2), (double)half;
    v.u = (uint32_t)((const uint16_t *)data)[i] << 16;
    return v.f;
}

static inline void put(int type, void *data, int64_t i, double x) {
    union {
        float f;
        uint32_t u;
    } v = {(float)x};
    __extension__ _Float16 half = (_Float16)(float)x;

    if (type == R_64F) ((double *)data)[i] = x;
    else if (type == R_32F) ((float *)data)[i] = (float)x;
    else if (type == R_16F) memcpy((uint16_t *)data + i, &half, 2);
    else if (x != x) ((uint16_t *)data)[i] = 0x7fc0;
    else ((uint16_t *)data)[i] = (uint16_t)((v.u + 0x7fff + (v.u >> 16 & 1)) >> 16);
}

#endif
