/* lookup.h -- looks functions of one bfloat16 up: there are 65,536 operands, so a large tensor is computed by its
 * operator's own tile function for each of them once, and looked up. The bits are those of computing every element. */
#ifndef ORT_OPS_LOOKUP_H
#define ORT_OPS_LOOKUP_H

#include "ops/pointwise/tile.h"

typedef enum lookup_kind {
    NO_LOOKUP,
    LOOKUP_VALUE, /* f(x), rounded */
    LOOKUP_SLOPE, /* s(y) of a gradient f(x, y) = s(y) x, not rounded */
} lookup_kind;

/* Floats of a table, indexed by the operand's bits; fewer elements than LEAST are not worth one. */
enum { LOOKUP_VALUES = 1 << 16, LOOKUP_BYTES = 4 * LOOKUP_VALUES, LOOKUP_LEAST = 1 << 18 };

/* For an operator whose last operand and result have these types. */
lookup_kind lookup_of(const op_def *op, dtype last_operand, dtype output);
/* Fills table[LOOKUP_VALUES]. */
void lookup_make(lookup_kind kind, tile_fn *fn, const double *param, float *table);

/* n elements of a tile that hold bfloat16 values: out[i] = table[y[i]] (x NULL) or table[y[i]] * x[i]. out may equal x or
 * y. Unrounded where there is an x. */
void lookup_tile(const float *table, int64_t n, const float *x, const float *y, float *out);
/* The same from memory to memory, rounded. */
void lookup_elements(const float *table, int64_t n, const bf16 *x, const bf16 *y, bf16 *out);

#endif
