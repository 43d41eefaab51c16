/* conv.c -- convolutions: Conv, ConvTranspose, and the two gradients every convolution needs.
 *
 *     Conv             y  = w * x + b
 *     ConvGradInput    dx = w transposed * dy     which is also what ConvTranspose computes
 *     ConvGradWeight   dw = dy correlated with x
 *
 * The gradient of each of the first two is made of the others. Backward keeps x and w alive, not y. How a convolution
 * is computed is chosen in conv_by_torch; the kernels are in conv_kernel.c, conv_narrow.c and conv_shim.c. */
#include "ops/spatial/conv_products.h"

#include <inttypes.h>
#include <string.h>

#include "ops/movement/move.h"

/* --- geometry ----------------------------------------------------------------------------------------------------- */

/* Also where there are no channels: the number of groups is multiplied with sizes. */
static bool divides(int64_t groups, int64_t channels) {
    return groups >= 1 && groups <= (channels ? channels : 1) && channels % groups == 0;
}

/* The convolution between images of shape `x` and `w`; its window is that of the attributes. */
static status conv_of(ctx *c, const node *n, dtype type, const shape *x, const shape *w, conv *out) {
    char tx[SHAPE_TEXT], tw[SHAPE_TEXT];
    conv v = {.type = type, .groups = node_int(n, "group")};

    if (w->rank != x->rank || w->rank < 3)
        return fail(c, E_SHAPE, "%s of images %s with weights %s", n->op->name, shape_text(x, tx), shape_text(w, tw));
    TRY(window_of(c, n, x, w->dim + 2, &v.w));
    v.images = x->dim[0];
    v.in = w->dim[1];
    if (!divides(v.groups, w->dim[0]) || x->dim[1] != size_mul(v.in, v.groups))
        return fail(c, E_SHAPE, "%s: %" PRId64 " groups of weights %s do not go with images %s", n->op->name, v.groups,
                    shape_text(w, tw), shape_text(x, tx));
    v.out = w->dim[0] / v.groups;
    *out = v;
    return OK;
}

status conv_of_node(ctx *c, const node *n, conv_product which, conv *out) {
    const shape *a = &n->in[0]->shape, *b = &n->in[1]->shape;
    const dtype type = n->in[0]->type;
    shape result;

    if (which == CONV_FORWARD) return conv_of(c, n, type, a, b, out);
    TRY(shape_attr(c, n, "shape", &result));
    return which == CONV_GRAD_INPUT ? conv_of(c, n, type, &result, b, out) : conv_of(c, n, type, a, &result, out);
}

static shape result_shape(const conv *v) { return spatial_shape(v->images, v->groups * v->out, v->w.rank, v->w.out); }

/* --- inference ---------------------------------------------------------------------------------------------------- */

static status check_pair(graph *g, const node *n) {
    TRY(require(g, n, 0));
    TRY(require(g, n, 1));
    return same_types(g, n, 0);
}

static status infer_conv(graph *g, node *n) {
    char ts[SHAPE_TEXT];
    const value *b = node_in(n, 2);
    shape y;
    conv v;

    TRY(check_pair(g, n));
    TRY(conv_of_node(g->c, n, CONV_FORWARD, &v));
    if (b && (b->shape.rank != 1 || b->shape.dim[0] != v.groups * v.out))
        return fail(g->c, E_SHAPE, "Conv: a bias of shape %s for %" PRId64 " channels", shape_text(&b->shape, ts),
                    v.groups * v.out);
    y = result_shape(&v);
    return set_out(g, n, 0, n->in[0]->type, &y);
}

static status infer_conv_grad_input(graph *g, node *n) {
    char td[SHAPE_TEXT], ty[SHAPE_TEXT];
    shape x, y;
    conv v;

    TRY(check_pair(g, n));
    TRY(conv_of_node(g->c, n, CONV_GRAD_INPUT, &v));
    y = result_shape(&v);
    if (!shape_equal(&y, &n->in[0]->shape))
        return fail(g->c, E_SHAPE, "%s: a gradient of shape %s for results of shape %s", n->op->name,
                    shape_text(&n->in[0]->shape, td), shape_text(&y, ty));
    TRY(shape_attr(g->c, n, "shape", &x));
    return set_out(g, n, 0, n->in[0]->type, &x);
}

