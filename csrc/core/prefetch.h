/* prefetch.h -- asks for memory that is needed soon while something else is computed: where indices jump, and where
 * blocks are widened first and computed with then, since a CPU looks ahead only while there are loads. Between
 * computations, that is: so many lines at once that a CPU cannot wait for more cost as much time as they save. */
#ifndef ORT_CORE_PREFETCH_H
#define ORT_CORE_PREFETCH_H

#include <stdint.h>

/* Bytes. What is read from end to end is asked for two pages ahead, since finding where a page lies takes long. */
enum { CACHE_LINE = 64, READ_DISTANCE = 8192, WRITE_DISTANCE = 1024 };

/* Where there is nothing, nothing happens. */
static inline void prefetch(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char *)from + i);
}

/* Into the second cache. */
static inline void prefetch_later(const void *from, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char *)from + i, 0, 2);
}

/* What lies READ_DISTANCE behind, into the second cache. */
static inline void prefetch_ahead(const void *from, int64_t bytes) {
    prefetch_later((const char *)from + READ_DISTANCE, bytes);
}

/* What lies WRITE_DISTANCE behind: a store waits for the rest of its line, and behind some that wait all do. */
static inline void prefetch_to(const void *to, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += CACHE_LINE) __builtin_prefetch((const char *)to + WRITE_DISTANCE + i, 1);
}

#endif
