/* races.h -- finds threads of a kernel that use the same memory with nothing between them, in a build with RACES=1.
 * Its kernels are compiled with -fsanitize=thread: the compiler calls a function of races.c for every access. */
#ifndef ORT_TEST_RACES_H
#define ORT_TEST_RACES_H

#include <stddef.h>

/* What is told of a launch as it goes on: its memory of its own, which no other thread sees, and the shared memory of its
 * kernel; a block that begins; a barrier of all its threads. Nothing is looked at before the first races_block and after
 * races_end. */
void races_begin(const void *own, size_t bytes, const char *shared, const char *shared_end);
void races_block(void);
void races_barrier(void);
/* NULL, or a sentence on the first race; it lasts until the next launch. */
const char *races_end(const char *kernel);

#endif
