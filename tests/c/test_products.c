/* test_products.c -- compares matrix products and convolutions with their definitions. There is no torch in this
 * program: so these are our own kernels, which the Python tests see only where torch has none. */
#include "gemm/gemm.h"
#include "gemm/gemm_prepack.h"
#include "ops/spatial/conv_products.h"

#include "test.h"

#include <math.h>

/* --- numbers ------------------------------------------------------------------------------------------------------ */

static uint64_t random_state = 1;

static int64_t random_below(int64_t n) {
    random_state = random_state * UINT64_C(6364136223846793005) + UINT64_C(1442695040888963407);
    return (int64_t)((random_state >> 33) % (uint64_t)n);
}

/* Small whole numbers: sums of their products are exact in every type, in any order. */
static void *numbers(dtype type, int64_t count) {
    void *data = calloc((size_t)(count + 1), dtype_size(type));
    for (int64_t i = 0; i < count; i++) dtype_set_int(type, data, i, random_below(5) - (type == U8 ? 0 : 2));
    return data;
}

static int64_t wrap(dtype type, int64_t x) {
    int64_t narrow;
    if (dtype_is_float(type)) return x;
    dtype_set_int(type, &narrow, 0, x);
    return dtype_get_int(type, &narrow, 0);
}

/* --- products ----------------------------------------------------------------------------------------------------- */

/* The sum of products at element `e` of a dense C of several pairs. */
static int64_t sum_at(const gemm *g, int64_t e) {
    int64_t i = e / g->n % g->m, j = e % g->n, sum = 0;
    gemm_offsets at = gemm_batch_at(g, e / (g->m * g->n));

    for (int64_t k = 0; k < g->k; k++)
        sum += dtype_get_int(gemm_type_a(g), g->a, at.a + i * g->a_row + k * g->a_col) *
               dtype_get_int(gemm_type_b(g), g->b, at.b + k * g->b_row + j * g->b_col);
    return sum;
}

/* Whether or not it pays here; where this CPU cannot, what would run instead. */
static void run_packed(const gemm *g) {
    gemm copy = *g;
    if (g->k == 0 || !gemm_packed(&copy)) gemm_run(g);
}

#if defined(__x86_64__) && defined(__GNUC__)
extern const gemm_kernel gemm_kernel_amx_emulated, gemm_kernel_amx_f32_emulated; /* amx_emulated.c */

static bool reads(const gemm_kernel *kernel, const gemm *g) {
    if (kernel == &gemm_kernel_f32) return dtype_is_float(g->type) && g->type != F64 && !g->wide_a && !g->wide_b;
    return g->type == (kernel->holds ? F32 : BF16);
}

/* Whether `kernel` can run this product: on this CPU, and reading operands of these types. */
static bool may_run(const gemm_kernel *kernel, const gemm *g) { return g->k > 0 && kernel->can() && reads(kernel, g); }

/* With B laid out beforehand, in memory that is full of something else; only a kernel with another one reads B, too. */
static void run_laid_out(const gemm_kernel *kernel, const gemm *g) {
    const size_t bytes = gemm_prepack_bytes_with(g, kernel);
    void *memory = aligned_alloc(64, (bytes + 63) / 64 * 64);
    gemm by = *g;

    memset(memory, 0x55, bytes);
    gemm_prepack_with(g, kernel, memory);
    by.packed_b = memory;
    if (!kernel->holds) by.b = NULL;
    gemm_packed_with(&by, kernel);
    free(memory);
}

static const gemm_kernel *const kernels[] = {&gemm_kernel_f32,     &gemm_kernel_bf16,
                                             &gemm_kernel_amx,     &gemm_kernel_amx_emulated,
                                             &gemm_kernel_amx_f32, &gemm_kernel_amx_f32_emulated};
enum { KERNELS = sizeof kernels / sizeof *kernels };
#else
static const gemm_kernel *const kernels[] = {NULL};
enum { KERNELS = 0 };
static bool may_run(const gemm_kernel *kernel, const gemm *g) { return false; }
static void run_laid_out(const gemm_kernel *kernel, const gemm *g) {}
#endif

