/* batchnorm_channels.h -- serves batchnorm.c as a template. A channel is `size` neighbours in each of `samples`
 * samples; where size is 1, channels are columns of a matrix instead, and `width` of them are worked on together.
 * Sums are left in j->a and j->b: mean and variance, or Σ dy z and Σ dy. */

SIMD static void NAME(moments_channels)(const job *j, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        double total = 0, squares = 0;
        for (int64_t s = 0; s < j->samples; s++) {
            const T *x = (const T *)j->x + (s * j->channels + c) * j->size;
            SUM(j->size, total, GET(x[i]));
        }
        const A m = (A)(total / j->count);
        for (int64_t s = 0; s < j->samples; s++) {
            const T *x = (const T *)j->x + (s * j->channels + c) * j->size;
            SUM(j->size, squares, (GET(x[i]) - m) * (GET(x[i]) - m));
        }
        j->a[c] = total / j->count;
        j->b[c] = squares / j->count;
    }
}

/* Rows are summed a few at a time before they are added up in double. */
SIMD static void NAME(moments_columns)(const job *j, int64_t from, int64_t width) {
    double *mean = j->a + from, *variance = j->b + from;
    A m[COLUMNS];
    for (int64_t k = 0; k < width; k++) mean[k] = variance[k] = 0;
    for (int64_t first = 0; first < j->samples; first += ROWS) {
        A sum[COLUMNS] = {0};
        for (int64_t s = first; s < j->samples && s < first + ROWS; s++) {
            const T *x = (const T *)j->x + s * j->channels + from;
#pragma omp simd
            for (int64_t k = 0; k < width; k++) sum[k] += GET(x[k]);
        }
        for (int64_t k = 0; k < width; k++) mean[k] += (double)sum[k];
    }
    for (int64_t k = 0; k < width; k++) m[k] = (A)(mean[k] /= j->count);
    for (int64_t first = 0; first < j->samples; first += ROWS) {
        A sum[COLUMNS] = {0};
        for (int64_t s = first; s < j->samples && s < first + ROWS; s++) {
            const T *x = (const T *)j->x + s * j->channels + from;
#pragma omp simd
            for (int64_t k = 0; k < width; k++) sum[k] += (GET(x[k]) - m[k]) * (GET(x[k]) - m[k]);
        }
        for (int64_t k = 0; k < width; k++) variance[k] += (double)sum[k];
    }
    for (int64_t k = 0; k < width; k++) variance[k] /= j->count;
}

/* y = (x - mean) factor + bias */
SIMD static void NAME(apply_channels)(const job *j, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const A m = (A)j->mean[c], f = (A)(j->inverse[c] * j->scale[c]), b = (A)j->bias[c];
        for (int64_t s = 0; s < j->samples; s++) {
            const T *x = (const T *)j->x + (s * j->channels + c) * j->size;
            T *y = (T *)j->out + (s * j->channels + c) * j->size;
#pragma omp simd
            for (int64_t i = 0; i < j->size; i++) y[i] = PUT((GET(x[i]) - m) * f + b);
        }
    }
}

SIMD static void NAME(apply_columns)(const job *j, int64_t from, int64_t width) {
    A m[COLUMNS], f[COLUMNS], b[COLUMNS];
    for (int64_t k = 0; k < width; k++) {
        m[k] = (A)j->mean[from + k];
        f[k] = (A)(j->inverse[from + k] * j->scale[from + k]);
        b[k] = (A)j->bias[from + k];
    }
    for (int64_t s = 0; s < j->samples; s++) {
        const T *x = (const T *)j->x + s * j->channels + from;
        T *y = (T *)j->out + s * j->channels + from;
#pragma omp simd
        for (int64_t k = 0; k < width; k++) y[k] = PUT((GET(x[k]) - m[k]) * f[k] + b[k]);
    }
}

SIMD static void NAME(sums_channels)(const job *j, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const A m = (A)j->mean[c];
        double dot = 0, sum = 0;
        for (int64_t s = 0; s < j->samples; s++) {
            const T *x = (const T *)j->x + (s * j->channels + c) * j->size;
            const T *dy = (const T *)j->dy + (s * j->channels + c) * j->size;
            SUM_2(j->size, dot, GET(dy[i]) * (GET(x[i]) - m), sum, GET(dy[i]));
        }
        j->a[c] = dot * j->inverse[c];
        j->b[c] = sum;
    }
}

SIMD static void NAME(sums_columns)(const job *j, int64_t from, int64_t width) {
    double *dots = j->a + from, *sums = j->b + from;
    A m[COLUMNS];
    for (int64_t k = 0; k < width; k++) {
        m[k] = (A)j->mean[from + k];
        dots[k] = sums[k] = 0;
    }
    for (int64_t first = 0; first < j->samples; first += ROWS) {
        A dot[COLUMNS] = {0}, sum[COLUMNS] = {0};
        for (int64_t s = first; s < j->samples && s < first + ROWS; s++) {
            const T *x = (const T *)j->x + s * j->channels + from, *dy = (const T *)j->dy + s * j->channels + from;
#pragma omp simd
            for (int64_t k = 0; k < width; k++) {
                dot[k] += GET(dy[k]) * (GET(x[k]) - m[k]);
                sum[k] += GET(dy[k]);
            }
        }
        for (int64_t k = 0; k < width; k++) {
            dots[k] += (double)dot[k];
            sums[k] += (double)sum[k];
        }
    }
    for (int64_t k = 0; k < width; k++) dots[k] *= j->inverse[from + k];
}

/* dx = factor (dy - mean dy - z mean(dy z)), the means left out where the moments were given. */
SIMD static void NAME(dx_channels)(const job *j, int64_t begin, int64_t end) {
    for (int64_t c = begin; c < end; c++) {
        const A m = (A)j->mean[c], f = (A)(j->inverse[c] * j->scale[c]);
        const A sum = j->training ? (A)(j->b[c] / j->count) : 0;
        const A dot = j->training ? (A)(j->a[c] / j->count * j->inverse[c]) : 0;
        for (int64_t s = 0; s < j->samples; s++) {
            const T *x = (const T *)j->x + (s * j->channels + c) * j->size;
            const T *dy = (const T *)j->dy + (s * j->channels + c) * j->size;
            T *dx = (T *)j->out + (s * j->channels + c) * j->size;
#pragma omp simd
            for (int64_t i = 0; i < j->size; i++) dx[i] = PUT(f * (GET(dy[i]) - sum - (GET(x[i]) - m) * dot));
        }
    }
}

SIMD static void NAME(dx_columns)(const job *j, int64_t from, int64_t width) {
    A m[COLUMNS], f[COLUMNS], sum[COLUMNS], dot[COLUMNS];
    for (int64_t k = 0; k < width; k++) {
        const int64_t c = from + k;
        m[k] = (A)j->mean[c];
        f[k] = (A)(j->inverse[c] * j->scale[c]);
        sum[k] = j->training ? (A)(j->b[c] / j->count) : 0;
        dot[k] = j->training ? (A)(j->a[c] / j->count * j->inverse[c]) : 0;
    }
    for (int64_t s = 0; s < j->samples; s++) {
        const T *x = (const T *)j->x + s * j->channels + from, *dy = (const T *)j->dy + s * j->channels + from;
        T *dx = (T *)j->out + s * j->channels + from;
#pragma omp simd
        for (int64_t k = 0; k < width; k++) dx[k] = PUT(f[k] * (GET(dy[k]) - sum[k] - (GET(x[k]) - m[k]) * dot[k]));
    }
}
