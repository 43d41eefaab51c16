/* offload.c -- writes and reads a file without a name, by position.
 *
 * It is not mapped: a disk that fails would end the process with a signal then, where a call says why. Nor are its pages
 * counted as memory of the process. */
#define _GNU_SOURCE
#include "core/offload.h"

#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { OWNER_ALONE = 0600, TRIES = 100, LONGEST_PATH = 4096 };

/* Where the file system has no files without names: a new one, whose name is gone at once. */
static int open_and_unlink(const char *folder) {
    char path[LONGEST_PATH];
    int file = NO_FILE;

    for (int i = 0; i < TRIES && file < 0; i++) {
        const int length = snprintf(path, sizeof path, "%s/ortmodule-offload-%ld-%d", folder, (long)getpid(), i);
        if (length < 0 || (size_t)length >= sizeof path) {
            errno = ENAMETOOLONG;
            return NO_FILE;
        }
        file = open(path, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, OWNER_ALONE);
        if (file < 0 && errno != EEXIST) return NO_FILE;
    }
    if (file >= 0) (void)unlink(path);
    return file;
}

static int open_in(const char *folder) {
#ifdef O_TMPFILE
    const int file = open(folder, O_TMPFILE | O_RDWR | O_EXCL | O_CLOEXEC, OWNER_ALONE);
    if (file >= 0 || (errno != EOPNOTSUPP && errno != EISDIR && errno != EINVAL)) return file;
#endif
    return open_and_unlink(folder);
}

status offload_open(ctx *c, const char *folder, int64_t bytes, offload_room *out) {
    int failed;

    *out = (offload_room){.file = open_in(folder), .bytes = bytes};
    if (out->file < 0)
        return fail(c, E_RUNTIME, "activations cannot be offloaded to a file in %s: %s", folder, strerror(errno));
    do failed = bytes > 0 ? posix_fallocate(out->file, 0, (off_t)bytes) : 0;
    while (failed == EINTR);
    if (!failed) return OK;
    offload_close(out);
    return fail(c, failed == ENOSPC || failed == EFBIG || failed == EDQUOT ? E_NOMEM : E_RUNTIME,
                "activations cannot be offloaded to a file of %" PRId64 " bytes in %s: %s", bytes, folder,
                strerror(failed));
}

void offload_close(offload_room *room) {
    if (room->file >= 0) (void)close(room->file);
    room->file = NO_FILE;
}

static status failed_at(ctx *c, const char *what, ssize_t done) {
    return fail(c, E_RUNTIME, "the file of offloaded activations cannot be %s: %s", what,
                done < 0 ? strerror(errno) : "it has fewer bytes than it had");
}

status offload_write(ctx *c, const offload_room *room, int64_t at, const void *from, int64_t bytes) {
    for (int64_t sum = 0; sum < bytes;) {
        const ssize_t done = pwrite(room->file, (const char *)from + sum, (size_t)(bytes - sum), (off_t)(at + sum));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return failed_at(c, "written", done);
        sum += done;
    }
    return OK;
}

status offload_read(ctx *c, const offload_room *room, int64_t at, void *to, int64_t bytes) {
    for (int64_t sum = 0; sum < bytes;) {
        const ssize_t done = pread(room->file, (char *)to + sum, (size_t)(bytes - sum), (off_t)(at + sum));
        if (done < 0 && errno == EINTR) continue;
        if (done <= 0) return failed_at(c, "read", done);
        sum += done;
    }
    return OK;
}

status offload_check(ctx *c, const offload_room *room, int64_t end) {
    if (room && end <= room->bytes) return OK;
    return fail(c, E_INVALID, "this run has no room for the activations that it offloads");
}
