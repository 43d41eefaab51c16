/* loss_rows.h -- serves loss.c as a template. Element i of sample r is at [start + i * stride]; rows have stride 1. */

#include "ops/reductions/exp_rows.h"

/* log Σ exp of each sample of a range whose label counts, and its loss. */
SIMD static void NAME(cross_entropy_rows)(const loss_job *j, int64_t begin, int64_t end) {
    const int64_t n = j->classes;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n;
        int64_t label;
        double weight = label_at(j, row, &label);

        j->losses[row] = 0;
        j->lse[row] = NAN; /* what counts in backward must have counted */
        if (label < 0) continue;
        A most;
        const double total = NAME(row_sum_exp)(x, n, &most);
        j->lse[row] = (double)most + log(total);
        j->losses[row] = j->own * weight * (j->lse[row] - (double)GET(x[label]));
        if (!j->share) continue;
        const A *share = j->share;
        double shared = 0;
        SUM(n, shared, share[i] * (GET(x[i]) - most));
        j->losses[row] += j->shares * log(total) - shared;
    }
}

/* Samples [from, from + width) of one batch element, side by side. */
SIMD static void NAME(cross_entropy_columns)(const loss_job *j, int64_t batch, int64_t from, int64_t width) {
    const T *x = (const T *)j->x + batch * j->classes * j->inner + from;
    const int64_t first = batch * j->inner + from, stride = j->inner;
    const A *share = j->share;
    A most[COLUMNS], sum[COLUMNS], shared[COLUMNS];
    int64_t labels[COLUMNS];
    double weights[COLUMNS], logs[COLUMNS];

    labels_at(j, first, width, labels, weights);
    for (int64_t k = 0; k < width; k++) {
        most[k] = -(A)INFINITY;
        sum[k] = shared[k] = 0;
    }
    for (int64_t i = 0; i < j->classes; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) {
            A v = GET(x[i * stride + k]);
            most[k] = v > most[k] ? v : most[k];
        }
    for (int64_t i = 0; i < j->classes; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) sum[k] += v_exp_below(GET(x[i * stride + k]) - most[k]);
    for (int64_t i = 0; share && i < j->classes; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) shared[k] += share[i] * (GET(x[i * stride + k]) - most[k]);
    for (int64_t k = 0; k < width; k++) logs[k] = vlog((double)sum[k]);
    for (int64_t k = 0; k < width; k++) {
        const double lse = (double)most[k] + logs[k];
        j->lse[first + k] = labels[k] < 0 ? (double)NAN : lse;
        j->losses[first + k] = labels[k] < 0 ? 0 : j->own * weights[k] * (lse - (double)GET(x[labels[k] * stride + k]));
        if (share && labels[k] >= 0) j->losses[first + k] += j->shares * logs[k] - (double)shared[k];
    }
}

/* lse has more digits than A: what is left of it is subtracted apart. */
SIMD static void NAME(cross_entropy_grad_rows)(const loss_job *j, int64_t begin, int64_t end) {
    const int64_t n = j->classes;
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n;
        T *dx = (T *)j->dx + row * n;
        int64_t label;
        const double own = j->own * label_at(j, row, &label), up = label < 0 ? 0 : upstream_at(j, row);
        const A scale = (A)((own + j->shares) * up), up_a = (A)up, *share = j->share;
        const A high = (A)j->lse[row], low = (A)(j->lse[row] - (double)high);

        if (label < 0) {
            for (int64_t i = 0; i < n; i++) dx[i] = 0;
            continue;
        }
        if (!share) {
            const T at_label = PUT((v_exp_below(GET(x[label]) - high - low) - 1) * scale);
            NAME(row_exp)(x, n, high, low, scale, false, dx);
            dx[label] = at_label;
        } else {
            const A p = v_exp_below(GET(x[label]) - high - low);
            const T at_label = PUT(p * scale - (share[label] + (A)own) * up_a);
#pragma omp simd
            for (int64_t i = 0; i < n; i++) dx[i] = PUT(v_exp_below(GET(x[i]) - high - low) * scale - share[i] * up_a);
            dx[label] = at_label;
        }
    }
}

SIMD static void NAME(cross_entropy_grad_columns)(const loss_job *j, int64_t batch, int64_t from, int64_t width) {
    const int64_t start = batch * j->classes * j->inner + from, first = batch * j->inner + from, stride = j->inner;
    const T *x = (const T *)j->x + start;
    T *dx = (T *)j->dx + start;
    const A *share = j->share;
    A scale[COLUMNS], at_label[COLUMNS], up[COLUMNS], high[COLUMNS], low[COLUMNS];
    int64_t label[COLUMNS];
    int32_t labels[COLUMNS];
    double weights[COLUMNS];

    labels_at(j, first, width, label, weights);
    for (int64_t k = 0; k < width; k++) {
        const double own = j->own * weights[k], upstream = upstream_at(j, first + k);
        scale[k] = (A)((own + j->shares) * upstream);
        at_label[k] = (A)(own * upstream);
        up[k] = (A)upstream;
        high[k] = (A)j->lse[first + k];
        low[k] = (A)(j->lse[first + k] - (double)high[k]);
        labels[k] = (int32_t)label[k];
    }
    if (share) {
        for (int32_t i = 0; i < (int32_t)j->classes; i++) {
            const A of_class = share[i];
#pragma omp simd
            for (int64_t k = 0; k < width; k++) {
                const A p = v_exp_below(GET(x[i * stride + k]) - high[k] - low[k]),
                        own = labels[k] == i ? at_label[k] : 0;
                const A v = p * scale[k] - of_class * up[k] - own;
                dx[i * stride + k] = PUT(labels[k] < 0 ? 0 : v);
            }
        }
        return;
    }
    for (int32_t i = 0; i < (int32_t)j->classes; i++)
#pragma omp simd
        for (int64_t k = 0; k < width; k++) {
            const A p = v_exp_below(GET(x[i * stride + k]) - high[k] - low[k]),
                    v = (p - (labels[k] == i ? 1 : 0)) * scale[k];
            dx[i * stride + k] = PUT(labels[k] < 0 ? 0 : v);
        }
}

/* total[i] += the rows' sum, for columns [begin, end). */
SIMD static void NAME(add_columns)(const void *rows, int64_t count, int64_t width, int64_t begin, int64_t end,
                                   double *total) {
    for (int64_t row = 0; row < count; row++) {
        const T *x = (const T *)rows + row * width;
#pragma omp simd
        for (int64_t i = begin; i < end; i++) total[i] += (double)GET(x[i]);
    }
}
