/* stretches.h -- for kernels of one block: it shares something long out in stretches, one a thread, and finds out what
 * those before a thread's have. */
#ifndef ORT_CUDA_STRETCHES_H
#define ORT_CUDA_STRETCHES_H

enum { STRETCHES = 512 }; /* threads of the block */

#ifdef ORT_DEVICE
DEVICE int64_t stretch_begin(int64_t total) { return total * threadIdx.x / STRETCHES; }
DEVICE int64_t stretch_end(int64_t total) { return total * (threadIdx.x + 1) / STRETCHES; }

/* Of counts that every thread has: the sum of those before this thread, and of all. */
DEVICE int64_t sum_before(int64_t mine, int64_t *all) {
    SHARED(int64_t, of_warps, STRETCHES / WARP);
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
    for (int other = 0; other < STRETCHES / WARP; other++) {
        if (other < warp) before += of_warps[other];
        *all += of_warps[other];
    }
    return before + sum - mine;
}

/* The largest of numbers that every thread has. */
DEVICE int64_t largest_of(int64_t mine) {
    SHARED(int64_t, numbers, STRETCHES);
    int64_t most = mine;

    __syncthreads();
    numbers[threadIdx.x] = mine;
    __syncthreads();
    for (int t = 0; t < STRETCHES; t++) most = numbers[t] > most ? numbers[t] : most;
    return most;
}
#endif

#endif
