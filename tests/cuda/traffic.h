/* traffic.h -- counts the bytes of global memory that the threads of kernels read and write, in a build with RACES=1.
 *
 * What the account of bytes (benchmarks/roofline_plan.py) says of a kernel is compared with what it does. Shared memory,
 * a thread's own, arguments and constant tables are not counted. */
#ifndef ORT_TEST_TRAFFIC_H
#define ORT_TEST_TRAFFIC_H

#include "fake.h"

#include <stdint.h>

/* What is told: a launch of a kernel with its argument, a block that begins, a byte that a thread reads or writes;
 * `is_first`: no thread of the launch has before. */
void traffic_begin(const char *kernel, const void *argument, unsigned long bytes);
void traffic_block(void);
void traffic_see(uintptr_t address, int is_write, int is_first, unsigned thread);

/* For tests. */
enum {
    TRAFFIC_LAUNCHES,
    TRAFFIC_READ,
    TRAFFIC_WRITTEN,
    TRAFFIC_FIRST_READ,
    TRAFFIC_FIRST_WRITTEN,
    TRAFFIC_MOST,
    TRAFFIC_NUMBERS
};
EXPORT int fake_traffic_is_counted(void);
/* Forgets all counts, and what is watched. */
EXPORT void fake_traffic_forget(void);
/* Of the kernels that have run, by name: how many, -1 where there are too many; the i-th one's name; one of the numbers
 * above. The most is of bytes that one thread has read in a block. */
EXPORT int fake_traffic_kernels(void);
EXPORT const char *fake_traffic_name(int i);
EXPORT unsigned long fake_traffic_of(int i, int what);
/* Of a piece of memory: bytes that all have read, or written. */
EXPORT void fake_traffic_watch(int which, const char *from, unsigned long bytes);
EXPORT unsigned long fake_traffic_watched(int which, int is_write);

#endif