/* Of a large C, every 37th element is looked at. */
static int64_t look_at(int64_t count) { return count > 50000 ? 37 : 1; }

/* Runs `g`, whose C is dense, by `run` or (where it is NULL) by `kernel`, and counts the elements that differ.
 * sums: of those that are looked at. */
static int count_wrong_by(void (*run)(const gemm *g), const gemm_kernel *kernel, bool laid_out, gemm *g, int64_t count,
                          const int64_t *sums) {
    const dtype type = gemm_type_c(g);
    void *c = numbers(type, count), *old = calloc((size_t)(count + 1), dtype_size(type));
    int wrong = 0;

    memcpy(old, c, (size_t)count * dtype_size(type));
    g->c = c;
    if (run) run(g);
    else if (laid_out) run_laid_out(kernel, g);
    else gemm_packed_with(g, kernel);
    for (int64_t e = 0; e < count; e += look_at(count)) {
        int64_t expected = (int64_t)g->alpha * *sums++ + (int64_t)g->beta * dtype_get_int(type, old, e);
        wrong += dtype_get_int(type, c, e) != wrap(type, expected);
    }
    free(c);
    free(old);
    return wrong;
}

static int count_wrong(gemm *g, int64_t pairs) {
    int64_t count = pairs * g->m * g->n, *sums = calloc((size_t)(count + 1), sizeof *sums);

    for (int64_t e = 0, i = 0; e < count; e += look_at(count)) sums[i++] = sum_at(g, e);
    int wrong = count_wrong_by(gemm_run, NULL, false, g, count, sums);
    wrong += count_wrong_by(run_packed, NULL, false, g, count, sums);
    for (int i = 0; i < KERNELS; i++) {
        if (!dtype_is_float(g->type) || !may_run(kernels[i], g)) continue;
        wrong += count_wrong_by(NULL, kernels[i], false, g, count, sums);
        if (g->n > 0 && !g->n_batch) wrong += count_wrong_by(NULL, kernels[i], true, g, count, sums);
    }
    /* It has no blocks, and takes a second for a product that has several. */
    if (g->k > 0 && look_at(count) == 1) wrong += count_wrong_by(gemm_reference, NULL, false, g, count, sums);
    free(sums);
    return wrong;
}

static const dtype types[] = {F32, F64, BF16, F16, I64, I32, I16, I8, U8};
enum { TYPES = sizeof types / sizeof *types };

TEST(products_of_every_type_and_layout) {
    static const int64_t sizes[] = {0, 1, 2, 7, 15, 16, 33, 100, 290};

    for (int trial = 0; trial < 300; trial++) {
        gemm g = {.type = types[trial % TYPES], .alpha = 1, .beta = 0};
        int64_t spread = 1 + random_below(2), pairs = 1 + random_below(3);

        g.m = sizes[random_below(9)];
        g.n = sizes[random_below(9)];
        g.k = sizes[random_below(g.type == BF16 || g.type == F16 ? 5 : 9)];
        if (trial % 2) {
            g.alpha = 2;
            g.beta = (double)random_below(2);
        }
        bool a_turned = random_below(2), b_turned = random_below(2);
        g.a_row = a_turned ? spread : spread * (g.k + 1);
        g.a_col = a_turned ? spread * (g.m + 1) : spread;
        g.b_row = b_turned ? 1 : random_below(3) ? g.n : 0;
        g.b_col = b_turned ? g.k : 1;
        g.c_row = g.n;
        if (g.type == BF16 || g.type == F16) {
            g.wide_a = random_below(3) == 0;
            g.wide_b = random_below(3) == 0;
            g.wide_c = random_below(3) == 0;
        }
        g.n_batch = pairs > 1; /* of one, B may be laid out beforehand */
        g.batch[0] = pairs;
        g.a_step[0] = random_below(2) ? spread * (g.m + 1) * (g.k + 1) : 0;
        g.b_step[0] = random_below(2) ? g.k * g.n : 0;
        g.c_step[0] = g.m * g.n;
        g.a = numbers(gemm_type_a(&g), pairs * spread * (g.m + 1) * (g.k + 1));
        g.b = numbers(gemm_type_b(&g), pairs * g.k * g.n + 1);
        CHECK(count_wrong(&g, pairs) == 0);
        free((void *)(uintptr_t)g.a);
        free((void *)(uintptr_t)g.b);
    }
}