static status infer_conv_grad_weight(graph *g, node *n) {
    shape w;

    TRY(check_pair(g, n));
    TRY(shape_attr(g->c, n, "shape", &w));
    return set_out(g, n, 0, n->in[0]->type, &w);
}

/* --- 16-bit types ------------------------------------------------------------------------------------------------- */

/* 16-bit floats stay where there is a kernel for them, torch's or ours, and on a GPU, unless constants are folded; other
 * such convolutions are computed in float32. */
static status lower_narrow(graph *g, const node *n, conv_product product, value **out) {
    conv v;

    TRY(check_pair(g, n));
    if (!dtype_is_narrow(n->in[0]->type)) return OK;
    if (g->cuda && !(value_is_constant(n->in[0]) && value_is_constant(n->in[1]))) return OK;
    TRY(conv_of_node(g->c, n, product, &v));
    const bool stays = conv_by_product(&v) || conv_is_depthwise(&v) || conv_by_torch(&v, product);
    return stays ? OK : lower_to_f32(g, n, out);
}

static status lower_conv(graph *g, const node *n, value **out) { return lower_narrow(g, n, CONV_FORWARD, out); }
static status lower_conv_grad_input(graph *g, const node *n, value **out) {
    return lower_narrow(g, n, CONV_GRAD_INPUT, out);
}
static status lower_conv_grad_weight(graph *g, const node *n, value **out) {
    return lower_narrow(g, n, CONV_GRAD_WEIGHT, out);
}

/* --- gradients ---------------------------------------------------------------------------------------------------- */

/* A gradient node of convolution `v`: its window, the groups, and the shape of its result. */
static status emit_gradient(graph *g, const char *op, const conv *v, value *a, value *b, const shape *result,
                            value **out) {
    window_attrs as;

    window_to_attrs(&v->w, &as);
    return emit_with(g, out, op,
                     NODE_ATTRS(as.list[0], as.list[1], as.list[2], INT("group", v->groups),
                                INTS("shape", result->rank, result->dim)),
                     a, b);
}

static status grad_conv(graph *g, const node *n, value *const dy[], value *dx[]) {
    int64_t axes[MAX_RANK] = {0};
    conv v;

    TRY(conv_of_node(g->c, n, CONV_FORWARD, &v));
    if (need(n, 0)) TRY(emit_gradient(g, "ConvGradInput", &v, dy[0], n->in[1], &n->in[0]->shape, &dx[0]));
    if (need(n, 1)) TRY(emit_gradient(g, "ConvGradWeight", &v, n->in[0], dy[0], &n->in[1]->shape, &dx[1]));
    if (!need(n, 2)) return OK;
    for (int i = 1; i <= v.w.rank; i++) axes[i] = 1 + i; /* every axis but that of the channels */
    return emit_reduce(g, "ReduceSum", dy[0], 1 + v.w.rank, axes, false, &dx[2]);
}

/* ConvGradInput(a, w) is linear in both: seen from it, `dy` is an image and `a` what the convolution makes of it. */
static status grad_conv_grad_input(graph *g, const node *n, value *const dy[], value *dx[]) {
    window_attrs as;
    conv v;

    TRY(conv_of_node(g->c, n, CONV_GRAD_INPUT, &v));
    window_to_attrs(&v.w, &as);
    if (need(n, 0))
        TRY(emit_with(g, &dx[0], "Conv", NODE_ATTRS(as.list[0], as.list[1], as.list[2], INT("group", v.groups)), dy[0],
                      n->in[1]));
    if (need(n, 1)) TRY(emit_gradient(g, "ConvGradWeight", &v, dy[0], n->in[0], &n->in[1]->shape, &dx[1]));
    return OK;
}

/* A convolution with results (or their gradient) `y`; its gradients take as many. */
static double flops_of(const value *y, const value *w) {
    const int64_t filters = w->shape.dim[0];
    return filters ? 2 * (double)shape_count(&y->shape) * (double)shape_count(&w->shape) / (double)filters : 0;
}

