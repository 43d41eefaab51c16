/* each_f32_f64.h -- includes the file TEMPLATE once for float32 and once for float64; then forgets TEMPLATE.
 *
 * For kernels to which 16-bit floats come as float32 (lower_to_f32). T is an element, and what is computed with; NAME(f)
 * is f_f32 or f_f64; EXP and TANH are those of T. */
#define JOIN_NAMES(f, suffix) f##_##suffix

#define T float
#define NAME(f) JOIN_NAMES(f, f32)
#define EXP expf
#define TANH tanhf
#include TEMPLATE
#undef T
#undef NAME
#undef EXP
#undef TANH

#define T double
#define NAME(f) JOIN_NAMES(f, f64)
#define EXP exp
#define TANH tanh
#include TEMPLATE
#undef T
#undef NAME
#undef EXP
#undef TANH

#undef TEMPLATE
#undef JOIN_NAMES
