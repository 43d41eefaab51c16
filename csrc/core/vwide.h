/* vwide.h -- computes more functions of float without branches, in double with what float needs of it: within
 * one unit of the last place unless it says otherwise. The double forms are libm's.
 *
 * Polynomials are fits of the function's even part, relative to it. All are right for NaN, infinities, zeros of both
 * signs and denormals. */
#ifndef ORT_CORE_VWIDE_H
#define ORT_CORE_VWIDE_H

#include "core/vmath.h"

/* --- atan and its kin ----------------------------------------------------------------------------------------------- */

/* atan(z) for 0 <= z <= 1 */
static inline double atan_poly(double z) {
    double u = z * z, p = -0.0006675779603043725;

    p = p * u + 0.00475573550061513;
    p = p * u - 0.015884206089828067;
    p = p * u + 0.03390222674846233;
    p = p * u - 0.05402097948008921;
    p = p * u + 0.07231779519088677;
    p = p * u - 0.0897539929831523;
    p = p * u + 0.11092192008083158;
    p = p * u - 0.1428384779564033;
    p = p * u + 0.1999990338786003;
    p = p * u - 0.33333331350286644;
    p = p * u + 0.9999999999318792;
    return z * p;
}

/* The angle of (x, y), from double operands that float ones have made. */
static inline float angle_f32(double y, double x) {
    double a = fabs(y), b = fabs(x), high = a > b ? a : b, low = a > b ? b : a;
    double z = low == high ? (high == 0 ? 0.0 : 1.0) : low / high, r = atan_poly(z);

    r = a > b ? 0x1.921fb54442d18p+0 - r : r;
    r = copysign(1.0, x) < 0 ? 0x1.921fb54442d18p+1 - r : r;
    return (float)(x != x || y != y ? (double)NAN : copysign(r, y));
}

static inline float vatan2f(float y, float x) { return angle_f32((double)y, (double)x); }
static inline float vatanf(float x) { return angle_f32((double)x, 1.0); }

/* sqrt(1 - x^2); NaN beyond 1 */
static inline double complement(double x) { return sqrt((1 - x) * (1 + x)); }
static inline float vasinf(float x) { return angle_f32((double)x, complement((double)x)); }
static inline float vacosf(float x) { return angle_f32(complement((double)x), (double)x); }

/* --- tan, for |x| <= TRIG_LIMIT ------------------------------------------------------------------------------------- */

static inline float vtanf(float x) {
    uint64_t n;
    double r = trig_reduce((double)x, &n), u = r * r, p = 0.004400406457921239;

    p = p * u + 3.091873873523922e-05;
    p = p * u + 0.010893001961047411;
    p = p * u + 0.02125365448942315;
    p = p * u + 0.054067569220970675;
    p = p * u + 0.13332557744106438;
    p = p * u + 0.3333335615639419;
    p = r * (p * u + 0.9999999989092218);
    p = n & 1u ? -1 / p : p;
    return fabsf(x) < 0x1p-12f ? x : (float)p;
}

/* --- hyperbolic functions and their inverses ------------------------------------------------------------------------ */

static inline float vsinhf(float x) {
    double a = fabs((double)x), t = vexpm1(a > 100 ? 100 : a);
    return (float)copysign((t + t / (t + 1)) / 2, (double)x);
}

static inline float vcoshf(float x) {
    double a = fabs((double)x), e = vexp(a > 100 ? 100 : a);
    return (float)((e + 1 / e) / 2);
}

static inline float vasinhf(float x) {
    double a = fabs((double)x), y = vlog(a + sqrt(a * a + 1));
    return (float)copysign(a < 1e-3 ? a - a * a * a / 6 : y, (double)x);
}

static inline float vacoshf(float x) {
    double d = (double)x;
    return d < 1 ? NAN : (float)vlog(d + sqrt((d - 1) * (d + 1)));
}

static inline float vatanhf(float x) {
    double a = fabs((double)x), y = vlog((1 + a) / (1 - a)) / 2;
    return (float)copysign(a < 1e-3 ? a + a * a * a / 3 : y, (double)x);
}

