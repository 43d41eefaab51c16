/* conv_narrow.c -- runs 1x1 convolutions of bfloat16 as products, on CPUs with a kernel for these (gemm/gemm_packed.c).
 *
 * An image [channels, pixels] is a matrix as it lies:
 *
 *     y = w x          dx = w' dy          dw = sum over images of dy x'
 *
 * The sum is kept in float32 until all images are in it. Pixels of small images are collected into lines first, so that
 * there are fewer and longer sums. Where windows are further apart than a pixel, those that are seen are picked out of x
 * first, and put back into dx. */
#include <string.h>

#include "core/parallel.h"
#include "gemm/gemm.h"
#include "ops/spatial/conv_products.h"

enum { LEAST_CHANNELS = 8, LONG_LINE = 256, COLLECTED = 2 << 20 /* bytes */ };

/* Windows of one pixel, all within the image. */
static bool sees_pixels(const conv *v) {
    for (int i = 0; i < SPATIAL; i++)
        if (v->w.kernel[i] != 1 || v->w.before[i] != 0 || (v->w.out[i] - 1) * v->w.stride[i] >= v->w.in[i])
            return false;
    return true;
}

bool conv_by_product(const conv *v) {
    return v->type == BF16 && sees_pixels(v) && v->in >= LEAST_CHANNELS && v->out >= LEAST_CHANNELS &&
           gemm_rounds(BF16) && gemm_sums_wide(BF16);
}

/* --- the pixels that are seen --------------------------------------------------------------------------------------- */

/* The convolution of the pixels that `v` sees. */
static conv of_picked(const conv *v) {
    conv dense = *v;
    for (int i = 0; i < SPATIAL; i++) {
        dense.w.in[i] = v->w.out[i];
        dense.w.stride[i] = 1;
    }
    return dense;
}

typedef struct picking {
    const conv *v;
    const bf16 *from;
    bf16 *to;
} picking;

/* Planes [begin, end) of what is seen of x. */
static void pick(void *arg, int64_t begin, int64_t end) {
    const picking *k = arg;
    const window *w = &k->v->w;
    const int64_t plane = volume(w->in), lines = w->out[0] * w->out[1];
    bf16 *to = k->to + begin * lines * w->out[2];

    for (int64_t line = begin * lines; line < end * lines; line++, to += w->out[2]) {
        const int64_t z = line % lines / w->out[1] * w->stride[0], y = line % w->out[1] * w->stride[1];
        const bf16 *from = k->from + line / lines * plane + (z * w->in[1] + y) * w->in[2];
        for (int64_t i = 0; i < w->out[2]; i++) to[i] = from[i * w->stride[2]];
    }
}

/* Planes [begin, end) of dx, nothing but zeros where nothing is seen. */
static void put_back(void *arg, int64_t begin, int64_t end) {
    const picking *k = arg;
    const window *w = &k->v->w;
    const int64_t plane = volume(w->in), lines = w->out[0] * w->out[1];
    const bf16 *from = k->from + begin * lines * w->out[2];

    memset(k->to + begin * plane, 0, (size_t)((end - begin) * plane) * sizeof(bf16));
    for (int64_t line = begin * lines; line < end * lines; line++, from += w->out[2]) {
        const int64_t z = line % lines / w->out[1] * w->stride[0], y = line % w->out[1] * w->stride[1];
        bf16 *to = k->to + line / lines * plane + (z * w->in[1] + y) * w->in[2];
        for (int64_t i = 0; i < w->out[2]; i++) to[i * w->stride[2]] = from[i];
    }
}

static void move_pixels(const conv *v, range_fn *move, const void *from, void *to) {
    picking k = {v, from, to};
    parallel_for(v->images * v->groups * v->in, parallel_rows(volume(v->w.out)), move, &k);
}

static int64_t picked(const conv *v) {
    if (conv_is_pointwise(v)) return 0;
    return size_mul(size_mul(v->images, size_mul(v->groups, v->in)), volume(v->w.out));
}

/* --- images as matrices ------------------------------------------------------------------------------------------- */

static int64_t plane_of(const conv *v) { return volume(v->w.in); }
static int64_t weights_of(const conv *v) { return v->groups * v->out * v->in; }

/* Of each group and image: c = a b, where `b` and `c` are images with so many channels in a group. */
static gemm image_product(const conv *v, const void *b, int64_t b_channels, void *c, int64_t c_channels) {
    const int64_t plane = plane_of(v);
    gemm g = {.type = BF16, .alpha = 1, .n_batch = 2, .batch = {v->groups, v->images}};

    g.m = c_channels;
    g.n = plane;
    g.k = b_channels;
    g.a_step[0] = v->out * v->in;
    g.b = b;
    g.b_row = plane;
    g.b_col = 1;
    g.b_step[0] = b_channels * plane;
    g.b_step[1] = v->groups * b_channels * plane;
    g.c = c;
    g.c_row = plane;
    g.c_step[0] = c_channels * plane;
    g.c_step[1] = v->groups * c_channels * plane;
    return g;
}

