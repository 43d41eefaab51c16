/* scan_lanes.h -- serves scan.c as a template: lanes of T, of floats only. */

static void NAME(product_grad)(const lanes *j, int64_t at) {
    const T *dy = (const T *)j->a + at, *x = (const T *)j->b + at, *y = (const T *)j->c + at;
    T *dx = (T *)j->out + at;
    int64_t zero = 0, i;
    double total = 0, product;
    while (zero < j->length && x[zero * j->step] != 0) zero++;
    for (i = zero - 1; i >= 0; i--) {
        total += (double)dy[i * j->step] * (double)y[i * j->step];
        dx[i * j->step] = (T)(total / (double)x[i * j->step]);
    }
    if (zero == j->length) return;
    product = zero ? (double)y[(zero - 1) * j->step] : 1;
    total = (double)dy[zero * j->step] * product;
    for (i = zero + 1; i < j->length; i++) {
        product *= (double)x[i * j->step];
        total += (double)dy[i * j->step] * product;
        dx[i * j->step] = 0;
    }
    dx[zero * j->step] = (T)total;
}

static void NAME(others)(const lanes *j, int64_t at) {
    const T *x = (const T *)j->a + at;
    T *y = (T *)j->out + at;
    double before = 1, after = 1;
    for (int64_t i = 0; i < j->length; i++) {
        y[i * j->step] = (T)before;
        before *= (double)x[i * j->step];
    }
    for (int64_t i = j->length - 1; i >= 0; i--) {
        y[i * j->step] = (T)((double)y[i * j->step] * after);
        after *= (double)x[i * j->step];
    }
}

SIMD static void NAME(others_beside)(const lanes *j, int64_t at, int64_t width) {
    const T *x = (const T *)j->a + at;
    T *y = (T *)j->out + at;
    double before[BESIDE], after[BESIDE];
    for (int64_t k = 0; k < width; k++) before[k] = after[k] = 1;
    for (int64_t i = 0; i < j->length; i++, x += j->step, y += j->step)
        for (int64_t k = 0; k < width; k++) {
            y[k] = (T)before[k];
            before[k] *= (double)x[k];
        }
    for (int64_t i = 0; i < j->length; i++) {
        x -= j->step, y -= j->step;
        for (int64_t k = 0; k < width; k++) {
            y[k] = (T)((double)y[k] * after[k]);
            after[k] *= (double)x[k];
        }
    }
}

static void NAME(log_sum)(const lanes *j, int64_t at) {
    const T *x = (const T *)j->a + at;
    T *y = (T *)j->out + at;
    double total = -INFINITY;
    for (int64_t i = 0; i < j->length; i++) {
        total = log_add(total, (double)x[i * j->step]);
        y[i * j->step] = (T)total;
    }
}

static void NAME(log_sum_grad)(const lanes *j, int64_t at) {
    const T *dy = (const T *)j->a + at, *x = (const T *)j->b + at, *y = (const T *)j->c + at;
    T *dx = (T *)j->out + at;
    double total = 0, later = 0;
    for (int64_t i = j->length - 1; i >= 0; i--) {
        const double now = (double)y[i * j->step], size = (double)x[i * j->step];
        total = (double)dy[i * j->step] + (total == 0 || isinf(now) ? 0 : total * exp(now - later));
        dx[i * j->step] = size == -INFINITY ? 0 : (T)(total * exp(size - now));
        later = now;
    }
}
