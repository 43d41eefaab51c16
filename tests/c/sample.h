/* sample.h -- makes models for tests of reading and writing. */
#ifndef ORT_TEST_SAMPLE_H
#define ORT_TEST_SAMPLE_H

#include "blob.h"
#include "test.h"

#include "graph/graph.h"

/* Initializes `c` and reads. */
status read_blob(ctx *c, const blob *b, graph **g);

/* Reads a file that must fail so; frees it. */
#define REFUSED(code, sentence, file)                                                                                  \
    do {                                                                                                               \
        blob file_ = (file);                                                                                           \
        ctx c_;                                                                                                        \
        graph *g_;                                                                                                     \
        CHECK_FAILS(&c_, code, sentence, read_blob(&c_, &file_, &g_));                                                 \
        ctx_release(&c_);                                                                                              \
        blob_free(&file_);                                                                                             \
    } while (0)

model new_model(void);
/* One node, x -> y, to which a test adds what is wrong. */
model tiny_model(void);

node *add(graph *g, const char *op, const char *name, const attr *attrs, int n_in, value *const *in, int n_out);

#define ADD(g, op, attrs, n_out, ...)                                                                                  \
    add((g), (op), op "_node", (attrs), (int)(sizeof((value *[]){__VA_ARGS__}) / sizeof(value *)),                     \
        (value *[]){__VA_ARGS__}, (n_out))

/* Every kind of attribute, absent operands and results, constants of every type, an input that is an output. */
graph *make_sample(ctx *c);
blob make_sample_file(void);

#endif
