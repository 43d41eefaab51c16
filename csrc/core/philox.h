/* philox.h -- draws numbers by counters: Philox4x32-10 (Salmon and others, "Parallel random numbers: as easy as 1,
 * 2, 3", 2011).
 *
 * A number is a pure function of the run's seed, the node's key and its position, so it can be drawn again instead of
 * being stored, in any order and by any number of threads, on any CPU. */
#ifndef ORT_CORE_PHILOX_H
#define ORT_CORE_PHILOX_H

#include <math.h>
#include <stdint.h>

/* Sixteen counters of four words each. */
enum { PHILOX_GROUP = 64 };

/* The 32 random bits at positions [64 * first, 64 * (first + groups)) of the stream of (seed, key). */
void philox_fill(uint64_t seed, uint32_t key, int64_t first, int64_t groups, uint32_t *out);

/* A dropout keeps the elements whose bits are not below the threshold, times the factor. */
static inline uint32_t dropout_threshold(double ratio) {
    return ratio < 1 ? (uint32_t)fmin(nearbyint(ratio * 0x1p32), 0xFFFFFFFFp0) : 0;
}

static inline double dropout_factor(double ratio) { return ratio < 1 ? 1 / (1 - ratio) : 0; }

#endif
