/* philox_fill.h -- serves philox.c as a template: fills groups with one width of vectors.
 *
 * FILL is the function for the instruction set ISA, V its vector: LANES counters a vector, 16 / LANES vectors. The low
 * word of a counter cannot carry within a group, since 16 divides its first. All of these, and the operations on vectors,
 * are forgotten at the end. */

__attribute__((target(ISA))) static void FILL(uint64_t seed, uint32_t key, uint64_t first, int64_t groups,
                                              uint32_t *out) {
    const V ma = SET(multiply_a), mc = SET(multiply_c);
    for (int64_t g = 0; g < groups; g++, out += PHILOX_GROUP) {
        enum { N = COUNTERS / LANES };
        uint64_t counter = (first + (uint64_t)g) * COUNTERS;
        uint32_t k0 = (uint32_t)seed, k1 = (uint32_t)(seed >> 32);
        V a[N], b[N], c[N], d[N];
        for (int i = 0; i < N; i++) {
            a[i] = INDEX((uint32_t)counter + (uint32_t)(LANES * i));
            b[i] = SET((uint32_t)(counter >> 32));
            c[i] = SET(key);
            d[i] = SET(0);
        }
        for (int r = 0; r < ROUNDS; r++, k0 += step_0, k1 += step_1) {
            const V r0 = SET(k0), r1 = SET(k1);
            for (int i = 0; i < N; i++) {
                V x = MUL(a[i], ma), y = MUL(c[i], mc);
                a[i] = XOR(XOR(SHIFT_RIGHT(y, 32), b[i]), r0);
                b[i] = y;
                c[i] = XOR(XOR(SHIFT_RIGHT(x, 32), d[i]), r1);
                d[i] = x;
            }
        }
        for (int i = 0; i < N / 2; i++) {
            STORE_PAIR(out + 2 * LANES * i, a[i], a[i + N / 2]);
            STORE_PAIR(out + 2 * LANES * i + 16, b[i], b[i + N / 2]);
            STORE_PAIR(out + 2 * LANES * i + 32, c[i], c[i + N / 2]);
            STORE_PAIR(out + 2 * LANES * i + 48, d[i], d[i + N / 2]);
        }
    }
}

#undef FILL
#undef ISA
#undef V
#undef LANES
#undef SET
#undef INDEX
#undef MUL
#undef SHIFT_RIGHT
#undef XOR
#undef STORE_PAIR
