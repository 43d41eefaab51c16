/* each_float.h -- includes the file TEMPLATE once for each float type, then forgets TEMPLATE.
 *
 * A template is written for any of them: T is an element in memory, A what is computed with (float for the 16-bit
 * types), DIGITS the bits of T's mantissa, GET and PUT go from T to A and back (PUT_FINITE: what is not NaN),
 * NAME(f) is f_f32, f_f64, f_bf16 or f_f16. FLOAT_TABLE(f), for afterwards, is the four functions by dtype. */

/* total += Σ expr over i in [0, n), and the same of two expressions at once. Blocks are summed in A, in vector lanes,
 * and added up in double: a long sum is as accurate as a short one. */
#define SUM(n, total, expr)                                                                                            \
    for (int64_t sum_from_ = 0, sum_n_ = (n); sum_from_ < sum_n_; sum_from_ += SUM_BLOCK) {                            \
        const int64_t sum_to_ = sum_n_ - sum_from_ < SUM_BLOCK ? sum_n_ : sum_from_ + SUM_BLOCK;                       \
        A sum_ = 0;                                                                                                    \
        _Pragma("omp simd reduction(+ : sum_)") for (int64_t i = sum_from_; i < sum_to_; i++) sum_ += expr;            \
        total += (double)sum_;                                                                                         \
    }
#define SUM_2(n, total_1, expr_1, total_2, expr_2)                                                                     \
    for (int64_t sum_from_ = 0, sum_n_ = (n); sum_from_ < sum_n_; sum_from_ += SUM_BLOCK) {                            \
        const int64_t sum_to_ = sum_n_ - sum_from_ < SUM_BLOCK ? sum_n_ : sum_from_ + SUM_BLOCK;                       \
        A sum_1_ = 0, sum_2_ = 0;                                                                                      \
        _Pragma("omp simd reduction(+ : sum_1_, sum_2_)") for (int64_t i = sum_from_; i < sum_to_; i++) {              \
            sum_1_ += expr_1;                                                                                          \
            sum_2_ += expr_2;                                                                                          \
        }                                                                                                              \
        total_1 += (double)sum_1_;                                                                                     \
        total_2 += (double)sum_2_;                                                                                     \
    }
#define SUM_BLOCK 1024

#define JOIN_NAMES(f, suffix) f##_##suffix
#define FLOAT_TABLE(f) {[F32] = f##_f32, [F64] = f##_f64, [BF16] = f##_bf16, [F16] = f##_f16}

#define T float
#define A float
#define DIGITS 24
#define NAME(f) JOIN_NAMES(f, f32)
#define GET(x) (x)
#define PUT(x) (x)
#define PUT_FINITE(x) (x)
#include TEMPLATE
#undef T
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE

#define T bf16
#define DIGITS 8
#define NAME(f) JOIN_NAMES(f, bf16)
#define GET(x) bf16_to_f32(x)
#define PUT(x) f32_to_bf16(x)
#define PUT_FINITE(x) f32_to_bf16_finite(x)
#include TEMPLATE
#undef T
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE

#define T f16
#define DIGITS 11
#define NAME(f) JOIN_NAMES(f, f16)
#define GET(x) ((float)(x))
#define PUT(x) ((f16)(x))
#define PUT_FINITE(x) PUT(x)
#include TEMPLATE
#undef T
#undef A
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE

#define T double
#define A double
#define DIGITS 53
#define NAME(f) JOIN_NAMES(f, f64)
#define GET(x) (x)
#define PUT(x) (x)
#define PUT_FINITE(x) (x)
#include TEMPLATE
#undef T
#undef A
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE

#undef TEMPLATE
#undef JOIN_NAMES
