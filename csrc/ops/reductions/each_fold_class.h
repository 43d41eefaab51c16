/* each_fold_class.h -- includes the file TEMPLATE once for each class that elements are folded in, then forgets TEMPLATE.
 *
 * C is an element, N an integer as wide; A is a total, U an A whose overflow is defined: integers wrap around as they do
 * in PyTorch. L is what a tile of a row is folded in before it joins the total: TILE where elements are float. NAME(form)
 * is FOLD_f32_form, FOLD_f64_form, and with FOLDS_INTEGERS FOLD_i64_form. FOLD, TILE and STEP are forgotten, too. */

#include "core/names.h"

#define C float
#define N int32_t
#define A double
#define U double
#define L TILE
#define NAME(form) JOIN_NAMES(JOIN_NAMES(FOLD, f32), form)
#include TEMPLATE
#undef C
#undef N
#undef L
#undef NAME

#define C double
#define N int64_t
#define L double
#define NAME(form) JOIN_NAMES(JOIN_NAMES(FOLD, f64), form)
#include TEMPLATE
#undef C
#undef N
#undef A
#undef U
#undef L
#undef NAME

#if FOLDS_INTEGERS
#define C int64_t
#define N int64_t
#define A int64_t
#define U uint64_t
#define L uint64_t
#define NAME(form) JOIN_NAMES(JOIN_NAMES(FOLD, i64), form)
#include TEMPLATE
#undef C
#undef N
#undef A
#undef U
#undef L
#undef NAME
#endif

#undef TEMPLATE
#undef FOLD
#undef TILE
#undef STEP
