/* host_call.c -- mirrors ops/host_call.c: nodes that the host runs, on memory of a GPU.
 *
 * The host works on the stream of the run, so what came before is there when it begins, and what follows waits. */
#include "cuda/host/driver.h"
#include "graph/host.h"

#include <string.h>

kernel_fn host_cuda;

status host_cuda(ctx *c, const call *k) {
    const bool has_token = strcmp(k->node->op->name, "HostGrad") != 0 && tensor_present(&k->out[0]);

    if (k->cuda->dry) return OK;
    if (!k->host) return fail(c, E_UNSUPPORTED, "this run has no host to run a Python function");
    if (has_token) TRY(cuda_clear(c, k, k->out[0].data, sizeof(int64_t)));
    return k->host->run(k->host, c, k);
}
