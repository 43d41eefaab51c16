/* emulate.c -- runs threads as fibers, and decides the order they run in. */
#include "emulate.h"

#include "races.h"
#include "traffic.h"

#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/common_interface_defs.h>
#endif

enum { MOST_THREADS = 1024, STACK = 256 << 10, WARP = 32, WIDEST = 32 };

typedef enum state { READY, AT_BARRIER, AT_WARP_BARRIER, AT_EXCHANGE, DONE } state;

typedef struct fiber {
    void *top;  /* its stack pointer while it does not run */
    void *fake; /* the sanitizer's */
    state state;
    unsigned turn;        /* of the two places for what it sends */
    char sent[2][WIDEST]; /* to the other lanes */
} fiber;

struct emulated emulated;

static fiber fibers[MOST_THREADS];
static unsigned n_done;                        /* of the block's */
static uint32_t ballots[MOST_THREADS / 32][2]; /* a bit of each lane's */
static char *stacks;
static void *scheduler;
#ifdef __SANITIZE_ADDRESS__
static void *scheduler_fake;
static const void *scheduler_bottom;
static size_t scheduler_size;
#endif
static emulated_thread *running;
static const void *running_argument;

/* --- changing stacks ---------------------------------------------------------------------------------------------- */

/* Keeps what a called function must keep, saves the stack pointer at `*from`, goes on at `to`. */
void emulated_switch(void **from, void *to);

#if defined(__x86_64__)
__asm__(".text\n"
        ".globl emulated_switch\n"
        ".hidden emulated_switch\n"
        ".type emulated_switch, @function\n"
        "emulated_switch:\n"
        "    pushq %rbp\n    pushq %rbx\n    pushq %r12\n    pushq %r13\n    pushq %r14\n    pushq %r15\n"
        "    movq %rsp, (%rdi)\n"
        "    movq %rsi, %rsp\n"
        "    popq %r15\n    popq %r14\n    popq %r13\n    popq %r12\n    popq %rbx\n    popq %rbp\n"
        "    ret\n"
        ".size emulated_switch, .-emulated_switch\n");
enum { SAVED = 6 };
#else
#error "the emulator changes stacks on x86-64 only"
#endif

static unsigned current(void) { return emulated.thread.x; }

static void enter(unsigned t) {
    emulated.thread.x = t;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(&scheduler_fake, stacks + (size_t)t * STACK, STACK);
#endif
    emulated_switch(&scheduler, fibers[t].top);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(scheduler_fake, NULL, NULL);
#endif
}

static void leave(state s) {
    fiber *f = &fibers[current()];
    f->state = s;
    n_done += s == DONE;
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_start_switch_fiber(s == DONE ? NULL : &f->fake, scheduler_bottom, scheduler_size);
#endif
    emulated_switch(&f->top, scheduler);
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(f->fake, &scheduler_bottom, &scheduler_size);
#endif
}

static void fiber_main(void) {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(NULL, &scheduler_bottom, &scheduler_size);
#endif
    running(running_argument);
    leave(DONE);
}

static void prepare(unsigned t) {
    void **top = (void **)(void *)(stacks + (size_t)(t + 1) * STACK);
    void (*start)(void) = fiber_main;

    *--top = NULL; /* where fiber_main would return to; it aligns the stack, too */
    memcpy(--top, &start, sizeof start);
    for (int i = 0; i < SAVED; i++) *--top = NULL;
    fibers[t] = (fiber){.top = top, .state = READY};
}

/* --- waiting ------------------------------------------------------------------------------------------------------ */

void emulated_barrier(void) { leave(AT_BARRIER); }

void emulated_warp_barrier(void) { leave(AT_WARP_BARRIER); }

/* By turns: no thread sends in one place again before all have read it, since they wait for each other in the next turn. */
void emulated_exchange(void *x, size_t size, int lane) {
    const unsigned first = current() / WARP * WARP, turn = fibers[current()].turn ^= 1;
    memcpy(fibers[current()].sent[turn], x, size);
    leave(AT_EXCHANGE);
    memcpy(x, fibers[first + (unsigned)lane].sent[turn], size);
}

uint32_t emulated_ballot(int is_set) {
    const unsigned turn = fibers[current()].turn ^= 1;
    uint32_t *all = &ballots[current() / WARP][turn], bit = UINT32_C(1) << current() % WARP;
    *all = is_set ? *all | bit : *all & ~bit;
    leave(AT_EXCHANGE);
    return *all;
}

static unsigned count_state(unsigned from, unsigned to, state s) {
    unsigned n = 0;
    for (unsigned t = from; t < to; t++) n += fibers[t].state == s;
    return n;
}

