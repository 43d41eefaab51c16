/* stored.c -- a file for each image: what it was made from, then a checksum, then the image. Its name is a digest of
 * the former; the file is only good if all of that is equal. */
#define _GNU_SOURCE
#include "cuda/stored.h"

#include "core/digest.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
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

    if (!path_of(folder, key, path) || !(f = fopen(path, "rbe"))) return NULL;
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
    (void)snprintf(part, sizeof part, "%s.%ld", path, (long)getpid());
    if (!(f = fopen(part, "wbe"))) return;
    good = fwrite(&h, sizeof h, 1, f) == 1 && fwrite(key->text, length, 1, f) == 1 && fwrite(image, bytes, 1, f) == 1;
    good = fclose(f) == 0 && good;
    if (!good || rename(part, path) != 0) (void)remove(part);
}
