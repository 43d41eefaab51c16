/* lanes.h -- sums and largest values of a row, for templates of each_float.h.
 *
 * A row is folded into LANES numbers, and these into one at last: independent additions, which a CPU of any vector width
 * keeps in registers, and the same order of additions on all of them. Left to the compiler, the lanes of a reduction are
 * added one after another, which takes longer than a short row. */
#ifndef ORT_OPS_LANES_H
#define ORT_OPS_LANES_H

#include "core/prefetch.h"
#include "core/vmath.h"

#include <stdint.h>

enum { LANES = 32 };

/* Does `body` for each i in [from, to), as many at a time as there are lanes, `lane` being the one of i; fewer, in lanes
 * 0 and up, where fewer are left. Before each whole step, from i = `step` on, does `first`. */
#define IN_LANES(from, to, body) IN_STEPS(from, to, (void)0, body)
#define IN_STEPS(from, to, first, body)                                                                                \
    do {                                                                                                               \
        int64_t at_ = (from), to_ = (to);                                                                              \
        for (; at_ + LANES <= to_; at_ += LANES) {                                                                     \
            const int64_t step __attribute__((unused)) = at_;                                                          \
            first;                                                                                                     \
            AS_LANES(LANES, body)                                                                                      \
        }                                                                                                              \
        LANE_STEPS(16, body)                                                                                           \
        LANE_STEPS(8, body)                                                                                            \
        LANE_STEPS(4, body)                                                                                            \
        for (; at_ < to_; at_++) {                                                                                     \
            const int64_t i = at_;                                                                                     \
            const int lane __attribute__((unused)) = 0;                                                                \
            body;                                                                                                      \
        }                                                                                                              \
    } while (0)
#define AS_LANES(count, body)                                                                                          \
    _Pragma("omp simd") for (int lane = 0; lane < (count); lane++) {                                                   \
        const int64_t i = at_ + lane;                                                                                  \
        body;                                                                                                          \
    }
#define LANE_STEPS(count, body)                                                                                        \
    for (; at_ + (count) <= to_; at_ += (count)) AS_LANES(count, body)
#define SET_LANES(lanes, x) _Pragma("omp simd") for (int lane_ = 0; lane_ < LANES; lane_++)(lanes)[lane_] = (x)

/* The same for x[i] as `v`, all in [from, to), in any order: `i` counts them, and `body` is an expression. Two neighbours in
 * bfloat16 are the halves of a word, each of which is a float by one instruction: IN_PAIRS takes the first halves of a
 * step before the second ones. Templates of each_float.h know which of the two is theirs as EACH_OF. */
#define IN_ORDER(from, to, first, x, v, body) IN_STEPS(from, to, first, const A v = GET((x)[i]); (body))
#define IN_PAIRS(from, to, first, x, v, body)                                                                          \
    do {                                                                                                               \
        typedef uint32_t __attribute__((may_alias, aligned(2))) two;                                                   \
        int64_t pair_at_ = (from), pair_to_ = (to);                                                                    \
        for (; pair_at_ + LANES <= pair_to_; pair_at_ += LANES) {                                                      \
            const int64_t step __attribute__((unused)) = pair_at_;                                                     \
            const two *pairs_ = (const two *)(const void *)((x) + pair_at_);                                           \
            first;                                                                                                     \
            _Pragma("omp simd") for (int pair_ = 0; pair_ < LANES / 2; pair_++) {                                      \
                HALF_OF_PAIR(pair_, v, pairs_[pair_] << 16, body)                                                      \
                HALF_OF_PAIR(LANES / 2 + pair_, v, pairs_[pair_] & 0xffff0000u, body)                                  \
            }                                                                                                          \
        }                                                                                                              \
        IN_ORDER(pair_at_, pair_to_, (void)0, x, v, body);                                                             \
    } while (0)
#define HALF_OF_PAIR(lane_, v, bits, body)                                                                             \
    {                                                                                                                  \
        const int lane __attribute__((unused)) = lane_;                                                                \
        const int64_t i __attribute__((unused)) = pair_at_ + lane;                                                     \
        const float v = f32_of_bits(bits);                                                                             \
        (body);                                                                                                        \
    }

/* What is left of all lanes, which are used up. */
#define FOLD(name, A, op)                                                                                              \
    static inline __attribute__((always_inline)) A name(A *x) {                                                        \
        _Pragma("omp simd") for (int i = 0; i < LANES / 2; i++) x[i] = op(x[i], x[i + LANES / 2]);                     \
        _Pragma("omp simd") for (int i = 0; i < LANES / 4; i++) x[i] = op(x[i], x[i + LANES / 4]);                     \
        _Pragma("omp simd") for (int i = 0; i < LANES / 8; i++) x[i] = op(x[i], x[i + LANES / 8]);                     \
        return op(op(x[0], x[2]), op(x[1], x[3]));                                                                     \
    }
