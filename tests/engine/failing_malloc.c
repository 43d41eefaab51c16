/* failing_malloc.c -- fails allocations that code between two addresses asks for, from the n-th on;
 * test_failed_allocations.py preloads it. */
#include <errno.h>
#include <stddef.h>
#include <stdint.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);

static uintptr_t low, high;
static long left = -1, seen;

void watch_allocations(uintptr_t from, uintptr_t to) { low = from, high = to; }

/* `after` allocations succeed, then none; negative: all do. Returns how many there have been since the last call. */
long fail_allocations(long after) {
    const long count = seen;
    left = after;
    seen = 0;
    return count;
}

static int fails(void *caller) {
    if ((uintptr_t)caller < low || (uintptr_t)caller >= high) return 0;
    __atomic_fetch_add(&seen, 1, __ATOMIC_RELAXED);
    if (left < 0) return 0;
    if (left > 0) {
        left--;
        return 0;
    }
    errno = ENOMEM;
    return 1;
}

#define FAILS fails(__builtin_return_address(0))

void *malloc(size_t bytes) { return FAILS ? NULL : __libc_malloc(bytes); }
void *calloc(size_t count, size_t bytes) { return FAILS ? NULL : __libc_calloc(count, bytes); }
void *realloc(void *old, size_t bytes) { return FAILS ? NULL : __libc_realloc(old, bytes); }
void *aligned_alloc(size_t alignment, size_t bytes) { return FAILS ? NULL : __libc_memalign(alignment, bytes); }
int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *p = FAILS ? NULL : __libc_memalign(alignment, bytes);
    if (p) *out = p;
    return p ? 0 : ENOMEM;
}
