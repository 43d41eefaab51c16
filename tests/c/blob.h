/* blob.h -- writes protobuf bytes by hand, so that tests can say what no library would write. */
#ifndef ORT_TEST_BLOB_H
#define ORT_TEST_BLOB_H

#include <stddef.h>
#include <stdint.h>

typedef struct blob {
    unsigned char *at;
    size_t n, room;
} blob;

void blob_free(blob *b);
void put_raw(blob *b, const void *bytes, size_t n);
void put_varint(blob *b, uint64_t x);
/* Fields: a number, bytes, text, and a message, which is freed. */
void put_int(blob *b, int field, int64_t x);
void put_bytes(blob *b, int field, const void *bytes, size_t n);
void put_text(blob *b, int field, const char *text);
void put_message(blob *b, int field, blob *message);

/* --- an ONNX model -------------------------------------------------------------------------------------------------- */

/* A graph under construction. Lists of names are written "a b c"; "-" is an absent one. */
typedef struct model {
    blob graph;
    int opset;
} model;

void add_input(model *m, const char *name);
void add_output(model *m, const char *name);
/* Attributes are put into the returned node, before the next one is begun. */
blob begin_node(const char *op, const char *in, const char *out);
void end_node(model *m, blob *node);
void add_node(model *m, const char *op, const char *in, const char *out);
void put_attr_int(blob *node, const char *name, int64_t x);
/* A TensorProto of one dimension, without data. */
blob begin_tensor(const char *name, int type, int64_t count);
void add_initializer(model *m, blob *tensor);
/* The whole file; the model is freed. */
blob finish(model *m);

/* Field numbers. */
enum { MODEL_IR = 1, MODEL_GRAPH = 7, MODEL_OPSET = 8, MODEL_FUNCTIONS = 25 };
enum { GRAPH_NODE = 1, GRAPH_INITIALIZER = 5, GRAPH_INPUT = 11, GRAPH_OUTPUT = 12 };
enum { NODE_INPUT = 1, NODE_OUTPUT, NODE_NAME, NODE_OP, NODE_ATTRIBUTE, NODE_DOMAIN = 7 };
enum { ATTRIBUTE_NAME = 1, ATTRIBUTE_F, ATTRIBUTE_I, ATTRIBUTE_S, ATTRIBUTE_T, ATTRIBUTE_G, ATTRIBUTE_TYPE = 20 };
enum { TENSOR_DIMS = 1, TENSOR_TYPE, TENSOR_NAME = 8, TENSOR_RAW, TENSOR_LOCATION = 14 };
enum { TENSOR_FLOATS = 4, TENSOR_INT32S, TENSOR_INT64S = 7, TENSOR_DOUBLES = 10 };

#endif
