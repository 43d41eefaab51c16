/* zoo.c -- makes the model of zoo.h: images through convolutions and pools, then a sequence, then what picks and
 * moves. */
#include "zoo.h"

#include "build.h"
#include "machine.h"

enum { PICTURES = 2, FILTERS = 4, SIDE = 6, UNITS = 3 };

const input_spec zoo_inputs[ZOO_INPUTS] = {
    [ZOO_IMAGES] = SPEC(F32, true, PICTURES, 3, SIDE, SIDE),
    [ZOO_FILTERS] = SPEC(F32, true, FILTERS, 3, 3, 3),
    [ZOO_CHANNELS] = SPEC(F32, true, FILTERS),
    [ZOO_GATES] = SPEC(F32, true, 1, 4 * UNITS, FILTERS),
    [ZOO_STATE] = SPEC(F32, true, 1, 4 * UNITS, UNITS),
    [ZOO_ROWS] = SPEC(I64, false, 2),
};

static status add(graph *g, value **out, int n_out, const char *op, const attr *attrs, int n_in, value *const *in) {
    node *n;
    TRY(graph_add_node(g, op_find("", op, 18), op, attrs, n_in, in, n_out, &n));
    for (int i = 0; i < n_out; i++) out[i] = n->out[i];
    return OK;
}

#define ADD(g, out, n_out, op, attrs, ...)                                                                             \
    TRY(add(g, out, n_out, op, attrs, LENGTH(((value *[]){__VA_ARGS__})), (value *[]){__VA_ARGS__}))
#define ONE(g, v, op, ...) ADD(g, &(v), 1, op, NULL, __VA_ARGS__)
#define ONE_WITH(g, v, op, attrs, ...) ADD(g, &(v), 1, op, attrs, __VA_ARGS__)
#define LIST(g, v, ...) TRY(graph_ints(g, LENGTH(((int64_t[]){__VA_ARGS__})), (int64_t[]){__VA_ARGS__}, &(v)))

static const int64_t two_by_two[] = {2, 2}, ones[] = {1, 1, 1, 1};

/* Half the pictures' size, FILTERS channels. */
static status see(graph *g, value *const *in, value **out) {
    value *x = in[ZOO_IMAGES], *c = in[ZOO_CHANNELS], *y, *grown, *scales, *normed[3], *variance;

    ONE_WITH(g, x, "Conv", NODE_ATTRS(INTS("pads", 4, ones)), x, in[ZOO_FILTERS], c);
    ONE(g, variance, "Exp", c);
    ADD(g, normed, 3, "BatchNormalization", NODE_ATTRS(INT("training_mode", 1)), x, c, c, c, variance);
    ONE(g, x, "HardSwish", normed[0]);
    ONE_WITH(g, y, "MaxPool", NODE_ATTRS(INTS("kernel_shape", 2, two_by_two), INTS("strides", 2, two_by_two)), x);
    ONE_WITH(g, x, "AveragePool", NODE_ATTRS(INTS("kernel_shape", 2, two_by_two), INTS("strides", 2, two_by_two)), x);
    ONE(g, x, "Sub", x, y);
    ONE(g, y, "InstanceNormalization", x, c, c);
    TRY(graph_add_constant(g, F32, &SHAPE(4), (float[]){1, 1, 2, 2}, &scales));
    ONE_WITH(g, grown, "Resize", NODE_ATTRS(STRING("mode", "linear")), y, NULL, scales);
    ONE_WITH(g, grown, "ReduceMax", NODE_ATTRS(INT("keepdims", 1)), grown);
    ONE(g, y, "Mul", y, grown);
    ONE_WITH(g, *out, "Einsum", NODE_ATTRS(STRING("equation", "bchw,bdhw->bch")), x, y);
    return OK;
}

/* [batch, channels, steps] through a recurrent layer: [batch, units, steps]. */
static status recall(graph *g, value *const *in, value *x, value **out) {
    static const int64_t steps_first[] = {2, 0, 1}, batch_first[] = {1, 2, 0};
    value *axis;

    ONE_WITH(g, x, "Transpose", NODE_ATTRS(INTS("perm", 3, steps_first)), x);
    ONE_WITH(g, x, "LSTM", NODE_ATTRS(INT("hidden_size", UNITS)), x, in[ZOO_GATES], in[ZOO_STATE]);
    LIST(g, axis, 1);
    ONE(g, x, "Squeeze", x, axis);
    ONE_WITH(g, *out, "Transpose", NODE_ATTRS(INTS("perm", 3, batch_first)), x);
    return OK;
}

static status pick(graph *g, value *rows, value *x, value **out) {
    value *y, *z, *n, *best[2], *pads, *limit, *axis, *low, *high, *twice, *zero;

    LIST(g, n, 2);
    LIST(g, pads, 0, 1, 0, 0, 0, 1);
    LIST(g, axis, -1);
    LIST(g, zero, 0);
    LIST(g, twice, 1, 2, 1);
    TRY(graph_scalar(g, F32, 0.5, &limit));
    TRY(graph_scalar(g, F32, -2, &low));
    TRY(graph_scalar(g, F32, 2, &high));
    ONE_WITH(g, y, "Gather", NODE_ATTRS(INT("axis", 1)), x, rows);
    ONE(g, y, "Pad", y, pads, limit);
    ONE(g, y, "Tile", y, twice);
    ONE(g, y, "Clip", y, low, high);
    ADD(g, best, 2, "TopK", NODE_ATTRS(INT("axis", -1)), y, n);
    ONE_WITH(g, z, "GatherElements", NODE_ATTRS(INT("axis", -1)), y, best[1]);
    ONE(g, z, "Pow", z, limit);
    ONE_WITH(g, z, "ScatterElements", NODE_ATTRS(INT("axis", -1)), y, best[1], z);
    ONE(g, z, "CumSum", z, axis);
    ONE_WITH(g, z, "LogSoftmax", NODE_ATTRS(INT("axis", 1)), z);
    ONE(g, y, "Softplus", y);
    ONE_WITH(g, z, "Concat", NODE_ATTRS(INT("axis", 0)), y, z);
    ONE(g, z, "ReduceLogSumExp", z, zero);
    ONE(g, z, "Dropout", z, limit);
    ONE_WITH(g, *out, "ReduceMean", NODE_ATTRS(INT("keepdims", 0)), z);
    return OK;
}

status zoo_make(ctx *c, graph **out) {
    static const char *const names[ZOO_INPUTS] = {"images", "filters", "channels", "gates", "state", "rows"};
    value *in[ZOO_INPUTS], *x;
    graph *g;

    TRY(graph_new(c, &g));
    g->opset = 18;
    for (int i = 0; i < ZOO_INPUTS; i++)
        TRY(graph_add_input(g, names[i], zoo_inputs[i].type, &(shape){.rank = -1}, &in[i]));
    TRY(see(g, in, &x));
    TRY(recall(g, in, x, &x));
    TRY(pick(g, in[ZOO_ROWS], x, &x));
    TRY(graph_add_output(g, x));
    *out = g;
    return OK;
}