#define PLUS(x, y) ((x) + (y))
#define LARGER(x, y) ((x) > (y) ? (x) : (y)) /* y, if one of them is NaN */
FOLD(sum_of_lanes_f32, float, PLUS)
FOLD(sum_of_lanes_f64, double, PLUS)
FOLD(largest_lane_f32, float, LARGER)
FOLD(largest_lane_f64, double, LARGER)
#define sum_of_lanes(x) _Generic(*(x), float: sum_of_lanes_f32, double: sum_of_lanes_f64)(x)
#define largest_lane(x) _Generic(*(x), float: largest_lane_f32, double: largest_lane_f64)(x)

/* For `first`: asks for what comes after x[i], and after y[i], elements in a row that are read or written from end to
 * end. */
#define READ_AHEAD(x) prefetch_ahead((x) + step, LANES * (int64_t)sizeof *(x))
#define WRITE_AHEAD(y) prefetch_to((y) + step, LANES * (int64_t)sizeof *(y))

/* total += Σ expr over i in [0, n), and of two expressions at once. Blocks are summed in A and added up in
 * double: a long sum is as accurate as a short one. SUM_WITH does `first` before each step, as IN_STEPS does. */
enum { SUM_BLOCK = 1024 };
#define EACH_SUM_BLOCK(n)                                                                                              \
    for (int64_t sum_from_ = 0, sum_n_ = (n), sum_to_;                                                                 \
         sum_to_ = sum_n_ - sum_from_ < SUM_BLOCK ? sum_n_ : sum_from_ + SUM_BLOCK, sum_from_ < sum_n_;                \
         sum_from_ += SUM_BLOCK)
#define SUM(n, total, expr) SUM_WITH((void)0, n, total, expr)
#define SUM_WITH(first, n, total, expr) SUM_BY(IN_STEPS(sum_from_, sum_to_, first, sum_[lane] += expr), n, total)
#define SUM_2(n, total_1, expr_1, total_2, expr_2)                                                                     \
    SUM_2_BY(IN_LANES(sum_from_, sum_to_, (sum_[lane] += expr_1, more_[lane] += expr_2)), n, total_1, total_2)
/* Of each x[i] as `v`. */
#define SUM_OF(first, n, x, v, total, expr)                                                                            \
    SUM_BY(EACH_OF(sum_from_, sum_to_, first, x, v, sum_[lane] += expr), n, total)
#define SUM_2_OF(n, x, v, total_1, expr_1, total_2, expr_2)                                                            \
    SUM_2_BY(EACH_OF(sum_from_, sum_to_, (void)0, x, v, (sum_[lane] += expr_1, more_[lane] += expr_2)), n, total_1,    \
             total_2)
#define SUM_BY(steps, n, total)                                                                                        \
    EACH_SUM_BLOCK(n) {                                                                                                \
        A sum_[LANES];                                                                                                 \
        SET_LANES(sum_, 0);                                                                                            \
        steps;                                                                                                         \
        total += (double)sum_of_lanes(sum_);                                                                           \
    }
#define SUM_2_BY(steps, n, total_1, total_2)                                                                           \
    EACH_SUM_BLOCK(n) {                                                                                                \
        A sum_[LANES], more_[LANES];                                                                                   \
        SET_LANES(sum_, 0);                                                                                            \
        SET_LANES(more_, 0);                                                                                           \
        steps;                                                                                                         \
        total_1 += (double)sum_of_lanes(sum_);                                                                         \
        total_2 += (double)sum_of_lanes(more_);                                                                        \
    }

/* most = the largest of it and expr over i in [0, n), without those that are NaN; most is not NaN */
#define LARGEST(n, most, expr) LARGEST_BY(IN_LANES(0, n, top_[lane] = LARGER(expr, top_[lane])), most)
/* Of each x[i] as `v`. */
#define LARGEST_OF(n, x, v, most) LARGEST_BY(EACH_OF(0, n, (void)0, x, v, top_[lane] = LARGER(v, top_[lane])), most)
#define LARGEST_BY(steps, most)                                                                                        \
    do {                                                                                                               \
        A top_[LANES];                                                                                                 \
        SET_LANES(top_, most);                                                                                         \
        steps;                                                                                                         \
        most = largest_lane(top_);                                                                                     \
    } while (0)

#endif
