/* scan.cu -- mirrors ops/reductions/scan.c: products, log sums of exponentials, extremes along an axis, gradients.
 *
 * What may be put together in any grouping is shared out: a block has a lane, each thread a chunk of it; what the
 * chunks leave is put together in order, then each thread goes through its chunk again. A product may not: zero
 * times a chunk that overflows is no zero. There a thread has a lane, and its neighbours the next ones. */
#ifndef T
#include "cuda/kernels/kernel.h"

typedef struct lanes_args {
    const void *a, *b, *c;
    void *out;
    int64_t lanes, length, step; /* elements of a lane are `step` apart */
} lanes_args;

#ifdef ORT_HOST
kernel_fn cum_prod_cuda, cum_prod_grad_cuda, log_cum_sum_exp_cuda, log_cum_sum_exp_grad_cuda, cum_arg_max_cuda,
    cum_arg_min_cuda, prod_others_cuda;

static status run(ctx *c, const call *k, kernel kernels[DTYPE_COUNT], bool shared_out) {
    const shape *s = &k->in[0].shape;
    const int64_t given = node_int(k->node, "axis");
    const int axis = (int)(given < 0 ? given + s->rank : given);
    lanes_args a = {.a = k->in[0].data, .out = k->out[0].data};

    if (k->n_in == 3) a.b = k->in[1].data, a.c = k->in[2].data;
    a.length = s->rank ? s->dim[axis] : 1;
    a.step = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    a.lanes = shape_count(s) ? shape_count(s) / a.length : 0;
    return cuda_launch(c, k, &kernels[k->in[0].type],
                       shared_out ? geometry_rows(a.lanes, a.length) : geometry_over(a.lanes, WARP, WARP), &a);
}

