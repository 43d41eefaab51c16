/* cumulative.cu -- mirrors ops/reductions/cumulative.c: CumSum.
 *
 * A block has a lane: `length` elements, `step` apart. Each thread adds up a chunk of it; the chunks' sums are
 * added up in order; then each thread goes through its chunk again. Floats are summed in double. */
#include "cuda/kernels/kernel.h"

typedef struct scan_args {
    const void *x;
    void *y;
    int64_t lanes, length, step;
    int32_t type, exclusive, reverse;
} scan_args;

#ifdef ORT_HOST
kernel_fn cum_sum_cuda;

status cum_sum_cuda(ctx *c, const call *k) {
    static kernel of_floats = {.name = "cum_sum_floats"}, of_integers = {.name = "cum_sum_integers"};
    const shape *s = &k->in[0].shape;
    const dtype type = k->in[0].type;
    const value *where = k->node->in[1];
    scan_args a = {.x = k->in[0].data, .y = k->out[0].data, .type = type};
    int axis;

    TRY(shape_axis(c, dtype_get_int(where->type, where->data, 0), s->rank, &axis)); /* a constant: infer_cum_sum */
    if (shape_count(s) == 0) return OK;
    a.length = s->rank ? s->dim[axis] : 1;
    a.step = s->rank ? shape_span(s, axis + 1, s->rank) : 1;
    a.lanes = shape_count(s) / a.length;
    a.exclusive = node_int(k->node, "exclusive") != 0;
    a.reverse = node_int(k->node, "reverse") != 0;
    return cuda_launch(c, k, dtype_is_float(type) ? &of_floats : &of_integers, geometry_rows(a.lanes, a.length), &a);
}
#endif

#ifdef ORT_DEVICE
#include "cuda/kernels/chunks.h"

/* Integers wrap around. int32 stays what it is, narrower ones become int64. */
DEVICE uint64_t read_integer(const scan_args *a, int64_t i) { return (uint64_t)integer_at(a->x, a->type, i); }
DEVICE void write_integer(const scan_args *a, int64_t i, uint64_t sum) {
    if (a->type == I32) ((int32_t *)a->y)[i] = (int32_t)(uint32_t)sum;
    else ((int64_t *)a->y)[i] = (int64_t)sum;
}
DEVICE double read_float(const scan_args *a, int64_t i) { return number_f64(a->x, a->type, i); }
DEVICE void write_float(const scan_args *a, int64_t i, double sum) { set_number(a->y, a->type, i, sum); }

#define ARGS scan_args
#define START 0
#define JOIN(total, x) ((total) + (x))
#define PLACE(i) (a.reverse ? a.length - 1 - (i) : (i))

#define SCAN cum_sum_floats
#define A double
#define READ read_float
#define WRITE(args, at, before, total) write_float(args, at, (args)->exclusive ? (before) : (total))
#include "cuda/kernels/lane_scan.h"
#undef A

#define SCAN cum_sum_integers
#define A uint64_t
#define READ read_integer
#define WRITE(args, at, before, total) write_integer(args, at, (args)->exclusive ? (before) : (total))
#include "cuda/kernels/lane_scan.h"
#endif
