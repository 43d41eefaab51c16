/* vmath.h -- computes elementary functions without branches, for loops in SIMD functions: libm's cannot be vectorised.
 *
 * Each has a float form (vexpf) and a double form (vexp); v_exp(x) takes the one of x's type. All are right for NaN,
 * infinities, zeros of both signs, overflow, underflow and denormals. Float results are within 2.3 units in the
 * last place; double results within 2e-15 relative. Polynomials are minimax fits of the function's remainder after its
 * leading terms. Where double precision would not be used enough to pay, the double form is libm's. */
#ifndef ORT_CORE_VMATH_H
#define ORT_CORE_VMATH_H

#include <math.h>
#include <stdint.h>

/* --- bits --------------------------------------------------------------------------------------------------------- */

typedef union word32 {
    float f;
    uint32_t u;
} word32;

typedef union word64 {
    double f;
    uint64_t u;
} word64;

static inline uint32_t bits_of_f32(float x) { return (word32){.f = x}.u; }
static inline float f32_of_bits(uint32_t u) { return (word32){.u = u}.f; }
static inline uint64_t bits_of_f64(double x) { return (word64){.f = x}.u; }
static inline double f64_of_bits(uint64_t u) { return (word64){.u = u}.f; }

/* Adding this rounds to the nearest integer, which is then in the low bits: there is no conversion that all CPUs
 * vectorise. */
#define ROUND_F32 0x1.8p23f
#define ROUND_F64 0x1.8p52

/* 2^n for normal results; n arrives modulo the word, as it comes out of the rounding. */
static inline double exp2_f64(uint64_t n) { return f64_of_bits((n + 1023u) << 52); }

/* --- exp, expm1 ------------------------------------------------------------------------------------------------------
 * x = n ln2 + r with |r| <= ln2 / 2, and exp(r) = 1 + r + r^2 q(r). */

/* Returns r. Rounding adds a bias to n: what is above the low nine bits of *n is shifted out where they become an
 * exponent. */
static inline float exp_reduce_f32(float x, float bias, uint32_t *n) {
    float round = ROUND_F32 + bias, t = x * 0x1.715476p+0f + round, k = t - round;
    *n = bits_of_f32(t);
    return (x - k * 0x1.63p-1f) - k * -0x1.bd0106p-13f;
}

/* exp(r) - 1 */
static inline float exp_poly_f32(float r) {
    float q = 0.00138146205f;
    q = q * r + 0.00836874583f;
    q = q * r + 0.0416683893f;
    q = q * r + 0.166665204f;
    q = q * r + 0.499999934f;
    return r + r * r * q;
}

static inline double exp_reduce_f64(double x, uint64_t *n) {
    double t = x * 0x1.71547652b82fep+0 + ROUND_F64, k = t - ROUND_F64;
    *n = bits_of_f64(t) - bits_of_f64(ROUND_F64);
    return (x - k * 0x1.62e42fee00000p-1) - k * 0x1.a39ef35793c76p-33;
}

static inline double exp_poly_f64(double r) {
    double q = 2.500001120812371e-08;
    q = q * r + 2.7630306292627637e-07;
    q = q * r + 2.7557586826456074e-06;
    q = q * r + 2.4801492949463016e-05;
    q = q * r + 0.00019841269505750853;
    q = q * r + 0.001388888894376021;
    q = q * r + 0.008333333333494987;
    q = q * r + 0.041666666666529725;
    q = q * r + 0.1666666666666641;
    q = q * r + 0.5;
    return r + r * r * q;
}

/* exp(x) for |x| <= 87, where it is normal. */
static inline float vexpf_normal(float x) {
    uint32_t n;
    float p = exp_poly_f32(exp_reduce_f32(x, 127, &n)), scale = f32_of_bits(n << 23);
    return scale + scale * p;
}

/* Scaled in two steps, so that a denormal result is rounded once and overflow is an infinity: each has a bias. */
static inline float vexpf(float x) {
    uint32_t n, half;
    float p, scale, c = x > 89.0f ? 89.0f : x;

    c = c < -104.0f ? -104.0f : c;
    p = exp_poly_f32(exp_reduce_f32(c, 2 * 127, &n));
    half = n >> 1;
    scale = f32_of_bits(half << 23);
    return (scale + scale * p) * f32_of_bits((n - half) << 23);
}

static inline double vexp(double x) {
    uint64_t n, half;
    double r, c = x > 710.0 ? 710.0 : x;

    c = c < -746.0 ? -746.0 : c;
    r = exp_reduce_f64(c, &n);
    half = (n + 2048u) / 2 - 1024u;
    return (1 + exp_poly_f64(r)) * exp2_f64(half) * exp2_f64(n - half);
}

