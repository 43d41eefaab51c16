/* norm_rows.h -- template of norm.c. */

/* The mean (0 unless centred) and the reciprocal deviation of n neighbouring elements. What is left of the sum around a
 * mean that was rounded corrects it: where all elements are equal, it is exact. */
SIMD_PART void NAME(moments)(const T *x, int64_t n, bool centred, double epsilon, A *mean, A *inverse) {
    double total = 0, squares = 0, rest = 0;
    if (!centred) {
        SUM(n, squares, GET(x[i]) * GET(x[i]));
        *mean = 0;
        *inverse = (A)(1 / sqrt(squares / (double)n + epsilon));
        return;
    }
    SUM(n, total, GET(x[i]));
    const A near = (A)(total / (double)n);
    SUM_2(n, squares, (GET(x[i]) - near) * (GET(x[i]) - near), rest, GET(x[i]) - near);
    rest /= (double)n;
    const double variance = squares / (double)n - rest * rest;
    *mean = (A)((double)near + rest);
    *inverse = (A)(1 / sqrt((variance < 0 ? 0 : variance) + epsilon));
}

/* --- one scale for each element of a row -------------------------------------------------------------------------- */

SIMD static void NAME(norm_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->width;
    const A *scale = j->scale, *bias = j->bias;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n;
        T *y = (T *)j->out + row * n;
        A m, r;

        NAME(moments)(x, n, j->centred, j->epsilon, &m, &r);
        if (j->means) ((A *)j->means)[row] = m;
        if (j->inverses) ((A *)j->inverses)[row] = r;
        if (bias) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) y[i] = PUT((GET(x[i]) - m) * r * scale[i] + bias[i]);
        } else {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) y[i] = PUT((GET(x[i]) - m) * r * scale[i]);
        }
    }
}

/* The rows of one part: dx, and what they add to the gradients of scale and bias. */
SIMD static void NAME(norm_grad_rows)(const job *j, int64_t part, int64_t begin, int64_t end) {
    const int64_t n = j->width;
    const A *scale = j->scale;
    A *dscale = j->partial ? (A *)j->partial + 2 * part * n : NULL, *dbias = dscale + (dscale ? n : 0);

    for (int64_t i = 0; dscale && i < 2 * n; i++) dscale[i] = 0;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n, *dy = (const T *)j->dy + row * n;
        const A m = j->means ? ((const A *)j->means)[row] : 0, r = ((const A *)j->inverses)[row];

        if (j->out) {
            T *dx = (T *)j->out + row * n;
            double sum = 0, dot = 0;
            SUM_2(n, sum, GET(dy[i]) * scale[i], dot, GET(dy[i]) * scale[i] * ((GET(x[i]) - m) * r));
            const A a = j->centred ? (A)(sum / (double)n) : 0, b = (A)(dot / (double)n);
            if (dscale) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++) {
                    A d = GET(dy[i]), normed = (GET(x[i]) - m) * r;
                    dscale[i] += d * normed;
                    dbias[i] += d;
                    dx[i] = PUT(r * (d * scale[i] - a - normed * b));
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < n; i++) dx[i] = PUT(r * (GET(dy[i]) * scale[i] - a - (GET(x[i]) - m) * r * b));
            }
        } else if (dscale) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                dscale[i] += GET(dy[i]) * ((GET(x[i]) - m) * r);
                dbias[i] += GET(dy[i]);
            }
        }
    }
}

/* The parts of the gradient of scale (0) or bias (1) added up, for some of its elements. */
SIMD static void NAME(join_columns)(const job *j, int64_t which, int64_t from, int64_t width, double *sums) {
    for (int64_t k = 0; k < width; k++) sums[k] = 0;
    for (int64_t part = 0; part < j->parts; part++) {
        const A *p = (const A *)j->partial + (2 * part + which) * j->width + from;
        for (int64_t k = 0; k < width; k++) sums[k] += (double)p[k];
    }
}

/* --- one scale for each channel of a group ------------------------------------------------------------------------ */

SIMD static void NAME(group_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->width, size = j->size, channels = j->channels;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n;
        T *y = (T *)j->out + row * n;
        const int64_t first = row % j->groups * channels;
        A m, r;

        NAME(moments)(x, n, true, j->epsilon, &m, &r);
        if (j->means) ((A *)j->means)[row] = m;
        if (j->inverses) ((A *)j->inverses)[row] = r;
        if (size == 1) { /* a channel is an element */
            const A *scale = (const A *)j->scale + first, *bias = (const A *)j->bias + first;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) y[i] = PUT((GET(x[i]) - m) * (r * scale[i]) + bias[i]);
            continue;
        }
        for (int64_t c = 0; c < channels; c++) {
            const A a = r * ((const A *)j->scale)[first + c], b = ((const A *)j->bias)[first + c];
#pragma omp simd
            for (int64_t i = c * size; i < (c + 1) * size; i++) y[i] = PUT((GET(x[i]) - m) * a + b);
        }
    }
}

/* dx, and for each channel of each sample what it adds to the gradients of scale and bias. */
SIMD static void NAME(group_grad_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->width, size = j->size, channels = j->channels;
    const A *scale = j->scale;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n, *dy = (const T *)j->dy + row * n;
        const int64_t first = row % j->groups * channels;
        const A m = ((const A *)j->means)[row], r = ((const A *)j->inverses)[row];
        double *sums = j->sums + 2 * row * channels, all = 0, all_dot = 0;

        for (int64_t c = 0; size == 1 && c < channels; c++) {
            sums[2 * c] = (double)(GET(dy[c]) * ((GET(x[c]) - m) * r));
            sums[2 * c + 1] = (double)GET(dy[c]);
        }
        for (int64_t c = 0; size == 1 && c < channels; c++) {
            all += sums[2 * c + 1] * (double)scale[first + c];
            all_dot += sums[2 * c] * (double)scale[first + c];
        }
        for (int64_t c = 0; size != 1 && c < channels; c++) {
            const T *xc = x + c * size, *dyc = dy + c * size;
            double sum = 0, dot = 0;
            SUM_2(size, sum, GET(dyc[i]), dot, GET(dyc[i]) * ((GET(xc[i]) - m) * r));
            sums[2 * c] = dot;
            sums[2 * c + 1] = sum;
            all += sum * (double)scale[first + c];
            all_dot += dot * (double)scale[first + c];
        }
        if (!j->out) continue;
        T *dx = (T *)j->out + row * n;
        const A a = (A)(all / (double)n), b = (A)(all_dot / (double)n);
        if (size == 1) {
            const A *s = scale + first;
#pragma omp simd
            for (int64_t i = 0; i < n; i++) dx[i] = PUT(r * (GET(dy[i]) * s[i] - a - (GET(x[i]) - m) * r * b));
            continue;
        }
        for (int64_t c = 0; c < channels; c++) {
            const A s = scale[first + c];
#pragma omp simd
            for (int64_t i = c * size; i < (c + 1) * size; i++)
                dx[i] = PUT(r * (GET(dy[i]) * s - a - (GET(x[i]) - m) * r * b));
        }
    }
}