/* With sanitizers, which look at where memory is read and written: a third of the cases below, each two of their kinds
 * together still, since all of them take minutes. */
#ifdef ORT_SANITIZE
enum { EVERY = 3 };
#else
enum { EVERY = 1 };
#endif

/* Several blocks of rows, panels of columns and slices of K; sums are small enough to be exact in bfloat16. */
TEST(products_larger_than_any_block) {
    static const dtype narrow[] = {F32, BF16, F16, BF16};

    for (int trial = 0; trial < 96; trial++) {
        const int turned = trial % 4, kind = trial / 4 % 4, pairs = trial < 48 ? 1 : 3 + trial % 2; /* that share A */
        if ((turned + kind + trial / 16) % EVERY) continue;
        gemm g = {.type = narrow[kind], .m = 470, .n = 291, .k = 531, .alpha = 1, .beta = 1, .c_row = 291};
        g.wide_c = g.type != F32 && kind < 3;
        if (trial % 48 >= 16) g.beta = 0;
        if (trial % 48 >= 32) g.m = 130; /* all of A's slices fit */
        if (pairs > 1) g.n = g.c_row = 97;
        if (!g.wide_c && g.type != F32) g.k = 1031; /* slices, whose sums are not in C */
        g.a_row = turned & 1 ? 1 : g.k;
        g.a_col = turned & 1 ? g.m : 1;
        g.b_row = turned & 2 ? 1 : g.n;
        g.b_col = turned & 2 ? g.k : 1;
        g.n_batch = pairs > 1; /* of one, B may be laid out beforehand */
        g.batch[0] = pairs;
        g.b_step[0] = g.k * g.n;
        g.c_step[0] = g.m * g.n;
        g.a = numbers(g.type, g.m * g.k);
        g.b = numbers(g.type, pairs * g.k * g.n);
        for (int64_t i = 0; !g.wide_c && g.type != F32 && i < g.m * g.k; i++)
            if (i % 9) dtype_set_int(g.type, (void *)(uintptr_t)g.a, i, 0);
        CHECK(count_wrong(&g, pairs) == 0);
        free((void *)(uintptr_t)g.a);
        free((void *)(uintptr_t)g.b);
    }
}

TEST(a_product_of_nothing_is_zero_and_a_scaled_c) {
    float c[4] = {1, 2, 3, NAN};
    gemm g = {.type = F32, .m = 2, .n = 2, .k = 0, .alpha = 1, .beta = 2, .a = c, .b = c, .c = c, .c_row = 2};

    gemm_run(&g);
    CHECK(c[0] == 2 && c[1] == 4 && c[2] == 6 && isnan(c[3]));
    g.beta = 0;
    gemm_run(&g);
    CHECK(c[0] == 0 && c[1] == 0 && c[2] == 0 && c[3] == 0);
}

TEST(sixteen_bit_sums_are_rounded_once) {
    enum { K = 1000 };
    bf16 *ones = numbers(BF16, K), y[1];
    gemm g = {.type = BF16, .m = 1, .n = 1, .k = K, .alpha = 1, .a = ones, .b = ones, .a_col = 1, .b_row = 1};

    for (int i = 0; i < K; i++) ones[i] = f32_to_bf16(1);
    g.c = y;
    gemm_run(&g);
    CHECK(bf16_to_f32(y[0]) == 1000);
    free(ones);
}

#if defined(__x86_64__) && defined(__GNUC__)
/* Between 2^-20 and 2^20, with all their bits. */
static float some_float(void) {
    const double size = ldexp(1, (int)random_below(41) - 20);
    return (float)((random_below(2) ? size : -size) * (1 + (double)random_below(1 << 24) * 0x1p-24));
}

