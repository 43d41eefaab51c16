/* norm_rows.h -- serves norm.c as a template. */

#include "ops/norms/norm_moments.h"

/* --- elements of another type --------------------------------------------------------------------------------------
 * Where T is float some operands and results may have 16 bits. `t` is their type, a constant wherever these are
 * inlined; any other than these two stands for T. */

SIMD_PART A NAME(load)(const void *p, dtype t, int64_t i) {
#if DIGITS == 24
    if (t == BF16) return bf16_to_f32(((const bf16 *)p)[i]);
    if (t == F16) return (A)((const f16 *)p)[i];
#endif
    (void)t;
    return GET(((const T *)p)[i]);
}

SIMD_PART A NAME(rounded)(dtype t, A x) {
#if DIGITS == 24
    if (t == BF16) return bf16_to_f32(f32_to_bf16(x));
    if (t == F16) return (A)(f16)x;
#endif
    (void)t;
    return GET(PUT(x));
}

/* f, for the type `t`. */
#if DIGITS == 24
#define BY_TYPE(t, f, ...)                                                                                             \
    do {                                                                                                               \
        if ((t) == BF16) f(BF16, __VA_ARGS__);                                                                         \
        else if ((t) == F16) f(F16, __VA_ARGS__);                                                                      \
        else f(F32, __VA_ARGS__);                                                                                      \
    } while (0)
#else
#define BY_TYPE(t, f, ...) f(DT_NONE, __VA_ARGS__)
#endif

/* --- one scale for each element of a row -------------------------------------------------------------------------- */

/* A row of x, of which a dropout may have left some, and the other operand. */
SIMD_PART void NAME(add_row)(dtype from, const job *j, int64_t row, T *sum) {
    const int64_t n = j->width, first = row * n;
    const T *other = (const T *)j->other + first;
    const A factor = (A)j->factor;
    const uint32_t threshold = j->threshold;

    if (!j->drops) {
#pragma omp simd
        for (int64_t i = 0; i < n; i++) sum[i] = PUT(NAME(load)(j->x, from, first + i) + GET(other[i]));
        return;
    }
    for (int64_t at = 0, count; at < n; at += count) {
        uint32_t words[WORDS];
        A kept[WORDS]; /* apart from the sum: rounded as a dropout rounds, not contracted with the addition */
        const int64_t skipped = (first + at) % PHILOX_GROUP;
        count = n - at < WORDS - skipped ? n - at : WORDS - skipped;
        philox_fill(j->seed, j->key, (first + at) / PHILOX_GROUP, (skipped + count + PHILOX_GROUP - 1) / PHILOX_GROUP,
                    words);
#pragma omp simd
        for (int64_t i = 0; i < count; i++) {
            const A x = NAME(load)(j->x, from, first + at + i) * (words[skipped + i] >= threshold ? factor : 0);
            kept[i] = NAME(rounded)(from, x);
        }
#pragma omp simd
        for (int64_t i = 0; i < count; i++) sum[at + i] = PUT(kept[i] + GET(other[at + i]));
    }
}

/* y may lie where x or the sum does: it is written last. */
SIMD static void NAME(norm_rows)(const job *j, int64_t begin, int64_t end) {
    const int64_t n = j->width;
    const bool rounds = DIGITS < 24 || j->narrow, finite = rounds && NAME(scales_are_finite)(j->scale, j->bias, n);
    for (int64_t row = begin; row < end; row++) {
        const T *x = (const T *)j->x + row * n;
        A m, r;

        if (j->other) {
            T *sum = (T *)j->sum + row * j->width;
            BY_TYPE(j->from, NAME(add_row), j, row, sum);
            x = sum;
        }
        NAME(moments)(x, j->width, j->out ? (const T *)j->out + row * j->width : x, j->centred, j->epsilon, &m, &r);
        if (j->means) ((A *)j->means)[row] = m;
        if (j->inverses) ((A *)j->inverses)[row] = r;
#if DIGITS == 24
        if (j->narrow) BY_TYPE(j->to, NAME(scale_row), finite, x, n, m, r, j->scale, j->bias, row * n, j->narrow);
#endif
        if (j->out) NAME(scale_row)(DT_NONE, finite, x, n, m, r, j->scale, j->bias, row * n, j->out);
    }
}

/* dx, or what it makes with another gradient, to which it is added as a number of T. */
SIMD_PART void NAME(save_dx)(const job *j, bool adds, int64_t i, A dx) {
    ((T *)j->out)[i] = adds ? PUT(GET(PUT(dx)) + GET(((const T *)j->other)[i])) : PUT(dx);
}

/* The rows of one chunk: dx, and what they add to the gradients of scale and bias. */
SIMD_PART void NAME(grad_rows)(dtype from, bool adds, const job *j, int64_t chunk, int64_t begin, int64_t end) {
    const int64_t n = j->width;
    const void *dy = j->dy; /* read in a loop that adds up, j->dy would keep it from being vectorised */
    const A *scale = j->scale;
    A *dscale = j->partial ? (A *)j->partial + 2 * chunk * n : NULL, *dbias = dscale + (dscale ? n : 0);

    for (int64_t i = 0; dscale && i < 2 * n; i++) dscale[i] = 0;
    for (int64_t row = begin; row < end; row++) {
        const int64_t first = row * n;
        const T *x = (const T *)j->x + first;
        const A m = j->means ? ((const A *)j->means)[row] : 0, r = ((const A *)j->inverses)[row];

        if (j->out) {
            double sum = 0, dot = 0;
            SUM_2(n, sum, NAME(load)(dy, from, first + i) * scale[i], dot,
                  NAME(load)(dy, from, first + i) * scale[i] * ((GET(x[i]) - m) * r));
            const A a = j->centred ? (A)(sum / (double)n) : 0, b = (A)(dot / (double)n);
            if (dscale) {
#pragma omp simd
                for (int64_t i = 0; i < n; i++) {
                    A d = NAME(load)(dy, from, first + i), normed = (GET(x[i]) - m) * r;
                    dscale[i] += d * normed;
                    dbias[i] += d;
                    NAME(save_dx)(j, adds, first + i, r * (d * scale[i] - a - normed * b));
                }
            } else {
#pragma omp simd
                for (int64_t i = 0; i < n; i++)
                    NAME(save_dx)(j, adds, first + i,
                                  r * (NAME(load)(dy, from, first + i) * scale[i] - a - (GET(x[i]) - m) * r * b));
            }
        } else if (dscale) {
#pragma omp simd
            for (int64_t i = 0; i < n; i++) {
                const A d = NAME(load)(dy, from, first + i);
                dscale[i] += d * ((GET(x[i]) - m) * r);
                dbias[i] += d;
            }
        }
    }
}

SIMD static void NAME(norm_grad_rows)(const job *j, int64_t chunk, int64_t begin, int64_t end) {
    if (j->other) BY_TYPE(j->from, NAME(grad_rows), true, j, chunk, begin, end);
    else BY_TYPE(j->from, NAME(grad_rows), false, j, chunk, begin, end);
}
#undef BY_TYPE

/* The chunks of the gradient of scale (0) or bias (1) added up, for some of its elements. */
SIMD static void NAME(join_columns)(const job *j, int64_t which, int64_t from, int64_t width, double *sums) {
    for (int64_t k = 0; k < width; k++) sums[k] = 0;
    for (int64_t chunk = 0; chunk < j->chunks; chunk++) {
        const A *p = (const A *)j->partial + (2 * chunk + which) * j->width + from;
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

        NAME(moments)(x, n, y, true, j->epsilon, &m, &r);
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
