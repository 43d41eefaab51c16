/* conv_kernel.c -- computes convolutions as matrix products.
 *
 * The inputs that output pixel p sees, all channels and kernel elements of them, are column p of a matrix:
 *
 *     cols [in * kernel, pixels]          y = w cols       dcols = w' dy       dw = dy cols'
 *
 * cols is made in scratch memory, a chunk at a time: whole images while they are small, rows of one image when they are
 * large. Adding dcols back to the pixels they came from gives dx. A 1x1 convolution's cols is x itself, so nothing is
 * copied, but for images of very few pixels, which are put side by side: a product of so few columns is slow. With
 * very few output channels a product has too few rows to be worth making columns for: there each kernel element is one
 * scaled addition of a shifted image. Every sum has a fixed order, whatever the number of threads. */
#include <string.h>

#include "core/ints.h"
#include "core/parallel.h"
#include "core/size.h"
#include "gemm/gemm.h"
#include "ops/spatial/conv_products.h"

enum { CHUNK_BYTES = 2 << 20, CHUNK_PIXELS = 256, FEW_CHANNELS = 8, FEW_PIXELS = 16, TOGETHER = 16 };

/* --- how the work is cut ------------------------------------------------------------------------------------------ */

/* Columns are [channels of x * kernel elements, images * pixels]. */
typedef struct chunk {
    const conv *v;
    char *cols, *dy;       /* dy: [channels, images * pixels], for weights */
    int64_t image, images; /* first image, and how many */
    int64_t line, lines;   /* first line of outputs (of w.out[2] pixels), and how many: all, if images > 1 */
    const char *from;      /* x, for columns */
    char *to;              /* dx, for adding columns */
} chunk;

static int64_t lines_of(const conv *v) { return size_mul(v->w.out[0], v->w.out[1]); }
static int64_t rows_of(const conv *v) { return size_mul(v->groups, conv_depth(v)); }

/* Largest chunk: images with all their lines, or lines of one image. Wide enough for a good product. */
static chunk plan_chunks(const conv *v) {
    const int64_t plane = volume(v->w.out), bytes = size_mul(rows_of(v), (int64_t)dtype_size(v->type));
    const int64_t fit = bytes > 0 ? CHUNK_BYTES / bytes : 0, pixels = fit > CHUNK_PIXELS ? fit : CHUNK_PIXELS;
    chunk k = {.v = v, .images = 1, .lines = lines_of(v)};

    if (plane > pixels) k.lines = v->w.out[2] > pixels ? 1 : pixels / v->w.out[2];
    else if (plane > 0) k.images = least(v->images, pixels / plane);
    return k;
}

/* The next chunk of the convolution; false after the last. Begin with images == lines == 0 in `now`. */
static bool next_chunk(const chunk *largest, chunk *now) {
    const conv *v = largest->v;

    if (now->line + now->lines < lines_of(v)) {
        now->line += now->lines;
    } else {
        now->image += now->images;
        now->line = 0;
    }
    now->images = least(largest->images, v->images - now->image);
    now->lines = least(largest->lines, lines_of(v) - now->line);
    return now->images > 0;
}

static int64_t pixels_of(const chunk *k) { return size_mul(k->lines, k->v->w.out[2]); } /* of one image */
static int64_t width_of(const chunk *k) { return size_mul(k->images, pixels_of(k)); }   /* columns */

/* A convolution over the pixels of x as they lie: one long line. */
static conv as_line(const conv *v) {
    conv flat = *v;
    flat.w.in[0] = flat.w.in[1] = flat.w.out[0] = flat.w.out[1] = 1;
    flat.w.in[2] = flat.w.out[2] = volume(v->w.in);
    return flat;
}

static bool few_channels(const conv *v) {
    return v->out < FEW_CHANNELS && (!conv_is_pointwise(v) || v->in < FEW_CHANNELS);
}

/* Columns of single elements are x itself; but where images are small, one product over several of them is better. */
static bool is_copy_free(const conv *v) { return conv_is_pointwise(v) && volume(v->w.out) >= CHUNK_PIXELS; }

