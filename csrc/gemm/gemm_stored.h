/* gemm_stored.h -- serves gemm_reference.c as a template: what is stored as S and summed as T, in and out.
 *
 * WIDEN and NARROW go from S to T and back; without NARROW it is only read. NAME(f) is f_TYPE. TYPE and S are forgotten
 * at the end. */

SIMD static void NAME(pack)(void *out, const void *in, int64_t lanes, int64_t depth, int64_t lane_step,
                            int64_t depth_step, int width) {
    T *o = out;
    for (int64_t first = 0; first < lanes; first += width, o += width * depth) {
        const S *s = (const S *)in + first * lane_step;
        int64_t n = lanes - first < width ? lanes - first : width;
        for (int64_t k = 0; k < depth; k++) {
            if (lane_step == 1)
                for (int64_t i = 0; i < n; i++) o[k * width + i] = WIDEN(s[k * depth_step + i]);
            else
                for (int64_t i = 0; i < n; i++) o[k * width + i] = WIDEN(s[k * depth_step + i * lane_step]);
            for (int64_t i = n; i < width; i++) o[k * width + i] = 0;
        }
    }
}

#ifdef NARROW
SIMD static void NAME(store)(void *c, const void *sum, int64_t n, double alpha_, double beta_) {
    const T *s = sum, alpha = (T)alpha_, beta = (T)beta_;
    S *o = c;
    if (beta_ == 0)
        for (int64_t i = 0; i < n; i++) {
            const T x = alpha * s[i];
            o[i] = NARROW(x);
        }
    else
        for (int64_t i = 0; i < n; i++) {
            const T y = WIDEN(o[i]), x = alpha * s[i] + beta * y;
            o[i] = NARROW(x);
        }
}
#endif

#undef TYPE
#undef S