void conv_forward_product(const conv *v, const void *x, const void *w, void *y, bool add, void *work) {
    const conv dense = of_picked(v);
    gemm g = image_product(&dense, picked(v) ? work : x, v->in, y, v->out);

    if (picked(v)) move_pixels(v, pick, x, work);
    g.a = w;
    g.a_row = v->in;
    g.a_col = 1;
    g.beta = add;
    gemm_run(&g);
}

void conv_grad_input_product(const conv *v, const void *dy, const void *w, void *dx, void *work) {
    const conv dense = of_picked(v);
    gemm g = image_product(&dense, dy, v->out, picked(v) ? work : dx, v->in);

    g.a = w;
    g.a_row = 1;
    g.a_col = v->in;
    gemm_run(&g);
    if (picked(v)) move_pixels(v, put_back, work, dx);
}

/* --- the gradient of the weights ---------------------------------------------------------------------------------- */

/* Images that are collected at once; 1: none is, they lie in long lines. */
static int64_t images_at_once(const conv *v) {
    const int64_t plane = plane_of(v),
                  bytes = size_mul(v->groups * (v->in + v->out), size_mul(plane, (int64_t)sizeof(bf16)));

    if (plane >= LONG_LINE || bytes == 0 || COLLECTED / bytes < 2) return 1;
    return COLLECTED / bytes < v->images ? COLLECTED / bytes : v->images;
}

static int64_t collected(const conv *v) { /* elements */
    const int64_t images = images_at_once(v);
    return images > 1 ? v->groups * (v->in + v->out) * images * plane_of(v) : 0;
}

size_t conv_product_scratch(const conv *v, conv_product product) {
    const conv dense = of_picked(v);
    const int64_t pixels = size_mul(picked(v), (int64_t)sizeof(bf16));

    if (product != CONV_GRAD_WEIGHT) return (size_t)pixels;
    const int64_t sums = size_mul(weights_of(v), (int64_t)sizeof(float));
    return (size_t)size_add(size_add(sums, size_mul(collected(&dense), (int64_t)sizeof(bf16))), pixels);
}

typedef struct collection {
    const bf16 *from;
    bf16 *to;
    int64_t images, channels, plane;
} collection;

/* Lines [begin, end) of [channels, images] out of [images, channels]. */
static void collect(void *arg, int64_t begin, int64_t end) {
    const collection *k = arg;

    for (int64_t i = begin; i < end; i++) {
        const int64_t channel = i / k->images, image = i % k->images;
        memcpy(k->to + i * k->plane, k->from + (image * k->channels + channel) * k->plane,
               (size_t)k->plane * sizeof(bf16));
    }
}

static void collect_images(const conv *v, int64_t images, const bf16 *from, int64_t channels, bf16 *to) {
    collection k = {from, to, images, channels, plane_of(v)};
    parallel_for(images * channels, parallel_rows(k.plane), collect, &k);
}

/* The sums of a convolution that sees every pixel. */
static void sum_images(const conv *v, const bf16 *x, const bf16 *dy, float *sums, bf16 *lines) {
    const int64_t plane = plane_of(v), ins = v->groups * v->in, outs = v->groups * v->out, most = images_at_once(v);
    gemm g = {.type = BF16, .wide_c = true, .alpha = 1, .n_batch = 1, .batch = {v->groups}};

    g.m = v->out;
    g.n = v->in;
    g.a_col = g.b_row = 1;
    g.c = sums;
    g.c_row = v->in;
    g.c_step[0] = v->out * v->in;
    if (v->images == 0) memset(sums, 0, (size_t)weights_of(v) * sizeof *sums);
    for (int64_t image = 0; image < v->images; image += most) {
        const int64_t images = most < v->images - image ? most : v->images - image;
        g.a = dy + image * outs * plane;
        g.b = x + image * ins * plane;
        if (images > 1) {
            collect_images(v, images, g.a, outs, lines);
            collect_images(v, images, g.b, ins, lines + outs * images * plane);
            g.a = lines;
            g.b = lines + outs * images * plane;
        }
        g.k = g.a_row = g.b_col = images * plane;
        g.a_step[0] = v->out * g.k;
        g.b_step[0] = v->in * g.k;
        g.beta = image > 0;
        gemm_run(&g);
    }
}

typedef struct rounding {
    const float *from;
    bf16 *to;
} rounding;

SIMD static void round_sums(void *arg, int64_t begin, int64_t end) {
    const rounding *r = arg;
    for (int64_t i = begin; i < end; i++) r->to[i] = f32_to_bf16(r->from[i]);
}

void conv_grad_weight_product(const conv *v, const void *x, const void *dy, void *dw, void *work) {
    const conv dense = of_picked(v);
    float *sums = work;
    bf16 *lines = (bf16 *)(sums + weights_of(v)), *pixels = lines + collected(&dense);
    rounding r = {sums, dw};

    if (picked(v)) move_pixels(v, pick, x, pixels);
    sum_images(&dense, picked(v) ? pixels : x, dy, sums, lines);
    parallel_for(weights_of(v), GRAIN, round_sums, &r);
}
