/* emulate.h -- compiles CUDA's kernels as C: every thread of a block is a fiber, blocks run one after the other.
 *
 * A kernel becomes a function for one thread. Blocks run in an order by chance, and so do threads, in another one after
 * each barrier or shuffle; they change places only where they wait: what depends on their order shows. The order follows
 * from EMULATED_ORDER in the environment, a number, and from the launch; 0: blocks and threads as they are counted.
 * Shared memory is static, and that of a kernel's file (EMULATED_UNIT) is filled with 0xa5 before every block. In a build
 * with RACES=1 a launch fails in which threads race (races.h). */
#ifndef ORT_TEST_EMULATE_H
#define ORT_TEST_EMULATE_H

#include <stddef.h>
#include <stdint.h>

typedef struct emulated_index {
    unsigned x, y, z;
} emulated_index;

/* Of the thread that runs. */
extern __attribute__((visibility("default"))) struct emulated {
    emulated_index thread, block, threads, blocks;
} emulated;

#define threadIdx emulated.thread
#define blockIdx emulated.block
#define blockDim emulated.threads
#define gridDim emulated.blocks

/* A kernel, which the emulated driver finds by its name: one thread of it, with the address of its argument; the
 * argument's bytes; the shared memory of its file, or NULL. */
typedef void emulated_thread(const void *argument);
typedef struct emulated_kernel {
    emulated_thread *run;
    size_t bytes;
    const char *name;
    char *shared, *shared_end;
} emulated_kernel;

#ifndef EMULATED_UNIT
#define EMULATED_UNIT chain
#endif
#define EMULATED_TEXT(x) #x
#define EMULATED_SECTION(unit) EMULATED_TEXT(emulated_shared_##unit)
#define EMULATED_EDGES(unit) EMULATED_EDGES_OF(unit)
#define EMULATED_EDGES_OF(unit)                                                                                        \
    extern char __start_emulated_shared_##unit[] __attribute__((weak, visibility("hidden")));                          \
    extern char __stop_emulated_shared_##unit[] __attribute__((weak, visibility("hidden")))
#define EMULATED_EDGE(edge, unit) EMULATED_EDGE_OF(edge, unit)
#define EMULATED_EDGE_OF(edge, unit) __##edge##_emulated_shared_##unit
EMULATED_EDGES(EMULATED_UNIT);

#define KERNEL(name, args) EMULATED_KERNEL(name, args)
#define EMULATED_KERNEL(name, args)                                                                                    \
    static void name##_body(const args a);                                                                             \
    static void name##_thread(const void *argument) { name##_body(*(const args *)argument); }                          \
    extern const emulated_kernel name;                                                                                 \
    __attribute__((visibility("default"))) const emulated_kernel name = {                                              \
        name##_thread, sizeof(args), #name, EMULATED_EDGE(start, EMULATED_UNIT), EMULATED_EDGE(stop, EMULATED_UNIT)};  \
    static void name##_body(const args a)
#define DEVICE static inline __attribute__((unused))
#define FAR static __attribute__((unused))
#define EMULATED_SHARED(unit) __attribute__((section(EMULATED_SECTION(unit))))
#define SHARED(type, name, count) static EMULATED_SHARED(EMULATED_UNIT) type name[count]

#define EMULATED __attribute__((visibility("default"))) /* also for chains, which are compiled later */
EMULATED void emulated_barrier(void);
EMULATED void emulated_warp_barrier(void);
/* x of another lane of the warp, whose 32 threads all take part. */
EMULATED void emulated_exchange(void *x, size_t size, int lane);

/* Threads run one at a time. Atomics do not race (races.h). */
static __attribute__((unused, noinline, no_sanitize("thread"))) int32_t atomicMax(int32_t *at, int32_t x) {
    const int32_t before = *at;
    *at = x > before ? x : before;
    return before;
}

/* This one also among threads of the host that are none of the emulator's (test_fault_page.py), as is the fence. */
static __attribute__((unused, noinline, no_sanitize("thread"))) int32_t atomicCAS(int32_t *at, int32_t old, int32_t x) {
    return __sync_val_compare_and_swap(at, old, x);
}

static __attribute__((unused, noinline, no_sanitize("thread"))) void emulated_fence(void) { __sync_synchronize(); }

#define __syncthreads() emulated_barrier()
#define __syncwarp() emulated_warp_barrier()
#ifndef __threadfence_system
#define __threadfence_system() emulated_fence()
#endif
#define __shfl_xor_sync(mask, mine, other)                                                                             \
    __extension__({                                                                                                    \
        __typeof__(mine) exchanged_ = (mine);                                                                          \
        emulated_exchange(&exchanged_, sizeof exchanged_, (int)(threadIdx.x % 32) ^ (other));                          \
        exchanged_;                                                                                                    \
    })
#define __shfl_sync(mask, mine, lane)                                                                                  \
    __extension__({                                                                                                    \
        __typeof__(mine) exchanged_ = (mine);                                                                          \
        emulated_exchange(&exchanged_, sizeof exchanged_, (lane));                                                     \
        exchanged_;                                                                                                    \
    })

/* A bit of each lane's. */
EMULATED uint32_t emulated_ballot(int is_set);
#define __ballot_sync(mask, is_set) emulated_ballot((is_set) != 0)

/* Runs a kernel. False, with a sentence, when its threads wait for each other in vain, or race. */
int emulate(const emulated_kernel *f, unsigned blocks, unsigned threads, const void *argument, const char **why);

#endif
