/* stored.h -- keeps compiled kernels in a folder. */
#ifndef ORT_CUDA_STORED_H
#define ORT_CUDA_STORED_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* What an image was made from. Versions, architectures and headers are in `kind`. */
typedef struct stored_key {
    const char *text;
    uint64_t kind[3];
} stored_key;

/* The image that was kept for this very key, to be given to free; NULL: there is none, it is damaged, or
 * another user may have written it. */
void *stored_read(const char *folder, const stored_key *key, size_t *bytes);
/* Keeps it, if it can: a file appears whole or not at all. */
void stored_write(const char *folder, const stored_key *key, const void *image, size_t bytes);

#endif