static double flops_conv(const node *n) { return flops_of(n->out[0], n->in[1]); }
static double flops_conv_grad_input(const node *n) { return flops_of(n->in[0], n->in[1]); }
static double flops_conv_grad_weight(const node *n) { return flops_of(n->in[1], n->out[0]); }

/* --- ConvTranspose ------------------------------------------------------------------------------------------------ */

/* Size of axis i of the result when `pads` are cut off in all. */
static int64_t transposed_size(const window *w, int i, int64_t extra, int64_t pads) {
    return size_add(size_add(size_mul(w->in[i] - 1, w->stride[i]), extra), size_add(window_span(w, i), -pads));
}

/* The convolution whose input gradient this is. `t` is the window as the attributes write it: over the operand. */
static status transposed_window(ctx *c, const node *n, const window *t, window *out) {
    const char *auto_pad = node_string(n, "auto_pad");
    const int64_t *extra, *wanted;
    int n_extra = node_ints(n, "output_padding", &extra), n_wanted = node_ints(n, "output_shape", &wanted);
    int first = SPATIAL - t->rank;
    bool same = strncmp(auto_pad, "SAME_", 5) == 0, upper = same && strcmp(auto_pad, "SAME_UPPER") == 0;

    if ((n_extra > 0 && n_extra != t->rank) || (n_wanted > 0 && n_wanted != t->rank && n_wanted != t->rank + 2))
        return fail(c, E_INVALID, "ConvTranspose: output_padding or output_shape does not have a size for each axis");
    *out = *t;
    for (int i = first; i < SPATIAL; i++) {
        int64_t more = n_extra > 0 ? extra[i - first] : 0, size;
        if (more < 0 || more > INT32_MAX)
            return fail(c, E_INVALID, "ConvTranspose: output_padding cannot be %" PRId64, more);
        size = transposed_size(t, i, more, t->before[i] + t->after[i]);
        if (n_wanted > 0 || same) {
            size = n_wanted > 0 ? wanted[i - first + n_wanted - t->rank] : size_mul(t->in[i], t->stride[i]);
            if (size < 1 || size > INT32_MAX)
                return fail(c, E_INVALID, "ConvTranspose: a result of %" PRId64 " pixels in a row", size);
            int64_t cut = transposed_size(t, i, more, 0) - size;
            if (cut < 0) cut = 0;
            out->before[i] = upper ? cut / 2 : cut - cut / 2;
        }
        if (size < 1)
            return fail(c, E_SHAPE, "ConvTranspose: axis %d of the result would have size %" PRId64, i - first + 2,
                        size);
        out->in[i] = size;
        out->out[i] = t->in[i];
    }
    return OK;
}

static status lower_conv_transpose(graph *g, const node *n, value **out) {
    value *x = node_in(n, 0), *w = node_in(n, 1), *bias = node_in(n, 2);
    char tx[SHAPE_TEXT], tw[SHAPE_TEXT];
    shape result, per_channel = {.rank = 0};
    conv v = {.groups = node_int(n, "group")};
    window t;

    TRY(check_pair(g, n));
    if (w->shape.rank != x->shape.rank || w->shape.rank < 3 || w->shape.dim[0] != x->shape.dim[1] ||
        !divides(v.groups, w->shape.dim[0]))
        return fail(g->c, E_SHAPE, "ConvTranspose of images %s with weights %s, in %" PRId64 " groups",
                    shape_text(&x->shape, tx), shape_text(&w->shape, tw), v.groups);
    /* Only its numbers are wanted: as a window over the operand it may be larger than that. */
    TRY(window_numbers(g->c, n, &x->shape, w->shape.dim + 2, &t));
    TRY(transposed_window(g->c, n, &t, &v.w));
    result = spatial_shape(x->shape.dim[0], size_mul(w->shape.dim[1], v.groups), v.w.rank, v.w.in);
    TRY(emit_gradient(g, "ConvGradInput", &v, x, w, &result, &out[0]));
    if (!bias) return OK;
    per_channel.rank = result.rank;
    for (int i = 0; i < result.rank; i++) per_channel.dim[i] = i == 1 ? result.dim[1] : 1;
    TRY(emit_reshape(g, bias, &per_channel, &bias));
    return emit(g, &out[0], "Add", out[0], bias);
}

