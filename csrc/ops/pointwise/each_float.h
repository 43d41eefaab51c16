/* each_float.h -- includes the file TEMPLATE once for each float type, then forgets TEMPLATE.
 *
 * A template is written for any of them: T is an element in memory, A what is computed with (float for the 16-bit
 * types), DIGITS the bits of T's mantissa, GET and PUT go from T to A and back (PUT_FINITE: what is not NaN), EACH_OF
 * takes elements in an order that suits T (ops/reductions/lanes.h), NAME(f) is f_f32, f_f64, f_bf16 or f_f16. FLOAT_TABLE(f), for
 * afterwards, is the four functions by dtype. */

#include "core/names.h"
#include "ops/reductions/lanes.h"

#define FLOAT_TABLE(f) {[F32] = f##_f32, [F64] = f##_f64, [BF16] = f##_bf16, [F16] = f##_f16}

#define T float
#define A float
#define DIGITS 24
#define NAME(f) JOIN_NAMES(f, f32)
#define GET(x) (x)
#define PUT(x) (x)
#define PUT_FINITE(x) (x)
#define EACH_OF IN_ORDER
#include TEMPLATE
#undef T
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE
#undef EACH_OF

#define T bf16
#define DIGITS 8
#define NAME(f) JOIN_NAMES(f, bf16)
#define GET(x) bf16_to_f32(x)
#define PUT(x) f32_to_bf16(x)
#define PUT_FINITE(x) f32_to_bf16_finite(x)
#define EACH_OF IN_PAIRS
#include TEMPLATE
#undef T
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE
#undef EACH_OF

#define T f16
#define DIGITS 11
#define NAME(f) JOIN_NAMES(f, f16)
#define GET(x) ((float)(x))
#define PUT(x) ((f16)(x))
#define PUT_FINITE(x) PUT(x)
#define EACH_OF IN_ORDER
#include TEMPLATE
#undef T
#undef A
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE
#undef EACH_OF

#define T double
#define A double
#define DIGITS 53
#define NAME(f) JOIN_NAMES(f, f64)
#define GET(x) (x)
#define PUT(x) (x)
#define PUT_FINITE(x) (x)
#define EACH_OF IN_ORDER
#include TEMPLATE
#undef T
#undef A
#undef DIGITS
#undef NAME
#undef GET
#undef PUT
#undef PUT_FINITE
#undef EACH_OF

#undef TEMPLATE