#define ALONG(name, f, shared_out)                                                                                     \
    status name(ctx *c, const call *k) {                                                                               \
        static kernel kernels[DTYPE_COUNT] = {[F32] = {#f "_f32"}, [F64] = {#f "_f64"}, [I64] = {#f "_i64"}};          \
        return run(c, k, kernels, shared_out);                                                                         \
    }
ALONG(cum_prod_cuda, cum_product, false)
ALONG(cum_prod_grad_cuda, cum_product_grad, false)
ALONG(prod_others_cuda, product_others, false)
ALONG(log_cum_sum_exp_cuda, log_sum, true)
ALONG(log_cum_sum_exp_grad_cuda, log_sum_grad, true)
ALONG(cum_arg_max_cuda, cum_largest, true)
ALONG(cum_arg_min_cuda, cum_smallest, true)
#endif

#ifdef ORT_DEVICE
#include "cuda/kernels/chunks.h"

/* log(exp(a) + exp(b)) */
DEVICE double log_add(double a, double b) {
    const double high = a > b ? a : b, low = a > b ? b : a;
    if (a != a || b != b) return NAN;
    return isinf(high) ? high : high + log1p(exp(low - high));
}

/* What the elements behind `later` have summed up, seen from the one before, with sums `now`. */
DEVICE double carried(double total, double now, double later) {
    return total == 0 || isinf(now) ? 0 : total * exp(now - later);
}

#define A double /* what products are computed with */
#define TEMPLATE "cuda/kernels/scan.cu"
#include "cuda/kernels/each_f32_f64.h"
#undef A

#define ARE_INTEGERS
#define A uint64_t
#define T int64_t
#define NAME(f) f##_i64
#include "cuda/kernels/scan.cu"
#endif

#else /* the template */

/* --- a thread has a lane ------------------------------------------------------------------------------------------ */

KERNEL(NAME(cum_product), lanes_args) {
    FOR_EACH(lane, a.lanes) {
        const T *x = (const T *)a.a + LANE_START(lane, a.length, a.step);
        T *y = (T *)a.out + LANE_START(lane, a.length, a.step);
        A total = 1;
        for (int64_t i = 0; i < a.length; i++) {
            total *= (A)x[i * a.step];
            y[i * a.step] = (T)total;
        }
    }
}

#ifndef ARE_INTEGERS
KERNEL(NAME(cum_product_grad), lanes_args) {
    FOR_EACH(lane, a.lanes) {
        const int64_t start = LANE_START(lane, a.length, a.step), step = a.step;
        const T *dy = (const T *)a.a + start, *x = (const T *)a.b + start, *y = (const T *)a.c + start;
        T *dx = (T *)a.out + start;
        int64_t zero = 0;
        double total = 0, product;
        while (zero < a.length && x[zero * step] != 0) zero++;
        for (int64_t i = zero - 1; i >= 0; i--) {
            total += (double)dy[i * step] * (double)y[i * step];
            dx[i * step] = (T)(total / (double)x[i * step]);
        }
        if (zero == a.length) continue;
        product = zero ? (double)y[(zero - 1) * step] : 1;
        total = (double)dy[zero * step] * product;
        for (int64_t i = zero + 1; i < a.length; i++) {
            product *= (double)x[i * step];
            total += (double)dy[i * step] * product;
            dx[i * step] = 0;
        }
        dx[zero * step] = (T)total;
    }
}

KERNEL(NAME(product_others), lanes_args) {
    FOR_EACH(lane, a.lanes) {
        const T *x = (const T *)a.a + LANE_START(lane, a.length, a.step);
        T *y = (T *)a.out + LANE_START(lane, a.length, a.step);
        double before = 1, after = 1;
        for (int64_t i = 0; i < a.length; i++) {
            y[i * a.step] = (T)before;
            before *= (double)x[i * a.step];
        }
        for (int64_t i = a.length - 1; i >= 0; i--) {
            y[i * a.step] = (T)((double)y[i * a.step] * after);
            after *= (double)x[i * a.step];
        }
    }
}
#endif

/* --- a block has a lane ------------------------------------------------------------------------------------------- */

/* A NaN is better than all others, and than the one before. */
DEVICE int NAME(is_better)(T x, T best, int largest) { return (largest ? x >= best : x <= best) || IS_NAN(x); }

DEVICE void NAME(cum_extreme)(const lanes_args *a, int largest) {
    SHARED(int64_t, places, CHUNKS);
    const int64_t begin = chunk_begin(a->length, threadIdx.x, blockDim.x),
                  end = chunk_begin(a->length, (int64_t)threadIdx.x + 1, blockDim.x);
    FOR_BLOCKS(lane, a->lanes) {
        const T *x = (const T *)a->a + LANE_START(lane, a->length, a->step);
        int64_t *y = (int64_t *)a->out + LANE_START(lane, a->length, a->step), found = begin;
        for (int64_t i = begin; i < end; i++) {
            if (NAME(is_better)(x[i * a->step], x[found * a->step], largest)) found = i;
        }
        __syncthreads(); /* those of the lane before have been read */
        places[threadIdx.x] = begin < end ? found : -1;
        __syncthreads();
        found = 0;
        for (unsigned t = 0; t < threadIdx.x; t++) {
            if (places[t] < 0) continue;
            if (NAME(is_better)(x[places[t] * a->step], x[found * a->step], largest)) found = places[t];
        }
        for (int64_t i = begin; i < end; i++) {
            if (NAME(is_better)(x[i * a->step], x[found * a->step], largest)) found = i;
            y[i * a->step] = found;
        }
    }
}

KERNEL(NAME(cum_largest), lanes_args) { NAME(cum_extreme)(&a, 1); }
KERNEL(NAME(cum_smallest), lanes_args) { NAME(cum_extreme)(&a, 0); }

#ifndef ARE_INTEGERS
#define SCAN NAME(log_sum)
#define ARGS lanes_args
#define START -INFINITY
#define JOIN log_add
#define PLACE(i) (i)
#define READ(args, at) ((double)((const T *)(args)->a)[at])
#define WRITE(args, at, before, total) ((void)(before), ((T *)(args)->out)[at] = (T)(total))
#include "cuda/kernels/lane_scan.h"
#undef ARGS
#undef START
#undef JOIN
#undef PLACE

KERNEL(NAME(log_sum_grad), lanes_args) {
    SHARED(double, sums, CHUNKS);
    const int64_t begin = chunk_begin(a.length, threadIdx.x, blockDim.x),
                  end = chunk_begin(a.length, (int64_t)threadIdx.x + 1, blockDim.x);
    FOR_BLOCKS(lane, a.lanes) {
        const int64_t start = LANE_START(lane, a.length, a.step), step = a.step;
        const T *dy = (const T *)a.a + start, *x = (const T *)a.b + start, *y = (const T *)a.c + start;
        T *dx = (T *)a.out + start;
        double total = 0, later = 0;
        for (int64_t i = end - 1; i >= begin; i--) {
            const double now = (double)y[i * step];
            total = (double)dy[i * step] + carried(total, now, later);
            later = now;
        }
        __syncthreads(); /* those of the lane before have been read */
        sums[threadIdx.x] = total;
        __syncthreads();
        total = later = 0;
        for (int64_t t = (int64_t)blockDim.x - 1; t > (int64_t)threadIdx.x; t--) {
            const int64_t first = chunk_begin(a.length, t, blockDim.x);
            if (first == chunk_begin(a.length, t + 1, blockDim.x)) continue;
            /* An infinite sum within the chunk keeps out what is behind it. */
            double through = total;
            if (isinf((double)y[(chunk_begin(a.length, t + 1, blockDim.x) - 1) * step])) through = 0;
            total = sums[t] + carried(through, (double)y[first * step], later);
            later = (double)y[first * step];
        }
        for (int64_t i = end - 1; i >= begin; i--) {
            const double now = (double)y[i * step], size = (double)x[i * step];
            total = (double)dy[i * step] + carried(total, now, later);
            dx[i * step] = size == -INFINITY ? 0 : (T)(total * exp(size - now));
            later = now;
        }
    }
}
#endif
#endif
