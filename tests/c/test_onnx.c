/* test_onnx.c -- tests reading and writing ONNX: what is read is what was written, and what is wrong gets a sentence.
 * */
#define _GNU_SOURCE /* memmem */
#include "sample.h"

#include "onnx/read.h"
#include "onnx/write.h"
#include "ops/op.h"

/* --- what is written is read ---------------------------------------------------------------------------------------- */

static void check_same_value(const value *a, const value *b) {
    if (!CHECK(!a == !b) || !a) return;
    CHECK(a->type == b->type && shape_equal(&a->shape, &b->shape) && a->input == b->input && !a->data == !b->data);
    CHECK(!a->name || strcmp(a->name, b->name) == 0);
    if (a->data) CHECK(memcmp(a->data, b->data, (size_t)shape_count(&a->shape) * dtype_size(a->type)) == 0);
}

static void check_same_node(const node *a, const node *b) {
    const attr *p = a->attrs, *q = b->attrs;

    CHECK(a->op == b->op && strcmp(a->name, b->name) == 0);
    if (CHECK(a->n_in == b->n_in))
        for (int i = 0; i < a->n_in; i++) check_same_value(a->in[i], b->in[i]);
    if (CHECK(a->n_out == b->n_out))
        for (int i = 0; i < a->n_out; i++) CHECK(!a->out[i] == !b->out[i]);
    for (; p && p->name; p++, q++) {
        if (!CHECK(q && q->name && strcmp(p->name, q->name) == 0 && p->kind == q->kind)) return;
        CHECK(p->i == q->i && p->f == q->f && p->count == q->count && !p->s == !q->s && !p->t == !q->t);
        if (p->s) CHECK(strcmp(p->s, q->s) == 0);
        if (p->count) CHECK(memcmp(p->ints, q->ints, (size_t)p->count * sizeof *p->ints) == 0);
        if (p->t) CHECK(p->t->type == q->t->type && *(float *)p->t->data == *(float *)q->t->data);
    }
    CHECK(!q || !q->name);
}

TEST(a_written_graph_is_read_back) {
    const void *bytes, *again;
    size_t n, n_again;
    graph *g, *h = NULL;
    ctx c;

    ctx_init(&c);
    g = make_sample(&c);
    CHECK_OK(&c, onnx_write(&c, g, &bytes, &n));
    if (CHECK_OK(&c, onnx_read(&c, bytes, n, &h))) {
        const node *a = g->first, *b = h->first;
        CHECK_OK(&c, graph_verify(h));
        CHECK(!h->specialised && h->opset == 18 && g->n_inputs == h->n_inputs && g->n_outputs == h->n_outputs);
        for (; a && b; a = a->next, b = b->next) check_same_node(a, b);
        CHECK(!a && !b);
        for (int i = 0; i < g->n_inputs; i++) check_same_value(g->inputs[i], h->inputs[i]);
        for (int i = 0; i < g->n_outputs; i++) check_same_value(g->outputs[i], h->outputs[i]);
        CHECK_OK(&c, onnx_write(&c, h, &again, &n_again));
        CHECK(n == n_again && memcmp(bytes, again, n) == 0);
    }
    ctx_release(&c);
}

TEST(names_that_clash_are_made_unique) {
    const void *bytes;
    size_t n;
    graph *g, *h;
    value *a, *b, *y;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, graph_new(&c, &g));
    CHECK_OK(&c, graph_add_input(g, "a", F32, &SHAPE(1), &a));
    CHECK_OK(&c, graph_add_input(g, "a", F32, &SHAPE(1), &b));
    CHECK_OK(&c, graph_add_input(g, "a_1", F32, &SHAPE(1), &y));
    CHECK_OK(&c, graph_add_input(g, NULL, F32, &SHAPE(1), &y));
    y = ADD(g, "Add", NULL, 1, a, b)->out[0];
    y->name = "a";
    CHECK_OK(&c, graph_add_output(g, y));
    CHECK_OK(&c, onnx_write(&c, g, &bytes, &n));
    if (CHECK_OK(&c, onnx_read(&c, bytes, n, &h)))
        CHECK(h->n_inputs == 4 && h->first->in[0] == h->inputs[0] && h->first->in[1] == h->inputs[1]);
    ctx_release(&c);
}

