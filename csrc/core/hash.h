/* hash.h -- hashes what is mixed in, word after word. */
#ifndef ORT_CORE_HASH_H
#define ORT_CORE_HASH_H

#include <stdint.h>

static inline uint64_t hash_mix(uint64_t h, uint64_t x) {
    h = (h ^ x) * UINT64_C(0x9e3779b97f4a7c15);
    return h ^ (h >> 29);
}

#endif
