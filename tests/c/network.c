/* network.c -- writes the model of network.h as the exporter would. Shapes are computed from shapes, constants are
 * nodes' operands, attention is masked by the lowest number, the GELU is written out. */
#include "network.h"

#include "build.h"
#include "machine.h"

#include <float.h>
#include <math.h>

const input_spec network_inputs[INPUTS] = {
    [IDS] = SPEC(I64, false, BATCH, TIME),     [LABELS] = SPEC(I64, false, TOKENS),
    [SEEN] = SPEC(BOOL, false, TIME, TIME),    [TABLE] = SPEC(F64, true, WORDS, WIDTH),
    [QKV] = SPEC(F64, true, WIDTH, 3 * WIDTH), [QKV_BIAS] = SPEC(F64, true, 3 * WIDTH),
    [SCALE] = SPEC(F64, true, WIDTH),          [HIDDEN_WEIGHT] = SPEC(F64, true, WIDTH, HIDDEN),
    [HIDDEN_BIAS] = SPEC(F64, true, HIDDEN),   [OUT_WEIGHT] = SPEC(F64, true, HIDDEN, WORDS),
};

static status add(graph *g, const char *op, const attr *attrs, int n_in, value *const *in, int n_out, value **out) {
    node *n;
    TRY(graph_add_node(g, op_find("", op, 18), op, attrs, n_in, in, n_out, &n));
    for (int i = 0; i < n_out; i++) out[i] = n->out[i];
    return OK;
}

#define ADD_MANY(g, n_out, out, op, attrs, ...)                                                                        \
    add(g, op, attrs, LENGTH(((value *[]){__VA_ARGS__})), (value *[]){__VA_ARGS__}, n_out, out)
#define ADD_WITH(g, out, op, attrs, ...) ADD_MANY(g, 1, out, op, attrs, __VA_ARGS__)
#define ADD(g, out, op, ...) ADD_WITH(g, out, op, NULL, __VA_ARGS__)

static const int64_t swap_middle[] = {0, 2, 1, 3}, swap_last[] = {0, 1, 3, 2};

/* [batch, time, width] as [batch, heads, time, width / heads]; `sizes` is computed from x's shape. */
static status split_heads(graph *g, value *x, value *sizes, value **out) {
    TRY(ADD(g, out, "Reshape", x, sizes));
    return ADD_WITH(g, out, "Transpose", NODE_ATTRS(INTS("perm", 4, swap_middle)), *out);
}

/* [batch, time, heads, -1], with the first two from x's shape */
static status head_sizes(graph *g, value *x, value **out) {
    value *sizes, *first, *zero, *two, *rest;

    TRY(graph_ints(g, 1, (int64_t[]){0}, &zero));
    TRY(graph_ints(g, 1, (int64_t[]){2}, &two));
    TRY(graph_ints(g, 2, (int64_t[]){HEADS, -1}, &rest));
    TRY(ADD(g, &sizes, "Shape", x));
    TRY(ADD(g, &first, "Slice", sizes, zero, two, zero));
    return ADD_WITH(g, out, "Concat", NODE_ATTRS(INT("axis", 0)), first, rest);
}

/* where(seen, softmax(where(seen, (q s) (k s)', lowest)), 0) v */
static status attention(graph *g, value *q, value *k, value *v, value *seen, value **out) {
    value *s, *zero, *lowest, *p;

    TRY(graph_scalar(g, F64, sqrt(sqrt((double)HEADS / WIDTH)), &s));
    TRY(graph_scalar(g, F64, 0, &zero));
    TRY(graph_scalar(g, F64, -DBL_MAX, &lowest));
    TRY(ADD_WITH(g, &k, "Transpose", NODE_ATTRS(INTS("perm", 4, swap_last)), k));
    TRY(ADD(g, &q, "Mul", q, s));
    TRY(ADD(g, &k, "Mul", k, s));
    TRY(ADD(g, &p, "MatMul", q, k));
    TRY(ADD(g, &p, "Where", seen, p, lowest));
    TRY(ADD_WITH(g, &p, "Softmax", NODE_ATTRS(INT("axis", -1)), p));
    TRY(ADD(g, &p, "Where", seen, p, zero));
    return ADD(g, out, "MatMul", p, v);
}

/* x * (1 + erf(x / sqrt 2)) * 0.5 */
static status gelu(graph *g, value *x, value **out) {
    value *root, *half, *one, *y;

    TRY(graph_scalar(g, F64, sqrt(2), &root));
    TRY(graph_scalar(g, F64, 0.5, &half));
    TRY(graph_scalar(g, F64, 1, &one));
    TRY(ADD(g, &y, "Div", x, root));
    TRY(ADD(g, &y, "Erf", y));
    TRY(ADD(g, &y, "Add", y, one));
    TRY(ADD(g, &y, "Mul", x, y));
    return ADD(g, out, "Mul", y, half);
}

static status add_layers(graph *g, value *const *in, value **loss, value **scores) {
    value *x, *sizes, *qkv[3], *a, *whole, *flat;

    TRY(ADD(g, &x, "Gather", in[TABLE], in[IDS]));
    TRY(ADD(g, &a, "MatMul", x, in[QKV]));
    TRY(ADD(g, &a, "Add", in[QKV_BIAS], a));
    TRY(ADD_MANY(g, 3, qkv, "Split", NODE_ATTRS(INT("axis", -1), INT("num_outputs", 3)), a));
    TRY(head_sizes(g, x, &sizes));
    for (int i = 0; i < 3; i++) TRY(split_heads(g, qkv[i], sizes, &qkv[i]));
    TRY(attention(g, qkv[0], qkv[1], qkv[2], in[SEEN], &a));
    TRY(ADD_WITH(g, &a, "Transpose", NODE_ATTRS(INTS("perm", 4, swap_middle)), a));
    TRY(ADD(g, &whole, "Shape", x));
    TRY(ADD(g, &a, "Reshape", a, whole));
    TRY(ADD(g, &x, "Add", x, a));
    TRY(ADD(g, &x, "LayerNormalization", x, in[SCALE]));
    TRY(ADD(g, &x, "MatMul", x, in[HIDDEN_WEIGHT]));
    TRY(ADD(g, &x, "Add", in[HIDDEN_BIAS], x));
    TRY(gelu(g, x, &x));
    TRY(ADD(g, scores, "MatMul", x, in[OUT_WEIGHT]));
    TRY(graph_ints(g, 2, (int64_t[]){-1, WORDS}, &flat));
    TRY(ADD(g, &flat, "Reshape", *scores, flat));
    return ADD(g, loss, "SoftmaxCrossEntropyLoss", flat, in[LABELS]);
}

status network_make(ctx *c, graph **out) {
    static const char *const names[INPUTS] = {"ids",      "labels", "seen",          "table",       "qkv",
                                              "qkv_bias", "scale",  "hidden_weight", "hidden_bias", "out_weight"};
    value *in[INPUTS], *loss, *scores;
    graph *g;

    TRY(graph_new(c, &g));
    for (int i = 0; i < INPUTS; i++)
        TRY(graph_add_input(g, names[i], network_inputs[i].type, &(shape){.rank = -1}, &in[i]));
    TRY(add_layers(g, in, &loss, &scores));
    TRY(graph_add_output(g, loss));
    TRY(graph_add_output(g, scores));
    *out = g;
    return OK;
}
