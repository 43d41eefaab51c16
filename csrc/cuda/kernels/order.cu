/* order.cu -- sorts numbers by their keys, stably, a digit of 8 bits at a time, the lowest first.
 *
 * A block has a chunk of the numbers, a warp of it a share of them, which it takes 32 at a time: lanes of one digit find
 * each other by ballots, so each knows how many are before it, and the first of them counts them all. Nothing is counted
 * by atomics, and numbers stay in their order. */
#include "cuda/kernels/chunks.h"
#include "cuda/kernels/kernel.h"

typedef struct order_args {
    const int32_t *key, *index; /* index: NULL where every number is at its own place */
    int32_t *key_out, *index_out, *counts;
    int64_t count, chunks;
    int32_t shift;
} order_args;

enum { DIGIT = 8, DIGITS = 1 << DIGIT, ORDER_CHUNK = 2048 };
enum { ORDER_WARPS = DIGITS / WARP, ORDER_SHARE = ORDER_CHUNK / ORDER_WARPS }; /* a thread has a digit, too */

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
        TRY(cuda_launch(c, k, &adding, (geometry){a.chunks ? 1 : 0, CHUNKS}, &a));
        TRY(cuda_launch(c, k, &placing, chunks, &a));
        now = !now;
        a.shift += DIGIT;
    } while (a.shift < 32 && (limit - 1) >> a.shift > 0);
    *out = (cuda_order){keys[now], indices[now]};
    return OK;
}
#endif

#ifdef ORT_DEVICE
/* Bits that are set. */
DEVICE int bits_in(uint32_t x) {
#ifdef __CUDACC__
    return __popc(x);
#else
    return __builtin_popcount(x);
#endif
}

/* What a lane has of 32 numbers of its warp. */
typedef struct order_lane {
    int64_t at;     /* its number's place */
    int is_there;   /* whether there is one */
    int32_t key;    /* the number's */
    int digit;      /* of it */
    uint32_t equal; /* the lanes whose numbers have this digit, a bit each */
} order_lane;

/* Round `round` of the warp's share of a chunk; all of the warp's lanes call this. */
DEVICE order_lane take_numbers(const order_args *a, int64_t chunk, int round) {
    order_lane l = {chunk * ORDER_CHUNK + threadIdx.x / WARP * ORDER_SHARE + round * WARP + threadIdx.x % WARP, 0, 0, 0,
                    0};

    l.is_there = l.at < a->count;
    if (l.is_there) l.key = a->key[l.at];
    l.digit = (uint32_t)l.key >> a->shift & (DIGITS - 1);
    l.equal = __ballot_sync(0xffffffffu, l.is_there);
    UNROLL for (int bit = 0; bit < DIGIT; bit++) {
        const uint32_t set = __ballot_sync(0xffffffffu, l.digit >> bit & 1);
        l.equal &= l.digit >> bit & 1 ? set : ~set;
    }
    return l;
}

/* The number's place among those of its digit in the warp's share, from `next` of each digit on, which goes on; all of
 * the block's threads call this. */
DEVICE int32_t rank_of(const order_lane *l, int32_t *next) {
    const uint32_t before = l->equal & ((1u << threadIdx.x % WARP) - 1);
    const int32_t first = l->is_there ? next[l->digit] : 0;

    __syncthreads();
    if (l->is_there && before == 0) next[l->digit] = first + bits_in(l->equal);
    __syncthreads();
    return first + bits_in(before);
}

/* Counts of each digit in each warp's share. */
DEVICE void count_digits(const order_args *a, int64_t chunk, int32_t *counts) {
    __syncthreads(); /* those of the chunk before have been read */
    for (int warp = 0; warp < ORDER_WARPS; warp++) counts[warp * DIGITS + threadIdx.x] = 0;
    __syncthreads();
    NOT_UNROLLED for (int round = 0; round < ORDER_SHARE / WARP; round++) {
        const order_lane l = take_numbers(a, chunk, round);
        (void)rank_of(&l, counts + threadIdx.x / WARP * DIGITS);
    }
    __syncthreads();
}

KERNEL(order_count, order_args) {
    SHARED(int32_t, counts, ORDER_WARPS *DIGITS);
    FOR_BLOCKS(chunk, a.chunks) {
        int32_t found = 0;
        count_digits(&a, chunk, counts);
        for (int warp = 0; warp < ORDER_WARPS; warp++) found += counts[warp * DIGITS + threadIdx.x];
        a.counts[threadIdx.x * a.chunks + chunk] = found;
    }
}

/* Counts, by digit and then chunk, become what is before each. */
KERNEL(order_scan, order_args) {
    const int64_t begin = own_begin(DIGITS * a.chunks), end = own_end(DIGITS * a.chunks);
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
    SHARED(int32_t, next, ORDER_WARPS *DIGITS);
    FOR_BLOCKS(chunk, a.chunks) {
        int32_t to = a.counts[threadIdx.x * a.chunks + chunk];
        count_digits(&a, chunk, next);
        for (int warp = 0; warp < ORDER_WARPS; warp++) {
            const int32_t count = next[warp * DIGITS + threadIdx.x];
            next[warp * DIGITS + threadIdx.x] = to;
            to += count;
        }
        __syncthreads();
        NOT_UNROLLED for (int round = 0; round < ORDER_SHARE / WARP; round++) {
            const order_lane l = take_numbers(&a, chunk, round);
            const int32_t place = rank_of(&l, next + threadIdx.x / WARP * DIGITS);
            if (!l.is_there) continue;
            a.key_out[place] = l.key;
            a.index_out[place] = a.index ? a.index[l.at] : (int32_t)l.at;
        }
    }
}
#endif