/* exp(x) for x <= 0, or above by no more than rounding, as in a softmax: 0 instead of what is not normal any more, so
 * that it is scaled in one step. */
static inline float vexpf_below(float x) {
    float y = vexpf_normal(x);
    return x < -87.0f ? 0 : y;
}

static inline double vexp_below(double x) {
    uint64_t n;
    double r, c = x < -708.0 ? -708.0 : x;

    r = exp_reduce_f64(c, &n);
    c = (1 + exp_poly_f64(r)) * exp2_f64(n);
    return x < -708.0 ? 0 : c;
}

/* exp(x) RAISED for x <= 0, as before: normal where exp(x) is denormal, so that a probability, which is a quotient of two
 * of these, is rounded once. 0 where exp(x) is: were it rounded to 0 there, the CPU would take its time. */
#define RAISED_F32 0x1p64f
#define RAISED_F64 0x1p128

static inline float vexpf_raised(float x) {
    uint32_t n;
    float p = exp_poly_f32(exp_reduce_f32(x, 127 + 64, &n)), scale = f32_of_bits(n << 23);
    p = scale + scale * p;
    return x < -104.0f ? 0 : p;
}

/* exp(x) and exp(x) RAISED for x <= 0, for results of 16 bits and for sums of exponentials of 16-bit numbers: fewer
 * instructions, and 1 for 0. The relative error is 2e-7 down to -8, and 4e-7 (without fused multiplication and addition
 * 6e-6) at -87, where it is nothing of a sum that has a 1. */
static inline float exp_brief(float x, float bias) {
    const float round = ROUND_F32 + bias, t = x * 0x1.715476p+0f + round, r = x - (t - round) * 0x1.62e43p-1f;
    float p = 0.008290272f;
    p = p * r + 0.04189816f;
    p = p * r + 0.16667639f;
    p = p * r + 0.49999148f;
    p = p * r + 0.9999997f;
    p = p * r + 1;
    return p * f32_of_bits(bits_of_f32(t) << 23);
}

static inline float vexpf_brief(float x) {
    const float y = exp_brief(x, 127);
    return x < -87.0f ? 0 : y;
}

static inline float vexpf_brief_raised(float x) {
    const float y = exp_brief(x, 127 + 64);
    return x < -104.0f ? 0 : y;
}

static inline double vexp_raised(double x) {
    uint64_t n;
    double r, c = x < -746.0 ? -746.0 : x;

    r = exp_reduce_f64(c, &n);
    c = (1 + exp_poly_f64(r)) * exp2_f64(n + 128);
    return x < -746.0 ? 0 : c;
}

/* 2^n (exp(r) - 1) + (2^n - 1), halved inside because 2^128 is not a number. */
static inline float vexpm1f(float x) {
    uint32_t n;
    float p, t, c = x > 89.0f ? 89.0f : x;

    c = c < -18.0f ? -18.0f : c;
    p = exp_poly_f32(exp_reduce_f32(c, 127 - 1, &n));
    t = f32_of_bits(n << 23);
    t = 2 * (t * p + (t - 0.5f));
    return fabsf(x) < 0x1p-24f ? x : t;
}

static inline double vexpm1(double x) {
    uint64_t n;
    double r, t, c = x > 710.0 ? 710.0 : x;

    c = c < -40.0 ? -40.0 : c;
    r = exp_reduce_f64(c, &n);
    t = exp2_f64(n - 1);
    t = 2 * (t * exp_poly_f64(r) + (t - 0.5));
    return fabs(x) < 0x1p-53 ? x : t;
}

/* --- log, log1p ------------------------------------------------------------------------------------------------------
 * x = 2^k (1 + f) with sqrt(1/2) <= 1 + f < sqrt(2); a denormal is scaled up first. */

static inline float vlogf(float x) {
    int denormal = x < 0x1p-126f;
    uint32_t u = bits_of_f32(denormal ? x * 0x1p23f : x) - 0x3f3504f3u;
    float k = (float)((int32_t)u >> 23) - (denormal ? 23.0f : 0.0f);
    float f = f32_of_bits((u & 0x7fffffu) + 0x3f3504f3u) - 1, z = f * f, p = -0.0763563563f;

    p = p * f + 0.127633316f;
    p = p * f - 0.131605884f;
    p = p * f + 0.142015503f;
    p = p * f - 0.166232975f;
    p = p * f + 0.200012338f;
    p = p * f - 0.250008228f;
    p = p * f + 0.333333316f;
    p = k * 0x1.63p-1f + (f + (k * -0x1.bd0106p-13f + (f * z * p - 0.5f * z)));
    p = x == INFINITY ? INFINITY : p;
    return x > 0 ? p : x == 0 ? -INFINITY : NAN;
}