TEST(gradients_and_state_are_written_as_outputs) {
    const void *bytes;
    size_t n;
    graph *g, *h;
    value *x, *y, *z;
    ctx c;

    ctx_init(&c);
    CHECK_OK(&c, graph_new(&c, &g));
    CHECK_OK(&c, graph_add_input(g, "x", F32, &SHAPE(1), &x));
    y = ADD(g, "Relu", NULL, 1, x)->out[0];
    z = ADD(g, "Identity", NULL, 1, x)->out[0];
    CHECK_OK(&c, graph_add_output(g, y));
    CHECK_OK(&c, graph_add_write(g, x, z));
    CHECK_OK(&c, NEW(&c, g->input_grads, 1));
    CHECK_OK(&c, graph_set_end(g, &g->input_grads[0], y));
    g->n_input_grads = 1;
    CHECK_OK(&c, onnx_write(&c, g, &bytes, &n));
    CHECK(memmem(bytes, n, "gradient of x", 13) && memmem(bytes, n, "new value of x", 14));
    if (CHECK_OK(&c, onnx_read(&c, bytes, n, &h))) CHECK(h->n_outputs == 2);
    ctx_release(&c);
}

/* --- tensors -------------------------------------------------------------------------------------------------------- */

/* The elements -1, 0, 1 as the list that a type is stored in. */
static blob listed_tensor(dtype t) {
    blob packed = begin_tensor("k", dtype_table[t].onnx, 3), list = {0};
    int field = t == F32 ? TENSOR_FLOATS : t == F64 ? TENSOR_DOUBLES : t == I64 ? TENSOR_INT64S : TENSOR_INT32S;

    for (int i = -1; i <= 1; i++) {
        unsigned char bytes[8] = {0};
        int32_t bits = i;
        dtype_set_value(t, bytes, 0, i);
        if (t == F32 || t == F64) put_raw(&list, bytes, dtype_size(t));
        else if (t == BF16 || t == F16) put_varint(&list, (uint64_t)(bytes[0] | bytes[1] << 8));
        else put_varint(&list, (uint64_t)(int64_t)bits);
    }
    put_message(&packed, field, &list);
    return packed;
}

TEST(tensors_as_lists_of_numbers) {
    for (dtype t = F32; t < DTYPE_COUNT; t++) {
        model m = new_model();
        blob packed = listed_tensor(t), file;
        graph *g;
        ctx c;

        add_initializer(&m, &packed);
        add_output(&m, "k");
        file = finish(&m);
        if (CHECK_OK(&c, read_blob(&c, &file, &g))) {
            const value *v = g->outputs[0];
            unsigned char expected[24] = {0};
            for (int i = 0; i < 3; i++) dtype_set_value(t, expected, i, i - 1);
            CHECK(v->type == t && v->shape.rank == 1 && v->shape.dim[0] == 3);
            CHECK(memcmp(v->data, expected, 3 * dtype_size(t)) == 0);
        }
        ctx_release(&c);
        blob_free(&file);
    }
}

static blob with_tensor(blob packed) {
    model m = new_model();
    add_initializer(&m, &packed);
    add_output(&m, "k");
    return finish(&m);
}

