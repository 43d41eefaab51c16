/* cumulative_scan.h -- serves cumulative.c as a template: sums of `width` neighbours from `at` on, each along the
 * axis.
 *
 * T is an element of x, A a sum, GET goes from one to the other; RESULT is an element of y, PUT goes there. */

SIMD static void NAME(scan)(const job *j, int64_t at, int64_t width) {
    A total[COLUMNS] = {0};
    if (width == 1) {
        const T *x = (const T *)j->x + at;
        RESULT *y = (RESULT *)j->y + at;
        A sum = 0;
        for (int64_t step = 0; step < j->length; step++) {
            int64_t i = (j->reverse ? j->length - 1 - step : step) * j->inner;
            A before = sum;
            sum += (A)GET(x[i]);
            y[i] = (RESULT)PUT(j->exclusive ? before : sum);
        }
        return;
    }
    for (int64_t step = 0; step < j->length; step++) {
        int64_t i = j->reverse ? j->length - 1 - step : step;
        const T *x = (const T *)j->x + at + i * j->inner;
        RESULT *y = (RESULT *)j->y + at + i * j->inner;
        for (int64_t k = 0; k < width; k++) {
            A before = total[k], after = before + (A)GET(x[k]);
            total[k] = after;
            y[k] = (RESULT)PUT(j->exclusive ? before : after);
        }
    }
}
