/* offload.c -- values of forward that wait for backward outside of the arena: written there, and read back.
 *
 * Only the planner emits these (plan/recompute.c). The result of Offload is a number without a meaning, by which a Reload
 * comes behind it. What they move lies in the run's room (core/offload.h), at the same place in both. On a GPU they start
 * copies: an OffloadEnd waits before the value's memory is another's, and a ReloadEnd before the value is read. */
#include "core/offload.h"
#include "ops/op.h"

#include <string.h>

static status infer_offload(graph *g, node *n) { return set_out(g, n, 0, I64, &SCALAR); }

static status infer_reload(graph *g, node *n) {
    const int64_t *sizes;
    shape s = {.rank = node_ints(n, "shape", &sizes)};

    for (int d = 0; d < s.rank; d++) s.dim[d] = sizes[d];
    return set_out(g, n, 0, (dtype)node_int(n, "type"), &s);
}

static int64_t bytes_of(const tensor *t) { return tensor_count(t) * (int64_t)dtype_size(t->type); }

static status offload_cpu(ctx *c, const call *k) {
    const int64_t at = node_int(k->node, "offset"), bytes = bytes_of(&k->in[0]);

    TRY(offload_check(c, k->room, at + bytes));
    if (k->out[0].data) *(int64_t *)k->out[0].data = 0;
    return offload_write(c, k->room, at, k->in[0].data, bytes);
}

static status reload_cpu(ctx *c, const call *k) {
    const int64_t at = node_int(k->node, "offset"), bytes = bytes_of(&k->out[0]);

    TRY(offload_check(c, k->room, at + bytes));
    return offload_read(c, k->room, at, k->out[0].data, bytes);
}

/* Copies of the CPU are over when they return. */
static status offload_end_cpu(ctx *c, const call *k) {
    (void)c;
    if (k->out[0].data) *(int64_t *)k->out[0].data = 0;
    return OK;
}

static status reload_end_cpu(ctx *c, const call *k) {
    (void)c;
    if (k->out[0].data && k->out[0].data != k->in[0].data)
        memcpy(k->out[0].data, k->in[0].data, (size_t)bytes_of(&k->out[0]));
    return OK;
}

kernel_fn offload_cuda, offload_end_cuda, reload_cuda, reload_end_cuda; /* cuda/kernels/offload.c */

/* clang-format off */
const op_def offload_ops[] = {
    {.name = "Offload", .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 1, .max_out = 1, .plain = ALL_OPERANDS,
     .flags = EFFECT | NO_GRAD, .attrs = NODE_ATTRS(INT("offset", 0)), .infer = infer_offload, .cpu = offload_cpu, .cuda = offload_cuda},
    {.name = "OffloadEnd", .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 1, .max_out = 1, .plain = ALL_OPERANDS,
     .flags = EFFECT | NO_GRAD, .infer = infer_offload, .cpu = offload_end_cpu, .cuda = offload_end_cuda},
    {.name = "ReloadEnd", .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 1, .max_out = 1, .plain = ALL_OPERANDS,
     .flags = KEEP | NO_GRAD | INPLACE_0, .infer = infer_same, .cpu = reload_end_cpu, .cuda = reload_end_cuda},
    {.name = "Reload", .domain = ORT_DOMAIN, .since = 1, .min_in = 1, .max_in = 1, .max_out = 1, .plain = ALL_OPERANDS,
     .flags = KEEP | NO_GRAD, .attrs = NODE_ATTRS(INT("offset", 0), NO_DEFAULT("type", INT), NO_DEFAULT("shape", INTS)),
     .infer = infer_reload, .cpu = reload_cpu, .cuda = reload_cuda},
    {0},
};
/* clang-format on */
