/* lane_scan.h -- serves as a template: the kernel SCAN of the arguments ARGS scans lanes of a tensor, a block each.
 *
 * A thread joins the elements of its chunk, then what the chunks before its own have, then goes through its chunk
 * again. A total is an A; it begins as START, and JOIN(total, x) goes on with x. READ(&a, at) is an element, and
 * WRITE(&a, at, before, total) takes the totals before it and with it. The arguments have `lanes`, `length` and `step`;
 * element i of a lane is at place PLACE(i) of it. SCAN, READ and WRITE are forgotten. */
KERNEL(SCAN, ARGS) {
    SHARED(A, totals, CHUNKS);
    /* Not by chunk_begin: with its inlined division nvcc takes 70 registers for integers instead of 40. */
    const int64_t begin = a.length * threadIdx.x / blockDim.x, end = a.length * (threadIdx.x + 1) / blockDim.x;

    FOR_BLOCKS(lane, a.lanes) {
        const int64_t start = LANE_START(lane, a.length, a.step);
        A total = START;

        for (int64_t i = begin; i < end; i++) total = JOIN(total, READ(&a, start + PLACE(i) * a.step));
        __syncthreads(); /* those of the lane before have been read */
        totals[threadIdx.x] = total;
        __syncthreads();
        total = START;
        for (unsigned t = 0; t < threadIdx.x; t++) total = JOIN(total, totals[t]);
        for (int64_t i = begin; i < end; i++) {
            const int64_t at = start + PLACE(i) * a.step;
            const A before = total;
            total = JOIN(total, READ(&a, at));
            WRITE(&a, at, before, total);
        }
    }
}
#undef SCAN
#undef READ
#undef WRITE
