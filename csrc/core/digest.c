/* digest.c -- pieces of a megabyte, each by eight independent chains, so that reading the memory is what takes time.
 *
 * A step of a chain is a bijection of what it holds for given bytes and of the bytes for what it holds: a change of one
 * word is never lost. The rotation brings high bits, which a product only moves up, down again. */
#include "core/digest.h"

#include "core/parallel.h"

#include <stdlib.h>
#include <string.h>

enum { CHAINS = 8, PIECE = 1 << 20 };

static const uint64_t factor = UINT64_C(0x9e3779b97f4a7c15);

static inline uint64_t step(uint64_t chain, uint64_t word) {
    chain = (chain ^ word) * factor;
    return chain << 31 | chain >> 33;
}

static uint64_t digest_piece(const unsigned char *from, size_t bytes, uint64_t seed) {
    uint64_t chain[CHAINS], word[CHAINS], all = seed;

    for (int i = 0; i < CHAINS; i++) chain[i] = seed + (uint64_t)i * factor;
    for (; bytes >= sizeof word; from += sizeof word, bytes -= sizeof word) {
        memcpy(word, from, sizeof word);
        for (int i = 0; i < CHAINS; i++) chain[i] = step(chain[i], word[i]);
    }
    memset(word, 0, sizeof word);
    if (bytes) memcpy(word, from, bytes);
    for (int i = 0; i < CHAINS; i++) all = step(all, step(step(chain[i], word[i]), bytes));
    return step(all, all >> 32);
}

typedef struct job {
    const unsigned char *from;
    size_t bytes;
    uint64_t *found; /* [pieces] */
} job;

static void digest_range(void *arg, int64_t begin, int64_t end) {
    const job *j = arg;
    for (int64_t i = begin; i < end; i++) {
        size_t at = (size_t)i * PIECE, left = j->bytes - at;
        j->found[i] = digest_piece(j->from + at, left < PIECE ? left : PIECE, (uint64_t)i);
    }
}

_Bool digest(const void *memory, size_t bytes, uint64_t *out) {
    const size_t pieces = (bytes + PIECE - 1) / PIECE;
    job j = {memory, bytes, malloc((pieces + 1) * sizeof *j.found)};

    if (!j.found) return 0;
    parallel_for((int64_t)pieces, 4, digest_range, &j);
    *out = digest_piece((const unsigned char *)j.found, pieces * sizeof *j.found, bytes);
    free(j.found);
    return 1;
}
