/* attention_mask.h -- says what a mask of attention hides: keys that data names, and what a plan knows. */
#ifndef ORT_PASSES_ATTENTION_MASK_H
#define ORT_PASSES_ATTENTION_MASK_H

#include "graph/graph.h"

/* A mask is `keys` and `rest`: `keys` is bool [B, 1, 1, K], the same for all heads and queries, and data; `rest` is a
 * mask too, or NULL: it hides nothing. */
typedef struct attention_mask {
    value *keys, *rest;
} attention_mask;

/* False: `allowed`, which is broadcast to [batch, heads, queries, keys], is of another form. */
bool attention_mask_split(value *allowed, int64_t batch, int64_t keys, attention_mask *out);
/* Does a query see the keys up to its own place: the same for all heads and sequences, by its elements or by how it is
 * made? */
bool attention_mask_causal(const value *allowed, int64_t length);
/* Does `allowed` hide just where x, or what has been added to make it, is -inf? */
bool attention_mask_finite(const value *allowed, const value *x);
/* Larger numbers are not added to scores exactly enough. */
enum { ATTENTION_FAR = 10000 };
/* Scores, or what is added to them, that hide nothing by themselves: made of products, parameters and numbers of which every
 * sum with scores, and its exponential, is exact enough in float32; not infinite, not the lowest of a type, not data. */
bool attention_is_moderate(const value *v, int64_t keys);
/* Moderate, and no input as large as it, as it is or in a sum, which may be -inf anywhere, though it has a gradient. */
bool attention_is_computed(const value *v);
/* Are both not 0 at the same places, in order of elements, by how they are made? */
bool attention_mask_same(const value *a, const value *b);
/* Are `rows`, a result of RowIndex, just those where `keys` is true? */
bool attention_mask_lists(const value *keys, const value *rows);

#endif
