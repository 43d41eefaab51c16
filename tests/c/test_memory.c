/* test_memory.c -- tests that large blocks are kept, and never more than were in use at one time. */
#include "core/memory.h"

#include "test.h"

#include <pthread.h>
#include <string.h>

enum { MB = 1 << 20 };

TEST(memory_is_aligned_and_writable) {
    for (size_t bytes = 0; bytes < 80 * (size_t)MB; bytes = bytes * 5 + 1) {
        char *m = memory_take(bytes);
        CHECK(m != NULL && (uintptr_t)m % 64 == 0);
        memset(m, 1, bytes);
        memory_give(m);
    }
    memory_give(NULL);
    CHECK(memory_take(SIZE_MAX / 2) == NULL);
    CHECK(memory_take((size_t)1 << 46) == NULL); /* promised by the system, but no machine has it */
    memory_trim();
}

#ifndef ORT_SANITIZE /* else nothing is kept */
TEST(a_block_is_used_again) {
    char *a = memory_take(20 * MB), *b;

    memory_give(a);
    b = memory_take(20 * MB);
    CHECK(a == b);
    memory_give(b);
    b = memory_take(30 * MB); /* within what was reserved */
    CHECK(a == b);
    memset(b, 1, 30 * MB);
    memory_give(b);
    b = memory_take(2 * MB); /* far too large for this */
    CHECK(a != b);
    memory_give(b);
    memory_trim();
    CHECK(memory_now().kept == 0 && memory_now().used == 0);
}

TEST(no_more_is_held_than_was_in_use) {
    void *a = memory_take(3 * MB), *b = memory_take(5 * MB), *c;
    size_t peak = memory_now().peak;

    CHECK(memory_now().used == peak && peak >= 8 * (size_t)MB);
    memory_give(a);
    memory_give(b);
    CHECK(memory_now().kept == peak);
    c = memory_take(7 * MB); /* fits none: what is kept makes room */
    CHECK(memory_now().used + memory_now().kept <= peak);
    memory_give(c);
    CHECK(memory_now().kept <= peak && memory_now().used == 0);
    memory_trim();
}

TEST(a_large_block_does_not_go_for_a_small_one) {
    void *large = memory_take(40 * MB), *small[4], *c;
    const size_t used = memory_now().used;

    for (int i = 0; i < 4; i++) small[i] = memory_take(2 * MB);
    memory_give(large);
    for (int i = 0; i < 4; i++) memory_give(small[i]);
    c = memory_take(5 * MB); /* fits none; three small ones make room */
    CHECK(memory_now().kept >= used && memory_now().kept < used + 4 * (size_t)MB);
    memory_give(c);
    memory_trim();
    CHECK(memory_now().kept == 0);
}

TEST(spare_pages_stay_until_memory_is_needed) {
    char *a = memory_take(40 * MB), *b;
    const size_t all = memory_now().used;

    memset(a, 1, 40 * MB);
    memory_spare(a, 10 * MB, 20 * MB);
    memory_spare(a, 35 * MB, MEMORY_TO_ITS_END);
    memory_spare(a, 100, 200); /* no whole page */
    CHECK(memory_now().used + memory_now().kept == all && memory_now().kept >= 25 * (size_t)MB - 8192);
    CHECK(a[11 * MB] == 1);
    b = memory_take(22 * MB);
    CHECK(memory_now().used + memory_now().kept <= all && memory_now().peak == all);
    CHECK(a[0] == 1 && a[10 * MB - 1] == 1 && a[30 * MB] == 1 && a[35 * MB - 1] == 1);
    memory_give(a);
    CHECK(memory_now().used + memory_now().kept <= all);
    CHECK(memory_take(40 * MB) == a); /* and what is gone comes again */
    CHECK(memory_now().used > all);
    memset(a, 2, 40 * MB);
    memory_give(a);
    memory_give(b);
    CHECK(memory_now().used == 0);
    memory_trim();
    CHECK(memory_now().kept == 0);
}

TEST(spare_pages_are_all_that_is_kept) {
    char *a = memory_take(20 * MB);

    memory_spare(a, 0, 10 * MB);
    memory_spare(a, 10 * MB, 10 * MB);
    memory_trim();
    CHECK(memory_now().kept == 0 && memory_now().used < MB);
    memory_give(a);
    CHECK(memory_now().used == 0);
    memory_trim();
    CHECK(memory_now().kept == 0 && memory_now().used == 0);
}

TEST(what_a_block_has_beyond_what_is_asked_for_is_spare) {
    char *a = memory_take(40 * MB), *b;
    const size_t all = memory_now().used;

    memory_give(a);
    b = memory_take(25 * MB);
    CHECK(a == b && memory_now().used < 25 * (size_t)MB + 8192);
    CHECK(memory_now().used + memory_now().kept == all);
    memory_spare(b, 20 * MB, MEMORY_TO_ITS_END); /* not what is spare already */
    CHECK(memory_now().used < 20 * (size_t)MB + 8192 && memory_now().used + memory_now().kept == all);
    memset(b, 1, 20 * MB);
    memory_trim();
    CHECK(memory_now().kept == 0 && b[20 * MB - 1] == 1);
    memory_give(b);
    CHECK(memory_now().used == 0 && memory_now().kept < 20 * (size_t)MB + 8192);
    b = memory_take(30 * MB); /* grows again */
    CHECK(a == b && memory_now().used + memory_now().kept < 30 * (size_t)MB + 8192);
    memset(b, 1, 30 * MB);
    memory_give(b);
    memory_trim();
    CHECK(memory_now().kept == 0 && memory_now().used == 0);
}

TEST(the_most_since_it_was_asked) {
    void *a = memory_take(5 * MB), *b;

    (void)memory_most();
    b = memory_take(9 * MB);
    memory_give(b);
    CHECK(memory_most() >= 14 * (size_t)MB && memory_most() < 6 * (size_t)MB);
    memory_give(a);
    memory_trim();
}
#endif

static void *take_and_give(void *unused) {
    for (int i = 0; i < 300; i++) {
        size_t bytes = (size_t)(1 + i % 7) * MB;
        char *m = memory_take(bytes);
        if (m) m[0] = m[bytes - 1] = 1;
        memory_give(m);
    }
    return unused;
}

TEST(threads_take_and_give) {
    pthread_t threads[4];

    for (int i = 0; i < 4; i++) CHECK(pthread_create(&threads[i], NULL, take_and_give, NULL) == 0);
    for (int i = 0; i < 4; i++) CHECK(pthread_join(threads[i], NULL) == 0);
    CHECK(memory_now().used == 0);
    memory_trim();
}
