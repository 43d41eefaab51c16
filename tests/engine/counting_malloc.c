/* counting_malloc.c -- counts bytes that the process has from malloc, and the most at once; test_memory_growth.py
 * preloads it. */
#include <errno.h>
#include <malloc.h>
#include <stddef.h>

void *__libc_malloc(size_t bytes);
void *__libc_calloc(size_t count, size_t bytes);
void *__libc_realloc(void *old, size_t bytes);
void *__libc_memalign(size_t alignment, size_t bytes);
void __libc_free(void *p);

static long now, most;

/* The most since the last call, above what there was then; from now on it is counted anew. */
long most_growth(void) {
    static long before;
    const long growth = __atomic_load_n(&most, __ATOMIC_RELAXED) - before;
    before = __atomic_load_n(&now, __ATOMIC_RELAXED);
    __atomic_store_n(&most, before, __ATOMIC_RELAXED);
    return growth;
}

/* Bytes that are given now. */
long held(void) { return __atomic_load_n(&now, __ATOMIC_RELAXED); }

static void *taken(void *p) {
    if (!p) return p;
    const long count = __atomic_add_fetch(&now, (long)malloc_usable_size(p), __ATOMIC_RELAXED);
    long before = __atomic_load_n(&most, __ATOMIC_RELAXED);
    while (count > before &&
           !__atomic_compare_exchange_n(&most, &before, count, 0, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
    }
    return p;
}

static void returned(void *p) {
    if (p) __atomic_sub_fetch(&now, (long)malloc_usable_size(p), __ATOMIC_RELAXED);
}

void *malloc(size_t bytes) { return taken(__libc_malloc(bytes)); }
void *calloc(size_t count, size_t bytes) { return taken(__libc_calloc(count, bytes)); }
void *aligned_alloc(size_t alignment, size_t bytes) { return taken(__libc_memalign(alignment, bytes)); }
void *memalign(size_t alignment, size_t bytes) { return taken(__libc_memalign(alignment, bytes)); }

void free(void *p) {
    returned(p);
    __libc_free(p);
}

void *realloc(void *old, size_t bytes) {
    const long before = old ? (long)malloc_usable_size(old) : 0;
    void *p = __libc_realloc(old, bytes);
    if (p || !bytes) __atomic_sub_fetch(&now, before, __ATOMIC_RELAXED);
    return taken(p);
}

int posix_memalign(void **out, size_t alignment, size_t bytes) {
    void *p = taken(__libc_memalign(alignment, bytes));
    if (p) *out = p;
    return p ? 0 : ENOMEM;
}
