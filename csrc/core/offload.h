/* offload.h -- keeps values of a forward outside of the arena until its backward: in a file, or the host's memory. */
#ifndef ORT_CORE_OFFLOAD_H
#define ORT_CORE_OFFLOAD_H

#include "core/ctx.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

enum { NO_FILE = -1 };

/* Of a run on the CPU a file without a name, of one on a GPU pinned memory (cuda/host/pinned.h): the other is absent. */
typedef struct offload_room {
    int file;     /* NO_FILE: there is none */
    void *memory; /* NULL: there is none */
    int64_t bytes;
} offload_room;

/* A new file of `bytes` bytes in `folder`, which nothing else can open and which is gone with the process. All of its
 * bytes are the disk's already: E_NOMEM, with the sentence that says how many it needs, where there is no room for them;
 * E_RUNTIME where no file can be made there. */
MUST_USE status offload_open(ctx *c, const char *folder, int64_t bytes, offload_room *out);
/* Gives the file back; safe twice. */
void offload_close(offload_room *room);
/* `bytes` bytes to the file's place `at`, and from there. E_RUNTIME, with the system's reason. */
MUST_USE status offload_write(ctx *c, const offload_room *room, int64_t at, const void *from, int64_t bytes);
MUST_USE status offload_read(ctx *c, const offload_room *room, int64_t at, void *to, int64_t bytes);

/* E_INVALID unless there is a room, and it has `end` bytes. */
MUST_USE status offload_check(ctx *c, const offload_room *room, int64_t end);

#endif