/* --- kernels ------------------------------------------------------------------------------------------------------ */

static size_t scratch(const node *n, conv_product which) {
    ctx c;
    conv v;

    ctx_init(&c);
    if (conv_of_node(&c, n, which, &v) != OK) return 0;
    if (v.type != BF16) return conv_scratch(&v);
    return conv_by_product(&v) ? conv_product_scratch(&v, which) : 0;
}

static size_t workspace_conv(const node *n) { return scratch(n, CONV_FORWARD); }
static size_t workspace_conv_grad_input(const node *n) { return scratch(n, CONV_GRAD_INPUT); }
static size_t workspace_conv_grad_weight(const node *n) { return scratch(n, CONV_GRAD_WEIGHT); }

/* Only torch computes it. */
static bool is_torchs(const conv *v) { return v->type == BF16 && !conv_by_product(v) && !conv_is_depthwise(v); }

static status failed(ctx *c) { return fail(c, E_RUNTIME, "torch refused a bfloat16 convolution"); }

static status conv_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *w = &k->in[1], *b = k->n_in > 2 && tensor_present(&k->in[2]) ? &k->in[2] : NULL;
    conv v;

    TRY(conv_of_node(c, k->node, CONV_FORWARD, &v));
    if (conv_by_torch(&v, CONV_FORWARD) && conv_forward_shim(&v, x->data, w->data, b ? b->data : NULL, k->out[0].data))
        return OK;
    if (is_torchs(&v)) return failed(c);
    if (b) {
        tensor bias = {.data = b->data, .type = b->type, .shape = k->out[0].shape, .stride = {0, b->stride[0]}};
        copy_elements(&k->out[0], &bias);
    }
    if (conv_by_product(&v)) conv_forward_product(&v, x->data, w->data, k->out[0].data, b != NULL, k->work);
    else conv_forward(&v, x->data, w->data, k->out[0].data, b != NULL, k->work);
    return OK;
}

static status conv_grad_input_cpu(ctx *c, const call *k) {
    const tensor *dy = &k->in[0], *w = &k->in[1], *dx = &k->out[0];
    conv v;

    TRY(conv_of_node(c, k->node, CONV_GRAD_INPUT, &v));
    if (conv_by_torch(&v, CONV_GRAD_INPUT) && conv_grad_input_shim(&v, dy->data, w->data, dx->data)) return OK;
    if (is_torchs(&v)) return failed(c);
    if (conv_by_product(&v)) conv_grad_input_product(&v, dy->data, w->data, dx->data, k->work);
    else conv_grad_input(&v, dy->data, w->data, dx->data, k->work);
    return OK;
}

static status conv_grad_weight_cpu(ctx *c, const call *k) {
    const tensor *x = &k->in[0], *dy = &k->in[1], *dw = &k->out[0];
    conv v;

    TRY(conv_of_node(c, k->node, CONV_GRAD_WEIGHT, &v));
    if (conv_by_torch(&v, CONV_GRAD_WEIGHT) && conv_grad_weight_shim(&v, x->data, dy->data, dw->data)) return OK;
    if (is_torchs(&v)) return failed(c);
    if (conv_by_product(&v)) conv_grad_weight_product(&v, x->data, dy->data, dw->data, k->work);
    else conv_grad_weight(&v, x->data, dy->data, dw->data, k->work);
    return OK;
}

/* --- what explain() reports --------------------------------------------------------------------------------------- */

static const char *through_torch(const node *n, conv_product product) {
    ctx c;
    conv v;

    ctx_init(&c);
    if (conv_of_node(&c, n, product, &v) != OK || !conv_by_torch(&v, product)) return NULL;
    return product == CONV_GRAD_WEIGHT ? "aten::convolution_backward" : "aten::convolution";
}

