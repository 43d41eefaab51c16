/* test_philox.c -- compares the generator with a plain rendering of its definition, whose first numbers are the
 * published ones. The vector form is this CPU's. */
#include "core/philox.h"

#include "test.h"

/* Ten rounds on one counter. */
static void philox(const uint32_t key[2], uint32_t x[4]) {
    uint32_t k0 = key[0], k1 = key[1];
    for (int round = 0; round < 10; round++) {
        uint64_t a = (uint64_t)x[0] * 0xD2511F53u, c = (uint64_t)x[2] * 0xCD9E8D57u;
        uint32_t y[4] = {(uint32_t)(c >> 32) ^ x[1] ^ k0, (uint32_t)c, (uint32_t)(a >> 32) ^ x[3] ^ k1, (uint32_t)a};
        memcpy(x, y, sizeof y);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
}

TEST(philox_definition) {
    uint32_t key[2] = {0, 0}, zero[4] = {0};
    uint32_t ones_key[2] = {~0u, ~0u}, ones[4] = {~0u, ~0u, ~0u, ~0u};

    philox(key, zero);
    CHECK(zero[0] == 0x6627e8d5 && zero[1] == 0xe169c58d && zero[2] == 0xbc57ac4c && zero[3] == 0x9b00dbd8);
    philox(ones_key, ones);
    CHECK(ones[0] == 0x408f276d && ones[1] == 0x41c83b0e && ones[2] == 0xa20bc7c6 && ones[3] == 0x6d5451fd);
}

/* Position 16 w + 2 i + h of a group holds word w of counter 8 h + i. */
TEST(philox_positions) {
    static const uint64_t seeds[] = {0, 1, 0x123456789abcdef0u, ~UINT64_C(0)};
    static const int64_t firsts[] = {0, 5, (INT64_C(1) << 28) - 1, INT64_C(1) << 40}; /* a carry into the second word */
    uint32_t found[3 * PHILOX_GROUP];

    for (int s = 0; s < 4; s++)
        for (int f = 0; f < 4; f++) {
            const uint32_t key = 77u * (uint32_t)s, run_key[2] = {(uint32_t)seeds[s], (uint32_t)(seeds[s] >> 32)};
            philox_fill(seeds[s], key, firsts[f], 3, found);
            for (int at = 0; at < 3 * PHILOX_GROUP; at++) {
                int place = at % PHILOX_GROUP, counter = 8 * (place % 2) + place % 16 / 2;
                uint64_t n = (uint64_t)(firsts[f] + at / PHILOX_GROUP) * 16 + (uint64_t)counter;
                uint32_t x[4] = {(uint32_t)n, (uint32_t)(n >> 32), key, 0};
                philox(run_key, x);
                CHECK(found[at] == x[place / 16]);
            }
        }
}

TEST(philox_in_pieces) {
    uint32_t whole[9 * PHILOX_GROUP], piece[PHILOX_GROUP];

    philox_fill(42, 7, 100, 9, whole);
    for (int g = 0; g < 9; g++) {
        philox_fill(42, 7, 100 + g, 1, piece);
        CHECK(memcmp(piece, whole + g * PHILOX_GROUP, sizeof piece) == 0);
    }
}
