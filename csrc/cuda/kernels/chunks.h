/* chunks.h -- shares something long among a block's threads in chunks, one a thread, and finds out what those
 * before a thread's have. */
#ifndef ORT_CUDA_CHUNKS_H
#define ORT_CUDA_CHUNKS_H

#include "cuda/kernels/kernel.h"

enum { CHUNKS = 512 }; /* threads of a block, at most; where there is only one block all of them */

#ifdef ORT_DEVICE
/* Where chunk `chunk` of so many begins, which is where the one before it ends. */
DEVICE int64_t chunk_begin(int64_t total, int64_t chunk, int64_t chunks) { return total * chunk / chunks; }

/* --- of the only block -------------------------------------------------------------------------------------------- */

DEVICE int64_t own_begin(int64_t total) { return chunk_begin(total, threadIdx.x, CHUNKS); }
DEVICE int64_t own_end(int64_t total) { return chunk_begin(total, (int64_t)threadIdx.x + 1, CHUNKS); }

/* Of counts that every thread has: the sum of those before this thread, and of all. */
DEVICE int64_t sum_before(int64_t mine, int64_t *all) {
    SHARED(int64_t, of_warps, CHUNKS / WARP);
    const int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
    int64_t sum = mine, before = 0; /* sum: of this lane and those before it */

    for (int step = 1; step < WARP; step *= 2) {
        const int64_t other = __shfl_sync(0xffffffffu, sum, (lane - step) & (WARP - 1));
        if (lane >= step) sum += other;
    }
    __syncthreads(); /* what an earlier sum left has been read */
    if (lane == WARP - 1) of_warps[warp] = sum;
    __syncthreads();
    *all = 0;
    for (int other = 0; other < CHUNKS / WARP; other++) {
        if (other < warp) before += of_warps[other];
        *all += of_warps[other];
    }
    return before + sum - mine;
}

/* The largest of numbers that every thread has. */
DEVICE int64_t largest_of(int64_t mine) {
    SHARED(int64_t, numbers, CHUNKS);
    int64_t most = mine;

    __syncthreads();
    numbers[threadIdx.x] = mine;
    __syncthreads();
    for (int t = 0; t < CHUNKS; t++) most = numbers[t] > most ? numbers[t] : most;
    return most;
}
#endif

#endif
