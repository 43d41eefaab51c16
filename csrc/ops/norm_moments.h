/* norm_moments.h -- template of norm_rows.h and embedding_norm_rows.h: the moments of a row, and its norm. */

/* The mean (0 unless centred) and the reciprocal deviation of n neighbouring elements, whose result will be at y. What is
 * left of the sum around a mean that was rounded corrects it: where all elements are equal, it is exact. */
SIMD_PART void NAME(moments)(const T *x, int64_t n, const T *y, bool centred, double epsilon, A *mean, A *inverse) {
    double total = 0, squares = 0, rest = 0;
    if (!centred) {
        SUM_WITH((READ_AHEAD(x), WRITE_AHEAD(y)), n, squares, GET(x[i]) * GET(x[i]));
        *mean = 0;
        *inverse = (A)(1 / sqrt(squares / (double)n + epsilon));
        return;
    }
    SUM_WITH((READ_AHEAD(x), WRITE_AHEAD(y)), n, total, GET(x[i]));
    const A near = (A)(total / (double)n);
    SUM_2(n, squares, (GET(x[i]) - near) * (GET(x[i]) - near), rest, GET(x[i]) - near);
    rest /= (double)n;
    const double variance = squares / (double)n - rest * rest;
    *mean = (A)((double)near + rest);
    *inverse = (A)(1 / sqrt((variance < 0 ? 0 : variance) + epsilon));
}

/* x as element i of `p`. Any type but the 16-bit floats stands for T, and `t` is a constant wherever this is inlined. */
SIMD_PART void NAME(save)(void *p, dtype t, int64_t i, A x) {
#if DIGITS == 24
    if (t == BF16) ((bf16 *)p)[i] = f32_to_bf16(x);
    else if (t == F16) ((f16 *)p)[i] = (f16)x;
    else
#endif
        ((T *)p)[i] = PUT(x);
    (void)t;
}

/* The norm of a row x of n elements, elements of `y` from `first` on. */
SIMD_PART void NAME(scale_row)(dtype to, const T *x, int64_t n, A m, A r, const A *scale, const A *bias, int64_t first,
                               void *y) {
    if (bias) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) NAME(save)(y, to, first + i, (GET(x[i]) - m) * r * scale[i] + bias[i]);
    } else {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) NAME(save)(y, to, first + i, (GET(x[i]) - m) * r * scale[i]);
    }
}