TEST(tensors_that_lie_are_refused) {
    static const char zeros[64];
    blob t;

    t = begin_tensor("k", 1, 3);
    put_bytes(&t, TENSOR_RAW, zeros, 11);
    REFUSED(E_INVALID, "12 bytes has 11", with_tensor(t));
    t = begin_tensor("k", 1, 3);
    put_bytes(&t, TENSOR_FLOATS, zeros, 16);
    REFUSED(E_INVALID, "3 elements has 4", with_tensor(t));
    t = begin_tensor("k", 1, INT64_C(1) << 40);
    put_bytes(&t, TENSOR_RAW, zeros, 4);
    REFUSED(E_INVALID, "4 bytes of data", with_tensor(t));
    t = begin_tensor("k", 1, INT64_MAX);
    put_bytes(&t, TENSOR_RAW, zeros, 4);
    REFUSED(E_NOMEM, "2^47", with_tensor(t));
    t = begin_tensor("k", 1, -1);
    put_bytes(&t, TENSOR_RAW, zeros, 4);
    REFUSED(E_INVALID, "negative", with_tensor(t));
    t = begin_tensor("k", 1, 4);
    put_bytes(&t, TENSOR_RAW, zeros, 16);
    put_bytes(&t, TENSOR_FLOATS, zeros, 16);
    REFUSED(E_INVALID, "twice", with_tensor(t));
    t = begin_tensor("k", 1, 4);
    put_bytes(&t, TENSOR_INT32S, zeros, 4);
    REFUSED(E_INVALID, "another type", with_tensor(t));
    t = begin_tensor("k", 1, 4);
    put_int(&t, TENSOR_LOCATION, 1);
    REFUSED(E_UNSUPPORTED, "another file", with_tensor(t));
    t = begin_tensor("k", 8, 4);
    put_bytes(&t, TENSOR_RAW, zeros, 4);
    REFUSED(E_UNSUPPORTED, "element type 8", with_tensor(t));
    t = begin_tensor("k", 1, 1);
    for (int i = 0; i < 9; i++) put_int(&t, TENSOR_DIMS, 1);
    put_bytes(&t, TENSOR_RAW, zeros, 4);
    REFUSED(E_UNSUPPORTED, "rank 10", with_tensor(t));
    REFUSED(E_INVALID, "no data and is no input", with_tensor(begin_tensor("k", 1, 3)));
}

TEST(initializers_and_inputs) {
    model m = new_model();
    blob packed = begin_tensor("w", 1, 3), file;
    graph *g;
    ctx c;

    add_initializer(&m, &packed);
    packed = begin_tensor("k", 9, 3);
    put_bytes(&packed, TENSOR_RAW, "\x02\0\xff", 3);
    add_initializer(&m, &packed);
    add_input(&m, "x");
    add_input(&m, "k");
    add_input(&m, "w");
    add_output(&m, "k");
    file = finish(&m);
    if (CHECK_OK(&c, read_blob(&c, &file, &g))) {
        CHECK(g->n_inputs == 2 && strcmp(g->inputs[1]->name, "w") == 0);
        CHECK(memcmp(g->outputs[0]->data, "\1\0\1", 3) == 0);
    }
    ctx_release(&c);
    blob_free(&file);
}

/* --- constant nodes ------------------------------------------------------------------------------------------------- */

static blob with_constant(const char *name, int type, int field, const void *packed, size_t n) {
    model m = new_model();
    blob step = begin_node("Constant", "", "k"), a = {0};

    put_text(&a, ATTRIBUTE_NAME, name);
    put_int(&a, ATTRIBUTE_TYPE, type);
    if (n) put_bytes(&a, field, packed, n);
    else put_int(&a, field, 7);
    put_message(&step, NODE_ATTRIBUTE, &a);
    end_node(&m, &step);
    add_output(&m, "k");
    return finish(&m);
}

TEST(constant_nodes_become_constants) {
    blob file = with_constant("value_int", 2, ATTRIBUTE_I, NULL, 0);
    graph *g;
    ctx c;

    if (CHECK_OK(&c, read_blob(&c, &file, &g)))
        CHECK(!g->first && g->outputs[0]->shape.rank == 0 && *(const int64_t *)g->outputs[0]->data == 7);
    ctx_release(&c);
    blob_free(&file);
    file = with_constant("value_ints", 7, 8, "\1\2\3", 3);
    if (CHECK_OK(&c, read_blob(&c, &file, &g)))
        CHECK(!g->first && g->outputs[0]->shape.dim[0] == 3 && ((const int64_t *)g->outputs[0]->data)[2] == 3);
    ctx_release(&c);
    blob_free(&file);
    REFUSED(E_UNSUPPORTED, "value_string", with_constant("value_string", 3, ATTRIBUTE_S, "abc", 3));
    REFUSED(E_UNSUPPORTED, "value_strings", with_constant("value_strings", 8, 9, "abc", 3));
}