/* The largest error of an element, in units of 2^-24 of the sum of its terms' magnitudes. */
static double worst_error(const gemm *g, const float *a, const float *b, const float *c) {
    double worst = 0;

    for (int64_t e = 0; e < g->m * g->n; e++) {
        double sum = 0, size = 0;
        for (int64_t k = 0; k < g->k; k++) {
            const double x = a[e / g->n * g->a_row + k * g->a_col], y = b[k * g->b_row + e % g->n * g->b_col];
            sum += x * y;
            size += fabs(x * y);
        }
        worst = fmax(worst, fabs(c[e] - sum) / size * 0x1p24);
    }
    return worst;
}

TEST(a_product_of_split_floats_is_as_precise_as_one_of_floats) {
    static const gemm_kernel *const split[] = {&gemm_kernel_amx_f32, &gemm_kernel_amx_f32_emulated};
    enum { M = 70, N = 45, K = 1601 };
    float *a = calloc((size_t)M * K * 2, sizeof *a), *b = calloc((size_t)N * K * 2, sizeof *b), c[M * N];

    for (int i = 0; i < M * K * 2; i++) a[i] = some_float();
    for (int i = 0; i < N * K * 2; i++) b[i] = some_float();
    for (int trial = 0; trial < 18; trial++) {
        gemm g = {
            .type = F32, .m = M, .n = N, .k = trial % 2 ? K : 137, .alpha = 1, .a = a, .b = b, .c = c, .c_row = N};
        const int a_way = trial / 2 % 3, b_way = trial / 6 % 3;
        g.a_row = a_way == 0 ? K : a_way == 1 ? 1 : 2 * K;
        g.a_col = a_way == 0 ? 1 : a_way == 1 ? M : 2;
        g.b_row = b_way == 0 ? N : b_way == 1 ? 1 : 2;
        g.b_col = b_way == 0 ? 1 : b_way == 1 ? K : 2 * K;
        if (!gemm_kernel_f32.can()) break;
        gemm_packed_with(&g, &gemm_kernel_f32);
        const double usual = worst_error(&g, a, b, c);
        for (int i = 0; i < 2; i++) {
            if (!split[i]->can()) continue;
            gemm_packed_with(&g, split[i]);
            CHECK(worst_error(&g, a, b, c) <= usual + 0.5);
        }
    }
    free(a);
    free(b);
}

/* Each of these in one place of an operand of ones, or everywhere: numbers whose parts' products mean nothing. */
TEST(a_product_of_split_floats_is_right_beyond_what_can_be_split) {
    enum { M = 75, N = 70, K = 700 };
    static const gemm_kernel *const split[] = {&gemm_kernel_amx_f32, &gemm_kernel_amx_f32_emulated};
    static const struct {
        float value;
        bool everywhere;
    } cases[] = {{INFINITY, false}, {-INFINITY, false}, {NAN, false},   {3.4e38F, false}, {1e30F, false},
                 {-1e36F, false},   {1e-40F, false},    {1e-15F, true}, {1e-30F, true},   {1.1e-38F, true},
                 {1e-40F, true},    {-0.0F, true},      {3e38F, true}};
    static float a[M * K], b[K * N], c[M * N];

    for (size_t trial = 0; trial < 8 * sizeof cases / sizeof *cases; trial++) {
        const float odd = cases[trial / 8].value;
        const bool in_a = trial % 2, in_c = trial / 2 % 2, everywhere = cases[trial / 8].everywhere;
        const float usual = trial / 4 % 2 ? 0x1p-20F : 1; /* infinity is no less infinite for it */
        gemm g = {.type = F32, .m = M, .n = N, .k = K, .alpha = 1, .beta = in_c, .a = a, .b = b, .c = c};
        g.a_row = K;
        g.b_row = g.c_row = N;
        g.a_col = g.b_col = 1;
        for (int i = 0; i < M * K; i++) a[i] = in_a && (everywhere || i == M * K - 1) ? odd : usual;
        for (int i = 0; i < K * N; i++) b[i] = !in_a && (everywhere || i == 11) ? odd : usual;
        for (int way = 0; way < 2; way++) {
            if (!split[way]->can()) continue;
            for (int i = 0; i < M * N; i++) c[i] = in_c ? 3 : NAN;
            gemm_packed_with(&g, split[way]);
            for (int i = 0; i < M * N; i++) {
                double sum = in_c ? 3 : 0;
                for (int k = 0; k < K; k++) sum += (double)a[i / N * K + k] * (double)b[k * N + i % N];
                const float expected = (float)sum;
                if (isnan(expected)) CHECK(isnan(c[i]));
                else CHECK(c[i] == expected || fabs(c[i] - sum) <= 1e-5 * fabs(sum) + K * 0x1p-126);
            }
        }
    }
}