static inline float vhypotf(float x, float y) {
    double a = (double)x, b = (double)y, r = sqrt(a * a + b * b);
    return fabsf(x) == INFINITY || fabsf(y) == INFINITY ? INFINITY : (float)r;
}

/* --- erfc: t exp(p(t) - x^2) with t = 2 / (2 + x) for x >= 0 ---------------------------------------------------------- */

static inline float verfcf(float x) {
    double a = fabs((double)x), c = a > 10.3 ? 10.3 : a, t = 2 / (2 + c), p = -0.028908405816982802;

    p = p * t + 0.4045765100468468;
    p = p * t - 2.12001921676657;
    p = p * t + 5.916968520126518;
    p = p * t - 9.937474450678685;
    p = p * t + 10.488741142124855;
    p = p * t - 7.084325671680126;
    p = p * t + 3.3238910525232273;
    p = p * t - 1.3103961425843922;
    p = p * t + 0.19663407051696036;
    p = p * t + 0.035924001312985024;
    p = p * t + 0.3802316410304457;
    p = p * t + 0.9996591631843625;
    p = p * t - 1.2655022132506566;
    p = t * vexp(p - c * c);
    return (float)(x < 0 ? 2 - p : p);
}

/* --- the gamma function's logarithm ----------------------------------------------------------------------------------- */

/* |sin(pi x)| */
static inline double sine_of_pi_times(double x) {
    double r = x - rint(x), u = r * r, p = 0.00044714286450711827;

    p = p * u - 0.007363738766523442;
    p = p * u + 0.0821447180369242;
    p = p * u - 0.5992644237580245;
    p = p * u + 2.5501640352963975;
    p = p * u - 5.167712779974806;
    p = p * u + 3.1415926535895893;
    return fabs(r) * p;
}

/* Reflected to the right, and moved by 8 to where Stirling's series holds. Good to 1e-6 relative at its zeros. */
static inline float vlgammaf(float x) {
    double d = (double)x, a = d < 0 ? 1 - d : d, z = a < 8 ? a + 8 : a, v = 1 / z, u = v * v, p = -691.0 / 360360;
    double moved = a * (a + 1) * (a + 2) * (a + 3) * (a + 4) * (a + 5) * (a + 6) * (a + 7);

    p = p * u + 1.0 / 1188;
    p = p * u - 1.0 / 1680;
    p = p * u + 1.0 / 1260;
    p = p * u - 1.0 / 360;
    p = p * u + 1.0 / 12;
    p = (z - 0.5) * vlog(z) - z + (0x1.d67f1c864beb4p-1 + p * v) - vlog(a < 8 ? moved : 1);
    p = d < 0 ? vlog(0x1.921fb54442d18p+1 / sine_of_pi_times(d)) - p : p;
    return fabsf(x) == INFINITY ? INFINITY : x == 1 || x == 2 ? 0 : (float)p;
}

/* The second derivative, moved by 6. */
static inline float vtrigammaf(float x) {
    double d = (double)x, a = d < 0.5 ? 1 - d : d, z = a < 6 ? a + 6 : a, v = 1 / z, u = v * v, p, moved = 0;

    for (int i = 0; i < 6; i++) moved += 1 / ((a + i) * (a + i));
    p = 5.0 / 66 * u - 1.0 / 30;
    p = p * u + 1.0 / 42;
    p = p * u - 1.0 / 30;
    p = p * u + 1.0 / 6;
    p = v + u / 2 + p * u * v + (a < 6 ? moved : 0);
    a = 0x1.921fb54442d18p+1 / sine_of_pi_times(d);
    return (float)(d < 0.5 ? a * a - p : p);
}

/* --- fmod, for |x| < 2^29 |y| ------------------------------------------------------------------------------------------- */

#define FMOD_LIMIT 0x1p29f

/* A quotient that rounds up to a whole number is one too many: the rest then has the other sign. Exact. */
static inline float vfmodf(float x, float y) {
    double a = (double)x, b = fabs((double)y), size = fabs(a), r = size - trunc(size / b) * b;

    r = r < 0 ? r + b : r >= b ? r - b : r;
    r = copysign(r, a);
    return fabsf(y) == INFINITY && fabsf(x) < INFINITY ? x : (float)r;
}

#endif
