/* order.cu -- a stable radix sort of numbers by their keys, a digit of 8 bits at a time, the lowest first.
 *
 * A block has a chunk of the numbers; thread d of it has those of digit d, of which it finds in order how many there are,
 * then where each goes. Threads read the same digit at the same time, so nothing waits, and nothing is counted by
 * atomics. */
#include "cuda/kernels/kernel.h"
#include "cuda/kernels/stretches.h"

typedef struct order_args {
    const int32_t *key, *index; /* index: NULL where every number is at its own place */
    int32_t *key_out, *index_out, *counts;
    int64_t count, chunks;
    int32_t shift;
} order_args;

enum { DIGIT = 8, DIGITS = 1 << DIGIT, ORDER_CHUNK = 2048 };

#ifdef ORT_HOST
#include "cuda/kernels/order.h"

static int64_t chunks_of(int64_t count) { return (count + ORDER_CHUNK - 1) / ORDER_CHUNK; }

size_t cuda_order_bytes(int64_t count) {
    return count > INT32_MAX ? 0 : (size_t)(4 * count + DIGITS * chunks_of(count)) * sizeof(int32_t);
}

status cuda_order_by(ctx *c, const call *k, void *work, int64_t count, int64_t limit, cuda_order *out) {
    static kernel counting = {.name = "order_count"}, adding = {.name = "order_scan"},
                  placing = {.name = "order_place"};
    int32_t *at = work;
    int32_t *keys[2] = {at, at ? at + count : NULL};
    int32_t *indices[2] = {at ? at + 2 * count : NULL, at ? at + 3 * count : NULL};
    order_args a = {.counts = at ? at + 4 * count : NULL, .count = count, .chunks = chunks_of(count)};
    int now = 0;

    if (count > INT32_MAX || limit > INT32_MAX) return fail(c, E_UNSUPPORTED, "an order of more than 2^31 numbers");
    do {
        const geometry chunks = geometry_over(a.chunks, 1, DIGITS);
        a.key = keys[now];
        a.index = a.shift ? indices[now] : NULL;
        a.key_out = keys[!now];
        a.index_out = indices[!now];
        TRY(cuda_launch(c, k, &counting, chunks, &a));
        TRY(cuda_launch(c, k, &adding, (geometry){a.chunks ? 1 : 0, STRETCHES}, &a));
        TRY(cuda_launch(c, k, &placing, chunks, &a));
        now = !now;
        a.shift += DIGIT;
    } while (a.shift < 32 && (limit - 1) >> a.shift > 0);
    *out = (cuda_order){keys[now], indices[now]};
    return OK;
}
#endif

#ifdef ORT_DEVICE
DEVICE int numbers_of(const order_args *a, int64_t chunk) {
    const int64_t left = a->count - chunk * ORDER_CHUNK;
    return (int)(left < ORDER_CHUNK ? left : ORDER_CHUNK);
}

DEVICE void read_digits(const order_args *a, int64_t chunk, uint8_t *digit) {
    __syncthreads(); /* those of the chunk before have been read */
    FOR_THREADS(i, numbers_of(a, chunk)) digit[i] = (uint8_t)(a->key[chunk * ORDER_CHUNK + i] >> a->shift);
    __syncthreads();
}

KERNEL(order_count, order_args) {
    SHARED(uint8_t, digit, ORDER_CHUNK);
    FOR_BLOCKS(chunk, a.chunks) {
        const int n = numbers_of(&a, chunk);
        int32_t found = 0;
        read_digits(&a, chunk, digit);
        for (int i = 0; i < n; i++) found += digit[i] == threadIdx.x;
        a.counts[threadIdx.x * a.chunks + chunk] = found;
    }
}

/* Counts, by digit and then chunk, become what is before each. */
KERNEL(order_scan, order_args) {
    const int64_t begin = stretch_begin(DIGITS * a.chunks), end = stretch_end(DIGITS * a.chunks);
    int64_t mine = 0, all;

    for (int64_t i = begin; i < end; i++) mine += a.counts[i];
    mine = sum_before(mine, &all);
    for (int64_t i = begin; i < end; i++) {
        const int32_t count = a.counts[i];
        a.counts[i] = (int32_t)mine;
        mine += count;
    }
}

KERNEL(order_place, order_args) {
    SHARED(uint8_t, digit, ORDER_CHUNK);
    FOR_BLOCKS(chunk, a.chunks) {
        const int n = numbers_of(&a, chunk);
        int32_t to = a.counts[threadIdx.x * a.chunks + chunk];
        read_digits(&a, chunk, digit);
        for (int i = 0; i < n; i++) {
            const int64_t from = chunk * ORDER_CHUNK + i;
            if (digit[i] != threadIdx.x) continue;
            a.key_out[to] = a.key[from];
            a.index_out[to++] = a.index ? a.index[from] : (int32_t)from;
        }
    }
}
#endif