/* Blocks of denormal numbers, of which the least have no first part; read along lines and across them. */
TEST(a_product_of_split_floats_has_denormal_numbers) {
    enum { M = 40, N = 36, K = 130 };
    static const gemm_kernel *const split[] = {&gemm_kernel_amx_f32, &gemm_kernel_amx_f32_emulated};
    static const float sizes[] = {1e-39F, -1e-42F, 3e-45F, 0};
    static float a[M * K], b[K * N], c[M * N];

    for (int trial = 0; trial < 32; trial++) {
        const bool in_a = trial % 2, a_along = trial / 2 % 2, b_along = trial / 4 % 2;
        const float small = sizes[trial / 8];
        gemm g = {.type = F32, .m = M, .n = N, .k = K, .alpha = 1, .a = a, .b = b, .c = c, .c_row = N};
        g.a_row = a_along ? K : 1;
        g.a_col = a_along ? 1 : M;
        g.b_row = b_along ? 1 : N;
        g.b_col = b_along ? K : 1;
        for (int i = 0; i < M * K; i++) a[i] = in_a ? (float)(1 + i % 3) * small : 0x1p30F;
        for (int i = 0; i < K * N; i++) b[i] = in_a ? 0x1p30F : (float)(1 + i % 3) * small;
        for (int way = 0; way < 2; way++) {
            if (!split[way]->can()) continue;
            gemm_packed_with(&g, split[way]);
            for (int i = 0; i < M * N; i++) {
                double sum = 0;
                for (int k = 0; k < K; k++)
                    sum += (double)a[i / N * g.a_row + k * g.a_col] * (double)b[k * g.b_row + i % N * g.b_col];
                CHECK(fabs(c[i] - sum) <= 1e-5 * fabs(sum));
            }
        }
    }
}
#endif

/* --- convolutions ------------------------------------------------------------------------------------------------- */

/* Calls visit for each product of an input and a weight that goes into an output: indices into x, w and y. */
typedef void visit_fn(int64_t x, int64_t w, int64_t y, const double *from, const double *with, double *to);

static void each_product(const conv *v, visit_fn *visit, const double *from, const double *with, double *to) {
    const window *w = &v->w;
    int64_t outputs = volume(w->out), taps = conv_taps(v), channels = v->groups * v->out;

    for (int64_t y = 0; y < v->images * channels * outputs; y++)
        for (int64_t c = 0; c < v->in; c++)
            for (int64_t tap = 0; tap < taps; tap++) {
                int64_t image = y / (channels * outputs), o = y / outputs % channels, place = y % outputs, rest = tap;
                int64_t at[SPATIAL], x = (image * v->groups + o / v->out) * v->in + c;
                bool inside = true;
                for (int i = SPATIAL - 1; i >= 0; i--) {
                    at[i] = place % w->out[i] * w->stride[i] - w->before[i] + rest % w->kernel[i] * w->dilation[i];
                    place /= w->out[i];
                    rest /= w->kernel[i];
                    inside &= at[i] >= 0 && at[i] < w->in[i];
                }
                for (int i = 0; i < SPATIAL; i++) x = x * w->in[i] + at[i];
                if (inside) visit(x, (o * v->in + c) * taps + tap, y, from, with, to);
            }
}