/* log(1 + f) = 2 atanh(s), s = f / (2 + f): half the terms, and the leading one is exact. */
static inline double vlog(double x) {
    int denormal = x < 0x1p-1022;
    uint64_t u = bits_of_f64(denormal ? x * 0x1p52 : x) - 0x3fe6a09e667f3bcdu;
    /* The exponent as a double through its bits: few CPUs convert 64-bit integers. */
    double k = f64_of_bits(((u + 0x8000000000000000u) >> 52) | 0x4330000000000000u) - (0x1p52 + 2048);
    double f = f64_of_bits((u & 0xfffffffffffffu) + 0x3fe6a09e667f3bcdu) - 1;
    double s = f / (2 + f), z = s * s, half = 0.5 * f * f, p = 0.14798261449460767;

    k -= denormal ? 52.0 : 0.0;
    p = p * z + 0.15313831918350526;
    p = p * z + 0.181835723636465;
    p = p * z + 0.22222198428837867;
    p = p * z + 0.28571428743687294;
    p = p * z + 0.3999999999940935;
    p = p * z + 0.6666666666666735;
    p = k * 0x1.62e42fee00000p-1 + (f - (half - (s * (half + z * p) + k * 0x1.a39ef35793c76p-33)));
    p = x == (double)INFINITY ? (double)INFINITY : p;
    return x > 0 ? p : x == 0 ? (double)-INFINITY : (double)NAN;
}

/* log(u) for u = 1 + x as rounded, and the first-order effect of what rounding lost. */
static inline float vlog1pf(float x) {
    float u = 1 + x, lost = (x - (u - 1)) / u, y = vlogf(u);
    y = u > 0 && u < INFINITY ? y + lost : y;
    return fabsf(x) < 0x1p-24f ? x : y;
}

static inline double vlog1p(double x) {
    double u = 1 + x, lost = (x - (u - 1)) / u, y = vlog(u);
    y = u > 0 && u < (double)INFINITY ? y + lost : y;
    return fabs(x) < 0x1p-53 ? x : y;
}

/* --- sigmoid, tanh, erf ------------------------------------------------------------------------------------------- */

/* exp(-|x|) does not overflow, and exp(x) / (1 + exp(x)) keeps the relative accuracy of the left tail. */
static inline float vsigmoidf(float x) {
    float e = vexpf(-fabsf(x));
    return (x < 0 ? e : 1.0f) / (1 + e);
}

static inline double vsigmoid(double x) {
    double e = vexp(-fabs(x));
    return (x < 0 ? e : 1.0) / (1 + e);
}

static inline float vtanhf(float x) {
    float a = fabsf(x), z = x * x, p = -0.00571702794f, big = 1 - 2 / (vexpf_normal(a > 40 ? 80.0f : 2 * a) + 1);

    p = p * z + 0.0206505715f;
    p = p * z - 0.053743493f;
    p = p * z + 0.133314912f;
    p = p * z - 0.333332839f;
    p = a + a * z * p;
    return copysignf(a < 0.625f ? p : big, x);
}

static inline double vtanh(double x) {
    double e = vexpm1(-2 * fabs(x));
    return copysign(e / (2 + e), x);
}

/* Odd polynomial near 0; 1 - exp(-q(|x|)) beyond, q fitting -log(erfc). */
static inline float verff(float x) {
    float a = fabsf(x), z = x * x, p = -0.000609035757f, q = -0.000198219012f, c = a > 4 ? 4.0f : a;

    p = p * z + 0.00501196272f;
    p = p * z - 0.0267789093f;
    p = p * z + 0.112821408f;
    p = p * z - 0.376125233f;
    p = p * z + 0.128379151f;
    q = q * c + 0.00306548599f;
    q = q * c - 0.0223152027f;
    q = q * c + 0.104113669f;
    q = q * c + 0.636976083f;
    q = q * c + 1.12779725f;
    q = q * c + 0.000166445351f;
    return a < 0.9f ? x + x * p : copysignf(1 - vexpf_normal(-q), x);
}

static inline double verf(double x) { return erf(x); }

/* The normal distribution function; exp(-x^2 / 2) is an argument, since a slope needs it, too. With t = 1 / (1 + 0.26 |x|)
 * its left tail is exp(-x^2 / 2) t p(t). Within 4e-7, and of it where that is less: the tail keeps six digits at -6. */
