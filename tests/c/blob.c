/* blob.c -- writes protobuf bytes by hand. */
#include "blob.h"

#include <stdlib.h>
#include <string.h>

void blob_free(blob *b) {
    free(b->at);
    *b = (blob){0};
}

void put_raw(blob *b, const void *bytes, size_t n) {
    if (b->n + n > b->room) {
        b->room = (b->n + n) * 2;
        b->at = realloc(b->at, b->room);
    }
    if (n) memcpy(b->at + b->n, bytes, n);
    b->n += n;
}

void put_varint(blob *b, uint64_t x) {
    unsigned char bytes[10];
    size_t n = 0;
    for (; x >= 0x80; x >>= 7) bytes[n++] = (unsigned char)(x | 0x80);
    bytes[n++] = (unsigned char)x;
    put_raw(b, bytes, n);
}

void put_int(blob *b, int field, int64_t x) {
    put_varint(b, (uint64_t)field << 3);
    put_varint(b, (uint64_t)x);
}

void put_bytes(blob *b, int field, const void *bytes, size_t n) {
    put_varint(b, (uint64_t)field << 3 | 2);
    put_varint(b, n);
    put_raw(b, bytes, n);
}

void put_text(blob *b, int field, const char *text) { put_bytes(b, field, text, strlen(text)); }

void put_message(blob *b, int field, blob *message) {
    put_bytes(b, field, message->at, message->n);
    blob_free(message);
}

/* --- an ONNX model -------------------------------------------------------------------------------------------------- */

static void add_info(model *m, int field, const char *name) {
    blob info = {0};
    put_text(&info, 1, name);
    put_message(&m->graph, field, &info);
}

void add_input(model *m, const char *name) { add_info(m, GRAPH_INPUT, name); }
void add_output(model *m, const char *name) { add_info(m, GRAPH_OUTPUT, name); }

static void put_names(blob *node, int field, const char *list) {
    while (*list) {
        size_t n = strcspn(list, " ");
        if (n == 1 && *list == '-') put_text(node, field, "");
        else put_bytes(node, field, list, n);
        list += n;
        list += strspn(list, " ");
    }
}

blob begin_node(const char *op, const char *in, const char *out) {
    blob node = {0};
    put_names(&node, NODE_INPUT, in);
    put_names(&node, NODE_OUTPUT, out);
    put_text(&node, NODE_OP, op);
    return node;
}

void end_node(model *m, blob *node) { put_message(&m->graph, GRAPH_NODE, node); }

void add_node(model *m, const char *op, const char *in, const char *out) {
    blob node = begin_node(op, in, out);
    end_node(m, &node);
}

void put_attr_int(blob *node, const char *name, int64_t x) {
    blob a = {0};
    put_text(&a, ATTRIBUTE_NAME, name);
    put_int(&a, ATTRIBUTE_I, x);
    put_int(&a, ATTRIBUTE_TYPE, 2);
    put_message(node, NODE_ATTRIBUTE, &a);
}

blob begin_tensor(const char *name, int type, int64_t count) {
    blob t = {0};
    put_int(&t, TENSOR_DIMS, count);
    put_int(&t, TENSOR_TYPE, type);
    put_text(&t, TENSOR_NAME, name);
    return t;
}

void add_initializer(model *m, blob *tensor) { put_message(&m->graph, GRAPH_INITIALIZER, tensor); }

blob finish(model *m) {
    blob file = {0}, opset = {0};
    put_int(&file, MODEL_IR, 8);
    put_message(&file, MODEL_GRAPH, &m->graph);
    put_int(&opset, 2, m->opset);
    put_message(&file, MODEL_OPSET, &opset);
    return file;
}
