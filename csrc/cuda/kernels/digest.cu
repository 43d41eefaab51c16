/* digest.cu -- mirrors core/digest.c: numbers that tell whether memory has changed.
 *
 * A block has a share of a tensor, whose words its threads take by turns, in chains as on the CPU; what they end with is
 * added up, each moved on by its thread's number: a change of one word is never lost, and sums of integers have no order. */
#include "cuda/kernels/kernel.h"

enum { MOST_DIGESTED = 128, DIGEST_THREADS = 256, DIGEST_CHAINS = 4 };

typedef struct digest_row {
    const void *from;
    int64_t bytes, first; /* of its blocks */
} digest_row;

typedef struct digest_args {
    digest_row rows[MOST_DIGESTED];
    uint64_t *found; /* [rows, parts], zeros */
    int64_t blocks;  /* of all rows */
    int32_t n, parts;
} digest_args;

#ifdef ORT_HOST
#include "cuda/kernels/digest.h"

_Static_assert(sizeof(digest_args) <= 4096, "what a launch may be given");

/* Blocks for a tensor, each with something to do. */
static int64_t shares_of(int64_t bytes) {
    const int64_t least = 8 * DIGEST_CHAINS * DIGEST_THREADS, n = (bytes + least - 1) / least;
    return n < 1 ? 1 : n > CUDA_DIGEST_PARTS ? CUDA_DIGEST_PARTS : n;
}

status cuda_digests(ctx *c, const cuda_run *where, const digest_bytes *tensors, int count, uint64_t *found) {
    static kernel words = {.name = "digest_words"};
    const call k = {.cuda = where};
    digest_args a = {.found = found, .parts = CUDA_DIGEST_PARTS};

    TRY(cuda_clear(c, &k, found, (size_t)count * CUDA_DIGEST_PARTS * sizeof *found));
    for (int i = 0; i < count; i++) {
        a.rows[a.n++] = (digest_row){tensors[i].from, tensors[i].bytes, a.blocks};
        a.blocks += shares_of(tensors[i].bytes);
        if (a.n < MOST_DIGESTED && i + 1 < count) continue;
        TRY(cuda_launch(c, &k, &words, geometry_over(a.blocks, 1, DIGEST_THREADS), &a));
        a.found += (int64_t)a.n * a.parts;
        a.n = 0;
        a.blocks = 0;
    }
    return OK;
}
#endif

#ifdef ORT_DEVICE
DEVICE uint64_t digest_step(uint64_t chain, uint64_t word) {
    chain = (chain ^ word) * 0x9e3779b97f4a7c15u;
    return chain << 31 | chain >> 33;
}

/* Word `i` of `row`, whose last one is filled up with zeros. */
DEVICE uint64_t digest_word(digest_row row, int64_t i) {
    const int64_t at = i * 8, left = row.bytes - at;
    const unsigned char *from = (const unsigned char *)row.from + at;
    uint64_t word = 0;

    if (left >= 8 && (uintptr_t)from % 8 == 0) return *(const uint64_t *)from;
    for (int b = 0; b < 8 && b < left; b++) word |= (uint64_t)from[b] << 8 * b;
    return word;
}

/* The row of a block. */
DEVICE int digest_row_of(const digest_args *a, int64_t block) {
    int low = 0, high = a->n - 1;
    while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (a->rows[middle].first <= block) low = middle;
        else high = middle - 1;
    }
    return low;
}

KERNEL(digest_words, digest_args) {
    SHARED(uint64_t, ends, DIGEST_THREADS);

    FOR_BLOCKS(block, a.blocks) {
        const int at = digest_row_of(&a, block);
        const digest_row row = a.rows[at];
        const int64_t part = block - row.first, parts = (at + 1 < a.n ? a.rows[at + 1].first : a.blocks) - row.first;
        const int64_t words = (row.bytes + 7) / 8, apart = parts * DIGEST_THREADS;
        uint64_t chain[DIGEST_CHAINS], all = (uint64_t)row.bytes;

        for (int c = 0; c < DIGEST_CHAINS; c++) chain[c] = (uint64_t)c;
        for (int64_t i = part * DIGEST_THREADS + threadIdx.x; i < words; i += DIGEST_CHAINS * apart) {
            uint64_t word[DIGEST_CHAINS];
            UNROLL for (int c = 0; c < DIGEST_CHAINS; c++) word[c] =
                i + c * apart < words ? digest_word(row, i + c * apart) : 0;
            UNROLL for (int c = 0; c < DIGEST_CHAINS; c++) chain[c] = digest_step(chain[c], word[c]);
        }
        UNROLL for (int c = 0; c < DIGEST_CHAINS; c++) all = digest_step(all, chain[c]);
        __syncthreads(); /* the sums of another share have been read */
        ends[threadIdx.x] = digest_step(all, threadIdx.x);
        __syncthreads();
        if (threadIdx.x) continue;
        all = 0;
        for (int t = 0; t < DIGEST_THREADS; t++) all += ends[t];
        a.found[(int64_t)at * a.parts + part] = all;
    }
}
#endif
