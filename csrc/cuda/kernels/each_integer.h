/* each_integer.h -- includes the file TEMPLATE once for each integer type; then forgets TEMPLATE.
 *
 * T is an element in memory, A what is computed with, GET and PUT go from T to A and back, NAME(f) is f_i64 to f_u8. */
#define JOIN_NAMES(f, suffix) f##_##suffix

#define A int64_t
#define GET(x) (x)
#define PUT(x) ((T)(x))

#define T int64_t
#define NAME(f) JOIN_NAMES(f, i64)
#include TEMPLATE
#undef T
#undef NAME

#define T int32_t
#define NAME(f) JOIN_NAMES(f, i32)
#include TEMPLATE
#undef T
#undef NAME

#define T int16_t
#define NAME(f) JOIN_NAMES(f, i16)
#include TEMPLATE
#undef T
#undef NAME

#define T int8_t
#define NAME(f) JOIN_NAMES(f, i8)
#include TEMPLATE
#undef T
#undef NAME

#define T uint8_t
#define NAME(f) JOIN_NAMES(f, u8)
#include TEMPLATE
#undef T
#undef NAME

#undef A
#undef GET
#undef PUT
#undef TEMPLATE
#undef JOIN_NAMES
