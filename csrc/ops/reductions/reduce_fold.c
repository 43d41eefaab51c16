/* reduce_fold.c -- folds tiles for reduce_kernel.h: what becomes of a tile of elements, in each class. */
#include "core/half.h"
#include "core/parallel.h"
#include "core/prefetch.h"
#include "core/vmath.h"
#include "ops/reductions/reduce_kernel.h"

/* --- folds -------------------------------------------------------------------------------------------------------- */

/* clang-format off */
#define SIGNED(x) _Generic((x), uint64_t: (int64_t)(x), default: (x)) /* integers are folded as unsigned ones */

/* Sums have error enough to spare for float in a tile; squares and products need the range of double. */
#define OP +
#define UNIT 0
#define SHIFTED 0
#define FOLDS_INTEGERS 1

#define FOLD sum
#define STEP t + x
#define TILE float
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#define FOLD l1
#define STEP t + (SIGNED(x) < 0 ? -x : x)
#define TILE float
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#define FOLD square
#define STEP t + x * x
#define TILE double
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#undef SHIFTED
#undef FOLDS_INTEGERS

#define SHIFTED 1
#define FOLDS_INTEGERS 0

#define FOLD count_equal
#define STEP t + (x == s ? 1 : 0)
#define TILE double
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#define FOLD sum_exp
#define STEP t + v_exp((C)(x - s))
#define TILE double
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#undef SHIFTED
#undef FOLDS_INTEGERS
#undef OP
#undef UNIT

#define OP *
#define UNIT 1
#define SHIFTED 0
#define FOLDS_INTEGERS 1

#define FOLD prod
#define STEP t * x
#define TILE double
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#undef FOLDS_INTEGERS
#define FOLDS_INTEGERS 0

#define FOLD prod_nonzero
#define STEP t * (x == 0 ? 1 : x)
#define TILE double
#define TEMPLATE "ops/reductions/fold_forms.h"
#include "ops/reductions/each_fold_class.h"

#undef FOLDS_INTEGERS
#undef SHIFTED
#undef OP
#undef UNIT

#define FOLDS_INTEGERS 1

#define FOLD max
#define BEATS >
#define TEMPLATE "ops/reductions/fold_extreme.h"
#include "ops/reductions/each_fold_class.h"
#undef BEATS

#define FOLD min
#define BEATS <
#define TEMPLATE "ops/reductions/fold_extreme.h"
#include "ops/reductions/each_fold_class.h"
#undef BEATS
#undef FOLDS_INTEGERS
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
