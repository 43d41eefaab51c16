/* ints.h -- says what is asked of sizes and indices again and again. */
#ifndef ORT_CORE_INTS_H
#define ORT_CORE_INTS_H

#include <stdint.h>

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }
static inline int64_t most(int64_t a, int64_t b) { return a > b ? a : b; }
/* The number of [low, high] that is nearest to x. */
static inline int64_t clamp(int64_t x, int64_t low, int64_t high) { return x < low ? low : x > high ? high : x; }
/* How many parts of `size` n has, the last one perhaps smaller; and what as many whole ones have. */
static inline int64_t parts(int64_t n, int64_t size) { return (n + size - 1) / size; }
static inline int64_t whole(int64_t n, int64_t size) { return parts(n, size) * size; }

#endif
