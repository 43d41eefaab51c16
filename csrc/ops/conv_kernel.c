/* conv_kernel.c -- convolution as matrix products.
 *
 * The inputs that output pixel p sees, all channels and kernel elements of them, are column p of a matrix:
 *
 *     cols [in * kernel, pixels]          y = w cols       dcols = w' dy       dw = dy cols'
 *
 * cols is made in scratch memory, a chunk at a time: whole images while they are small, rows of one image when they are
 * large. Adding dcols back to the pixels they came from gives dx. A 1x1 convolution's cols is x itself, so nothing is
 * copied. With very few output channels a product has too few rows to be worth making columns for: there each kernel
 * element is one scaled addition of a shifted image. Every sum has a fixed order, whatever the number of threads. */
#include <string.h>

#include "core/parallel.h"
#include "exec/gemm.h"
#include "ops/conv.h"

enum { CHUNK_BYTES = 2 << 20, FEW_CHANNELS = 8 };

static inline int64_t least(int64_t a, int64_t b) { return a < b ? a : b; }

/* --- how the work is cut ------------------------------------------------------------------------------------------ */

typedef struct chunk {
    const conv *v;
    char *cols;
    int64_t image, images; /* first image, and how many */
    int64_t line, lines;   /* first line of outputs (of w.out[2] pixels), and how many: all, if images > 1 */
    const char *from;      /* x, for columns */
    char *to;              /* dx, for adding columns */
} chunk;

static int64_t lines_of(const conv *v) { return v->w.out[0] * v->w.out[1]; }

/* Largest chunk: images with all their lines, or lines of one image. */
static chunk plan_chunks(const conv *v) {
    int64_t line = v->groups * conv_depth(v) * v->w.out[2] * (int64_t)dtype_size(v->type);
    int64_t image = line * lines_of(v);
    chunk k = {.v = v, .images = 1, .lines = lines_of(v)};

    if (image > CHUNK_BYTES) k.lines = line > CHUNK_BYTES ? 1 : CHUNK_BYTES / line;
    else if (image > 0) k.images = least(v->images, CHUNK_BYTES / image);
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

static int64_t chunk_pixels(const chunk *k) { return k->lines * k->v->w.out[2]; }

static bool is_pointwise(const conv *v) {
    for (int i = 0; i < SPATIAL; i++)
        if (v->w.kernel[i] != 1 || v->w.stride[i] != 1 || v->w.before[i] != 0 || v->w.in[i] != v->w.out[i])
            return false;
    return true;
}

/* A convolution over the pixels of x as they lie: one long line. */
static conv as_line(const conv *v) {
    conv flat = *v;
    flat.w.in[0] = flat.w.in[1] = flat.w.out[0] = flat.w.out[1] = 1;
    flat.w.in[2] = flat.w.out[2] = volume(v->w.in);
    return flat;
}

static bool few_channels(const conv *v) { return v->out < FEW_CHANNELS && (!is_pointwise(v) || v->in < FEW_CHANNELS); }

size_t conv_scratch(const conv *v) {
    if (is_pointwise(v) || few_channels(v)) return 0;
    chunk k = plan_chunks(v);
    return (size_t)(k.images * v->groups * conv_depth(v) * chunk_pixels(&k)) * dtype_size(v->type);
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

/* A kernel element over the lines [line, line + lines) of outputs: `y` points to the first of them, x to a plane. */
#define LINES(T)                                                                                                       \
    /* y = x where it exists, 0 elsewhere */                                                                           \
    static inline void look_##T(const window *w, const tap *t, int64_t line, int64_t lines, const T *x, T *y) {        \
        const int64_t width = w->out[2], step = w->stride[2];                                                          \
        for (int64_t l = line; l < line + lines; l++, y += width) {                                                    \
            int64_t from = line_offset(w, t, l), first = from < 0 ? width : t->first[2];                               \
            int64_t last = from < 0 ? width : t->last[2];                                                              \
            const T *in = x + from + t->shift[2];                                                                      \
            for (int64_t p = 0; p < first; p++) y[p] = 0;                                                              \
            if (step == 1)                                                                                             \
                for (int64_t p = first; p < last; p++) y[p] = in[p];                                                   \
            else                                                                                                       \
                for (int64_t p = first; p < last; p++) y[p] = in[p * step];                                            \
            for (int64_t p = last; p < width; p++) y[p] = 0;                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    /* y += factor * x */                                                                                              \
    static inline void gather_##T(const window *w, const tap *t, int64_t line, int64_t lines, T factor, const T *x,    \
                                  T *y) {                                                                              \
        const int64_t step = w->stride[2], first = t->first[2], last = t->last[2];                                     \
        for (int64_t l = line; l < line + lines; l++, y += w->out[2]) {                                                \
            int64_t from = line_offset(w, t, l);                                                                       \
            const T *in = x + from + t->shift[2];                                                                      \
            if (from < 0) continue;                                                                                    \
            if (step == 1)                                                                                             \
                for (int64_t p = first; p < last; p++) y[p] += factor * in[p];                                         \
            else                                                                                                       \
                for (int64_t p = first; p < last; p++) y[p] += factor * in[p * step];                                  \
        }                                                                                                              \
    }                                                                                                                  \
    /* x += factor * y */                                                                                              \
    static inline void scatter_##T(const window *w, const tap *t, int64_t line, int64_t lines, T factor, const T *y,   \
                                   T *x) {                                                                             \
        const int64_t step = w->stride[2], first = t->first[2], last = t->last[2];                                     \
        for (int64_t l = line; l < line + lines; l++, y += w->out[2]) {                                                \
            int64_t to = line_offset(w, t, l);                                                                         \
            T *out = x + to + t->shift[2];                                                                             \
            if (to < 0) continue;                                                                                      \
            if (step == 1)                                                                                             \
                for (int64_t p = first; p < last; p++) out[p] += factor * y[p];                                        \
            else                                                                                                       \
                for (int64_t p = first; p < last; p++) out[p * step] += factor * y[p];                                 \
        }                                                                                                              \
    }                                                                                                                  \
    /* sum of x * y */                                                                                                 \
    static inline double dot_##T(const window *w, const tap *t, int64_t line, int64_t lines, const T *x, const T *y) { \
        const int64_t step = w->stride[2];                                                                             \
        double total = 0;                                                                                              \
        for (int64_t l = line; l < line + lines; l++, y += w->out[2]) {                                                \
            int64_t from = line_offset(w, t, l);                                                                       \
            const T *in = x + from + t->shift[2];                                                                      \
            T sum = 0;                                                                                                 \
            if (from < 0) continue;                                                                                    \
            _Pragma("omp simd reduction(+ : sum)") for (int64_t p = t->first[2]; p < t->last[2]; p++) sum +=           \
                y[p] * in[p * step];                                                                                   \
            total += (double)sum;                                                                                      \
        }                                                                                                              \
        return total;                                                                                                  \
    }

