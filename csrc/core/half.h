/* half.h -- turns many float16 numbers to float and back, by the CPU's own conversion where it has one.
 * Compilers do not use it for vectors. Rounded to nearest even; of a NaN it is only certain that it stays one. */
#ifndef ORT_CORE_HALF_H
#define ORT_CORE_HALF_H

#include <stdint.h>

/* `from` and `to` do not overlap. */
void f16_widen(const uint16_t *from, int64_t n, float *to);
void f16_narrow(const float *from, int64_t n, uint16_t *to);
/* What narrowing and widening leave of each. */
void f16_round(float *x, int64_t n);

#endif
