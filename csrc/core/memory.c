/* memory.c -- a list of large blocks that are free at the moment.
 *
 * A fresh page costs a fault and its clearing: for the memory of a training step that is tens of milliseconds, every
 * step, when malloc returns large blocks to the system. Blocks of many megabytes reserve twice the addresses they need
 * (addresses are free), so a run of a longer sequence goes on in the same pages; and they ask for huge pages. */
#define _GNU_SOURCE
#include "core/memory.h"

#include "core/limit.h"

#include <pthread.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>

enum {
    HEADER = 64,
    PAGE = 4096,
    HUGE_PAGE = 2 << 20,
    LARGE = 1 << 20,   /* below, malloc does well */
    GROWING = 16 << 20 /* from here on, room to grow */
};

typedef struct block {
    size_t capacity, touched; /* bytes reserved; bytes ever in use. 0 capacity: from malloc */
    struct block *next;
} block;

static _Atomic int64_t blocks_left = -1; /* for tests */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *kept;
static memory_state now;

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }

#ifdef ORT_SANITIZE
static const bool keeps = false; /* the sanitizer watches each block from malloc to free */
#else
static const bool keeps = true;
#endif

/* --- the system ------------------------------------------------------------------------------------------------------- */

static void *map(size_t bytes) {
    void *m = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return m == MAP_FAILED ? NULL : m;
}

/* Whole huge pages only: the tail of a block does not take more than it needs. */
static void ask_huge(block *b) {
    uintptr_t start = round_up((uintptr_t)b, HUGE_PAGE);
    uintptr_t end = ((uintptr_t)b + b->touched) / HUGE_PAGE * HUGE_PAGE;
    if (end > start) (void)madvise((void *)start, end - start, MADV_HUGEPAGE);
}

static block *map_block(size_t need) {
    size_t capacity = need < GROWING ? need : round_up(2 * need, HUGE_PAGE);
    block *b = map(capacity);

    if (!b) b = map(capacity = need);
    if (b) *b = (block){.capacity = capacity};
    return b;
}

/* --- the list --------------------------------------------------------------------------------------------------------- */

/* The block whose touched pages are closest to `need`, if there is one that is neither too small nor far too large. */
static block *find(size_t need) {
    block **best = NULL, *b;
    size_t best_off = SIZE_MAX;

    for (block **at = &kept; *at; at = &(*at)->next) {
        size_t touched = (*at)->touched, off = touched > need ? touched - need : need - touched;
        if ((*at)->capacity < need || touched > 2 * need || off >= best_off) continue;
        best_off = off;
        best = at;
    }
    if (!best) return NULL;
    b = *best;
    *best = b->next;
    now.kept -= b->touched;
    return b;
}

/* Of kept blocks the largest of no more than `excess` bytes, or the smallest: an arena does not go for the sake of a
 * megabyte, which would cost all its pages. */
static block **to_release(size_t excess) {
    block **best = &kept;

    for (block **at = &kept; *at; at = &(*at)->next) {
        const size_t touched = (*at)->touched, so_far = (*best)->touched;
        if (so_far > excess ? touched < so_far : touched <= excess && touched > so_far) best = at;
    }
    return best;
}

static void unmap(block **at) {
    block *b = *at;
    *at = b->next;
    now.kept -= b->touched;
    (void)munmap(b, b->capacity);
}

/* Unmaps kept blocks until, with `more` in use, no more is held than was ever needed. */
static void release(size_t more) {
    const size_t used = now.used + more, limit = used > now.peak ? used : now.peak;

    while (kept && used + now.kept > limit) unmap(to_release(used + now.kept - limit));
}

static void keep(block *b) {
    now.kept += b->touched;
    b->next = kept;
    kept = b;
}

/* Whether so many bytes more may be touched. What is kept goes first. */
static bool fits(size_t more) {
    if (more == 0 || memory_fits(more)) return true;
    while (kept) unmap(&kept);
    return memory_fits(more);
}

static void use(block *b, size_t need) {
    if (b->touched < need) {
        b->touched = need;
        ask_huge(b);
    }
    now.used += b->touched;
    if (now.used > now.peak) now.peak = now.used;
}

static block *take_large(size_t need) {
    block *b;

    (void)pthread_mutex_lock(&lock);
    b = find(need);
    if (fits(b ? (need > b->touched ? need - b->touched : 0) : need)) {
        release(b && b->touched > need ? b->touched : need);
        if (!b) b = map_block(need);
        if (b) use(b, need);
    } else if (b) {
        keep(b);
        b = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    return b;
}

static void give_large(block *b) {
    (void)pthread_mutex_lock(&lock);
    now.used -= b->touched;
    keep(b);
    release(0);
    (void)pthread_mutex_unlock(&lock);
}

void memory_fail_after(int64_t count) { blocks_left = count; }

static bool none_left(void) {
    int64_t left = blocks_left;

    while (left > 0 && !atomic_compare_exchange_weak(&blocks_left, &left, left - 1));
    return left == 0;
}

void *memory_take(size_t bytes) {
    block *b = NULL;

    if (bytes > SIZE_MAX / 4 || none_left()) return NULL;
    if (keeps && bytes >= LARGE) {
        b = take_large(round_up(bytes + HEADER, PAGE));
    } else if (bytes < LARGE || memory_fits(bytes)) {
        /* Exactly so many bytes: a sanitizer knows where they end. */
        void *memory;
        if (posix_memalign(&memory, HEADER, bytes + HEADER) == 0) *(b = memory) = (block){0};
    }
    return b ? (char *)b + HEADER : NULL;
}

bool memory_would_fit(size_t bytes) {
    const size_t there = memory_now().kept;
    return bytes <= there || memory_would_be_free(bytes - there);
}

void memory_give(void *memory) {
    block *b = memory ? (block *)((char *)memory - HEADER) : NULL;

    if (!b) return;
    if (b->capacity) give_large(b);
    else free(b);
}

void memory_trim(void) {
    (void)pthread_mutex_lock(&lock);
    now.peak = 0;
    release(0);
    now.peak = now.used;
    (void)pthread_mutex_unlock(&lock);
}

memory_state memory_now(void) {
    memory_state state;

    (void)pthread_mutex_lock(&lock);
    state = now;
    (void)pthread_mutex_unlock(&lock);
    return state;
}

/* A child of fork must not find the lock taken by a thread it does not have. */
static void before_fork(void) { (void)pthread_mutex_lock(&lock); }
static void after_fork(void) { (void)pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_fork(void) { (void)pthread_atfork(before_fork, after_fork, after_fork); }
