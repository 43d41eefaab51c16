/* reduce_fold.c -- the folds of reduce_kernel.h: what becomes of a tile of elements, in each class. */
#include "core/half.h"
#include "core/parallel.h"
#include "core/prefetch.h"
#include "core/vmath.h"
#include "ops/reductions/reduce_kernel.h"

/* --- folds -------------------------------------------------------------------------------------------------------- */

#define PRAGMA(text) _Pragma(#text)
#define NO_SHIFT(A, i) 0
#define SHIFT(A, i) (((const A *)shift)[i])

/* One fold in one class: elements of type C, totals of type A. `step` makes the new total from the old one `t`, the
 * element `x` and the shift `s`; `op` puts two totals together, of which `unit` is the neutral one. A row's tile is
 * folded in type L before it joins the total. */
#define FOLD(name, C, L, A, op, unit, SHIFT_OR_NOT, step)                                                              \
    SIMD static void name##_rows(void *acc, const void *from, int64_t n, const void *shift) {                          \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        L t = unit;                                                                                                    \
        const A s = SHIFT_OR_NOT(A, 0);                                                                                \
        (void)shift, (void)s;                                                                                          \
        PRAGMA(omp simd reduction(op : t))                                                                             \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            L x = (L)p[i];                                                                                             \
            t = step;                                                                                                  \
        }                                                                                                              \
        A tile = (A)t;                                                                                                 \
        *total = *total op tile;                                                                                       \
    }                                                                                                                  \
    SIMD static void name##_columns(void *acc, const void *from, int64_t n, const void *shift) {                       \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A x = (A)p[i], t = total[i];                                                                               \
            const A s = SHIFT_OR_NOT(A, i);                                                                            \
            (void)s;                                                                                                   \
            total[i] = step;                                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void name##_lines(void *acc, const void *from, int64_t n, int64_t stride, const void *shift) {         \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A x = (A)p[i], t = total[i];                                                                               \
            const A s = SHIFT_OR_NOT(A, i);                                                                            \
            (void)s;                                                                                                   \
            t = step, x = (A)p[i + stride];                                                                            \
            t = step, x = (A)p[i + 2 * stride];                                                                        \
            t = step, x = (A)p[i + 3 * stride];                                                                        \
            total[i] = step;                                                                                           \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void name##_short(void *acc, const void *from, int64_t n, int64_t length, const void *shift) {         \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A t = total[i];                                                                                            \
            const A s = SHIFT_OR_NOT(A, i);                                                                            \
            (void)s;                                                                                                   \
            for (int64_t k = 0; k < length; k++) {                                                                     \
                const A x = (A)p[i * length + k];                                                                      \
                t = step;                                                                                              \
            }                                                                                                          \
            total[i] = t;                                                                                              \
        }                                                                                                              \
    }

/* Maximum and minimum: a NaN wins, and stays. NaNs of a tile are counted in an N, an integer as wide as C. */
#define FOLD_EXTREME(name, C, N, A, op, beats)                                                                         \
    SIMD static void name##_rows(void *acc, const void *from, int64_t n, const void *shift) {                          \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        C t = p[0];                                                                                                    \
        N nans = 0;                                                                                                    \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd reduction(op : t) reduction(+ : nans))                                                         \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            nans += p[i] != p[i];                                                                                      \
            t = p[i] beats t ? p[i] : t;                                                                               \
        }                                                                                                              \
        const A tile = nans ? (A)NAN : (A)t, old = *total;                                                             \
        *total = tile beats old || tile != tile ? tile : old;                                                          \
    }                                                                                                                  \
    SIMD static void name##_columns(void *acc, const void *from, int64_t n, const void *shift) {                       \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A x = (A)p[i], t = total[i];                                                                               \
            total[i] = x beats t || x != x ? x : t;                                                                    \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void name##_lines(void *acc, const void *from, int64_t n, int64_t stride, const void *shift) {         \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            const C x = p[i], y = p[i + stride], z = p[i + 2 * stride], w = p[i + 3 * stride];                         \
            const C first = x beats y ? x : y, second = z beats w ? z : w;                                             \
            const int nans = (x != x) | (y != y) | (z != z) | (w != w);                                                \
            const A four = nans ? (A)NAN : (A)(first beats second ? first : second), t = total[i];                     \
            total[i] = (four beats t) | (four != four) ? four : t;                                                     \
        }                                                                                                              \
    }                                                                                                                  \
    SIMD static void name##_short(void *acc, const void *from, int64_t n, int64_t length, const void *shift) {         \
        const C *p = from;                                                                                             \
        A *total = acc;                                                                                                \
        (void)shift;                                                                                                   \
        PRAGMA(omp simd)                                                                                               \
        for (int64_t i = 0; i < n; i++) {                                                                              \
            A t = total[i];                                                                                            \
            for (int64_t k = 0; k < length; k++) {                                                                     \
                const A x = (A)p[i * length + k];                                                                      \
                t = x beats t || x != x ? x : t;                                                                       \
            }                                                                                                          \
            total[i] = t;                                                                                              \
        }                                                                                                              \
    }

