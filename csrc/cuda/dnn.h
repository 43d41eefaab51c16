/* dnn.h -- convolutions by cuDNN, as torch has loaded it: found at run time like the driver. */
#ifndef ORT_CUDA_DNN_H
#define ORT_CUDA_DNN_H

#include "cuda/driver.h"
#include "ops/conv.h"

/* Starts one product of a convolution; its operands are in the order of the record (ops/conv.c). `add`: to what the
 * result holds. *done is false, and nothing was started, where the library does not take it: padding that is not the same
 * on both sides, or nothing that gives the same bits every time. E_RUNTIME without the library. The workspace is the
 * call's, of dnn_workspace bytes. */
MUST_USE status dnn_convolution(ctx *c, const call *k, const conv *v, conv_product which, bool add, bool *done);

size_t dnn_workspace(const conv *v);

#endif
