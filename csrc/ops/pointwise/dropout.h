/* dropout.h -- says what a dropout does to elements, for the operators that have one in them. */
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
/* y[i] from x[i], i in [0, n), which are elements `position` and up of a tensor; y may be x. With the bits of
 * DropoutTrain. */
void dropout_part(const dropout_run *d, const void *x, void *y, int64_t position, int64_t n);

/* Of SoftmaxDropout and MaskedSoftmaxDropout (ops/reductions/softmax.c). */
status infer_softmax_dropout(graph *g, node *n);
status grad_softmax_dropout(graph *g, const node *n, value *const dy[], value *dx[]);

#endif
