/* memory.h -- memory of tensors and runs. Large blocks are kept for the next use: their pages are there already.
 *
 * What is kept never makes the process hold more than what was in use at one time. Safe from any thread. */
#ifndef ORT_CORE_MEMORY_H
#define ORT_CORE_MEMORY_H

#include <stddef.h>

/* `bytes` aligned to 64, contents undefined, until memory_give; NULL when there is no memory. */
void *memory_take(size_t bytes);
void memory_give(void *memory);
/* Returns what is kept to the system. */
void memory_trim(void);

typedef struct memory_state {
    size_t used, kept, peak; /* bytes of large blocks: in use, kept, most in use at one time since the last trim */
} memory_state;

memory_state memory_now(void);

#endif
