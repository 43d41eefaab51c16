/* cost.c -- estimates how long nodes take. */
#include "plan/cost.h"

#include "gemm/gemm.h"

#include <string.h>

/* Additions and multiplications in the time that one byte takes, of a CPU with AVX-512 and of a GPU with tensor cores. */
static const double BALANCE = 16, BALANCE_OF_GPUS = 150;

cost_rates cost_rates_usual(bool cuda) {
    return (cost_rates){.narrow = 1, .others = SLOWER_KERNELS, .byte = cuda ? BALANCE_OF_GPUS : BALANCE};
}

/* What each way to a file, or over the bus, begins with takes as long as so many bytes. */
static const double TO_BEGIN = 1 << 18;

static void add_product(void *arg, const gemm *g) {
    *(double *)arg += 2 * (double)g->m * (double)g->n * (double)g->k * (double)gemm_pairs(g);
}

static tensor without_memory(const value *v) {
    tensor t = {.type = v ? v->type : DT_NONE};
    if (v) t.shape = v->shape;
    if (v) stride_contiguous(&v->shape, t.stride);
    return t;
}

static status add_products(ctx *c, const node *n, double *sum) {
    call k = {.node = n, .n_in = n->n_in, .n_out = n->n_out};
    tensor *operands;

    TRY(NEW(c, operands, n->n_in + n->n_out));
    for (int i = 0; i < n->n_in; i++) operands[i] = without_memory(n->in[i]);
    for (int i = 0; i < n->n_out; i++) operands[n->n_in + i] = without_memory(n->out[i]);
    k.in = operands;
    k.out = operands + n->n_in;
    n->op->products(&k, add_product, sum);
    return OK;
}

status work_of_node(ctx *c, const node *n, work_sum *sum) {
    const bool moves = strcmp(n->op->name, "Offload") == 0 || strcmp(n->op->name, "Reload") == 0;
    double *bytes = moves ? &sum->moved : &sum->bytes;
    const bool narrow = n->n_in > 0 && n->in[0] && dtype_size(n->in[0]->type) < dtype_size(F32);

    for (int i = 0; i < n->n_in; i++)
        if (n->in[i]) *bytes += (double)value_bytes(n->in[i]);
    for (int i = 0; i < n->n_out; i++) *bytes += (double)value_bytes(n->out[i]);
    if (n->op->flops) sum->others += n->op->flops(n);
    else if (n->op->products) TRY(add_products(c, n, &sum->products[narrow]));
    return OK;
}

status cost_of_node(ctx *c, const node *n, const cost_rates *r, double *out) {
    work_sum w = {0};

    TRY(work_of_node(c, n, &w));
    *out = w.products[0] + r->narrow * w.products[1] + r->others * w.others + r->byte * (w.bytes + w.moved);
    return OK;
}

double cost_of_moving(int64_t bytes, const cost_rates *r, bool cuda) {
    return 2 * r->byte * ((cuda ? SLOWER_BUSES : SLOWER_FILES) * (double)bytes + TO_BEGIN);
}