static const char *through_torch_conv(const node *n) { return through_torch(n, CONV_FORWARD); }
static const char *through_torch_conv_grad_input(const node *n) { return through_torch(n, CONV_GRAD_INPUT); }
static const char *through_torch_conv_grad_weight(const node *n) { return through_torch(n, CONV_GRAD_WEIGHT); }

/* --- what the planner counts -------------------------------------------------------------------------------------- */

/* The result that is copied is among them. */
static int64_t bytes_of_torch(const node *n, conv_product product) {
    int64_t bytes = 0;
    conv v;
    ctx c;

    ctx_init(&c);
    if (conv_of_node(&c, n, product, &v) == OK && conv_by_torch(&v, product)) bytes = conv_torch_bytes(&v, product);
    ctx_release(&c);
    return bytes;
}

static int64_t torch_bytes_conv(const node *n) { return bytes_of_torch(n, CONV_FORWARD); }
static int64_t torch_bytes_conv_grad_input(const node *n) { return bytes_of_torch(n, CONV_GRAD_INPUT); }
static int64_t torch_bytes_conv_grad_weight(const node *n) { return bytes_of_torch(n, CONV_GRAD_WEIGHT); }

/* --- records ------------------------------------------------------------------------------------------------------ */

/* cuda/kernels/conv.c */
kernel_fn conv_cuda, conv_grad_input_cuda, conv_grad_weight_cuda;
size_t conv_cuda_workspace(const node *n), conv_grad_input_cuda_workspace(const node *n);
size_t conv_grad_weight_cuda_workspace(const node *n);

#define CONVOLUTION(name_, domain_, most_, ...)                                                                        \
    .name = name_, .domain = domain_, .since = 1, .min_in = 2, .max_in = most_, .max_out = 1, .dtypes = FLOATS,        \
    .attrs = NODE_ATTRS(STRING("auto_pad", "NOTSET"), NO_DEFAULT("dilations", INTS), INT("group", 1),                  \
                        NO_DEFAULT("kernel_shape", INTS), NO_DEFAULT("pads", INTS), NO_DEFAULT("strides", INTS),       \
                        __VA_ARGS__)

/* clang-format off */
const op_def conv_ops[] = {
    {CONVOLUTION("Conv", "", 3, {.name = NULL}), .infer = infer_conv, .lower = lower_conv, .grad = grad_conv,
     .workspace = workspace_conv, .torch_bytes = torch_bytes_conv, .cpu = conv_cpu, .flops = flops_conv, .cuda_workspace = conv_cuda_workspace,
     .cuda = conv_cuda, .through_torch = through_torch_conv},
    {CONVOLUTION("ConvTranspose", "", 3, NO_DEFAULT("output_padding", INTS), NO_DEFAULT("output_shape", INTS)),
     .lower = lower_conv_transpose},
    {CONVOLUTION("ConvGradInput", ORT_DOMAIN, 2, NO_DEFAULT("shape", INTS)), .infer = infer_conv_grad_input,
     .lower = lower_conv_grad_input, .grad = grad_conv_grad_input, .workspace = workspace_conv_grad_input, .torch_bytes = torch_bytes_conv_grad_input,
     .cpu = conv_grad_input_cpu, .flops = flops_conv_grad_input, .cuda_workspace = conv_grad_input_cuda_workspace, .cuda = conv_grad_input_cuda,
     .through_torch = through_torch_conv_grad_input},
    {CONVOLUTION("ConvGradWeight", ORT_DOMAIN, 2, NO_DEFAULT("shape", INTS)), .infer = infer_conv_grad_weight,
     .lower = lower_conv_grad_weight, .workspace = workspace_conv_grad_weight, .torch_bytes = torch_bytes_conv_grad_weight, .cpu = conv_grad_weight_cpu, .flops = flops_conv_grad_weight,
     .cuda_workspace = conv_grad_weight_cuda_workspace, .cuda = conv_grad_weight_cuda, .through_torch = through_torch_conv_grad_weight},
    {0},
};
/* clang-format on */
