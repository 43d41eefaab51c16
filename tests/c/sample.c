/* sample.c -- makes models for tests of reading and writing. */
#include "sample.h"

#include "onnx/read.h"
#include "onnx/write.h"
#include "ops/op.h"

status read_blob(ctx *c, const blob *b, graph **g) {
    /* A copy of exactly these bytes: reading past them is found by the sanitizer. */
    unsigned char *copy = malloc(b->n ? b->n : 1);
    status s;

    if (b->n) memcpy(copy, b->at, b->n);
    ctx_init(c);
    s = onnx_read(c, copy, b->n, g);
    free(copy);
    return s;
}

model new_model(void) { return (model){.opset = 18}; }

model tiny_model(void) {
    model m = new_model();
    add_input(&m, "x");
    add_node(&m, "Relu", "x", "y");
    add_output(&m, "y");
    return m;
}

node *add(graph *g, const char *op, const char *name, const attr *attrs, int n_in, value *const *in, int n_out) {
    node *n = NULL;
    CHECK_OK(g->c, graph_add_node(g, op_find("", op, 18), name, attrs, n_in, in, n_out, &n));
    return n;
}

graph *make_sample(ctx *c) {
    static const int64_t perm[] = {1, 0};
    static float fill = 2.5f;
    static tensor filling = {.data = &fill, .type = F32, .shape = {1, {1}}, .stride = {1}};
    value *x, *w, *undeclared, *sizes, *limit, *k;
    node *n;
    graph *g;

    CHECK_OK(c, graph_new(c, &g));
    g->opset = 18;
    CHECK_OK(c, graph_add_input(g, "x", F32, &SHAPE(-1, 4), &x));
    CHECK_OK(c, graph_add_input(g, "layer.weight", BF16, &SHAPE(4, 5), &w));
    CHECK_OK(c, graph_add_input(g, "undeclared", DT_NONE, &(shape){.rank = -1}, &undeclared));
    CHECK_OK(c, graph_ints(g, 2, (int64_t[]){3, 5}, &sizes));
    CHECK_OK(c, graph_scalar(g, F32, 6, &limit));

    n = ADD(g, "Cast", NODE_ATTRS(INT("to", dtype_table[F32].onnx)), 1, w);
    n = ADD(g, "Gemm", NODE_ATTRS(FLOAT("alpha", 0.5), INT("transB", 0)), 1, x, n->out[0]);
    n = ADD(g, "Clip", NULL, 1, n->out[0], NULL, limit);
    n = ADD(g, "Transpose", NODE_ATTRS(INTS("perm", 2, perm)), 1, n->out[0]);
    n->out[0]->name = "transposed";
    n = ADD(g, "Pad", NODE_ATTRS(STRING("mode", "constant")), 1, n->out[0], undeclared);
    n = ADD(g, "Split", NODE_ATTRS(INT("axis", -1)), 3, n->out[0]);
    n->out[1] = NULL;
    k = n->out[2];
    CHECK_OK(c, graph_add_output(g, n->out[0]));
    n = ADD(g, "ConstantOfShape", NODE_ATTRS(TENSOR("value", &filling)), 1, sizes);
    n = ADD(g, "Add", NULL, 1, n->out[0], k);
    CHECK_OK(c, graph_add_output(g, n->out[0]));
    CHECK_OK(c, graph_add_output(g, x));
    for (dtype t = F32; t < DTYPE_COUNT; t++) {
        unsigned char bytes[24] = {0};
        for (int i = 0; i < 3; i++) dtype_set_value(t, bytes, i, i - 1);
        CHECK_OK(c, graph_add_constant(g, t, &SHAPE(3, 1), bytes, &k));
        CHECK_OK(c, graph_add_output(g, k));
        CHECK_OK(c, graph_add_constant(g, t, &SHAPE(2, 0), NULL, &k));
        CHECK_OK(c, graph_add_output(g, k));
    }
    CHECK_OK(c, graph_verify(g));
    return g;
}

blob make_sample_file(void) {
    blob file = {0};
    const void *bytes = NULL;
    size_t n = 0;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, onnx_write(&c, make_sample(&c), &bytes, &n));
    put_raw(&file, bytes, n);
    ctx_release(&c);
    return file;
}
