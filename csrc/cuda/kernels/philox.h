/* philox.h -- gives kernels the random words of core/philox.c, of a counter or of an element. */
#ifndef ORT_CUDA_PHILOX_H
#define ORT_CUDA_PHILOX_H

#ifdef ORT_DEVICE
/* The four words of a counter. */
DEVICE void draw(uint64_t seed, uint32_t key, uint64_t counter, uint32_t word[4]) {
    uint32_t x = (uint32_t)counter, y = (uint32_t)(counter >> 32), z = key, w = 0;
    uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);

    for (int r = 0; r < 10; r++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
        const uint64_t p = (uint64_t)x * 0xD2511F53u, q = (uint64_t)z * 0xCD9E8D57u;
        x = (uint32_t)(q >> 32) ^ y ^ k0;
        y = (uint32_t)q;
        z = (uint32_t)(p >> 32) ^ w ^ k1;
        w = (uint32_t)p;
    }
    word[0] = x, word[1] = y, word[2] = z, word[3] = w;
}

/* Of counter n in [0, 16) of a group: the place of its first word. */
DEVICE int place_of(int n) { return 2 * (n % 8) + n / 8; }

/* The counter that has an element's word, which is number position % 64 / 16 of its four. */
DEVICE uint64_t counter_of(int64_t position) {
    const int place = (int)(position % 16);
    return (uint64_t)(position / 64 * 16 + place / 2 + 8 * (place % 2));
}

/* The word of an element. */
DEVICE uint32_t word_of(uint64_t seed, uint32_t key, int64_t position) {
    uint32_t word[4];

    draw(seed, key, counter_of(position), word);
    const int which =
        (int)(position % 64 / 16); /* chosen by comparing, since an index would put the words into memory */
    return which == 0 ? word[0] : which == 1 ? word[1] : which == 2 ? word[2] : word[3];
}

#ifdef AT_ONCE
/* Of AT_ONCE neighbours of this lane's those whose word is at least so, a bit each. A counter's words are of elements 16
 * apart, a lane's elements lie together: so the warp, whose lanes all call this, draws for all of its elements, and each
 * lane takes its own. counter[turn]: what this lane draws in a turn, number turn * WARP + lane of the warp's. */
DEVICE uint32_t kept_of_counters(uint64_t seed, uint32_t key, uint32_t least, const uint64_t counter[AT_ONCE / 4]) {
    const int from = threadIdx.x % WARP * AT_ONCE;
    uint32_t mine = 0, kept = 0;

    UNROLL for (int turn = 0; turn < AT_ONCE / 4; turn++) {
        uint32_t word[4];
        draw(seed, key, counter[turn], word);
        UNROLL for (int i = 0; i < 4; i++) {
            const uint32_t all = __ballot_sync(0xffffffffu, word[i] >= least);
            if (from / 128 == turn && from % 64 / 16 == i) mine = all;
        }
    }
    /* The words of even places, and of odd ones, are neighbours; a lane begins at the first place of 16, or the ninth. */
    mine >>= from / 64 % 2 * 16 + from % 16 / 2;
    UNROLL for (int j = 0; j < AT_ONCE; j++) kept |= (mine >> (j / 2 + 8 * (j % 2)) & 1) << j;
    return kept;
}

/* The same of elements [first, first + AT_ONCE), where the warp's first is a multiple of 64. */
DEVICE uint32_t kept_bits(uint64_t seed, uint32_t key, uint32_t least, int64_t first) {
    const int lane = threadIdx.x % WARP;
    uint64_t counter[AT_ONCE / 4];

    UNROLL for (int turn = 0; turn < AT_ONCE / 4; turn++) counter[turn] =
        (uint64_t)(first - lane * AT_ONCE) / 4 + turn * WARP + lane;
    return kept_of_counters(seed, key, least, counter);
}
#endif
#endif

#endif
