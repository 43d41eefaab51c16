/* cumulative.cu -- twin of ops/reductions/cumulative.c: CumSum.
 *
 * A block has a lane: `length` elements, `inner` apart. Each thread adds up a stretch of it; the stretches' sums are
 * added up in order; then each thread goes through its stretch again. Floats are summed in double. */
#include "cuda/kernels/kernel.h"

typedef struct scan_args {
    const void *x;
    void *y;
    int64_t lanes, length, inner;
    int32_t type, exclusive, reverse;
} scan_args;

#ifdef ORT_HOST
kernel_fn cum_sum_cuda;

status cum_sum_cuda(ctx *c, const call *k) {
    static kernel of_floats = {.name = "cum_sum_float"}, of_integers = {.name = "cum_sum_integer"};
    const shape *s = &k->in[0].shape;
    const dtype type = k->in[0].type;
    const value *where = k->node->in[1];
    scan_args a = {.x = k->in[0].data, .y = k->out[0].data, .type = type};
    int axis;

    TRY(shape_axis(c, dtype_get_int(where->type, where->data, 0), s->rank, &axis)); /* a constant: infer_cum_sum */
    if (shape_count(s) == 0) return OK;
    a.length = s->rank ? s->dim[axis] : 1;
    a.inner = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    a.lanes = shape_count(s) / a.length;
    a.exclusive = node_int(k->node, "exclusive") != 0;
    a.reverse = node_int(k->node, "reverse") != 0;
    return cuda_launch(c, k, dtype_is_float(type) ? &of_floats : &of_integers, geometry_rows(a.lanes, a.length), &a);
}
#endif

#ifdef ORT_DEVICE
/* Integers wrap around. int32 stays what it is, narrower ones become int64. */
DEVICE uint64_t read_integer(const scan_args *a, int64_t i) { return (uint64_t)integer_at(a->x, a->type, i); }
DEVICE void write_integer(const scan_args *a, int64_t i, uint64_t sum) {
    if (a->type == I32) ((int32_t *)a->y)[i] = (int32_t)(uint32_t)sum;
    else ((int64_t *)a->y)[i] = (int64_t)sum;
}
DEVICE double read_float(const scan_args *a, int64_t i) { return number_f64(a->x, a->type, i); }
DEVICE void write_float(const scan_args *a, int64_t i, double sum) { set_number(a->y, a->type, i, sum); }

#define CUM_SUM(name, A, READ, WRITE)                                                                                  \
    KERNEL(name, scan_args) {                                                                                          \
        SHARED(A, sums, MOST_SCANNED);                                                                                 \
        const int64_t begin = a.length * threadIdx.x / blockDim.x, end = a.length * (threadIdx.x + 1) / blockDim.x;    \
        FOR_BLOCKS(lane, a.lanes) {                                                                                    \
            const int64_t start = lane / a.inner * a.length * a.inner + lane % a.inner;                                \
            A sum = 0;                                                                                                 \
            for (int64_t i = begin; i < end; i++)                                                                      \
                sum += READ(&a, start + (a.reverse ? a.length - 1 - i : i) * a.inner);                                 \
            __syncthreads();                                                                                           \
            sums[threadIdx.x] = sum;                                                                                   \
            __syncthreads();                                                                                           \
            sum = 0;                                                                                                   \
            for (unsigned t = 0; t < threadIdx.x; t++) sum += sums[t];                                                 \
            for (int64_t i = begin; i < end; i++) {                                                                    \
                const int64_t at = start + (a.reverse ? a.length - 1 - i : i) * a.inner;                               \
                const A before = sum;                                                                                  \
                sum += READ(&a, at);                                                                                   \
                WRITE(&a, at, a.exclusive ? before : sum);                                                             \
            }                                                                                                          \
        }                                                                                                              \
    }
enum { MOST_SCANNED = 512 };
CUM_SUM(cum_sum_float, double, read_float, write_float)
CUM_SUM(cum_sum_integer, uint64_t, read_integer, write_integer)
#endif