/* Is a 1x1 convolution one product over several images, which takes copies of x and y? */
static bool is_together(const conv *v) {
    return conv_is_pointwise(v) && volume(v->w.out) < FEW_PIXELS && v->images > 1;
}

size_t conv_scratch(const conv *v) {
    if (is_copy_free(v) || few_channels(v)) return 0;
    chunk k = plan_chunks(v);
    const int64_t elements = size_mul(size_add(rows_of(v), size_mul(v->groups, v->out)), width_of(&k));
    return (size_t)size_mul(elements, (int64_t)dtype_size(v->type));
}

/* --- columns ------------------------------------------------------------------------------------------------------ */

/* One kernel element of one channel: where it looks along each axis. */
typedef struct tap {
    int64_t shift[SPATIAL], first[SPATIAL], last[SPATIAL]; /* input = output * stride + shift, for these outputs */
} tap;

static tap tap_at(const window *w, int64_t index) {
    tap t;
    for (int i = SPATIAL - 1; i >= 0; i--) {
        int64_t at = index % w->kernel[i];
        index /= w->kernel[i];
        t.shift[i] = at * w->dilation[i] - w->before[i];
        window_reach(w, i, at, &t.first[i], &t.last[i]);
    }
    return t;
}

/* Offset into an input plane of what the first output of a line sees, -1 where the line sees none. */
static int64_t line_offset(const window *w, const tap *t, int64_t line) {
    int64_t z = line / w->out[1], y = line % w->out[1];

    if (z < t->first[0] || z >= t->last[0] || y < t->first[1] || y >= t->last[1]) return -1;
    return ((z * w->stride[0] + t->shift[0]) * w->in[1] + y * w->stride[1] + t->shift[1]) * w->in[2];
}

#define TEMPLATE "ops/spatial/conv_lines.h"
#include "ops/pointwise/float_and_double.h"
#define TEMPLATE "ops/spatial/conv_columns.h"
#include "ops/pointwise/float_and_double.h"

/* Do windows lie side by side within x, as the patches of a vision transformer do? */
static bool is_patches(const conv *v) {
    for (int i = 0; i < SPATIAL; i++)
        if (v->w.stride[i] != v->w.kernel[i] || v->w.dilation[i] != 1 || v->w.before[i] != 0 ||
            v->w.out[i] * v->w.stride[i] > v->w.in[i])
            return false;
    return v->w.kernel[2] > 1;
}

static void make_columns(chunk *k) {
    const int64_t parts = rows_of(k->v) * k->images, across = k->v->w.kernel[2];
    const bool wide = k->v->type == F64;

    if (is_patches(k->v))
        parallel_for(parts / across, parallel_rows(pixels_of(k) * across),
                     wide ? make_patches_double : make_patches_float, k);
    else parallel_for(parts, parallel_rows(pixels_of(k)), wide ? make_columns_double : make_columns_float, k);
}