static inline float vphif(float x, float e) {
    float t = 1 / (1 + 0.26f * fabsf(x)), p = 0.0302303f, tail;

    p = p * t - 0.151494443f;
    p = p * t + 0.248733209f;
    p = p * t - 0.147789344f;
    p = p * t + 0.158758759f;
    p = p * t + 0.0519648194f;
    p = p * t + 0.102788679f;
    p = p * t + 0.103050977f;
    p = p * t + 0.103757024f;
    tail = e * (t * p);
    return x < 0 ? tail : 1 - tail;
}

static inline double vphi(double x, double e) { return (void)e, 0.5 * (1 + erf(x * 0.70710678118654752)); }

/* --- pow -------------------------------------------------------------------------------------------------------------
 * exp(y log|x|) in double is exact enough for float, and overflows when it is rounded to one. */

static inline float vpowf(float x, float y) {
    double a = (double)fabsf(x), size = vexp((double)y * vlog(a));
    int whole = rintf(y) == y, odd = whole && rintf(y * 0.5f) != y * 0.5f; /* infinity is whole and even */
    float r = (float)size;

    r = odd ? copysignf(r, x) : r;
    r = x < 0 && !whole && a < (double)INFINITY ? NAN : r;
    return y == 0 || x == 1 || (x == -1 && fabsf(y) == INFINITY) ? 1 : r;
}

static inline double vpow(double x, double y) { return pow(x, y); }

/* --- sin, cos --------------------------------------------------------------------------------------------------------
 * The float forms hold for |x| <= TRIG_LIMIT, the range where subtracting multiples of pi / 2 in double loses nothing;
 * a caller that may have larger ones redoes those with libm. */

#define TRIG_LIMIT 0x1p20f

/* Returns r of x = n pi / 2 + r; *n has the low bits of n. */
static inline double trig_reduce(double x, uint64_t *n) {
    double t = x * 0x1.45f306dc9c883p-1 + ROUND_F64, k = t - ROUND_F64;
    *n = bits_of_f64(t);
    return (x - k * 0x1.921fb54400000p+0) - k * 0x1.0b4611a626331p-34;
}

static inline float trig_f32(float x, uint32_t quarter_turns) {
    uint64_t n;
    float r = (float)trig_reduce((double)x, &n), z = r * r;
    uint32_t q = (uint32_t)n + quarter_turns;
    float s = r + r * z * (-0.166666549f + z * (0.00833217354f + z * -0.000195166556f));
    float c = 1 - 0.5f * z + z * z * (0.0416666467f + z * (-0.00138873615f + z * 2.44377302e-05f));
    float y = q & 1u ? c : s;
    return f32_of_bits(bits_of_f32(y) ^ ((q & 2u) << 30));
}

static inline float vsinf(float x) {
    float y = trig_f32(x, 0);
    return fabsf(x) < 0x1p-12f ? x : y;
}

static inline float vcosf(float x) { return trig_f32(x, 1); }
static inline double vsin(double x) { return sin(x); }
static inline double vcos(double x) { return cos(x); }

/* --- by the type of the argument ---------------------------------------------------------------------------------- */

#define v_exp(x) _Generic((x), float: vexpf, double: vexp)(x)
#define v_exp_below(x) _Generic((x), float: vexpf_below, double: vexp_below)(x)
#define v_exp_raised(x) _Generic((x), float: vexpf_raised, double: vexp_raised)(x)
#define v_raised(x) ((x) * _Generic((x), float: RAISED_F32, double: RAISED_F64))
#define v_expm1(x) _Generic((x), float: vexpm1f, double: vexpm1)(x)
#define v_log(x) _Generic((x), float: vlogf, double: vlog)(x)
#define v_log1p(x) _Generic((x), float: vlog1pf, double: vlog1p)(x)
#define v_sigmoid(x) _Generic((x), float: vsigmoidf, double: vsigmoid)(x)
#define v_tanh(x) _Generic((x), float: vtanhf, double: vtanh)(x)
#define v_erf(x) _Generic((x), float: verff, double: verf)(x)
#define v_phi(x, e) _Generic((x), float: vphif, double: vphi)(x, e)
#define v_pow(x, y) _Generic((x), float: vpowf, double: vpow)(x, y)
#define v_sin(x) _Generic((x), float: vsinf, double: vsin)(x)
#define v_cos(x) _Generic((x), float: vcosf, double: vcos)(x)

#endif
