/* each_combined.h -- includes the file TEMPLATE once for each type that combining.h is for, then forgets TEMPLATE.
 *
 * T is an element in memory, A what it is combined as, U an A whose overflow is defined; GET and PUT go from T to A and
 * back. 16-bit floats are combined in float, integers as int64_t. NAME(f) is f_float, f_int64_t ...: COMBINED_TABLE(f). */

#include "core/names.h"

#define NAME(f) JOIN_NAMES(f, T)

#define A float
#define U float
#define GET(x) bf16_to_f32(x)
#define PUT(x) f32_to_bf16(x)
#define T bf16
#include TEMPLATE
#undef T
#undef GET
#undef PUT

#define GET(x) (x)
#define PUT(x) ((T)(x))
#define T f16
#include TEMPLATE
#undef T
#define T float
#include TEMPLATE
#undef T
#undef A
#undef U

#define A double
#define U double
#define T double
#include TEMPLATE
#undef T
#undef A
#undef U

#define A int64_t
#define U uint64_t
#define T int64_t
#include TEMPLATE
#undef T
#define T int32_t
#include TEMPLATE
#undef T
#define T int16_t
#include TEMPLATE
#undef T
#define T int8_t
#include TEMPLATE
#undef T
#define T uint8_t
#include TEMPLATE
#undef T
#undef A
#undef U
#undef GET
#undef PUT

#undef NAME
#undef TEMPLATE
