/* conv.c -- runs ops/spatial/conv.c on a GPU: Conv, ConvGradInput and ConvGradWeight are cuDNN's. */
#include "cuda/kernels/move.h"
#include "cuda/libraries/dnn.h"

kernel_fn conv_cuda, conv_grad_input_cuda, conv_grad_weight_cuda;
size_t conv_cuda_workspace(const node *n), conv_grad_input_cuda_workspace(const node *n);
size_t conv_grad_weight_cuda_workspace(const node *n);

static size_t workspace(const node *n, conv_product which) {
    ctx c;
    conv v;

    ctx_init(&c);
    return conv_of_node(&c, n, which, &v) == OK ? dnn_workspace(&v) : 0;
}

size_t conv_cuda_workspace(const node *n) { return workspace(n, CONV_FORWARD); }
size_t conv_grad_input_cuda_workspace(const node *n) { return workspace(n, CONV_GRAD_INPUT); }
size_t conv_grad_weight_cuda_workspace(const node *n) { return workspace(n, CONV_GRAD_WEIGHT); }

/* `add`: to what the result holds. */
static status run(ctx *c, const call *k, conv_product which, bool add) {
    const tensor *y = &k->out[0];
    conv v;
    bool done;

    if (tensor_count(y) == 0) return OK;
    if (tensor_count(&k->in[0]) == 0 || tensor_count(&k->in[1]) == 0)
        return add ? OK : cuda_clear(c, k, y->data, (size_t)tensor_count(y) * dtype_size(y->type));
    TRY(conv_of_node(c, k->node, which, &v));
    TRY(dnn_convolution(c, k, &v, which, add, &done));
    return done ? OK
                : fail(c, E_UNSUPPORTED, "%s of this window has no CUDA kernel: cuDNN does not take it",
                       k->node->op->name);
}

status conv_cuda(ctx *c, const call *k) {
    const tensor *b = &k->in[2], *y = &k->out[0];
    const bool biased = k->n_in > 2 && tensor_present(b);

    if (biased && tensor_count(y) > 0) {
        tensor bias = {.data = b->data, .type = b->type, .shape = y->shape, .stride = {0, 1}};
        TRY(cuda_copy(c, k, y, &bias));
    }
    return run(c, k, CONV_FORWARD, biased);
}

status conv_grad_input_cuda(ctx *c, const call *k) { return run(c, k, CONV_GRAD_INPUT, false); }
status conv_grad_weight_cuda(ctx *c, const call *k) { return run(c, k, CONV_GRAD_WEIGHT, false); }
