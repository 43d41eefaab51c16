/* test_vmath.c -- compares elementary functions with libm's in double, over all of their range, as SIMD functions
 * compile them. Conversions of 16-bit floats are compared with the compiler's. */
#include "core/dtype.h"
#include "core/parallel.h"
#include "core/vwide.h"

#include "test.h"

#include <float.h>
#include <stdlib.h>
#include <string.h>

enum { BATCH = 4096, STRIDE = 20011, BATCHES = 60 };

/* --- float -------------------------------------------------------------------------------------------------------- */

typedef void float_map(const float *x, float *y);
typedef double exact_fn(double x);

/* How far `y` is from `exact`, in units of the last place of a float. */
static double ulps(float y, double exact) {
    int exponent;

    if (isnan(exact) || isnan(y)) return isnan(exact) && isnan(y) ? 0 : INFINITY;
    if (isinf((float)exact) || isinf(y)) return (float)exact == y ? 0 : INFINITY;
    if (exact == 0 && !signbit(exact) != !signbit(y)) return INFINITY;
    frexp(exact, &exponent);
    return fabs((double)y - exact) / ldexp(1, exponent < FLT_MIN_EXP ? FLT_MIN_EXP - 24 : exponent - 24);
}

/* The largest error over every STRIDE-th float up to `limit`, and the places where functions have edges. */
static double worst_float(float_map *map, exact_fn *exact, float limit) {
    static const float edges[] = {0.0f,     -0.0f,     INFINITY,  -INFINITY,  NAN,        1.0f,
                                  -1.0f,    0x1p-149f, 0x1p-126f, -0x1p-149f, 88.722f,    88.723f,
                                  -103.97f, -103.98f,  FLT_MAX,   -FLT_MAX,   0x1p-24f,   -0x1p-24f,
                                  0.625f,   0.9f,      -0.9f,     4.0f,       TRIG_LIMIT, -TRIG_LIMIT};
    static float x[BATCH], y[BATCH];
    const int n_edges = (int)(sizeof edges / sizeof *edges);
    uint64_t bits = 0;
    double worst = 0;

    while (bits <= UINT32_MAX) {
        int n = 0;
        for (int i = 0; bits == 0 && i < n_edges; i++)
            if (!(fabsf(edges[i]) > limit) || limit == INFINITY) x[n++] = edges[i];
        for (; n < BATCH && bits <= UINT32_MAX; bits += STRIDE) {
            float f = f32_of_bits((uint32_t)bits);
            if (!(fabsf(f) > limit)) x[n++] = f;
        }
        for (int i = n; i < BATCH; i++) x[i] = 1;
        map(x, y);
        for (int i = 0; i < n; i++) {
            double e = ulps(y[i], exact((double)x[i]));
            if (e > worst) worst = e;
        }
    }
    return worst;
}

/* Of arguments that are not above 0. */
static inline float exp_below_f32(float x) { return vexpf_below(-fabsf(x)); }
static inline float exp_raised_f32(float x) { return vexpf_raised(-fabsf(x)) * 0x1p-64f; }
static inline float exp_brief_f32(float x) { return vexpf_brief(-fabsf(x)); }
static inline float exp_brief_raised_f32(float x) { return vexpf_brief_raised(-fabsf(x)) * 0x1p-64f; }
static double normal_exp_f32(double x) { return fabs(x) > 87 ? 0 : exp(-fabs(x)); }
static inline double exp_below_f64(double x) { return vexp_below(-fabs(x)); }
static double below_exp(double x) { return exp(-fabs(x)); }
static inline double exp_raised_f64(double x) { return vexp_raised(-fabs(x)) * 0x1p-128; }
static double normal_exp_f64(double x) { return fabs(x) > 708 ? 0 : exp(-fabs(x)); }

#define FLOAT_MAP(f)                                                                                                   \
    SIMD static void map_##f(const float *x, float *y) {                                                               \
        for (int i = 0; i < BATCH; i++) y[i] = f(x[i]);                                                                \
    }
