/* nonzero.cu -- mirrors ops/movement/nonzero.c: how many elements are not 0, and where. A block goes through them, in
 * chunks. */
#include "cuda/kernels/chunks.h"
#include "cuda/kernels/kernel.h"

typedef struct nonzero_args {
    const void *x;
    int64_t *out;
    int64_t total, count, dim[8];
    int32_t type, rank, node;
    cuda_fault *fault;
} nonzero_args;

#ifdef ORT_HOST
kernel_fn nonzero_count_cuda, nonzero_sized_cuda;

static nonzero_args args_of(const call *k) {
    const shape *s = &k->in[0].shape;
    nonzero_args a = {.x = k->in[0].data, .out = k->out[0].data, .total = shape_count(s), .type = k->in[0].type};

    a.rank = s->rank;
    for (int d = 0; d < s->rank; d++) a.dim[d] = s->dim[d];
    a.node = cuda_named(k->node);
    a.fault = k->cuda->fault;
    return a;
}

status nonzero_count_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "nonzero_count"};
    const nonzero_args a = args_of(k);
    return cuda_launch(c, k, &f, (geometry){1, CHUNKS}, &a);
}

status nonzero_sized_cuda(ctx *c, const call *k) {
    static kernel f = {.name = "nonzero_sized"};
    nonzero_args a = args_of(k);
    a.count = node_int(k->node, "count");
    return cuda_launch(c, k, &f, (geometry){1, CHUNKS}, &a);
}
#endif

#ifdef ORT_DEVICE
DEVICE int is_set(const nonzero_args *a, int64_t i) {
    return a->type <= F16 ? number_f64(a->x, a->type, i) != 0 : integer_at(a->x, a->type, i) != 0;
}

DEVICE int64_t count_chunk(const nonzero_args *a, int64_t begin, int64_t end) {
    int64_t n = 0;
    for (int64_t i = begin; i < end; i++) n += is_set(a, i);
    return n;
}

KERNEL(nonzero_count, nonzero_args) {
    int64_t all;
    (void)sum_before(count_chunk(&a, own_begin(a.total), own_end(a.total)), &all);
    if (threadIdx.x == 0) *a.out = all;
}

/* What is found beyond the places there are room for is left out, and reported. */
KERNEL(nonzero_sized, nonzero_args) {
    const int64_t begin = own_begin(a.total), end = own_end(a.total);
    int64_t found, all;

    FOR_THREADS(i, a.count * a.rank) a.out[i] = 0;
    found = sum_before(count_chunk(&a, begin, end), &all);
    if (all != a.count && threadIdx.x == 0) report(a.fault, FAULT_COUNT, a.node, all, a.count);
    for (int64_t i = begin; i < end; i++) {
        int64_t rest = i;
        if (!is_set(&a, i)) continue;
        for (int d = a.rank - 1; d >= 0 && found < a.count; d--) {
            a.out[d * a.count + found] = rest % a.dim[d];
            rest /= a.dim[d];
        }
        found++;
    }
}
#endif
