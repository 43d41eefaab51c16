/* arena.h -- holds the memory of building: bump allocation, freed all at once, so a failing build cleans up nothing. */
#ifndef ORT_CORE_ARENA_H
#define ORT_CORE_ARENA_H

#include <stddef.h>
#include <stdint.h>

struct ctx;
typedef struct arena_block arena_block;

typedef struct arena {
    arena_block *blocks; /* newest first */
    size_t total;        /* bytes taken from malloc */
    int64_t fail_after;  /* tests: so many allocations succeed, then all fail; negative: never */
} arena;

/* `count * size` zeroed bytes, alive until arena_free; aligned to 64, if they are fewer to 16. NULL with E_NOMEM written into
 * `c`. */
void *arena_array(struct ctx *c, size_t count, size_t size);
/* The list with room for an element behind its `count`: a copy with twice the room, where `*room` is used up. The arena
 * keeps what was outgrown. NULL: as arena_array. */
void *arena_more(struct ctx *c, void *list, int count, size_t size, int *room);
/* A copy of `length` bytes and a NUL. */
char *arena_text(struct ctx *c, const char *text, size_t length);
void arena_free(arena *a);

/* TRY(NEW(c, pointer, count)): the element type comes from the pointer. */
#define NEW(c, pointer, count)                                                                                         \
    (((pointer) = arena_array((c), (size_t)(count), sizeof *(pointer))) != NULL ? OK : E_NOMEM)
/* TRY(MORE(c, list, count, room)): before another element is written to list[count]. */
#define MORE(c, list, count, room)                                                                                     \
    (((list) = arena_more((c), (list), (count), sizeof *(list), &(room))) != NULL ? OK : E_NOMEM)

#endif