FLOAT_MAP(vexpf)
FLOAT_MAP(exp_below_f32)
FLOAT_MAP(exp_raised_f32)
FLOAT_MAP(exp_brief_f32)
FLOAT_MAP(exp_brief_raised_f32)
FLOAT_MAP(vexpm1f)
FLOAT_MAP(vlogf)
FLOAT_MAP(vlog1pf)
FLOAT_MAP(vsigmoidf)
FLOAT_MAP(vtanhf)
FLOAT_MAP(verff)
FLOAT_MAP(vsinf)
FLOAT_MAP(vcosf)
FLOAT_MAP(vtanf)
FLOAT_MAP(vatanf)
FLOAT_MAP(vasinf)
FLOAT_MAP(vacosf)
FLOAT_MAP(vsinhf)
FLOAT_MAP(vcoshf)
FLOAT_MAP(vasinhf)
FLOAT_MAP(vacoshf)
FLOAT_MAP(vatanhf)
FLOAT_MAP(verfcf)
FLOAT_MAP(vlgammaf)

static double sigmoid(double x) { return x < 0 ? exp(x) / (1 + exp(x)) : 1 / (1 + exp(-x)); }

TEST(float_functions_are_within_two_units_of_the_last_place) {
    CHECK(worst_float(map_vexpf, exp, INFINITY) < 1.1);
    CHECK(worst_float(map_exp_below_f32, normal_exp_f32, INFINITY) < 1.1);
    CHECK(worst_float(map_exp_raised_f32, below_exp, INFINITY) < 1.1);
    CHECK(worst_float(map_exp_brief_f32, normal_exp_f32, 8) < 3.5);
    CHECK(worst_float(map_exp_brief_f32, normal_exp_f32, INFINITY) < 100);
    CHECK(worst_float(map_exp_brief_raised_f32, below_exp, 8) < 3.5);
    CHECK(worst_float(map_exp_brief_raised_f32, below_exp, INFINITY) < 100);
    CHECK(worst_float(map_vexpm1f, expm1, INFINITY) < 1.7);
    CHECK(worst_float(map_vlogf, log, INFINITY) < 1.1);
    CHECK(worst_float(map_vlog1pf, log1p, INFINITY) < 1.7);
    CHECK(worst_float(map_vsigmoidf, sigmoid, INFINITY) < 2.4);
    CHECK(worst_float(map_vtanhf, tanh, INFINITY) < 1.6);
    CHECK(worst_float(map_verff, erf, INFINITY) < 1.6);
    CHECK(worst_float(map_vsinf, sin, TRIG_LIMIT) < 1.8);
    CHECK(worst_float(map_vcosf, cos, TRIG_LIMIT) < 1.8);
}

SIMD static void map_vphif(const float *x, float *y) {
    for (int i = 0; i < BATCH; i++) y[i] = vphif(x[i], vexpf(-x[i] * x[i] / 2));
}

TEST(the_normal_distribution_function) {
    static const float ends[] = {0.0f, -0.0f, INFINITY, -INFINITY, 1e30f, -1e30f, 1e-40f, -20.0f};
    static const double expected[] = {0.5, 0.5, 1, 0, 1, 0, 0.5, 0};
    static float x[BATCH], y[BATCH];
    double worst = 0, tail = 0;

    for (int i = 0; i < BATCH; i++) x[i] = i < 8 ? ends[i] : i == 8 ? NAN : -7 + 14 * (float)i / BATCH;
    map_vphif(x, y);
    for (int i = 0; i < 8; i++) CHECK(y[i] == expected[i]);
    CHECK(y[8] != y[8]);
    for (int i = 9; i < BATCH; i++) {
        double exact = 0.5 * erfc(-(double)x[i] / sqrt(2)), e = fabs((double)y[i] - exact);
        if (e > worst) worst = e;
        if (x[i] > -6 && e / exact > tail) tail = e / exact;
    }
    CHECK(worst < 4e-7);
    CHECK(tail < 3e-6);
}

