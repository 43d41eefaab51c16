/* memory.h -- gives memory to tensors and runs. Large blocks are kept for the next use: their pages are there already.
 *
 * What is kept never makes the process hold more than what was in use at one time. Safe from any thread. */
#ifndef ORT_CORE_MEMORY_H
#define ORT_CORE_MEMORY_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* `bytes` aligned to 64, contents undefined, until memory_give; NULL when there is no memory: what the kernel would end the
 * process for (core/limit.h) is not taken. */
void *memory_take(size_t bytes);
/* Whether blocks of so many bytes in all could be taken now. */
bool memory_would_fit(size_t bytes);
void memory_give(void *memory);
/* Bytes [offset, offset + bytes) of a block are not used any more, up to memory_give: whole pages there go to the system
 * when memory is needed. Each byte once; MEMORY_TO_ITS_END takes in all that the block has behind `offset`. */
#define MEMORY_TO_ITS_END (SIZE_MAX / 2)
void memory_spare(void *memory, size_t offset, size_t bytes);
/* Tests: `count` blocks can be taken from now on, then none; negative: any number. */
void memory_fail_after(int64_t count);
/* Returns what is kept to the system. */
void memory_trim(void);

typedef struct memory_state {
    size_t used, kept,
        peak; /* bytes of large blocks: in use, kept or spare, most in use at one time since the last trim */
} memory_state;

memory_state memory_now(void);
/* The most bytes of large blocks that were in use at one time since this was asked last. */
size_t memory_most(void);

#endif
