/* topk.cu -- mirrors ops/reductions/topk.c: a block sorts a lane by its keys in a network of exchanges (Batcher 1968).
 *
 * The network's order of work depends on the length alone. Lengths are filled up to a power of two with what comes
 * last. A block has memory for one lane; blocks stride over what lanes there are. */
#include "cuda/kernels/kernel.h"

typedef struct candidate {
    uint64_t key;
    int64_t index;
} candidate;

typedef struct top_k_args {
    const void *x;
    void *values;
    int64_t *indices;
    candidate *work; /* [blocks, padded] */
    int64_t lanes, k, size, inner, padded;
    int32_t type, bytes, smallest;
} top_k_args;

#ifdef ORT_HOST
kernel_fn top_k_cuda;
size_t top_k_cuda_workspace(const node *n);

enum { BLOCKS = 256 };

static top_k_args args_of(const node *n) {
    const shape *x = &n->in[0]->shape, *y = &n->out[0]->shape;
    int64_t axis = node_int(n, "axis");
    top_k_args a = {.k = 1, .size = 1, .inner = 1, .padded = 2, .smallest = node_int(n, "largest") == 0};

    if (x->rank) {
        if (axis < 0) axis += x->rank;
        a.k = y->dim[axis];
        a.size = x->dim[axis];
        a.inner = shape_span(x, (int)axis + 1, x->rank);
    }
    while (a.padded < a.size) a.padded *= 2;
    a.lanes = a.k ? shape_count(y) / a.k : 0;
    return a;
}

static int64_t blocks_of(const top_k_args *a) { return a->lanes < BLOCKS ? a->lanes : BLOCKS; }

size_t top_k_cuda_workspace(const node *n) {
    const top_k_args a = args_of(n);
    return (size_t)(blocks_of(&a) * a.padded) * sizeof(candidate);
}

status top_k_cuda(ctx *c, const call *k) {
    static kernel sort = {.name = "top_k"};
    top_k_args a = args_of(k->node);
    geometry g = geometry_rows(a.lanes, a.padded / 2);

    a.x = k->in[0].data;
    a.type = k->in[0].type;
    a.bytes = (int32_t)dtype_size(k->in[0].type);
    if (tensor_present(&k->out[0])) a.values = k->out[0].data;
    if (k->n_out > 1 && tensor_present(&k->out[1])) a.indices = k->out[1].data;
    a.work = k->work;
    g.blocks = blocks_of(&a);
    return cuda_launch(c, k, &sort, g, &a);
}
#endif

#ifdef ORT_DEVICE
DEVICE uint64_t order_key(int type, const void *data, int64_t i) {
    const uint64_t sign = (uint64_t)1 << 63;
    union {
        double f;
        uint64_t u;
    } v;

    if (type != F32 && type != F64 && type != BF16 && type != F16) return (uint64_t)integer_at(data, type, i) ^ sign;
    v.f = number_f64(data, type, i) + 0.0; /* -0 becomes 0 */
    if (v.f != v.f) return UINT64_MAX;
    return v.u & sign ? ~v.u : v.u | sign;
}

DEVICE int comes_before(candidate a, candidate b) { return a.key != b.key ? a.key > b.key : a.index < b.index; }

DEVICE void copy_element(void *to, int64_t i, const void *from, int64_t j, int bytes) {
    if (bytes == 8) ((uint64_t *)to)[i] = ((const uint64_t *)from)[j];
    else if (bytes == 4) ((uint32_t *)to)[i] = ((const uint32_t *)from)[j];
    else if (bytes == 2) ((uint16_t *)to)[i] = ((const uint16_t *)from)[j];
    else ((uint8_t *)to)[i] = ((const uint8_t *)from)[j];
}

KERNEL(top_k, top_k_args) {
    candidate *sorted = a.work + blockIdx.x * a.padded;

    FOR_BLOCKS(lane, a.lanes) {
        const int64_t from = LANE_START(lane, a.size, a.inner);
        const int64_t to = LANE_START(lane, a.k, a.inner);

        FOR_THREADS(i, a.padded) {
            candidate x = {0, INT64_MAX};
            if (i < a.size) {
                const uint64_t key = order_key(a.type, a.x, from + i * a.inner);
                x.key = a.smallest ? ~key : key;
                x.index = i;
            }
            sorted[i] = x;
        }
        for (int64_t width = 2; width <= a.padded; width *= 2)
            for (int64_t step = width / 2; step > 0; step /= 2) {
                __syncthreads();
                FOR_THREADS(pair, a.padded / 2) {
                    const int64_t i = pair / step * 2 * step + pair % step;
                    const candidate x = sorted[i], y = sorted[i + step];
                    if (comes_before(y, x) == ((i & width) == 0)) {
                        sorted[i] = y;
                        sorted[i + step] = x;
                    }
                }
            }
        __syncthreads();
        FOR_THREADS(i, a.k) {
            const int64_t index = sorted[i].index, at = to + i * a.inner;
            if (a.values) copy_element(a.values, at, a.x, from + index * a.inner, a.bytes);
            if (a.indices) a.indices[at] = index;
        }
        __syncthreads();
    }
}
#endif
