/* optim_rule.h -- serves optim.cu as a template: the kernel RULE, which does a rule to every chunk of a launch.
 *
 * FACTORS(row, step) sets f; NAMES and ELEMENT are the rule's. WRITES says what of elements changes: their states,
 * their weights, or the sums that a rule measures of a chunk. All are forgotten. */
KERNEL(NAME(RULE), update_args) {
    SHARED(double, f, MOST_FACTORS);
    const int skip = a.overflow && *a.overflow != 0;

    FOR_BLOCKS(chunk, a.cut.first[a.cut.n]) {
        const int at = row_of(a.cut.first, a.cut.n, chunk);
        const update_row row = a.rows[at];
        const int64_t grown = a.grown ? (row.count + SUM_PARTS - 1) / SUM_PARTS : 0;
        const int64_t each = grown > CHUNK ? grown : CHUNK, begin = (chunk - a.cut.first[at]) * each;
        const int64_t end = begin + each < row.count ? begin + each : row.count;
        double weights = 0, steps = 0;

        __syncthreads(); /* those of the chunk before have been read */
        if (threadIdx.x == 0) {
            const double step = row.counter ? number_f64(row.counter, a.counter_type, 0) : 0;
            FACTORS(at, step);
        }
        __syncthreads();
        NAMES
        FOR_PIECES(i, begin, end) {
            if (!skip) {
                A ps[AT_ONCE], gs[AT_ONCE], states[3][AT_ONCE];
                NAME(read_values)(&a, &row, i, begin, end, ps, gs, states);
                EACH_OF(j, i, begin, end) {
                    A p = ps[j];
                    const A g = gs[j];
                    A s[3] = {states[0][j], states[1][j], states[2][j]};
                    ELEMENT
                    ps[j] = p;
                    UNROLL for (int k = 0; k < 3; k++) states[k][j] = s[k];
                }
                if (WRITES & STATES) NAME(write_states)(&a, &row, i, begin, end, states);
                if (WRITES & WEIGHTS) NAME(write_weights)(&a, &row, i, begin, end, ps);
            }
            if (WRITES & WEIGHTS && a.clear) { /* where the step is left out, too */
                const A none[AT_ONCE] = {0};
                GIVE(row.g, OWN_TYPE(a.grad_type), i, begin, end, none);
            }
        }
        if (WRITES & SUMS) {
            weights = block_sum_f64(weights);
            steps = block_sum_f64(steps);
            if (threadIdx.x == 0) {
                a.room[2 * chunk] = weights;
                a.room[2 * chunk + 1] = steps;
            }
        }
    }
}
#undef RULE
#undef FACTORS
#undef NAMES
#undef ELEMENT
#undef WRITES