/* Sums have error enough to spare for float in a tile; squares and products need the range of double. */
#define FOLD_FLOATS(name, L, op, unit, SHIFT_OR_NOT, step)                                                             \
    FOLD(name##_f32, float, L, double, op, unit, SHIFT_OR_NOT, step)                                                   \
    FOLD(name##_f64, double, double, double, op, unit, SHIFT_OR_NOT, step)
/* Integers wrap around as they do in PyTorch: their sums are made of unsigned numbers, where that is defined. */
#define FOLD_NUMBERS(name, L, op, unit, step)                                                                          \
    FOLD_FLOATS(name, L, op, unit, NO_SHIFT, step)                                                                     \
    FOLD(name##_i64, int64_t, uint64_t, uint64_t, op, unit, NO_SHIFT, step)

/* clang-format off */
FOLD_NUMBERS(sum,         float,  +, 0, t + x)
FOLD_NUMBERS(square,      double, +, 0, t + x * x)
FOLD_NUMBERS(prod,        double, *, 1, t * x)
FOLD_FLOATS(count_equal,  double, +, 0, SHIFT, t + (x == s ? 1 : 0))
FOLD_FLOATS(prod_nonzero, double, *, 1, NO_SHIFT, t * (x == 0 ? 1 : x))
FOLD(l1_f32,      float,   float,    double,   +, 0, NO_SHIFT, t + (x < 0 ? -x : x))
FOLD(l1_f64,      double,  double,   double,   +, 0, NO_SHIFT, t + (x < 0 ? -x : x))
FOLD(l1_i64,      int64_t, uint64_t, uint64_t, +, 0, NO_SHIFT, t + ((int64_t)x < 0 ? -x : x))
FOLD(sum_exp_f32, float,   double,   double,   +, 0, SHIFT, t + v_exp((float)(x - s)))
FOLD(sum_exp_f64, double,  double,   double,   +, 0, SHIFT, t + v_exp(x - s))
FOLD_EXTREME(max_f32, float,   int32_t, double,  max, >)
FOLD_EXTREME(max_f64, double,  int64_t, double,  max, >)
FOLD_EXTREME(max_i64, int64_t, int64_t, int64_t, max, >)
FOLD_EXTREME(min_f32, float,   int32_t, double,  min, <)
FOLD_EXTREME(min_f64, double,  int64_t, double,  min, <)
FOLD_EXTREME(min_i64, int64_t, int64_t, int64_t, min, <)
/* clang-format on */

#define FORMS_FLOAT(name, form) [FOLD_F32] = name##_f32_##form, [FOLD_F64] = name##_f64_##form
#define FORMS(name, form) {FORMS_FLOAT(name, form), [FOLD_I64] = name##_i64_##form}
#define NUMBER_FOLD(name)                                                                                              \
    .rows = FORMS(name, rows), .columns = FORMS(name, columns), .lines = FORMS(name, lines),                           \
    .short_rows = FORMS(name, short)
#define FLOAT_FOLD(name)                                                                                               \
    .rows = {FORMS_FLOAT(name, rows)}, .columns = {FORMS_FLOAT(name, columns)}, .lines = {FORMS_FLOAT(name, lines)},   \
    .short_rows = {FORMS_FLOAT(name, short)}

const fold fold_sum = {NUMBER_FOLD(sum), .start = 0, .start_int = 0};
const fold fold_square = {NUMBER_FOLD(square), .start = 0, .start_int = 0};
const fold fold_l1 = {NUMBER_FOLD(l1), .start = 0, .start_int = 0};
const fold fold_prod = {NUMBER_FOLD(prod), .start = 1, .start_int = 1};
const fold fold_count_equal = {FLOAT_FOLD(count_equal), .start = 0};
const fold fold_prod_nonzero = {FLOAT_FOLD(prod_nonzero), .start = 1};
const fold fold_sum_exp = {FLOAT_FOLD(sum_exp), .start = 0};
const fold fold_max = {NUMBER_FOLD(max), .start = -INFINITY, .start_int = INT64_MIN};
const fold fold_min = {NUMBER_FOLD(min), .start = INFINITY, .start_int = INT64_MAX};

/* --- narrow types ------------------------------------------------------------------------------------------------- */

typedef void convert_fn(void *to, const void *from, int64_t n);

#define CONVERT(name, From, To, expr)                                                                                  \
    SIMD static void name(void *to, const void *from, int64_t n) {                                                     \
        const From *p = from;                                                                                          \
        To *q = to;                                                                                                    \
        for (int64_t i = 0; i < n; i++) q[i] = (To)(expr);                                                             \
    }
CONVERT(widen_bf16, bf16, float, bf16_to_f32(p[i]))
CONVERT(widen_i32, int32_t, int64_t, p[i])
CONVERT(widen_i16, int16_t, int64_t, p[i])
CONVERT(widen_i8, int8_t, int64_t, p[i])
CONVERT(widen_u8, uint8_t, int64_t, p[i])
CONVERT(narrow_f32, double, float, p[i])
CONVERT(narrow_f64, double, double, p[i])
CONVERT(narrow_bf16, double, bf16, f32_to_bf16((float)p[i]))
CONVERT(narrow_f16, double, f16, (float)p[i])
CONVERT(narrow_i64, int64_t, int64_t, p[i])
CONVERT(narrow_i32, int64_t, int32_t, p[i])
CONVERT(narrow_i16, int64_t, int16_t, p[i])
CONVERT(narrow_i8, int64_t, int8_t, p[i])
CONVERT(narrow_u8, int64_t, uint8_t, p[i])
static void widen_f16(void *to, const void *from, int64_t n) { f16_widen(from, n, to); }

static const struct {
    fold_class as;
    convert_fn *widen;  /* elements to their class; NULL: they are of it */
    convert_fn *narrow; /* totals to elements */
} conversions[DTYPE_COUNT] = {
    [F32] = {FOLD_F32, NULL, narrow_f32},         [F64] = {FOLD_F64, NULL, narrow_f64},
    [BF16] = {FOLD_F32, widen_bf16, narrow_bf16}, [F16] = {FOLD_F32, widen_f16, narrow_f16},
    [I64] = {FOLD_I64, NULL, narrow_i64},         [I32] = {FOLD_I64, widen_i32, narrow_i32},
    [I16] = {FOLD_I64, widen_i16, narrow_i16},    [I8] = {FOLD_I64, widen_i8, narrow_i8},
    [U8] = {FOLD_I64, widen_u8, narrow_u8},       [BOOL] = {FOLD_I64, widen_u8, narrow_u8},
};

fold_class fold_class_of(dtype t) { return conversions[t].as; }
bool fold_is_stored(dtype t) { return !conversions[t].widen; }

void fold_store(dtype t, void *to, int64_t at, const void *totals, int64_t n) {
    conversions[t].narrow((char *)to + at * (int64_t)dtype_size(t), totals, n);
}

const void *fold_load(dtype t, const void *x, int64_t at, int64_t n, void *buffer) {
    const void *from = (const char *)x + at * (int64_t)dtype_size(t);
    if (!conversions[t].widen) return from;
    prefetch_ahead(from, n * (int64_t)dtype_size(t));
    conversions[t].widen(buffer, from, n);
    return buffer;
}
