/* dropout.h -- which elements a dropout keeps: those whose 32 random bits are not below the threshold, times a factor. */
#ifndef ORT_OPS_DROPOUT_H
#define ORT_OPS_DROPOUT_H

#include <math.h>
#include <stdint.h>

static inline uint32_t dropout_threshold(double ratio) {
    return ratio < 1 ? (uint32_t)fmin(nearbyint(ratio * 0x1p32), 0xFFFFFFFFp0) : 0;
}

static inline double dropout_factor(double ratio) { return ratio < 1 ? 1 / (1 - ratio) : 0; }

#endif
