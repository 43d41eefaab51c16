/* offload.c -- mirrors ops/movement/offload.c: copies to and from pinned memory, beside what the run computes.
 *
 * One copy is under way at a time: an OffloadEnd comes before the next Offload, and a ReloadEnd before the next Reload. */
#include "cuda/host/pinned.h"

kernel_fn offload_cuda, offload_end_cuda, reload_cuda, reload_end_cuda;

static size_t bytes_of(const tensor *t) { return (size_t)tensor_count(t) * dtype_size(t->type); }

static status place_of(ctx *c, const call *k, size_t bytes, char **out) {
    const int64_t at = node_int(k->node, "offset");

    TRY(offload_check(c, k->room, at + (int64_t)bytes));
    *out = (char *)k->room->memory + at;
    return OK;
}

status offload_cuda(ctx *c, const call *k) {
    const size_t bytes = bytes_of(&k->in[0]);
    char *to;

    if (k->cuda->dry) return OK;
    TRY(place_of(c, k, bytes, &to));
    if (tensor_present(&k->out[0])) TRY(cuda_clear(c, k, k->out[0].data, sizeof(int64_t)));
    return pinned_write(c, k->cuda, to, k->in[0].data, bytes);
}

status offload_end_cuda(ctx *c, const call *k) {
    if (k->cuda->dry) return OK;
    if (tensor_present(&k->out[0])) TRY(cuda_clear(c, k, k->out[0].data, sizeof(int64_t)));
    return pinned_wait(c, k->cuda);
}

status reload_cuda(ctx *c, const call *k) {
    const size_t bytes = bytes_of(&k->out[0]);
    char *from;

    if (k->cuda->dry) return OK;
    TRY(place_of(c, k, bytes, &from));
    return pinned_read(c, k->cuda, k->out[0].data, from, bytes);
}

status reload_end_cuda(ctx *c, const call *k) {
    if (k->cuda->dry) return OK;
    TRY(pinned_wait(c, k->cuda));
    if (k->out[0].data == k->in[0].data) return OK;
    return cuda_copy_bytes(c, k, k->out[0].data, k->in[0].data, bytes_of(&k->out[0]));
}