/* --- graphs --------------------------------------------------------------------------------------------------------- */

TEST(nodes_out_of_order_are_sorted) {
    static const char *const expected[] = {"Identity", "Shape", "Add", "Relu"};
    model m = new_model();
    blob file;
    graph *g;
    ctx c;
    int i = 0;

    add_node(&m, "Relu", "sum", "y");
    add_node(&m, "Identity", "x", "copy");
    add_node(&m, "Add", "copy shape", "sum");
    add_node(&m, "Shape", "x", "shape");
    add_input(&m, "x");
    add_output(&m, "y");
    file = finish(&m);
    if (CHECK_OK(&c, read_blob(&c, &file, &g))) {
        for (const node *n = g->first; n && i < 4; n = n->next, i++) CHECK(strcmp(n->op->name, expected[i]) == 0);
        CHECK(i == 4);
        CHECK(strcmp(g->last->name, "Relu_0") == 0 && strcmp(g->outputs[0]->name, "y") == 0);
        CHECK_OK(&c, graph_verify(g));
    }
    ctx_release(&c);
    blob_free(&file);
}

TEST(a_long_chain_backwards) {
    enum { LENGTH = 20000 };
    model m = new_model();
    blob file;
    graph *g;
    ctx c;

    add_input(&m, "v0");
    for (int i = LENGTH; i > 0; i--) {
        char in[16], out[16];
        snprintf(in, sizeof in, "v%d", i - 1);
        snprintf(out, sizeof out, "v%d", i);
        add_node(&m, "Relu", in, out);
    }
    add_output(&m, "v20000");
    file = finish(&m);
    if (CHECK_OK(&c, read_blob(&c, &file, &g))) CHECK(strcmp(g->first->out[0]->name, "v1") == 0);
    ctx_release(&c);
    blob_free(&file);
}

TEST(malformed_graphs_are_refused) {
    model m = new_model();

    add_node(&m, "Add", "x b", "a");
    add_node(&m, "Relu", "a", "b");
    add_input(&m, "x");
    REFUSED(E_INVALID, "while reading Relu_1", finish(&m));
    m = new_model();
    add_node(&m, "Relu", "x", "x");
    REFUSED(E_INVALID, "part of a cycle", finish(&m));
    m = tiny_model();
    add_node(&m, "Add", "x nowhere", "z");
    REFUSED(E_INVALID, "\"nowhere\"", finish(&m));
    m = tiny_model();
    add_node(&m, "Relu", "x", "y");
    REFUSED(E_INVALID, "two values have the name \"y\"", finish(&m));
    m = tiny_model();
    add_node(&m, "Relu", "y", "x");
    REFUSED(E_INVALID, "two values have the name \"x\"", finish(&m));
    m = tiny_model();
    add_input(&m, "x");
    REFUSED(E_INVALID, "two values have the name \"x\"", finish(&m));
    m = tiny_model();
    add_input(&m, "");
    REFUSED(E_INVALID, "without a name", finish(&m));
    m = tiny_model();
    add_output(&m, "elsewhere");
    REFUSED(E_INVALID, "reading output elsewhere", finish(&m));
    m = tiny_model();
    add_node(&m, "Add", "x", "z");
    REFUSED(E_INVALID, "1 operands; Add takes 2 to 2", finish(&m));
    m = tiny_model();
    add_node(&m, "Relu", "x x", "z");
    REFUSED(E_INVALID, "2 operands; Relu takes 1 to 1", finish(&m));
    m = tiny_model();
    add_node(&m, "Relu", "x", "z z2");
    REFUSED(E_INVALID, "2 results; Relu has at most 1", finish(&m));
    m = tiny_model();
    add_node(&m, "Relu", "x", "-");
    REFUSED(E_INVALID, "no results", finish(&m));
    for (int opset = 0; opset <= 6; opset += 6) {
        m = tiny_model();
        m.opset = opset;
        REFUSED(E_INVALID, "7 to 26", finish(&m));
    }
    m = tiny_model();
    m.opset = 27;
    REFUSED(E_INVALID, "opset 27", finish(&m));
    REFUSED(E_INVALID, "no graph", (blob){0});
}

