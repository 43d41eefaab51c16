/* races.c -- keeps who used a byte last, and when.
 *
 * Threads of a block are ordered by barriers alone (of a warp where it is the block), blocks of a launch by nothing; a
 * shuffle moves what it is given and orders no memory. Time counts blocks and barriers, so two accesses of a block between the same barriers have one
 * time. Two of them race if one writes, and they are of two threads at one time, or of two blocks. Atomics are left
 * out (emulate.h): the compiler is told not to look at them. */
#include "races.h"
#include "emulate.h"
#include "traffic.h"

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { PAGE = 4096, SLOTS = 1 << 16, MOST_PAGES = SLOTS / 4, MANY = 0xffff };

/* Of a byte. `older`: when it was read last by a block before the one that `read` is of. */
typedef struct use {
    uint32_t written, read, older;
    uint16_t writer, reader;
} use;

typedef struct page {
    uintptr_t number;
    use *uses;
} page;

static page pages[SLOTS];
static unsigned n_pages;
static uint32_t now, launch_began, block_began;
static const char *own, *shared, *shared_end;
static size_t own_bytes;
static int is_looking;
static char found[400], sentence[500];

static use *use_of(uintptr_t address) {
    static page *last;
    const uintptr_t number = address / PAGE + 1; /* 0: no page */
    if (!last || last->number != number) {
        uint64_t at = number * UINT64_C(0x9E3779B97F4A7C15) >> 48;
        while (pages[at % SLOTS].number && pages[at % SLOTS].number != number) at++;
        last = &pages[at % SLOTS];
        if (!last->number) {
            last->number = number;
            last->uses = calloc(PAGE, sizeof(use));
            if (!last->uses) abort();
            n_pages++;
        }
    }
    return &last->uses[address % PAGE];
}

static void forget(void) {
    for (int i = 0; i < SLOTS; i++) {
        free(pages[i].uses);
        pages[i] = (page){0, NULL};
    }
    n_pages = 0;
}

void races_begin(const void *memory, size_t bytes, const char *of_kernel, const char *end) {
    if (n_pages > MOST_PAGES || now > UINT32_MAX / 2) {
        forget();
        now = 0;
    }
    own = memory;
    own_bytes = bytes;
    shared = of_kernel;
    shared_end = end;
    launch_began = now + 1;
    found[0] = '\0';
}

void races_block(void) {
    block_began = ++now;
    is_looking = 1;
    traffic_block();
}

void races_barrier(void) { now++; }

const char *races_end(const char *kernel) {
    is_looking = 0;
    if (!found[0]) return NULL;
    (void)snprintf(sentence, sizeof sentence, "a race in %s: %s", kernel, found);
    return sentence;
}

static int is_shared(uintptr_t address) { return address >= (uintptr_t)shared && address < (uintptr_t)shared_end; }

static void tell(uintptr_t address, int is_write, const char *before, int other, const void *from) {
    const uintptr_t offset = is_shared(address) ? address - (uintptr_t)shared : address;
    char whom[40];

    if (found[0]) return;
    if (other < 0) (void)snprintf(whom, sizeof whom, "another block");
    else if (other == MANY) (void)snprintf(whom, sizeof whom, "some threads");
    else (void)snprintf(whom, sizeof whom, "thread %d", other);
    (void)snprintf(found, sizeof found, "thread %u of block %u %s byte %#lx of %s memory, which %s %s (at %p)",
                   threadIdx.x, blockIdx.x, is_write ? "writes" : "reads", (unsigned long)offset,
                   is_shared(address) ? "shared" : "global", whom, before, from);
}

/* A block has shared memory of its own: what others did at its address before is nothing to it. */
static void see(uintptr_t address, int is_write, const void *from) {
    use *u = use_of(address);
    const uint32_t since = is_shared(address) ? block_began : launch_began;
    const uint16_t me = (uint16_t)threadIdx.x;

    if (!is_shared(address)) traffic_see(address, is_write, (is_write ? u->written : u->read) < launch_began, me);
    if (u->written == now && u->writer != me) tell(address, is_write, "has written", u->writer, from);
    else if (u->written >= since && u->written < block_began) tell(address, is_write, "has written", -1, from);
    if (is_write) {
        if (u->read == now && u->reader != me) tell(address, 1, "has read", u->reader, from);
        else if (u->older >= since || (u->read >= since && u->read < block_began))
            tell(address, 1, "has read", -1, from);
        u->written = now;
        u->writer = me;
        return;
    }
    if (u->read < block_began) u->older = u->read;
    u->reader = u->read == now && u->reader != me ? MANY : me;
    u->read = now;
}

static void look(const void *p, size_t bytes, int is_write, const void *from) {
    const uintptr_t first = (uintptr_t)p;

    if (!is_looking || first - (uintptr_t)own < own_bytes) return;
    if ((const char *)p >= (const char *)&emulated && (const char *)p < (const char *)(&emulated + 1)) return;
    for (size_t i = 0; i < bytes; i++) see(first + i, is_write, from);
}

/* --- what the compiler calls ------------------------------------------------------------------------------------------ */

/* With the types that gcc knows them by where it looks for anything. */
#define HOOKS(n)                                                                                                       \
    void __tsan_read##n(void *p);                                                                                      \
    void __tsan_read##n(void *p) { look(p, n, 0, __builtin_return_address(0)); }                                       \
    void __tsan_write##n(void *p);                                                                                     \
    void __tsan_write##n(void *p) { look(p, n, 1, __builtin_return_address(0)); }                                      \
    void __tsan_unaligned_read##n(void *p);                                                                            \
    void __tsan_unaligned_read##n(void *p) { look(p, n, 0, __builtin_return_address(0)); }                             \
    void __tsan_unaligned_write##n(void *p);                                                                           \
    void __tsan_unaligned_write##n(void *p) { look(p, n, 1, __builtin_return_address(0)); }
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)

void __tsan_read_range(void *p, long bytes);
void __tsan_read_range(void *p, long bytes) { look(p, (size_t)bytes, 0, __builtin_return_address(0)); }
void __tsan_write_range(void *p, long bytes);
void __tsan_write_range(void *p, long bytes) { look(p, (size_t)bytes, 1, __builtin_return_address(0)); }
void __tsan_init(void);
void __tsan_init(void) {}
void __tsan_func_entry(void *caller);
void __tsan_func_entry(void *caller) { (void)caller; }
void __tsan_func_exit(void *nothing);
void __tsan_func_exit(void *nothing) { (void)nothing; }