static void add_columns(chunk *k) {
    int64_t planes = k->images * k->v->groups * k->v->in;
    range_fn *body = k->v->type == F64 ? add_columns_double : add_columns_float;
    parallel_for(planes, parallel_rows(pixels_of(k) * conv_taps(k->v)), body, k);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

static void *at(const void *base, int64_t element, dtype type) {
    return (char *)(uintptr_t)base + element * (int64_t)dtype_size(type);
}

/* The chunk's first pixel in a tensor like y. */
static void *first_pixel(const chunk *k, const void *y) {
    const conv *v = k->v;
    return at(y, k->image * v->groups * v->out * volume(v->w.out) + k->line * v->w.out[2], v->type);
}

/* What walks from image to image of a tensor like y, and from group to group. */
static int64_t image_step(const conv *v) { return v->groups * v->out * volume(v->w.out); }
static int64_t group_step(const conv *v) { return v->out * volume(v->w.out); }

/* The matrix of columns, `width` of them in each row: from image to image they are so many elements apart, and from
 * group to group, whose rows follow one another. */
typedef struct columns {
    const void *data;
    int64_t width, image_step, group_step;
} columns;

static columns made_columns(const chunk *k) {
    return (columns){k->cols, width_of(k), pixels_of(k), conv_depth(k->v) * width_of(k)};
}

/* The columns of single elements: x, of which the chunk is all images. */
static columns columns_of_x(const chunk *k, const void *x) {
    const int64_t plane = volume(k->v->w.in);
    return (columns){x, plane, k->v->groups * k->v->in * plane, k->v->in * plane};
}

/* y = w cols, for each image and group */
static void forward_product(const chunk *k, columns cols, const void *w, void *y, bool add) {
    const conv *v = k->v;
    gemm g = {.type = v->type, .alpha = 1, .beta = add, .n_batch = 2, .batch = {k->images, v->groups}};

    g.m = v->out;
    g.n = pixels_of(k);
    g.k = conv_depth(v);
    g.a = w;
    g.a_row = g.k;
    g.a_col = 1;
    g.a_step[1] = v->out * g.k;
    g.b = cols.data;
    g.b_row = cols.width;
    g.b_col = 1;
    g.b_step[0] = cols.image_step;
    g.b_step[1] = cols.group_step;
    g.c = first_pixel(k, y);
    g.c_row = volume(v->w.out);
    g.c_step[0] = image_step(v);
    g.c_step[1] = group_step(v);
    gemm_run(&g);
}

/* cols = w' dy */
static void input_product(const chunk *k, const void *dy, const void *w, columns cols) {
    const conv *v = k->v;
    gemm g = {.type = v->type, .alpha = 1, .n_batch = 2, .batch = {k->images, v->groups}};

    g.m = conv_depth(v);
    g.n = pixels_of(k);
    g.k = v->out;
    g.a = w;
    g.a_row = 1;
    g.a_col = g.m;
    g.a_step[1] = v->out * g.m;
    g.b = first_pixel(k, dy);
    g.b_row = volume(v->w.out);
    g.b_col = 1;
    g.b_step[0] = image_step(v);
    g.b_step[1] = group_step(v);
    g.c = (void *)(uintptr_t)cols.data;
    g.c_row = cols.width;
    g.c_step[0] = cols.image_step;
    g.c_step[1] = cols.group_step;
    gemm_run(&g);
}

/* Lines [begin, end) of the chunk's dy, by channel and image. */
static void collect_lines(void *arg, int64_t begin, int64_t end) {
    const chunk *k = arg;
    const int64_t bytes = pixels_of(k) * (int64_t)dtype_size(k->v->type), channels = k->v->groups * k->v->out;

    for (int64_t part = begin; part < end; part++) {
        const int64_t channel = part / k->images, image = part % k->images;
        memcpy(k->dy + part * bytes, k->from + (image * channels + channel) * bytes, (size_t)bytes);
    }
}

/* dw += dy cols'. The pixels of several images are one long sum, for which dy is collected: they must lie in line. */
static void weight_product(const chunk *k, columns cols, const void *dy, void *dw) {
    const conv *v = k->v;
    gemm g = {.type = v->type, .alpha = 1, .beta = k->image > 0 || k->line > 0, .n_batch = 1, .batch = {v->groups}};

    g.m = v->out;
    g.n = conv_depth(v);
    g.k = width_of(k);
    g.a = first_pixel(k, dy);
    g.a_row = volume(v->w.out);
    g.a_col = 1;
    if (k->images > 1) {
        chunk lines = *k;
        lines.from = first_pixel(k, dy);
        parallel_for(k->images * v->groups * v->out, parallel_rows(pixels_of(k)), collect_lines, &lines);
        g.a = k->dy;
        g.a_row = g.k;
    }
    g.a_step[0] = v->out * g.a_row;
    g.b = cols.data;
    g.b_row = 1;
    g.b_col = cols.width;
    g.b_step[0] = cols.group_step;
    g.c = dw;
    g.c_row = g.n;
    g.c_step[0] = v->out * g.n;
    gemm_run(&g);
}

/* --- 1x1 over images of few pixels --------------------------------------------------------------------------------- */

/* Images of `channels`, [images, channels, plane] in `apart`, and [channels, images, plane] in `wide`. */
typedef struct together {
    void *apart, *wide;
    int64_t images, channels, plane;
    bool add; /* to what lies apart */
} together;

#define TEMPLATE "ops/spatial/conv_together.h"
#include "ops/pointwise/float_and_double.h"

static void put_together(const chunk *k, const void *images, int64_t channels, void *wide) {
    const int64_t plane = volume(k->v->w.out);
    together t = {at(images, k->image * channels * plane, k->v->type), wide, k->images, channels, plane, false};
    parallel_for(channels, parallel_rows(t.images * plane),
                 k->v->type == F64 ? put_together_double : put_together_float, &t);
}

static void take_apart(const chunk *k, void *wide, int64_t channels, void *images, bool add) {
    const int64_t plane = volume(k->v->w.out);
    together t = {at(images, k->image * channels * plane, k->v->type), wide, k->images, channels, plane, add};
    parallel_for(channels, parallel_rows(t.images * plane), k->v->type == F64 ? take_apart_double : take_apart_float,
                 &t);
}

/* y = w x, or x = w' y, for each group; all images of the chunk are one matrix. */
static void product_together(const chunk *k, const void *w, bool transposed) {
    const conv *v = k->v;
    gemm g = {.type = v->type, .alpha = 1, .n_batch = 1, .batch = {v->groups}};

    g.m = transposed ? v->in : v->out;
    g.n = width_of(k);
    g.k = transposed ? v->out : v->in;
    g.a = w;
    g.a_row = transposed ? 1 : v->in;
    g.a_col = transposed ? v->in : 1;
    g.a_step[0] = v->out * v->in;
    g.b = transposed ? k->dy : k->cols;
    g.b_row = g.n;
    g.b_col = 1;
    g.b_step[0] = g.k * g.n;
    g.c = transposed ? k->cols : k->dy;
    g.c_row = g.n;
    g.c_step[0] = g.m * g.n;
    gemm_run(&g);
}

/* dw += dy x', for each group */
static void weight_together(const chunk *k, void *dw) {
    const conv *v = k->v;
    gemm g = {.type = v->type, .alpha = 1, .beta = k->image > 0, .n_batch = 1, .batch = {v->groups}};

    g.m = v->out;
    g.n = v->in;
    g.k = width_of(k);
    g.a = k->dy;
    g.a_row = g.k;
    g.a_col = 1;
    g.a_step[0] = g.m * g.k;
    g.b = k->cols;
    g.b_row = 1;
    g.b_col = g.k;
    g.b_step[0] = g.n * g.k;
    g.c = dw;
    g.c_row = g.n;
    g.c_step[0] = g.m * g.n;
    gemm_run(&g);
}

static void forward_together(const conv *v, const void *x, const void *w, void *y, bool add, void *work) {
    const chunk largest = plan_chunks(v);
    for (chunk k = {.v = v, .cols = work}; next_chunk(&largest, &k);) {
        k.dy = at(k.cols, rows_of(v) * width_of(&k), v->type);
        put_together(&k, x, v->groups * v->in, k.cols);
        product_together(&k, w, false);
        take_apart(&k, k.dy, v->groups * v->out, y, add);
    }
}

static void grad_input_together(const conv *v, const void *dy, const void *w, void *dx, void *work) {
    const chunk largest = plan_chunks(v);
    for (chunk k = {.v = v, .cols = work}; next_chunk(&largest, &k);) {
        k.dy = at(k.cols, rows_of(v) * width_of(&k), v->type);
        put_together(&k, dy, v->groups * v->out, k.dy);
        product_together(&k, w, true);
        take_apart(&k, k.cols, v->groups * v->in, dx, false);
    }
}

static void grad_weight_together(const conv *v, const void *x, const void *dy, void *dw, void *work) {
    const chunk largest = plan_chunks(v);
    for (chunk k = {.v = v, .cols = work}; next_chunk(&largest, &k);) {
        k.dy = at(k.cols, rows_of(v) * width_of(&k), v->type);
        put_together(&k, x, v->groups * v->in, k.cols);
        put_together(&k, dy, v->groups * v->out, k.dy);
        weight_together(&k, dw);
    }
}

/* --- few channels: scaled additions of shifted images ------------------------------------------------------------- */

typedef struct direct {
    const conv *v;
    const void *x, *w, *dy;
    void *out;
    bool add;
} direct;

#define TEMPLATE "ops/spatial/conv_direct.h"
#include "ops/pointwise/float_and_double.h"

/* --- the three ---------------------------------------------------------------------------------------------------- */

void conv_forward(const conv *v, const void *x, const void *w, void *y, bool add, void *work) {
    const conv flat = as_line(v);
    const chunk largest = plan_chunks(v), all = {.v = &flat, .images = v->images, .lines = 1};
    direct d = {.v = v, .x = x, .w = w, .out = y, .add = add};

    if (conv_forward_depthwise(v, x, w, y, add)) return;
    if (few_channels(v)) {
        parallel_for(v->images * v->groups * v->out, parallel_rows(volume(v->w.out) * conv_depth(v)),
                     v->type == F64 ? direct_forward_double : direct_forward_float, &d);
        return;
    }
    if (is_together(v)) {
        forward_together(v, x, w, y, add, work);
        return;
    }
    if (conv_is_pointwise(v)) {
        forward_product(&all, columns_of_x(&all, x), w, y, add);
        return;
    }
    for (chunk k = {.v = v, .cols = work, .from = x}; next_chunk(&largest, &k);) {
        make_columns(&k);
        forward_product(&k, made_columns(&k), w, y, add);
    }
}

void conv_grad_input(const conv *v, const void *dy, const void *w, void *dx, void *work) {
    const conv flat = as_line(v);
    const chunk largest = plan_chunks(v), all = {.v = &flat, .images = v->images, .lines = 1};
    direct d = {.v = v, .dy = dy, .w = w, .out = dx};

    if (conv_grad_input_depthwise(v, dy, w, dx)) return;
    if (few_channels(v)) {
        parallel_for(v->images * v->groups * v->in, parallel_rows(volume(v->w.out) * v->out * conv_taps(v)),
                     v->type == F64 ? direct_input_double : direct_input_float, &d);
        return;
    }
    if (is_together(v)) {
        grad_input_together(v, dy, w, dx, work);
        return;
    }
    if (conv_is_pointwise(v)) {
        input_product(&all, dy, w, columns_of_x(&all, dx));
        return;
    }
    for (chunk k = {.v = v, .cols = work, .to = dx}; next_chunk(&largest, &k);) {
        input_product(&k, dy, w, made_columns(&k));
        add_columns(&k);
    }
}

void conv_grad_weight(const conv *v, const void *x, const void *dy, void *dw, void *work) {
    const conv flat = as_line(v);
    const int64_t count = v->groups * v->out * conv_depth(v);
    const chunk largest = plan_chunks(v);
    direct d = {.v = v, .x = x, .dy = dy, .out = dw};

    if (count == 0) return;
    if (v->images == 0 || volume(v->w.out) == 0) {
        memset(dw, 0, (size_t)count * dtype_size(v->type));
        return;
    }
    if (conv_grad_weight_depthwise(v, x, dy, dw)) return;
    if (few_channels(v)) {
        parallel_for(count, parallel_rows(volume(v->w.out) * v->images),
                     v->type == F64 ? direct_weight_double : direct_weight_float, &d);
        return;
    }
    if (is_copy_free(v)) {
        for (chunk k = {.v = &flat, .images = 1, .lines = 1}; k.image < v->images; k.image++)
            weight_product(&k, columns_of_x(&k, at(x, k.image * v->groups * v->in * volume(v->w.in), v->type)), dy, dw);
        return;
    }
    if (conv_is_pointwise(v) && plan_chunks(v).lines == lines_of(v)) {
        grad_weight_together(v, x, dy, dw, work);
        return;
    }
    for (chunk k = {.v = v, .cols = work, .from = x}; next_chunk(&largest, &k);) {
        k.dy = k.cols + rows_of(v) * width_of(&k) * (int64_t)dtype_size(v->type);
        make_columns(&k);
        weight_product(&k, made_columns(&k), dy, dw);
    }
}
