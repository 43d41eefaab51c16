/* digest.h -- tells by 64 bits whether memory has changed. */
#ifndef ORT_CORE_DIGEST_H
#define ORT_CORE_DIGEST_H

#include <stddef.h>
#include <stdint.h>

/* Equal for equal bytes, whatever the number of threads; of two others it is the same once in 2^64. It is no defence
 * against who chooses the bytes. *out belongs to the caller. False: there is no memory to compute it. */
_Bool digest(const void *memory, size_t bytes, uint64_t *out);

#endif