static void release(unsigned from, unsigned to, state s) {
    for (unsigned t = from; t < to; t++)
        if (fibers[t].state == s) fibers[t].state = READY;
}

/* Lets threads go on that have waited for each other; 0 when there are none. */
static int release_some(unsigned threads) {
    int released = 0;
    for (unsigned w = 0; w < threads; w += WARP) {
        const state s = fibers[w].state;
        if ((s != AT_EXCHANGE && s != AT_WARP_BARRIER) || count_state(w, w + WARP, s) != WARP) continue;
        release(w, w + WARP, s);
        if (s == AT_WARP_BARRIER && threads == WARP) races_barrier();
        released = 1;
    }
    if (released) return 1;
    if (count_state(0, threads, AT_BARRIER) + n_done != threads) return 0;
    release(0, threads, AT_BARRIER);
    races_barrier();
    return 1;
}

/* The shared memory that a kernel may use, before every block. */
__attribute__((no_sanitize("address"))) static void spoil_shared(char *p, const char *end) {
#ifdef __SANITIZE_ADDRESS__ /* its memset refuses what lies between two variables: words, which the compiler leaves */
    for (; end - p >= 8; p += 8) *(volatile uint64_t *)(void *)p = UINT64_C(0xa5a5a5a5a5a5a5a5);
    for (; p < end; p++) *(volatile char *)p = (char)0xa5;
#else
    if (p) memset(p, 0xa5, (size_t)(end - p));
#endif
}

/* --- order ------------------------------------------------------------------------------------------------------------ */

static uint64_t chance; /* 0: no chance */

static void begin_order(const emulated_kernel *f, unsigned blocks, unsigned threads) {
    const char *said = getenv("EMULATED_ORDER");
    chance = said ? strtoull(said, NULL, 10) : 1;
    if (!chance) return;
    for (const char *c = f->name; *c; c++) chance = (chance ^ (unsigned char)*c) * UINT64_C(1099511628211);
    chance = (chance ^ (uint64_t)blocks << 32 ^ threads) | 1;
}

static unsigned draw_below(unsigned n) {
    chance ^= chance << 13, chance ^= chance >> 7, chance ^= chance << 17;
    return (unsigned)((chance >> 32) * n >> 32);
}

static void put_in_order(unsigned *order, unsigned n) {
    for (unsigned i = 0; i < n; i++) order[i] = i;
    for (unsigned i = n; chance && i > 1; i--) {
        const unsigned j = draw_below(i), moved = order[i - 1];
        order[i - 1] = order[j];
        order[j] = moved;
    }
}

static int run_block(const emulated_kernel *f, unsigned threads, const char **why) {
    unsigned order[MOST_THREADS];

    spoil_shared(f->shared, f->shared_end);
    races_block();
    n_done = 0;
    for (unsigned t = 0; t < threads; t++) prepare(t);
    while (n_done < threads) {
        put_in_order(order, threads);
        for (unsigned i = 0; i < threads; i++)
            if (fibers[order[i]].state == READY) enter(order[i]);
        if (n_done < threads && !release_some(threads)) {
            *why = "threads of a block wait at different places";
            return 0;
        }
    }
    return 1;
}

static int run_blocks(const emulated_kernel *f, unsigned blocks, unsigned threads, const char **why) {
    unsigned *order = malloc(blocks * sizeof *order);
    int done = order != NULL;

    if (!order) *why = "no memory for the order of blocks";
    else put_in_order(order, blocks);
    for (unsigned b = 0; done && b < blocks; b++) {
        emulated.block = (emulated_index){order[b], 0, 0};
        done = run_block(f, threads, why);
    }
    free(order);
    return done;
}

int emulate(const emulated_kernel *f, unsigned blocks, unsigned threads, const void *argument, const char **why) {
    if (threads == 0 || threads > MOST_THREADS || threads % WARP || blocks == 0) {
        *why = "a launch of a size that there is not";
        return 0;
    }
    if (!stacks) {
        stacks = mmap(NULL, (size_t)MOST_THREADS * STACK, PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        if (stacks == MAP_FAILED) {
            stacks = NULL;
            *why = "no memory for stacks";
            return 0;
        }
    }
    running = f->run;
    running_argument = argument;
    emulated.threads = (emulated_index){threads, 1, 1};
    emulated.blocks = (emulated_index){blocks, 1, 1};
    begin_order(f, blocks, threads);
    races_begin(stacks, (size_t)MOST_THREADS * STACK, f->shared, f->shared_end);
    traffic_begin(f->name, argument, f->bytes);
    const int done = run_blocks(f, blocks, threads, why);
    const char *race = races_end(f->name);
    if (done && race) *why = race;
    return done && !race;
}
