/* create.cu -- mirrors ops/movement/create.c: Range, EyeLike; and of Trilu in ops/movement/movement.c. */
#include "cuda/kernels/kernel.h"

typedef struct range_args {
    const void *start, *delta; /* one number each */
    void *out;
    int64_t count;
    int32_t type;
} range_args;

typedef struct triangle_args {
    const void *from;     /* NULL: ones */
    const int64_t *shift; /* where the diagonal is; NULL: at `at` */
    void *to;
    int64_t count, rows, cols, at;
    int32_t type, upper, lower; /* which side of the diagonal is kept; it is kept itself */
} triangle_args;

#ifdef ORT_HOST
kernel_fn range_cuda, eye_cuda, trilu_cuda;

status range_cuda(ctx *c, const call *k) {
    static kernel of_floats = {.name = "range_floats"}, of_integers = {.name = "range_integers"};
    const dtype type = k->in[0].type;
    range_args a = {k->in[0].data, k->in[2].data, k->out[0].data, tensor_count(&k->out[0]), type};
    return cuda_launch(c, k, dtype_is_float(type) ? &of_floats : &of_integers, geometry_over(a.count, 256, 256), &a);
}

static status triangle(ctx *c, const call *k, triangle_args a) {
    static kernel kernels[] = {[1] = {"triangle_1"}, [2] = {"triangle_2"}, [4] = {"triangle_4"}, [8] = {"triangle_8"}};
    const tensor *y = &k->out[0];

    a.to = y->data;
    a.count = tensor_count(y);
    a.rows = y->shape.dim[y->shape.rank - 2];
    a.cols = y->shape.dim[y->shape.rank - 1];
    a.type = y->type;
    return cuda_launch(c, k, &kernels[dtype_size(y->type)], geometry_over(a.count, 256, 256), &a);
}

status eye_cuda(ctx *c, const call *k) { return triangle(c, k, (triangle_args){.at = node_int(k->node, "k")}); }

status trilu_cuda(ctx *c, const call *k) {
    const bool upper = node_int(k->node, "upper") != 0;
    triangle_args a = {.from = k->in[0].data, .upper = upper, .lower = !upper};
    if (k->n_in > 1 && tensor_present(&k->in[1])) a.shift = k->in[1].data;
    return triangle(c, k, a);
}
#endif

#ifdef ORT_DEVICE
KERNEL(range_floats, range_args) {
    const double from = number_f64(a.start, a.type, 0), by = number_f64(a.delta, a.type, 0);
    FOR_EACH(i, a.count) set_number(a.out, a.type, i, from + (double)i * by);
}

KERNEL(range_integers, range_args) {
    const int64_t from = integer_at(a.start, a.type, 0), by = integer_at(a.delta, a.type, 0);
    FOR_EACH(i, a.count) set_integer(a.out, a.type, i, from + i * by);
}

/* The bits of 1. */
DEVICE uint64_t one_of(int type) {
    return type == F32    ? 0x3f800000u
           : type == F64  ? (uint64_t)0x3ff << 52
           : type == BF16 ? 0x3f80u
           : type == F16  ? 0x3c00u
                          : 1u;
}

/* The diagonal is where column - row is `shift`; a shift may be any number. */
#define TRIANGLE(name, T)                                                                                              \
    KERNEL(name, triangle_args) {                                                                                      \
        const int64_t far = a.rows + a.cols, given = a.shift ? *a.shift : a.at;                                        \
        const int64_t shift = given > far ? far : given < -far ? -far : given;                                         \
        FOR_EACH(i, a.count) {                                                                                         \
            const int64_t off = i % a.cols - i / a.cols % a.rows - shift;                                              \
            const int is_kept = off == 0 || (off > 0 ? a.upper : a.lower);                                             \
            ((T *)a.to)[i] = !is_kept ? (T)0 : a.from ? ((const T *)a.from)[i] : (T)one_of(a.type);                    \
        }                                                                                                              \
    }
TRIANGLE(triangle_1, uint8_t)
TRIANGLE(triangle_2, uint16_t)
TRIANGLE(triangle_4, uint32_t)
TRIANGLE(triangle_8, uint64_t)
#endif
