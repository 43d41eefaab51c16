/* parallel.h -- loops over torch's OpenMP threads, and the attribute that compiles a loop for several CPUs. */
#ifndef ORT_CORE_PARALLEL_H
#define ORT_CORE_PARALLEL_H

#include <stdint.h>

/* Put before a function whose loops should be vectorised: the widest version the CPU runs is chosen when the
 * extension is loaded. A function that is inlined into a SIMD one is compiled with it; SIMD_PART makes sure of that,
 * for helpers that the compiler would keep apart, compiled for the oldest CPU. */
#define SIMD_PART static inline __attribute__((always_inline))
#if !defined(ORT_SANITIZE) && !__SANITIZE_THREAD__ && defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define SIMD __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define SIMD
#endif

typedef void range_fn(void *arg, int64_t begin, int64_t end);

/* Calls body(arg, begin, end) over parts of [0, count), each but the last at least `grain` long. A range is cut the
 * same way whatever runs it, never overlaps another, and is empty only when count is 0 (then body is not called). */
void parallel_for(int64_t count, int64_t grain, range_fn *body, void *arg);
int parallel_threads(void);

/* About this many simple operations are worth a thread. */
enum { GRAIN = 16384 };
/* Rows a thread should take when each row holds `width` elements. */
static inline int64_t parallel_rows(int64_t width) { return width >= GRAIN ? 1 : GRAIN / (width > 0 ? width : 1); }

#endif
