/* names.h -- names of what a file defines that is included once for each type. */
#ifndef ORT_CORE_NAMES_H
#define ORT_CORE_NAMES_H

/* f_suffix, after macros in both: JOIN_NAMES(sum, T) is sum_float where T is float. */
#define JOIN_NAMES(f, suffix) JOIN_TOKENS(f, suffix)
#define JOIN_TOKENS(f, suffix) f##_##suffix

#endif
