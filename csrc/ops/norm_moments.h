/* norm_moments.h -- template of norm_rows.h and embedding_norm_rows.h. */

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