static void add_forward(int64_t x, int64_t w, int64_t y, const double *from, const double *with, double *to) {
    to[y] += from[x] * with[w];
}
static void add_input(int64_t x, int64_t w, int64_t y, const double *from, const double *with, double *to) {
    to[x] += from[y] * with[w];
}
static void add_weight(int64_t x, int64_t w, int64_t y, const double *from, const double *with, double *to) {
    to[w] += from[x] * with[y];
}

static bool equal(const double *a, const double *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (a[i] != b[i]) return false;
    return true;
}

static void check_convolution(const conv *v) {
    int64_t n_x = v->images * v->groups * v->in * volume(v->w.in), n_w = v->groups * v->out * conv_depth(v);
    int64_t n_y = v->images * v->groups * v->out * volume(v->w.out);
    double *x = numbers(F64, n_x), *w = numbers(F64, n_w), *dy = numbers(F64, n_y);
    double *ours = numbers(F64, n_x + n_w + n_y), *expected = calloc((size_t)(n_x + n_w + n_y + 1), sizeof(double));
    void *work = malloc(conv_scratch(v) + 1);

    conv_forward(v, x, w, ours, false, work);
    each_product(v, add_forward, x, w, expected);
    CHECK(equal(ours, expected, n_y));
    conv_forward(v, x, w, ours, true, work);
    each_product(v, add_forward, x, w, expected);
    CHECK(equal(ours, expected, n_y));

    memset(expected, 0, sizeof(double) * (size_t)(n_x + n_w + n_y));
    conv_grad_input(v, dy, w, ours, work);
    each_product(v, add_input, dy, w, expected);
    CHECK(equal(ours, expected, n_x));

    memset(expected, 0, sizeof(double) * (size_t)(n_x + n_w + n_y));
    conv_grad_weight(v, x, dy, ours, work);
    each_product(v, add_weight, x, dy, expected);
    CHECK(equal(ours, expected, n_w));

    free(work);
    free(expected);
    free(ours);
    free(dy);
    free(w);
    free(x);
}

TEST(convolutions_of_every_kind) {
    for (int trial = 0; trial < 200; trial++) {
        conv v = {.type = F64, .images = random_below(4), .groups = 1 + random_below(3)};

        v.in = 1 + random_below(4);
        v.out = trial % 2 ? 8 + random_below(3) : 1 + random_below(4);
        v.w.rank = SPATIAL;
        for (int i = 0; i < SPATIAL; i++) {
            v.w.kernel[i] = 1 + random_below(trial % 5 == 0 ? 1 : 3);
            v.w.stride[i] = 1 + random_below(3);
            v.w.dilation[i] = 1 + random_below(2);
            v.w.before[i] = random_below(trial % 5 == 0 ? 1 : 3);
            v.w.out[i] = 1 + random_below(4);
            v.w.in[i] = (v.w.out[i] - 1) * v.w.stride[i] + v.w.dilation[i] * (v.w.kernel[i] - 1) + 1 - v.w.before[i];
            v.w.in[i] += random_below(v.w.stride[i]) - random_below(2); /* inputs no window reaches, or padding */
            if (v.w.in[i] < 1) v.w.in[i] = 1;
        }
        check_convolution(&v);
    }
}

/* Larger than a chunk: in lines of one image, and in images. */
TEST(convolutions_in_chunks) {
    const window large = {2, {1, 70, 66}, {1, 70, 66}, {1, 3, 3}, {1, 1, 1}, {1, 1, 1}, {0, 1, 1}, {0}};
    const window small = {2, {1, 9, 11}, {1, 5, 6}, {1, 3, 3}, {1, 2, 2}, {1, 1, 1}, {0, 1, 1}, {0}};
    const window patches = {2, {1, 80, 84}, {1, 10, 21}, {1, 8, 4}, {1, 8, 4}, {1, 1, 1}, {0, 0, 0}, {0}};

    check_convolution(&(conv){.type = F64, .w = large, .images = 2, .groups = 1, .in = 12, .out = 8});
    check_convolution(&(conv){.type = F64, .w = small, .images = 30, .groups = 1, .in = 40, .out = 8});
    check_convolution(&(conv){.type = F64, .w = patches, .images = 3, .groups = 2, .in = 3, .out = 9});
}

