/* norm.h -- declares what norms of rows share. */
#ifndef ORT_OPS_NORM_H
#define ORT_OPS_NORM_H

#include "ops/op.h"

/* What rows of a type are computed in, and scaled with. */
static inline dtype norm_computed_in(dtype t) { return t == F64 ? F64 : F32; }
/* `t` in that type: itself, or a copy in `buffer`; NULL where it is absent. */
const void *norm_as_computed(const tensor *t, dtype type, void *buffer);

#endif
