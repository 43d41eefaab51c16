/* stream.h -- writes past the caches what they would not hold until it is read: lines are not read before they are
 * written, and drive nothing out. */
#ifndef ORT_CORE_STREAM_H
#define ORT_CORE_STREAM_H

#include "core/prefetch.h"

#include <string.h>

/* What is at least so large, in bytes, is better streamed. */
enum { BEYOND_CACHES = 32 << 20, STREAM_ALIGNMENT = 16 };

/* One line; `to` is a multiple of STREAM_ALIGNMENT. */
static inline void stream_line(void *to, const void *line) {
#ifdef __SSE2__
    typedef long long vector __attribute__((vector_size(16), may_alias));
    typedef long long anywhere __attribute__((vector_size(16), may_alias, aligned(1)));
    for (int k = 0; k < CACHE_LINE / 16; k++) __builtin_ia32_movntdq((vector *)to + k, ((const anywhere *)line)[k]);
#else
    memcpy(to, line, CACHE_LINE);
#endif
}

/* Bytes in a row, wherever they begin: lines that are not whole are written as usual. */
static inline void stream(void *to, const void *from, int64_t bytes) {
    int64_t at = -(intptr_t)to & (CACHE_LINE - 1);

    if (at > bytes) at = bytes;
    memcpy(to, from, (size_t)at);
    for (; at + CACHE_LINE <= bytes; at += CACHE_LINE) stream_line((char *)to + at, (const char *)from + at);
    memcpy((char *)to + at, (const char *)from + at, (size_t)(bytes - at));
}

/* Before another thread reads them. */
static inline void end_streams(void) {
#ifdef __SSE2__
    __builtin_ia32_sfence();
#endif
}

#endif
