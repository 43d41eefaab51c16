/* memory.c -- keeps a list of large blocks that are free at the moment.
 *
 * A fresh page costs a fault and its clearing: for the memory of a training step that is tens of milliseconds, every
 * step, when malloc returns large blocks to the system. Blocks of many megabytes reserve twice the addresses they need
 * (addresses are free, unless they are limited), so a run of a longer sequence goes on in the same pages; and they ask
 * for huge pages.
 *
 * Of a block that is in use a part may be *spare*: the pages stay for the block's next use, unless memory is needed. So is
 * what a block has beyond the bytes that were asked for: a step that takes less than the one before holds less. */
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

typedef struct spare_range {
    size_t begin, end; /* whole pages, from the beginning of the block */
} spare_range;

typedef struct block {
    size_t capacity, touched; /* bytes reserved; bytes ever in use. 0 capacity: from malloc */
    size_t asked;             /* bytes in use, spare ones among them */
    size_t gone;              /* bytes of those in use before whose pages the system has again */
    spare_range *spare;       /* NULL: none */
    int n_spare, spare_room;
    struct block *next; /* among those that are kept, or those with spare ranges */
} block;
_Static_assert(sizeof(block) <= HEADER, "a block's header");

static _Atomic int64_t blocks_left = -1; /* for tests */
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static block *kept, *with_spare;
static memory_state now;
static size_t most; /* in use at one time since memory_most */

static size_t round_up(size_t n, size_t unit) { return (n + unit - 1) / unit * unit; }
/* Bytes of a block that is not in use. */
static size_t resident(const block *b) { return b->touched - b->gone; }

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
    size_t capacity = need < GROWING || memory_addresses_limited() ? need : round_up(2 * need, HUGE_PAGE);
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
    now.kept -= resident(b);
    return b;
}

/* Of kept blocks the largest of no more than `excess` bytes, or the smallest: an arena does not go for the sake of a
 * megabyte, which would cost all its pages. */
static block **to_release(size_t excess) {
    block **best = &kept;

    for (block **at = &kept; *at; at = &(*at)->next) {
        const size_t bytes = resident(*at), so_far = resident(*best);
        if (so_far > excess ? bytes < so_far : bytes <= excess && bytes > so_far) best = at;
    }
    return best;
}

static void unmap(block **at) {
    block *b = *at;
    *at = b->next;
    now.kept -= resident(b);
    (void)munmap(b, b->capacity);
}

static void forget_spare(block *b) {
    free(b->spare);
    b->spare = NULL;
    b->n_spare = b->spare_room = 0;
}

/* Gives up to `excess` spare bytes, rounded up to a page, back to the system: some of one range. */
static void drop_spare(size_t excess) {
    block *b = with_spare;
    spare_range *r = &b->spare[b->n_spare - 1];
    size_t bytes = round_up(excess, PAGE);

    if (bytes > r->end - r->begin) bytes = r->end - r->begin;
    r->end -= bytes;
    (void)madvise((char *)b + r->end, bytes, MADV_DONTNEED);
    if (r->end + bytes == b->touched) b->touched -= bytes;
    else b->gone += bytes;
    now.kept -= bytes;
    if (r->begin < r->end || --b->n_spare > 0) return;
    with_spare = b->next;
    forget_spare(b);
}

/* Gives kept blocks and spare pages back until, with `more` in use, no more is held than was ever needed. */
static void release(size_t more) {
    const size_t used = now.used + more, limit = used > now.peak ? used : now.peak;

    while ((kept || with_spare) && used + now.kept > limit) {
        const size_t excess = used + now.kept - limit;
        if (with_spare) drop_spare(excess);
        else unmap(to_release(excess));
    }
}

static void keep(block *b) {
    now.kept += resident(b);
    b->next = kept;
    kept = b;
}

/* Whether so many bytes more may be touched. What is kept goes first. */
static bool fits(size_t more) {
    if (more == 0 || memory_fits(more)) return true;
    while (kept) unmap(&kept);
    while (with_spare) drop_spare(SIZE_MAX / 2);
    return memory_fits(more);
}

/* Where there is no memory to note it the pages stay. */
static void add_spare(block *b, spare_range r) {
    if (b->n_spare == b->spare_room) {
        const int room = b->spare_room ? 2 * b->spare_room : 16;
        spare_range *more = realloc(b->spare, sizeof *more * (size_t)room);
        if (!more) return;
        b->spare = more;
        b->spare_room = room;
    }
    if (b->n_spare == 0) {
        b->next = with_spare;
        with_spare = b;
    }
    b->spare[b->n_spare++] = r;
    now.used -= r.end - r.begin;
    now.kept += r.end - r.begin;
}

static void use(block *b, size_t need) {
    if (b->touched < need) {
        b->touched = need;
        ask_huge(b);
    }
    b->gone = 0;
    b->asked = need;
    now.used += b->touched;
    if (b->touched > need) add_spare(b, (spare_range){need, b->touched});
    if (now.used > now.peak) now.peak = now.used;
    if (now.used > most) most = now.used;
}

static block *take_large(size_t need) {
    block *b;

    (void)pthread_mutex_lock(&lock);
    b = find(need);
    if (fits(b ? (need > b->touched ? need - b->touched : 0) + b->gone : need)) {
        release(need);
        if (!b) b = map_block(need);
        if (b) use(b, need);
        release(0);
    } else if (b) {
        keep(b);
        b = NULL;
    }
    (void)pthread_mutex_unlock(&lock);
    return b;
}

/* All of it is as it was before there was anything spare, but for the pages that are gone. */
static void end_spare(block *b) {
    block **at = &with_spare;

    for (int i = 0; i < b->n_spare; i++) {
        now.kept -= b->spare[i].end - b->spare[i].begin;
        now.used += b->spare[i].end - b->spare[i].begin;
    }
    while (*at && *at != b) at = &(*at)->next;
    if (*at) *at = b->next;
    forget_spare(b);
}

static void give_large(block *b) {
    (void)pthread_mutex_lock(&lock);
    end_spare(b);
    now.used -= resident(b);
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

void memory_spare(void *memory, size_t offset, size_t bytes) {
    block *b = (block *)((char *)memory - HEADER);
    const size_t end = HEADER + offset + bytes;
    const spare_range r = {round_up(HEADER + offset, PAGE), (end < b->asked ? end : b->asked) / PAGE * PAGE};

    if (!b->capacity || r.end <= r.begin) return;
    (void)pthread_mutex_lock(&lock);
    add_spare(b, r);
    release(0);
    (void)pthread_mutex_unlock(&lock);
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

size_t memory_most(void) {
    size_t found;

    (void)pthread_mutex_lock(&lock);
    found = most;
    most = now.used;
    (void)pthread_mutex_unlock(&lock);
    return found;
}

/* A child of fork must not find the lock taken by a thread it does not have. */
static void before_fork(void) { (void)pthread_mutex_lock(&lock); }
static void after_fork(void) { (void)pthread_mutex_unlock(&lock); }
__attribute__((constructor)) static void watch_fork(void) { (void)pthread_atfork(before_fork, after_fork, after_fork); }
