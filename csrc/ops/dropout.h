/* dropout.h -- what a dropout does to elements, for the operators that have one in them. */
#ifndef ORT_OPS_DROPOUT_H
#define ORT_OPS_DROPOUT_H

#include "core/philox.h"
#include "ops/op.h"

#include <stdint.h>

/* What a run of a node with "ratio" and "key" does to an element, which its place in the tensor decides. */
typedef struct dropout_run {
    double factor;
    uint64_t seed;
    uint32_t key, threshold;
    dtype type;
} dropout_run;

dropout_run dropout_of(const call *k);
/* y[i] of a tensor from x[i], i in [from, to); y may be x. With the bits of DropoutTrain. */
void dropout_part(const dropout_run *d, const void *x, void *y, int64_t from, int64_t to);

/* Of SoftmaxDropout and MaskedSoftmaxDropout (ops/softmax.c). */
status infer_softmax_dropout(graph *g, node *n);
status grad_softmax_dropout(graph *g, const node *n, value *const dy[], value *dx[]);

#endif