LINES(float)
LINES(double)

#define COLUMNS(T)                                                                                                     \
    /* Rows [begin, end) of the chunk's cols: image, channel, kernel element. */                                       \
    SIMD static void make_columns_##T(void *arg, int64_t begin, int64_t end) {                                         \
        const chunk *k = arg;                                                                                          \
        const conv *v = k->v;                                                                                          \
        const int64_t taps = conv_taps(v), first = k->image * v->groups * v->in;                                       \
        for (int64_t row = begin; row < end; row++) {                                                                  \
            const tap t = tap_at(&v->w, row % taps);                                                                   \
            look_##T(&v->w, &t, k->line, k->lines, (const T *)k->from + (first + row / taps) * volume(v->w.in),        \
                     (T *)k->cols + row * chunk_pixels(k));                                                            \
        }                                                                                                              \
    }                                                                                                                  \
    /* The same for patches, over lines of kernel elements: neighbours in x go to rows filled side by side. */         \
    SIMD static void make_patches_##T(void *arg, int64_t begin, int64_t end) {                                         \
        const chunk *k = arg;                                                                                          \
        const conv *v = k->v;                                                                                          \
        const window *w = &v->w;                                                                                       \
        const int64_t across = w->kernel[2], down = conv_taps(v) / across, pixels = chunk_pixels(k);                   \
        for (int64_t row = begin; row < end; row++) {                                                                  \
            const tap t = tap_at(w, row % down * across);                                                              \
            const T *x = (const T *)k->from + (k->image * v->groups * v->in + row / down) * volume(w->in);             \
            T *y = (T *)k->cols + row * across * pixels;                                                               \
            for (int64_t l = 0; l < k->lines; l++, y += w->out[2]) {                                                   \
                const T *in = x + line_offset(w, &t, k->line + l);                                                     \
                for (int64_t p = 0; p < w->out[2]; p++)                                                                \
                    for (int64_t i = 0; i < across; i++) y[i * pixels + p] = in[p * across + i];                       \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Planes [begin, end) of dx within the chunk's images. */                                                         \
    SIMD static void add_columns_##T(void *arg, int64_t begin, int64_t end) {                                          \
        const chunk *k = arg;                                                                                          \
        const conv *v = k->v;                                                                                          \
        const int64_t taps = conv_taps(v), plane = volume(v->w.in), first = k->image * v->groups * v->in;              \
        for (int64_t c = begin; c < end; c++) {                                                                        \
            T *x = (T *)k->to + (first + c) * plane;                                                                   \
            if (k->line == 0) memset(x, 0, (size_t)plane * sizeof(T));                                                 \
            for (int64_t i = 0; i < taps; i++) {                                                                       \
                const tap t = tap_at(&v->w, i);                                                                        \
                scatter_##T(&v->w, &t, k->line, k->lines, 1, (const T *)k->cols + (c * taps + i) * chunk_pixels(k),    \
                            x);                                                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }

COLUMNS(float)
COLUMNS(double)

/* Do windows lie side by side within x, as the patches of a vision transformer do? */
static bool is_patches(const conv *v) {
    for (int i = 0; i < SPATIAL; i++)
        if (v->w.stride[i] != v->w.kernel[i] || v->w.dilation[i] != 1 || v->w.before[i] != 0 ||
            v->w.out[i] * v->w.stride[i] > v->w.in[i])
            return false;
    return v->w.kernel[2] > 1;
}

static void make_columns(chunk *k) {
    int64_t rows = k->images * k->v->groups * conv_depth(k->v), across = k->v->w.kernel[2];
    const bool wide = k->v->type == F64;

    if (is_patches(k->v))
        parallel_for(rows / across, parallel_rows(chunk_pixels(k) * across),
                     wide ? make_patches_double : make_patches_float, k);
    else parallel_for(rows, parallel_rows(chunk_pixels(k)), wide ? make_columns_double : make_columns_float, k);
}

static void add_columns(chunk *k) {
    int64_t planes = k->images * k->v->groups * k->v->in;
    range_fn *body = k->v->type == F64 ? add_columns_double : add_columns_float;
    parallel_for(planes, parallel_rows(chunk_pixels(k) * conv_taps(k->v)), body, k);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* A pair for each image and group of the chunk; the caller fills in the matrices and their steps. */
static gemm chunk_gemm(const chunk *k) {
    return (gemm){.type = k->v->type, .alpha = 1, .n_batch = 2, .batch = {k->images, k->v->groups}};
}

static void *at(const void *base, int64_t element, dtype type) {
    return (char *)(uintptr_t)base + element * (int64_t)dtype_size(type);
}

static void forward_product(const chunk *k, const void *cols, const void *w, void *y, bool add) {
    const conv *v = k->v;
    const int64_t depth = conv_depth(v), pixels = chunk_pixels(k), plane = volume(v->w.out);
    const int64_t first = k->image * v->groups * v->out * plane + k->line * v->w.out[2];
    gemm g = chunk_gemm(k);

    g.m = v->out;
    g.n = pixels;
    g.k = depth;
    g.beta = add;
    g.a = w;
    g.a_row = depth;
    g.a_col = 1;
    g.a_step[1] = v->out * depth;
    g.b = cols;
    g.b_row = pixels;
    g.b_col = 1;
    g.b_step[0] = v->groups * depth * pixels;
    g.b_step[1] = depth * pixels;
    g.c = at(y, first, v->type);
    g.c_row = plane;
    g.c_step[0] = v->groups * v->out * plane;
    g.c_step[1] = v->out * plane;
    gemm_run(&g);
}

static void input_product(const chunk *k, const void *dy, const void *w, void *cols) {
    const conv *v = k->v;
    const int64_t depth = conv_depth(v), pixels = chunk_pixels(k), plane = volume(v->w.out);
    const int64_t first = k->image * v->groups * v->out * plane + k->line * v->w.out[2];
    gemm g = chunk_gemm(k);

    g.m = depth;
    g.n = pixels;
    g.k = v->out;
    g.a = w;
    g.a_row = 1;
    g.a_col = depth;
    g.a_step[1] = v->out * depth;
    g.b = at(dy, first, v->type);
    g.b_row = plane;
    g.b_col = 1;
    g.b_step[0] = v->groups * v->out * plane;
    g.b_step[1] = v->out * plane;
    g.c = cols;
    g.c_row = pixels;
    g.c_step[0] = v->groups * depth * pixels;
    g.c_step[1] = depth * pixels;
    gemm_run(&g);
}

/* One image after the other into the same dw. */
static void weight_product(const chunk *k, const void *cols, const void *dy, void *dw) {
    const conv *v = k->v;
    const int64_t depth = conv_depth(v), pixels = chunk_pixels(k), plane = volume(v->w.out);

    for (int64_t i = 0; i < k->images; i++) {
        const int64_t image = k->image + i, first = image * v->groups * v->out * plane + k->line * v->w.out[2];
        gemm g = chunk_gemm(k);

        g.batch[0] = 1;
        g.m = v->out;
        g.n = depth;
        g.k = pixels;
        g.beta = image > 0 || k->line > 0;
        g.a = at(dy, first, v->type);
        g.a_row = plane;
        g.a_col = 1;
        g.a_step[1] = v->out * plane;
        g.b = at(cols, i * v->groups * depth * pixels, v->type);
        g.b_row = 1;
        g.b_col = pixels;
        g.b_step[1] = depth * pixels;
        g.c = dw;
        g.c_row = depth;
        g.c_step[1] = v->out * depth;
        gemm_run(&g);
    }
}

/* --- few channels: scaled additions of shifted images ------------------------------------------------------------- */

typedef struct direct {
    const conv *v;
    const void *x, *w, *dy;
    void *out;
    bool add;
} direct;

#define DIRECT(T)                                                                                                      \
    /* Planes [begin, end) of y. */                                                                                    \
    SIMD static void direct_forward_##T(void *arg, int64_t begin, int64_t end) {                                       \
        const direct *d = arg;                                                                                         \
        const conv *v = d->v;                                                                                          \
        const int64_t taps = conv_taps(v), in_plane = volume(v->w.in), plane = volume(v->w.out);                       \
        for (int64_t o = begin; o < end; o++) {                                                                        \
            const int64_t image = o / (v->groups * v->out), channel = o % (v->groups * v->out);                        \
            const T *x = (const T *)d->x + (image * v->groups + channel / v->out) * v->in * in_plane;                  \
            const T *w = (const T *)d->w + channel * v->in * taps;                                                     \
            T *y = (T *)d->out + o * plane;                                                                            \
            if (!d->add) memset(y, 0, (size_t)plane * sizeof(T));                                                      \
            for (int64_t i = 0; i < v->in * taps; i++) {                                                               \
                const tap t = tap_at(&v->w, i % taps);                                                                 \
                gather_##T(&v->w, &t, 0, lines_of(v), w[i], x + i / taps * in_plane, y);                               \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Planes [begin, end) of dx. */                                                                                   \
    SIMD static void direct_input_##T(void *arg, int64_t begin, int64_t end) {                                         \
        const direct *d = arg;                                                                                         \
        const conv *v = d->v;                                                                                          \
        const int64_t taps = conv_taps(v), in_plane = volume(v->w.in), plane = volume(v->w.out);                       \
        for (int64_t c = begin; c < end; c++) {                                                                        \
            const int64_t image = c / (v->groups * v->in), group = c / v->in % v->groups;                              \
            const T *dy = (const T *)d->dy + (image * v->groups + group) * v->out * plane;                             \
            const T *w = (const T *)d->w + (group * v->out * v->in + c % v->in) * taps;                                \
            T *x = (T *)d->out + c * in_plane;                                                                         \
            memset(x, 0, (size_t)in_plane * sizeof(T));                                                                \
            for (int64_t i = 0; i < v->out * taps; i++) {                                                              \
                const tap t = tap_at(&v->w, i % taps);                                                                 \
                scatter_##T(&v->w, &t, 0, lines_of(v), w[i / taps * v->in * taps + i % taps], dy + i / taps * plane,   \
                            x);                                                                                        \
            }                                                                                                          \
        }                                                                                                              \
    }                                                                                                                  \
    /* Elements [begin, end) of dw. */                                                                                 \
    SIMD static void direct_weight_##T(void *arg, int64_t begin, int64_t end) {                                        \
        const direct *d = arg;                                                                                         \
        const conv *v = d->v;                                                                                          \
        const int64_t taps = conv_taps(v), in_plane = volume(v->w.in), plane = volume(v->w.out);                       \
        for (int64_t e = begin; e < end; e++) {                                                                        \
            const int64_t o = e / (v->in * taps), c = o / v->out * v->in + e / taps % v->in;                           \
            const tap t = tap_at(&v->w, e % taps);                                                                     \
            double total = 0;                                                                                          \
            for (int64_t image = 0; image < v->images; image++)                                                        \
                total +=                                                                                               \
                    dot_##T(&v->w, &t, 0, lines_of(v), (const T *)d->x + (image * v->groups * v->in + c) * in_plane,   \
                            (const T *)d->dy + (image * v->groups * v->out + o) * plane);                              \
            ((T *)d->out)[e] = (T)total;                                                                               \
        }                                                                                                              \
    }

DIRECT(float)
DIRECT(double)

/* --- the three ---------------------------------------------------------------------------------------------------- */

void conv_forward(const conv *v, const void *x, const void *w, void *y, bool add, void *work) {
    const conv flat = as_line(v);
    const int64_t plane = volume(v->w.out);

    if (few_channels(v)) {
        direct d = {.v = v, .x = x, .w = w, .out = y, .add = add};
        parallel_for(v->images * v->groups * v->out, parallel_rows(plane * conv_depth(v)),
                     v->type == F64 ? direct_forward_double : direct_forward_float, &d);
        return;
    }
    if (is_pointwise(v)) {
        chunk all = {.v = &flat, .images = v->images, .lines = 1};
        forward_product(&all, x, w, y, add);
        return;
    }
    const chunk largest = plan_chunks(v);
    for (chunk k = {.v = v, .cols = work, .from = x}; next_chunk(&largest, &k);) {
        make_columns(&k);
        forward_product(&k, k.cols, w, y, add);
    }
}

void conv_grad_input(const conv *v, const void *dy, const void *w, void *dx, void *work) {
    const conv flat = as_line(v);

    if (few_channels(v)) {
        direct d = {.v = v, .dy = dy, .w = w, .out = dx};
        parallel_for(v->images * v->groups * v->in, parallel_rows(volume(v->w.out) * v->out * conv_taps(v)),
                     v->type == F64 ? direct_input_double : direct_input_float, &d);
        return;
    }
    if (is_pointwise(v)) {
        chunk all = {.v = &flat, .images = v->images, .lines = 1};
        input_product(&all, dy, w, dx);
        return;
    }
    const chunk largest = plan_chunks(v);
    for (chunk k = {.v = v, .cols = work, .to = dx}; next_chunk(&largest, &k);) {
        input_product(&k, dy, w, k.cols);
        add_columns(&k);
    }
}

void conv_grad_weight(const conv *v, const void *x, const void *dy, void *dw, void *work) {
    const conv flat = as_line(v);
    const int64_t count = v->groups * v->out * conv_depth(v);

    if (v->images == 0 || volume(v->w.out) == 0) {
        memset(dw, 0, (size_t)count * dtype_size(v->type));
        return;
    }
    if (few_channels(v)) {
        direct d = {.v = v, .x = x, .dy = dy, .out = dw};
        parallel_for(count, parallel_rows(volume(v->w.out) * v->images),
                     v->type == F64 ? direct_weight_double : direct_weight_float, &d);
        return;
    }
    if (is_pointwise(v)) {
        chunk all = {.v = &flat, .images = v->images, .lines = 1};
        weight_product(&all, x, dy, dw);
        return;
    }
    const chunk largest = plan_chunks(v);
    for (chunk k = {.v = v, .cols = work, .from = x}; next_chunk(&largest, &k);) {
        make_columns(&k);
        weight_product(&k, k.cols, dy, dw);
    }
}
