/* tensor.h -- turns a TensorProto into our tensor, and back. */
#ifndef ORT_ONNX_TENSOR_H
#define ORT_ONNX_TENSOR_H

#include "core/shape.h"

#include "onnx-ml.pb-c.h"

/* An initializer without data stands for an input. */
bool onnx_tensor_has_data(const Onnx__TensorProto *p);
/* Element type and shape; afterwards the data is known to be there, whole, and of that size. */
MUST_USE status onnx_tensor_check(ctx *c, const Onnx__TensorProto *p, dtype *type, shape *s);
/* The elements of a checked tensor into `to`. */
void onnx_tensor_copy(const Onnx__TensorProto *p, dtype type, void *to);
/* A message over `data`, which must outlive it. */
MUST_USE status onnx_tensor_make(ctx *c, const char *name, dtype type, const shape *s, const void *data,
                                 Onnx__TensorProto **out);

#endif
