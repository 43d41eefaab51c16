/* float_and_double.h -- includes the file TEMPLATE once for double and once for float, then forgets TEMPLATE.
 *
 * T is the type, NAME(f) is f_double or f_float; what is for float may use what is for double. For 16-bit floats, too:
 * each_float.h. */

#include "core/names.h"

#define NAME(f) JOIN_NAMES(f, T)

#define T double
#include TEMPLATE
#undef T

#define T float
#include TEMPLATE
#undef T

#undef NAME
#undef TEMPLATE