TEST(missing_operators_are_listed) {
    model m = tiny_model();
    blob step = begin_node("Mystery", "x", "c");

    put_text(&step, NODE_DOMAIN, "some.where");
    end_node(&m, &step);
    add_node(&m, "Unheard", "x", "a");
    add_node(&m, "Unheard", "x", "b");
    REFUSED(E_UNSUPPORTED,
            "opset 18 there is no implementation of these operators (number of nodes): "
            "some.where::Mystery (1), Unheard (2)",
            finish(&m));
    m = tiny_model();
    for (int i = 0; i < 1000; i++) {
        char op[16], out[16];
        snprintf(op, sizeof op, "Op%d", i);
        snprintf(out, sizeof out, "out%d", i);
        add_node(&m, op, "x", out);
    }
    REFUSED(E_UNSUPPORTED, "and 976 nodes of others", finish(&m));
}

static blob with_attribute(const char *op, blob a) {
    model m = tiny_model();
    blob step = begin_node(op, "x", "z");

    put_text(&step, NODE_NAME, "here");
    put_message(&step, NODE_ATTRIBUTE, &a);
    end_node(&m, &step);
    return finish(&m);
}

static blob begin_attr(const char *name, int type) {
    blob a = {0};
    put_text(&a, ATTRIBUTE_NAME, name);
    put_int(&a, ATTRIBUTE_TYPE, type);
    return a;
}

TEST(attributes_are_checked) {
    model m = tiny_model();
    blob a, step;

    REFUSED(E_UNSUPPORTED, "Relu has no attribute slope here\n  while reading here (Relu)",
            with_attribute("Relu", begin_attr("slope", 1)));
    REFUSED(E_INVALID, "attribute axis of Split is text; it is defined to be an integer\n  while reading here (Split)",
            with_attribute("Split", begin_attr("axis", 3)));
    REFUSED(E_INVALID, "value of ConstantOfShape is an integer; it is defined to be a tensor", /* without a default */
            with_attribute("ConstantOfShape", begin_attr("value", 2)));
    REFUSED(E_UNSUPPORTED, "type 9", with_attribute("Split", begin_attr("axis", 9)));
    REFUSED(E_INVALID, "type 0", with_attribute("Split", begin_attr("axis", 0)));
    REFUSED(E_INVALID, "no name", with_attribute("Split", begin_attr("", 2)));
    a = begin_attr("axis", 5);
    put_bytes(&a, ATTRIBUTE_G, "", 0);
    REFUSED(E_UNSUPPORTED, "subgraph", with_attribute("Split", a));
    REFUSED(E_INVALID, "no tensor", with_attribute("ConstantOfShape", begin_attr("value", 4)));
    a = begin_attr("mode", 3);
    put_bytes(&a, ATTRIBUTE_S, "re\0flect", 8);
    REFUSED(E_INVALID, "UTF-8", with_attribute("DepthToSpace", a));
    step = begin_node("Split", "x", "z");
    put_attr_int(&step, "axis", 0);
    put_attr_int(&step, "axis", 0);
    end_node(&m, &step);
    REFUSED(E_INVALID, "axis is given twice", finish(&m));
}

TEST(functions_are_refused) {
    model m = tiny_model();
    blob file = finish(&m), function = {0};
    put_text(&function, 1, "Helper");
    put_message(&file, MODEL_FUNCTIONS, &function);
    REFUSED(E_UNSUPPORTED, "Helper", file);
}
