/* index_formula.h -- integers and masks that are formulas of where an element stands, as arithmetic on positions makes them. */
#ifndef ORT_PASSES_INDEX_FORMULA_H
#define ORT_PASSES_INDEX_FORMULA_H

#include "graph/graph.h"

/* The element at [i0, i1, ...] is by[0] i0 + by[1] i1 + ... + plus; if it is bool, whether that is not above 0. A factor
 * of an axis of one element is 0; a mask that is the same everywhere has no factors, and 0 or 1 for `plus`. */
typedef struct index_formula {
    int64_t by[MAX_RANK], plus;
} index_formula;

/* By how `v` is made, or by its elements where it is a constant: no large one is needed for that. False: it is no such
 * formula, or none that is found. */
bool index_formula_of(const value *v, index_formula *out);

#endif