/* Of whole numbers, whose sums are exact in float32 and are rounded once. */
static bool rounded_equal(const bf16 *a, const double *b, int64_t count) {
    for (int64_t i = 0; i < count; i++)
        if (a[i] != f32_to_bf16((float)b[i])) return false;
    return true;
}

static double *widened(const bf16 *x, int64_t count) {
    double *y = malloc(sizeof *y * (size_t)(count + 1));
    for (int64_t i = 0; i < count; i++) y[i] = (double)bf16_to_f32(x[i]);
    return y;
}

static void check_narrow_convolution(const conv *v) {
    const int64_t n_x = v->images * v->groups * v->in * volume(v->w.in), n_w = v->groups * v->out * v->in;
    const int64_t n_y = v->images * v->groups * v->out * volume(v->w.out), most = n_x + n_w + n_y;
    bf16 *x = numbers(BF16, n_x), *w = numbers(BF16, n_w), *dy = numbers(BF16, n_y), *ours = numbers(BF16, most);
    double *wide_x = widened(x, n_x), *wide_w = widened(w, n_w), *wide_dy = widened(dy, n_y);
    double *expected = widened(ours, n_y), *sums = calloc((size_t)(most + 1), sizeof *sums);
    void *work[] = {malloc(conv_product_scratch(v, CONV_FORWARD) + 1),
                    malloc(conv_product_scratch(v, CONV_GRAD_INPUT) + 1),
                    malloc(conv_product_scratch(v, CONV_GRAD_WEIGHT) + 1)};

    each_product(v, add_forward, wide_x, wide_w, expected);
    conv_forward_product(v, x, w, ours, true, work[CONV_FORWARD]);
    CHECK(rounded_equal(ours, expected, n_y));
    each_product(v, add_forward, wide_x, wide_w, sums);
    conv_forward_product(v, x, w, ours, false, work[CONV_FORWARD]);
    CHECK(rounded_equal(ours, sums, n_y));

    memset(sums, 0, sizeof *sums * (size_t)most);
    each_product(v, add_input, wide_dy, wide_w, sums);
    conv_grad_input_product(v, dy, w, ours, work[CONV_GRAD_INPUT]);
    CHECK(rounded_equal(ours, sums, n_x));

    memset(sums, 0, sizeof *sums * (size_t)most);
    each_product(v, add_weight, wide_x, wide_dy, sums);
    conv_grad_weight_product(v, x, dy, ours, work[CONV_GRAD_WEIGHT]);
    CHECK(rounded_equal(ours, sums, n_w));

    for (int i = 0; i < 3; i++) free(work[i]);
    free(sums);
    free(expected);
    free(wide_dy);
    free(wide_w);
    free(wide_x);
    free(ours);
    free(dy);
    free(w);
    free(x);
}

/* On CPUs that have a kernel for bfloat16. */
TEST(convolutions_of_single_pixels_in_bfloat16) {
    const window small = {2, {1, 7, 9}, {1, 7, 9}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0}, {0}};
    const window large = {2, {1, 17, 23}, {1, 17, 23}, {1, 1, 1}, {1, 1, 1}, {1, 1, 1}, {0}, {0}};
    const window apart = {3, {5, 8, 7}, {2, 4, 3}, {1, 1, 1}, {3, 2, 3}, {1, 1, 1}, {0}, {0}};
    const window *windows[] = {&small, &large, &apart};

    for (int trial = 0; trial < 36; trial++) {
        conv v = {.type = BF16, .w = *windows[trial % 3], .images = trial / 3 % 4, .groups = 1 + trial / 12};
        v.in = 8 + random_below(40);
        v.out = 8 + random_below(70);
        if (conv_by_product(&v)) check_narrow_convolution(&v);
    }
    conv many = {.type = BF16, .w = small, .images = 130, .groups = 1, .in = 128, .out = 8}; /* collected in turns */
    if (conv_by_product(&many)) check_narrow_convolution(&many);
}
