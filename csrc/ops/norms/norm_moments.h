/* norm_moments.h -- serves norm_rows.h and embedding_norm_rows.h as a template: the moments of a row, and its norm. */

/* The mean (0 unless centred) and the reciprocal deviation of n neighbouring elements, whose result will be at y. What is
 * left of the sum around a mean that was rounded corrects it: where all elements are equal, it is exact. */
SIMD_PART void NAME(moments)(const T *x, int64_t n, const T *y, bool centred, double epsilon, A *mean, A *inverse) {
    double total = 0, squares = 0, rest = 0;
    if (!centred) {
        SUM_OF((READ_AHEAD(x), WRITE_AHEAD(y)), n, x, v, squares, v * v);
        *mean = 0;
        *inverse = (A)(1 / sqrt(squares / (double)n + epsilon));
        return;
    }
    SUM_OF((READ_AHEAD(x), WRITE_AHEAD(y)), n, x, v, total, v);
    const A near = (A)(total / (double)n);
    SUM_2_OF(n, x, v, squares, (v - near) * (v - near), rest, v - near);
    rest /= (double)n;
    const double variance = squares / (double)n - rest * rest;
    *mean = (A)((double)near + rest);
    *inverse = (A)(1 / sqrt((variance < 0 ? 0 : variance) + epsilon));
}

/* x as element i of `p`; `finite`: it is not NaN. Any type but the 16-bit floats stands for T, and `t` is a constant wherever
 * this is inlined. */
SIMD_PART void NAME(save)(void *p, dtype t, bool finite, int64_t i, A x) {
#if DIGITS == 24
    if (t == BF16) ((bf16 *)p)[i] = finite ? f32_to_bf16_finite(x) : f32_to_bf16(x);
    else if (t == F16) ((f16 *)p)[i] = (f16)x;
    else
#endif
        ((T *)p)[i] = finite ? PUT_FINITE(x) : PUT(x);
    (void)t;
}

/* Whether all that rows are scaled with is finite; bias may be NULL. */
SIMD_PART bool NAME(scales_are_finite)(const A *scale, const A *bias, int64_t n) {
    A zero = 0;
#pragma omp simd reduction(+ : zero)
    for (int64_t i = 0; i < n; i++) zero += 0 * scale[i];
#pragma omp simd reduction(+ : zero)
    for (int64_t i = 0; i < (bias ? n : 0); i++) zero += 0 * bias[i];
    return zero == 0;
}

/* The norm of a row x of n elements, elements of `y` from `first` on. Where scales, bias and moments are finite nothing is
 * NaN: an element is at most sqrt(n) deviations away. */
#define SCALED ((GET(x[i]) - m) * r * scale[i])
SIMD_PART void NAME(scale_elements)(dtype to, bool finite, const T *x, int64_t n, A m, A r, const A *scale,
                                    const A *bias, int64_t first, void *y) {
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) NAME(save)(y, to, finite, first + i, SCALED + bias[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) NAME(save)(y, to, finite, first + i, SCALED);
    }
}
#undef SCALED
SIMD_PART void NAME(scale_row)(dtype to, bool finite, const T *x, int64_t n, A m, A r, const A *scale, const A *bias,
                               int64_t first, void *y) {
    if (finite && isfinite(m) && isfinite(r) && r > 0)
        NAME(scale_elements)(to, true, x, n, m, r, scale, bias, first, y);
    else NAME(scale_elements)(to, false, x, n, m, r, scale, bias, first, y);
}