TEST(float_functions_in_double_are_within_one_unit_of_the_last_place) {
    CHECK(worst_float(map_vtanf, tan, TRIG_LIMIT) < 1);
    CHECK(worst_float(map_vatanf, atan, INFINITY) < 1);
    CHECK(worst_float(map_vasinf, asin, INFINITY) < 1);
    CHECK(worst_float(map_vacosf, acos, INFINITY) < 1);
    CHECK(worst_float(map_vsinhf, sinh, INFINITY) < 1);
    CHECK(worst_float(map_vcoshf, cosh, INFINITY) < 1);
    CHECK(worst_float(map_vasinhf, asinh, INFINITY) < 1);
    CHECK(worst_float(map_vacoshf, acosh, INFINITY) < 1);
    CHECK(worst_float(map_vatanhf, atanh, INFINITY) < 1);
    CHECK(worst_float(map_verfcf, erfc, INFINITY) < 1);
    CHECK(worst_float(map_vlgammaf, lgamma, INFINITY) < 16);
}

typedef void float_map_2(const float *x, const float *y, float *z);
#define FLOAT_MAP_2(f)                                                                                                 \
    SIMD static void map_##f(const float *x, const float *y, float *z) {                                               \
        for (int i = 0; i < BATCH; i++) z[i] = f(x[i], y[i]);                                                          \
    }
FLOAT_MAP_2(vatan2f)
FLOAT_MAP_2(vhypotf)
FLOAT_MAP_2(vfmodf)

/* Over pairs of any bits whose quotient is at most `limit`, and of odd ones. */
static double worst_float_2(float_map_2 *map, double (*exact)(double, double), float limit) {
    static const float odd[] = {0.0f, -0.0f,    1,         -1,  2,      0.1f,  -0.3f,
                                3,    INFINITY, -INFINITY, NAN, 1e-40f, 1e30f, 0x1p-149f};
    static float x[BATCH], y[BATCH], z[BATCH];
    const int n = (int)(sizeof odd / sizeof *odd);
    double worst = 0;

    for (int batch = 0; batch < BATCHES; batch++) {
        for (int i = 0; i < BATCH; i++) {
            const bool special = batch == 0 && i < n * n;
            x[i] = special ? odd[i / n] : f32_of_bits((uint32_t)rand() << 1 ^ (uint32_t)rand());
            y[i] = special ? odd[i % n] : f32_of_bits((uint32_t)rand() << 1 ^ (uint32_t)rand());
            if (batch % 2) y[i] = ldexpf(x[i], -(rand() % 24)) * (1 + (float)rand() / (float)RAND_MAX);
            if (y[i] != 0 && !(fabsf(x[i]) < limit * fabsf(y[i])) && limit < INFINITY) x[i] = y[i] = 1;
        }
        map(x, y, z);
        for (int i = 0; i < BATCH; i++) {
            double e = ulps(z[i], exact((double)x[i], (double)y[i]));
            if (e > worst) worst = e;
        }
    }
    return worst;
}

TEST(float_functions_of_two_operands_are_those_of_c) {
    CHECK(worst_float_2(map_vatan2f, atan2, INFINITY) < 1);
    CHECK(worst_float_2(map_vhypotf, hypot, INFINITY) < 1);
    CHECK(worst_float_2(map_vfmodf, fmod, FMOD_LIMIT) == 0);
}

SIMD static void map_vpowf(const float *x, const float *y, float *z) {
    for (int i = 0; i < BATCH; i++) z[i] = vpowf(x[i], y[i]);
}

TEST(float_powers_are_rounded_once_and_have_the_special_cases_of_c) {
    static const float odd[] = {0.0f, -0.0f, 1,     -1,     2,   -2,       0.5f,      -0.5f, 3,      -3,
                                1.5f, -1.5f, 1e30f, -1e30f, 127, INFINITY, -INFINITY, NAN,   1e-40f, 16777217.0f};
    static float x[BATCH], y[BATCH], z[BATCH];
    const int n = (int)(sizeof odd / sizeof *odd);
    double worst = 0;

    for (int batch = 0; batch < BATCHES; batch++) {
        for (int i = 0; i < BATCH; i++) {
            bool special = batch == 0 && i < n * n;
            x[i] = special ? odd[i / n] : f32_of_bits((uint32_t)rand() & 0x7fffffffu);
            y[i] = special ? odd[i % n] : ldexpf((float)rand() / (float)RAND_MAX - 0.5f, batch % 30 - 10);
        }
        map_vpowf(x, y, z);
        for (int i = 0; i < BATCH; i++) {
            double e = ulps(z[i], pow((double)x[i], (double)y[i]));
            if (e > worst) worst = e;
        }
    }
    CHECK(worst < 0.6);
}

