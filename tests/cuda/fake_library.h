/* fake_library.h -- declares what libraries of ours share whose calls make and change descriptions. Their file says
 * before what calls return: WRONG where an argument is, NO_MEMORY where a call was to fail. */
#ifndef ORT_TEST_FAKE_LIBRARY_H
#define ORT_TEST_FAKE_LIBRARY_H

#include "fake.h"

#include <stdlib.h>
#include <string.h>

static inline int complain(const char *what) {
    fake_complain(what);
    return WRONG;
}

#define ENTER()                                                                                                        \
    do {                                                                                                               \
        if (!fake_enter()) return NO_MEMORY;                                                                           \
    } while (0)

/* A copy of `size` bytes; of zeros, where `from` is NULL. */
static inline int make(void **out, const void *from, size_t size) {
    if (!(*out = calloc(1, size))) return NO_MEMORY;
    if (from) memcpy(*out, from, size);
    fake_hold(1);
    return 0;
}

static inline int give_back(void *what) {
    if (!what) return complain("nothing was given back");
    free(what);
    fake_hold(-1);
    return 0;
}

#endif
