/* emit.h -- emits the usual nodes in a line each. Where a node would change nothing, *out is x itself. */
#ifndef ORT_GRAPH_EMIT_H
#define ORT_GRAPH_EMIT_H

#include "graph/graph.h"

/* A constant of shape `s` filled with `x`; small, or an emitted node when large. */
MUST_USE status graph_full(graph *g, dtype type, const shape *s, double x, value **out);
MUST_USE status zeros_like(graph *g, const value *v, value **out);
MUST_USE status emit_scaled(graph *g, value *x, double factor, value **out); /* x * factor in x's type */
MUST_USE status emit_cast(graph *g, value *x, dtype type, value **out);
MUST_USE status emit_reshape(graph *g, value *x, const shape *s, value **out);
MUST_USE status emit_transpose(graph *g, value *x, const int *perm, value **out);
/* x transposed as `n`, a Transpose, transposes its operand. */
MUST_USE status emit_transpose_like(graph *g, const node *n, value *x, value **out);
/* `x` broadcast to `s`. */
MUST_USE status emit_expand(graph *g, value *x, const shape *s, value **out);
MUST_USE status emit_reduce(graph *g, const char *op, value *x, int n_axes, const int64_t *axes, bool keep,
                            value **out);
/* `dy` reduced or reshaped to shape `s` by undoing NumPy broadcasting. */
MUST_USE status sum_to(graph *g, value *dy, const shape *s, value **out);

/* start, step: per axis of x; out[i] = x[start + i * step] with the shape `counts`. */
MUST_USE status emit_slice(graph *g, value *x, const int64_t *start, const shape *counts, const int64_t *step,
                           value **out);
/* x[start .. start + count) along one axis. */
MUST_USE status emit_slice_axis(graph *g, value *x, int axis, int64_t start, int64_t count, value **out);
/* emit_slice's inverse: `filler` (zeros when NULL) everywhere in `whole` but at start + i * step, where x is. */
MUST_USE status emit_place(graph *g, value *x, value *filler, const int64_t *start, const shape *whole,
                           const int64_t *step, value **out);

#endif