/* --- double ------------------------------------------------------------------------------------------------------- */

typedef void double_map(const double *x, double *y);

/* Relative; for denormal results, so many of the least one times 1e-16. */
static double error(double y, double exact) {
    if (isnan(exact) || isnan(y)) return isnan(exact) && isnan(y) ? 0 : INFINITY;
    if (isinf(exact) || isinf(y) || exact == 0) return exact == y && !signbit(exact) == !signbit(y) ? 0 : INFINITY;
    return fabs(exact) < DBL_MIN ? fabs(y - exact) / 0x1p-1074 * 1e-16 : fabs((y - exact) / exact);
}

static double worst_double(double_map *map, exact_fn *exact) {
    static const double edges[] = {0.0,        -0.0,   INFINITY, -INFINITY, NAN,    1,      -1,      0x1p-1074,
                                   -0x1p-1074, 709.78, 709.79,   -745.13,   -745.2, -708.5, DBL_MAX, -DBL_MAX};
    static double x[BATCH], y[BATCH];
    double worst = 0;

    for (int batch = 0; batch < BATCHES; batch++) {
        static const double scale[] = {1, 40, 750, 1e-3, 1e-9};
        for (int i = 0; i < BATCH; i++) {
            double u = 2.0 * rand() / RAND_MAX - 1;
            x[i] = batch % 6 < 5 ? u * scale[batch % 6] : ldexp(u, rand() % 2098 - 1074);
        }
        if (batch == 0) memcpy(x, edges, sizeof edges);
        map(x, y);
        for (int i = 0; i < BATCH; i++) {
            double e = error(y[i], exact(x[i]));
            if (e > worst) worst = e;
        }
    }
    return worst;
}

#define DOUBLE_MAP(f)                                                                                                  \
    SIMD static void map_##f(const double *x, double *y) {                                                             \
        for (int i = 0; i < BATCH; i++) y[i] = f(x[i]);                                                                \
    }
DOUBLE_MAP(vexp)
DOUBLE_MAP(exp_below_f64)
DOUBLE_MAP(exp_raised_f64)
DOUBLE_MAP(vexpm1)
DOUBLE_MAP(vlog)
DOUBLE_MAP(vlog1p)
DOUBLE_MAP(vsigmoid)
DOUBLE_MAP(vtanh)

TEST(double_functions_are_accurate_to_2e_15) {
    CHECK(worst_double(map_vexp, exp) < 2e-15);
    CHECK(worst_double(map_exp_below_f64, normal_exp_f64) < 2e-15);
    CHECK(worst_double(map_exp_raised_f64, below_exp) < 2e-15);
    CHECK(worst_double(map_vexpm1, expm1) < 2e-15);
    CHECK(worst_double(map_vlog, log) < 2e-15);
    CHECK(worst_double(map_vlog1p, log1p) < 2e-15);
    CHECK(worst_double(map_vsigmoid, sigmoid) < 2e-15);
    CHECK(worst_double(map_vtanh, tanh) < 2e-15);
}

/* --- 16-bit floats ------------------------------------------------------------------------------------------------ */

TEST(float16_is_converted_as_the_compiler_does) {
    int wrong = 0;

    for (uint32_t u = 0; u <= UINT16_MAX; u++) {
        union {
            uint16_t u;
            f16 h;
        } x = {.u = (uint16_t)u};
        float expected = (float)x.h, f = f16_bits_to_f32(x.u);
        wrong += isnan(expected) ? !isnan(f) : bits_of_f32(f) != bits_of_f32(expected);
    }
    for (uint64_t u = 0; u <= UINT32_MAX; u += STRIDE) {
        union {
            f16 h;
            uint16_t u;
        } expected = {.h = (f16)f32_of_bits((uint32_t)u)};
        uint16_t bits = f32_to_f16_bits(f32_of_bits((uint32_t)u));
        wrong += isnan((float)expected.h) ? !isnan(f16_bits_to_f32(bits)) : bits != expected.u;
    }
    CHECK(wrong == 0);
}
