/* stored.c -- keeps a file for each image: what it was made from, then a checksum, then the image. Its name is a digest
 * of the former. A file is only good if all of that is equal, and if this user or root wrote it: a GPU runs it. */
#define _GNU_SOURCE
#include "cuda/host/stored.h"

#include "core/digest.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { LONGEST_PATH = 4200, LARGEST = 1 << 26 };

typedef struct header {
    char magic[16];
    uint64_t kind[3], text_bytes, image_bytes, digest;
} header;
static const char magic[16] = "ortmodule chain";

static bool path_of(const char *folder, const stored_key *key, char path[LONGEST_PATH]) {
    uint64_t of_text = 0, of_kind = 0;
    return digest(key->text, strlen(key->text), &of_text) && digest(key->kind, sizeof key->kind, &of_kind) &&
           snprintf(path, LONGEST_PATH, "%s/%016" PRIx64 "%016" PRIx64 ".cubin", folder, of_text, of_kind) <
               LONGEST_PATH;
}

/* A regular file, behind no symbolic link, that this user or root has, and that others cannot write. NULL: there is none.
 * O_NONBLOCK: opening a pipe would wait for a writer. */
static FILE *open_own(const char *path) {
    const int file = open(path, O_RDONLY | O_NOFOLLOW | O_NONBLOCK | O_CLOEXEC);
    struct stat s;
    FILE *f = NULL;

    if (file < 0) return NULL;
    if (fstat(file, &s) == 0 && S_ISREG(s.st_mode) && (s.st_uid == geteuid() || s.st_uid == 0) &&
        !(s.st_mode & (S_IWGRP | S_IWOTH)))
        f = fdopen(file, "rb");
    if (!f) (void)close(file);
    return f;
}

/* A new file of a name of its own beside `path`, which only this user can read; `part` is its name. */
static FILE *make_part(const char *path, char *part, size_t size) {
    FILE *f;
    int file;

    (void)snprintf(part, size, "%s.XXXXXX", path);
    if ((file = mkostemp(part, O_CLOEXEC)) < 0) return NULL;
    if (!(f = fdopen(file, "wb"))) {
        (void)close(file);
        (void)remove(part);
    }
    return f;
}

static void *read_image(FILE *f, const stored_key *key, size_t *bytes) {
    const size_t length = strlen(key->text);
    header h;
    uint64_t found = 0;
    char *content = NULL, end;
    bool good = fread(&h, sizeof h, 1, f) == 1 && memcmp(h.magic, magic, sizeof magic) == 0 &&
                memcmp(h.kind, key->kind, sizeof h.kind) == 0 && h.text_bytes == length && h.image_bytes > 0 &&
                h.image_bytes <= LARGEST && (content = malloc(length + h.image_bytes)) != NULL;

    good = good && fread(content, length + h.image_bytes, 1, f) == 1 && fread(&end, 1, 1, f) == 0 &&
           memcmp(content, key->text, length) == 0 && digest(content + length, h.image_bytes, &found) &&
           found == h.digest;
    if (!good) {
        free(content);
        return NULL;
    }
    memmove(content, content + length, h.image_bytes);
    *bytes = h.image_bytes;
    return content;
}

void *stored_read(const char *folder, const stored_key *key, size_t *bytes) {
    char path[LONGEST_PATH];
    FILE *f;
    void *image;

    if (!path_of(folder, key, path) || !(f = open_own(path))) return NULL;
    image = read_image(f, key, bytes);
    (void)fclose(f);
    return image;
}

void stored_write(const char *folder, const stored_key *key, const void *image, size_t bytes) {
    const size_t length = strlen(key->text);
    header h = {.text_bytes = length, .image_bytes = bytes};
    char path[LONGEST_PATH], part[LONGEST_PATH + 32];
    FILE *f;
    bool good;

    memcpy(h.magic, magic, sizeof magic);
    memcpy(h.kind, key->kind, sizeof h.kind);
    if (bytes == 0 || bytes > LARGEST || !path_of(folder, key, path) || !digest(image, bytes, &h.digest)) return;
    if (!(f = make_part(path, part, sizeof part))) return;
    good = fwrite(&h, sizeof h, 1, f) == 1 && fwrite(key->text, length, 1, f) == 1 && fwrite(image, bytes, 1, f) == 1;
    good = fclose(f) == 0 && good;
    if (!good || rename(part, path) != 0) (void)remove(part);
}
